"""What the ranks' compilers do in a first step, where caches are cold, warm, or differ between ranks."""

import functools
import io
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import assert_gradients, expected_mean, row_batch
from torch import nn

from compiled_ddp import compile_ddp, functional, torch_private
from compiled_ddp.graph.compiled_graph import CompiledGraph
from ranks import RankPool

pytestmark = pytest.mark.inductor

LIMITS = {"timeout_seconds": 300, "collective_timeout_seconds": 120}


class Compiled(NamedTuple):
    """How many graphs, forwards and backwards, a rank has compiled, and how many it has had from a cache."""

    here: int
    loaded: int

    def since(self, before: "Compiled") -> "Compiled":
        return Compiled(self.here - before.here, self.loaded - before.loaded)


@contextmanager
def _cache_in(folder: str, **environment: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder, **environment}):
        yield


def _count() -> Compiled:
    counters = torch_private.for_tests.compiler_counters().get("inductor", {})
    return Compiled(counters.get("fxgraph_cache_miss", 0), counters.get("fxgraph_cache_hit", 0))


class Small(nn.Module):
    """As little as takes a kernel in the forward and one in the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def _steps(rank: int, *, accumulated: bool = False, width: int = 3, **options: Any) -> Compiled:
    """Two steps, and what was compiled for them."""
    before, model = _count(), Small(width)
    ddp = compile_ddp(model, **options)
    for number in range(2):
        batches = [row_batch(rank + 2 * number), row_batch(rank + 7)][: 1 + accumulated]
        expected = expected_mean(model, lambda module: sum(module(x).square().sum() for x in batches))  # noqa: B023
        ddp.zero_grad()
        for left, x in enumerate(batches, start=1 - len(batches)):
            with ddp.no_sync() if left else nullcontext():
                ddp(x).square().sum().backward()
        assert_gradients(model, expected, rtol=1e-4, atol=1e-6)
    assert {section.origin for section in ddp.plan.sections} == {"graph"}, ddp.explain()
    return _count().since(before)


def _first_steps(rank: int, folders: list[str], options: dict[str, Any], environment: dict[str, str]) -> Compiled:
    with _cache_in(folders[rank], **environment):
        return _steps(rank, **options)


def run(pool: RankPool, folders: list[Path], *, environment: dict[str, str] | None = None, **options: Any) -> Any:
    return pool.run(_first_steps, [*map(str, folders)], options, environment or {}, **LIMITS)


def test_one_rank_compiles_and_the_other_loads(ranks2: RankPool, tmp_path: Path) -> None:
    assert sorted(run(ranks2, [tmp_path] * 2)) == [Compiled(0, 2), Compiled(2, 0)]
    assert run(ranks2, [tmp_path] * 2) == [Compiled(0, 2)] * 2


def test_one_of_three_ranks_compiles(ranks3: RankPool, tmp_path: Path) -> None:
    assert sorted(run(ranks3, [tmp_path] * 3)) == [Compiled(0, 2), Compiled(0, 2), Compiled(2, 0)]


def test_with_symbolic_sizes(ranks2: RankPool, tmp_path: Path) -> None:
    found = run(ranks2, [tmp_path] * 2, dynamic=True)
    assert sum(rank.here for rank in found) == 2
    assert sum(rank.loaded for rank in found) == 2


def test_under_no_sync_nothing_is_compiled_that_no_backward_needs(ranks2: RankPool, tmp_path: Path) -> None:
    """A forward, a local backward and one that folds; the one that only reduces is never needed."""
    found = run(ranks2, [tmp_path] * 2, accumulated=True)
    assert sum(rank.here for rank in found) == 3
    assert sum(rank.loaded for rank in found) == 3


@pytest.mark.parametrize("switched_off", [{"compile_once": False}, {"environment": {"COMPILED_DDP_COMPILE_ONCE": "0"}}])
def test_where_it_is_switched_off_each_rank_compiles(
    ranks2: RankPool, tmp_path: Path, switched_off: dict[str, Any]
) -> None:
    run(ranks2, [tmp_path] * 2, **switched_off)
    assert not [*(tmp_path / "compiled_ddp").glob("*.lock")]


def test_without_a_cache_no_rank_waits(ranks2: RankPool, tmp_path: Path) -> None:
    run(ranks2, [tmp_path] * 2, options={"fx_graph_cache": False})
    assert not [*(tmp_path / "compiled_ddp").glob("*.lock")]


def _own_pass(graph: torch.fx.Graph) -> None:
    """Without an identity, and so for no cache."""


def test_with_a_pass_that_no_cache_knows_no_rank_waits(ranks2: RankPool, tmp_path: Path) -> None:
    run(ranks2, [tmp_path] * 2, options={"post_grad_custom_pre_pass": _own_pass})
    assert not [*(tmp_path / "compiled_ddp").glob("*.lock")]


def _functional_step(rank: int, folder: str) -> Compiled:
    before = _count()
    params, x = {"w": torch.ones(5, 3)}, torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    gradient = functional.grad(lambda params, x: (x @ params["w"]).square().sum())
    with _cache_in(folder):
        found = functional.compile(lambda params, x: gradient(params, x))(params, x)["w"]
    expected = 2 * x.T @ (x @ params["w"])
    dist.all_reduce(expected)
    torch.testing.assert_close(found, expected / dist.get_world_size())
    return _count().since(before)


def test_one_rank_compiles_a_functional_step(ranks2: RankPool, tmp_path: Path) -> None:
    found = ranks2.run(_functional_step, str(tmp_path), **LIMITS)
    assert sorted(rank.here for rank in found) == [0, 1]


def _block(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def _with_constant(rank: int, folder: str, factor: float, checkpointed: bool) -> int:
    """A step that makes a constant, and may compute a part of it again; returns what was compiled here."""
    before = _count()
    params, x = {"w": torch.ones(5, 3)}, torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        block = functools.partial(functional.checkpoint, _block) if checkpointed else _block
        return (block(params["w"], x) * torch.tensor([factor, 2.0, 3.0])).square().sum()

    gradient = functional.grad(loss)
    with _cache_in(folder):
        found = functional.compile(lambda params, x: gradient(params, x))(params, x)["w"]
    weight = params["w"].clone().requires_grad_()
    (_block(weight, x) * torch.tensor([factor, 2.0, 3.0])).square().sum().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    torch.testing.assert_close(found, weight.grad / dist.get_world_size(), rtol=1e-4, atol=1e-6)
    return _count().since(before).here


def test_functional_steps_that_differ_are_told_apart_by_the_cache(ranks2: RankPool, tmp_path: Path) -> None:
    """A constant is an input of the graph; what is computed again stands in no operator of it, and so in the key."""
    compiled = [
        sum(ranks2.run(_with_constant, str(tmp_path), factor, checkpointed, **LIMITS))
        for factor, checkpointed in [(1.0, False), (5.0, False), (5.0, True), (7.0, True), (1.0, False)]
    ]
    assert compiled == [1, 0, 1, 0, 0]


# ---- several hosts: a cache for each rank ---------------------------------------------------------------------------


def _libraries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.so")}


def test_one_host_compiles_and_the_other_loads(ranks2: RankPool, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    width = 7  # its own: of kernels that ranks have in memory no library is written
    run(ranks2, [tmp_path / "before"] * 2)  # in their first compilation of all, ranks are seconds apart
    found = run(ranks2, folders, accumulated=True, width=width)
    assert sum(rank.here for rank in found) == 3
    assert sum(rank.loaded for rank in found) == 3
    here, there = map(_libraries, folders)
    assert here, "no C++ compiler has run"
    assert here == there, "no C++ compiler has run a second time"
    assert run(ranks2, folders, accumulated=True, width=width) == [Compiled(0, 3)] * 2


@contextmanager
def _lines() -> Iterator[list[str]]:
    """What is told in here."""
    lines = list[str]()
    handler, logger = logging.Handler(), logging.getLogger("compiled_ddp")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before, _ = logger.level, logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def _with_spoilt_artifacts(
    rank: int, folders: list[str], spoil: Callable[[bytes], bytes]
) -> tuple[Compiled, list[str]]:
    made = torch_private.cache_artifacts.Made
    packed = made.packed
    spoilt = mock.patch.object(made, "packed", lambda this: spoil(packed(this)))
    with spoilt, _cache_in(folders[rank]), _lines() as lines:
        return _steps(rank), lines


def _truncated(packed: bytes) -> bytes:
    return packed[:-100]


def _of_another_torch(packed: bytes) -> bytes:
    version = torch.__version__.encode()
    return _rezipped(packed, "torch", version.replace(b"2", b"1"))


def _with_something_else(packed: bytes) -> bytes:
    return _rezipped(packed, "../../somewhere.so", b"")


def _rezipped(packed: bytes, name: str, content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(packed)) as parts:
        contents = {each: parts.read(each) for each in parts.namelist()} | {name: content}
    again = io.BytesIO()
    with zipfile.ZipFile(again, "w") as parts:
        for each, value in contents.items():
            parts.writestr(each, value)
    return again.getvalue()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_truncated, "it is broken or truncated"),
        (_of_another_torch, "and this is torch"),
        (_with_something_else, "it has '../../somewhere.so' in it, which is no library of Inductor's"),
    ],
)
def test_what_another_host_sends_is_refused_by_name_and_compiled_anew(
    ranks2: RankPool, tmp_path: Path, spoil: Callable[[bytes], bytes], why: str
) -> None:
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    (first, told), (second, told_too) = ranks2.run(_with_spoilt_artifacts, folders, spoil, **LIMITS)
    assert (first, second) == (Compiled(2, 0), Compiled(2, 0))
    refusal = "has sent is not used, and forward of Small (graph 1) is compiled anew: "
    assert [why in line for line in told + told_too if refusal in line] == [True]


def _with_other_threads(rank: int, folder: str) -> tuple[Compiled, list[str]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    try:
        with _cache_in(folder), _lines() as lines:
            return _steps(rank), lines
    finally:
        torch.set_num_threads(before)


def test_a_rank_with_other_settings_compiles_alone_and_says_so(ranks2: RankPool, tmp_path: Path) -> None:
    (first, told), (second, told_too) = ranks2.run(_with_other_threads, str(tmp_path), **LIMITS)
    assert (first, second) == (Compiled(2, 0), Compiled(2, 0))
    (line,) = (line for line in told + told_too if "forward" in line and "by itself" in line)
    assert "compiles forward of Small (graph 1) by itself, as its number of threads is not rank " in line


# ---- caches that differ: pytorch 193043, unsloth-zoo 967 -------------------------------------------------------------


@pytest.mark.parametrize("warm_rank", [0, 1])
def test_a_hit_on_one_rank_and_a_miss_on_the_other(ranks2: RankPool, tmp_path: Path, warm_rank: int) -> None:
    """pytorch 193043; two of the four of unsloth-zoo 967."""
    warm, cold = tmp_path / "warm", tmp_path / "cold"
    run(ranks2, [warm] * 2)
    folders = [cold, cold]
    folders[warm_rank] = warm
    found = run(ranks2, folders)
    assert (found[warm_rank], found[1 - warm_rank]) == (Compiled(0, 2), Compiled(2, 0))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [Path.unlink, _truncate])
@pytest.mark.parametrize("kind", ["fxgraph", "aotautograd"])
def test_a_cache_of_which_a_part_is_gone(
    ranks2: RankPool, tmp_path: Path, kind: str, spoil: Callable[[Path], None]
) -> None:
    """The other two of unsloth-zoo 967, for both of torch's caches: what is missing or broken is compiled again."""
    run(ranks2, [tmp_path] * 2)
    entries = [path for path in (tmp_path / kind).rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        spoil(path)
    run(ranks2, [tmp_path] * 2)


# ---- a rank that compiles for longer than ranks wait for each other: nanochat 722 ------------------------------------


def _slow_compiler(rank: int, folders: list[str], slow: str) -> None:
    compile_ = getattr(CompiledGraph, slow)

    def wait_first(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            time.sleep(5.0)
        return compile_(*args, **kwargs)

    with _cache_in(folders[rank]), mock.patch.object(CompiledGraph, slow, wait_first):
        _steps(rank)


@pytest.mark.parametrize("slow", ["_compile", "_compile_first"], ids=["forward", "backward"])
def test_a_rank_that_compiles_is_waited_for_beyond_the_groups_timeout(
    ranks2: RankPool, tmp_path: Path, slow: str
) -> None:
    """nanochat 722. Each has a cache of its own, as on two hosts; the second one has nothing in it."""
    run(ranks2, [tmp_path / "0"] * 2)
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    ranks2.run(_slow_compiler, folders, slow, timeout_seconds=200, collective_timeout_seconds=3.0)
