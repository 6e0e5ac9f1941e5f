"""The way into graphs that wrappers of equal models share."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule

from compiled_ddp import torch_private
from compiled_ddp.formatting import quoted
from compiled_ddp.graph.compiled_graph import CompilerFailed
from compiled_ddp.graph.program import Segment, caller_of_this_thread
from compiled_ddp.graph.telling import compiling
from compiled_ddp.model.managed import given_parameters

# [Note: shared captures] To Dynamo a backend of another wrapper is another backend, whose graphs it captures anew, and
# counts: the ninth model of a class would run without graphs. So wrappers of equal models have one backend, and one
# capture for all. Models of other structure, and other settings of the compiler, have one of their own, for what Dynamo
# learns of one (which sizes change) is not to hold for the others. They last as long as the process, as Dynamo's do.


def _structure(module: nn.Module) -> Hashable:
    """What equal models have in common: the classes of their parts, and their parameters' and buffers' shapes.

    Each part once, as one may know its parent, with what it calls the parts that it has.
    """
    every = [*module.named_modules()]
    names = {id(part): name for name, part in every}
    parts = tuple(
        (name, type(part), tuple((child, names.get(id(of_it))) for child, of_it in part._modules.items()))
        for name, part in every
    )
    tensors = [
        (f"{name}.{key}", tensor)
        for name, part in every
        for key, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
    ]
    tensors += given_parameters(every)
    return parts, tuple((name, tensor.shape, tensor.dtype, tensor.device.type) for name, tensor in tensors)


class _ById:
    """An option that cannot be compared by value: equal to itself alone, and kept, so that its id stays its own."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _comparable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return value


_captures: dict[Hashable, torch_private.captures.Capture] = {}


class Entry:
    """A module as Dynamo captures it: [Note: shared captures]. To be called by `call_captured`.

    [Note: hooks of parts] Dynamo looks again at the hooks of a part that had some when it was captured, and never at
    those of others: a hook that is registered later would not be called. So for each choice of parts with hooks there
    is another capture, which is looked for when any hook has been registered, or the last one of a part has gone.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        backend: str,
        compiler_options: Mapping[str, Any],
        fullgraph: bool,
        dynamic: bool | None,
        recurrent: bool,
    ) -> None:
        self._module = module
        options = tuple(sorted((name, _comparable(value)) for name, value in compiler_options.items()))
        self._key = _structure(module), backend, options, fullgraph, dynamic, recurrent
        self._new_capture = functools.partial(
            _new_capture, backend, dict(compiler_options), fullgraph=fullgraph, dynamic=dynamic, recurrent=recurrent
        )
        self._runs: dict[tuple[Hashable, ...], Callable[..., Any]] = {}  # by the places of hooks
        self._find()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        registered = torch_private.modules.hooks_registered() - torch_private.modules.own_hooks_registered()
        if registered != self._hooks_registered or not all(self._hooks):
            self._find()
        return self._run(*args, **kwargs)

    def _find(self) -> None:
        """The capture for the hooks that there are now."""
        own = torch_private.modules.own_hooks_registered()
        self._hooks_registered = torch_private.modules.hooks_registered() - own  # by others
        hooks = torch_private.modules.hooks_around(self._module.modules())
        self._hooks, places = [*hooks.values()], tuple(hooks)
        if places not in self._runs:
            key = self._key, places
            if key not in _captures:
                _captures[key] = self._new_capture()
            self._runs[places] = _captures[key].of(self._module)
        self._run = self._runs[places]


def _new_capture(
    backend: str, compiler_options: dict[str, Any], *, fullgraph: bool, dynamic: bool | None, recurrent: bool
) -> torch_private.captures.Capture:
    """By a function of its own, as Dynamo looks for what it has captured by the backend, which that is to it."""
    compile_graph = functools.partial(_compile_graph, backend=backend, compiler_options=compiler_options)
    return torch_private.captures.Capture(
        compile_graph, fullgraph=fullgraph, dynamic=dynamic, recurrent=recurrent, compiling=_capturing
    )


def _capturing(callback: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls where it has no code yet, set up for compilers and told of where it takes long."""
    set_up = compiling(callback)

    @functools.wraps(set_up)
    def call(*args: Any, **kwargs: Any) -> Any:
        with caller_of_this_thread().teller.capturing():
            return set_up(*args, **kwargs)

    return call


def _compile_graph(
    graph_module: GraphModule, example_inputs: Sequence[Any], *, backend: str, compiler_options: dict[str, Any]
) -> Callable[..., Any]:
    """The torch.compile backend: called by Dynamo once for every graph it captures."""
    try:
        return Segment(graph_module, example_inputs, backend=backend, compiler_options=compiler_options)
    except CompilerFailed as failed:
        return Uncompiled(failed.graph_module, failed.__cause__)


class Uncompiled:
    """A captured graph that the compiler has failed for: autograd sees its operators, and hooks reduce."""

    def __init__(self, graph_module: GraphModule, error: BaseException | None) -> None:
        self._graph_module, self._failure = graph_module, quoted(error)

    def __call__(self, *inputs: Any) -> Any:
        caller_of_this_thread().segment_not_compiled(self._failure)
        return self._graph_module(*inputs)
