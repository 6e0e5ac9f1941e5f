"""What a plan, a sequence, the proof and the passes cost with many parameters: in proportion to their number."""

import operator
from collections.abc import Callable

import pytest
import torch
from growth import assert_linear, assert_proportional, lines_and_edits, work_until_each_note
from torch import nn
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp import torch_private
from compiled_ddp.checks.sums import batched, batched_in_place
from compiled_ddp.model.checks import check_layouts, check_model, check_writable, describe_model
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.options import Options
from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.passes.pipeline import PASSES, Pipeline
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import BucketPolicy, assign_buckets
from compiled_ddp.planning.planners import SizedBuckets
from compiled_ddp.planning.sequence import Observations, SequencePlanner
from compiled_ddp.planning.trained_parameters import TrainedParameters

aten = torch.ops.aten
CPU = torch.device("cpu")
CAP_BYTES = 10**6  # everything in one bucket
FEW_BYTES = 64  # eight gradients to a bucket


class Number(int):
    """An index that can be seen to be compared, as it is when a list is searched."""

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __hash__(self) -> int:
        return int.__hash__(self)


def specs(count: int) -> list[GradientSpec]:
    return [GradientSpec(Number(index), (2,), (1,), torch.float32, CPU) for index in range(count)]


def plan_of(count: int, cap_bytes: int) -> BucketPlan:
    return assign_buckets(specs(count), capacities_bytes=(cap_bytes,), world_size=2)


def parameters(count: int) -> TrainedParameters:
    names = tuple(f"p{index}" for index in range(count))
    return TrainedParameters(names, tuple(nn.Parameter(torch.empty(2)) for _ in names))


def planner(count: int, cap_bytes: int) -> SequencePlanner:
    return SequencePlanner(parameters(count), BucketPolicy(SizedBuckets((cap_bytes,)), world_size=2))


both = pytest.mark.parametrize("cap_bytes", [CAP_BYTES, FEW_BYTES], ids=["one bucket", "many buckets"])


# ---- plan and sequence -----------------------------------------------------------------------------------------------


@both
def test_buckets_are_assigned_in_linear_time(cap_bytes: int) -> None:
    def prepare(count: int) -> Callable[[], object]:
        given = specs(count)
        return lambda: assign_buckets(given, capacities_bytes=(cap_bytes,), world_size=2)

    assert_linear(prepare)


@both
def test_a_plan_is_renumbered_and_identified_in_linear_time(cap_bytes: int) -> None:
    def prepare(count: int) -> Callable[[], object]:
        plan, reverse = plan_of(count, cap_bytes), {index: count - index for index in range(count)}
        return lambda: plan.renumbered(reverse).fingerprint

    assert_linear(prepare)


@both
def test_a_sequence_is_proposed_sent_and_refined_in_linear_time(cap_bytes: int) -> None:
    def prepare(count: int) -> Callable[[], object]:
        made = planner(count, cap_bytes)
        seen = Observations({("hook", Number(index)): None for index in range(count)})

        def run() -> None:
            sequence = made.decode(made.encode(made.propose([])))
            assert made.refine(sequence, seen, {0}).fingerprint

        return run

    assert_linear(prepare)


def test_what_follows_from_a_plan_and_a_sequence_is_worked_out_once() -> None:
    plan = plan_of(8, FEW_BYTES)
    sequence = planner(8, FEW_BYTES).propose([])
    assert plan.indices is plan.indices and plan.fingerprint is plan.fingerprint
    assert plan.buckets[0].indices is plan.buckets[0].indices
    assert sequence.launched is sequence.launched and sequence.buckets is sequence.buckets


def test_arrivals_are_noted_in_linear_time_however_often_each_comes() -> None:
    def prepare(count: int) -> Callable[[], object]:
        observations, arrivals = Observations(), [Number(index) for index in range(count)] * 2
        return lambda: [observations.note_arrival("hook", index) for index in arrivals]

    assert_linear(prepare)


# ---- the model -------------------------------------------------------------------------------------------------------


def test_a_model_is_checked_in_linear_time_and_its_modules_are_walked_through_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(count: int) -> Callable[[], object]:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))

        def run() -> None:
            _, contents = check_model(model, "EagerDDP")
            check_layouts(contents, Options())
            check_writable(contents)
            describe_model(contents, Options(), "auto", at_init=True)

        return run

    assert_linear(prepare)
    walks = []
    modules = ManagedState.modules
    monkeypatch.setattr(ManagedState, "modules", lambda state: walks.append(state) or modules(state))
    prepare(2)()
    assert len(walks) == 3  # parameters, buffers, and which gradients are sparse


# ---- the proof -------------------------------------------------------------------------------------------------------


