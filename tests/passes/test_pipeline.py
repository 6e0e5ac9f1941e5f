"""The pipeline: the order of its passes, what identifies it, and that every step keeps the program's meaning.

The graphs are run here for several ranks in lockstep, with the all-reduce summing over their values: no process group.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import get_type_hints

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp.passes import pipeline as pipeline_module
from compiled_ddp.passes.ops import all_reduce, pack, pack_into, wait_tensor
from compiled_ddp.passes.pipeline import PASSES, Given, Pass, Pipeline
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten

STEPS = [
    "insert_all_reduces",
    "place_mean",
    "form_buckets",
    "pack_buckets",
    "schedule_collectives",
    "infer_values",
    "verify_collectives",
]
FOLDING_STEPS = [*STEPS[:2], "fold_into_products", *STEPS[2:]]
NAIVE_STEPS = ["insert_all_reduces", "form_buckets", "infer_values", "verify_collectives"]


# ---- the table of passes ---------------------------------------------------------------------------------------------


def test_table_of_contents_lists_every_pass_in_run_order() -> None:
    contents = re.findall(r"^\d+\. `(\w+)`", pipeline_module.__doc__ or "", flags=re.MULTILINE)
    assert contents == [pass_.name for pass_ in PASSES]


@pytest.mark.parametrize("pass_", PASSES, ids=lambda pass_: pass_.name)
def test_pass_is_a_function_in_a_file_of_its_name(pass_: Pass) -> None:
    assert (pass_.function.__module__, pass_.function.__name__) == (f"compiled_ddp.passes.{pass_.name}", pass_.name)


@pytest.mark.parametrize("pass_", PASSES, ids=lambda pass_: pass_.name)
def test_pass_asks_for_what_the_pipeline_gives(pass_: Pass) -> None:
    given, asked = get_type_hints(Given), get_type_hints(pass_.function)
    assert {name: asked[name] for name in pass_.asks_for} == {name: given[name] for name in pass_.asks_for}


# ---- a backward of two layers, on several ranks ----------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A backward function and its parameters: output i is the gradient of parameter i, further outputs are not."""

    backward: Callable[..., tuple[Tensor | None, ...]]
    parameters: tuple[Tensor, ...]

    def plan(self, world_size: int, cap_bytes: float) -> BucketPlan:
        specs = [GradientSpec.of(index, parameter) for index, parameter in enumerate(self.parameters)]
        return assign_buckets(specs[::-1], capacities_bytes=(cap_bytes, cap_bytes), world_size=world_size)

    def inputs(self, rank: int) -> list[Tensor]:
        """The tangents and the saved values of one rank."""
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(size, generator=generator) for size in ((4, 2), (4, 3), (4, 5), (2, 5))]

    def graph(self) -> Graph:
        return make_fx(self.backward, tracing_mode="fake")(*self.inputs(0)).graph


PARAMETERS = (
    torch.empty(5, 3),
    torch.empty(5, 2).t(),
    torch.empty(2, dtype=torch.float64),
    torch.empty(4, 5, 2, 2).to(memory_format=torch.channels_last),
    torch.empty(3),
)


def linear(tangents: Tensor, x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Two layers with a bias, an image-shaped parameter, and a parameter whose gradient is zero."""
    hidden_gradient = tangents @ weight
    image = hidden_gradient[:, :, None, None].expand(4, 5, 2, 2) * 2.0
    return hidden_gradient.t() @ x, tangents.t() @ hidden, tangents.double().sum(0), image, None


def with_activation(tangents: Tensor, x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """The same, and the gradient of an activation that another graph has made."""
    return *linear(tangents, x, hidden, weight), (tangents @ weight) @ weight.t(), None


def clamping(tangents: Tensor, x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Not linear in the tangents: what a clamping hook on a tensor does."""
    return with_activation(tangents.clamp(-0.1, 0.1), x, hidden, weight)


def auxiliary(tangents: Tensor, x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Not linear in the tangents: an auxiliary loss adds a constant."""
    return with_activation(tangents + 0.5, x, hidden, weight)


MODELS = [linear, with_activation, clamping, auxiliary]


def run_ranks(graph: Graph, inputs: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor | None, ...]]:
    """The graph's outputs on every rank; an all-reduce gives each rank the sum over all of them."""
    values: list[dict[Node, Tensor]] = [{} for _ in inputs]
    for place, node in enumerate(graph.nodes):
        if node.op == "output":
            return [torch.fx.node.map_arg(node.args[0], own.__getitem__) for own in values]
        if node.target is all_reduce:
            total = sum(own[node.args[0]] for own in values)
        for own, given in zip(values, inputs, strict=True):
            if node.op == "placeholder":
                own[node] = given[place]
            elif node.target is all_reduce:
                own[node] = total.clone()
            elif node.target is wait_tensor:
                own[node] = own[node.args[0]]
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), own.__getitem__)
                own[node] = node.target(*args, **kwargs)
    raise AssertionError("the graph has no output")


