"""The last look at a backward graph: it reduces what the plan says, in the plan's order, and nothing else."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.inline_hook import TracedHook
from compiled_ddp.passes.ops import LAUNCHES, PACKS, all_reduce, all_reduce_in_place, is_launch, pack_into, wait_tensor
from compiled_ddp.plan import Bucket, BucketPlan

FLAT_BUFFERS = (*PACKS, torch.ops.aten.cat.default)


def verify_collectives(
    graph: Graph,
    plan: BucketPlan,
    *,
    group_name: str,
    output_positions: Mapping[int, int],
    hooks: Sequence[TracedHook | None] = (),
) -> None:
    """Assert that the graph launches exactly the plan's buckets, in order, and hands out views of their results.

    A failure is a bug of compiled_ddp, never the user's; it is found here, at compile time on one rank, instead of
    as a wrong gradient on all. Holds for a graph with or without `pack_buckets` and `schedule_collectives`.
    """
    hooks = hooks or [None] * len(plan.buckets)
    launches = [node for node in graph.nodes if is_launch(node, group_name)]
    expected = [target for hook in hooks for target in _launches_of(hook)]
    found = [all_reduce if node.target is all_reduce_in_place else node.target for node in launches]
    assert found == expected, f"{len(launches)} launches for {len(plan.buckets)} buckets"
    outputs = output_values(graph)
    remaining = iter(launches)
    for bucket, hook in zip(plan.buckets, hooks, strict=True):
        if hook is None:
            launch = next(remaining)
            _verify_bucket(bucket, launch, group_name)
            (wait,) = launch.users
        else:
            for _ in _launches_of(hook):
                next(remaining)
            wait = _hooked(outputs[output_positions[bucket.gradients[0].index]])
        flat = _normalised(wait) if plan.reduction == "weighted" and bucket.gradients else wait
        for gradient in bucket.gradients:
            place = (list(gradient.size), list(gradient.stride), gradient.offset_elements)
            _verify_view(outputs[output_positions[gradient.index]], flat, place)
        if bucket.riders is not None:
            _verify_view(outputs[-1], wait, ([bucket.riders.numel], [1], bucket.riders.offset_elements))
    graph.lint()


def _launches_of(hook: TracedHook | None) -> list[object]:
    """The collectives that reduce a bucket."""
    if hook is None:
        return [all_reduce]
    return [node.target for node in hook.graph.nodes if node.target in LAUNCHES]


def _hooked(view: Node | None) -> Node:
    """What a hook has made of the bucket that `view` shows."""
    assert view is not None and view.target is torch.ops.aten.as_strided.default, f"{view} is not a view of a bucket"
    (reduced,) = view.all_input_nodes
    return reduced


def _verify_bucket(bucket: Bucket, launch: Node, group_name: str) -> None:
    assert launch.args[2] == bucket.group_name(group_name), f"{launch.name} is sent by {launch.args[2]}"
    assert launch.args[1] == "sum", f"{launch.name} reduces by {launch.args[1]}"
    waits = list(launch.users)
    assert len(waits) == 1 and waits[0].target is wait_tensor, f"{launch.name} is read before its wait: {waits}"
    flat = launch.args[0]
    assert isinstance(flat, Node) and flat.target in FLAT_BUFFERS, f"{launch.name} has no bucket"
    assert list(flat.users) == [launch], f"the flat buffer of {launch.name} has other readers: {list(flat.users)}"
    parts = flat.args[0]
    assert isinstance(parts, (list, tuple))
    expected = len(bucket.gradients) + (bucket.riders is not None)
    assert len(parts) == expected, f"{launch.name} carries {len(parts)} parts, planned are {expected}"
    if flat.target is pack_into:
        into = flat.args[1]
        assert isinstance(into, Node)
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
