"""Ranks that want different reductions, or raise, in any call: every rank raises soon, by name, and goes on."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_grad import assert_same, by_hand, loss, parameters, rows
from torch import Tensor
from torch.func import jvp, vmap

from compiled_ddp import functional as ddp
from compiled_ddp.functional import compiled
from ranks import RankPool

Tree = dict[str, Tensor]

WAYS = ("eager", "compiled")
TIMEOUT = {"collective_timeout_seconds": 30.0}  # ranks ask where the others are each twentieth of it
SOON = 20.0  # seconds, on a busy machine


def in_way(way: str, step: Any) -> Any:
    return step if way == "eager" else ddp.compile(step, backend="aot_eager")


def refused(call: Callable[[], object]) -> str:
    """The message of the error that `call` raises, long before the group's timeout."""
    began = time.monotonic()
    with pytest.raises(Exception) as error:  # noqa: PT011
        call()
    assert time.monotonic() - began < SOON, "it waited for the timeout"
    return f"{error.type.__name__}: {error.value}"


# ---- other trees -----------------------------------------------------------------------------------------------------


def changed(case: str) -> Tree:
    params = parameters()
    if case == "fewer":
        del params["unused"]
    elif case == "more":
        params["another"] = torch.ones(70)
    elif case == "shape":
        params["head"] = params["head"][:, :2].contiguous()
    elif case == "dtype":
        params["unused"] = params["unused"].double()
    else:
        params = dict(reversed(params.items()))
    return params


USED = ("first", "bias", "head")
CASES = {
    "fewer": "argument 0['unused'] is missing here, found on rank 0",
    "more": "argument 0['another'] is found here, missing on rank 0",
    "shape": "argument 0['head'] is torch.float32, [8, 2] here, torch.float32, [8, 3] on rank 0",
    "dtype": "argument 0['unused'] is torch.float64, [2, 2] here",
    "order": "argument 0['first'] stands on rank 0 where argument 0['unused'] stands here",
}


def _changes_later(rank: int, case: str, ways: tuple[str, ...]) -> str:
    step = in_way(ways[rank], ddp.grad(loss, bucket_cap_mb=0.0001))
    expected = by_hand(loss, 3)
    for _ in range(2):
        assert_same(step(parameters(), rows(rank)), expected)
    message = refused(lambda: step(changed(case) if rank == 1 else parameters(), rows(rank)))
    assert_same(step(parameters(), rows(rank)), expected)
    for again in (changed(case), parameters(), changed(case)):  # on all ranks
        found = step(again, rows(rank))
        assert found.keys() == again.keys()
        torch.testing.assert_close(found["first"].shape, again["first"].shape)
        if again["head"].shape == (8, 3):
            assert_same({n: found[n] for n in USED}, {n: expected[n] for n in USED})
    return message


@pytest.mark.parametrize(
    "ways", [("eager",) * 3, ("compiled",) * 3, ("eager", "compiled", "eager")], ids=["eager", "compiled", "both"]
)
@pytest.mark.parametrize("case", CASES)
def test_a_tree_that_changes_on_one_rank_is_refused_by_name_on_every_rank(
    ranks3: RankPool, case: str, ways: tuple[str, ...]
) -> None:
    for message in ranks3.run(_changes_later, case, ways, **TIMEOUT):
        assert f"- rank 1: {CASES[case]}" in message, message
        assert message.startswith("RuntimeError: grad(loss) has reduced nothing"), message


def _swaps(rank: int, way: str) -> str:
    shared = ddp.Communicator()
    one = ddp.grad(loss, process_group=shared)
    other = ddp.grad(lambda params, x: loss({**params, "bias": params["bias"] * 2}, x), process_group=shared)
    calls = in_way(way, one), in_way(way, other)
    expected = [f(parameters(), rows(rank)) for f in calls]
    for _ in range(3):
        for f, means in zip(calls, expected, strict=True):
            assert_same(f(parameters(), rows(rank)), means)
    message = refused(lambda: calls[rank](parameters(), rows(rank)))
    for f, means in zip(calls, expected, strict=True):
        assert_same(f(parameters(), rows(rank)), means)
    return message


@pytest.mark.parametrize("way", WAYS)
def test_functions_of_one_communicator_in_another_order_are_refused(ranks2: RankPool, way: str) -> None:
    for message in ranks2.run(_swaps, way, **TIMEOUT):
        assert "the function is grad(_swaps.<lambda>) here, grad(loss) on rank 0" in message


