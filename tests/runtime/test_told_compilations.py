"""Compilers that take long are told of on rank 0, with what and why; on a clock that stands, which a compiler moves."""

import contextlib
import os
import re
import time
import unittest.mock
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, row_batch
from told import Clock, Lines, told_lines
from torch import Tensor, nn
from torch.fx import Graph

from compiled_ddp import Calibration, EagerDDP, Link, compile_ddp, functional
from compiled_ddp.functional import compiled
from compiled_ddp.graph import telling
from compiled_ddp.graph.telling import note_seconds
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.ranks import calibration, kept_calibration, rank_group
from compiled_ddp.telling import slow_work
from ranks import RankPool

SLOW = 7.0  # seconds


@contextlib.contextmanager
def _slow_passes(*, fold: bool | None = None) -> Iterator[Lines]:
    """Passes take long: those of the folding backward, or of the other one, or None for both."""
    clock, run, run_step = Clock(), Pipeline.run, StepPipeline.run

    def slow_run(pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
        if fold is None or pipeline.fold == fold:
            clock.now += SLOW
        run(pipeline, *args, **kwargs)

    def slow_run_step(*args: Any) -> Any:
        clock.now += SLOW
        return run_step(*args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(slow_work, "clock", clock))
        stack.enter_context(unittest.mock.patch.object(Pipeline, "run", slow_run))
        stack.enter_context(unittest.mock.patch.object(StepPipeline, "run", slow_run_step))
        yield stack.enter_context(told_lines())


def _wrapped(module: nn.Module, **options: Any) -> Any:
    return compile_ddp(module, **{"backend": "aot_eager", "bucket_cap_mb": 1.0} | options)


def _step(ddp: nn.Module, x: Tensor, **backward: Any) -> None:
    ddp(x).square().sum().backward(**backward)


# ---- backwards -------------------------------------------------------------------------------------------------------


def _folding(rank: int) -> list[str]:
    torch.compiler.reset()
    with _slow_passes(fold=True) as lines:
        ddp = _wrapped(Mlp())
        _step(ddp, row_batch(rank))
        with ddp.no_sync():
            _step(ddp, row_batch(rank))
        _step(ddp, row_batch(rank))
    return lines.found


def test_a_variant_says_which_it_is_and_in_which_step_it_is_first_used(ranks2: RankPool) -> None:
    assert ranks2.run(_folding) == [
        [
            "compiling backward (folding) of Mlp (graph 1), 4 of at most 4, first used in step 2",
            "compiled backward (folding) of Mlp (graph 1), 7.0 s",
        ],
        [],
    ]


def _quick(rank: int) -> list[str]:
    torch.compiler.reset()
    with unittest.mock.patch.object(slow_work, "clock", Clock()), told_lines() as lines:
        ddp = _wrapped(Mlp(), bucket_cap_mb=None)  # so that the link is measured
        for _ in range(2):
            _step(ddp, row_batch(rank))
        ddp.unwrap()
        EagerDDP(Mlp())
    return lines.found


def test_nothing_is_told_where_nothing_takes_long(ranks2: RankPool) -> None:
    assert ranks2.run(_quick) == [[], []]


def _keeps_graph(rank: int) -> list[str]:
    torch.compiler.reset()
    with _slow_passes() as lines:
        ddp = _wrapped(Mlp())
        _step(ddp, row_batch(rank))
        ddp.zero_grad()
        lines.found.clear()
        _step(ddp, row_batch(rank), retain_graph=True)
    return lines.found


def test_a_backward_that_keeps_its_graph_is_why_it_is_compiled_again(ranks2: RankPool) -> None:
    told, silent = ranks2.run(_keeps_graph)
    assert told == [
        "compiling backward (synchronised) of Mlp (graph 1), 3 of at most 4, again in step 2, for backwards with "
        "retain_graph=True",
        "compiled backward (synchronised) of Mlp (graph 1), 7.0 s",
    ]
    assert silent == []


def _in_half(rank: int) -> list[str]:
    """Only ranks 1 and 2 are in the group, and rank 1 is its first."""
    torch.compiler.reset()
    group = torch.distributed.new_group([1, 2])
    with _slow_passes() as lines:
        if rank > 0:
            _step(_wrapped(Mlp(), process_group=group), row_batch(rank))
    return lines.found


def test_it_is_the_first_rank_of_the_wrappers_group_that_tells(ranks3: RankPool) -> None:
    outside, first, second = ranks3.run(_in_half)
    assert first == [
        "compiling backward (synchronised) of Mlp (graph 1), 2 of at most 4, first used in step 1",
        "compiled backward (synchronised) of Mlp (graph 1), 7.0 s",
    ]
    assert outside == second == []


def _while_it_goes_on(rank: int) -> list[str]:
    torch.compiler.reset()
    run = Pipeline.run
    seen: list[str] = []

    def run_until_told(*args: Any, **kwargs: Any) -> None:
        if rank == 0:
            lines.wait_for("compiling backward")
        seen.extend(line for line in lines.found if "backward" in line)
        run(*args, **kwargs)

    with (
        told_lines() as lines,
        unittest.mock.patch.object(slow_work, "SECONDS", 0.2),
        unittest.mock.patch.object(Pipeline, "run", run_until_told),
    ):
        _step(_wrapped(Mlp()), row_batch(rank))
    return seen


def test_it_is_told_while_the_compiler_runs(ranks2: RankPool) -> None:
    line = "compiling backward (synchronised) of Mlp (graph 1), 2 of at most 4, first used in step 1"
    assert ranks2.run(_while_it_goes_on) == [[line], []]


# ---- forwards --------------------------------------------------------------------------------------------------------


_clock = Clock()


@torch.compiler.assume_constant_result
def _looked_up() -> float:
    """Dynamo calls it when it captures, and no more."""
    _clock.now += SLOW
    return 2.0


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * _looked_up()


def _captures(rank: int) -> list[str]:
    torch.compiler.reset()
    with unittest.mock.patch.object(slow_work, "clock", _clock), told_lines() as lines:
        ddp = _wrapped(LooksUp())
        with torch.no_grad():
            ddp(row_batch(rank))
        for _ in range(2):
            _step(ddp, row_batch(rank))
    return lines.found


def test_a_capture_is_told_of(ranks2: RankPool) -> None:
    assert ranks2.run(_captures) == [
        [
            "capturing forward of LooksUp, in a forward without gradients",
            "captured forward of LooksUp, 7.0 s",
            "capturing forward of LooksUp, in step 1, again: GLOBAL_STATE changed: grad_mode",
            "captured forward of LooksUp, 7.0 s",
        ],
        [],
    ]


def _slow_inductor(rank: int, dynamic: bool) -> list[str]:
    torch.compiler.reset()
    clock = Clock()

    def slow_pass(graph: Graph) -> None:
        clock.now += SLOW

    with unittest.mock.patch.object(slow_work, "clock", clock), told_lines() as lines:
        ddp = _wrapped(Mlp(), backend="inductor", dynamic=dynamic, options={"post_grad_custom_pre_pass": slow_pass})
        _step(ddp, row_batch(rank))
        ddp.zero_grad()
        _step(ddp, row_batch(rank))
        ddp.zero_grad()
        if not dynamic:
            _step(ddp, row_batch(rank)[:2])
    return [re.sub(r", it took .* s the last time", "", line) for line in lines.found]


def _of_graph(number: int, step: int, why: str, *, together: bool = False) -> list[str]:
    """With symbolic sizes the backward is compiled together with the forward, and is a part of that."""
    return [
        f"compiling forward of Mlp (graph {number}), {2 * number - 1} of at most {4 * number}, {why}",
        f"compiled forward of Mlp (graph {number}), 7.0 s",
        f"compiling backward (synchronised) of Mlp (graph {number}), {2 * number - together} of at most {4 * number}, "
        f"first used in step {step}",
        f"compiled backward (synchronised) of Mlp (graph {number}), 7.0 s",
    ]


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inductors_forwards_and_backwards_are_told_apart_with_the_guard_that_failed(
    ranks2: RankPool, dynamic: bool
) -> None:
    told, silent = ranks2.run(_slow_inductor, dynamic, timeout_seconds=400, collective_timeout_seconds=120)
    expected = _of_graph(1, 1, "first used in step 1", together=dynamic)
    if not dynamic:
        expected += _of_graph(2, 3, "in step 3, again: tensor 'x' size mismatch at index 0. expected 4, actual 2")
    assert sorted(told) == sorted(expected)
    assert silent == []


def _last_time(rank: int, folder: str) -> list[str]:
    torch.compiler.reset()
    estimated = ", first used in step 1, it took 48 s the last time"
    with unittest.mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder), _slow_passes() as lines:
        ddp = _wrapped(Mlp(), backend="inductor", compile_once=False)  # else the other rank may compile
        trained = sum(parameter.numel() for parameter in ddp.parameters())
        note_seconds(f"backward (synchronised) of Mlp, {trained} elements trained, graph 1", 48.3)
        note_seconds(f"backward (synchronised) of Other, {trained} elements trained, graph 1", 7.0)
        _step(ddp, row_batch(rank))
    return [line for line in lines.found if line.endswith(estimated)]


