"""Parameters that a step leaves under way, on graphs built by hand."""

import operator

import pytest
import torch
from torch.fx import Graph, Node

from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.functional.shares import rows_of
from compiled_ddp.passes.gather_later import arrive_in_place, buckets_to_gather, departing, gather_later
from compiled_ddp.passes.lend_rows import Lent, lent_memory
from compiled_ddp.passes.ops import (
    LAUNCHES,
    all_gather,
    all_reduce,
    exchange_of_all,
    exchange_of_all_into,
    exchange_of_sums,
    exchange_of_sums_into,
    gathered_before,
    optimizer_step,
    optimizer_step_in_place,
    pack,
    put_together,
    put_together_in_place,
    reduce_scatter,
    sum_numbers,
    sum_over_ranks,
    summed_before,
    taken_apart,
    wait_tensor,
)
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.plan import FIRST_USED, BucketPlan

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
CPU = torch.device("cpu")
SIZES = (4, 4)  # of two parameters, the first of which the forward reads first


def plan(lengths: tuple[int, ...] = (1, 1), *, whole: bool = False, sizes: tuple[int, ...] = SIZES) -> BucketPlan:
    specs = tuple(spec_of(index, (size,), torch.float32, CPU) for index, size in enumerate(sizes))
    return plan_of(specs, (1, 0), (*lengths, 0), 2, 0, is_scattered=True, whole=whole)


def with_value(node: Node, dtype: torch.dtype) -> Node:
    node.meta["val"] = torch.empty(2, dtype=dtype, device="meta")
    return node


def step_graph(by: str, lengths: tuple[int, ...] = (1, 1)) -> Graph:
    """x * first * second, of which each parameter reads its gradient last; what arrives is read in the other order."""
    graph, planned = Graph(), plan(lengths)
    x, first, second, leading = map(graph.placeholder, ("x", "first", "second", "leading"))
    arrived = [graph.placeholder(f"gathered_{n}") for n, _ in enumerate(planned.of_gradients)]
    sound = graph.placeholder("sound")
    leading.meta["val"] = torch.empty(FIRST_USED, device="meta")
    before = graph.call_function(gathered_before, ([first, second],))
    weights = [graph.call_function(operator.getitem, (before, index)) for index in (0, 1)]
    hidden = graph.call_function(aten.mul.Tensor, (x, weights[0]))
    # Its first argument is the weight: what a depth-first order of inputs would await first.
    result = graph.call_function(aten.mul.Tensor, (weights[1], hidden))
    of_second = graph.call_function(aten.mul.Tensor, (result, hidden))
    of_first = graph.call_function(aten.mul.Tensor, (of_second, x))
    sums = graph.call_function(sum_over_ranks, ([of_first, of_second], [], leading, [1, 0], [1, 1], 2, "", by))
    shares = [graph.call_function(operator.getitem, (sums, index)) for index in (0, 1)]
    riders = graph.call_function(operator.getitem, (sums, 2))
    graph.output((result, riders, *shares, graph.call_function(aten.eq.Scalar, (riders, 1))))
    buckets = buckets_to_gather(planned, [torch.float32] * 2)
    gather_later(graph, planned, buckets, arrived=[*arrived, sound], group_name="g", by=by)
    return graph


def with_memory(graph: Graph, planned: BucketPlan) -> dict[Lent, Node]:
    """Inputs behind all others, which have the names of what they are for."""
    lent = lent_memory(planned)
    *_, last = graph.find_nodes(op="placeholder")
    for each in reversed(lent):
        with graph.inserting_after(last):
            graph.placeholder(f"{each.what.replace(' ', '_')}_{planned.of_gradients.index(each.bucket)}")
    return dict(zip(lent, graph.find_nodes(op="placeholder")[-len(lent) :], strict=True))


def order(graph: Graph) -> list[object]:
    """Of what communicates, and of products; waits for inputs as their names."""
    found: list[object] = []
    for node in graph.nodes:
        if node.target is wait_tensor:
            awaited: Node = node.args[0]
            found.append(awaited.name if awaited.op == "placeholder" else wait_tensor)
        elif node.target in (*LAUNCHES, aten.mul.Tensor):
            found.append(node.target)
    return found


