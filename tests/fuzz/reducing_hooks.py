"""Communication hooks that leave the mean as it is, or round it."""

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from compiled_ddp.comm_hooks import Ranks, fp32_reduce


def plain(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return ranks.all_reduce(gradients) / ranks.size


def gathered(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return ranks.all_gather(gradients).view(ranks.size, -1).sum(0) / ranks.size


# Passed as comm_hook=, and registered by register_comm_hook.
TRACED: dict[str, Any] = {"plain": plain, "gathered": gathered, "fp32": fp32_reduce}
TORCH: dict[str, Any] = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
TOLERANCES = {"fp16": 0.004}  # 11 bits, of a sum that is rounded once more
