"""Numbers of the user's that travel with the gradients, as float32: weights of ranks, and what is summed over them."""

import numbers
from collections.abc import Mapping, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.plan import ReductionKind
from compiled_ddp.reducers.weights import FLOAT32, as_float, as_weight
from compiled_ddp.step.riders import pinned_for
from compiled_ddp.wrapping.parts import HasParts


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
        self._runtime.reduction.carried.set_weight(
            as_weight(weight, taker=f"rank {ranks.ranks[ranks.rank]}: set_weight()", world_size=ranks.world_size)
        )

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
        self._runtime.reduction.carried.set_piggyback(passengers)

    @property
    def piggybacked(self) -> dict[str, torch.Tensor]:
        """The sums over ranks that the last synchronised backward brought, scalars on the parameters' device.

        Empty before the first one.
        """
        carried = self._runtime.reduction.carried.piggybacked
        return {} if carried is None else dict(zip(self._settings.options.piggyback, carried.unbind(), strict=True))


def as_passengers(
    values: Mapping[str, object], names: Sequence[str], *, device: torch.device, rank: int
) -> torch.Tensor:
    """What `piggyback` was given, shape (len(names),) on `device`; zero for a name that is not given.

    Raises ValueError for a name that is none of `names`, or a number that float32 makes infinite, TypeError for what is
    no number. A tensor is looked at on the CPU alone.
    """
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ValueError(
            f"rank {rank}: {unknown[0]!r} is not among the names that the wrapper was made with: piggyback={names}."
        )
    elements = [_as_element(name, values.get(name, 0.0), rank) for name in names]
    ready = [pinned_for(device, element) if element.is_cpu else element for element in elements]
    return torch.stack([element.to(device, non_blocking=True) for element in ready])


def _as_element(name: str, value: object, rank: int) -> torch.Tensor:
    """A float32 scalar, on the device that a tensor is on."""
    where = f"rank {rank}: piggyback({name}=...) takes"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.layout != torch.strided or value.is_meta:
            shape = f"{value.dtype} tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{where} a number or a tensor of one real element, found a {shape} on {value.device}.")
        given = value.detach().reshape(())
    elif isinstance(value, numbers.Real):
        given = torch.tensor(as_float(value), dtype=torch.float64, device="cpu")
    else:
        raise TypeError(f"{where} a number or a tensor of one real element, found {value!r}.")
    element = given.to(torch.float32)
    if element.is_cpu and element.isinf() and not (isinstance(value, float | torch.Tensor) and given.isinf()):
        raise ValueError(f"{where} what float32 can hold, up to {FLOAT32.max:.2g}, found {value!r}.")
    return element
