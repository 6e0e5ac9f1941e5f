"""Communication hooks: torch's own give what they give under torch's DDP."""

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from in_process import riders_with
from models import Mlp, ThreeEqualBlocks, assert_gradients, expected_mean, local_gradients, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from compiled_ddp import torch_private
from compiled_ddp.plan import FIRST_USED, HOOK_FAILED, Riders
from compiled_ddp.reducers.ddp_hook import HookBucket
from compiled_ddp.step.channel import Flag, ForwardNumbers, Message, RiderReader
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
SMALL = 5e-5  # MiB: several buckets in an Mlp


def noop(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


# ---- parity with torch's DDP -----------------------------------------------------------------------------------------


def power_sgd(hook: Callable[..., Any], dtype: torch.dtype | None = None) -> tuple[object, Callable[..., Any]]:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=3)
    return state, default_hooks.fp16_compress_wrapper(hook) if dtype is torch.float16 else hook


# name -> (state, hook), made anew for each wrapper
HOOKS: dict[str, Callable[[], tuple[object, Callable[..., Any]]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (dist.group.WORLD, default_hooks.fp16_compress_hook),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD": lambda: power_sgd(powerSGD_hook.powerSGD_hook),
    "powerSGD fp16": lambda: power_sgd(powerSGD_hook.powerSGD_hook, torch.float16),
    "post local SGD": lambda: (
        post_localSGD_hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "noop": lambda: (None, debugging_hooks.noop_hook),
}


def model_for(hook_name: str) -> nn.Module:
    """Where PowerSGD draws random numbers for each matrix in turn, one alone: graphs bring them in another order."""
    if "powerSGD" in hook_name:
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh())
    return Mlp()


def _as_under_torch(rank: int, wrapper: str, names: list[str]) -> None:
    """One bucket for each model, so that the buckets coincide; several steps, with accumulation in the third."""
    for name in names:
        torch.manual_seed(5)
        model = model_for(name)
        theirs = DistributedDataParallel(copy.deepcopy(model))
        ours = wrappers([wrapper])[wrapper](model, bucket_cap_mb=25.0, first_bucket_mb=25.0)
        for ddp in (theirs, ours):
            ddp.register_comm_hook(*HOOKS[name]())
        for step in range(5):
            for ddp in (theirs, ours):
                ddp.zero_grad(set_to_none=step != 4)
                if step == 3:
                    with ddp.no_sync():
                        loss_of(ddp, row_batch(rank, 20)).backward()
                loss_of(ddp, row_batch(rank, step)).backward()
            for (label, parameter), other in zip(
                ours.module.named_parameters(), theirs.module.parameters(), strict=True
            ):
                torch.testing.assert_close(
                    parameter.grad, other.grad, rtol=1e-6, atol=1e-6, msg=f"{name}, step {step}, {label}"
                )
        assert len(ours.plan.buckets) == 2
        assert "a communication hook is registered" in str(ours.explain())
        assert "not looked at: a communication hook is registered" in str(ours.explain())
        ours.unwrap()


def test_torchs_hooks_give_what_they_give_under_its_ddp(ranks2: RankPool) -> None:
    ranks2.run(_as_under_torch, "EagerDDP", list(HOOKS))
    ranks2.run(_as_under_torch, "compile_ddp", ["fp16 wrapper", "powerSGD", "noop"])


# Written for NCCL: they wait for a GPU, move tensors to it, and take all_gather's future to hold one tensor;
# batched_powerSGD_hook orthogonalises a matrix with a function that takes batches of them (torch 2.13).
FOR_NCCL: dict[str, Callable[[], tuple[object, Callable[..., Any]]]] = {
    "batched powerSGD": lambda: power_sgd(powerSGD_hook.batched_powerSGD_hook),
    "quantization per tensor": lambda: (dist.group.WORLD, quantization_hooks.quantization_pertensor_hook),
    "quantization per channel": lambda: (dist.group.WORLD, quantized_in_small_parts),
}


def quantized_in_small_parts(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    return quantization_hooks.quantization_perchannel_hook(group, bucket, bucket_size=16)


class GatheredAsByNccl:
    """The work of an all_gather whose future holds the outputs in one tensor."""

    def __init__(self, work: Any, outputs: list[Tensor]) -> None:
        self._work, self._outputs = work, outputs

    def wait(self) -> None:
        self._work.wait()

    def get_future(self) -> Any:
        self._work.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result([torch.stack(self._outputs)])
        return future


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    all_gather = dist.all_gather

    def gathered(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        work = all_gather(outputs, tensor, group=group, async_op=async_op)
        return GatheredAsByNccl(work, outputs) if async_op else work

    with (
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_: tensor),
        mock.patch.object(dist, "all_gather", gathered),
        mock.patch.object(powerSGD_hook, "_orthogonalize", lambda matrix: matrix.copy_(torch.linalg.qr(matrix)[0])),
    ):
        yield


def _hooks_for_nccl(rank: int, wrapper: str) -> None:
    with _as_on_a_gpu():
        for name, make in FOR_NCCL.items():
            torch.manual_seed(5)
            model = nn.Linear(5, 64, bias=False)  # what is lost depends on each gradient's place in its bucket
            exact = copy.deepcopy(model)
            theirs = DistributedDataParallel(copy.deepcopy(model))
            ours = wrappers([wrapper])[wrapper](model, bucket_cap_mb=25.0, first_bucket_mb=25.0)
            for ddp in (theirs, ours):
                ddp.register_comm_hook(*make())
            for step in range(4):
                for ddp in (theirs, ours):
                    ddp.zero_grad()
                    loss_of(ddp, row_batch(rank, step)).backward()
                mean = expected_mean(exact, lambda m: loss_of(m, row_batch(rank, step)))  # noqa: B023
                found, other = ours.module.weight.grad, theirs.module.weight.grad
                torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5, msg=f"{name}, step {step}")
            assert not torch.allclose(found.double(), mean["weight"], rtol=1e-4), f"{name} loses nothing"
            torch.testing.assert_close(found.double(), mean["weight"], rtol=0.2, atol=mean["weight"].abs().max().item())
            ours.unwrap()


@pytest.mark.parametrize("wrapper", BOTH)
def test_torchs_hooks_for_nccl_give_what_they_give_under_its_ddp(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_hooks_for_nccl, wrapper)


def _local_sgd_in_subgroups(rank: int, wrapper: str) -> None:
    """Two steps averaged over all three ranks, then over ranks 0 and 1, and rank 2 by itself."""
    subgroup, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    ddp = wrappers([wrapper])[wrapper](Mlp(), bucket_cap_mb=25.0, first_bucket_mb=25.0)
    theirs = DistributedDataParallel(copy.deepcopy(ddp.module))
    for wrapped in (ddp, theirs):
        state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, subgroup, 2)
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    for step in range(4):
        local = local_gradients(copy.deepcopy(ddp.module), lambda m: loss_of(m, row_batch(rank, step)))  # noqa: B023
        group = dist.group.WORLD if step < 2 else subgroup
        for wrapped in (ddp, theirs):
            wrapped.zero_grad()
            loss_of(wrapped, row_batch(rank, step)).backward()
        for (name, parameter), other in zip(ddp.module.named_parameters(), theirs.module.parameters(), strict=True):
            total = local[name].clone()
            dist.all_reduce(total, group=group)
            mean = total / dist.get_world_size(group)
            torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-6, msg=f"step {step}, {name}")
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6, msg=f"step {step}, {name}")


