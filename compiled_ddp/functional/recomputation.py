"""Which nodes of a traced step are computed again where a derivative reads them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from compiled_ddp import torch_private
from compiled_ddp.functional.random_state import TracedGenerators
from compiled_ddp.passes.recompute_regions import REGION, RESULT


class RecomputedRegions:
    """The calls of a step that is being traced whose values are not kept, each a region of its graph."""

    def __init__(self, generators: TracedGenerators) -> None:
        self._generators = generators
        self._number = 0
        self._is_within = False

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of `function`, which are kept. Within another region it belongs to that one.

        Raises RuntimeError where it draws from a default generator.
        """
        if self._is_within:
            return function(*args, **kwargs)
        self._is_within = True
        try:
            with torch_private.tracing.recording_nodes() as nodes:
                results = function(*args, **kwargs)
        finally:
            self._is_within = False
        self._number += 1
        leaves = [leaf for leaf in torch_private.trees.flatten(results)[0] if isinstance(leaf, Tensor)]
        kept = {torch_private.tracing.node_of(leaf) for leaf in (*leaves, *self._generators.states())}
        for node in nodes:
            _refuse_if_random(node)
            result = {RESULT: node.name} if node in kept else {}
            node.meta["custom"] = node.meta.get("custom", {}) | {REGION: self._number} | result
        return results


def _refuse_if_random(node: Node) -> None:
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        raise RuntimeError(
            f"a checkpointed function draws from the default generator ({node.target}), and would draw other numbers "
            "when it is computed again: draw outside of it, or from an explicit generator."
        )