def _learns(rank: int) -> list[int]:
    """How many collectives calls of two functions in turn take: those that repeat cost nothing more."""
    shared = ddp.Communicator()
    small = ddp.grad(lambda params, x: loss(params, x).sin(), process_group=shared)
    functions = [ddp.grad(loss, process_group=shared)] * 2 + [small]
    launched = []
    for _ in range(8):
        before = shared._calls
        for f in functions:
            f(parameters(), rows(rank))
        launched.append(shared._calls - before)
    return launched


def _kept_on_one_rank(rank: int, way: str) -> None:
    kept = []
    for _ in range(4):
        gradient = ddp.grad(loss)
        step = in_way(way, gradient)
        if rank == 0:
            kept.append((gradient, step))
        expected = by_hand(loss, 2)
        for _ in range(3):
            assert_same(step(parameters(), rows(rank)), expected)
        del gradient, step
        gc.collect()


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_functions_that_one_rank_alone_keeps_are_called_in_one_order(ranks2: RankPool, way: str) -> None:
    """What is garbage, and when it is collected, differs between ranks, and what they agree on must not."""
    ranks2.run(_kept_on_one_rank, way)


def test_an_order_of_functions_that_repeats_costs_no_further_collective(ranks2: RankPool) -> None:
    first, second = ranks2.run(_learns, **TIMEOUT)
    assert first == second and first[0] > 3 and first[-4:] == [3] * 4


def _batched(rank: int) -> str:
    """Gradients of a batch that no argument of `grad` has: other ranks' batches are other reductions."""
    gradient = ddp.grad(loss)
    batch = torch.stack([rows(rank)] * (2 + rank))
    message = refused(lambda: vmap(gradient, in_dims=(None, 0))(parameters(), batch))
    assert_same(gradient(parameters(), rows(rank)), by_hand(loss, 2))
    return message


def test_batches_of_gradients_of_other_sizes_are_refused(ranks2: RankPool) -> None:
    for message in ranks2.run(_batched, **TIMEOUT):
        assert "[3, 5, 8] here, torch.float32, [2, 5, 8] on rank 0" in message


def _two_of_a_step(rank: int, shares: bool, ways: tuple[str, str], which: int) -> str:
    """A graph with two reductions, of which one changes on one rank."""
    group = ddp.Communicator() if shares else None
    one = ddp.grad(loss, process_group=group)
    other = ddp.grad(lambda params, x: loss(params, x).sin(), process_group=group)

    def step(params: Tree, more: Tree, x: Tensor) -> tuple[Tree, Tree]:
        between = one(params, x)
        return between, other(more, x + between["bias"].sum())

    both = in_way("eager" if shares else ways[0], step)  # the first call is of one kind on all ranks
    for _ in range(2):  # from then on it is known what follows what
        expected = both(parameters(), parameters(), rows(rank))
    call = in_way(ways[rank], step)
    for _ in range(2):
        for found, means in zip(call(parameters(), parameters(), rows(rank)), expected, strict=True):
            assert_same(found, means)
    trees = [parameters(), parameters()]
    if rank == 1:
        trees[which] = changed("more")
    message = refused(lambda: call(*trees, rows(rank)))
    for found, means in zip(call(parameters(), parameters(), rows(rank)), expected, strict=True):
        assert_same(found, means)
    return message


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("shares", "ways"),
    [
        (True, ("compiled", "compiled")),
        (False, ("compiled", "compiled")),
        (True, ("compiled", "eager")),
        (True, ("eager", "compiled")),
    ],
)
def test_one_of_several_reductions_of_a_step_changes(
    ranks2: RankPool, shares: bool, ways: tuple[str, str], which: int
) -> None:
    for message in ranks2.run(_two_of_a_step, shares, ways, which, **TIMEOUT):
        assert "has reduced nothing, on any rank:\n- rank 1: " in message, message
        if ways[0] == ways[1]:  # else it names the reductions that one rank launches in a row, and the other does not
            assert "argument 0['another']" in message, message


# ---- exceptions ------------------------------------------------------------------------------------------------------


