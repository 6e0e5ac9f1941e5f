"""How users call steps and gradient functions: within each other, within transforms, and with what is refused."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_grad import assert_same, by_hand, loss, parameters, rows
from torch import Tensor
from torch.func import vmap

from compiled_ddp import functional as ddp
from ranks import RankPool

Tree = dict[str, Tensor]

WAYS = ("eager", "compiled")


def in_way(way: str, step: Any) -> Any:
    return step if way == "eager" else ddp.compile(step, backend="aot_eager")


def _within(rank: int) -> None:
    """A compiled step in another one; in vmap, and in a loss."""
    inner = ddp.compile(ddp.grad(loss), backend="aot_eager", donate="params")
    means = by_hand(loss, 2)

    def outer(params: Tree, x: Tensor) -> Tree:
        gradients = inner(params, x)
        return {name: value - 0.1 * gradients[name] for name, value in params.items()}

    found = ddp.compile(outer, backend="aot_eager")(parameters(), rows(rank))
    assert_same(found, {name: value - 0.1 * means[name] for name, value in parameters().items()})
    members = {name: torch.stack([value, value * 0.5]) for name, value in parameters().items()}
    with pytest.warns(UserWarning, match="called within a transform of torch.func"):
        both = vmap(inner, in_dims=(0, None))(members, rows(rank))
    assert_same({name: value[0] for name, value in both.items()}, means)

    def norm(params: Tree, x: Tensor) -> Tensor:
        return sum(value.square().sum() for value in inner(params, x).values())

    def mean(params: Tree) -> Tensor:
        return (loss(params, rows(0)) + loss(params, rows(1))) / 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        found = ddp.grad(norm)(parameters(), rows(rank))
    expected = torch.func.grad(lambda p: sum(value.square().sum() for value in torch.func.grad(mean)(p).values()))
    assert_same(found, expected(parameters()))
    assert_same(inner(parameters(), rows(rank)), means)


def test_a_compiled_step_within_another_one_and_within_transforms(ranks2: RankPool) -> None:
    ranks2.run(_within)


def _sparse(rank: int, way: str) -> None:
    def embedded(params: Tree, indices: Tensor) -> Tensor:
        return F.embedding(indices, params["table"], sparse=True).square().mean()

    step = in_way(way, ddp.grad(embedded))
    with pytest.raises(ValueError, match=r"does not reduce sparse gradients, as those of argument 0\['table'\] are"):
        step({"table": torch.ones(6, 3)}, torch.tensor([0, 2]))


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_are_refused_by_name(ranks2: RankPool, way: str) -> None:
    ranks2.run(_sparse, way)


def _torchs_own(rank: int) -> None:
    """A collective of torch.distributed's in a step: eagerly it is none of our business."""

    def watched(params: Tree, x: Tensor) -> Tensor:
        value = loss(params, x)
        dist.all_reduce(value.detach().clone())
        return value

    gradient = ddp.grad(watched)
    assert_same(gradient(parameters(), rows(rank)), by_hand(loss, 2))
    with pytest.raises(
        RuntimeError, match=r"calls torch.distributed \(c10d.allreduce_.default\).* of compiled_ddp.func"
    ):
        ddp.compile(gradient, backend="aot_eager")(parameters(), rows(rank))
    assert_same(gradient(parameters(), rows(rank)), by_hand(loss, 2))


def test_a_compiled_step_takes_no_collectives_of_torch_distributed(ranks2: RankPool) -> None:
    ranks2.run(_torchs_own)


def _inference(rank: int, way: str) -> None:
    """First traced there, too; with a module's parameters, which require gradients, and rows made there."""
    torch.manual_seed(0)
    module = torch.nn.Linear(5, 3)

    def of_module(params: Tree, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (x,)).square().sum()

    params = dict(module.named_parameters())
    expected = {name: torch.zeros_like(value) for name, value in params.items()}
    for r in range(2):
        of_rank = torch.func.grad(of_module)(params, rows(r))
        expected = {name: value + of_rank[name].detach() / 2 for name, value in expected.items()}
    step = in_way(way, ddp.grad(of_module))
    with torch.inference_mode():
        assert_same(step(params, rows(rank)), expected)
        assert_same(step({name: value.clone() for name, value in params.items()}, rows(rank)), expected)
    with torch.no_grad():
        assert_same(step(params, rows(rank)), expected)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_inference_mode(ranks2: RankPool, way: str) -> None:
    ranks2.run(_inference, way)


def _written(rank: int, way: str) -> None:
    """A loss that writes to a part of a copy: its derivative writes to what becomes the gradient."""

    def of_part(params: Tree, x: Tensor) -> Tensor:
        copied = params["first"].clone()
        copied[:1] *= 2
        return (x @ copied).square().mean() + params["scale"].to(torch.float64).sum()

    params = {"first": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), "scale": torch.ones(2)}
    means = {name: torch.zeros_like(value) for name, value in params.items()}
    for r in range(2):
        of_rank = torch.func.grad(of_part)(params, rows(r))
        means = {name: value + of_rank[name] / 2 for name, value in means.items()}
    assert_same(in_way(way, ddp.grad(of_part))(params, rows(rank)), means)


@pytest.mark.parametrize("way", WAYS)
def test_losses_that_write_to_a_part(ranks2: RankPool, way: str) -> None:
    ranks2.run(_written, way)


def _empty(rank: int, way: str) -> None:
    """Buckets without elements, which nothing tells apart."""

    def of_some(params: Tree, x: Tensor) -> Tensor:
        return loss(params, x) + params["none"].sum() + params["complex"].abs().sum()

    empty = {"none": torch.zeros(0, dtype=torch.float64), "complex": torch.zeros(0, dtype=torch.complex64)}
    step = in_way(way, ddp.grad(of_some, bucket_cap_mb=0))
    found = step(parameters() | empty, rows(rank))
    assert {name: (value.shape, value.dtype) for name, value in found.items() if name in empty} == {
        name: (value.shape, value.dtype) for name, value in empty.items()
    }
    assert_same({name: value for name, value in found.items() if name not in empty}, by_hand(loss, 2))


@pytest.mark.parametrize("way", WAYS)
def test_empty_gradients(ranks2: RankPool, way: str) -> None:
    ranks2.run(_empty, way)
