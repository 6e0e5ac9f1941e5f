"""A rank that shadows others in a join: when the join is over, all that it had accumulated is as it was before."""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from models import Mlp, assert_gradients, local_gradients, mean_over_ranks, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
CONTEXTS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "join": lambda ddp: ddp.join(),
    "torch's Join": lambda ddp: Join([ddp]),
}


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def epoch(ddp: Any, rank: int, steps: int, leaves: Callable[[], object] = lambda: None) -> None:
    """`steps` training steps; each leaves .grad as the optimizer has used it, then `leaves()` comes."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(steps):
        loss_of(ddp, row_batch(rank, step)).backward()
        optimizer.step()
        leaves()


def accumulated(ddp: Any) -> dict[str, tuple[Tensor, Tensor] | None]:
    """Each .grad, the very object, and a copy of its value."""
    return {n: None if p.grad is None else (p.grad, p.grad.clone()) for n, p in ddp.module.named_parameters()}


def assert_given_back(ddp: Any, before: dict[str, tuple[Tensor, Tensor] | None]) -> None:
    for name, parameter in ddp.module.named_parameters():
        found = before[name]
        if found is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is found[0], name
            assert torch.equal(*found), name


def assert_next_step(ddp: Any, rank: int) -> None:
    """The next synchronised backward averages what is in .grad on each rank, and its own gradient."""
    x = row_batch(rank, 9)
    reference = copy.deepcopy(ddp.module)
    total: dict[str, Tensor | None] = dict(local_gradients(reference, lambda module: loss_of(module, x)))
    for name, parameter in ddp.module.named_parameters():
        if parameter.grad is not None:
            total[name] = total[name] + parameter.grad
    expected = mean_over_ranks(total, reference)
    loss_of(ddp, x).backward()
    assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-5)


def no_sync_backward(ddp: Any, rank: int) -> None:
    ddp.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, row_batch(rank, 7)).backward()


# What the loop leaves in .grad after each of its steps.
LEAVES: dict[str, Callable[[Any, int], None]] = {
    "nothing": lambda ddp, rank: ddp.zero_grad(),
    "zeros": lambda ddp, rank: ddp.zero_grad(set_to_none=False),
    "the last mean": lambda ddp, rank: None,
    "what was accumulated under no_sync": no_sync_backward,
}


def _given_back(rank: int, wrapper: str, context: str) -> None:
    ddp = wrap(wrapper, Mlp(), verify="always")
    for leaves in LEAVES.values():
        ddp.zero_grad()
        for _ in range(2):  # a second epoch, which begins with what the first one leaves
            with CONTEXTS[context](ddp):
                epoch(ddp, rank, 1 + 2 * rank, functools.partial(leaves, ddp, rank))
                before = accumulated(ddp)
            assert_given_back(ddp, before)
        assert_next_step(ddp, rank)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_after_a_join_every_grad_is_what_it_was_and_part_of_the_next_step(
    ranks2: RankPool, wrapper: str, context: str
) -> None:
    ranks2.run(_given_back, wrapper, context)


def test_on_three_ranks_that_end_one_after_the_other(ranks3: RankPool) -> None:
    ranks3.run(_given_back, "EagerDDP", "join")


def _used_by_joined_rank_alone(rank: int, wrapper: str) -> None:
    """What only the joined rank has used, under no_sync, is part of the next backward though no rank uses it then."""
    model = nn.ModuleDict({"all": nn.Linear(5, 3), "some": nn.Linear(5, 3)})
    model.forward = lambda x, part="all": model[part](x)  # type: ignore[assignment]
    ddp = wrap(wrapper, model)
    with ddp.join():
        for step in range(1 + rank):
            ddp(row_batch(rank, step)).square().sum().backward()
            ddp.zero_grad()
        if rank == 0:
            with ddp.no_sync():
                ddp(row_batch(rank), part="some").square().sum().backward()
        before = accumulated(ddp)
    assert_given_back(ddp, before)
    mean = mean_over_ranks({n: None if p is None else p[1] for n, p in before.items()}, model)
    ddp(row_batch(rank)).square().sum().backward()
    torch.testing.assert_close(model["some"].weight.grad.double(), mean["some.weight"])


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_only_a_joined_rank_has_used_is_part_of_the_next_step(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_used_by_joined_rank_alone, wrapper)


def _numbers_to_send(rank: int) -> None:
    """Numbers for the next synchronised backward of this rank are not another step's."""
    ddp = wrap("EagerDDP", Mlp(), piggyback=("tokens",))
    with ddp.join():
        for step in range(1 + 2 * rank):
            ddp.piggyback(tokens=1.0)
            loss_of(ddp, row_batch(rank, step)).backward()
            assert ddp.piggybacked["tokens"] == (2.0 if step == 0 else 1.0)
        ddp.piggyback(tokens=100.0)
    loss_of(ddp, row_batch(rank)).backward()
    assert ddp.piggybacked["tokens"] == 200.0


