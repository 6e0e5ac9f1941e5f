"""Collectives inside of a loss: gradients are those that one process with all the data computes."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_grad import assert_same, parameters, rows
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp.functional.collectives import _warn_of_no_ranks
from compiled_ddp.functional.session import LossCall, calling_loss
from ranks import RankPool

Tree = dict[str, Tensor]


def features(params: Tree, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["first"] + params["bias"]) @ params["head"]


def contrastive(params: Tree, x: Tensor) -> Tensor:
    """Each row of this rank against those of all: the mean over this rank's rows."""
    own = F.normalize(features(params, x), dim=1)
    every = ddp.all_gather(own)
    target = torch.arange(len(own), device=x.device) + ddp.rank() * len(own)
    return F.cross_entropy(own @ every.t().roll(1, 1) * 5, target)


def batch_statistics(params: Tree, x: Tensor) -> Tensor:
    y = features(params, x)
    mean = ddp.all_reduce(y.mean(0))
    variance = ddp.all_reduce((y - mean).square().mean(0))
    return ((y - mean) / (variance + 0.1).sqrt()).pow(3).mean()


def reduced_loss(params: Tree, x: Tensor) -> Tensor:
    """The cotangents are the same on every rank."""
    return ddp.all_reduce(features(params, x).square().mean())


def sum_of_losses(params: Tree, x: Tensor) -> Tensor:
    return ddp.all_reduce(features(params, x).sum(0), "sum").square().sum() / ddp.world_size() ** 2


def from_first_rank(params: Tree, x: Tensor) -> Tensor:
    given = ddp.broadcast({"scale": features(params, x).mean(0), "note": "local"})
    return (features(params, x) * given["scale"]).mean()


# What one process computes of all ranks' rows, shape (world, rows, 5).
ALONE: dict[Callable[..., Tensor], Callable[[Tree, Tensor], Tensor]] = {
    contrastive: lambda params, x: contrastive(params, x.flatten(0, 1)),
    batch_statistics: lambda params, x: batch_statistics(params, x.flatten(0, 1)),
    reduced_loss: lambda params, x: features(params, x.flatten(0, 1)).square().mean(),
    sum_of_losses: lambda params, x: features(params, x).sum((0, 1)).square().sum() / len(x) ** 2,
    from_first_rank: lambda params, x: (features(params, x) * features(params, x[0]).mean(0)).mean(),
}


def _equals_one_process(rank: int, world_size: int, ways: list[str]) -> None:
    every = torch.stack([rows(r) for r in range(world_size)])
    alone = torch.distributed.new_subgroups(1)[0]
    for f, of_all in ALONE.items():
        with calling_loss(LossCall(alone, "alone")):
            expected, value = torch.func.grad_and_value(of_all)(parameters(), every)
        for way in ways:
            gradient = ddp.grad_and_value(f, reduce_value=True)
            call = gradient if way == "eager" else ddp.compile(lambda p, x: gradient(p, x), backend="aot_eager")  # noqa: B023
            found, mean = call(parameters(), rows(rank))
            assert_same(found, expected)
            torch.testing.assert_close(mean, value, msg=f.__name__)
        summed = ddp.grad(f, reduction="sum")(parameters(), rows(rank))
        assert_same(summed, {name: g * world_size for name, g in expected.items()})


def test_two_ranks_get_the_gradients_of_one_process_with_all_the_data(ranks2: RankPool) -> None:
    ranks2.run(_equals_one_process, 2, ["eager", "compiled"])


def test_three_ranks_get_the_gradients_of_one_process_with_all_the_data(ranks3: RankPool) -> None:
    ranks3.run(_equals_one_process, 3, ["eager"])


def _weighted(rank: int) -> None:
    """A weighted mean of losses that look at other ranks' rows, also where these ranks' own losses do not count."""

    def of_all(params: Tree, x: Tensor) -> Tensor:
        mean = features(params, x.flatten(0, 1)).mean(0)
        return sum(w * ((features(params, part) - mean) ** 3).mean() for w, part in zip(weights, x, strict=True)) / 4

    def f(params: Tree, x: Tensor) -> Tensor:
        y = features(params, x)
        return ((y - ddp.all_reduce(y.mean(0))) ** 3).mean()

    for weights in ([3.0, 1.0], [0.0, 4.0]):
        found = ddp.grad(f, reduction="weighted")(parameters(), rows(rank), weight=weights[rank])
        assert_same(found, torch.func.grad(of_all)(parameters(), torch.stack([rows(0), rows(1)])))