@pytest.mark.parametrize("wrapper", BOTH)
def test_post_local_sgd_averages_in_its_subgroups_after_its_first_steps(ranks3: RankPool, wrapper: str) -> None:
    ranks3.run(_local_sgd_in_subgroups, wrapper)


def test_an_all_reduce_hook_gives_the_mean_on_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_several_buckets, "EagerDDP")


def _several_buckets(rank: int, wrapper: str) -> None:
    """The sequence of calls, with unused parameters, a skipped step and one that is accumulated."""
    seen: list[tuple[int, bool, int]] = []

    def hook(state: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        assert isinstance(bucket, HookBucket)
        gradients, parameters = bucket.gradients(), bucket.parameters()
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert torch.equal(torch.cat([g.reshape(-1) for g in gradients]), bucket.buffer())
        return default_hooks.allreduce_hook(state, bucket)

    ddp = wrappers([wrapper])[wrapper](ThreeEqualBlocks(), bucket_cap_mb=SMALL, first_bucket_mb=SMALL)
    loss = ddp(torch.ones(2, 8))  # graphs of a forward before the registration serve too
    ddp.register_comm_hook(dist.new_group(), hook)
    loss.backward()
    calls = []
    for step in range(4):
        seen.clear()
        ddp.zero_grad()
        x = torch.randn(2, 8)
        is_skipped = step == 2 and rank == 0
        expected = expected_mean(ddp.module, lambda m: m(x) * (not is_skipped))  # noqa: B023
        loss = ddp(x)
        if is_skipped:
            ddp.skip_step()
        else:
            loss.backward()
        assert_gradients(ddp.module, expected)
        calls.append(list(seen))
    assert calls[0] == calls[1] == calls[2] == calls[3]
    assert [index for index, _, _ in calls[0]] == list(range(len(calls[0]))) and len(calls[0]) > 2
    assert [last for _, last, _ in calls[0]] == [False] * (len(calls[0]) - 1) + [True]
    assert ddp.plan.buckets[-1].gradients == () and len(ddp.plan.buckets) == len(calls[0]) + 1


@pytest.mark.parametrize("wrapper", BOTH)
def test_buckets_are_numbered_in_launch_order_alike_in_every_backward(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_several_buckets, wrapper)


def _alone(rank: int, wrapper: str) -> None:
    """[Note: replicas]"""
    seen = []

    def hook(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        seen.append([tuple(parameter.shape) for parameter in bucket.parameters()])
        return noop(state, bucket)

    alone = [dist.new_group([index]) for index in range(dist.get_world_size())][rank]
    ddp = wrappers([wrapper])[wrapper](Mlp(), process_group=alone, bucket_cap_mb=SMALL, first_bucket_mb=SMALL)
    ddp.register_comm_hook(None, hook)
    calls = []
    for step in range(3):
        seen.clear()
        ddp.zero_grad()
        x = row_batch(rank, step)
        expected = local_gradients(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))  # noqa: B023
        loss_of(ddp, x).backward()
        assert_gradients(ddp.module, {name: gradient.double() for name, gradient in expected.items()})
        calls.append(list(seen))
    assert calls[0] == calls[1] == calls[2] and len(calls[0]) > 2
    shapes = [tuple(parameter.shape) for parameter in ddp.module.parameters()]
    assert [shape for bucket in calls[0] for shape in bucket] == shapes[::-1]


@pytest.mark.parametrize("wrapper", BOTH)
def test_in_a_group_of_one_rank_buckets_are_those_of_the_first_backward(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_alone, wrapper)


class TwoPaths(nn.Module):
    """`one` is used by rank 0 alone, `never` by nobody, until `all_used`."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.one, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.all_used = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        if self.all_used or dist.get_rank() == 0:
            x = self.one(x)
        return self.never(x) if self.all_used else x


def _unused_and_others(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](TwoPaths(), gradient_as_bucket_view=False)
    loss_of(ddp, row_batch(rank)).backward()  # a sequence from before the registration goes
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for step in range(4):
        ddp.zero_grad()
        ddp.module.all_used = step > 1
        expected = expected_mean(ddp.module, lambda m: loss_of(m, row_batch(rank, step)))  # noqa: B023
        loss_of(ddp, row_batch(rank, step)).backward()
        assert (ddp.module.never.weight.grad is None) == (step < 2)
        used = {n: e for n, e in expected.items() if step > 1 or "never" not in n}
        for name, parameter in ddp.module.named_parameters():
            if name in used:
                torch.testing.assert_close(parameter.grad.double(), used[name], rtol=1e-5, atol=1e-6)
    ddp.unwrap()

    # Without division, without communication; a low precision that torch's DDP refuses on gloo.
    ddp = wrappers([wrapper])[wrapper](Mlp())
    ddp.register_comm_hook(None, noop)
    local = local_gradients(ddp.module, lambda m: loss_of(m, row_batch(rank)))
    loss_of(ddp, row_batch(rank)).backward()
    for name, parameter in ddp.module.named_parameters():
        torch.testing.assert_close(parameter.grad, local[name])
    ddp.unwrap()
    for hook in (
        default_hooks.bf16_compress_hook,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        functools.partial(default_hooks.allreduce_hook),
    ):
        ddp = wrappers([wrapper])[wrapper](Mlp())
        ddp.register_comm_hook(None, hook)
        expected = expected_mean(ddp.module, lambda m: loss_of(m, row_batch(rank)))
        loss_of(ddp, row_batch(rank)).backward()
        assert_gradients(ddp.module, expected, rtol=0.05, atol=0.5)
        ddp.unwrap()


@pytest.mark.parametrize("wrapper", BOTH)
def test_unused_parameters_a_built_in_hook_none_and_bfloat16(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_unused_and_others, wrapper)


# ---- what is refused -------------------------------------------------------------------------------------------------


def wrong_bucket(state: object, bucket: int) -> Future[Tensor]:
    raise NotImplementedError


def wrong_result(state: object, bucket: dist.GradBucket) -> int:
    raise NotImplementedError


def _refused(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for hook, error, message in (
        ("no function", TypeError, "Communication hook must be callable"),
        (lambda bucket: bucket, TypeError, r"must take \(state, bucket\)"),
        (wrong_bucket, ValueError, "bucket annotation should be dist.GradBucket"),
        (wrong_result, ValueError, "return annotation should be torch.futures.Future"),
    ):
        with pytest.raises(error, match=message):
            ddp.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="must be one of"):
        ddp._register_builtin_comm_hook("ALLREDUCE")
    with pytest.raises(TypeError if rank == 1 else RuntimeError, match="must be callable"):
        ddp.register_comm_hook(None, noop if rank == 0 else None)
    with pytest.raises(RuntimeError, match="communication hook is noop_hook here, noop on rank 0"):
        ddp.register_comm_hook(None, noop if rank == 0 else debugging_hooks.noop_hook)
    loss_of(ddp, row_batch(rank)).backward()  # nothing is registered so far
    _register_inside_a_backward(ddp, rank)
    ddp.register_comm_hook(None, noop)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, noop)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    if wrapper == "compile_ddp":
        strict = wrappers([wrapper])[wrapper](Mlp(), strict=True)
        with pytest.raises(RuntimeError, match="strict=True wants graphs to reduce"):
            strict.register_comm_hook(None, noop)
    summing = wrappers([wrapper])[wrapper](Mlp(), reduction="sum")
    with pytest.raises(RuntimeError, match='takes the place of reduction="sum"'):
        summing.register_comm_hook(None, noop)
    watched = wrappers([wrapper])[wrapper](Mlp(), verify="always")
    with pytest.warns(UserWarning, match='verify="always" is ignored under a communication hook'):
        watched.register_comm_hook(None, noop)


def _register_inside_a_backward(ddp: nn.Module, rank: int) -> None:
    output = ddp(row_batch(rank))
    output.register_hook(lambda _: ddp.register_comm_hook(None, noop))
    with pytest.raises(RuntimeError, match="called inside a backward: call it before or after one"):
        output.square().sum().backward()
    expected = expected_mean(copy.deepcopy(ddp.module), lambda m: loss_of(m, row_batch(rank)))
    ddp.zero_grad()
    loss_of(ddp, row_batch(rank)).backward()  # nothing is registered, and the next step is right
    assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_cannot_be_registered_is_refused_on_every_rank(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_refused, wrapper)


def _one_rank_registers(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"waited 2 s for rank 1 \(to compare the communication hooks of all"):
            ddp.register_comm_hook(None, noop)


def test_a_rank_that_does_not_register_is_named_after_the_timeout(ranks2: RankPool) -> None:
    ranks2.run(_one_rank_registers, collective_timeout_seconds=2.0)


# ---- hooks that fail -------------------------------------------------------------------------------------------------


def _raises_on_rank_one(rank: int, wrapper: str, where: str) -> None:
    """The other rank has an error at once, although it waits for a collective that never ends."""

    def hook(state: object, bucket: dist.GradBucket) -> Any:
        if rank == 1 and step == 1 and (bucket.is_last() if where == "last" else bucket.index() == 1):
            if where == "no future":
                return bucket.buffer()
            raise KeyError("mine")
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    ddp = wrappers([wrapper])[wrapper](Mlp(), bucket_cap_mb=SMALL, first_bucket_mb=SMALL)
    ddp.register_comm_hook(None, hook)
    for step in range(2):
        loss = loss_of(ddp, row_batch(rank, step))
        if step == 0:
            loss.backward()
    began = time.monotonic()
    if rank == 1:
        error, message = (KeyError, "mine") if where != "no future" else (TypeError, "must return a torch.futures")
    else:
        error, message = RuntimeError, r"the communication hook .*hook raised on 1 rank\(s\) in the backward of"
    with pytest.raises(error, match=message) as failure:
        ddp.skip_step() if where == "last" else loss.backward(retain_graph=True)
    if rank == 1:
        assert "failed for bucket" in failure.value.__notes__[0]
    assert time.monotonic() - began < 30  # and the timeout is 60 s
    for call in (loss.backward, ddp.skip_step, lambda: ddp(row_batch(rank))):
        ddp.abandon_backward()
        with pytest.raises(RuntimeError, match="failed in an earlier backward"):
            call()
    with ddp.no_sync():
        ddp(row_batch(rank)).sum().backward()
    ddp.unwrap()


@pytest.mark.parametrize(
    ("wrapper", "where"), [("compile_ddp", "first"), ("EagerDDP", "last"), ("EagerDDP", "no future")]
)
def test_a_hook_that_raises_on_one_rank_is_an_error_on_every_rank(ranks2: RankPool, wrapper: str, where: str) -> None:
    ranks2.run(_raises_on_rank_one, wrapper, where, collective_timeout_seconds=60.0)


def _bad_futures(rank: int) -> None:
    def never(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        return Future()

    def short(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer()[:1])
        return future

    for hook, message in ((never, r"was not done within 2 s"), (short, r"must hold one tensor of 91 elements")):
        ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
        ddp.register_comm_hook(None, hook)
        loss = loss_of(ddp, row_batch(rank))
        dist.barrier()  # a rank that is still in its forward would be behind, on a machine that is loaded
        with pytest.raises(RuntimeError, match=message) as failure:
            loss.backward()
        assert "No rank is behind" in str(failure.value)  # with the report of where every rank stands


def test_a_future_that_never_ends_or_holds_something_else_is_an_error(ranks2: RankPool) -> None:
    ranks2.run(_bad_futures, collective_timeout_seconds=2.0)


class OneComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] @ self.weight.real + 2 * x[:, :4] @ self.weight.imag


def at_once(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future


def _views_of_the_buffer(rank: int) -> None:
    """Results that begin where the buffer does, and stand for other numbers."""

    def conjugate(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        return at_once(bucket.buffer().conj())

    def transposed(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        return at_once(bucket.buffer().view(4, 4).t())

    for hook, change in ((conjugate, torch.conj), (transposed, torch.t)):
        ddp = wrappers(["EagerDDP"])["EagerDDP"](OneComplex())
        local = local_gradients(copy.deepcopy(ddp.module), lambda m: loss_of(m, row_batch(rank)))
        ddp.register_comm_hook(None, hook)
        loss_of(ddp, row_batch(rank)).backward()
        assert torch.equal(ddp.module.weight.grad, change(local["weight"]))


def test_a_result_that_is_a_view_of_the_buffer_is_what_it_stands_for(ranks2: RankPool) -> None:
    ranks2.run(_views_of_the_buffer)


def _casts_complex(rank: int) -> None:
    """Under torch's DDP these drop the imaginary part, without a word beyond a warning of the cast."""
    for hook in (
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        ddp = wrappers(["EagerDDP"])["EagerDDP"](OneComplex())
        with pytest.raises(TypeError, match="drop the imaginary part of the gradient of parameter weight"):
            ddp.register_comm_hook(None, hook)
        with pytest.raises(TypeError, match="drop the imaginary part of the gradient of parameter weight"):
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)

    ddp = wrappers(["EagerDDP"])["EagerDDP"](OneComplex())
    ddp.register_comm_hook(None, lambda state, bucket: at_once(bucket.buffer().real.clone()))
    with pytest.raises(RuntimeError, match=r"holds torch.float32 for gradients of torch.complex64"):
        loss_of(ddp, row_batch(rank)).backward()


def test_a_hook_that_would_drop_imaginary_parts_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_casts_complex)


