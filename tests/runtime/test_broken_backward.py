"""An exception on one rank, anywhere in a step: the next step is right, or refused with a clear error on every rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, assert_gradients, expected_mean, wrappers
from torch import Tensor, nn

from compiled_ddp.comm_hooks import Ranks
from ranks import RankPool

ARMED: list[type[BaseException]] = []  # what the planted operator raises next, where it runs


@torch.library.custom_op("compiled_ddp_tests::identity", mutates_args=())
def identity(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("compiled_ddp_tests::identity_backward", mutates_args=())
def identity_backward(gradient: Tensor) -> Tensor:
    if ARMED:
        raise ARMED[-1]("planted")  # also where the graph is run for comparison, which nobody hears of
    return gradient.clone()


identity.register_fake(torch.empty_like)
identity_backward.register_fake(torch.empty_like)
identity.register_autograd(lambda ctx, gradient: identity_backward(gradient))


class Net(nn.Module):
    """Four layers, a bucket each; the operator that may raise stands behind `place` of them, if anywhere."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.place:
                x = identity(x)
            x = torch.tanh(layer(x))
        if self.place == len(self.layers):
            x = identity(x)
        return x.square().sum()


def batch(step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def wrap(name: str, model: nn.Module, **options: object) -> nn.Module:
    if name == "inductor":
        options["backend"] = "inductor"
    kind = "EagerDDP" if name == "EagerDDP" else "compile_ddp"
    return wrappers([kind])[kind](model, bucket_cap_mb=1e-4, first_bucket_mb=1e-4, **options)


def right_step(ddp: nn.Module, step: int) -> None:
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(batch(step)))
    ddp.zero_grad()
    ddp(batch(step)).backward()
    assert_gradients(ddp.module, expected)


def finish(ddp: nn.Module, step: int) -> None:
    """What lets the other ranks go on: they are told in the next forward, or where there is none."""
    if step % 2:
        ddp.abandon_backward()
    else:
        with torch.no_grad():
            ddp(batch(step))


def _breaks(rank: int, wrapper: str, place: int, error: type[BaseException], first: int, options: dict) -> None:
    """One rank breaks off the first backward of all, another one a later one, and the first one that after it."""
    ddp = wrap(wrapper, Net(place), **options)
    for step in range(8):
        if step not in (0, 3, 4):
            right_step(ddp, step)
            continue
        broken = (first + step) % dist.get_world_size()
        ddp.zero_grad()
        loss = ddp(batch(step))
        if rank == broken:
            ARMED.append(error)
            with pytest.raises(error, match="planted"):
                loss.backward()
            ARMED.clear()
            finish(ddp, step)
        else:
            with pytest.raises(RuntimeError, match=r"broke off on 1 other rank"):
                loss.backward()
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])
    origins = {section.origin for section in ddp.plan.sections}
    assert origins == ({"hooks"} if wrapper == "EagerDDP" else {"graph"})
    ddp.unwrap()


ERRORS = [ValueError, KeyboardInterrupt, torch.OutOfMemoryError]


# Where the operator stands, the last layers' buckets have been launched when it raises in backward.
@pytest.mark.parametrize(("place", "first"), [(1, 0), (1, 1), (2, 1), (4, 0)])
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_after_an_exception_inside_a_backward_the_next_step_is_right(
    ranks2: RankPool, wrapper: str, place: int, first: int
) -> None:
    ranks2.run(_breaks, wrapper, place, ERRORS[place % 3], first, {})


@pytest.mark.parametrize("error", [ERRORS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in ERRORS[1:])])
def test_any_exception_inside_a_backward_leaves_the_next_step_right(
    ranks2: RankPool, error: type[BaseException]
) -> None:
    ranks2.run(_breaks, "compile_ddp", 2, error, 1, {"check_steps": "off"})
    ranks2.run(_breaks, "compile_ddp", 4, error, 0, {"check_steps": "warn", "verify": "always"})


@pytest.mark.inductor
@pytest.mark.parametrize("place", [1, 4])
def test_after_an_exception_inside_a_graph_of_inductor_the_next_step_is_right(ranks2: RankPool, place: int) -> None:
    ranks2.run(_breaks, "inductor", place, KeyboardInterrupt, 1, {}, timeout_seconds=300.0)


def two_rounds(gradients: Tensor, ranks: Ranks) -> Tensor:
    """A communication hook of two collectives."""
    return ranks.all_reduce(ranks.all_reduce(gradients / ranks.size) / ranks.size)


