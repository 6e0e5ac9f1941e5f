"""Losses whose collectives differ between ranks: refused by name on all of them, and the next call is right."""

import pytest
import torch
import torch.nn.functional as F
from test_grad import assert_same, by_hand, loss, parameters, rows
from test_losses_that_raise import ALL_WAYS, WAYS, Normalised, of_one_process
from test_ranks_that_differ import TIMEOUT, in_way, refused
from torch import Tensor
from torch.func import vmap

from compiled_ddp import functional as ddp
from compiled_ddp.functional.agreements import Agreements
from ranks import RankPool

Tree = dict[str, Tensor]

IDS = ["eager", "compiled", "both"]


# ---- other shapes, other control flow --------------------------------------------------------------------------------


def contrastive(params: Tree, x: Tensor) -> Tensor:
    own = F.normalize(x @ params["first"], dim=1)
    target = torch.arange(len(own)) + ddp.rank() * len(own)
    return F.cross_entropy(own @ ddp.all_gather(own).t(), target)


def _uneven(rank: int, ways: tuple[str, ...], is_known: bool, calls_before: int) -> str:
    """One rank has fewer rows to gather than the others, which it may have had before, together with them."""
    gradient = ddp.grad(contrastive)
    step = in_way(ways[rank], gradient)
    sizes = (4, 3) if is_known else (4,)
    expected = {size: gradient(parameters(), rows(rank)[:size]) for size in (sizes if calls_before else ())}
    for size in expected:
        for _ in range(2):
            assert_same(step(parameters(), rows(rank)[:size]), expected[size])
    message = refused(lambda: step(parameters(), rows(rank)[: 3 if rank == 1 else 4]))
    for size in (4, 3):
        again = gradient(parameters(), rows(rank)[:size])
        assert_same(step(parameters(), rows(rank)[:size]), expected.get(size, again))
    return message


@pytest.mark.parametrize(
    ("ways", "is_known", "calls_before"),
    [*((ways, True, 1) for ways in ALL_WAYS), (ALL_WAYS[1], False, 1), *((ways, False, 0) for ways in ALL_WAYS[:2])],
)
def test_gathers_of_other_sizes_are_refused_by_name(
    ranks3: RankPool, ways: tuple[str, ...], is_known: bool, calls_before: int
) -> None:
    for message in ranks3.run(_uneven, ways, is_known, calls_before, **TIMEOUT):
        place = "- rank 1: collective 1 in the loss of grad(contrastive) is all_gather, torch.float32, "
        assert f"{place}[3, 8] here, all_gather, torch.float32, [4, 8] on rank 0." in message, message


def _batches(rank: int, way: str) -> str:
    """vmap around a gradient whose parameters are in no batch."""
    gradient = ddp.grad(Normalised())
    step = in_way(way, vmap(gradient, in_dims=(None, 0)))
    batch = torch.stack([rows(rank)] * (2 + rank))
    message = refused(lambda: step(parameters(), batch))
    found = step(parameters(), batch[:2])
    for number in range(2):
        assert_same({name: value[number] for name, value in found.items()}, of_one_process(2))
    return message


@pytest.mark.parametrize("way", WAYS)
def test_batches_of_losses_of_other_sizes_are_refused_by_name(ranks2: RankPool, way: str) -> None:
    for message in ranks2.run(_batches, way, **TIMEOUT):
        assert '(Normalised) is all_reduce("mean"), torch.float32, [3, 8] here, all_reduce("mean")' in message, message


def _members(rank: int, way: str) -> str:
    """An ensemble that has a member more on one rank."""
    step = in_way(way, vmap(ddp.grad(loss), in_dims=(0, None)))
    members = {name: torch.stack([value] * 3) for name, value in parameters().items()}
    two = {name: value[:2] for name, value in members.items()}
    message = refused(lambda: step(members if rank == 1 else two, rows(rank)))
    found = step(two, rows(rank))
    for number in range(2):
        assert_same({name: value[number] for name, value in found.items()}, by_hand(loss, 2))
    return message


@pytest.mark.parametrize("way", WAYS)
def test_ensembles_of_other_sizes_are_refused_by_name(ranks2: RankPool, way: str) -> None:
    for message in ranks2.run(_members, way, **TIMEOUT):
        assert "rank 1: argument 0['first'] is torch.float32, [3, 5, 8] here, torch.float32, [2, 5, 8]" in message


def _other_collectives(rank: int, ways: tuple[str, ...], what: str, calls_before: int) -> str:
    """One rank leaves a collective out, has another one, or one more."""
    changed = [False]

    def centred(params: Tree, x: Tensor) -> Tensor:
        features = x @ params["first"] + params["bias"]
        if not (changed[0] and what == "fewer"):
            features = features - ddp.all_reduce(features.mean(0), "sum" if changed[0] and what == "other" else "mean")
        if changed[0] and what == "more":
            features = features * ddp.all_reduce(features.square().mean())
        return features.square().mean()

    gradient = ddp.grad(centred)
    step = in_way(ways[rank], gradient)
    changed[0] = rank == 1 and not calls_before
    if calls_before:
        expected = gradient(parameters(), rows(rank))
        for _ in range(2):
            assert_same(step(parameters(), rows(rank)), expected)
        changed[0] = rank == 1
        step = in_way(ways[rank], gradient) if rank == 1 else step
    message = refused(lambda: step(parameters(), rows(rank)))
    changed[0] = False
    again = gradient(parameters(), rows(rank))
    assert_same(in_way(ways[rank], gradient)(parameters(), rows(rank)), again)
    return message


