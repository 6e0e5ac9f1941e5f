"""Ranks that drop a step: what is detected, what is harmless, and how to take part with zeros."""

import copy
import functools
import unittest.mock
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from in_process import riders_with
from models import Mlp, assert_equal_on_all_ranks, assert_gradients, expected_mean, mean_over_ranks, row_batch, wrappers
from models import local_gradients as gradients_here
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_ddp.plan import ABORTED, FIRST_USED, FORWARD_COUNT, RETURNED_COUNT, Riders
from compiled_ddp.step.channel import Findings, Flag, ForwardCount, ForwardNumbers, Message, RiderReader
from compiled_ddp.step.ending import Finish
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class Loss(nn.Module):
    """An MLP with its loss; raises in forward while `armed`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise ValueError("planted")
        return self.mlp(x).square().sum()


def _step(ddp: nn.Module, rank: int, step: int, forward: Callable[[Tensor], Tensor] | None = None) -> None:
    """One step, checked against plain autograd averaged by hand; `forward` is `ddp` itself unless given.

    By hand on a copy: a backward of `ddp.module` after a forward of `ddp` would be taken for that forward's.
    """
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(row_batch(rank, step)))
    ddp.zero_grad()
    (forward or ddp)(row_batch(rank, step)).backward()
    assert_gradients(ddp.module, expected)


def _error_of(ddp: nn.Module, rank: int, step: int) -> str:
    ddp.zero_grad()
    with pytest.raises(RuntimeError) as caught:
        ddp(row_batch(rank, step)).backward()
    return str(caught.value)


# ---- without ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(7, 7), (7, 6), (15, 16), (0, 16), (5, 5, 5), (5, 6, 4), tuple(range(20))])
def test_counts_differ_exactly_when_they_are_not_all_equal_modulo_16(counts: tuple[int, ...]) -> None:
    riders = Riders(0, (0,))
    values = [riders_with(riders, Message(ForwardNumbers(count, count))) for count in counts]
    found = RiderReader(len(counts)).read([torch.stack(values).sum(0)])
    assert found.backwards == 1
    assert found.counts_differ == (len({count % 16 for count in counts}) > 1)
    assert not any(found.ranks_with(flag) for flag in Flag)


@pytest.mark.parametrize(
    ("ranks", "differ", "forgiven"),
    [
        ([ForwardNumbers(3, 3), ForwardNumbers(3, 3)], False, False),
        ([ForwardNumbers(4, 3), ForwardNumbers(3, 3)], False, True),  # one forward raised, and its rank has tried again
        ([ForwardNumbers(5, 3), ForwardNumbers(3, 3)], False, True),  # ... twice
        ([ForwardNumbers(4, 3), ForwardNumbers(4, 4)], False, False),  # it raised, and all have dropped that step
        ([ForwardNumbers(4, 4), ForwardNumbers(3, 3)], True, False),  # dropped a step
        ([ForwardNumbers(4, 3), ForwardNumbers(3, 3), ForwardNumbers(4, 4)], True, False),
    ],
)
def test_ranks_average_one_step_unless_one_dropped_it_alone(
    ranks: list[ForwardNumbers], differ: bool, forgiven: bool
) -> None:
    riders = Riders(0, (0,))
    values = [riders_with(riders, Message(forwards)) for forwards in ranks]
    found = RiderReader(len(ranks)).read([torch.stack(values).sum(0)])
    assert (found.backwards, found.counts_differ, found.forgiven) == (1, differ, forgiven)


def test_sums_of_counts_stay_exact_on_70_000_ranks() -> None:
    def sums(counts: list[int]) -> Tensor:
        one_by_one = functools.partial(functools.reduce, torch.add)  # in float32, the worst order
        values = torch.tensor(counts, dtype=torch.float32)
        riders = torch.zeros(FIRST_USED)
        for place in (FORWARD_COUNT, RETURNED_COUNT):
            riders[place], riders[place + 1] = one_by_one(values), one_by_one(values.square())
        return riders

    ranks = 70_000
    assert not RiderReader(ranks).read([sums([15] * ranks)]).counts_differ
    assert RiderReader(ranks).read([sums([15] * (ranks - 1) + [14])]).counts_differ


def test_the_reader_counts_broken_ranks() -> None:
    riders = torch.zeros(FIRST_USED)
    riders[ABORTED] = 2
    found = RiderReader(3).read([torch.zeros(FIRST_USED), riders])
    assert {flag: found.ranks_with(flag) for flag in Flag if found.ranks_with(flag)} == {Flag.ABORTED: 2}
    assert RiderReader(3).read([]) == Findings()


def test_a_forward_is_taken_back_when_its_graph_died_before_the_next_one_and_without_a_backward() -> None:
    weight = torch.ones(2, requires_grad=True)
    count = ForwardCount()

    def forward() -> Tensor:
        count.begin()
        output = weight.square().sum()
        count.returned({output.grad_fn})
        return output

    forward()
    kept = forward()  # the first one was thrown away
    assert count.value == 1
    forward()
    assert count.value == 2, "an output that is alive may still be dropped"
    assert count.backward_began() == ForwardNumbers(2, 2)
    count.settle(backwards=1, forgiven=False)
    count.begin()
    count.raised()
    assert count.value == 3
    count.begin()
    assert count.value == 4, "all ranks may drop the step of a forward that raised"
    assert count.backward_began() == ForwardNumbers(4, 3)
    count.settle(backwards=1, forgiven=True)
    count.begin()
    assert count.backward_began() == ForwardNumbers(4, 4), "no rank counts that forward"
    del kept


def test_what_raised_is_told_until_the_outcome_is_known() -> None:
    """On a GPU that is one backward later."""
    count = ForwardCount()
    count.begin()
    count.raised()
    count.begin()
    assert count.backward_began() == ForwardNumbers(2, 1)
    count.begin()
    assert count.backward_began() == ForwardNumbers(3, 2)
    count.settle(backwards=1, forgiven=True)
    count.begin()
    assert count.backward_began() == ForwardNumbers(3, 3)


def test_forwards_whose_backward_stays_local_are_taken_back_once() -> None:
    weight = torch.ones(2, requires_grad=True)
    count = ForwardCount()
    count.begin()
    count.backward_began()
    count.begin()
    count.begin()
    output = weight.square().sum()
    count.returned({output.grad_fn})
    for _ in range(2):  # every gradient of it says so
        count.take_back()
    assert count.value == 1
    del output  # dead, but taken back already
    count.begin()
    assert count.value == 2


def test_counting_keeps_no_graph_alive() -> None:
    weight = torch.ones(2, requires_grad=True)
    count = ForwardCount()
    count.begin()
    output = weight.square().sum()
    count.returned({output.grad_fn})
    node = weakref.ref(output.grad_fn.metadata["compiled_ddp.forward"])
    assert node() is not None
    del output
    assert node() is None


# ---- a dropped step --------------------------------------------------------------------------------------------------


def _drop_on_last_rank(rank: int, name: str) -> str:
    ddp = wrappers(BOTH)[name](Loss())
    _step(ddp, rank, 0)
    if rank == dist.get_world_size() - 1:
        loss = ddp(row_batch(rank, 1))
        loss = ddp(row_batch(rank, 2))
    else:
        loss = ddp(row_batch(rank, 1))
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("name", BOTH)
def test_a_dropped_step_is_an_error_on_every_rank(ranks2: RankPool, name: str) -> None:
    for rank, message in enumerate(ranks2.run(_drop_on_last_rank, name)):
        assert message.startswith(f"rank {rank}: this backward averaged gradients of different steps")
        assert "rank 0: 2, rank 1: 3" in message
        assert "skip_step()" in message
        assert "check_steps=" in message


@pytest.mark.parametrize("name", BOTH)
def test_a_dropped_step_is_an_error_on_every_one_of_three_ranks(ranks3: RankPool, name: str) -> None:
    assert all("rank 0: 2, rank 1: 2, rank 2: 3" in message for message in ranks3.run(_drop_on_last_rank, name))


def _drop_on_purpose(rank: int, name: str, check_steps: str) -> list[str]:
    ddp = wrappers(BOTH)[name](Loss(), check_steps=check_steps)
    kept = ddp(row_batch(rank, 0)) if rank == 1 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            _step(ddp, rank, step)
    del kept
    return [str(warning.message) for warning in caught if "different steps" in str(warning.message)]


@pytest.mark.parametrize("name", BOTH)
def test_ranks_that_differ_on_purpose_are_warned_once_or_not_at_all(ranks2: RankPool, name: str) -> None:
    for messages in ranks2.run(_drop_on_purpose, name, "warn"):
        assert len(messages) == 1
        assert "rank 0: 1, rank 1: 2" in messages[0]
    assert ranks2.run(_drop_on_purpose, name, "off") == [[], []]


# ---- what is harmless ------------------------------------------------------------------------------------------------


def _extra_forwards(rank: int, name: str) -> None:
    ddp = wrappers(BOTH)[name](Loss())
    kept = []
    for step in range(3):
        if rank == 1:
            ddp(row_batch(rank, 50 + step))  # thrown away
            with torch.no_grad():
                kept.append(ddp(row_batch(rank, 60)))
            with ddp.no_sync():
                kept.append(ddp(row_batch(rank, 70)))
            ddp.eval()
            kept.append(ddp(row_batch(rank, 80)))
            ddp.train()
        _step(ddp, rank, step)
        ddp(row_batch(rank, 90))  # thrown away on every rank


@pytest.mark.parametrize("name", BOTH)
def test_forwards_that_no_synchronised_backward_follows_may_differ(ranks2: RankPool, name: str) -> None:
    ranks2.run(_extra_forwards, name)


def _recompute_on_last_rank(rank: int, name: str) -> None:
    """The wrapper inside a checkpoint: its second forward, inside backward, begins nothing. Only one rank does it."""
    ddp = wrappers(BOTH)[name](Loss())
    for step in range(3):
        _step(ddp, rank, step, partial(checkpoint, ddp, use_reentrant=False) if rank == 1 else None)


def test_a_recomputation_is_no_new_forward(ranks2: RankPool) -> None:
    ranks2.run(_recompute_on_last_rank, "EagerDDP")


def _raise_in_forward(rank: int, name: str) -> None:
    ddp = wrappers(BOTH)[name](Loss())
    _step(ddp, rank, 0)
    ddp.module.armed = True
    with pytest.raises(ValueError, match="planted"):
        ddp(row_batch(rank, 1))
    ddp.module.armed = False
    for step in (2, 3):
        _step(ddp, rank, step)


@pytest.mark.parametrize("name", BOTH)
def test_an_exception_in_forward_on_every_rank_leaves_the_next_step_right(ranks2: RankPool, name: str) -> None:
    ranks2.run(_raise_in_forward, name)


def _in_halves(ddp: nn.Module, x: Tensor, *, local: bool) -> Tensor:
    """Catch and halve: the loss of what is left to run backward; with `local` the first half has run under no_sync."""
    try:
        return ddp(x)
    except ValueError:
        ddp.module.armed = False
    if not local:
        return ddp(x)
    with ddp.no_sync():
        ddp(x[: len(x) // 2]).backward()
    return ddp(x[len(x) // 2 :])


def _try_again(rank: int, name: str) -> None:
    """A forward raises on one rank, or on several, and each tries again in the same step."""
    ddp = wrappers(BOTH)[name](Loss())
    last = dist.get_world_size() - 1
    for step, (on_ranks, local) in enumerate(
        [((), True), ((last,), True), ((0, last), False), ((0,), True), ((), True)]
    ):
        ddp.module.armed = False
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(row_batch(rank, step)))  # noqa: B023
        ddp.module.armed = rank in on_ranks
        ddp.zero_grad()
        _in_halves(ddp, row_batch(rank, step), local=local).backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("name", BOTH)
def test_a_rank_whose_forward_raised_may_try_again_in_halves(ranks2: RankPool, name: str) -> None:
    ranks2.run(_try_again, name)


def test_one_of_three_ranks_may_try_again(ranks3: RankPool) -> None:
    ranks3.run(_try_again, "EagerDDP")


def _train_in_eval_mode(rank: int, name: str) -> None:
    """One rank alone, then all; validation with gradients on one rank does not count."""
    ddp = wrappers(BOTH)[name](Loss())
    kept = []
    for step, eval_on in enumerate([(), (1,), (0,), (0, 1), (1,), ()]):
        if rank == 0:
            ddp.eval()
            kept.append(ddp(row_batch(rank, 90 + step)))
        ddp.train(rank not in eval_on)
        _step(ddp, rank, step)
    ddp.train()
    loss = ddp(row_batch(rank, 7))
    if rank == 1:  # a dropped step is told as ever
        loss = ddp(row_batch(rank, 8))
    with pytest.raises(RuntimeError, match="rank 0: 7, rank 1: 8"):
        loss.backward()


@pytest.mark.parametrize("name", BOTH)
def test_a_rank_may_train_a_step_in_eval_mode_alone(ranks2: RankPool, name: str) -> None:
    ranks2.run(_train_in_eval_mode, name)


# ---- skip_step -------------------------------------------------------------------------------------------------------


def _skip(rank: int, name: str, skipping: int, first: int, with_forward: bool) -> None:
    ddp = wrappers(BOTH)[name](Loss())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        if step != first:
            _step(ddp, rank, step)
        else:
            skips = rank == skipping
            local = {} if skips else gradients_here(ddp.module, lambda module: module(row_batch(rank, first)))
            expected = mean_over_ranks(local, ddp.module)
            ddp.zero_grad()
            loss = ddp(row_batch(rank, step)) if with_forward or not skips else None
            if skips:
                ddp.skip_step()
            elif loss is not None:
                loss.backward()
            assert_gradients(ddp.module, expected)
        optimizer.step()
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])
    assert_equal_on_all_ranks(ddp.plan.fingerprint)


@pytest.mark.parametrize("with_forward", [True, False])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", BOTH)
def test_a_rank_that_skips_a_step_counts_as_zeros(ranks2: RankPool, name: str, first: int, with_forward: bool) -> None:
    for skipping in (0, 1):
        ranks2.run(_skip, name, skipping, first, with_forward)


@pytest.mark.parametrize("name", BOTH)
def test_a_rank_of_three_that_skips_a_step_counts_as_zeros(ranks3: RankPool, name: str) -> None:
    ranks3.run(_skip, name, 1, 2, True)


class InGraphAndEagerCode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.full((3,), 2.0))

    @torch.compiler.disable
    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return (self._scaled(self.linear(x)).clone() * self.scale).square().sum()


def _all_skip_first(rank: int, name: str, with_forward: bool) -> None:
    """Nobody has seen in that step what is used in graphs, in eager code, or not at all."""
    ddp = wrappers([name])[name](InGraphAndEagerCode())
    for step in range(2):
        loss = ddp(row_batch(rank, step)) if with_forward else None
        ddp.skip_step()
        assert not any(parameter.grad is not None for parameter in ddp.parameters())
        del loss
    for step in range(3):
        x = row_batch(rank, 10 + step)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x))  # noqa: B023
        ddp.zero_grad()
        ddp(x).backward()
        assert_gradients(ddp.module, expected)


def _all_skip_first_and_one_breaks_off(rank: int, name: str) -> None:
    """On one rank Ctrl-C ends the skipped step when all of it has been sent."""
    ddp = wrappers([name])[name](Loss())
    if rank == 1:
        broken = unittest.mock.patch.object(Finish, "finish", side_effect=KeyboardInterrupt)
        with broken, pytest.raises(KeyboardInterrupt):
            ddp.skip_step()
    else:
        ddp.skip_step()
    with pytest.raises(RuntimeError, match="an exception ended the one before it on 1 rank"):
        ddp(row_batch(rank, 1)).backward()
    for step in (2, 3):
        _step(ddp, rank, step)


@pytest.mark.parametrize("name", ["compile_ddp", "EagerDDP"])
def test_nor_does_one_that_an_exception_ends_on_one_rank(ranks2: RankPool, name: str) -> None:
    ranks2.run(_all_skip_first_and_one_breaks_off, name, collective_timeout_seconds=20)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("with_forward", [False, True])
@pytest.mark.parametrize("name", ["compile_ddp", "EagerDDP"])
def test_a_first_step_that_all_ranks_skip_decides_nothing(ranks2: RankPool, name: str, with_forward: bool) -> None:
    ranks2.run(_all_skip_first, name, with_forward)


def _skip_with_accumulated(rank: int, name: str) -> None:
    """What a rank accumulated under no_sync goes out although it skips the step that synchronises."""
    ddp = wrappers(BOTH)[name](Loss())
    _step(ddp, rank, 0)
    before = gradients_here(ddp.module, lambda module: module(row_batch(rank, 1)))
    after = gradients_here(ddp.module, lambda module: module(row_batch(rank, 2)))
    total = {key: value if rank == 0 else value + after[key] for key, value in before.items()}
    expected = mean_over_ranks(total, ddp.module)
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(row_batch(rank, 1)).backward()
        ddp.skip_step()  # synchronises nothing in here
    loss = ddp(row_batch(rank, 2))
    if rank == 0:
        ddp.skip_step()
    else:
        loss.backward()
    assert_gradients(ddp.module, expected)
    _step(ddp, rank, 3)


@pytest.mark.parametrize("name", BOTH)
def test_a_skipped_step_sends_what_was_accumulated(ranks2: RankPool, name: str) -> None:
    ranks2.run(_skip_with_accumulated, name)


def _skip_inside_backward(rank: int) -> str:
    ddp = wrappers(BOTH)["EagerDDP"](Loss())
    loss = ddp(row_batch(rank, 0))
    loss.register_hook(lambda _: ddp.skip_step())
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    ddp.skip_step()  # after the exception: as abandon_backward
    _step(ddp, rank, 1)
    return str(caught.value)


def test_skip_step_inside_a_backward_is_refused(ranks2: RankPool) -> None:
    assert all("in place of backward" in message for message in ranks2.run(_skip_inside_backward))


def _unknown_check_steps(rank: int) -> str:
    with pytest.raises(ValueError, match="check_steps") as caught:
        wrappers(BOTH)["EagerDDP"](Loss(), check_steps="maybe")
    return str(caught.value)


def test_an_unknown_check_steps_is_refused(ranks2: RankPool) -> None:
    assert all("'error', 'warn' or 'off'" in message for message in ranks2.run(_unknown_check_steps))
