"""What benchmarks alone ask of torch: what it offers beside its DDP."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the hooks of FSDP2 all-reduce the gradients of its parameters, but for those of replicated modules in it."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh)


def bucketing_by_hand(plan: Sequence[Sequence[str]]) -> object:
    """A graph pass of Inductor's in which torch buckets all-reduces: those of the modules of each group in one."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class BucketByHand(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

            gm = graph.owning_module
            if gm is not None and graph.find_nodes(op="call_function", target=_ALL_REDUCE):
                groups: list[list[str] | str] = [list(names) for names in plan]
                manual_overlap_bucketing(gm, groups, insert_overlap_deps=True)

        def uuid(self) -> object:
            return "bucketing by hand", str(plan)

    return BucketByHand()


class CountingBackend:
    """A backend of torch.compile's that counts what it compiles."""

    def __init__(self, backend: str) -> None:
        from torch._dynamo import lookup_backend

        self._compile, self.compilations = lookup_backend(backend), 0

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.compilations += 1
        return self._compile(graph_module, [*inputs])


def backward_in_graphs() -> contextlib.AbstractContextManager[object]:
    """In here torch.compile has the backwards that a function calls in its graphs."""
    patched: contextlib.AbstractContextManager[object] = torch._dynamo.config.patch(compiled_autograd=True)
    return patched