@pytest.mark.inductor
def test_how_long_it_took_the_last_time_is_told(ranks2: RankPool, tmp_path: Path) -> None:
    found, silent = ranks2.run(_last_time, str(tmp_path), timeout_seconds=400, collective_timeout_seconds=120)
    assert [line.partition(",")[0] for line in found] == ["compiling backward (synchronised) of Mlp (graph 1)"]
    assert silent == []


# ---- ahead, calibration, functional steps ----------------------------------------------------------------------------


def _warm_up(rank: int) -> list[str]:
    torch.compiler.reset()
    with _slow_passes(fold=False) as lines:
        _wrapped(Mlp()).warmup(row_batch(rank))
    return [line.partition(", ")[0] if line.startswith("warm-up") else line for line in lines.found]


def test_a_warm_up_says_so(ranks2: RankPool) -> None:
    assert ranks2.run(_warm_up) == [
        [
            "warm-up: the forward",
            "warm-up: graph 1 of 1 (6 gradients)",
            "compiling backward (synchronised) of Mlp (graph 1), 3 of at most 4, first used in warmup()",
            "compiled backward (synchronised) of Mlp (graph 1), 7.0 s",
            "warm-up: graph 1 of 1 (6 gradients)",
            "warm-up: graph 1 of 1 (6 gradients)",
        ],
        [],
    ]