class Operators(torch_private.autograd.DispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators_for_checksums(rows: list[torch.Tensor]) -> int:
    with Operators() as operators:
        for _, batch in batched(enumerate(rows)):
            batch.checksums(), batch.are_finite()
    return operators.count


def test_checksums_of_small_gradients_take_as_many_operators_for_a_thousand_as_for_one() -> None:
    assert operators_for_checksums([torch.ones(2)] * 1000) <= operators_for_checksums([torch.ones(2)])


def test_large_gradients_are_not_copied_together() -> None:
    large = torch.ones(10**5)
    batches = list(batched([(0, torch.ones(2)), (1, large), (2, torch.ones(3)), (3, large)]))
    assert sorted(list(numbers) for numbers, _ in batches) == [[0, 2], [1], [3]]


def test_rows_that_are_taken_together_are_bounded() -> None:
    rows = [torch.empty(4000)] * 1000
    assert max(len(numbers) for numbers, _ in batched(enumerate(rows))) < 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("sizes", [[3, 1, 0, 7], [3, 5000, 2]], ids=["small", "with a large one"])
def test_rows_back_to_back_have_the_checksums_of_rows_anywhere(sizes: list[int], dtype: torch.dtype) -> None:
    values = torch.randn(sum(sizes), dtype=dtype)
    anywhere = batched(enumerate(row.clone() for row in values.split(sizes)))
    expected = {
        number: sum_
        for numbers, batch in anywhere
        for number, sum_ in zip(numbers, batch.checksums().tolist(), strict=True)
    }
    found = {
        number: sum_
        for numbers, batch in batched_in_place(range(len(sizes)), values, sizes)
        for number, sum_ in zip(numbers, batch.checksums().tolist(), strict=True)
    }
    assert found == expected


def test_small_gradients_of_a_bucket_are_not_looked_at_one_by_one() -> None:
    ((numbers, _),) = batched_in_place(range(1000), torch.empty(2000), [2] * 1000)
    assert len(numbers) == 1000
    assert not any(batched_in_place((), torch.empty(0), ()))


# ---- passes ----------------------------------------------------------------------------------------------------------


def backward(count: int) -> Graph:
    """A chain that the tangent goes through, with a gradient at each link and a second tangent at its head."""
    graph = Graph()
    tangents = [graph.placeholder("tangents_1"), graph.placeholder("tangents_2")]
    saved = [graph.placeholder(f"saved_{index}") for index in range(count)]
    link = graph.call_function(aten.add.Tensor, tuple(tangents))
    gradients = []
    for value in saved:
        link = graph.call_function(aten.neg.default, (link,))
        gradients.append(graph.call_function(aten.mul.Tensor, (link, value)))
    graph.output(tuple(gradients))
    traced = make_fx(torch.neg, tracing_mode="fake")(torch.ones(2)).graph
    fake = traced.find_nodes(op="placeholder")[0].meta["val"]
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = fake
    return graph


def work_of_passes(pipeline: Pipeline, graph: Graph, count: int) -> dict[str, int]:
    """What the pipeline costs up to each of its passes, by their names."""
    positions = {index: index for index in range(count)}
    torch_private.for_tests.forget_fake_results()
    return work_until_each_note(
        lambda note: pipeline.run(graph, output_positions=positions, observe=lambda name, _: note(name))
    )


@pytest.mark.product
@both
@pytest.mark.parametrize("fold", [False, True], ids=["", "fold"])
@pytest.mark.parametrize("in_place", [False, True], ids=["compiled", "in place"])
def test_the_passes_up_to_each_one_are_linear(in_place: bool, fold: bool, cap_bytes: int) -> None:
    def work(count: int) -> dict[str, int]:
        pipeline = Pipeline(plan_of(count, cap_bytes), "ours", fold=fold, in_place=in_place)
        return work_of_passes(pipeline, backward(count), count)

    work(100)  # for what is done once in a process
    few, many = work(100), work(1000)
    left_out = {"infer_values" if in_place else "reduce_in_place", *(() if fold else ("fold_into_products",))}
    assert list(few) == list(many) == [pass_.name for pass_ in PASSES if pass_.name not in left_out]
    for name in few:
        assert_proportional(few[name], many[name], name=name)


@both
def test_the_passes_of_a_functional_step_are_linear(cap_bytes: int) -> None:
    def prepare(count: int) -> Callable[[], object]:
        plan = assign_buckets(specs(count), capacities_bytes=(cap_bytes,), world_size=2, reduction="sum")
        graph = backward(count)
        leading = graph.find_nodes(op="placeholder")[0]
        gradients = list(output_values(graph))
        output = graph.output_node()
        with graph.inserting_before(output):
            arguments = (gradients, [], leading, list(range(count)), [0.0], 2, "ours")
            sums = graph.call_function(sum_over_ranks, arguments)
            output.args = (tuple(graph.call_function(operator.getitem, (sums, index)) for index in range(count + 1)),)
        torch_private.for_tests.forget_fake_results()
        return lambda: StepPipeline(((plan, "ours"),)).run(graph)

    assert_linear(prepare, work=lines_and_edits)
