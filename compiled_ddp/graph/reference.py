"""A graph's backward without the passes, run operator by operator: [Note: an account of its own]."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Interpreter, Node

from compiled_ddp import torch_private
from compiled_ddp.graph.kept_state import random_state_kept
from compiled_ddp.passes.graph_edit import written_arguments
from compiled_ddp.passes.ops import meets_other_ranks

_UNFUSED = ("flex_attention",)  # operators that need another order of memory where they are not compiled
_EPSILONS = {"ieee": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7}  # of what float32 is rounded to
_TABLE = 2**20 + 7  # random numbers at most, that are used again and again


@dataclass(frozen=True)
class Rounded:
    """A gradient, and what random rounding of every operator's result has changed in it.

    Infinite where that is unknown, as elements that are finite have become infinite, or no numbers: 0 / 0 where nothing
    equals the rounded maximum any more.
    """

    gradient: Tensor
    noise_norm: float
    noise_most: float


class NoReference(Exception):
    """Says why a backward could not be run operator by operator."""


class ReferenceGraph:
    """A graph that is run beside what a compiler makes of it.

    It leaves its inputs and the state of all random numbers as they are.
    """

    def __init__(
        self, graph_module: GraphModule, *, without_autocast: bool = False, may_communicate: bool = False
    ) -> None:
        """With `may_communicate` those that run it leave out what does."""
        self._graph_module, self._without_autocast = graph_module, without_autocast
        self._written = _written_inputs(graph_module)
        self._why_not = _hindrance(graph_module, may_communicate)

    def gradients(self, saved_and_tangents: Sequence[Any]) -> tuple[list[Rounded | None], float]:
        """The gradients of a backward graph's inputs, and the coarsest epsilon among what they are computed from.

        Raises NoReference.
        """
        exact, with_rounding, epsilon = self.run_twice(saved_and_tangents, Operators, RoundingAtRandom)
        return [rounded(*pair) for pair in zip(exact, with_rounding, strict=True)], epsilon

    def run_twice(
        self,
        inputs: Sequence[Any],
        exactly: "type[Operators]",
        with_rounding: "type[RoundingAtRandom]",
    ) -> tuple[Any, Any, float]:
        """The results, those with every operator's result rounded at random, and the coarsest epsilon in that.

        Raises NoReference.
        """
        if self._why_not:
            raise NoReference(self._why_not)
        try:
            with self._as_in_backward():
                rounding = with_rounding(self._graph_module)
                rounded_results = rounding.run(*self._inputs(inputs))
            with self._as_in_backward():
                results = exactly(self._graph_module).run(*self._inputs(inputs))
        except torch.OutOfMemoryError as error:
            torch_private.tensors.give_back_cached_memory()
            raise NoReference("there was no memory for it") from error
        except Exception as error:
            raise NoReference(f"operator by operator it raises {type(error).__name__}: {error}") from error
        return results, rounded_results, rounding.epsilon

    def _inputs(self, saved_and_tangents: Sequence[Any]) -> list[Any]:
        """What to run with: in place of memory that is written to a copy, which inputs share that share the memory."""
        values = list(saved_and_tangents)
        written = [values[place] for place in self._written if isinstance(values[place], Tensor)]
        memory = set(torch_private.tensors.memory_of_each(written))
        sharing: dict[int, list[int]] = {}
        for place, value in enumerate(values):
            if memory and isinstance(value, Tensor) and torch_private.tensors.memory_of(value) in memory:
                sharing.setdefault(torch_private.tensors.memory_of(value), []).append(place)
        for places in sharing.values():
            copies = _copied([values[place] for place in places])
            for place, copied in zip(places, copies, strict=True):
                values[place] = copied
        return values

    @contextlib.contextmanager
    def _as_in_backward(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(random_state_kept())
            if self._without_autocast:
                stack.enter_context(torch_private.tensors.without_autocast())
            stack.enter_context(torch_private.tracing.outside_of_traces())  # modes of the user's see one backward
            yield


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors in one memory; of several the memory is copied."""
    if len(tensors) == 1:
        return [tensors[0].clone()]
    storage = tensors[0].untyped_storage().clone()
    return [
        torch.empty(0, dtype=each.dtype, device=each.device).set_(
            storage, each.storage_offset(), each.size(), each.stride()
        )
        for each in tensors
    ]


