"""Collectives of the model's own: whether there are any, in its forward or its backward.

[Note: models that communicate] Ranks meet in such a model's own collectives, in the middle of its backward
(SyncBatchNorm in eager code, experts that exchange tokens). A graph waits there too, for what other ranks launch. A
rank that launches it later, as it runs other parts of the model, would come to the model's collective first, and both
would wait for ever. So the ranks of such a wrapper begin each backward by telling each other whether they will run the
graphs of their sequence, all of them and in its order. If one will not, hooks reduce everything, which wait for nothing
before the backward ends. And the sequence has its graphs first, so that no graph waits for gradients of eager code.
"""

from compiled_ddp import torch_private


class ModelsCollectives:
    """Compares counts of collectives, on all process groups but those of this package."""

    def __init__(self) -> None:
        self.seen = False
        self._looks = True
        self._before = 0

    def begin(self) -> None:
        """The model's forward or backward begins."""
        if self._looks:
            self._before = torch_private.groups.collectives_of_others()

    def end(self) -> None:
        if self._looks:
            self.seen = torch_private.groups.collectives_of_others() != self._before
            self._looks = not self.seen

    def stop_looking(self) -> None:
        """A communication hook of torch's kind is registered: its collectives would count as the model's, and no graph
        launches anything any more."""
        self._looks = False
