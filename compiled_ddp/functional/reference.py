"""What a compiled step is to reduce, from the step as it was traced: `checks.values`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule

from compiled_ddp import torch_private
from compiled_ddp.checks.values import Expected, Reference
from compiled_ddp.graph.reference import (
    NoReference,
    Operators,
    ReferenceGraph,
    RoundingAtRandom,
    rounded,
)
from compiled_ddp.passes.graph_edit import written_arguments
from compiled_ddp.passes.ops import meets_other_ranks, sum_over_ranks
from compiled_ddp.passes.schedule_collectives import draws_random_numbers

_BEHIND_OTHERS = "what it comes from is known behind other collectives alone, or is drawn at random"


class _Unknown:
    """Stands for whatever depends on other ranks, or on numbers that a compiler draws in its own way."""


_UNKNOWN = _Unknown()


class UpToSums(Operators):
    """Runs what depends on no other rank, and on no chance.

    The result is what each reduction is given, None where that depends on them. What is left out may have written to a
    tensor, and is unknown then in all that shares its memory.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self._given: list[Sequence[Tensor] | None] = []
        self._writes_to_memory = any(
            written_arguments(node.target, node.args, node.kwargs) for node in graph_module.graph.nodes
        )
        self._overwritten: dict[int, Tensor] = {}  # memory -> a tensor in it, so that nothing else comes to lie there

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaves = torch_private.trees.flatten((args, kwargs))[0]
        is_known = not any(map(self._is_unknown, leaves))
        if target is sum_over_ranks:
            self._given.append([*map(self._as_it_is, args[0])] if is_known else None)
            return _UNKNOWN
        if not is_known or _is_of_all_ranks(target) or draws_random_numbers(target):
            for written in written_arguments(target, args, kwargs):
                if isinstance(written, Tensor):
                    self._overwritten[torch_private.tensors.memory_of(written)] = written
            return _UNKNOWN
        return super().call_function(target, args, kwargs)

    def _as_it_is(self, given: Tensor) -> Tensor:
        """What a reduction is given, whatever the graph writes to it later."""
        return given.clone() if self._writes_to_memory else given

    def _is_unknown(self, leaf: object) -> bool:
        if isinstance(leaf, Tensor) and self._overwritten:
            return torch_private.tensors.memory_of(leaf) in self._overwritten
        return leaf is _UNKNOWN

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._given


class _UpToSumsRounded(UpToSums, RoundingAtRandom):
    """[Note: how far rounding goes]"""


def _is_of_all_ranks(target: object) -> bool:
    if not isinstance(target, OpOverload):
        return False
    graph = Graph()
    return meets_other_ranks(graph.call_function(target))


class ReferenceStep:
    """A step as it was traced, kept beside the one that is compiled."""

    def __init__(self, graph_module: GraphModule) -> None:
        copied = Graph()
        copied.output(copied.graph_copy(graph_module.graph, {}))
        self._inputs = len(copied.find_nodes(op="placeholder"))
        self._graph = ReferenceGraph(GraphModule(graph_module, copied), without_autocast=True, may_communicate=True)

    def run(self, inputs: Sequence[Tensor]) -> Callable[[int], Reference]:
        """What is expected of each of the step's reductions, by its number; passes may have added inputs at the end."""
        try:
            inputs = inputs[: self._inputs]
            given, with_rounding, epsilon = self._graph.run_twice(inputs, UpToSums, _UpToSumsRounded)
        except NoReference as error:
            why_not = str(error)
            return lambda _: Reference({}, why_not)

        def of(number: int) -> Reference:
            if given[number] is None:
                return Reference({}, _BEHIND_OTHERS)
            pairs = zip(given[number], with_rounding[number], strict=True)
            found = [rounded(exact, other) for exact, other in pairs]
            return Reference(
                {
                    index: Expected(each.gradient, each.noise_norm, each.noise_most, epsilon)
                    for index, each in enumerate(found)
                    if each is not None
                }
            )

        return of
