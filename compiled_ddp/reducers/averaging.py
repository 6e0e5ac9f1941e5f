"""Every factor between a gradient that hooks reduce and its mean over ranks.

gradient -> times its share, into its bucket -> times `before` -> sum over ranks -> times `after`
         -> over the sum of the weights -> times what `join` corrects -> .grad

Without a `Scaling` nothing is done around the sum; riders are never scaled. In a graph the passes place the mean.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from compiled_ddp.plan import WEIGHT, BucketPlan

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Scaling:
    """What is done to a bucket around its all-reduce, in place of the plain mean."""

    before: float
    after: float = 1.0
    in_float32: bool = False  # whether float16 and bfloat16 are scaled and summed in float32

    def share(self, dtype: torch.dtype) -> float:
        """The factor with which a gradient of `dtype` is copied into its bucket."""
        return 1.0 if self._widens(dtype) else self.before

    @torch.no_grad()
    def outgoing(self, flat_buffer: torch.Tensor) -> torch.Tensor:
        """What is summed over ranks in place of a filled `flat_buffer`: a float32 copy, or the buffer itself."""
        return flat_buffer.float().mul_(self.before) if self._widens(flat_buffer.dtype) else flat_buffer

    @torch.no_grad()
    def bring_back(self, summed: torch.Tensor, gradients: torch.Tensor) -> None:
        """Leave in `gradients`, a flat buffer without its riders, what .grad shall be; `summed` was its `outgoing`."""
        if self._widens(gradients.dtype):
            gradients.copy_(summed.mul_(self.after))
        elif self.after != 1.0:
            gradients.mul_(self.after)

    def _widens(self, dtype: torch.dtype) -> bool:
        return self.in_float32 and dtype in _LOW_PRECISION


class Averaging:
    """The factors of one backward."""

    def __init__(
        self, plan: BucketPlan, *, weight: float = 1.0, scaling: Scaling | None = None, correction: float = 1.0
    ) -> None:
        """`weight` is this rank's in a weighted mean, `correction` what a mean over all ranks is multiplied by."""
        self.correction = correction
        self._weighted, self._summed = plan.reduction == "weighted", plan.reduction == "sum"
        self._share = plan.share * (weight if self._weighted else 1.0)
        # Then this rank sends zeros, whatever its gradients are: a mean over no tokens is not a number.
        self.has_no_weight = self._share == 0.0
        self._of_other_ranks = 1.0 - 1.0 / plan.world_size
        self._scaling = scaling
        self.needs_parts = self._summed  # of a gradient: what `still_to_reduce` is told
        self.changes_sums = scaling is not None or self._weighted  # whether they are not yet what .grad shall be

    def share(self, dtype: torch.dtype) -> float:
        """The factor with which a gradient of `dtype` is put into its bucket."""
        return self._share if self._scaling is None else self._scaling.share(dtype)

    def still_to_reduce(self, gradient: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
        """The part of a gradient to reduce where another part, `reduced` before, is the same on every rank.

        A mean leaves that part as it is; to a sum each rank brings an equal share of it.
        """
        return gradient - reduced * self._of_other_ranks if self._summed else gradient

    def outgoing(self, flat_buffer: torch.Tensor) -> torch.Tensor:
        """What is summed over ranks in place of a filled `flat_buffer`."""
        return flat_buffer if self._scaling is None else self._scaling.outgoing(flat_buffer)

    @torch.no_grad()
    def conclude(self, summed: torch.Tensor, gradients: torch.Tensor, riders: Callable[[], torch.Tensor]) -> None:
        """Leave the mean in `gradients`, a flat buffer without its riders; `summed` was its `outgoing`.

        `riders` gives the summed riders. Without any weight the mean is zero.
        """
        if self._scaling is not None:
            self._scaling.bring_back(summed, gradients)
        elif self._weighted:
            weights = riders()[WEIGHT].to(gradients.device, torch.float64)  # for gradients that are float64 too
            gradients.mul_(torch.where(weights > 0, 1.0 / weights, 0.0))

    def share_of_all(self, riders: Callable[[], torch.Tensor]) -> float:
        """The factor of this rank's gradients in the result. Reads from the device in a weighted mean."""
        if not self._weighted:
            return self._share
        weights = float(riders()[WEIGHT])
        return self._share / weights if weights > 0 else 0.0

    @property
    def share_brought(self) -> float:
        """The factor of a gradient in what is summed over ranks, and done to the sum."""
        return self._share if self._scaling is None else self._scaling.before * self._scaling.after

    def sum_over_result(self, riders: Callable[[], torch.Tensor]) -> float:
        """What a result is to be multiplied by to be the sum of what ranks bring. Reads in a weighted mean."""
        weights = float(riders()[WEIGHT]) if self._weighted else 1.0
        return weights if weights > 0 else 1.0

    def correct(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Make means over all ranks those over the ranks that still have data: where `correction` is not 1."""
        with torch.no_grad():
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(self.correction)
