"""Copies of wrappers, which one rank alone may make: they evaluate, are saved and averaged into, and reduce nothing."""

import copy
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, assert_step, gradient_copies, local_gradients, row_batch, wrappers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from compiled_ddp.compat.apex import DistributedDataParallel as ApexDDP
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
A_COPY = r"this (CompiledDDP|EagerDDP) is a copy, which other ranks know nothing of.*wrap its \.module on every rank"


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.BatchNorm1d(5), Mlp(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def assert_trains(ddp: Any, rank: int) -> None:
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))


# ---- what a copy is for ----------------------------------------------------------------------------------------------


def _evaluates(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Normed())
    assert_trains(ddp, rank)
    ddp.note, ddp._private = ["a note"], "of this wrapper"
    ddp.module.drop.eval()
    ddp.register_forward_hook(lambda module, args, output: output + 1.0)
    if rank == 0:  # alone: a collective would fail after the group's timeout
        with ddp.no_sync():
            copied = copy.deepcopy(ddp)
        assert type(copied) is type(ddp) and copied.module is not ddp.module
        assert copied.note == ddp.note and copied.note is not ddp.note
        assert [m.training for m in copied.modules()] == [m.training for m in ddp.modules()]
        assert list(copied.state_dict()) == list(ddp.module.state_dict())
        assert [n for n, _ in copied.named_parameters()] == [n for n, _ in ddp.named_parameters()]
        assert copied.device == ddp.device
        assert copied.require_backward_grad_sync
        for training in (True, False):
            copied.train(training)
            with torch.no_grad():
                expected = copy.deepcopy(copied.module)(row_batch(5)) + 1.0
                torch.testing.assert_close(copied(row_batch(5)), expected)
        with torch.no_grad():
            for mine, theirs in zip(copied.parameters(), ddp.parameters(), strict=True):
                assert mine is not theirs and mine.grad is None
                mine.add_(1.0)
        again = copy.deepcopy(copied)
        torch.testing.assert_close(again.eval()(row_batch(5)), copied(row_batch(5)))
        copied.load_state_dict(ddp.state_dict())
        copied.load_state_dict({f"module.{key}": value for key, value in again.state_dict().items()})
    ddp._forward_hooks.clear()
    assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_one_rank_may_copy_a_wrapper_and_evaluate_the_copy(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_evaluates, wrapper, collective_timeout_seconds=10)


def _decaying(decay: float, averaged: Tensor, current: Tensor, _: object) -> Tensor:
    return decay * averaged + (1 - decay) * current


