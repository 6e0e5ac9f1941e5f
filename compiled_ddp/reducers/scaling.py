"""What is done to a bucket around its all-reduce, where that is not the plain mean. For buckets that hooks launch."""

from dataclasses import dataclass

import torch

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Scaling:
    """gradient -> times `before` -> sum over ranks -> times `after` -> .grad

    Riders are never scaled.
    """

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
