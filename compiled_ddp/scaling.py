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

    def outgoing(self, flat_buffer: torch.Tensor) -> torch.Tensor:
        """What is summed over ranks in place of a filled `flat_buffer`: a float32 copy, or the buffer itself."""
        return flat_buffer.float().mul_(self.before) if self._widens(flat_buffer.dtype) else flat_buffer

    def bring_back(self, summed: torch.Tensor, flat_buffer: torch.Tensor, gradient_elements: int) -> None:
        """Leave in `flat_buffer`'s first `gradient_elements` what .grad shall be; `summed` was its `outgoing`."""
        gradients = summed.narrow(0, 0, gradient_elements)
        if self.after != 1.0:
            gradients.mul_(self.after)
        if summed is not flat_buffer:
            flat_buffer.narrow(0, 0, gradient_elements).copy_(gradients)

    def _widens(self, dtype: torch.dtype) -> bool:
        return self.in_float32 and dtype in _LOW_PRECISION