def _averages(rank: int, wrapper: str, on_ranks: tuple[int, ...]) -> None:
    ddp = wrap(wrapper, Normed())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    decay = 0.75
    if rank in on_ranks:
        ema = AveragedModel(ddp, avg_fn=functools.partial(_decaying, decay))
        expected = None
    for step in range(3):
        loss_of(ddp, row_batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank in on_ranks:
            ema.update_parameters(ddp)
            now = [parameter.detach().clone() for parameter in ddp.parameters()]
            expected = (
                now if expected is None else [decay * e + (1 - decay) * n for e, n in zip(expected, now, strict=True)]
            )
    if rank in on_ranks:
        for mine, by_hand in zip(ema.module.parameters(), expected, strict=True):
            torch.testing.assert_close(mine, by_hand)
        update_bn([row_batch(0), row_batch(1)], ema)
        with torch.no_grad():
            bare = Normed()
            bare.load_state_dict(ema.module.state_dict())
            torch.testing.assert_close(ema.eval()(row_batch(3)), bare.eval()(row_batch(3)))
        file = io.BytesIO()
        torch.save(ema, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        torch.testing.assert_close(loaded(row_batch(3)), ema(row_batch(3)))
        with pytest.raises(RuntimeError, match=A_COPY):
            loaded(row_batch(3)).sum().backward()
    assert_trains(ddp, rank)


@pytest.mark.parametrize("on_ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("wrapper", BOTH)
def test_averaged_model_takes_a_wrapper(ranks2: RankPool, wrapper: str, on_ranks: tuple[int, ...]) -> None:
    ranks2.run(_averages, wrapper, on_ranks, collective_timeout_seconds=10)


# ---- its backwards ---------------------------------------------------------------------------------------------------


class KeepsItsLoss(Mlp):
    def forward(self, x: Tensor) -> None:
        self.loss = super().forward(x).square().sum()


def _backwards(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    if rank == 0:
        copied, x = copy.deepcopy(ddp), row_batch(rank)
        for _ in range(2):
            loss = loss_of(copied, x)
            with pytest.raises(RuntimeError, match=A_COPY):
                loss.backward()
            assert not any(gradient_copies(copied.module).values()), "something was accumulated"
            with pytest.raises(RuntimeError, match=A_COPY):
                torch.autograd.grad(loss_of(copied, x), list(copied.parameters()))
        # Under no_sync it is local; gradients of inputs alone are, too.
        expected = local_gradients(copy.deepcopy(copied.module), lambda module: loss_of(module, x))
        with copied.no_sync():
            loss = loss_of(copied, x)
        loss.backward()
        assert_gradients(copied.module, {name: gradient.double() for name, gradient in expected.items()})
        x = x.requires_grad_()
        (of_copy,) = torch.autograd.grad(loss_of(copied, x), x)
        (of_module,) = torch.autograd.grad(loss_of(copied.module, x), x)
        torch.testing.assert_close(of_copy, of_module)
    kept = wrap(wrapper, KeepsItsLoss())
    if rank == 0:
        copied = copy.deepcopy(kept)
        copied(row_batch(rank))
        with pytest.raises(RuntimeError, match=A_COPY):
            copied.module.loss.backward()
        copied.zero_grad()
        with copied.no_sync():
            copied(row_batch(rank))
        copied.module.loss.backward()
    assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_that_would_be_synchronised_is_an_error_and_others_are_local(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_backwards, wrapper, collective_timeout_seconds=10)


def _teacher(rank: int, wrapper: str) -> None:
    """A frozen copy judges what the model makes: gradients flow through it."""
    ddp = wrap(wrapper, nn.Linear(5, 5))
    teacher = wrap(wrapper, Mlp())
    frozen = copy.deepcopy(teacher).requires_grad_(False)
    assert_step(ddp, lambda module: loss_of(frozen, module(row_batch(rank))))
    ddp.zero_grad()
    trained = copy.deepcopy(teacher)
    loss = loss_of(trained, ddp(row_batch(rank)))
    with pytest.raises(RuntimeError, match=A_COPY):
        loss.backward()
    with trained.no_sync():
        assert_step(ddp, lambda module: loss_of(trained, module(row_batch(rank))))


@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_flow_through_a_copy_that_is_frozen(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_teacher, wrapper)


# ---- what only ranks together can do ---------------------------------------------------------------------------------

COLLECTIVES: dict[str, Callable[[Any], object]] = {
    "plan": lambda ddp: ddp.plan,
    "explain": lambda ddp: ddp.explain(),
    "stats": lambda ddp: ddp.stats(),
    "skip_step": lambda ddp: ddp.skip_step(),
    "abandon_backward": lambda ddp: ddp.abandon_backward(),
    "warmup": lambda ddp: ddp.warmup(row_batch(0)),
    "join": lambda ddp: ddp.join(),
    "register_comm_hook": lambda ddp: ddp.register_comm_hook(None, lambda state, bucket: None),
    "set_weight": lambda ddp: ddp.set_weight(2.0),
    "piggyback": lambda ddp: ddp.piggyback(tokens=1),
    "piggybacked": lambda ddp: ddp.piggybacked,
    "process_group": lambda ddp: ddp.process_group,
    "comm_hook_state_dict": lambda ddp: ddp.comm_hook_state_dict(),
    "_set_static_graph": lambda ddp: ddp._set_static_graph(),
}


def _refused(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp(), reduction="weighted", piggyback=("tokens",))
    if rank == 0:
        copied = copy.deepcopy(ddp)
        for name, use in COLLECTIVES.items():
            with pytest.raises(RuntimeError) as caught:
                use(copied)
            assert re.match(A_COPY, str(caught.value)), name
        with pytest.raises(ValueError, match=r"the model is a \w+ already"):
            wrap(wrapper, copied)
    else:
        with pytest.raises(RuntimeError, match="the model was not wrapped"):
            wrap(wrapper, Mlp())
    with pytest.raises(TypeError, match=r"cannot be copied without its module.*use copy\.deepcopy"):
        copy.copy(ddp)
    assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_plan_and_collectives_of_a_copy_are_errors_that_say_so(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_refused, wrapper, collective_timeout_seconds=10)


def _trained_after_all(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    copied = copy.deepcopy(ddp)
    loss = loss_of(copied, row_batch(rank))
    own = wrap(wrapper, copied.module)  # while the copy is there, and even expects a backward
    for trained in (own, ddp, own):
        assert_trains(trained, rank)
    del loss
    again = copy.deepcopy(ddp)
    loss_of(again, row_batch(rank))
    module = again.unwrap()
    loss_of(module, row_batch(rank)).backward()  # no copy any more: local
    with pytest.raises(RuntimeError, match="has been unwrapped"):
        again(row_batch(rank))
    assert_trains(wrap(wrapper, module), rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_module_of_a_copy_may_be_wrapped_and_trained(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_trained_after_all, wrapper)


def _closed(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    ddp.unwrap()
    with pytest.raises(RuntimeError, match="has been unwrapped"):
        copy.deepcopy(ddp)


def test_a_wrapper_that_was_unwrapped_is_not_copied(ranks2: RankPool) -> None:
    ranks2.run(_closed, "EagerDDP")


# ---- wrappers in other modules, groups and classes -------------------------------------------------------------------


class Trainer(nn.Module):
    """The user's own module, which holds a wrapper."""

    def __init__(self, ddp: Any) -> None:
        super().__init__()
        self.ddp, self.head = ddp, nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ddp(x))


def _in_other_modules(rank: int, wrapper: str) -> None:
    trainer = Trainer(wrap(wrapper, Mlp()))
    if rank == 0:
        copied = copy.deepcopy(trainer)
        with torch.no_grad():
            torch.testing.assert_close(copied(row_batch(0)), trainer(row_batch(0)))
        assert list(copied.state_dict()) == list(trainer.state_dict())
        copied.load_state_dict(trainer.state_dict())
        with pytest.raises(RuntimeError, match=A_COPY):
            copied(row_batch(0)).sum().backward()
        pickle.loads(pickle.dumps(copied))(row_batch(0))
    outer = wrap(wrapper, trainer)
    if rank == 0:
        copied = copy.deepcopy(outer)
        with torch.no_grad():
            torch.testing.assert_close(copied(row_batch(0)), outer.module(row_batch(0)))
        with pytest.raises(RuntimeError, match=A_COPY):
            copied(row_batch(0)).sum().backward()
    outer(row_batch(rank)).sum().backward()
    assert_trains(trainer.ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_modules_that_hold_wrappers_and_wrappers_of_these_are_copied(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_in_other_modules, wrapper, collective_timeout_seconds=10)


def _of_every_kind(rank: int) -> None:
    group = dist.new_group([0, 1])
    model = Mlp()
    named = list(model.named_parameters())
    delays = {"delay_all_reduce_named_params": named[:1], "param_to_hook_all_reduce": named[0][1]}
    every = [
        wrap("EagerDDP", Mlp(), process_group=group),
        wrap("compile_ddp", model, **delays),
        ApexDDP(Mlp(), allreduce_trigger_params=None, retain_allreduce_buffers=True),
    ]
    for ddp in every:
        loss_of(ddp, row_batch(rank)).backward()
        if rank == 0:
            for copied in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(copy.deepcopy(ddp)))):
                with torch.no_grad():
                    torch.testing.assert_close(copied(row_batch(0)), ddp.module(row_batch(0)))
                with pytest.raises(RuntimeError, match=r"this \w+ is a copy, which"):
                    loss_of(copied, row_batch(0)).backward()


def test_wrappers_of_a_group_with_ddps_arguments_and_of_apex_are_copied_too(ranks2: RankPool) -> None:
    ranks2.run(_of_every_kind, collective_timeout_seconds=10)
