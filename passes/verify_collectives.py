"""The last look at a backward graph: it reduces what the plan says, in the plan's order, and nothing else."""

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.ops import all_reduce, pack, wait_tensor
from compiled_ddp.plan import Bucket, BucketPlan


def verify_collectives(graph: Graph, plan: BucketPlan, *, group_name: str, output_positions: Mapping[int, int]) -> None:
    """Assert that the graph launches exactly the plan's buckets, in order, and hands out views of their results.

    A failure is a bug of compiled_ddp, never the user's; it is found here, at compile time on one rank, instead of
    as a wrong gradient on all. Holds for a graph with or without `pack_buckets` and `schedule_collectives`.
    """
    launches = [node for node in graph.nodes if node.target is all_reduce and node.args[2] == group_name]
    assert len(launches) == len(plan.buckets), f"{len(launches)} launches for {len(plan.buckets)} buckets"
    outputs = output_values(graph)
    for bucket, launch in zip(plan.buckets, launches, strict=True):
        _verify_bucket(bucket, launch)
        (wait,) = launch.users
        flat = _normalised(wait) if plan.reduction == "weighted" and bucket.gradients else wait
        for gradient in bucket.gradients:
            expected = (list(gradient.size), list(gradient.stride), gradient.offset_elements)
            _verify_view(outputs[output_positions[gradient.index]], flat, expected)
        if bucket.riders is not None:
            _verify_view(outputs[-1], wait, ([bucket.riders.numel], [1], bucket.riders.offset_elements))
    graph.lint()


def _verify_bucket(bucket: Bucket, launch: Node) -> None:
    assert launch.args[1] == "sum", f"{launch.name} reduces by {launch.args[1]}"
    waits = list(launch.users)
    assert len(waits) == 1 and waits[0].target is wait_tensor, f"{launch.name} is read before its wait: {waits}"
    flat = launch.args[0]
    assert isinstance(flat, Node) and flat.target in (pack, torch.ops.aten.cat.default), f"{launch.name} has no bucket"
    assert list(flat.users) == [launch], f"the flat buffer of {launch.name} has other readers: {list(flat.users)}"
    parts = flat.args[0]
    assert isinstance(parts, (list, tuple))
    expected = len(bucket.gradients) + (bucket.riders is not None)
    assert len(parts) == expected, f"{launch.name} carries {len(parts)} parts, planned are {expected}"
    into = flat.args[1] if len(flat.args) > 1 and flat.target is pack else None
    if isinstance(into, Node):
        assert into.op == "placeholder" and list(into.users) == [flat], f"{into.name} is memory that others read"
    if "val" in flat.meta:
        assert flat.meta["val"].numel() == bucket.numel, f"{launch.name}: {flat.meta['val'].numel()} elements"
        assert flat.meta["val"].dtype == bucket.dtype, f"{launch.name}: {flat.meta['val'].dtype}"


def _normalised(wait: Node) -> Node:
    """The weighted mean of what `wait` has as a weighted sum."""
    products = [user for user in wait.users if user.target is torch.ops.aten.mul.Tensor]
    assert len(products) == 1, f"{wait.name} is divided by the sum of the weights {len(products)} times"
    return products[0]


def _verify_view(view: Node | None, wait: Node, expected: tuple[list[int], list[int], int]) -> None:
    assert view is not None and view.target is torch.ops.aten.as_strided.default, f"{view} is not a view of a bucket"
    assert view.args[0] is wait, f"{view.name} is a view of {view.args[0]}, not of {wait.name}"
    assert view.args[1:] == expected, f"{view.name} lies at {view.args[1:]}, planned is {expected}"
