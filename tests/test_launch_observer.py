"""Looking at a graph's collectives, and the names of folds, launches and waits in profiles."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import TokenModel, assert_gradients, expected_mean, token_batch, wrappers
from torch import Tensor, nn

from compiled_ddp import EagerDDP, compile_ddp, functional
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


def _profile(rank: int, wrapper: str, accumulates: bool = False) -> tuple[list[str], int]:
    """What a warm backward shows, in order; and how many buckets there are."""
    make = {**wrappers(("compile_ddp", "EagerDDP")), "inductor": lambda m: compile_ddp(m, bucket_cap_mb=0.002)}[wrapper]
    ddp = make(TokenModel())
    batch = token_batch(rank)
    ddp(*batch).backward()
    ddp.zero_grad()
    backwards = 2 if accumulates else 1
    expected = expected_mean(ddp.module, lambda module: backwards * module(*batch))
    if accumulates:
        with ddp.no_sync():
            ddp(*batch).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(*batch).backward()
    assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("compiled_ddp: ")], len(ddp.plan.buckets)


def _numbers(names: list[str], kind: str) -> list[int]:
    """Of the buckets, in order."""
    return [int(name.split("bucket ")[1].split(" ")[0]) for name in names if f": {kind} bucket" in name]


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_profile_shows_every_launch_and_wait_by_name(ranks2: RankPool, wrapper: str) -> None:
    limits = {"timeout_seconds": 400, "collective_timeout_seconds": 120}
    for names, buckets in ranks2.run(_profile, wrapper, **limits):
        assert _numbers(names, "launch") == list(range(buckets)), names
        assert sorted(_numbers(names, "wait for")) == list(range(buckets)), names
        launches = [name for name in names if ": launch bucket" in name]
        assert any("(head.bias, head.weight" in name or "(head.weight, head.bias" in name for name in launches), names


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("accumulates", [False, True], ids=["alone", "accumulated"])
def test_a_profile_shows_by_name_when_gradients_are_folded_into_their_bucket(
    ranks2: RankPool, wrapper: str, accumulates: bool
) -> None:
    """By hooks always; by a graph, whose kernels write theirs straight there, only what earlier backwards have left."""
    limits = {"timeout_seconds": 400, "collective_timeout_seconds": 120}
    for names, buckets in ranks2.run(_profile, wrapper, accumulates, **limits):
        folded = _numbers(names, "fold")
        assert set(folded) == (set(range(buckets)) if accumulates or wrapper == "EagerDDP" else set()), names
        for bucket in set(folded):
            places = [place for place, name in enumerate(names) if f"bucket {bucket} (" in name]
            assert [names[place].split(" bucket")[0] for place in places[-3:]] == [
                "compiled_ddp: fold",
                "compiled_ddp: launch",
                "compiled_ddp: wait for",
            ], names


def _squares(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["first"] @ params["head"]).square().mean()


def _absolute(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["first"]).abs().mean()


def _profile_functional(rank: int, way: str) -> list[str]:
    """What a warm step of two gradient functions shows, in order; one bucket for each parameter."""
    of_squares, of_absolute = (functional.grad(each, bucket_cap_mb=0) for each in (_squares, _absolute))

    def step(params: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return of_squares(params, x), of_absolute(params, x)

    run = step if way == "eager" else functional.compile(step, backend=way)
    params = {"first": torch.ones(3, 2), "head": torch.ones(2, 1)}
    for _ in range(25):  # until its reductions are proven
        expected = run(params, torch.full((4, 3), 1.0 + rank))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = run(params, torch.full((4, 3), 1.0 + rank))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(expected, found, strict=True) for name in params)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("compiled_ddp: ")]


@pytest.mark.parametrize("way", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_profile_shows_the_buckets_of_gradient_functions_by_name_too(ranks2: RankPool, way: str) -> None:
    """Folds only eagerly: a graph's kernels write gradients straight into their bucket."""
    contents = ["argument 0['head']; 8 bytes", "argument 0['first']; 24 bytes", "riders; 56 bytes"]
    buckets = [f"({content}) of grad({f.__name__})" for f in (_squares, _absolute) for content in contents]
    for names in ranks2.run(_profile_functional, way, timeout_seconds=400):
        for kind in ("launch", "wait for", *(["fold"] if way == "eager" else [])):
            found = [name for name in names if name.startswith(f"compiled_ddp: {kind} bucket ")]
            assert sorted(name[name.index("(") :] for name in found) == sorted(buckets), names
            assert sorted(_numbers(found, kind)) == [0, 0, 1, 1, 2, 2], names


def _profile_large(rank: int) -> list[str]:
    ddp = EagerDDP(nn.Linear(256, 256))  # what has more than 2**15 elements is put into its bucket by itself
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp(torch.ones(2, 256)).sum().backward()
    return [event.name for event in profile.events() if event.name.startswith("compiled_ddp: fold bucket 0 (")]


def test_a_profile_shows_the_fold_of_a_large_gradient_by_itself(ranks2: RankPool) -> None:
    for names in ranks2.run(_profile_large):
        assert len(names) == 2, names
