"""`schedule_collectives`: launches as early as their gradients allow, waits as late as possible."""

import pytest
import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.ops import all_reduce, pack, wait_tensor
from compiled_ddp.passes.schedule_collectives import schedule_collectives

aten = torch.ops.aten

INPUTS = ["tangents_1", "saved", "buffer", "riders"]


class Backward:
    """A backward graph of two layers, one bucket each, in AOTAutograd's order: data gradient before weight gradient."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.tangent, self.saved, self.buffer, self.riders = (self.graph.placeholder(name) for name in INPUTS)

    def call(self, name: str, op: object, *arguments: object) -> Node:
        return self.graph.create_node("call_function", op, arguments, name=name)  # type: ignore[arg-type]

    def reduce(self, number: int, *parts: Node, group: str = "ours") -> Node:
        flat = self.call(f"pack{number}", pack, list(parts))
        wait = self.call(f"wait{number}", wait_tensor, self.call(f"launch{number}", all_reduce, flat, "sum", group))
        return self.call(f"view{number}", aten.as_strided.default, wait, [2], [1], 0)

    def finish(self, *outputs: Node) -> list[str]:
        """Schedule, and tell the order of everything but inputs and output."""
        self.graph.output(outputs)
        self.graph.lint()
        schedule_collectives(self.graph, group_name="ours")
        self.graph.lint()
        names = [node.name for node in self.graph.nodes]
        assert names[: len(INPUTS)] == INPUTS
        assert names[-1] == "output"
        return names[len(INPUTS) : -1]


@pytest.fixture
def backward() -> Backward:
    return Backward()


def two_layers(backward: Backward) -> tuple[Node, Node, Node]:
    """dx2 -> dw2 -> bucket 0 -> dx1 -> dw1 -> bucket 1; returns both views and dx1."""
    dx2 = backward.call("dx2", aten.mm.default, backward.tangent, backward.saved)
    dw2 = backward.call("dw2", aten.mm.default, backward.saved, backward.tangent)
    view0 = backward.reduce(0, dw2)
    dx1 = backward.call("dx1", aten.mm.default, dx2, backward.saved)
    dw1 = backward.call("dw1", aten.mm.default, backward.saved, dx2)
    return view0, backward.reduce(1, dw1, backward.riders), dx1


def test_weight_gradient_runs_before_the_data_gradient_that_later_buckets_need(backward: Backward) -> None:
    order = backward.finish(*two_layers(backward))
    assert order.index("dw2") < order.index("dx2")
    assert order.index("dw1") < order.index("dx1")


def test_exact_order_of_two_layers(backward: Backward) -> None:
    assert backward.finish(*two_layers(backward)) == [
        *("dw2", "pack0", "launch0"),
        *("dx2", "dw1", "pack1", "launch1"),
        "dx1",
        *("wait0", "view0", "wait1", "view1"),
    ]


def test_launch_follows_the_last_gradient_of_its_bucket(backward: Backward) -> None:
    dx2 = backward.call("dx2", aten.mm.default, backward.tangent, backward.saved)
    dx1 = backward.call("dx1", aten.mm.default, dx2, backward.saved)
    db2 = backward.call("db2", aten.sum.default, backward.tangent)
    dw2 = backward.call("dw2", aten.mm.default, backward.saved, backward.tangent)
    view0 = backward.reduce(0, dw2, db2)
    assert backward.finish(view0, dx1) == ["dw2", "db2", "pack0", "launch0", "dx2", "dx1", "wait0", "view0"]


def test_bucket_that_needs_a_data_gradient_gets_it_just_in_time(backward: Backward) -> None:
    dx2 = backward.call("dx2", aten.mm.default, backward.tangent, backward.saved)
    dx1 = backward.call("dx1", aten.mm.default, dx2, backward.saved)
    dw1 = backward.call("dw1", aten.mm.default, backward.saved, dx1)
    view0 = backward.reduce(0, dw1)
    dw2 = backward.call("dw2", aten.mm.default, backward.saved, backward.tangent)
    view1 = backward.reduce(1, dw2, backward.riders)
    assert backward.finish(view0, view1) == [
        *("dx2", "dx1", "dw1", "pack0", "launch0"),
        *("dw2", "pack1", "launch1"),
        *("wait0", "view0", "wait1", "view1"),
    ]


def test_launches_keep_the_order_in_which_they_stand(backward: Backward) -> None:
    early = backward.call("early", aten.neg.default, backward.tangent)
    late = backward.call("late", aten.neg.default, early)
    views = [backward.reduce(0, late), backward.reduce(1, early), backward.reduce(2, backward.riders)]
    order = backward.finish(*views)
    assert [name for name in order if name.startswith("launch")] == ["launch0", "launch1", "launch2"]


def test_every_wait_follows_the_last_launch_and_all_other_work(backward: Backward) -> None:
    order = backward.finish(*two_layers(backward))
    assert order[-4:] == ["wait0", "view0", "wait1", "view1"]


def test_gradients_behind_a_wait_of_the_models_own_keep_what_they_need(backward: Backward) -> None:
    statistics = backward.reduce(7, backward.tangent, group="theirs")
    dw = backward.call("dw", aten.mm.default, statistics, backward.saved)
    view0 = backward.reduce(0, dw, backward.riders)
    assert backward.finish(view0) == [
        *("pack7", "launch7", "wait7", "view7"),
        *("dw", "pack0", "launch0", "wait0", "view0"),
    ]


def test_deep_graph_does_not_exhaust_the_stack(backward: Backward) -> None:
    node = backward.tangent
    for depth in range(3000):
        node = backward.call(f"dx{depth}", aten.neg.default, node)
    assert backward.finish(backward.reduce(0, node))[-4:] == ["pack0", "launch0", "wait0", "view0"]


def test_scheduling_again_changes_nothing(backward: Backward) -> None:
    order = backward.finish(*two_layers(backward))
    schedule_collectives(backward.graph, group_name="ours")
    assert [node.name for node in backward.graph.nodes][len(INPUTS) : -1] == order


# ---- when it leaves the order ----------------------------------------------------------------------------------------


def test_random_numbers_are_drawn_in_their_old_order(backward: Backward) -> None:
    dx2 = backward.call("dx2", aten.mm.default, backward.tangent, backward.saved)
    noise_x = backward.call("noise_x", aten.randn_like.default, dx2)
    noisy_x = backward.call("noisy_x", aten.add.Tensor, dx2, noise_x)
    dw2 = backward.call("dw2", aten.mm.default, backward.saved, backward.tangent)
    noise_w = backward.call("noise_w", aten.randn_like.default, dw2)
    view0 = backward.reduce(0, backward.call("noisy_w", aten.add.Tensor, dw2, noise_w))
    dw1 = backward.call("dw1", aten.mm.default, backward.saved, noisy_x)
    order = backward.finish(view0, backward.reduce(1, dw1, backward.riders), noisy_x)
    assert order.index("noise_x") < order.index("noise_w") < order.index("launch0")
    assert order.index("noisy_w") < order.index("noisy_x"), "nothing else is held up"


def test_mutation_freezes_the_order_but_for_the_waits(backward: Backward) -> None:
    outputs = two_layers(backward)
    backward.call("update", aten.copy_.default, backward.buffer, backward.tangent)
    assert backward.finish(*outputs) == [
        *("dx2", "dw2", "pack0", "launch0"),
        *("dx1", "dw1", "pack1", "launch1"),
        "update",
        *("wait0", "view0", "wait1", "view1"),
    ]


def test_reader_of_a_wait_of_the_models_own_does_not_move_across_a_mutation(backward: Backward) -> None:
    statistics = backward.reduce(7, backward.tangent, group="theirs")
    reader = backward.call("reader", aten.add.Tensor, statistics, backward.buffer)
    backward.call("update", aten.copy_.default, backward.buffer, backward.tangent)
    order = backward.finish(reader, backward.reduce(0, backward.riders))
    assert order.index("reader") < order.index("update")


def test_nothing_happens_without_a_launch(backward: Backward) -> None:
    dx = backward.call("dx", aten.mm.default, backward.tangent, backward.saved)
    theirs = backward.call("theirs", wait_tensor, dx)
    dw = backward.call("dw", aten.mm.default, backward.saved, backward.tangent)
    assert backward.finish(theirs, dw) == ["dx", "theirs", "dw"]
