"""`place_mean`: the factor 1/world stands on the tangents where that is proven to be the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.insert_all_reduces import insert_all_reduces
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.passes.place_mean import place_mean
from compiled_ddp.passes.prove_linearity import LinearityProof
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten

Backward = Callable[..., tuple[Tensor | None, ...]]


def plan_of(count: int, world_size: int) -> BucketPlan:
    """Gradients 0 to `count`, each of shape (2, 2)."""
    specs = [GradientSpec.of(index, torch.empty(2, 2)) for index in range(count)]
    return assign_buckets(specs, capacities_bytes=(1000, 1000), world_size=world_size)


class Program:
    """The naive program of a backward whose arguments have shape (2, 2); output i is the gradient of parameter i."""

    def __init__(self, backward: Backward, *, parameters: int, world_size: int = 4, fold: bool = False) -> None:
        inputs = [torch.ones(2, 2) for _ in range(backward.__code__.co_argcount)]
        self.plan = plan_of(parameters, world_size)
        self.positions = {index: index for index in range(parameters)}
        self.graph: Graph = make_fx(backward, tracing_mode="fake")(*inputs).graph
        insert_all_reduces(self.graph, self.plan, group_name="ours", output_positions=self.positions, fold=fold)

    @property
    def tangents(self) -> list[Node]:
        return [node for node in self.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]

    def place(self) -> LinearityProof:
        proof = place_mean(
            self.graph, self.plan, group_name="ours", tangents=self.tangents, output_positions=self.positions
        )
        self.graph.lint()
        return proof

    def factors(self) -> list[tuple[str, float]]:
        """What is multiplied by a number, in the order of the graph."""
        multiplications = self.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        return [(node.args[0].name, node.args[1]) for node in multiplications if isinstance(node.args[1], float)]

    def launched(self) -> list[Node]:
        """What each of our all-reduces takes, the riders' excepted."""
        launches = self.graph.find_nodes(op="call_function", target=all_reduce)
        return [launch.args[0] for launch in launches if launch.args[2] == "ours"][:-1]


