"""What becomes of a wrapper, from its construction on.

| from | by | to |
|---|---|---|
| in use | `unwrap()` | unwrapped |
| in use | its module being wrapped once more | replaced |
| | `copy.deepcopy`, of one in use or a copy | a copy |
| a copy | `unwrap()` | unwrapped |
"""

import enum


class Lifecycle(enum.Enum):
    """`IN_USE` and `COPY` run forwards; only the first one reduces."""

    IN_USE = "in use"
    UNWRAPPED = "unwrapped"
    REPLACED = "replaced"
    COPY = "copy"

    def why_not_in_use(self, wrapper: str) -> str:
        """What is said where one that is not in use is asked for more than it can do; `wrapper` is its class's name."""
        return _WHY[self].format(wrapper=wrapper)

    def why_no_backward(self, wrapper: str) -> str:
        """What is said in the backward of a forward that was called while it was in use."""
        return (
            f"the {wrapper} of this backward's forward has been {self.value} since, and nothing would reduce the "
            "gradients. Run the forward again, on the wrapper that is in use now."
        )


_WHY = {
    Lifecycle.UNWRAPPED: ("this wrapper has been unwrapped: use the module that unwrap() returned, or wrap it again."),
    Lifecycle.REPLACED: (
        "this {wrapper} was closed when its module was wrapped once more, as by unwrap(): use the wrapper that was "
        "made then."
    ),
    Lifecycle.COPY: (
        "this {wrapper} is a copy, which other ranks know nothing of: it evaluates, is saved, is averaged into, "
        "and runs backwards of forwards under no_sync(), but takes part in nothing that ranks do together, and has no "
        "plan. To train it, wrap its .module on every rank; to evaluate it, use torch.no_grad()."
    ),
}
