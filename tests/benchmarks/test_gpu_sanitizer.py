"""The stream sanitizer's section of `make gpu`: how races are counted, and what the sanitizer sees of a step."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import sanitizer, watched_steps
from benchmarks.gpu.settings import Settings
from compiled_ddp import torch_private
from compiled_ddp.tools.comparison.ranks import Rank
from ranks import RankError, RankPool

SETTINGS = Settings("cpu", "tiny", (), (), "aot_eager", 1, 2, ("tests",))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def test_reports_are_counted_by_the_words_with_which_torch_begins_them() -> None:
    source = Path(torch.__file__).parent / "cuda" / "_sanitizer.py"
    assert sanitizer.REPORT in source.read_text()


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ((watched_steps.PLANTED,), []),
        ((), ["the planted race is not reported, so none would be"]),
        ((watched_steps.PLANTED, "compile_ddp"), ["compile_ddp, 1 gloo rank on the CPU: 1 races reported"] * 2),
    ],
)
def test_races_are_counted_in_what_ranks_write(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reported: tuple[str, ...], expected: list[str]
) -> None:
    def job(kind: str, arguments: Mapping[str, Any], *, ranks: int) -> None:
        assert kind == "watched_steps" and arguments["steps"] > 0 and ranks in (1, 2)
        if arguments["what"] in reported:
            os.write(2, f"{sanitizer.REPORT} on tensor with data pointer 17\n".encode())
            raise RuntimeError("a rank has ended")

    monkeypatch.setattr(sanitizer, "run_job", job)
    monkeypatch.setattr(sanitizer, "together", sanitizer.alone)
    answer = sanitizer.measure(SETTINGS)
    assert answer["failed"] == expected
    assert capfd.readouterr().err.count(sanitizer.REPORT) == sum(row["reports"] for row in answer["rows"])
    text = sanitizer.render(json.loads(json.dumps(answer)))
    assert ("```text\nCSAN" in text) == ("compile_ddp" in reported)
    assert "data pointer" in text


def test_a_rank_that_fails_without_a_race_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(kind: str, arguments: Mapping[str, Any], *, ranks: int) -> None:
        if arguments["what"] == watched_steps.PLANTED:
            os.write(2, sanitizer.REPORT.encode())
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sanitizer, "run_job", job)
    failed = sanitizer.measure(SETTINGS)["failed"]
    assert len(failed) == 4 and all(line.endswith("RuntimeError: out of memory") for line in failed)


class Noting(torch_private.autograd.DispatchMode):
    """In the sanitizer's place: notes the operators that it would see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def _watched(index: int, what: str) -> Counter[str]:
    mode = Noting()

    @contextmanager
    def watch() -> Iterator[None]:
        with mode:
            yield

    watched_steps.run(what, 2, Rank(index, 2, torch.device("cpu"), dist.new_group(backend="gloo")), watch)
    return mode.seen


@pytest.mark.parametrize(
    ("what", "collective", "sees_forward"),
    [("EagerDDP", "c10d.allreduce_.default", True), ("compile_ddp", "_c10d_functional.all_reduce_.default", False)],
)
def test_the_steps_that_are_watched_show_collectives_and_the_operators_of_the_backward(
    ranks2: RankPool, what: str, collective: str, sees_forward: bool
) -> None:
    for seen in ranks2.run(_watched, what):
        assert seen[collective] >= 2 and seen["aten.mm.default"] >= 2 and seen["aten._fused_adamw_.default"] == 2
        assert bool(seen["aten.embedding.default"]) == sees_forward


@contextmanager
def _sanitizer_off_cuda(seen: list[int]) -> Iterator[None]:
    """torch's own sanitizer, told that tensors of the CPU are CUDA's and that all run on one stream, but for others."""
    stream = SimpleNamespace(cuda_stream=0)

    def current_stream() -> SimpleNamespace:
        seen.append(stream.cuda_stream)
        return stream

    @contextmanager
    def another(device: torch.device) -> Iterator[None]:
        stream.cuda_stream = 7
        yield
        stream.cuda_stream = 0

    with (
        mock.patch.object(torch.cuda, "current_stream", current_stream),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)),
        mock.patch.object(torch, "Stream", another),
        torch_private.for_tests.stream_sanitizer(),
    ):
        yield


def _sanitized(index: int, what: str) -> int:
    seen: list[int] = []
    rank = Rank(index, 1, torch.device("cpu"), dist.new_group(backend="gloo"))
    watched_steps.run(what, 2, rank, lambda: _sanitizer_off_cuda(seen))
    return len(seen)


@pytest.mark.parametrize("what", watched_steps.WRAPPERS)
def test_the_sanitizer_takes_every_operator_of_the_steps_and_finds_nothing_on_one_stream(
    one_rank: RankPool, what: str
) -> None:
    assert one_rank.run(_sanitized, what)[0] > 100


def test_the_sanitizer_finds_the_planted_race(one_rank: RankPool) -> None:
    with pytest.raises(RankError, match="CUDASanitizerErrors: detected 1 errors"):
        one_rank.run(_sanitized, watched_steps.PLANTED)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sanitizer works there")
def test_ranks_of_the_sanitizer_are_launched_and_what_they_write_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    row = sanitizer.watched(watched_steps.PLANTED, sanitizer.alone("cpu"))
    assert row["reports"] == 0 and row["error"].startswith("ChildFailedError")
    assert "Torch not compiled with CUDA enabled" in capfd.readouterr().err or torch.version.cuda is not None
