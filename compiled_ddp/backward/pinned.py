"""Numbers of the host that a device copies by itself, without either waiting for the other."""

import functools

import torch


def pinned_for(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, of the CPU's memory, in pinned memory where `device` copies from there alone without blocking the host.

    A copy to CUDA from other memory goes by way of memory that is pinned, and may wait for the stream before.
    """
    return tensor.pin_memory() if _copies_from_pinned(device.type) else tensor


@functools.cache
def _copies_from_pinned(kind: str) -> bool:
    """Whether torch itself pins memory for copies between the host and devices of this kind."""
    if kind == "cpu":
        return False
    number = torch.empty(1, dtype=torch.float32, device=kind)
    return number.to("cpu", non_blocking=True).is_pinned()