CHANGES = {
    "fewer": "the next collective is a sum of gradients here, a collective in a loss on rank 0",
    "other": 'in the loss of grad(_other_collectives.centred) is all_reduce("sum")',
    "more": "in the loss of grad(_other_collectives.centred)",
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(("ways", "calls_before"), [*((ways, 1) for ways in ALL_WAYS), *((w, 0) for w in ALL_WAYS[:2])])
def test_other_collectives_in_a_loss_are_refused_by_name(
    ranks3: RankPool, what: str, ways: tuple[str, ...], calls_before: int
) -> None:
    for message in ranks3.run(_other_collectives, ways, what, calls_before, **TIMEOUT):
        assert "- rank 1: " in message and CHANGES[what] in message, message


def _other_source(rank: int) -> str:
    with pytest.raises(RuntimeError) as error:
        ddp.broadcast({"a": torch.ones(2)}, src=rank)
    return str(error.value)


def test_broadcasts_from_other_ranks_are_refused_by_name(ranks2: RankPool) -> None:
    for message in ranks2.run(_other_source, **TIMEOUT):
        assert "it is broadcast(src=1) of ['a'], torch.float32, [2] here, broadcast(src=0) of ['a']" in message, message


def _swaps(rank: int, ways: tuple[str, ...]) -> str:
    """Functions with a communicator each."""
    functions = [ddp.grad(loss), ddp.grad(lambda params, x: loss(params, x).sin())]
    steps = [in_way(ways[rank], f) for f in functions]
    expected = [f(parameters(), rows(rank)) for f in functions]
    for _ in range(2):
        for step, means in zip(steps, expected, strict=True):
            assert_same(step(parameters(), rows(rank)), means)
    message = refused(lambda: steps[rank == 1](parameters(), rows(rank)))
    for _ in range(2):
        for step, means in zip(steps, expected, strict=True):
            assert_same(step(parameters(), rows(rank)), means)
    return message


@pytest.mark.parametrize("ways", ALL_WAYS, ids=IDS)
def test_functions_in_another_order_are_refused(ranks3: RankPool, ways: tuple[str, ...]) -> None:
    for message in ranks3.run(_swaps, ways, **TIMEOUT):
        assert "- rank 1: the function is grad(_swaps.<lambda>) here, grad(loss) on rank 0" in message, message


# ---- what is alike costs nothing -------------------------------------------------------------------------------------


def _comparisons(rank: int, ways: tuple[str, ...]) -> list[int]:
    """How often ranks compare in each of several calls, of which some have other batches."""
    gradient = ddp.grad(contrastive)
    step = in_way(ways[rank], gradient)
    numbers = []
    for call in range(12):
        before = Agreements.of(None)._number
        (gradient if call < 3 else step)(parameters(), rows(rank)[: 3 if call % 3 == 2 else 4])
        numbers.append(Agreements.of(None)._number - before)
    return numbers


@pytest.mark.parametrize("ways", ALL_WAYS, ids=IDS)
def test_losses_that_repeat_themselves_are_not_compared(ranks3: RankPool, ways: tuple[str, ...]) -> None:
    first, *others = ranks3.run(_comparisons, ways, **TIMEOUT)
    assert others == [first, first] and first[0] > 0 and first[6:] == [0] * 6, first


def _order(rank: int, ways: tuple[str, ...]) -> None:
    """Collectives of a loss, of one size, whose results are read in another order than they are launched."""

    def crossed(params: Tree, x: Tensor) -> Tensor:
        features = x @ params["first"] + params["bias"]
        one, other = ddp.all_reduce(features.mean(0)), ddp.all_reduce(features.square().mean(0))
        return (torch.tanh(features * other.detach()) @ params["head"]).square().mean() + (one * params["bias"]).sum()

    gradient = ddp.grad(crossed, bucket_cap_mb=0)
    expected = gradient(parameters(), rows(rank))
    step = in_way(ways[rank], gradient)
    for _ in range(3):
        assert_same(step(parameters(), rows(rank)), expected)


def test_eager_and_compiled_ranks_launch_a_losss_collectives_in_one_order(ranks3: RankPool) -> None:
    ranks3.run(_order, ALL_WAYS[2], **TIMEOUT)


def _proves_apart(rank: int) -> None:
    """One rank launches one by one what the other launches from one graph, on two communicators, and both prove it."""
    one, other = ddp.grad(loss), ddp.grad(lambda params, x: loss(params, x).sin())

    def step(params: Tree, x: Tensor) -> Tree:
        between = one(params, x)
        return other({name: value - 0.1 * between[name] for name, value in params.items()}, x)

    expected = [step(parameters(), rows(rank)) for _ in range(2)]
    call = ddp.compile(step, backend="aot_eager") if rank == 0 else step
    for _ in range(8):
        assert_same(call(parameters(), rows(rank)), expected[0])


def test_a_graph_on_several_communicators_beside_eager_calls(ranks2: RankPool) -> None:
    ranks2.run(_proves_apart, **TIMEOUT)
