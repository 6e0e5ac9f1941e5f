"""Collectives outside of gradients, in any mixture and order with them, as a step's functions and as one graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_losses_that_raise import TIMEOUT, refused
from test_ranks_that_differ import assert_told
from torch import Tensor
from torch.testing import assert_close

from compiled_ddp import functional as ddp
from compiled_ddp.functional.agreements import Agreements
from ranks import RankPool

Tree = dict[str, Tensor]


def parameters() -> Tree:
    """In float64, where a mean over ranks has no rounding to speak of."""
    return {"first": torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4), "head": torch.ones(4).double()}


def rows(rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def loss(params: Tree, x: Tensor) -> Tensor:
    return ((x @ params["first"]).square() @ params["head"]).mean()


def by_autograd(rank: int) -> Tree:
    leaves = {name: value.requires_grad_() for name, value in parameters().items()}
    loss(leaves, rows(rank)).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


local = torch.func.grad(loss)


def parts_of_steps() -> dict[str, Callable[[Tree, Tensor], Any]]:
    """A letter is a part of a step; a word is a step."""
    return {
        "d": ddp.grad(loss),
        "m": lambda params, x: {name: ddp.all_reduce(value, op="mean") for name, value in local(params, x).items()},
        "g": lambda params, x: ddp.all_gather(local(params, x)["first"]),
        "b": lambda params, x: ddp.broadcast(local(params, x), src=1),
    }


def expected_of(world_size: int) -> dict[str, Any]:
    every = [by_autograd(rank) for rank in range(world_size)]
    mean = {name: sum(each[name] for each in every) / world_size for name in every[0]}
    return {"d": mean, "m": mean, "g": torch.cat([each["first"] for each in every]), "b": every[1]}


def as_in_a_new_process() -> None:
    """No collective of functional has run yet: there is no group, and nothing is expected."""
    torch.distributed.barrier()
    Agreements.of(None).give_up()


def _equal_by_hand(rank: int, world_size: int, words: list[str], arguments: dict[str, Any]) -> None:
    expected = expected_of(world_size)
    for word in words:
        as_in_a_new_process()
        parts = parts_of_steps()
        step = lambda params, x: [parts[part](params, x) for part in word]  # noqa: B023, E731
        call = ddp.compile(step, **arguments) if arguments else step
        for _ in range(2):
            for part, found in zip(word, call(parameters(), rows(rank)), strict=True):
                assert_close(found, expected[part], msg=f"{part} of {word}")
        as_in_a_new_process()
        for part, found in zip(word, call(parameters(), rows(rank)), strict=True):
            assert_close(found, expected[part], msg=f"{part} of {word}, whose groups were closed")


WORDS = [*"mgb", "dm", "md", "bdgmd"]


@pytest.mark.parametrize("arguments", [{}, {"backend": "aot_eager"}], ids=["eager", "aot_eager"])
def test_any_mixture_of_gradients_and_collectives_is_right_as_the_first_thing_of_a_process(
    ranks2: RankPool, arguments: dict[str, Any]
) -> None:
    ranks2.run(_equal_by_hand, 2, WORDS, arguments)


@pytest.mark.inductor
def test_inductor_finds_the_group_of_collectives_outside_of_gradients_in_the_first_call(ranks2: RankPool) -> None:
    """Also where it compiles again, as it does without its cache."""
    ranks2.run(_equal_by_hand, 2, ["m"], {"options": {"fx_graph_cache": False}})


def _among_some_ranks(rank: int) -> None:
    """Ranks 0 and 1 differentiate among themselves, with a collective in their loss, and all three average."""
    pair = torch.distributed.new_group([0, 1])

    def mean_of_all(params: Tree, x: Tensor) -> Tensor:
        return ddp.all_reduce(x.sum(), "sum")

    def centred(params: Tree, x: Tensor) -> Tensor:
        return loss(params, x - ddp.all_reduce(x.mean(0)))

    steps = [mean_of_all] * 2
    if rank < 2:
        of_pair = ddp.grad(centred, process_group=pair)
        steps = [lambda p, x: (mean_of_all(p, x), of_pair(p, x)), lambda p, x: (of_pair(p, x), mean_of_all(p, x))[::-1]]
    x = [rows(0), rows(1)]
    mean = (x[0].mean(0) + x[1].mean(0)) / 2
    leaves = {name: value.requires_grad_() for name, value in parameters().items()}
    ((loss(leaves, x[0] - mean) + loss(leaves, x[1] - mean)) / 2).backward()
    for step in steps:
        as_in_a_new_process()
        call = ddp.compile(step, backend="aot_eager")
        for _ in range(2):
            found = call(parameters(), rows(rank))
            total, gradients = found if rank < 2 else (found, {})
            assert_close(total, sum(rows(each).sum() for each in range(3)))
            for name, gradient in gradients.items():
                assert_close(gradient, leaves[name].grad, msg=name)


def test_gradients_of_some_ranks_and_collectives_of_all_meet_in_one_step(ranks3: RankPool) -> None:
    ranks3.run(_among_some_ranks)


def _raises_in_a_step_without_gradients(rank: int, raises_after: int) -> str:
    """In its Python, before its collective or behind it; the others are in theirs."""

    def step(x: Tensor, raises: bool) -> Tensor:
        if raises and raises_after == 0:
            raise ValueError("no batch")
        total = ddp.all_reduce(x)
        if raises:
            raise ValueError("no batch")
        return total

    as_in_a_new_process()
    call = ddp.compile(step, backend="aot_eager")
    for _ in range(2 - raises_after):  # a first call tells only of what it has come to
        assert_close(call(torch.ones(2) * rank, False), torch.full((2,), 0.5))
    message = refused(lambda: call(torch.ones(2) * rank, rank == 1))
    assert_close(call(torch.ones(2) * rank, False), torch.full((2,), 0.5))
    return message


@pytest.mark.parametrize("raises_after", [0, 1, 2])
def test_a_step_without_gradients_that_raises_on_one_rank_is_told_to_all(ranks2: RankPool, raises_after: int) -> None:
    assert_told(list(ranks2.run(_raises_in_a_step_without_gradients, raises_after, **TIMEOUT)))
