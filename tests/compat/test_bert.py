"""The DistributedDataParallel of the BERT pre-training fork: the user says when to reduce (docs/apex.md)."""

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, local_gradients, mean_over_ranks, row_batch
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.compat import apex, bert
from ranks import RankError, RankPool


def squares(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return lambda module: module(row_batch(rank, step)).square().sum()


def test_the_signature_is_that_of_the_fork() -> None:
    parameters = inspect.signature(bert.DistributedDataParallel).parameters.values()
    assert [p.name for p in parameters if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD] == [
        *("module", "message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params"),
        *("retain_allreduce_buffers", "allreduce_always_fp32", "gradient_average", "gradient_predivide_factor"),
        "gradient_average_split_factor",
    ]


def _accumulated(rank: int) -> None:
    ddp = bert.DistributedDataParallel(Mlp(), message_size=20, verify="always")
    communicator = ddp._runtime.communicator
    assert not ddp.need_reduction, "nothing is reduced until it is asked for"
    for step in range(3):
        ddp.zero_grad()
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in ddp.module.named_parameters()}
        for micro in range(3 + rank):  # ranks may accumulate different numbers of batches
            local = local_gradients(copy.deepcopy(ddp.module), squares(rank, 10 * step + micro))
            total = {name: total[name] + local[name] for name in total}
            loss = squares(rank, 10 * step + micro)(ddp)
            last = micro == 2 + rank
            if last:
                ddp.enable_need_reduction()
            else:
                ddp.disable_need_reduction()
            before = torch_private.groups.collectives_launched(communicator.group)
            loss.backward()
            launched = torch_private.groups.collectives_launched(communicator.group) - before
            if not last:
                assert_gradients(ddp.module, total)
                assert launched == 0, "a backward without reduction proves nothing either"
                assert ("Proven to be reduced: 0 of 6" in str(ddp.explain())) == (step == 0)
        assert_gradients(ddp.module, mean_over_ranks(total, ddp.module), rtol=1e-4, atol=1e-5)
        assert "Proven to be reduced: 6 of 6" in str(ddp.explain())
        ddp.need_reduction = False  # scripts assign it too
    assert not ddp.need_reduction


def test_nothing_is_reduced_until_it_is_asked_for_and_then_everything_that_was_accumulated(ranks2: RankPool) -> None:
    ranks2.run(_accumulated)


def _first_reduced_backward(rank: int) -> None:
    for delayed in (False, True):
        ddp = bert.DistributedDataParallel(Mlp(), delay_allreduce=delayed)
        ddp.enable_need_reduction()
        local = local_gradients(copy.deepcopy(ddp.module), squares(rank, 0))
        squares(rank, 0)(ddp).backward()
        assert_gradients(ddp.module, mean_over_ranks(local, ddp.module))
        reducer = bert.Reducer(ddp.module)
        assert dist.get_world_size() == 2
        reducer.reduce()
        assert_gradients(ddp.module, mean_over_ranks(local, ddp.module))


def test_the_very_first_backward_and_delayed_ones_are_reduced(ranks2: RankPool) -> None:
    """The fork's own fallback left both local: its loop over buckets was commented out."""
    ranks2.run(_first_reduced_backward)


def _left_out(rank: int) -> None:
    """Rank 1 drops batches that it would have accumulated, another one in each step, and holds on to the losses."""
    for wrapper, enable, disable in (
        (bert.DistributedDataParallel, "enable_need_reduction", "disable_need_reduction"),
        (apex.DistributedDataParallel, "enable_allreduce", "disable_allreduce"),
    ):
        for toggled_before in (False, True):  # the forward, or the backward
            ddp = wrapper(nn.Linear(4, 1))
            losses = []
            for step in range(6):
                ddp.zero_grad()
                batches = 1 + step % 3
                for micro in range(batches):
                    switch = getattr(ddp, enable if micro == batches - 1 else disable)
                    if toggled_before:
                        switch()
                    losses.append(ddp(torch.full((1, 4), 1.0 + rank)).sum())
                    if not toggled_before:
                        switch()
                    if rank == 0 or micro == batches - 1 or micro != step % 2:
                        losses[-1].backward()
                theirs = [torch.empty(1, 4) for _ in range(2)]
                dist.all_gather(theirs, ddp.module.weight.grad)
                assert torch.equal(*theirs)
            ddp.unwrap()


def test_a_rank_may_leave_out_a_batch_that_it_would_have_accumulated(ranks2: RankPool) -> None:
    ranks2.run(_left_out)


def _dropped(rank: int) -> None:
    ddp = bert.DistributedDataParallel(nn.Linear(4, 1))
    ddp.need_reduction = True
    losses = [ddp(torch.ones(1, 4)).sum() for _ in range(1 + rank)]  # of which rank 1 drops the first, and keeps it
    losses[-1].backward()


def test_a_rank_that_drops_a_step_which_is_reduced_is_an_error(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="this backward averaged gradients of different steps"):
        ranks2.run(_dropped)
