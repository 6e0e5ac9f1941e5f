"""What a user does to .grad, and keeps of it, is the user's: [Note: memory that others hold] in flat_buffers.py."""

import contextlib
import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import ThreeEqualBlocks, assert_gradients, assert_step, expected_mean, mean_by_hand, wrappers
from torch import Tensor, nn

from compiled_ddp.plan import GradientSpec, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.step.buffers import SequenceBuffers, storage_holders
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
# aot_eager reduces out of place: only Inductor's graphs fill the memory that stays.
ALL = (*BOTH, pytest.param("inductor", marks=pytest.mark.inductor))


def wrap(name: str, model: nn.Module, **options: Any) -> nn.Module:
    options |= {"backend": "inductor"} if name == "inductor" else {}
    kind = "EagerDDP" if name == "EagerDDP" else "compile_ddp"
    return wrappers([kind])[kind](model, **options)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def loss_of(step: int) -> Callable[[nn.Module], Tensor]:
    """Of data that differs on every rank and in every step."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return lambda module: module(x).square().sum()


# ---- flat buffers, without ranks -------------------------------------------------------------------------------------


def buffers_of(*shapes: tuple[int, ...]) -> SequenceBuffers:
    specs = [GradientSpec.of(n, torch.zeros(shape)) for n, shape in enumerate(shapes)]
    return SequenceBuffers([Section(assign_buckets(specs, capacities_bytes=[1e9], world_size=2), "hooks")])


def gradients_put_in_place(buffers: SequenceBuffers) -> list[Tensor]:
    """The .grad of each parameter of the first bucket, of which nothing else is kept."""
    views = buffers[0].views
    parameters = [nn.Parameter(torch.zeros_like(views[index])) for index in range(len(views))]
    buffers[0].put_in_place(views, parameters)
    return [parameter.grad for parameter in parameters]


def test_memory_that_only_the_gradients_in_place_hold_is_filled_again() -> None:
    buffers = buffers_of((2, 3), (4,))
    gradients = gradients_put_in_place(buffers)
    address = buffers[0].address
    buffers.renew_held(gradients)
    assert buffers[0].address == address
    buffers.renew_held([gradients.pop()])
    assert buffers[0].address != address, "the other one is held by somebody else now"


def test_views_arrays_and_aliases_of_a_gradient_hold_its_memory_too() -> None:
    for hold in (lambda g: g[0], lambda g: g.detach(), lambda g: g.numpy(), lambda g: g.untyped_storage()):
        buffers = buffers_of((2, 3), (4,))
        gradients = gradients_put_in_place(buffers)
        held, address = hold(gradients[0]), buffers[0].address
        buffers.renew_held(gradients)
        assert buffers[0].address != address, held


def test_memory_that_was_resized_is_left() -> None:
    buffers = buffers_of((2, 3))
    (gradient,) = gradients_put_in_place(buffers)
    gradient.untyped_storage().resize_(0)
    buffers.renew_held([gradient])
    assert buffers[0].flat.sum() == 0 and not buffers.holds(0, gradient)


def test_memory_that_was_moved_for_another_process_is_left_to_that() -> None:
    buffers = buffers_of((2, 3))
    (gradient,) = gradients_put_in_place(buffers)
    gradient.share_memory_()  # as a queue of torch.multiprocessing does
    del gradient
    buffers.renew_all_held()
    assert not buffers[0].flat.is_shared()


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.t_(),
        lambda g: g.set_(torch.zeros(3, 3)),
        lambda g: setattr(g, "data", g.data.clone()),
        lambda g: setattr(g, "data", g.data.double()),
        lambda g: g.unsqueeze_(0),
    ],
)
def test_a_gradient_that_was_pointed_elsewhere_is_in_place_no_more_and_moves_nothing(
    change: Callable[[Tensor], object],
) -> None:
    buffers = buffers_of((3, 3))
    (gradient,), view = gradients_put_in_place(buffers), buffers[0].views[0]
    place = view.data_ptr(), view.shape, view.stride(), view.dtype
    change(gradient)
    assert not buffers.holds(0, gradient)
    assert (view.data_ptr(), view.shape, view.stride(), view.dtype) == place


# ---- what a user does to .grad between two steps ---------------------------------------------------------------------


def _to_double_and_back(module: nn.Module) -> None:
    module.double()
    module.float()


def _to_half_and_back(module: nn.Module) -> None:
    module.half()
    module.float()


def _clamp_by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clamp(-1, 1)


def _set(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.set_(parameter.grad * 0.5)


def _replace(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def _swap_data(module: nn.Module) -> None:
    """Each gradient's memory becomes that of its negation, laid out in another order."""
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.dim() == 2:
            parameter.grad.data = (-parameter.grad).t().contiguous().t()