def two_rounds_that_may_raise(gradients: Tensor, ranks: Ranks) -> Tensor:
    return ranks.all_reduce(identity_backward(ranks.all_reduce(gradients / ranks.size)) / ranks.size)


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_where_a_bucket_takes_several_collectives_the_rest_of_them_follows(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_breaks, wrapper, 2, ValueError, 1, {"comm_hook": two_rounds})
    nowhere = -1  # but in the hook, between a bucket's collectives
    ranks2.run(_breaks, wrapper, nowhere, ValueError, 0, {"comm_hook": two_rounds_that_may_raise})


def test_the_same_on_three_ranks_with_another_reduction(ranks3: RankPool) -> None:
    ranks3.run(_breaks, "compile_ddp", 2, ValueError, 2, {})


def loses(ddp: nn.Module, step: int) -> None:
    """A backward that an exception ends when everything has been sent."""
    leaf = batch(step).requires_grad_()
    x = leaf * 1.0  # its backward runs when all parameters have got their gradients

    def planted(_: Tensor) -> None:
        raise ValueError("planted")

    leaf.register_hook(planted)
    with pytest.raises(ValueError, match="planted"):
        ddp(x).backward()
    ddp.abandon_backward()
    ddp.zero_grad()


def _loses(rank: int, wrapper: str) -> None:
    """The others have stepped with the mean, which all are told in the next step; what all drop, none has lost."""
    ddp = wrap(wrapper, Net(4))
    right_step(ddp, 0)
    told = r"ended the one before it on 1 rank\(s\) when all of it had been sent"
    if rank == 1:
        loses(ddp, 1)
    else:
        ddp(batch(1)).backward()
    with pytest.raises(RuntimeError, match=told):
        ddp(batch(2)).backward()
    right_step(ddp, 3)
    for step in (4, 5):  # rank 1 loses two of them, one after the other, and the second is dropped on every rank
        if rank == 1:
            loses(ddp, step)
        elif step == 4:
            ddp(batch(step)).backward()
        else:
            with pytest.raises(RuntimeError, match=told):
                ddp(batch(step)).backward()
    right_step(ddp, 6)
    loses(ddp, 7)  # on every rank
    right_step(ddp, 8)
    ddp.unwrap()


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_mean_that_one_rank_has_lost_is_told_to_every_rank_in_the_next_step(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_loses, wrapper)


def _gives_back(rank: int) -> None:
    """What a graph was to fold in is in .grad again when the exception has reached the user."""
    ddp = wrap("compile_ddp", Net(2))
    right_step(ddp, 0)
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(batch(1)).backward()
    before = [(parameter.grad, parameter.grad.clone()) for parameter in ddp.parameters()]
    loss = ddp(batch(2))
    if rank == 1:
        ARMED.append(ValueError)
        with pytest.raises(ValueError, match="planted"):
            loss.backward()
        ARMED.clear()
        finish(ddp, 2)
        for parameter, (gradient, value) in zip(ddp.parameters(), before, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, value)
    else:
        with pytest.raises(RuntimeError, match="broke off"):
            loss.backward()
    right_step(ddp, 3)


def test_gradients_that_a_broken_graph_was_to_fold_in_are_given_back(ranks2: RankPool) -> None:
    ranks2.run(_gives_back)


# ---- before the backward reaches the wrapper -------------------------------------------------------------------------


def _breaks_before(rank: int, wrapper: str, how: str) -> None:
    ddp = wrap(wrapper, Net(4))
    for step in range(6):
        if step not in (0, 3):
            right_step(ddp, step)
            continue
        ddp.zero_grad()
        loss = ddp(batch(step)) * 1.0
        if rank == 1:

            def planted(_: Tensor) -> None:
                raise ValueError("planted")

            loss.register_hook(planted)
            with pytest.raises(ValueError, match="planted"):
                loss.backward()
            if how == "abandon":
                ddp.abandon_backward()
            else:
                ddp.skip_step()
        elif how == "abandon":
            with pytest.raises(RuntimeError, match=r"broke off on 1 other rank"):
                loss.backward()
        else:
            loss.backward()
    ddp.abandon_backward()  # a no-op: no forward waits
    with torch.no_grad():
        ddp(batch(9))
    ddp.abandon_backward()
    ddp.unwrap()


