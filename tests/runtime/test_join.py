"""Uneven inputs: ranks with fewer batches shadow the others, and end with the same parameters."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_equal_on_all_ranks, assert_step, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
ENDED = ("Rank 0 exhausted all inputs", "at least one rank that exhausted inputs")  # on each rank


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x)).square().mean()


def batches_of(rank: int) -> int:
    """Rank 0 has the fewest."""
    return 2 + 2 * rank


def by_hand(model: nn.Module, rank: int, steps: int, *, by_all: bool) -> nn.Module:
    """Plain SGD on what this rank would see if all ranks stepped alike; a rank without data has zero gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        training = [other for other in range(dist.get_world_size()) if batches_of(other) > step]
        optimizer.zero_grad()
        if rank in training:
            model(row_batch(rank, step)).backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient / (dist.get_world_size() if by_all else len(training))
        optimizer.step()
        for buffer in model.buffers():
            dist.broadcast(buffer, src=training[0])
    return model


def _uneven(rank: int, wrapper: str, by_all: bool) -> None:
    torch.manual_seed(7)
    model = WithBuffers()
    ddp = wrappers([wrapper])[wrapper](copy.deepcopy(model), verify="always")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=by_all):
        for step in range(batches_of(rank)):
            if step % 2:  # .grad of the last step is there while this rank shadows
                optimizer.zero_grad()
            with torch.no_grad():
                for _ in range(rank):  # forwards for evaluation: as many as a rank likes
                    ddp.eval()(row_batch(rank))
            loss = ddp.train()(row_batch(rank, step))
            if not step % 2:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    expected = by_hand(model, rank, batches_of(dist.get_world_size() - 1), by_all=by_all)
    for (name, parameter), other in zip(ddp.module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
        assert_equal_on_all_ranks(parameter.tolist())
    for buffer in ddp.module.buffers():
        assert_equal_on_all_ranks(buffer.tolist())

    # Outside of the join, a step is like any other; a second join begins anew.
    for context in (ddp.join(enable=False), ddp.join()):
        with context:
            ddp.zero_grad()
            ddp(row_batch(rank)).backward()
        assert_equal_on_all_ranks(ddp.module.mlp.head.weight.grad.tolist())
    ddp.zero_grad()
    ddp(row_batch(rank)).backward()


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_with_fewer_batches_count_as_zeros_and_end_equal(ranks2: RankPool, wrapper: str, by_all: bool) -> None:
    ranks2.run(_uneven, wrapper, by_all)


@pytest.mark.parametrize("by_all", [True, False])
def test_the_same_on_three_ranks(ranks3: RankPool, by_all: bool) -> None:
    ranks3.run(_uneven, "EagerDDP", by_all)


def _in_other_loops(rank: int, wrapper: str) -> None:
    """Accumulation, two forwards in one backward, outputs that are dropped, several backwards, a communication hook."""
    ddp = wrappers([wrapper])[wrapper](WithBuffers())
    with ddp.join():
        for step in range(1 + rank):
            with ddp.no_sync():
                ddp(row_batch(rank, step)).backward()
            (ddp(row_batch(rank, step)) + ddp(row_batch(rank, step))).backward()
            ddp.zero_grad()
            ddp(row_batch(rank, step))  # no backward follows
    one, two = (wrappers([wrapper])[wrapper](Mlp()) for _ in range(2))
    one.register_comm_hook(None, default_hooks.allreduce_hook)
    for ddp in (one, two):
        with ddp.join(), ddp.no_sync() if rank == 0 else warnings.catch_warnings():
            for step in range(1 + rank):
                first, second = ddp(row_batch(rank, step)).sum(), ddp(row_batch(rank, step)).sum()
                first.backward()
                if rank == 1:
                    second.backward()
        assert_equal_on_all_ranks(ddp.module.head.bias.tolist())


@pytest.mark.parametrize("reduction", ["weighted", "sum"])
def test_a_rank_without_data_has_no_weight_and_adds_nothing(ranks2: RankPool, reduction: str) -> None:
    ranks2.run(_other_reductions, reduction)


def _other_reductions(rank: int, reduction: str) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp(), reduction=reduction)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            ddp.zero_grad()
            loss = ddp(row_batch(rank, step)).square().sum()
            if step:
                reference = copy.deepcopy(ddp.module)
                reference(row_batch(rank, step)).square().sum().backward()
            loss.backward()
    if rank == 1:
        for parameter, other in zip(ddp.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("wrapper", BOTH)
def test_an_iteration_is_a_synchronised_backward_whatever_forwards_there_are(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_in_other_loops, wrapper)


def _with_zero(rank: int, wrapper: str) -> None:
    torch.manual_seed(7)
    model = WithBuffers()
    ddp = wrappers([wrapper])[wrapper](copy.deepcopy(model))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings(), Join([ddp, optimizer]):
        for step in range(batches_of(rank)):
            optimizer.zero_grad()
            ddp(row_batch(rank, step)).backward()
            optimizer.step()
    expected = by_hand(model, rank, batches_of(dist.get_world_size() - 1), by_all=True)
    for parameter, other in zip(ddp.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)
        assert_equal_on_all_ranks(parameter.tolist())


@pytest.mark.parametrize("wrapper", BOTH)
def test_torchs_join_takes_the_wrapper_with_an_optimizer(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_with_zero, wrapper)


def _train(ddp: nn.Module, rank: int, batches: int, context: Any, noted: list[Any]) -> None:
    """Note each loss, whose graph then lives on in the steps that follow, and each backward that has ended."""
    with context:
        for step in range(batches):
            noted.append(ddp(row_batch(rank, step)).sum())
            noted[-1].backward()
            noted.append("backward")


def _terminated(rank: int, wrapper: str, buffers: bool) -> None:
    ddp = wrappers([wrapper])[wrapper](WithBuffers() if buffers else Mlp(), verify="always")
    for join in (ddp.join, functools.partial(Join, [ddp])):
        noted: list[Any] = []
        with pytest.raises(RuntimeError, match=ENDED[rank]) as caught:
            _train(ddp, rank, batches_of(rank), join(throw_on_early_termination=True), noted)
        assert len(noted) == 2 * 2  # before its forward of the third iteration
        for step in range(2):
            assert_step(ddp, lambda module: module(row_batch(rank, step)).sum())  # noqa: B023
        del caught  # until here: a traceback that is kept must not make a backward look as if it still ran


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("wrapper", BOTH)
def test_early_termination_raises_on_every_rank_and_training_goes_on(
    ranks2: RankPool, wrapper: str, buffers: bool
) -> None:
    ranks2.run(_terminated, wrapper, buffers)


class CentredOverRanks(nn.Module):
    """Communicates in its forward, on the group of all ranks, as SyncBatchNorm does while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.forwards = Mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
            total = self.sum_over_ranks(x.detach())
            x = x - total / dist.get_world_size()
        return self.mlp(x)

    @torch.compiler.disable
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        total = x.sum(0)
        dist.all_reduce(total)
        return total


def _plain(ddp: Any, rank: int, step: int) -> None:
    ddp(row_batch(rank, step)).sum().backward()


def _accumulates(ddp: Any, rank: int, step: int) -> None:
    with ddp.no_sync():
        for _ in range(2):
            _plain(ddp, rank, step)
    _plain(ddp, rank, step)


def _two_forwards(ddp: Any, rank: int, step: int) -> None:
    (ddp(row_batch(rank, step)) + ddp(row_batch(rank, step + 5))).sum().backward()


def _drops_an_output(ddp: Any, rank: int, step: int) -> None:
    ddp(row_batch(rank, step))
    _plain(ddp, rank, step)


def _evaluates(ddp: Any, rank: int, step: int) -> None:
    ddp.eval()
    for _ in range(rank):
        ddp(row_batch(rank))
        with torch.no_grad():
            ddp(row_batch(rank))
    ddp.train()
    _plain(ddp, rank, step)


def _leaves_some_behind(ddp: Any, rank: int, step: int) -> None:
    """The last forwards of each rank, with gradients, are followed by no synchronised backward."""
    _plain(ddp, rank, step)
    with ddp.no_sync():
        _plain(ddp, rank, step)
    ddp(row_batch(rank, step))


LOOPS = (_plain, _accumulates, _two_forwards, _drops_an_output, _evaluates, _leaves_some_behind)


def _run(loop: Any, ddp: Any, rank: int, context: Any) -> None:
    with context:
        for step in range(batches_of(rank)):
            loop(ddp, rank, step)


def _communicates_in_forward(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](CentredOverRanks())
    for context in (ddp.join, functools.partial(Join, [ddp])):
        for loop in LOOPS:
            before = ddp.module.forwards
            with pytest.raises(RuntimeError, match=ENDED[rank]):
                _run(loop, ddp, rank, context(throw_on_early_termination=True))
            assert_equal_on_all_ranks(ddp.module.forwards - before)
            assert_step(ddp, lambda module: module(row_batch(rank)).sum())
    with ddp.join(throw_on_early_termination=True):  # as many on every rank: nothing is thrown
        for step in range(3):
            for loop in LOOPS:
                loop(ddp, rank, step)
    assert_step(ddp, lambda module: module(row_batch(rank)).sum())


def _counts_nothing(rank: int, wrapper: str) -> None:
    """A join that throws, a model that does not communicate, and another number of forwards on every rank."""
    ddp = wrappers([wrapper])[wrapper](Mlp(), check_steps="off")
    with ddp.join(throw_on_early_termination=True):
        for step in range(2):
            with ddp.no_sync():
                for _ in range(2 * (1 - rank)):
                    _plain(ddp, rank, step)
            for _ in range(2 * rank):
                ddp(row_batch(rank, step))
            kept = [ddp(row_batch(rank, step)) for _ in range(2 * rank)]
            sum([output.sum() for output in kept], ddp(row_batch(rank, step)).sum()).backward()
    assert_step(ddp, lambda module: module(row_batch(rank)).sum())
    for context in (ddp.join, functools.partial(Join, [ddp])):
        with pytest.raises(RuntimeError, match=ENDED[rank]):
            _leaves_before_its_backward(ddp, rank, context(throw_on_early_termination=True))
        assert_step(ddp, lambda module: module(row_batch(rank)).sum())


def _leaves_before_its_backward(ddp: Any, rank: int, context: Any) -> None:
    with context:
        output = ddp(row_batch(rank)).sum()
        if rank == 1:
            output.backward()


@pytest.mark.parametrize("wrapper", BOTH)
def test_where_a_join_throws_forwards_are_not_counted_either(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_counts_nothing, wrapper)


def _buffers_and_backward(rank: int) -> str:
    """Rank 1 runs a second forward that brings buffers, where rank 0 is at its backward."""
    ddp = wrappers(["EagerDDP"])["EagerDDP"](WithBuffers())

    def train() -> None:
        with ddp.join():
            loss = ddp(row_batch(rank))
            if rank == 1:
                loss = loss + ddp(row_batch(rank))
            loss.backward()

    with pytest.raises(RuntimeError) as caught:
        train()
    return str(caught.value)


def test_ranks_that_differ_in_forwards_that_bring_buffers_are_told_so(ranks2: RankPool) -> None:
    for message in ranks2.run(_buffers_and_backward):
        assert "some ranks are at a forward that brings rank 0's buffers, others at a backward" in message


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_end_of_a_rank_is_thrown_before_the_forward_of_a_model_that_communicates(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_communicates_in_forward, wrapper)


def _with_other_options(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for batches in (1, rank):  # in an iteration of both, then in one that rank 0 shadows
        noted: list[Any] = []
        with pytest.raises(RuntimeError, match="divide_by_initial_world_size differs between ranks"):
            _train(ddp, rank, batches, ddp.join(divide_by_initial_world_size=rank == 0), noted)
        assert_step(ddp, lambda module: module(row_batch(rank)).sum())


@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_that_differ_in_the_options_of_join_raise_and_training_goes_on(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_with_other_options, wrapper)
