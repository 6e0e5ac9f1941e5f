"""A captured graph that no gradient is reduced in: compiled as by plain torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from compiled_ddp import torch_private


class PlainGraph:
    """What Dynamo calls in place of a graph without trained parameters, or of any graph where hooks do everything.

    It differs from torch.compile in one thing: `retain_graph=True` works, as in a `Segment`.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        *,
        backend: str,
        compiler_options: dict[str, Any],
    ) -> None:
        self._backend, self._compiler_options = backend, compiler_options
        self._graph_module = torch_private.copy_captured(graph_module) if torch.is_grad_enabled() else None
        self._fake_inputs = torch_private.captured_inputs(graph_module)
        devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
        self._state = torch_private.CaptureState(sorted(devices))
        self._forward = self._compile(graph_module, example_inputs)
        self._function = torch_private.compiled_function_of(self._forward)
        self._backward: torch_private.BackwardImplementation | None = None
        if self._function is not None:  # None for an inference graph
            self._backward = torch_private.backward_implementation(self._function)
            torch_private.replace_backward_implementation(self._function, self._run_backward)

    def _compile(
        self, graph_module: GraphModule, inputs: Sequence[Any], *, cache_identity: str = ""
    ) -> Callable[..., Any]:
        return torch_private.compile_captured(
            graph_module,
            inputs,
            backend=self._backend,
            rewrite_backward=None,
            cache_identity=cache_identity,
            options=self._compiler_options,
        )

    def __call__(self, *inputs: Any) -> Any:
        return self._forward(*inputs)

    def compile_ahead(self) -> bool:
        """Compile the backward before it is needed; returns False if there is none, or it was compiled already."""
        return self._backward is not None and torch_private.compile_backward_now(self._backward)

    def _run_backward(self, node: Any, saved_and_tangents: list[Any]) -> Any:
        assert self._function is not None and self._backward is not None
        if torch_private.keeps_graph() and torch_private.overwrites_saved_tensors(self._function):
            self._backward = self._compile_sparing_backward()
            torch_private.allow_several_backwards(self._function)  # so that it is compiled once
        return self._backward(node, saved_and_tangents)

    def _compile_sparing_backward(self) -> torch_private.BackwardImplementation:
        assert self._graph_module is not None
        with self._state.restored(), torch_private.sparing_saved_tensors():
            copied = torch_private.copy_captured(self._graph_module)
            compiled = self._compile(copied, self._fake_inputs, cache_identity=torch_private.SPARING)
        function = torch_private.compiled_function_of(compiled)
        assert function is not None
        torch_private.allow_several_backwards(function)
        return torch_private.backward_implementation(function)