def linear(tangents: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return tangents @ x, tangents.neg()


def two_tangents(tangents: Tensor, tangents_of_loss: Tensor, x: Tensor) -> tuple[Tensor]:
    return (tangents @ x + tangents_of_loss,)


def with_activation(tangents: Tensor, x: Tensor) -> tuple[Tensor, Tensor, None]:
    return tangents @ x, tangents.neg(), None


def clamping(tangents: Tensor, x: Tensor) -> tuple[Tensor]:
    return (tangents.clamp(-0.1, 0.1) @ x,)


# ---- where the proof holds -------------------------------------------------------------------------------------------


def test_tangent_is_scaled_once_and_the_gradients_no_longer() -> None:
    program = Program(linear, parameters=2)
    assert program.factors() == [("mm", 0.25), ("neg", 0.25)]
    assert program.place() == LinearityProof(proven=True, reason="")
    assert program.factors() == [("tangents_1", 0.25)]
    assert {node.name for node in program.launched()} == {"mm", "neg"}


def test_scaled_tangent_stands_before_all_its_readers() -> None:
    program = Program(linear, parameters=2)
    program.place()
    (tangent,) = program.tangents
    (scaled,) = tangent.users
    assert scaled.prev.name == "riders"
    assert {reader.name for reader in scaled.users} == {"mm", "neg"}


def test_every_tangent_is_scaled() -> None:
    program = Program(two_tangents, parameters=1)
    assert program.place().proven
    assert sorted(program.factors()) == [("tangents_1", 0.25), ("tangents_of_loss_1", 0.25)]


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_factor_is_one_by_the_world_size(world_size: int) -> None:
    program = Program(linear, parameters=2, world_size=world_size)
    assert program.place().proven
    assert program.factors() == [("tangents_1", 1 / world_size)]


def test_output_that_is_no_parameters_gradient_is_scaled_back() -> None:
    program = Program(with_activation, parameters=1)
    assert program.place().proven
    assert program.factors() == [("tangents_1", 0.25), ("neg", 4.0)]
    _, activation, nothing, riders = output_values(program.graph)
    assert activation.args[0].name == "neg"
    assert nothing is None
    assert riders.target is wait_tensor


def test_value_that_is_both_a_parameters_and_an_activations_gradient_is_scaled_back_for_the_activation_alone() -> None:
    def backward(tangents: Tensor) -> tuple[Tensor, Tensor]:
        gradient = tangents.neg()
        return gradient, gradient

    program = Program(backward, parameters=1)
    assert program.place().proven
    assert program.factors() == [("tangents_1", 0.25), ("neg", 4.0)]
    assert [node.name for node in program.launched()] == ["neg"]


def test_pending_gradient_keeps_its_own_share() -> None:
    program = Program(linear, parameters=2, fold=True)
    assert program.place().proven
    assert sorted(program.factors()) == [("pending_0", 0.25), ("pending_1", 0.25), ("tangents_1", 0.25)]
    assert all(node.target is aten.add.Tensor for node in program.launched())


def test_gradient_known_to_be_zero_does_not_hinder_the_proof() -> None:
    program = Program(with_activation, parameters=3)
    assert program.place().proven
    assert program.factors() == [("tangents_1", 0.25)]


def test_gradient_that_the_backward_itself_multiplies_by_one_by_world_keeps_that_factor() -> None:
    program = Program(lambda tangents: (tangents * 0.25,), parameters=1)
    assert program.place().proven
    assert [factor for _, factor in program.factors()] == [0.25, 0.25]
    assert program.launched()[0].name == "mul"


def test_gradient_that_is_the_tangent_itself_is_launched_scaled() -> None:
    program = Program(lambda tangents: (tangents,), parameters=1)
    program.place()
    (launched,) = program.launched()
    assert launched.target is aten.mul.Tensor


def test_activations_gradient_that_is_the_tangent_itself_is_not_scaled() -> None:
    program = Program(lambda tangents, x: (tangents @ x, tangents), parameters=1)
    program.place()
    _, activation, _ = output_values(program.graph)
    factor = 1.0
    while activation.target is aten.mul.Tensor:
        factor *= activation.args[1]
        activation = activation.args[0]
    assert activation.name == "tangents_1"
    assert factor == 1.0


# ---- where it does nothing -------------------------------------------------------------------------------------------


def test_nothing_happens_without_the_proof_and_the_reason_is_told() -> None:
    program = Program(clamping, parameters=1)
    before = str(program.graph)
    proof = program.place()
    assert not proof.proven
    assert proof.reason.startswith("clamp: aten.clamp.default")
    assert str(program.graph) == before


def test_nothing_happens_where_an_activations_gradient_is_not_linear() -> None:
    program = Program(lambda tangents, x: (tangents @ x, tangents.clamp(0.0, 1.0)), parameters=1)
    before = str(program.graph)
    assert not program.place().proven
    assert str(program.graph) == before


def test_nothing_happens_where_the_model_all_reduces_in_its_backward() -> None:
    """[Note: ranks that meet inside the backward] in linear_ops.py."""

    def backward(tangents: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return tangents @ x, wait_tensor(all_reduce(tangents.neg(), "sum", "theirs"))

    program = Program(backward, parameters=1)
    before = str(program.graph)
    assert "meets other ranks" in program.place().reason
    assert str(program.graph) == before


def test_nothing_happens_where_scaling_back_would_round() -> None:
    program = Program(with_activation, parameters=1, world_size=3)
    before = str(program.graph)
    assert program.place() == LinearityProof(False, "neg: not a parameter's gradient, and the factor would round it")
    assert str(program.graph) == before


def test_nothing_happens_for_an_empty_plan() -> None:
    program = Program(with_activation, parameters=0)
    before = str(program.graph)
    assert program.place() == LinearityProof(False, "the plan is empty")
    assert str(program.graph) == before
