"""What a warm-up's forwards and backwards change, and put back."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.users_code import warn_user


@contextlib.contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Put `module`'s buffers, frozen parameters and the random state back at the end.

    Frozen parameters are what a forward may write: a codebook, or an encoder that follows another one. Not those that
    take too much memory: [Note: frozen parameters]. There is a warning where such a one was written.
    """
    buffers = [
        (owner._buffers, name, buffer, _kept(buffer))
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    frozen, large = _frozen(module)
    put_back = [_kept(parameter) for parameter in frozen]
    versions = {name: torch_private.tensors.version_if_any(parameter) for name, parameter in large.items()}
    with random_state_kept():
        try:
            yield
        finally:
            for siblings, name, buffer, restore in buffers:
                if siblings.get(name) is not buffer:
                    siblings[name] = buffer
                restore()
            for restore in put_back:
                restore()
    version_of = torch_private.tensors.version_if_any
    written = [name for name, parameter in large.items() if version_of(parameter) != versions[name]]
    if written:
        warn_user(
            f"warmup() has run the model's forward, which writes parameter {written[0]!r}. It has requires_grad=False, "
            "and is not put back, as a copy would take more memory than the trained parameters: make it a buffer, or "
            "load it again after warmup()."
        )


def _kept(tensor: torch.Tensor) -> Callable[[], None]:
    """Call it to give `tensor` the elements back that it has now."""
    before, version = tensor.detach().clone(), torch_private.tensors.version_if_any(tensor)

    def restore() -> None:
        # By their elements where those can be compared: `.data` and custom kernels leave the version as it is. Sparse
        # tensors and those without memory cannot; a copy to `.data` would not reach a sparse one.
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
            if torch_private.tensors.version_if_any(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(before)
        # Of .data, which has a version counter of its own: an open graph may have saved it. One whose elements share
        # memory (`expand`) takes no copy, and no in-place operator either that could change it.
        elif not torch.equal(tensor, before):
            tensor.data.copy_(before)

    return restore


# [Note: frozen parameters] Which ones a forward writes is not known before it runs, and afterwards they are written. A
# copy of all of them doubles the memory of a large model that is mostly frozen (adapters, a frozen backbone). So the
# smallest are copied, up to as many bytes as the trained parameters have: a step takes as many for gradients, besides
# what its optimizer takes.
def _frozen(module: nn.Module) -> tuple[list[nn.Parameter], dict[str, nn.Parameter]]:
    """Those that are small enough to be copied, and the others by name."""
    left = sum(_bytes(parameter) for parameter in module.parameters() if parameter.requires_grad)
    # Others than torch's own class (quantised weights, parameters without a shape yet) may not take a copy.
    plain = [(name, one) for name, one in module.named_parameters() if type(one) is nn.Parameter]
    frozen = [(name, one) for name, one in plain if not one.requires_grad]
    small, large = list[nn.Parameter](), dict[str, nn.Parameter]()
    for name, parameter in sorted(frozen, key=lambda named: _bytes(named[1])):
        left -= _bytes(parameter)
        if left >= 0:
            small.append(parameter)
        else:
            large[name] = parameter
    return small, large


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the random state back at the end: Python's, and NumPy's, torch's and its devices' where these are in use."""
    numpys = sys.modules.get("numpy.random")
    of_python, of_numpy = random.getstate(), None if numpys is None else numpys.get_state()
    with _torchs_random_state_kept():
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpys is not None:
                numpys.set_state(of_numpy)


def _torchs_random_state_kept() -> contextlib.AbstractContextManager[None]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.random.fork_rng(())
    module = torch.get_device_module(accelerator)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return torch.random.fork_rng(())
    return torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=accelerator.type)