def test_the_riders_tell_of_a_hook_that_failed() -> None:
    riders = Riders(0, (0,))
    flags = [set(), {Flag.HOOK_FAILED}, set()]
    values = [riders_with(riders, Message(ForwardNumbers(3, 3), flags=here)) for here in flags]
    assert values[1][HOOK_FAILED] == 1 and values[0][HOOK_FAILED] == 0 and HOOK_FAILED < FIRST_USED
    found = RiderReader(3).read([sum(values, torch.zeros(riders.numel))])
    assert [flag for flag in Flag if found.ranks_with(flag)] == [Flag.HOOK_FAILED] and not found.counts_differ


def test_a_bucket_has_every_method_of_torchs() -> None:
    theirs = {name for name in dir(dist.GradBucket) if not name.startswith("_")}
    assert theirs == {name for name, _ in inspect.getmembers(HookBucket, callable) if not name.startswith("_")}


# ---- among what else happens -----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, self.before(x), use_reentrant=self.reentrant)


def step_is_right(ddp: nn.Module, rank: int, step: int) -> None:
    ddp.zero_grad()
    expected = expected_mean(ddp.module, lambda m: loss_of(m, row_batch(rank, step)))
    loss_of(ddp, row_batch(rank, step)).backward()
    assert_gradients(ddp.module, expected)


