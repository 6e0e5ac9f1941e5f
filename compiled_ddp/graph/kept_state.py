"""What a warm-up's forwards and backwards change, and put back."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Put `module`'s buffers and the random state of the CPU and of the accelerator's devices back at the end."""
    saved = [
        (owner._buffers, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    with random_state_kept():
        try:
            yield
        finally:
            for siblings, name, buffer, before in saved:
                if siblings.get(name) is not buffer:
                    siblings[name] = buffer
                # Of .data, which has a version counter of its own: an open graph may have saved the buffer. One whose
                # elements share memory (`expand`) takes no copy, and no in-place operator either that could change it.
                if not torch.equal(buffer, before):
                    buffer.data.copy_(before)


def random_state_kept() -> contextlib.AbstractContextManager[None]:
    """Put the random state of the CPU and of the accelerator's devices, where those are in use, back at the end."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.random.fork_rng(())
    module = torch.get_device_module(accelerator)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return torch.random.fork_rng(())
    return torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=accelerator.type)