def fragile(params: Tree, x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        raise ValueError("no batch")
    return loss(params, x)


def assert_told(messages: list[str], error: str = "ValueError: no batch") -> None:
    for rank, message in enumerate(messages):
        if rank == 1:
            assert message == error
        else:
            assert message.startswith("RuntimeError: ") and f"\n- rank 1: {error}" in message, message


def _raises(rank: int, way: str, calls_before: int) -> str:
    """In the first call, or in a later one, which a compiled step is traced again for."""
    step = in_way(way, ddp.grad(fragile))
    for _ in range(calls_before):
        assert_same(step(parameters(), rows(rank)), by_hand(loss, 3))
    messages = {refused(lambda: step(parameters(), rows(rank)[: 1 if rank == 1 else 4])) for _ in range(2)}
    assert_same(step(parameters(), rows(rank)), by_hand(loss, 3))
    (message,) = messages
    return message


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_loss_that_raises_is_told_to_all_ranks(ranks3: RankPool, way: str, calls_before: int) -> None:
    assert_told(ranks3.run(_raises, way, calls_before, **TIMEOUT))


def _raises_around(rank: int, calls_before: int) -> list[str]:
    gradient, tangents = ddp.grad(fragile), parameters()
    members = {name: torch.stack([value, -value]) for name, value in parameters().items()}
    messages = []
    for step in (
        lambda x: vmap(gradient, in_dims=(0, None))(members, x),
        lambda x: jvp(lambda p: gradient(p, x), (parameters(),), (tangents,)),
    ):
        expected = [step(rows(rank)) for _ in range(calls_before)]
        messages.append(refused(lambda: step(rows(rank)[: 1 if rank == 1 else 4])))  # noqa: B023
        for one in expected:
            torch.testing.assert_close(step(rows(rank)), one)
    assert_same(gradient(parameters(), rows(rank)), by_hand(loss, 2))
    return messages


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_loss_that_raises_below_another_transform_is_told(ranks2: RankPool, calls_before: int) -> None:
    for messages in zip(*ranks2.run(_raises_around, calls_before, **TIMEOUT), strict=True):
        assert_told(list(messages))


def _raises_in_the_step(rank: int, calls_before: int) -> str:
    """Before the step has called any gradient function, in its Python, and in the compiler."""
    gradient = ddp.grad(loss)

    def step(params: Tree, x: Tensor, kind: str) -> Tree:
        if kind == "raises":
            raise ValueError("no batch")
        return gradient(params, x)

    call = ddp.compile(step, backend="aot_eager")
    for _ in range(calls_before):
        assert_same(call(parameters(), rows(rank), "fine"), by_hand(loss, 2))
    message = refused(lambda: call(parameters(), rows(rank), "raises" if rank == 1 else "fine"))
    assert_same(call(parameters(), rows(rank), "fine"), by_hand(loss, 2))
    return message


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_compiled_step_that_raises_by_itself_is_told(ranks2: RankPool, calls_before: int) -> None:
    assert_told(ranks2.run(_raises_in_the_step, calls_before, **TIMEOUT))


def _made_in_the_step(rank: int) -> str:
    def step(params: Tree, x: Tensor) -> Tree:
        return ddp.grad(fragile)(params, x)

    return refused(lambda: ddp.compile(step, backend="aot_eager")(parameters(), rows(rank)[: 1 if rank == 1 else 4]))


def test_a_gradient_function_that_is_made_in_the_step_tells_too(ranks2: RankPool) -> None:
    assert_told(ranks2.run(_made_in_the_step, **TIMEOUT))


def _compiler_fails(rank: int, calls_before: int) -> str:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no kernel")

    call = ddp.compile(ddp.grad(loss), backend="aot_eager")
    for _ in range(calls_before):
        assert_same(call(parameters(), rows(rank)), by_hand(loss, 2))
    x = rows(rank) if calls_before == 0 or rank == 0 else torch.cat([rows(rank), rows(rank)])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(compiled.torch_private.inductor, "compile_step", fails)
        message = refused(lambda: call(parameters(), x))
    assert_same(call(parameters(), rows(rank)), by_hand(loss, 2))
    return message


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_compiler_that_fails_on_one_rank_is_told(ranks2: RankPool, calls_before: int) -> None:
    assert_told(ranks2.run(_compiler_fails, calls_before, **TIMEOUT), "ValueError: no kernel")


def _stays_away(rank: int, way: str) -> str:
    step = in_way(way, ddp.grad(loss))
    step(parameters(), rows(rank))
    return refused(lambda: step(parameters(), rows(rank))) if rank == 0 else ""


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stays_away_is_named_after_the_timeout(ranks2: RankPool, way: str) -> None:
    message, _ = ranks2.run(_stays_away, way, collective_timeout_seconds=3)
    assert "the gradients of grad(loss) could not be reduced" in message and "rank 1" in message