@pytest.mark.parametrize(
    ("by", "scatters", "gathers"),
    [("exchange", exchange_of_sums, exchange_of_all), ("reduce_scatter", reduce_scatter, all_gather)],
)
def test_each_bucket_is_awaited_where_it_is_read_and_gathered_behind_all_others(
    by: str, scatters: object, gathers: object
) -> None:
    graph = step_graph(by)
    StepPipeline(((plan(), "g"),)).run(graph)
    mul = aten.mul.Tensor
    forward = ["gathered_0", mul, "gathered_1", mul]
    # The last sum is that of what the next forward reads first, and so is the first to be gathered.
    backward = [mul, scatters, mul, scatters, wait_tensor, wait_tensor, wait_tensor, gathers, gathers]
    assert order(graph) == [all_reduce, *forward, *backward]
    graph.lint()


def test_nothing_of_what_departs_is_awaited_and_its_memory_is_kept() -> None:
    graph = step_graph("exchange")
    (outputs,) = graph.output_node().args
    launched, sent = outputs[2:4], outputs[4:6]
    assert [each.target for each in launched] == [exchange_of_all] * 2
    assert [each.args[0] for each in launched] == [*sent]
    assert not any(user.target is wait_tensor for each in launched for user in each.users)


def test_what_arrives_is_a_row_of_each_rank() -> None:
    """Of a bucket of both: first the shares of the second parameter, then those of the first."""
    row = torch.arange(8.0)
    second, first = put_together(row, torch.tensor(True), [torch.ones(4), torch.ones(2, 2)], 2)
    assert second.tolist() == [0, 1, 4, 5] and first.tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize("size", [(5, 3), (4, 4), (1,), ()])
def test_what_is_put_together_is_what_was_shared(size: tuple[int, ...]) -> None:
    """Also where shares are filled up, and into memory of another order."""
    value = torch.randn(size)
    gathered = rows_of(value, 3).reshape(-1)
    (found,) = put_together(gathered, torch.tensor(True), [torch.empty(size)], 3)
    transposed = torch.empty(size).t() if len(size) == 2 and size[0] == size[1] else torch.empty(size)
    put_together_in_place(gathered, torch.tensor(True), [transposed], 3)
    assert torch.equal(found, value) and torch.equal(transposed, value)
    (kept,) = put_together(gathered, torch.tensor(False), [torch.ones(size)], 3)
    assert torch.equal(kept, torch.ones(size))


def writing_graph(*, reads_before: bool) -> Graph:
    graph = Graph()
    param, gathered, sound = map(graph.placeholder, ("param", "gathered", "sound"))
    early = [graph.call_function(aten.neg.default, (param,))] if reads_before else []
    made = graph.call_function(put_together, (graph.call_function(wait_tensor, (gathered,)), sound, [param], 2))
    weight = graph.call_function(operator.getitem, (made, 0))
    result = graph.call_function(aten.exp.default, (weight,))
    graph.call_function(aten.copy_.default, (param, weight))
    graph.output((result, *early))
    return graph


def test_parameters_are_put_together_where_they_are() -> None:
    graph = writing_graph(reads_before=False)
    arrive_in_place(graph)
    graph.lint()
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets == [wait_tensor, put_together_in_place, aten.exp.default]
    exp = graph.find_nodes(op="call_function", target=aten.exp.default)[0]
    assert exp.args[0].name == "param"


def test_what_reads_the_old_values_keeps_them() -> None:
    graph = writing_graph(reads_before=True)
    before = [node.target for node in graph.nodes]
    arrive_in_place(graph)
    assert [node.target for node in graph.nodes] == before


@pytest.mark.parametrize("as_view", [False, True])
def test_what_is_returned_keeps_memory_of_its_own(as_view: bool) -> None:
    graph = writing_graph(reads_before=False)
    (weight,) = graph.find_nodes(op="call_function", target=operator.getitem)
    with graph.inserting_before(graph.output_node()):
        returned = graph.call_function(aten.detach.default, (weight,)) if as_view else weight
    graph.output_node().args = ((*graph.output_node().args[0], returned),)
    arrive_in_place(graph)
    assert graph.find_nodes(op="call_function", target=put_together)


# ---- sums of gradients, of which the next step makes its update ------------------------------------------------------


GATHERED = ("gathered_0", "gathered_1")