def _free_storage(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            gradient.untyped_storage().resize_(0)


def _transpose_in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.grad.t_()


def _move_into_each_other(module: nn.Module) -> None:
    """One gradient's .data becomes a view into the memory of another one."""
    biases = [p for p in module.parameters() if p.dim() == 1 and p.grad is not None and p.numel() == 4]
    for parameter, other in itertools.pairwise(biases):
        parameter.grad.data = other.grad.data.view(-1)
        other.grad = None


def _to_shared_memory(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.share_memory_()


CHANGES = [
    _to_double_and_back,
    _to_half_and_back,
    _clamp_by_data,
    _set,
    _replace,
    _swap_data,
    _free_storage,
    _transpose_in_place,
    _move_into_each_other,
    _to_shared_memory,
]


def _accumulated(ddp: nn.Module, step: int) -> dict[str, Tensor]:
    """The mean over ranks of .grad as it is plus this step's gradient."""
    mean = mean_by_hand(ddp, loss_of(step))
    before = {name: parameter.grad for name, parameter in ddp.module.named_parameters()}
    return {name: mean[name] if before[name] is None else before[name].double() + mean[name] for name in mean}


def _changes(rank: int, wrapper: str, only_on: int | None, keep_buffers: bool = True) -> None:
    """One change after the other, to the gradients of one wrapper."""
    ddp = wrap(wrapper, net(), keep_buffers=keep_buffers)
    for change in CHANGES:
        try:
            _change(ddp, rank, change, only_on)
        except BaseException as error:
            error.add_note(f"{wrapper}, {change.__name__}")
            raise
    ddp.unwrap()


def _change(ddp: nn.Module, rank: int, change: Callable[[nn.Module], None], only_on: int | None) -> None:
    for step in range(12):
        zero = ("none", "zeros", "keep")[step % 3]
        by_hooks = torch.compiler.set_stance("force_eager") if step // 3 % 2 else contextlib.nullcontext()
        if only_on in (None, rank):
            change(ddp.module)
        if zero != "keep":
            ddp.zero_grad(set_to_none=zero == "none")
        if only_on is None or zero != "keep":  # else ranks have different .grad before the step
            expected = _accumulated(ddp, step)
        else:
            expected = _mean_of_accumulated(ddp, step)
        with by_hooks:
            loss_of(step)(ddp).backward()
        assert_gradients(ddp.module, expected, rtol=1e-3, atol=1e-4)


def _mean_of_accumulated(ddp: nn.Module, step: int) -> dict[str, Tensor]:
    copied = copy.deepcopy(ddp.module)
    for parameter, own in zip(copied.parameters(), ddp.module.parameters(), strict=True):
        parameter.grad = None if own.grad is None else own.grad.clone()
    loss_of(step)(copied).backward()
    means = {}
    for name, parameter in copied.named_parameters():
        assert parameter.grad is not None
        total = parameter.grad.double().contiguous()
        dist.all_reduce(total)
        means[name] = total / dist.get_world_size()
    return means


@pytest.mark.parametrize("only_on", [None, 1], ids=["on all ranks", "on one rank alone"])
@pytest.mark.parametrize("wrapper", ALL)
def test_what_is_done_to_gradients_between_steps_reaches_no_later_step(
    ranks2: RankPool, wrapper: str, only_on: int | None
) -> None:
    ranks2.run(_changes, wrapper, only_on)


# ---- gradients that the user keeps -----------------------------------------------------------------------------------


def _keeps(rank: int, wrapper: str, model: Callable[[], nn.Module]) -> None:
    """Graphs, hooks, skipped steps and torch.autograd.grad in turns: what was kept of a step stays what it was."""
    ddp = wrap(wrapper, model())
    kept: list[tuple[int, list[Tensor], list[Tensor]]] = []
    modes = [
        "graph",
        "graph",
        "eager",
        "graph",
        "eager",
        "eager",
        "skip",
        "graph",
        "hooked",
        "graph",
        "no_sync",
        "eager",
    ]
    for step, mode in enumerate(modes):
        ddp.zero_grad()
        handles = []
        if mode == "hooked":
            handles = [p.register_hook(lambda g: g * 1.0) for p in ddp.module.parameters()]
        if mode == "no_sync":
            with ddp.no_sync():
                loss_of(step)(ddp).backward()
        loss = loss_of(step)
        stance = torch.compiler.set_stance("force_eager") if mode == "eager" else contextlib.nullcontext()
        with stance:
            if mode == "skip" and rank == 1:
                loss(ddp)
                ddp.skip_step()
            else:
                loss(ddp).backward()
        for handle in handles:
            handle.remove()
        gradients = [parameter.grad for parameter in ddp.module.parameters() if parameter.grad is not None]
        assert gradients
        if step % 2:
            gradients = [gradient.view(-1)[1:] if gradient.numel() > 1 else gradient for gradient in gradients]
        kept.append((step, gradients, [gradient.clone() for gradient in gradients]))
        kept = kept[-3:]
        for when, tensors, values in kept:
            for tensor, value in zip(tensors, values, strict=True):
                assert torch.equal(tensor, value), f"a gradient of step {when} has changed in step {step}, {mode}"
    ddp.unwrap()


class TwoInputs(ThreeEqualBlocks):
    """Three blocks with a graph break in each, for rows of 5."""

    def __init__(self) -> None:
        super().__init__(width=5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("model", [net, TwoInputs])
@pytest.mark.parametrize("wrapper", ALL)
def test_gradients_that_are_kept_stay_what_they_were(
    ranks2: RankPool, wrapper: str, model: Callable[[], nn.Module]
) -> None:
    ranks2.run(_keeps, wrapper, model)


def _differs(rank: int, wrapper: str, by_hooks: bool) -> None:
    """PCGrad's habit: gradients of two tasks of one step, the first ones kept over the second backward."""
    ddp = wrap(wrapper, net())
    for step in range(3):
        found, expected = [], []
        for task in range(2):
            loss = loss_of(10 * step + task)
            expected.append(expected_mean(copy.deepcopy(ddp.module), loss))
            ddp.zero_grad()
            with torch.compiler.set_stance("force_eager") if by_hooks else contextlib.nullcontext():
                loss(ddp).backward()
            found.append({name: parameter.grad for name, parameter in ddp.module.named_parameters()})
        for gradients, means in zip(found, expected, strict=True):
            for name, gradient in gradients.items():
                assert gradient is not None
                torch.testing.assert_close(gradient.double(), means[name], rtol=1e-5, atol=1e-6)
    ddp.unwrap()


@pytest.mark.parametrize("by_hooks", [False, True])
@pytest.mark.parametrize("wrapper", ALL)
def test_gradients_of_two_tasks_are_those_of_each(ranks2: RankPool, wrapper: str, by_hooks: bool) -> None:
    ranks2.run(_differs, wrapper, by_hooks)


def _stays_in_place(rank: int, wrapper: str) -> tuple[int, int]:
    """Where nobody keeps anything, hooks fill the same memory in every step."""
    ddp = wrap(wrapper, net())
    addresses = []
    for step in range(6):
        ddp.zero_grad()
        assert_step(ddp, loss_of(step))
        addresses.append([parameter.grad.data_ptr() for parameter in ddp.module.parameters()])
    ddp.unwrap()
    return len({tuple(row) for row in addresses[1:]}), len(addresses)


@pytest.mark.parametrize("wrapper", ["EagerDDP", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_memory_stays_where_nobody_keeps_gradients(ranks2: RankPool, wrapper: str) -> None:
    for places, _ in ranks2.run(_stays_in_place, wrapper):
        assert places == 1


# ---- flat buffers that are given back --------------------------------------------------------------------------------


def _becomes_free(gradient: Tensor) -> bool:
    """Whether nobody else holds its memory; gloo's thread lets go of a collective some moments after its wait."""
    alone = storage_holders(torch.zeros(3))
    deadline = time.monotonic() + 2
    while storage_holders(gradient) > alone and time.monotonic() < deadline:
        time.sleep(0.01)
    return storage_holders(gradient) == alone


def _given_back(rank: int, wrapper: str, keep_buffers: bool) -> None:
    ddp = wrap(wrapper, net(), keep_buffers=keep_buffers)
    for step in range(3):
        assert_step(ddp, loss_of(step))
    gradient = ddp.module[0].weight.grad
    ddp.zero_grad()
    loss = loss_of(3)(ddp)
    is_free = _becomes_free(gradient)
    assert is_free or keep_buffers
    # aot_eager's graphs reduce out of place, and do not fill what is kept.
    assert not is_free or not keep_buffers or wrapper == "compile_ddp"
    loss.backward()
    assert_gradients(ddp.module, mean_by_hand(ddp, loss_of(3)))


@pytest.mark.parametrize("wrapper", ALL)
def test_what_is_given_back_is_free_in_the_forward(ranks2: RankPool, wrapper: str) -> None:
    for keep_buffers in (True, False):
        ranks2.run(_given_back, wrapper, keep_buffers)


@pytest.mark.parametrize("wrapper", BOTH)
def test_whatever_happens_to_gradients_whose_buffers_are_given_back_the_next_mean_is_right(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_changes, wrapper, None, False)