def riders_of(plan: BucketPlan, rank: int) -> Tensor:
    return torch.arange(float(plan.riders.numel)) + rank


def flat_buffers_of(plan: BucketPlan) -> list[Tensor]:
    """Memory for the packed buckets, with something in it that must not come out."""
    return [torch.full((bucket.numel,), 9.0, dtype=bucket.dtype) for bucket in plan.buckets]


def pending_of(plan: BucketPlan, rank: int) -> list[Tensor]:
    """Gradients that an earlier backward left, in plan order."""
    pending = []
    for bucket, gradient in plan.gradients:
        tensor = torch.empty_strided(gradient.size, gradient.stride, dtype=bucket.dtype)
        pending.append(tensor.fill_(10.0 * rank + gradient.index))
    return pending


def expected(model: Model, plan: BucketPlan, *, fold: bool) -> list[list[Tensor | None]]:
    """Every rank's outputs by hand: means of gradients, other outputs as they are, the sum of the riders."""
    world = range(plan.world_size)
    outputs = [list(model.backward(*model.inputs(rank))) for rank in world]
    shares: dict[int, list[Tensor]] = {}
    for index, parameter in enumerate(model.parameters):
        shares[index] = [torch.zeros_like(parameter) if own[index] is None else own[index] for own in outputs]
    if fold:
        for rank in world:
            for index, pending in zip(plan.indices, pending_of(plan, rank), strict=True):
                shares[index][rank] = shares[index][rank] + pending
    riders = torch.stack([riders_of(plan, rank) for rank in world]).sum(0)
    return [[*(torch.stack(shares[index]).mean(0) for index in shares), *own[len(shares) :], riders] for own in outputs]


