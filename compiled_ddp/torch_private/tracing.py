"""Tracing a function into a graph without running it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from compiled_ddp.torch_private.tensors import without_autocast


def trace_functional(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> GraphModule:
    """The graph of `function`, without mutations, in the operators that Inductor takes. Nothing is computed."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # What `function` closes over becomes a constant.
    with without_autocast(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        functional = torch.func.functionalize(function, remove="mutations")
        traced = make_fx(functional, decomposition_table=select_decomp_table())
        graph_module: GraphModule = traced(*(mode.from_tensor(value) for value in inputs))
    graph_module.graph.eliminate_dead_code()
    return graph_module