def test_weights_weigh_what_a_loss_takes_from_other_ranks(ranks2: RankPool) -> None:
    ranks2.run(_weighted)


def _under_transforms(rank: int) -> None:
    x, every = rows(rank), torch.cat([rows(0), rows(1)])
    scale = torch.tensor([1.0, 2.0])
    batched = torch.func.vmap(lambda s: ddp.all_reduce((s * x).mean(0)), randomness="error")(scale)
    torch.testing.assert_close(batched, scale[:, None] * every.mean(0))
    gathered = torch.func.vmap(ddp.all_gather, in_dims=1, out_dims=1)(x)
    torch.testing.assert_close(gathered, every)
    _, tangent = torch.func.jvp(lambda s: ddp.all_gather(s * x), (torch.tensor(2.0),), (torch.tensor(3.0),))
    torch.testing.assert_close(tangent, 3 * every)
    assert ddp.all_gather(torch.tensor(float(rank))).tolist() == [0.0, 1.0]
    mixed = ddp.broadcast({"a": torch.tensor([rank + 1]), "b": torch.tensor([rank == 1]), "c": rank}, src=1)
    assert (mixed["a"].item(), mixed["b"].item(), mixed["c"]) == (2, True, rank)
    with pytest.raises(ValueError, match="src must be"):
        ddp.broadcast(x, src=2)
    with pytest.raises(ValueError, match="op must be"):
        ddp.all_reduce(x, "avg")  # type: ignore[arg-type]


def test_collectives_under_vmap_and_jvp(ranks2: RankPool) -> None:
    ranks2.run(_under_transforms)


def _folds_in(rank: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    own = [torch.rand(2, generator=ddp.fold_in_rank(generator)).tolist() for _ in range(2)]
    return own, torch.rand(2, generator=generator).tolist()


def test_a_generator_of_a_ranks_own_is_another_on_each_rank_and_in_each_call(ranks2: RankPool) -> None:
    (first, shared), (second, also_shared) = ranks2.run(_folds_in)
    assert shared == also_shared
    assert len({tuple(drawn) for drawn in (*first, *second)}) == 4


class Holder:
    def __init__(self) -> None:
        self.weight = torch.ones(2)


def _broadcasts_trees(rank: int) -> None:
    tree = {"a": torch.full((2,), 1.0 + 10 * rank), "b": torch.full((2,), 2.0 + 10 * rank)}
    found = ddp.broadcast(tree if rank == 0 else {"b": tree["b"], "a": tree["a"]})
    assert {name: value.tolist() for name, value in found.items()} == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    with pytest.raises(RuntimeError, match=r"broadcast\(src=0\) of \['[bc]'\]"):
        ddp.broadcast({"a": tree["a"], "bc"[rank]: tree["b"]})
    for no_tree, message in (
        (torch.nn.Linear(2, 2), "found a Linear as its tree.*named_parameters"),
        ({"a": torch.ones(2), "b": Holder()}, r"found a Holder at \['b'\] of its tree.*NamedTuple"),
        ({"rate": 0.1}, "finds no tensor in its tree, found {'rate': 0.1}"),
    ):
        with pytest.raises(TypeError, match=message):
            ddp.broadcast(no_tree)


def test_a_broadcast_tells_tensors_apart_by_their_paths_and_refuses_what_it_does_not_see(ranks2: RankPool) -> None:
    ranks2.run(_broadcasts_trees)


def test_collectives_without_a_process_group_say_so_once() -> None:
    x = torch.ones(2)
    collectives: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: ddp.all_reduce(x),
        "all_gather": lambda: ddp.all_gather(x),
        "broadcast": lambda: ddp.broadcast(x),
        "fold_in_rank": lambda: ddp.fold_in_rank(torch.Generator()),
    }
    _warn_of_no_ranks.cache_clear()
    for name, call in collectives.items():
        with pytest.warns(UserWarning, match=f"{name} takes this process for the only one"):
            call()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


@pytest.mark.filterwarnings("ignore:.*takes this process for the only one")
def test_without_a_process_group_collectives_are_identities() -> None:
    x = torch.ones(2, 3)
    assert ddp.all_reduce(x) is x and ddp.all_gather(x) is x and ddp.broadcast(x) is x
    assert (ddp.rank(), ddp.world_size()) == (0, 1)
    assert ddp.all_gather(x[0, 0]).shape == (1,)