def test_numbers_that_were_to_be_sent_wait_for_the_next_step_too(ranks2: RankPool) -> None:
    ranks2.run(_numbers_to_send)


def _seen_while_shadowing(rank: int, wrapper: str) -> None:
    """A hook of the user's on a joined rank sees the mean, and may change .grad as it likes."""
    ddp = wrap(wrapper, Mlp())
    seen = []

    def step(parameter: Tensor) -> None:
        seen.append(parameter.grad.clone())
        if rank == 0 and len(seen) > 1:
            parameter.grad = None

    ddp.module.head.bias.register_post_accumulate_grad_hook(step)
    with ddp.join():
        epoch(ddp, rank, 1 + 2 * rank)
        before = accumulated(ddp)
    assert len(seen) == 3
    assert_given_back(ddp, before)


@pytest.mark.parametrize("wrapper", BOTH)
def test_while_it_shadows_users_hooks_see_the_mean(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_seen_while_shadowing, wrapper)


# ---- a join that ends with an exception ------------------------------------------------------------------------------


def _backward_broke_off(rank: int, wrapper: str, context: str) -> None:
    ddp = wrap(wrapper, Mlp())
    before = {}

    def train() -> None:
        with CONTEXTS[context](ddp):
            epoch(ddp, rank, 1 + rank)
            before.update(accumulated(ddp))
            if rank == 1:
                loss = loss_of(ddp, row_batch(rank, 5))
                handle = ddp.module.first.weight.register_hook(_raise_planted)
                try:
                    loss.backward()
                finally:
                    handle.remove()
                    ddp.abandon_backward()
                    ddp.zero_grad()

    with pytest.raises((RuntimeError, KeyError), match=r"broke off on 1 other rank|planted"):
        train()
    if rank == 0:
        assert_given_back(ddp, before)
    assert_next_step(ddp, rank)


def _raise_planted(_: Tensor) -> None:
    raise KeyError("planted")


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_shadowed_backward_that_broke_off_leaves_grad_as_it_was(ranks2: RankPool, wrapper: str, context: str) -> None:
    ranks2.run(_backward_broke_off, wrapper, context)


class Breaks(Joinable, JoinHook):
    """Another joinable, which raises where it should shadow a second step."""

    def __init__(self, ddp: Any) -> None:
        Joinable.__init__(self)
        self.ddp, self.shadowed = ddp, 0

    def join_hook(self, **_: object) -> JoinHook:
        return self

    def main_hook(self) -> None:
        self.shadowed += 1
        if self.shadowed == 2:
            raise KeyError("planted")

    @property
    def join_device(self) -> torch.device:
        return self.ddp.join_device

    @property
    def join_process_group(self) -> Any:
        return self.ddp.join_process_group


def _another_joinable_breaks(rank: int, wrapper: str, cleared: str) -> None:
    ddp = wrap(wrapper, Mlp())
    before = {}

    def train() -> None:
        with Join([ddp, Breaks(ddp)]):
            epoch(ddp, rank, 1 + 2 * rank)
            before.update(accumulated(ddp))
            if rank == 1:
                raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        train()
    if rank == 0 and cleared == "zeroed":
        ddp.zero_grad(set_to_none=False)
    elif rank == 0 and cleared == "set to None":
        ddp.zero_grad()
    if cleared == "left":
        total = {name: None if found is None else found[1] for name, found in before.items()}
    else:
        total = {name: None if rank == 0 or found is None else found[1] for name, found in before.items()}
    x = row_batch(rank, 9)
    reference = copy.deepcopy(ddp.module)
    for name, gradient in local_gradients(reference, lambda module: loss_of(module, x)).items():
        total[name] = gradient if total[name] is None else gradient + total[name]
    expected = mean_over_ranks(total, reference)
    loss_of(ddp, x).backward()
    assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cleared", ["left", "set to None", "zeroed"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_where_torchs_join_ends_without_a_word_the_next_forward_puts_back_what_nobody_has_cleared(
    ranks2: RankPool, wrapper: str, cleared: str
) -> None:
    ranks2.run(_another_joinable_breaks, wrapper, cleared)
