"""What hooks reduce although a graph was wanted, told once."""

from collections.abc import Sequence

from compiled_ddp.users_code import warn_user

FROZEN = "the parameter was frozen between forward and backward, so that on this rank it counts as zero"
DOES_NOT_FIT = "the graph does not fit the agreed sequence of this backward"


class Fallback:
    def __init__(self, *, strict: bool) -> None:
        """With `strict` there is none: what would be one is an error."""
        self._strict = strict
        self._reasons: set[str] = set()

    def report(self, reason: str, names: str) -> None:
        """Warn, once for each reason, that hooks reduce the parameters of these `names`; raise if `strict`."""
        message = f"gradients of {names} are reduced by hooks: {reason}."
        if self._strict:
            raise RuntimeError(f"{message} compile_ddp(strict=True) does not fall back.")
        if reason not in self._reasons:
            self._reasons.add(reason)
            warn_user(message)

    @property
    def reasons(self) -> Sequence[str]:
        return sorted(self._reasons)