def deferred_graph(
    planned: BucketPlan | None = None,
    *,
    clips: bool = False,
    reads_old: bool = False,
    sums: bool = False,
    sent: torch.dtype = torch.float32,
) -> Graph:
    """x * first * second as above, behind an update of both with momentum, of sums that the step before has left.

    A hook has summed them as `sent`, and made float32 of that.
    """
    graph, planned = Graph(), planned or plan()
    gathered = GATHERED[: len(planned.of_gradients)]
    names = ("x", "first", "second", "of_first", "of_second", "numbers", "factor", "leading", *gathered, "sound")
    nodes = {name: graph.placeholder(name) for name in names}
    nodes["leading"].meta["val"] = torch.empty(FIRST_USED, device="meta")
    params, state = [nodes["first"], nodes["second"]], [nodes["of_first"], nodes["of_second"]]
    before = graph.call_function(summed_before, (params,))
    *of_before, sound = [graph.call_function(operator.getitem, (before, index)) for index in range(3)]
    numels = {gradient.index: gradient.numel for _, gradient in planned.gradients}
    for index, each in enumerate(of_before):
        each.meta["val"] = torch.empty(numels[index], device="meta")
    skip = graph.call_function(aten.bitwise_not.default, (sound,))
    factor = graph.call_function(aten.add.Tensor, (nodes["factor"], of_before[0])) if clips else nodes["factor"]
    terms = nodes["numbers"], factor, skip, None, "SGD", "momentum", "lr,momentum,weight_decay"
    update = graph.call_function(optimizer_step, (params, of_before, state, [], *terms))
    new = [graph.call_function(operator.getitem, (update, index)) for index in range(4)]
    hidden = graph.call_function(aten.mul.Tensor, (nodes["x"], new[0]))
    result = graph.call_function(aten.mul.Tensor, (new[1], hidden))
    gradients = [graph.call_function(aten.mul.Tensor, (result, each)) for each in (nodes["x"], hidden)]
    reduced = graph.call_function(
        sum_over_ranks, (gradients, [], nodes["leading"], [1, 0], [1, 1], 2, "", "exchange", planned.buckets[1].whole)
    )
    shares = [graph.call_function(operator.getitem, (reduced, index)) for index in (0, 1)]
    if sent != torch.float32:
        shares = [graph.call_function(convert, (with_value(each, sent), torch.float32)) for each in shares]
    riders = graph.call_function(operator.getitem, (reduced, 2))
    is_sound = graph.call_function(aten.eq.Scalar, (riders, 1))
    if sums:  # of all gradients, for clipping
        norms = graph.call_function(aten.add.Tensor, tuple(shares))
        riders = graph.call_function(sum_numbers, (norms, "g"))
    old = [graph.call_function(aten.neg.default, (nodes["second"],))] if reads_old else []
    for into, value in zip((*params, *state), new, strict=True):
        graph.call_function(aten.copy_.default, (into, value))
    graph.output((result, *old, riders, *shares, is_sound))
    arrived = [nodes[name] for name in (*gathered, "sound")]
    buckets = buckets_to_gather(planned, [sent] * 2)
    gather_later(graph, planned, buckets, arrived=arrived, group_name="g", by="exchange")
    return graph


def test_each_bucket_is_updated_where_the_forward_reads_it() -> None:
    graph = deferred_graph()
    StepPipeline(((plan(), "g"),)).run(graph)
    mul, updates = aten.mul.Tensor, [node for node in graph.nodes if node.target is optimizer_step_in_place]
    assert [[each.name for each in node.args[0]] for node in updates] == [["first"], ["second"]]
    assert [[each.name for each in node.args[2]] for node in updates] == [["of_first"], ["of_second"]]
    assert [node.args[5].name for node in updates] == ["factor", "factor"]
    forward = [node.target for node in graph.nodes if node.target in (mul, taken_apart, optimizer_step_in_place)][:6]
    assert forward == [taken_apart, optimizer_step_in_place, mul] * 2
    assert order(graph)[:6] == [all_reduce, "gathered_0", mul, "gathered_1", mul, mul]
    assert not graph.find_nodes(op="call_function", target=aten.copy_.default)


@pytest.mark.parametrize("lends", [False, True])
def test_numbers_are_summed_before_anything_is_gathered(lends: bool) -> None:
    """As by a rank that has failed, which sends zeros."""
    graph = deferred_graph(sums=True)
    if lends:
        with_memory(graph, plan())
    StepPipeline(((plan(), "g"),), lent=lends).run(graph)
    scatters, gathers = (exchange_of_sums_into, exchange_of_all_into) if lends else (exchange_of_sums, exchange_of_all)
    launched = [node.target for node in graph.nodes if node.target in LAUNCHES]
    assert launched == [all_reduce, *[scatters] * 2, all_reduce, *[gathers] * 2]
    if lends:
        first, _ = graph.find_nodes(op="call_function", target=gathers)
        assert [each.target for each in first.args[2]] == [all_reduce], "by which a compiler knows"


