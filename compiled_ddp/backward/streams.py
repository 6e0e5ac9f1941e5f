"""The order of what several streams of a GPU do to one tensor; nothing to do on a CPU."""

import contextlib

import torch


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """In here `stream` is the current one; nothing changes where there are none."""
    return contextlib.nullcontext() if stream is None else stream


class Writers:
    """The streams on which the parts of a tensor are written, each part by itself, before all of it is read.

    Autograd runs each node on the stream of its forward, and a hook with it, while a collective is ordered behind the
    stream alone that it is launched from. torch's Reducer keeps the AccumulateGrad nodes and so their one stream; here
    users may run parts of a model on streams of their own. Whoever else than its maker uses the tensor is recorded, as
    its memory goes back to its maker's when it is freed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """The current stream has made it."""
        self._tensor, self._device = tensor, tensor.device
        device = tensor.device
        self._maker = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self.have_streams = self._maker is not None
        self._writing = set() if self._maker is None else {self._maker}  # since the tensor was last read
        self._behind_maker = set(self._writing)

    def here(self) -> torch.Stream | None:
        """The current stream, None where there are none."""
        return None if self._maker is None else torch.accelerator.current_stream(self._device)

    def before_write(self) -> None:
        """Note that the current stream writes, behind what has made the tensor."""
        if self._maker is None:
            return
        here = torch.accelerator.current_stream(self._device)
        if here not in self._behind_maker:
            here.wait_stream(self._maker)
            self._record(here)
        self._writing.add(here)

    def before_read(self) -> None:
        """Let the current stream wait for all that has been written."""
        if self._writing:
            here = torch.accelerator.current_stream(self._device)
            for other in self._writing - {here}:
                here.wait_stream(other)
            self._writing.clear()
            self._record(here)

    def after_wait(self) -> None:
        """Where there are streams: the current one has waited for what reduces the tensor, and may read it."""
        self._record(torch.accelerator.current_stream(self._device))

    def _record(self, stream: torch.Stream) -> None:
        """It is behind the maker."""
        if stream not in self._behind_maker:
            self._behind_maker.add(stream)
            self._tensor.record_stream(stream)