def _waits(rank: int) -> list[str]:
    ddp = _wrapped(Mlp())
    with unittest.mock.patch.object(slow_work, "SECONDS", 0.1), told_lines("compiled_ddp.ranks.rank_group") as lines:
        if rank == 1:
            time.sleep(3.0)
        ddp.warmup(row_batch(rank))
    return [re.sub(r"[\d.]+ s$", "... s", line) for line in lines.found]


def test_a_wait_for_another_rank_is_told_of(ranks2: RankPool) -> None:
    assert ranks2.run(_waits) == [
        ["waiting for rank 1 (to end its warm-up)", "waited for rank 1 (to end its warm-up), ... s"],
        [],
    ]


def _measures(rank: int) -> list[str]:
    clock, measure = Clock(), calibration._measure

    def slow_measure(*args: Any) -> Calibration:
        clock.now += SLOW
        return replace(measure(*args), link=Link(2e-4, 12e6))

    with (
        unittest.mock.patch.object(slow_work, "clock", clock),
        unittest.mock.patch.object(calibration, "_measure", slow_measure),
        unittest.mock.patch.dict(kept_calibration._of_this_process, clear=True),
        told_lines() as lines,
    ):
        EagerDDP(Mlp())
    return lines.found


def test_a_slow_measurement_of_the_link_is_told_of_with_its_result(ranks2: RankPool) -> None:
    what = "how fast ranks compute and reduce"
    assert ranks2.run(_measures) == [
        [f"measuring {what}", f"measured {what}, 7.0 s: 200 us + bytes / 12 MB/s"],
        [],
    ]


def _functional(rank: int) -> list[str]:
    gradient = functional.grad(lambda weight, x: (weight * x).sum())

    def train_step(weight: Tensor, x: Tensor) -> Tensor:
        return weight - gradient(weight, x)

    with _slow_passes() as lines:
        step = functional.compile(train_step, backend="aot_eager")
        for size in (3, 3, 4):
            step(torch.ones(size), torch.ones(size))
    return [line.replace("_functional.", "") for line in lines.found]


def test_a_functional_step_is_told_of_with_what_is_new_about_its_arguments(ranks2: RankPool) -> None:
    four, three = (f"a torch.float32 of shape ({size},), strides (1,) on cpu" for size in (4, 3))
    assert ranks2.run(_functional) == [
        [
            "compiling step train_step, in its first call",
            "compiled step train_step, 7.0 s",
            f"compiling step train_step, again: leaf 0 of its arguments is {four}, and was {three}",
            "compiled step train_step, 7.0 s",
        ],
        [],
    ]


def _refused(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_DDP_LOG", "loud")
        with pytest.raises(ValueError, match="COMPILED_DDP_LOG must be"):
            EagerDDP(Mlp())
        with pytest.raises(ValueError, match="COMPILED_DDP_LOG must be"):
            functional.compile(lambda x: x)


def test_a_switch_that_is_none_is_refused_when_a_model_is_wrapped(ranks2: RankPool) -> None:
    ranks2.run(_refused)


def test_loggers_are_children_of_the_packages_and_work_is_slow_after_five_seconds() -> None:
    names = {module._log.name for module in (telling, rank_group, calibration, compiled)}
    assert names == {
        f"compiled_ddp.{name}"
        for name in ("graph.telling", "ranks.rank_group", "ranks.calibration", "functional.compiled")
    }
    assert slow_work.SECONDS == 5.0
