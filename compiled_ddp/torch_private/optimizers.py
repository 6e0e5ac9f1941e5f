"""What torch.optim's own `step()` does besides computing."""

from collections.abc import Sequence

import torch
from torch import Tensor


def note_step(optimizer: torch.optim.Optimizer, steps: Sequence[Tensor]) -> None:
    """Count it in `steps`, the state's own, and let schedulers know of it: they warn where none has been taken."""
    if steps:
        torch._foreach_add_([*steps], 1.0)
    optimizer._opt_called = True  # type: ignore[attr-defined]
