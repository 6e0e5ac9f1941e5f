"""Combinations of features that reviews found to go wrong; each docstring says how."""

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import (
    Mlp,
    assert_equal_on_all_ranks,
    assert_gradients,
    assert_step,
    local_gradients,
    mean_by_hand,
    mean_over_ranks,
    row_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


# ---- reentrant checkpoints of the wrapper ----------------------------------------------------------------------------


def _checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x.requires_grad_(), use_reentrant=True).square().sum()


def _after_no_sync(rank: int, wrapper: str, checkpointed_is_local: bool) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))
    local, synchronised = (_checkpointed, loss_of) if checkpointed_is_local else (loss_of, _checkpointed)
    for step in range(3):
        first, second = row_batch(rank, 2 * step), row_batch(rank, 2 * step + 1)
        twin = copy.deepcopy(ddp.module)
        twin.zero_grad()
        loss_of(twin, first).backward()
        total = mean_by_hand(ddp, lambda module: loss_of(module, first) + loss_of(module, second))  # noqa: B023
        ddp.zero_grad()
        with ddp.no_sync():
            local(ddp, first).backward()
        for parameter, expected in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
        synchronised(ddp, second).backward()
        assert_gradients(ddp.module, total)


@pytest.mark.parametrize("checkpointed_is_local", [False, True])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_reentrant_checkpoint_of_the_wrapper_follows_its_own_no_sync(
    ranks2: RankPool, wrapper: str, checkpointed_is_local: bool
) -> None:
    """It ran in the way of the forward before it: its first run is without gradients, its second inside a backward."""
    ranks2.run(_after_no_sync, wrapper, checkpointed_is_local)


class SharedByCheckpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        return checkpoint(self.shared, x, use_reentrant=True)


def _two_gradients(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](SharedByCheckpoints(), bucket_cap_mb=25, first_bucket_mb=25)
    with pytest.raises(RuntimeError, match=r"parameter shared\.\w+ got a second gradient in one backward"):
        loss_of(ddp, row_batch(rank)).backward()


def test_a_second_gradient_is_refused_before_its_bucket_is_launched_too(ranks2: RankPool) -> None:
    """The first one was divided by the world size twice, on every rank alike."""
    ranks2.run(_two_gradients)


# ---- graphs that a backward does not run -----------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """One graph for each of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.a(x).square().sum()
        torch._dynamo.graph_break()
        return a, self.b(x).square().sum()


def _used_outside(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TwoHeads())
    for step in range(5):
        x = row_batch(rank, step)

        def outside(module: nn.Module) -> Tensor:
            weight = getattr(module, "module", module).a.weight
            return module(x)[1] + F.linear(x, weight).square().sum()  # noqa: B023

        expected = mean_by_hand(ddp, outside if step >= 2 else lambda module: sum(module(x)))  # noqa: B023
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (outside(ddp) if step >= 2 else sum(ddp(x))).backward()
        if step >= 2:
            assert ddp.module.a.bias.grad is None
            ddp.module.a.bias.grad = torch.zeros_like(ddp.module.a.bias)
        assert_gradients(ddp.module, expected)


def test_a_parameter_whose_graph_is_skipped_may_be_used_outside_of_it(ranks2: RankPool) -> None:
    """Its gradient stayed local, with no more than a warning: the hooks had been removed."""
    ranks2.run(_used_outside)