@pytest.mark.parametrize("backward", MODELS)
@pytest.mark.parametrize("fold", [False, True], ids=["", "fold"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("cap_bytes", "naive"),
    [
        pytest.param(10**6, False, id="one bucket per dtype"),
        pytest.param(64, False, id="several buckets"),
        pytest.param(1, False, id="one bucket per gradient"),
        pytest.param(0, True, id="naive"),
    ],
)
def test_every_step_keeps_the_means_of_the_gradients_and_every_other_output(
    backward: Callable[..., tuple[Tensor | None, ...]], fold: bool, world_size: int, cap_bytes: int, naive: bool
) -> None:
    model = Model(backward, PARAMETERS)
    plan = model.plan(world_size, cap_bytes)
    wanted = expected(model, plan, fold=fold)
    inputs = [
        [*model.inputs(rank), riders_of(plan, rank), *(pending_of(plan, rank) if fold else []), *flat_buffers_of(plan)]
        for rank in range(world_size)
    ]
    steps = []

    def compare(step: str, graph: Graph) -> None:
        steps.append(step)
        graph.lint()
        for own, by_hand in zip(run_ranks(graph, inputs), wanted, strict=True):
            for value, hand in zip(own, by_hand, strict=True):
                torch.testing.assert_close(value, hand, msg=lambda text: f"after {steps[-1]}: {text}")

    pipeline = Pipeline(plan, "ours", fold=fold, naive=naive)
    graph = model.graph()
    pipeline.run(graph, output_positions={index: index for index in plan.indices}, observe=compare)
    assert steps == (NAIVE_STEPS if naive else FOLDING_STEPS if fold else STEPS)
    for own in run_ranks(graph, inputs):
        assert [own[index].stride() for index in range(5)] == [parameter.stride() for parameter in PARAMETERS]


# ---- the program that comes out --------------------------------------------------------------------------------------


def rewritten(backward: Callable[..., tuple[Tensor | None, ...]], world_size: int, *, naive: bool = False) -> Graph:
    model = Model(backward, PARAMETERS)
    plan = model.plan(world_size, cap_bytes=0 if naive else 64)
    graph = model.graph()
    Pipeline(plan, "ours", naive=naive).run(graph, output_positions={index: index for index in plan.indices})
    return graph


def count(graph: Graph, op: Callable[..., object]) -> int:
    return len(graph.find_nodes(op="call_function", target=op))


def scaled_by(graph: Graph, factor: float) -> list[str]:
    """What is multiplied by `factor`, in the order of the graph."""
    multiplications = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    return [node.args[0].name for node in multiplications if node.args[1] == factor]


def test_number_of_all_reduces_is_the_number_of_buckets() -> None:
    plan = Model(linear, PARAMETERS).plan(2, cap_bytes=64)
    graph = rewritten(linear, 2)
    assert count(graph, all_reduce) == count(graph, wait_tensor) == count(graph, pack_into) == len(plan.buckets)
    assert count(graph, aten.cat.default) == 0


def test_naive_program_has_an_all_reduce_per_gradient_and_one_for_the_riders() -> None:
    graph = rewritten(linear, 2, naive=True)
    assert count(graph, all_reduce) == count(graph, aten.cat.default) == len(PARAMETERS) + 1
    assert count(graph, pack) == count(graph, pack_into) == 0


@pytest.mark.parametrize(
    ("backward", "world_size", "on_tangents"),
    [
        (linear, 2, True),
        (linear, 3, True),
        (with_activation, 2, True),
        (with_activation, 3, False),
        (clamping, 2, False),
        (auxiliary, 2, False),
    ],
)
def test_mean_is_on_the_tangents_only_where_that_is_right(
    backward: Callable[..., tuple[Tensor | None, ...]], world_size: int, on_tangents: bool
) -> None:
    scaled = scaled_by(rewritten(backward, world_size), 1 / world_size)
    assert (scaled == ["tangents_1"]) == on_tangents
    assert on_tangents or len(scaled) == len(PARAMETERS)


def test_naive_program_takes_the_mean_of_each_gradient() -> None:
    assert len(scaled_by(rewritten(linear, 2, naive=True), 0.5)) == len(PARAMETERS)


def test_empty_plan_leaves_the_graph_as_it_is() -> None:
    graph = Model(linear, ()).graph()
    before = str(graph)
    Pipeline(BucketPlan((), 2), "ours").run(graph, output_positions={})
    assert str(graph) == before


def test_graph_that_does_not_launch_what_the_plan_says_is_refused() -> None:
    model = Model(linear, PARAMETERS)
    graph = model.graph()
    plan = model.plan(2, cap_bytes=64)

    def break_it(step: str, graph: Graph) -> None:
        if step == "schedule_collectives":
            graph.find_nodes(op="call_function", target=all_reduce)[0].update_arg(1, "max")

    with pytest.raises(AssertionError, match="reduces by max"):
        Pipeline(plan, "ours").run(graph, output_positions={i: i for i in plan.indices}, observe=break_it)


# ---- identity --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(Model(linear, PARAMETERS).plan(2, cap_bytes=64), "ours")


def test_equal_pipelines_have_one_cache_identity(pipeline: Pipeline) -> None:
    same = Pipeline(Model(linear, PARAMETERS).plan(2, cap_bytes=64), "ours")
    assert (same, same.cache_identity) == (pipeline, pipeline.cache_identity)


def test_cache_identity_changes_with_everything_that_a_pass_is_given(pipeline: Pipeline) -> None:
    model = Model(linear, PARAMETERS)
    pipelines = [
        pipeline,
        replace(pipeline, plan=model.plan(2, cap_bytes=1000)),
        replace(pipeline, plan=model.plan(3, cap_bytes=64)),
        replace(pipeline, group_name="theirs"),
        replace(pipeline, fold=True),
        replace(pipeline, naive=True),
        replace(pipeline, in_place=True),
        replace(pipeline, replayed=True),
    ]
    assert len({each.cache_identity for each in pipelines}) == len(pipelines)


def test_cache_identity_changes_with_the_passes_that_run(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pipeline.cache_identity
    monkeypatch.setattr(pipeline_module, "PASSES", PASSES[:-1])
    assert pipeline.cache_identity != before


def test_running_a_pipeline_does_not_change_its_identity(pipeline: Pipeline) -> None:
    before = pipeline.cache_identity
    pipeline.run(Model(linear, PARAMETERS).graph(), output_positions={index: index for index in range(5)})
    assert pipeline.cache_identity == before


def test_pipeline_is_frozen(pipeline: Pipeline) -> None:
    with pytest.raises(FrozenInstanceError):
        pipeline.fold = True  # type: ignore[misc]
