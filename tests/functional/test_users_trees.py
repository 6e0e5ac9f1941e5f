"""What users differentiate and return: odd containers, leaves that are no tensors, and what comes beside the loss."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from test_grad import assert_same, by_hand, loss, parameters, rows
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp import torch_private
from ranks import RankPool

WAYS = ("eager", "compiled")


def in_way(way: str, step: Any) -> Any:
    return step if way == "eager" else ddp.compile(step, backend="aot_eager")


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Tensor]


@dataclasses.dataclass
class WithoutKeys:
    """Registered as older code does, without a function that names its leaves."""

    first: Tensor
    rest: dict[str, Tensor]
    note: str = "kept"


torch_private.for_tests.register_without_names(
    WithoutKeys, lambda tree: ([tree.first, tree.rest], tree.note), lambda parts, note: WithoutKeys(*parts, note)
)


def _containers(rank: int, way: str) -> None:
    expected = by_hand(loss, 2)

    def of_tree(tree: Any, x: Tensor) -> Tensor:
        return loss({"first": tree.first, **tree.rest}, x)

    for kind in (Pair, WithoutKeys):
        rest = parameters()
        found = in_way(way, ddp.grad(of_tree))(kind(rest.pop("first"), rest), rows(rank))
        assert type(found) is kind
        assert_same({"first": found.first, **found.rest}, expected)
    assert found.note == "kept"


@pytest.mark.parametrize("way", WAYS)
def test_gradients_come_in_the_container_of_their_tensors(ranks2: RankPool, way: str) -> None:
    ranks2.run(_containers, way)


def _no_tensors(rank: int, way: str) -> list[str]:
    step, messages = in_way(way, ddp.grad(loss)), []
    for other in (None, torch.tensor(3), 0.1, "text"):
        with pytest.raises(ValueError, match="cannot take the gradient of") as error:
            step(parameters() | {"other": other}, rows(rank))
        messages.append(str(error.value))
    assert_same(step(parameters(), rows(rank)), by_hand(loss, 2))
    with pytest.raises(ValueError, match=r"finds no tensor in argument 0 .* among 0 that are passed by position"):
        step(params=parameters(), x=rows(rank))
    return messages


@pytest.mark.parametrize("way", WAYS)
def test_leaves_without_a_gradient_are_refused_by_name(ranks2: RankPool, way: str) -> None:
    for messages in ranks2.run(_no_tensors, way):
        for message, kind in zip(messages, ("NoneType", "torch.int64", "float", "str"), strict=True):
            assert f"grad(loss) cannot take the gradient of argument 0['other'], of {kind}" in message


def _anything_beside(rank: int, way: str) -> None:
    def with_aux(params: Any, x: Tensor) -> Any:
        return loss(params, x), ("text", {"norm": x.norm(), "none": None, "number": 2.5}, x.sum())

    gradients, (text, tree, total) = in_way(way, ddp.grad(with_aux, has_aux=True))(parameters(), rows(rank))
    assert_same(gradients, by_hand(loss, 2))
    assert (text, tree["none"], tree["number"]) == ("text", None, 2.5)
    assert torch.equal(tree["norm"], rows(rank).norm()) and torch.equal(total, rows(rank).sum())
    for returned in (loss, lambda params, x: (loss(params, x), 1, 2)):
        with pytest.raises(RuntimeError, match="tuple"):
            ddp.grad(returned, has_aux=True)(parameters(), rows(rank))


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_beside_a_loss_may_be_anything(ranks2: RankPool, way: str) -> None:
    ranks2.run(_anything_beside, way)


def _kinds_of_weights(rank: int, way: str) -> None:
    step = in_way(way, ddp.grad(loss, reduction="weighted"))
    expected = by_hand(loss, 2, weights=[0.25, 0.75])
    for weight in ([1, 3][rank], torch.tensor([1.0, 3.0][rank]), torch.tensor([[1.0, 3.0][rank]])):
        assert_same(step(parameters(), rows(rank), weight=weight), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_is_a_number_or_a_tensor_of_one_element(ranks2: RankPool, way: str) -> None:
    ranks2.run(_kinds_of_weights, way)


def _complex_parameters(rank: int, way: str) -> None:
    def modulus(params: Any, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ params).abs().square().sum()

    params = torch.randn(5, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = in_way(way, ddp.grad(modulus))(params, rows(rank))
    leaf = params.clone().requires_grad_()
    ((modulus(leaf, rows(0)) + modulus(leaf, rows(1))) / 2).backward()
    torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize("way", WAYS)
def test_complex_parameters(ranks2: RankPool, way: str) -> None:
    ranks2.run(_complex_parameters, way)


@pytest.mark.filterwarnings("ignore:grad.* returns this process's own gradients")
def _one_of_several(rank: int) -> None:
    """A group of one rank, among others: its collectives are its own."""
    group = dist.new_group([rank], use_local_synchronization=True)

    def summed(params: Any, x: Tensor) -> Any:
        return ddp.all_reduce(loss(params, x), "sum"), "text"

    gradients, (value, text) = ddp.grad_and_value(summed, has_aux=True, process_group=group)(parameters(), rows(rank))
    assert text == "text" and torch.equal(value, loss(parameters(), rows(rank)))
    assert_same(gradients, torch.func.grad(loss)(parameters(), rows(rank)))


@pytest.mark.filterwarnings("ignore:grad.* returns this process's own gradients")
def test_a_group_of_one_rank_is_an_identity_in_the_loss_too(ranks2: RankPool) -> None:
    ranks2.run(_one_of_several)