def test_sums_that_are_whole_are_read_where_they_have_arrived() -> None:
    """And gradients are packed back to back, with what fills them up, in place of a row for each rank."""
    planned = plan((2,), whole=True, sizes=(4, 3))
    graph = deferred_graph(planned)
    StepPipeline(((planned, "g"),)).run(graph)
    assert not graph.find_nodes(op="call_function", target=taken_apart)
    (update,) = graph.find_nodes(op="call_function", target=optimizer_step_in_place)
    parts = [gradient.args[0] for gradient in update.args[1]]  # of the first parameter, then of the second
    assert [each.args[1:] for each in parts] == [(0, 3, 7), (0, 0, 3)]
    assert {each.args[0].target for each in parts} == {wait_tensor}
    (packed,) = graph.find_nodes(op="call_function", target=pack)
    *gradients, filler = packed.args[0]
    assert len(gradients) == 2 and filler.args[:2] == ([1], 0.0)
    (scatter,) = graph.find_nodes(op="call_function", target=exchange_of_sums)
    (gather,) = graph.find_nodes(op="call_function", target=exchange_of_all)
    assert scatter.args[:3] == (packed, 2, 3) and gather.args[1:3] == (2, 4)


def graph_of_departing(sent: torch.dtype, made: torch.dtype) -> Graph:
    """Nothing but what a step leaves of two sums."""
    graph = Graph()
    param, *sums = map(graph.placeholder, ("param", "first", "second"))
    graph.call_function(summed_before, ([param],))
    shares = [with_value(graph.call_function(convert, (with_value(each, sent), made)), made) for each in sums]
    graph.output((*shares, param))
    return graph


def test_sums_are_gathered_as_they_were_sent_and_widened_where_they_have_come() -> None:
    """As a hook does that sends 16 bits: half of the bytes, and the same numbers."""
    planned = plan((2,), whole=True)
    graph = deferred_graph(planned, sent=torch.bfloat16)
    left = departing(graph_of_departing(torch.bfloat16, torch.float32), 2)
    (bucket,) = buckets_to_gather(planned, [each.meta["val"].dtype for each in left])
    assert bucket.dtype == torch.bfloat16
    (gather,) = graph.find_nodes(op="call_function", target=exchange_of_all)
    assert [part.target for part in gather.args[0].args[0]] == [operator.getitem] * 2, "what was summed"
    (update,) = graph.find_nodes(op="call_function", target=optimizer_step)
    assert [each.args[0].target for each in update.args[1]] == [convert] * 2


def test_what_a_hook_has_rounded_or_computed_is_gathered_as_it_is() -> None:
    for narrow, wide in ((torch.float32, torch.bfloat16), (torch.int32, torch.float32)):
        graph = graph_of_departing(narrow, wide)
        assert departing(graph, 2) == list(graph.output_node().args[0])[:2]


def test_one_whose_old_values_are_read_makes_others() -> None:
    graph = deferred_graph(reads_old=True)
    StepPipeline(((plan(), "g"),)).run(graph)
    in_place, copying = (
        graph.find_nodes(op="call_function", target=target) for target in (optimizer_step_in_place, optimizer_step)
    )
    assert [[each.name for each in node.args[0]] for node in (*in_place, *copying)] == [["first"], ["second"]]


def test_an_update_that_needs_all_sums_stays_one() -> None:
    graph = deferred_graph(clips=True)
    assert len(graph.find_nodes(op="call_function", target=optimizer_step)) == 1


@pytest.mark.parametrize("sizes", [[(5, 3)], [(4, 4), (1,), ()], [(7,), (2, 3)]])
def test_what_is_taken_apart_is_what_was_shared(sizes: list[tuple[int, ...]]) -> None:
    values = [torch.randn(size) for size in sizes]
    gathered = torch.cat([rows_of(each, 3) for each in values], dim=1).reshape(-1)
    found = taken_apart(gathered, [each.numel() for each in values], 3)
    assert all(torch.equal(one, other.reshape(-1)) for one, other in zip(found, values, strict=True))