def _users_hook(rank: int, cause: str) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TwoHeads())
    seen: dict[str, Tensor] = {}
    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    for step in range(5):
        x = row_batch(rank, step)
        expected = mean_by_hand(ddp, lambda module: module(x)[0] if cause == "one head" else sum(module(x)))  # noqa: B023
        ddp.zero_grad()
        seen.clear()
        handle = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if step == 2 and cause == "one head":
                ddp(x)[0].backward()
            elif step == 2 and rank == 1:
                handle = ddp.module.b.weight.register_hook(lambda gradient: gradient * 1)
                sum(ddp(x)).backward()
                handle.remove()
            else:
                sum(ddp(x)).backward()
        if step == 2:
            for name in ("a.weight", "a.bias"):
                torch.testing.assert_close(seen[name].double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cause", ["one head", "tensor hook on rank 1"])
def test_a_users_hook_sees_the_mean_where_a_graph_leaves_it_to_hooks_in_mid_backward(
    ranks2: RankPool, cause: str
) -> None:
    """It was taken for one that had been registered in the middle of the backward: an error."""
    ranks2.run(_users_hook, cause)


# ---- torch.autograd.grad ---------------------------------------------------------------------------------------------


def _saliency_on_rank_0(rank: int, wrapper: str, at: int) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for step in range(3):
        x = row_batch(rank, step).requires_grad_()
        expected = mean_by_hand(ddp, lambda module: loss_of(module, x.detach()))  # noqa: B023
        (of_input,) = torch.autograd.grad(loss_of(copy.deepcopy(ddp.module), x), x)
        ddp.zero_grad()
        loss = loss_of(ddp, x)
        if rank == 0 and step == at:
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            torch.testing.assert_close(found, of_input)
        loss.backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("wrapper", BOTH)
def test_one_rank_alone_may_ask_for_gradients_of_inputs(ranks2: RankPool, wrapper: str, at: int) -> None:
    """It took part in the reduction with zeros, in the other rank's place in the sequence."""
    ranks2.run(_saliency_on_rank_0, wrapper, at)


def _skips_after_autograd_grad(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for step in range(4):
        x = row_batch(rank, step).requires_grad_()
        ddp.zero_grad()
        if step == 2 and rank == 1:
            ddp.skip_step()
        else:
            loss = loss_of(ddp, x)
            loss.backward(retain_graph=True)
            if step == 1:
                torch.autograd.grad(loss, x)
        assert_equal_on_all_ranks([parameter.grad.tolist() for parameter in ddp.module.parameters()])


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_step_may_be_skipped_after_an_autograd_grad_behind_a_backward(ranks2: RankPool, wrapper: str) -> None:
    """That forward counted as awaited again, so skip_step() counted none: the numbers of forwards differed."""
    ranks2.run(_skips_after_autograd_grad, wrapper)


# ---- .grad and buffers -----------------------------------------------------------------------------------------------


def _swapped(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    x = row_batch(rank)
    before = mean_by_hand(ddp, lambda module: loss_of(module, x))
    for _ in range(2):
        ddp.zero_grad()
        loss_of(ddp, x).backward()
    first, second = ddp.module[0].weight, ddp.module[1].weight
    first.grad, second.grad = second.grad, first.grad
    loss_of(ddp, x).backward()
    expected = {name: 2 * mean for name, mean in before.items()}
    expected["0.weight"] = expected["1.weight"] = before["0.weight"] + before["1.weight"]
    assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_may_change_places(ranks2: RankPool, wrapper: str) -> None:
    """Each lay in the other's place in the flat buffer, and was overwritten before it was read."""
    ranks2.run(_swapped, wrapper)


class Normalised(nn.Module):
    """With buffers; raises in forward while `armed`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.armed:
            raise ValueError("planted")
        return self.head(x)


def _raises_after_eval(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Normalised())
    for step in range(4):
        x = row_batch(rank, step)
        ddp.zero_grad()
        if step == 2:
            with torch.no_grad():
                ddp(x)
        ddp.module.armed = step == 2 and rank == 1
        with pytest.raises(ValueError, match="planted") if ddp.module.armed else contextlib.nullcontext():
            loss_of(ddp, x).backward()
        if ddp.module.armed:
            ddp.skip_step()
        assert_equal_on_all_ranks([parameter.grad.tolist() for parameter in ddp.module.parameters()])


@pytest.mark.parametrize("wrapper", BOTH)
def test_buffers_are_broadcast_alike_after_a_forward_that_raised_on_one_rank(ranks2: RankPool, wrapper: str) -> None:
    """Only the others took the forward for one that buffers must be synchronised after: a hang."""
    ranks2.run(_raises_after_eval, wrapper)


# ---- users' post-accumulate hooks ------------------------------------------------------------------------------------


def _takes_gradients_away(rank: int, wrapper: str) -> None:
    """Accumulation, and an optimizer's step in the last backward's hooks."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    steps_now = [False]
    seen: dict[str, Tensor] = {}

    def register(name: str, parameter: nn.Parameter) -> None:
        def hook(updated: Tensor) -> None:
            if steps_now[0]:
                seen[name] = updated.grad.double()
                updated.grad = None

        parameter.register_post_accumulate_grad_hook(hook)

    for name, parameter in ddp.module.named_parameters():
        register(name, parameter)
    for step in range(3):
        first, second = row_batch(rank, 2 * step), row_batch(rank, 2 * step + 1)
        steps_now[0] = False
        expected = mean_by_hand(ddp, lambda module: loss_of(module, first) + loss_of(module, second))  # noqa: B023
        with ddp.no_sync():
            loss_of(ddp, first).backward()
        steps_now[0] = True
        loss_of(ddp, second).backward()
        assert all(parameter.grad is None for parameter in ddp.module.parameters())
        for name, mean in expected.items():
            torch.testing.assert_close(seen[name], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_gradient_that_a_users_hook_has_taken_away_stays_away_after_accumulation(
    ranks2: RankPool, wrapper: str
) -> None:
    """The local gradient from before was put back, as after a backward that accumulates nothing, and added again."""
    ranks2.run(_takes_gradients_away, wrapper)


def _optimizer_in_backward(rank: int, wrapper: str, with_forward: bool) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())

    def descend(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    for parameter in ddp.module.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    for step in range(4):
        if rank == 1 and step == 2:
            if with_forward:
                ddp(row_batch(rank, step))
            ddp.skip_step()
        else:
            loss_of(ddp, row_batch(rank, step)).backward()
        assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.module.parameters()])
        assert all(parameter.grad is None for parameter in ddp.module.parameters())


@pytest.mark.parametrize("with_forward", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_an_optimizer_in_backward_steps_on_a_rank_that_skips_the_step(
    ranks2: RankPool, wrapper: str, with_forward: bool
) -> None:
    """Where graphs reduce, no hooks were there to be held back and run: the ranks drifted apart."""
    ranks2.run(_optimizer_in_backward, wrapper, with_forward)


# ---- changed models --------------------------------------------------------------------------------------------------


class Slot(nn.Module):
    def __init__(self, slot: nn.Module) -> None:
        super().__init__()
        self.first, self.slot, self.head = nn.Linear(5, 5), slot, nn.Linear(5, 3, bias=False)
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_slot(torch.tanh(self.first(x)))
        return self.head(x if self.scale is None else x * self.scale)

    @torch.compiler.disable
    def in_slot(self, x: Tensor) -> Tensor:
        return self.slot(x)


def _fill_slot(model: Slot) -> None:
    model.slot = nn.Linear(5, 5)


def _fill_scale(model: Slot) -> None:
    model.scale = nn.Parameter(torch.ones(5))


def _fill_bias(model: Slot) -> None:
    model.head.bias = nn.Parameter(torch.zeros(3))


def _reshape_head(model: Slot) -> None:
    model.head.weight.data = torch.ones(4, 5)  # of the same stride


def _resize_bias(model: Slot) -> None:
    model.first.weight.data, model.first.bias.data = torch.ones(7, 5), torch.ones(7)
    model.slot = nn.Linear(7, 5)


def _filled(rank: int, wrapper: str, change: Callable[[Slot], None]) -> None:
    ddp = wrappers([wrapper])[wrapper](Slot(nn.Identity()))
    for step in range(4):
        if step == 2:
            change(ddp.module)
        x = row_batch(rank, step)
        if step != 2:  # in that one the forward takes rank 0's values of what is new, which a copy made before has not
            assert_step(ddp, lambda module: loss_of(module, x))  # noqa: B023
        else:
            ddp.zero_grad()
            output = ddp(x)
            expected = mean_by_hand(ddp, lambda module: loss_of(module, x))  # noqa: B023
            output.square().sum().backward()
            assert_gradients(ddp.module, expected)
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.module.parameters()])


@pytest.mark.parametrize("change", [_fill_slot, _fill_scale, _fill_bias, _reshape_head, _resize_bias])
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_put_in_the_place_of_something_untrained_is_reduced(
    ranks2: RankPool, wrapper: str, change: Callable[[Slot], None]
) -> None:
    """The number of parts had not changed, and another size had the same strides: gradients stayed local in part."""
    ranks2.run(_filled, wrapper, change)


def _unfrozen_by_another(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Slot(nn.Linear(5, 5).requires_grad_(False)))
    loss_of(ddp, row_batch(rank)).backward()
    ddp.zero_grad()
    _fill_slot(ddp.module)
    ddp(row_batch(rank))  # which takes rank 0's values
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank, 1)))


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_put_in_the_place_of_something_frozen_is_reduced(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_unfrozen_by_another, wrapper)


