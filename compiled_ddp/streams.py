"""The order of what several streams of a GPU do to one tensor; nothing to do on a CPU."""

import torch


class Writers:
    """The streams on which a tensor has been written.

    Autograd runs each node on the stream of its forward, and a hook with it, while a collective is ordered behind the
    stream alone that it is launched from. torch's Reducer keeps the AccumulateGrad nodes and so their one stream; here
    users may run parts of a model on streams of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[torch.Stream] = set()

    def before_write(self) -> None:
        """Let the current stream write behind the others, and note it."""
        if self._device.type != "cpu":
            self.before_read()
            self._streams.add(torch.accelerator.current_stream(self._device))

    def before_read(self) -> None:
        """Let what the current stream is given from here on wait for all that has been written."""
        if not self._streams:
            return
        here = torch.accelerator.current_stream(self._device)
        for other in self._streams - {here}:
            here.wait_stream(other)
