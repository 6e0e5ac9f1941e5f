"""What people do when a step has failed: give a wrapper up, evaluate, try again: none of it harms another."""

import concurrent.futures
import contextlib
import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import assert_gradients, expected_mean, row_batch, wrappers
from torch import Tensor, nn

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module | None = None) -> nn.Module:
    return wrappers([wrapper])[wrapper](nn.Linear(5, 3) if model is None else model)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def right_step(ddp: nn.Module, rank: int, step: int = 0) -> None:
    x = row_batch(rank, step)
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))
    ddp.zero_grad()
    loss_of(ddp, x).backward()
    assert_gradients(ddp.module, expected)


class PlantedError(Exception):
    pass


def _raise(_: Tensor) -> None:
    raise PlantedError


def break_off(ddp: nn.Module, rank: int, *, retain_graph: bool = False) -> Tensor:
    """A hook of the user's raises, on every rank, in the middle of the backward of the loss that is returned."""
    loss = loss_of(ddp, row_batch(rank))
    handle = next(ddp.module.parameters()).register_hook(_raise)
    with pytest.raises(PlantedError):
        loss.backward(retain_graph=retain_graph)
    handle.remove()
    return loss


# ---- wrappers that are given up --------------------------------------------------------------------------------------


def _a_new_wrapper(rank: int, wrapper: str) -> None:
    old = wrap(wrapper)
    right_step(old, rank)
    break_off(old, rank)
    new = wrap(wrapper, old.unwrap())
    right_step(new, rank)
    x = row_batch(rank)
    expected = expected_mean(copy.deepcopy(new.module), lambda module: loss_of(module, x) * (rank == 0))
    new.zero_grad()
    loss = loss_of(new, x)
    if rank == 0:
        loss.backward()
    else:
        new.skip_step()
    assert_gradients(new.module, expected)
    assert old is not new  # alive all the while
    right_step(new, rank, 1)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_broken_wrapper_that_was_unwrapped_keeps_its_successor_from_nothing(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_a_new_wrapper, wrapper)


def _beside_a_failed_one(rank: int, wrapper: str) -> None:
    failed, other = wrap(wrapper), wrap(wrapper)
    right_step(failed, rank)
    right_step(other, rank)
    break_off(failed, rank)
    failed._runtime.communicator.give_up("A wait was planted.")
    loss_of(other, row_batch(rank))
    other.skip_step()
    right_step(other, rank, 1)
    with pytest.raises(RuntimeError, match="A wait was planted"):
        loss_of(failed, row_batch(rank)).backward()
    with torch.no_grad():
        failed(row_batch(rank))  # to evaluate it
    right_step(other, rank, 2)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrapper_that_can_reduce_no_more_harms_no_other_and_can_be_evaluated(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_beside_a_failed_one, wrapper)


# ---- a step that is tried again --------------------------------------------------------------------------------------


def _without_a_forward(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper)
    right_step(ddp, rank)
    loss = break_off(ddp, rank, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"ended the backward before this one.*Call abandon_backward\(\)"):
        loss.backward()
    ddp.abandon_backward()
    right_step(ddp, rank, 1)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_that_follows_a_broken_one_without_a_forward_says_so(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_without_a_forward, wrapper)


def _abandoned_inside(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper)
    right_step(ddp, rank)
    loss = loss_of(ddp, row_batch(rank))
    handle = next(ddp.module.parameters()).register_hook(lambda _: ddp.abandon_backward())
    with pytest.raises(RuntimeError, match=r"abandon_backward\(\) was called inside a backward"):
        loss.backward()
    handle.remove()
    right_step(ddp, rank, 1)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_cannot_be_abandoned_from_inside(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_abandoned_inside, wrapper)


def _fails_to_begin(rank: int, wrapper: str, steps_before: int) -> None:
    """As where a compiler fails under strict=True, memory runs out, or Ctrl-C comes while ranks agree."""
    ddp = wrap(wrapper)
    for step in range(steps_before):
        right_step(ddp, rank, step)
    loss = loss_of(ddp, row_batch(rank))
    if rank == 1:
        runtime = ddp._runtime
        beginnings = [
            (runtime._beginning, "in_task"),
            (runtime._steady_hooks, "begin"),
            (runtime._steady_graph, "begin"),
        ]
        with contextlib.ExitStack() as planted:
            for owner, name in beginnings:
                planted.enter_context(mock.patch.object(owner, name, side_effect=PlantedError))
            with pytest.raises(PlantedError):
                loss.backward()
        ddp.abandon_backward()
    else:
        with pytest.raises(RuntimeError, match="broke"):
            loss.backward()
    right_step(ddp, rank, 10)
    right_step(ddp, rank, 11)


@pytest.mark.parametrize("steps_before", [0, 1, 4])
@pytest.mark.parametrize("wrapper", BOTH)
def test_an_exception_as_a_backward_begins_is_told_to_all(ranks2: RankPool, wrapper: str, steps_before: int) -> None:
    ranks2.run(_fails_to_begin, wrapper, steps_before)


def _in_a_thread(rank: int, wrapper: str, how: str) -> None:
    ddp = wrap(wrapper)
    right_step(ddp, rank)
    if rank == 1:
        with concurrent.futures.ThreadPoolExecutor(1) as worker:
            worker.submit(break_off, ddp, rank).result()
        getattr(ddp, how)()
    else:
        with pytest.raises(RuntimeError, match="broke off on 1 other"):
            loss_of(ddp, row_batch(rank)).backward()
    right_step(ddp, rank, 1)


@pytest.mark.parametrize("how", ["abandon_backward", "skip_step"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_broke_in_a_thread_can_be_ended_in_another(ranks2: RankPool, wrapper: str, how: str) -> None:
    ranks2.run(_in_a_thread, wrapper, how)


# ---- a hook on a sparse gradient -------------------------------------------------------------------------------------


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(5, 6, sparse=True), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embedding(x)).square()


def _hook_on_a_sparse_one(rank: int, wrapper: str, steps_before: int) -> None:
    ddp, x = wrap(wrapper, Embedded()), torch.tensor([0, 1 + rank])
    for _ in range(steps_before):
        ddp.zero_grad()
        loss_of(ddp, x).backward()
    handle = None
    if rank == 1:
        handle = ddp.module.embedding.weight.register_post_accumulate_grad_hook(_raise)
        with pytest.raises(PlantedError):
            loss_of(ddp, x).backward()
        handle.remove()
    else:
        loss_of(ddp, x).backward()
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match="an exception ended the one before it on 1 rank"):
        loss_of(ddp, x).backward()
    dist.barrier()


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_hook_on_a_sparse_gradient_that_raises_on_one_rank_is_told_to_all(
    ranks2: RankPool, wrapper: str, steps_before: int
) -> None:
    ranks2.run(_hook_on_a_sparse_one, wrapper, steps_before)


# ---- processes that a rank forks -------------------------------------------------------------------------------------


def _in_a_forked_process(ddp: nn.Module, x: Tensor, pipe: int) -> None:
    torch.set_num_threads(1)
    try:
        loss_of(ddp, x).backward()
    except RuntimeError as error:
        os.write(pipe, str(error).encode())
    finally:
        os._exit(0)


def _forked(rank: int) -> None:
    ddp = wrap("EagerDDP")
    right_step(ddp, rank)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _in_a_forked_process(ddp, row_batch(rank), writes)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as pipe:
        assert f"was forked from that of rank {rank}" in pipe.read()
    right_step(ddp, rank, 1)


def test_a_backward_in_a_forked_process_is_refused_at_once(ranks2: RankPool) -> None:
    ranks2.run(_forked)