def _frozen_on_one_rank(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for step in range(4):
        x = row_batch(rank, step)
        ddp.module.head.requires_grad_(rank == 0 or step < 2)
        twin = copy.deepcopy(ddp.module)
        twin.head.requires_grad_(True)
        own = local_gradients(twin, lambda module: loss_of(module, x))  # noqa: B023
        if rank == 1 and step >= 2:
            own["head.weight"] = own["head.bias"] = None
        expected = mean_over_ranks(own, twin)
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(ddp, x).backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_frozen_on_one_rank_alone_counts_as_zero_there(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_frozen_on_one_rank, wrapper)


def _frozen_before_backward(rank: int, wrapper: str, part: str, on: tuple[int, ...]) -> None:
    """Between a forward and its backward, in every other step; `.grad` keeps what it has."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    frozen = ddp.module.get_submodule(part)
    names = [name for name, _ in ddp.module.named_parameters() if name.startswith(part)]
    before = {name: torch.zeros(()) for name, _ in ddp.module.named_parameters()}
    for step in range(6):
        x = row_batch(rank, step)
        freezes = step % 2 == 1
        own = local_gradients(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))  # noqa: B023
        if freezes and rank in on:
            own |= dict.fromkeys(names)
        expected = mean_over_ranks(own, ddp.module)
        loss = loss_of(ddp, x)
        frozen.requires_grad_(not (freezes and rank in on))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()
        frozen.requires_grad_(True)
        before = {name: before[name] + mean for name, mean in expected.items()}
        assert_gradients(ddp.module, before)
        if step == 3:
            ddp.zero_grad()
            before = dict.fromkeys(before, torch.zeros(()))


@pytest.mark.parametrize("on", [(1,), (0,), (0, 1)])
@pytest.mark.parametrize("part", ["head", ""])
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_frozen_between_forward_and_backward_counts_as_zero_there(
    ranks2: RankPool, wrapper: str, part: str, on: tuple[int, ...]
) -> None:
    ranks2.run(_frozen_before_backward, wrapper, part, on)


def _frozen_before_autograd_grad(rank: int) -> None:
    """What it returns needs no hook, and nothing is dropped."""
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp(), strict=True)
    loss_of(ddp, row_batch(rank)).backward()
    x = row_batch(rank, 1)
    expected = mean_over_ranks(
        local_gradients(copy.deepcopy(ddp.module), lambda module: loss_of(module, x)), ddp.module
    )
    loss = loss_of(ddp, x)
    ddp.module.head.requires_grad_(rank == 0)
    (gradient,) = torch.autograd.grad(loss, [ddp.module.first.weight])
    torch.testing.assert_close(gradient.double(), expected["first.weight"], rtol=1e-5, atol=1e-6)


def test_what_is_frozen_before_autograd_grad_keeps_the_graph(ranks2: RankPool) -> None:
    ranks2.run(_frozen_before_autograd_grad)


def _another_identity_on_one_rank(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Slot(nn.Identity()))
    for step in range(4):
        if step == 2 and rank == 1:
            ddp.module.slot = nn.Identity()
        assert_step(ddp, lambda module: loss_of(module, row_batch(rank, step)))  # noqa: B023


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_part_without_parameters_may_be_replaced_on_one_rank_alone(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_another_identity_on_one_rank, wrapper)


def _breaks_off_before_a_change(rank: int) -> list[str]:
    """Rank 1 breaks off in step 2; in the next one every rank trains the head too."""
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    ddp.module.head.requires_grad_(False)
    messages = []
    for step in range(5):
        ddp.module.head.requires_grad_(step >= 3)
        ddp.zero_grad()
        loss = loss_of(ddp, row_batch(rank, step))
        handle = ddp.module.first.weight.register_hook(_raise) if step == 2 and rank == 1 else None
        try:
            loss.backward()
            messages.append("")
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
        if handle is not None:
            handle.remove()
    return messages


def _raise(_: Tensor) -> None:
    raise ValueError("planted")


def test_a_broken_backward_is_finished_before_a_changed_model_is_agreed_on(ranks3: RankPool) -> None:
    """The rank asked the others for their model while they waited for its buckets: all ran into the timeout."""
    other, broken, last = ranks3.run(_breaks_off_before_a_change, timeout_seconds=60, collective_timeout_seconds=10)
    assert broken == ["", "", "planted", "", ""]
    for messages in (other, last):
        assert messages[:2] + messages[3:] == [""] * 4
        assert "broke off on 1 other rank" in messages[2]