def _other_steps(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Checkpointed(), bucket_cap_mb=SMALL, first_bucket_mb=SMALL)
    ddp.module.before.requires_grad_(False)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp.module.before.requires_grad_(True)  # the model that the next forward meets is not the one of the registration
    for step in range(3):
        step_is_right(ddp, rank, step)

    # An exception of the user's on one rank: this rank sends zeros through the hook for the rest.
    x = row_batch(rank).requires_grad_()
    loss = loss_of(ddp, x)
    if rank == 1:
        ddp.module.before.weight.register_hook(raise_once := RaiseOnce())
        with pytest.raises(RuntimeError, match="once"):
            loss.backward()
        assert raise_once.done
        ddp.abandon_backward()
    else:
        with pytest.raises(RuntimeError, match=r"broke off on 1 other rank\(s\)"):
            loss.backward()
    step_is_right(ddp, rank, 4)

    ddp.module.reentrant = False
    # What torch.autograd.grad returns has not been through the hook.
    with pytest.raises(RuntimeError, match="would return this rank's own gradient"):
        torch.autograd.grad(loss_of(ddp, row_batch(rank)), list(ddp.module.inside.parameters()))
    step_is_right(ddp, rank, 5)


class RaiseOnce:
    done = False

    def __call__(self, gradient: Tensor) -> None:
        if not self.done:
            self.done = True
            raise RuntimeError("once")


@pytest.mark.parametrize("wrapper", BOTH)
def test_checkpoints_changes_of_the_model_and_broken_steps_are_as_without_a_hook(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_other_steps, wrapper)


def _late(rank: int, waits: bool) -> str:
    def hook(state: object, bucket: dist.GradBucket) -> Any:
        future = default_hooks.allreduce_hook(None, bucket)
        if waits:
            future.wait()
        return future

    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    ddp.register_comm_hook(None, hook)
    for step in range(2):
        loss = loss_of(ddp, row_batch(rank, step))
        if step == 0:
            loss.backward()
    if rank == 1:
        while not torch_private.groups.default_store().check(["gave up"]):
            time.sleep(0.05)
        return ""
    with pytest.raises(RuntimeError) as failure:
        loss.backward()
    torch_private.groups.default_store().set("gave up", "")
    return str(failure.value)


@pytest.mark.parametrize("waits", [True, False])
def test_a_late_rank_is_named_where_a_hook_reduces(ranks2: RankPool, waits: bool) -> None:
    message, _ = ranks2.run(_late, waits, collective_timeout_seconds=2.0)
    assert "rank 1 is behind" in message, message
    assert ("failed for bucket 0" in message) == waits, message
