"""Numbers that go from the host to a device, and back, without either waiting for the other."""

import functools
from collections.abc import Sequence

import torch


def pinned_for(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, of the CPU's memory, in pinned memory where `device` copies from there alone without blocking the host.

    A copy to CUDA from other memory goes by way of memory that is pinned, and may wait for the stream before.
    """
    return tensor.pin_memory() if _copies_from_pinned(device.type) else tensor


def to_copy(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """These values on the host, float32, for `device` to copy."""
    on_host = torch.tensor(values, dtype=torch.float32, device="cpu")
    return on_host if device.type == "cpu" else pinned_for(device, on_host)


@functools.cache
def _copies_from_pinned(kind: str) -> bool:
    """Whether torch itself pins memory for copies between the host and devices of this kind."""
    if kind == "cpu":
        return False
    number = torch.empty(1, dtype=torch.float32, device=kind)
    return number.to("cpu", non_blocking=True).is_pinned()


class LateRows:
    """Rows of a device, which the host reads when it asks the next time: a read at once would stall a GPU in each step.

    They are copied to the host behind the kernels that have been launched so far.
    """

    def __init__(self) -> None:
        self.copied: torch.Tensor | None = None  # what is still to be read
        self._ready: torch.Event | None = None

    def copy(self, rows: Sequence[torch.Tensor], device: torch.device) -> None:
        """Begin to copy these, of one length, by `device`; a row of another device goes there first."""
        together = torch.stack([row.to(device, non_blocking=True) for row in rows])
        self.copied = together.to("cpu", non_blocking=True)
        self._ready = torch.Event(device)
        self._ready.record(torch.accelerator.current_stream(device))

    def take(self) -> list[list[float]]:
        """What was copied, once."""
        if self.copied is None or self._ready is None:
            return []
        self._ready.synchronize()
        rows: list[list[float]] = self.copied.tolist()
        self.copied = None
        return rows