@pytest.mark.parametrize("how", ["abandon", "skip"])
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_an_exception_before_the_outputs_are_reached_can_be_abandoned_or_skipped(
    ranks2: RankPool, wrapper: str, how: str
) -> None:
    ranks2.run(_breaks_before, wrapper, how)


# ---- a forward that raises is no step --------------------------------------------------------------------------------


class Raising(Net):
    def __init__(self) -> None:
        super().__init__(4)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise ValueError("planted")
        return super().forward(x)


def _all_drop(rank: int, wrapper: str, keeps_output: bool) -> None:
    """One rank's forward raises, and all ranks, who tell each other, drop that step."""
    ddp = wrap(wrapper, Raising())
    for step in range(9):
        ddp.module.armed = rank == step % 2 and step in (0, 3, 4, 6)
        worked = torch.ones(())
        losses: list[Tensor] = []
        try:
            losses.append(ddp(batch(step)))
        except ValueError:
            worked.zero_()
        ddp.module.armed = False
        if not keeps_output:
            losses.clear()
        dist.all_reduce(worked, dist.ReduceOp.MIN)
        if worked:
            right_step(ddp, step)
    ddp.unwrap()


@pytest.mark.parametrize("keeps_output", [False, True])
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_step_that_all_ranks_drop_because_one_ranks_forward_raised_is_no_step(
    ranks2: RankPool, wrapper: str, keeps_output: bool
) -> None:
    ranks2.run(_all_drop, wrapper, keeps_output)


# ---- before the wrapper's first hook ---------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    """Its forwards bring rank 0's buffers, so that a rank must know of the failed backward before its next one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Planted(torch.autograd.Function):
    """Fails in backward while `ARMED`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _raise_if_armed(gradient)
        return gradient


def _raise_if_armed(_: Tensor) -> None:
    if ARMED:
        raise ARMED[-1]("planted")  # also where the graph is run for comparison, which nobody hears of


def _loss(ddp: nn.Module, step: int, place: str) -> Tensor:
    output = ddp(batch(step))
    if place == "output":
        output.register_hook(_raise_if_armed)
    loss = (Planted.apply(output) if place == "function" else output).square().sum()
    if place == "loss":
        loss.register_hook(_raise_if_armed)
    return loss


def _before_any_hook(rank: int, wrapper: str) -> None:
    """Outside of the model, between the loss and its output; in the first step, too, and on every rank."""
    ddp = wrap(wrapper, WithBuffers())
    places = [("function", 1), ("output", 0), ("loss", 1), ("output", None), ("function", 1)]
    for step, (place, broken) in enumerate(places):
        following = batch(2 * step + 1)  # no other collective comes between the two steps
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(following).square().sum())  # noqa: B023
        ddp.zero_grad()
        if broken in (rank, None):
            ARMED.append(ValueError)
            with pytest.raises(ValueError, match="planted"):
                _loss(ddp, 2 * step, place).backward()
            ARMED.clear()
        else:
            with pytest.raises(RuntimeError, match=rf"rank {rank}: the backward of forward \d+ broke off on 1 other"):
                _loss(ddp, 2 * step, place).backward()
        ddp.zero_grad()
        _loss(ddp, 2 * step + 1, place).backward()
        assert_gradients(ddp.module, expected, rtol=1e-4)
    ddp.unwrap()


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_after_a_backward_that_failed_before_the_first_hook_the_next_step_is_right(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_before_any_hook, wrapper)


def _goes_on_with_it(rank: int, wrapper: str) -> None:
    """What failed before the first hook has sent nothing: it may be tried again, or skipped."""
    ddp = wrap(wrapper, WithBuffers())
    for step in range(4):
        skips = step % 2 == 1 and rank == 1

        def mean(module: nn.Module) -> Tensor:
            return module(batch(step)).square().sum() * (0.0 if skips else 1.0)  # noqa: B023

        expected = expected_mean(copy.deepcopy(ddp.module), mean)
        ddp.zero_grad()
        loss = _loss(ddp, step, "function")
        if rank == 1:
            ARMED.append(ValueError)
            with pytest.raises(ValueError, match="planted"):
                loss.backward(retain_graph=True)
            ARMED.clear()
        if skips:
            ddp.skip_step()
        else:
            loss.backward()
        assert_gradients(ddp.module, expected, rtol=1e-4)
    ddp.unwrap()


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_backward_that_failed_before_the_first_hook_may_be_run_again_or_skipped(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_goes_on_with_it, wrapper)
