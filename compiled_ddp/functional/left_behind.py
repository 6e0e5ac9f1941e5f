"""Tensors of a trace that a step leaves in its user's objects: they have no values, and no later call changes them.

A graph returns what it computes, and writes in place into tensors that are there when it is traced. What Python puts
elsewhere (`p.grad = gradient`, the state of an optimizer, `losses.append(loss)`) happens once, while tracing.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from compiled_ddp import torch_private

_INSTEAD = (
    "A compiled step returns what it computes: return the new parameters and state, and pass them to the next call, "
    "as with torch.func; or train the module with compile_ddp and torch.optim."
)


@contextlib.contextmanager
def refusing_optimizers() -> Iterator[None]:
    """In here this thread's torch.optim raises RuntimeError in `step()`, before it makes any state."""
    thread = threading.get_ident()

    def refuse(optimizer: Optimizer, *_: object) -> None:
        if threading.get_ident() != thread:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if _is_of_the_trace(parameter.grad):
                    parameter.grad = None
        raise RuntimeError(
            f"a compiled step calls step() of torch.optim's {type(optimizer).__name__}, whose state and learning rate "
            f"would be those of this one call for ever. {_INSTEAD}"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def refuse_left_behind(reached: Iterable[Any], modules: Iterable[nn.Module]) -> None:
    """Raise RuntimeError where one of these holds a tensor of the current trace, which is about to end.

    The gradients among them are taken away again, as in zero_grad().
    """
    found = [place for value in reached for place in _places(value)]
    parts = {id(part): part for module in modules for part in module.modules()}
    for part in parts.values():
        for name, parameter in part.named_parameters(recurse=False):
            if _is_of_the_trace(parameter.grad):
                found.append(f".grad of the parameter {name!r} of a {type(part).__name__}")
                parameter.grad = None
        of_trace = (name for name, buffer in part.named_buffers(recurse=False) if _is_of_the_trace(buffer))
        found += [f"the buffer {name!r} of a {type(part).__name__}" for name in of_trace]
    if found:
        raise RuntimeError(
            f"a compiled step leaves a tensor in {found[0]}: it is one of the trace, without a value. {_INSTEAD}"
        )


def _places(value: Any) -> Iterator[str]:
    """Where in `value`, itself or its attributes, tensors of the trace are."""
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return
    kind = type(value).__name__
    if isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        yield from (f"[{key!r}] of a {kind} that it reaches" for key, each in entries if _is_of_the_trace(each))
        return
    attributes = getattr(value, "__dict__", {}).items()
    yield from (f"{name} of the {kind} that it reaches" for name, each in attributes if _is_of_the_trace(each))


def _is_of_the_trace(value: object) -> bool:
    return isinstance(value, Tensor) and torch_private.tracing.node_of(value) is not None
