"""Numbers that a wrapper's users send along with the gradients: weights of ranks, and what is summed over them."""

import torch

from compiled_ddp import torch_private
from compiled_ddp.plan import ReductionKind
from compiled_ddp.wrapping.parts import HasParts
from compiled_ddp.wrapping.piggyback import as_passengers, as_weight


class SendsNumbers(HasParts):
    """The part of a wrapper that is about them."""

    @property
    def reduction(self) -> ReductionKind:
        """What a synchronised backward makes of the ranks' gradients."""
        return self._settings.options.reduction

    @torch_private.dynamo.untraced
    def set_weight(self, weight: float) -> None:
        """This rank's weight in the mean over ranks, from the next synchronised backward on; 1 before the first call.

            ddp = compile_ddp(model, reduction="weighted")
            loss = ddp(x, y)  # a mean over this rank's tokens
            ddp.set_weight(number_of_tokens)
            loss.backward()  # .grad is the mean over all ranks' tokens

        With weights w and gradients g, each .grad becomes sum(w g) / sum(w), or zero where no rank has a weight. The
        weight travels with the gradients, in a collective that is there anyway. It applies to all that a backward
        reduces, also to what was accumulated under `no_sync()`. A rank in `skip_step()` that has accumulated nothing
        has the weight 0.

        Raises, on this rank, ValueError for a weight that is negative or that float32 cannot hold (one that is not
        finite there, or that becomes zero; 0 itself is allowed), TypeError for what is no number, RuntimeError without
        `reduction="weighted"`.
        """
        if self.reduction != "weighted":
            raise RuntimeError(
                f'set_weight() has no effect on reduction="{self.reduction}": pass reduction="weighted" to the wrapper.'
            )
        ranks = self._runtime.communicator.ranks
        self._runtime.weigh(as_weight(weight, rank=ranks.ranks[ranks.rank], world_size=ranks.world_size))

    @torch_private.dynamo.untraced
    def piggyback(self, **values: float | torch.Tensor) -> None:
        """Send numbers along with the gradients of the next synchronised backward, to be summed over ranks.

            ddp = compile_ddp(model, piggyback=("loss", "tokens"))
            ddp.piggyback(loss=loss.detach(), tokens=y.numel())
            loss.backward()
            mean_loss = ddp.piggybacked["loss"] / world_size

        Numbers or tensors of one element, which travel as float32, without a collective of their own; what is not
        given counts as zero. A rank that skips the step may send them too.

        Raises, on this rank, ValueError for a name that the wrapper was not made with and for a number that float32
        cannot hold, TypeError for what is no number.
        """
        ranks, names = self._runtime.communicator.ranks, self._settings.options.piggyback
        passengers = as_passengers(values, names, device=self.device, rank=ranks.ranks[ranks.rank])
        self._runtime.board(passengers)

    @property
    def piggybacked(self) -> dict[str, torch.Tensor]:
        """The sums over ranks that the last synchronised backward brought, scalars on the parameters' device.

        Empty before the first one.
        """
        carried = self._runtime.carried
        return {} if carried is None else dict(zip(self._settings.options.piggyback, carried.unbind(), strict=True))