def _written_inputs(graph_module: GraphModule) -> frozenset[int]:
    """The places of inputs whose memory the graph writes to: by themselves, or through what may be a view of them."""
    seen_in = {node: {place} for place, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    written = set[int]()  # seen_in: the inputs whose memory a node's result may be
    for node in graph_module.graph.nodes:
        for argument in written_arguments(node.target, node.args, node.kwargs):
            written.update(seen_in.get(argument, ()))
        # An operator without schema (getitem, or one of higher order) may hand out whatever it is given.
        if node.op != "placeholder" and _may_return_its_arguments(node.target):
            seen_in[node] = set[int]().union(*(seen_in.get(argument, ()) for argument in node.all_input_nodes))
    return frozenset(written)


def _may_return_its_arguments(target: object) -> bool:
    if not isinstance(target, OpOverload):
        return True
    return any(returned.alias_info is not None for returned in target._schema.returns)


def _hindrance(graph_module: GraphModule, may_communicate: bool) -> str:
    """Why a graph cannot be run twice; empty where it can."""
    for module in graph_module.modules():
        nodes: Sequence[Node] = list(module.graph.nodes) if isinstance(module, GraphModule) else ()
        for node in nodes:
            if meets_other_ranks(node) and not may_communicate:
                return f"the model communicates in it ({node.target})"
            if isinstance(node.target, HigherOrderOperator) and any(n in node.target.name() for n in _UNFUSED):
                return f"{node.target.name()} is not run operator by operator"
    return ""


def rounded(exact: Any, with_rounding: Any) -> Rounded | None:
    """A gradient of two runs; None where the graph gives none."""
    if not isinstance(exact, Tensor):
        return None
    one, other = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (exact, with_rounding))
    wide = torch.float32 if one.element_size() < 4 else one.dtype
    if one.numel() == 0:
        return Rounded(exact, 0.0, 0.0)
    one, other = one.to(wide), other.to(wide)
    noise = (other - one).abs().nan_to_num(0.0, 0.0, 0.0)
    is_lost = (one.isfinite() & ~other.isfinite()).any()
    norm, most, lost = torch.stack((torch.linalg.vector_norm(noise), noise.max(), is_lost.to(noise.dtype))).tolist()
    return Rounded(exact, math.inf, math.inf) if lost else Rounded(exact, norm, most)


class Operators(Interpreter):
    """Draws what Inductor's own random numbers would be, and leaves generators as they are."""

    def run(self, *inputs: Any, **_: Any) -> Any:
        """With the generators among the inputs left as they are."""
        generators = [(value, value.get_state()) for value in inputs if isinstance(value, torch.Generator)]
        try:
            return super().run(*inputs, enable_io_processing=False)
        finally:
            for generator, state in generators:
                generator.set_state(state)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, OpOverload) and target.name() in torch_private.inductor.RANDOM:
            return torch_private.inductor.drawn(target, args, kwargs)
        return super().call_function(target, args, kwargs)


class RoundingAtRandom(Operators):
    """[Note: how far rounding goes]"""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.epsilon = 0.0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._of_float32: dict[str, float] = {}  # type of device -> epsilon of float32 products

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        return self._round(value.clone()) if self._is_tangent(target, value) else value

    def _is_tangent(self, name: str, value: object) -> bool:
        return name.startswith("tangents") and isinstance(value, Tensor) and value.is_floating_point()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        arguments = [leaf for leaf in torch_private.trees.flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        memory = {torch_private.tensors.memory_of(argument) for argument in arguments}
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if type(part) is Tensor and torch_private.tensors.memory_of(part) not in memory:
                self._round(part)
        return result

    def _round(self, value: Tensor) -> Tensor:
        parts = torch.view_as_real(value) if value.is_complex() else value
        if not parts.is_floating_point() or parts.numel() == 0 or parts.element_size() < 2:
            return value
        epsilon = self._epsilon_of(parts)
        self.epsilon = max(self.epsilon, epsilon)
        epsilon /= 2  # what rounding to the nearest changes at most
        flat = parts.view(-1) if parts.is_contiguous() else None
        if flat is None:
            generator = self._generator(value.device)
            drawn = torch.rand(parts.shape, dtype=torch.float32, device=value.device, generator=generator)
            parts.mul_(1.0 + epsilon * (2.0 * drawn - 1.0))
            return value
        table = self._table(parts, epsilon)
        for chunk in flat.split(_TABLE):
            chunk.mul_(table[: chunk.numel()])
        return value

    def _generator(self, device: torch.device) -> torch.Generator:
        """A generator of its own, so that the graph draws the same with and without rounding."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(16)
        return self._generators[device]

    def _epsilon_of(self, value: Tensor) -> float:
        """The epsilon of the precision that `value` may have been computed with."""
        if value.dtype != torch.float32:
            return torch.finfo(value.dtype).eps
        kind = value.device.type
        if kind not in self._of_float32:
            self._of_float32[kind] = _epsilon_of_products(kind)
        return self._of_float32[kind]

    def _table(self, value: Tensor, epsilon: float) -> Tensor:
        """Factors around one; the dtype of a value with fewer bits rounds them to one of its neighbours."""
        key, needed = (value.device, value.dtype), min(value.numel(), _TABLE)
        known = self._tables[key].numel() if key in self._tables else 0
        if known < needed:
            generator, number = self._generator(value.device), min(max(needed, 2 * known), _TABLE)
            drawn = torch.rand(number, dtype=torch.float64, device=value.device, generator=generator)
            factors = 1.0 + epsilon * (2.0 * drawn - 1.0)
            self._tables[key] = factors if value.dtype == torch.float64 else factors.to(torch.float32)
        return self._tables[key]


def _epsilon_of_products(device_type: str) -> float:
    """The epsilon of what float32 products and convolutions round their factors to, on devices of this type."""
    backends = torch.backends
    matmul, convolution, recurrent = (
        (backends.cuda.matmul, getattr(backends.cudnn, "conv", None), getattr(backends.cudnn, "rnn", None))
        if device_type == "cuda"
        else (getattr(backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn"))
    )
    found = [getattr(each, "fp32_precision", None) for each in (matmul, convolution, recurrent)]
    if found[0] is None:  # what set it before there was a setting for each backend and operator
        precision = torch.get_float32_matmul_precision()
        is_coarse = precision != "highest" or (device_type == "cuda" and torch.backends.cudnn.allow_tf32)
        return _EPSILONS["tf32" if is_coarse else "ieee"]
    return max(_EPSILONS.get(each or "ieee", _EPSILONS["ieee"]) for each in found)
