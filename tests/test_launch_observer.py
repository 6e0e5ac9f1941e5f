"""Looking at a graph's collectives, and the names of launches and waits in profiles."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import TokenModel, assert_gradients, expected_mean, token_batch, wrappers
from torch import Tensor

from compiled_ddp import compile_ddp
from compiled_ddp.ranks.launch_observer import LaunchObserver
from ranks import RankPool


def _observe(rank: int) -> list[tuple[object, ...]]:
    seen: list[tuple[object, ...]] = []

    @contextlib.contextmanager
    def launch(bucket: int, flat_buffer: Tensor) -> Iterator[None]:
        seen.append(("launch", bucket, flat_buffer.tolist()))
        yield
        seen.append(("launched", bucket))

    @contextlib.contextmanager
    def wait(bucket: int) -> Iterator[None]:
        seen.append(("wait", bucket))
        yield
        seen.append(("waited", bucket))

    all_reduce, all_reduce_ = (
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.all_reduce_.default,
    )
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default
    ours, other = dist.group.WORLD.group_name, dist.new_group().group_name
    with LaunchObserver(ours, 3, launch=launch, wait=wait):
        first = all_reduce(torch.full((2,), 1.0), "sum", ours)
        foreign = all_reduce(torch.ones(2), "sum", other)
        second = all_reduce_(torch.full((1,), 5.0), "sum", ours)
        results = [wait_tensor(second), wait_tensor(foreign), wait_tensor(first)]
    wait_tensor(all_reduce(torch.ones(2), "sum", ours))
    seen.append(tuple(result.tolist() for result in results))
    return seen


def _square_by_a_kernel(x: Tensor, derivative: str) -> Tensor:
    """The derivative of the squares' sum, taken inside of an operator's kernel."""
    if derivative == "torch.func":
        return torch.func.grad(lambda y: y.square().sum())(x)
    return torch.autograd.functional.vjp(lambda y: y.square().sum(), x, None)[1]


@pytest.mark.parametrize("derivative", ["torch.func", "torch.autograd"])
def test_a_kernel_that_takes_derivatives_takes_them_under_an_observer_too(derivative: str) -> None:
    library = torch.library.Library(f"observed_{derivative.replace('.', '_')}", "DEF")
    library.define("derivative(Tensor x) -> Tensor")
    library.impl("derivative", lambda x: _square_by_a_kernel(x, derivative), "CPU")
    operator = getattr(torch.ops, library.ns).derivative.default
    x = torch.arange(3.0)
    with torch.no_grad(), LaunchObserver("none", launch=lambda bucket, flat: contextlib.nullcontext()):
        assert torch.equal(operator(x), 2 * x)


def test_an_observer_sees_the_launches_and_waits_of_its_group_by_number(ranks2: RankPool) -> None:
    assert (
        ranks2.run(_observe)
        == [
            [
                ("launch", 3, [1.0, 1.0]),
                ("launched", 3),
                ("launch", 4, [5.0]),
                ("launched", 4),
                ("wait", 4),
                ("waited", 4),
                ("wait", 3),
                ("waited", 3),
                ([10.0], [2.0, 2.0], [2.0, 2.0]),
            ]
        ]
        * 2
    )


def _profile(rank: int, wrapper: str) -> tuple[list[str], list[str], int]:
    make = {**wrappers(("compile_ddp", "EagerDDP")), "inductor": lambda m: compile_ddp(m, bucket_cap_mb=0.002)}[wrapper]
    ddp = make(TokenModel())
    batch = token_batch(rank)
    ddp(*batch).backward()
    ddp.zero_grad()
    expected = expected_mean(ddp.module, lambda module: module(*batch))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(*batch).backward()
    assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)
    names = [event.name for event in profile.events() if event.name.startswith("compiled_ddp: ")]
    order = list(dict.fromkeys(names))
    return order, names, len(ddp.plan.buckets)


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_profile_shows_every_launch_and_wait_by_name(ranks2: RankPool, wrapper: str) -> None:
    limits = {"timeout_seconds": 400, "collective_timeout_seconds": 120}
    for order, names, buckets in ranks2.run(_profile, wrapper, **limits):
        assert len(names) == 2 * buckets, names
        assert len(order) == 2 * buckets, "a name came twice"
        for kind in ("launch", "wait for"):
            numbers = [name.split("bucket ")[1].split(" ")[0] for name in order if f": {kind} bucket" in name]
            assert sorted(numbers, key=int) == [str(number) for number in range(buckets)], names
        launches = [name for name in order if ": launch bucket" in name]
        assert launches == sorted(launches), "out of order"
        assert any("(head.bias, head.weight" in name or "(head.weight, head.bias" in name for name in launches), names
