"""The sections of `make gpu`: what each finds wrong, and what its ranks do, as far as that shows without a GPU."""

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
from torch import nn

from benchmarks.gpu import alone, cuda_graphs, gpu_tests, memory, overhead, sanitizer, variants_table, watched_steps
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.workloads import ALL, SIZES, of_size, of_table
from benchmarks.variants import make_variants
from compiled_ddp import torch_private
from compiled_ddp.comparison.ranks import Rank
from compiled_ddp.comparison.result import Comparison, VariantResult
from compiled_ddp.comparison.variants import Variant
from ranks import RankError, RankPool

SETTINGS = Settings("cpu", "tiny", (), (), "aot_eager", 1, 2, ("tests",))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def test_every_size_has_its_models() -> None:
    for size in SIZES:
        assert {*of_size(size), *of_table(size)} <= ALL.keys()
    sizes = [
        sum(p.numel() for p in ALL[name].build_model("test", torch.device("meta")).parameters())
        for name in ("tiny gpt", "gpt")
    ]
    assert sizes[0] < sizes[1] / 100


# ---- tests -----------------------------------------------------------------------------------------------------------

WITH_EVERY_OUTCOME = """
import pytest

@pytest.mark.gpu
def test_that_passes(): pass

@pytest.mark.gpu
def test_that_fails(): assert 1 == 2, "one is not | two"

@pytest.mark.gpu
def test_that_is_skipped(): pytest.skip("needs two GPUs")

def test_without_the_mark(): raise SystemExit(9)
"""


def test_outcomes_of_tests_are_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text(WITH_EVERY_OUTCOME)
    (tmp_path / "test_other.py").write_text("raise RuntimeError('nothing in here is for a GPU')")
    answer = gpu_tests.measure(Settings(**{**SETTINGS.to_json(), "tests": (str(tmp_path),)}))
    outcomes = {test["name"].rpartition("::")[2]: test["outcome"] for test in answer["tests"]}
    assert outcomes == {"test_that_passes": "passed", "test_that_fails": "failure", "test_that_is_skipped": "skipped"}
    assert answer["failed"] == ["1 of 3 tests"]
    text = gpu_tests.render(answer)
    assert "1 passed, 1 failure, 0 error, 1 skipped" in text
    assert "- skipped: needs two GPUs (1)" in text and "one is not \\| two" in text


def test_a_gpu_on_which_no_test_ran_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it(): pytest.skip('no')\n")
    on_a_gpu = Settings(**{**SETTINGS.to_json(), "tests": (str(tmp_path),), "device": "cuda"})
    assert gpu_tests.measure(on_a_gpu)["failed"] == ["no test ran"]


def test_all_modules_with_tests_for_a_gpu_are_found() -> None:
    names = {Path(module).name for module in gpu_tests.files_with_tests(["tests"])}
    assert {"test_gpu.py", "test_nccl.py"} <= names
    assert "test_parity.py" not in names


# ---- sanitizer -------------------------------------------------------------------------------------------------------


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sanitizer works there")
def test_ranks_of_the_sanitizer_are_launched_and_what_they_write_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    row = sanitizer.watched(watched_steps.PLANTED, sanitizer.alone("cpu"))
    assert row["reports"] == 0 and row["error"].startswith("ChildFailedError")
    assert "Torch not compiled with CUDA enabled" in capfd.readouterr().err or torch.version.cuda is not None


# ---- steps of one rank -----------------------------------------------------------------------------------------------


def _never(model: nn.Module) -> nn.Module:
    raise ValueError("not with me")


def _alone(index: int, workload: str, names: tuple[str, ...], backend: str) -> dict[str, Any]:
    known = {**make_variants(backend=backend), "broken": Variant("broken", "eager", _never)}
    rank = Rank(index, 1, torch.device("cpu"), dist.new_group(backend="gloo"))
    return alone.measure(ALL[workload], [known[name] for name in names], 1, 3, rank)


def test_a_variant_that_fails_costs_its_own_row(one_rank: RankPool) -> None:
    names = ("no communication, eager", "broken", "torch DDP, gradients copied", "EagerDDP")
    (found,) = one_rank.run(_alone, "tiny mlp", names, "aot_eager")
    assert found["errors"] == {"broken": "ValueError: not with me"}
    assert list(found["variants"]) == [name for name in names if name != "broken"]
    assert {len(of_one["samples"]) for of_one in found["variants"].values()} == {3}
    assert overhead.what_is_wrong(found) == ["broken on tiny mlp: ValueError: not with me"]


FOUND: dict[str, Any] = {
    "workload": "large gpt",
    "parameters": 1_000_000,
    "ranks": "1 nccl rank on one GPU",
    "variants": {
        name: {
            "samples": [[0.001 * n, 0.002 * n * (1 + k)] for k in range(3)],
            "gradient_difference": 1e-6,
            "launches": {"graph launches": n // 3, "kernel launches": 10 * n},
            "recorded": n // 3,
            "skipped": 0,
        }
        for n, name in enumerate(dict.fromkeys([*overhead.VARIANTS, *cuda_graphs.VARIANTS]), start=1)
    },
    "errors": {},
}


def test_medians_and_ratios_are_those_of_the_rounds() -> None:
    row = overhead.row("no communication, compiled", FOUND, (overhead.EAGER, "torch DDP"))
    assert (row.step, row.host, row.launches) == (pytest.approx(8.0), pytest.approx(2.0), 20)
    assert (row.over_first, row.over_second) == (pytest.approx(2.0), pytest.approx(2 / 3))
    lines = overhead.render({"workloads": [FOUND]}).splitlines()
    assert sum(line.startswith("| ") and " ms " not in line for line in lines) == len(overhead.VARIANTS)
    assert "large gpt, 1.00 M parameters, 1 nccl rank on one GPU, 3 rounds:" in lines


@pytest.mark.parametrize(("difference", "is_wrong"), [(1e-5, False), (0.5, True), (float("nan"), True)])
def test_gradients_that_differ_are_wrong(difference: float, is_wrong: bool) -> None:
    variants = {"EagerDDP": {**FOUND["variants"]["EagerDDP"], "gradient_difference": difference}}
    assert bool(overhead.what_is_wrong({**FOUND, "variants": variants})) == is_wrong
    result = VariantResult("EagerDDP", "eager", True, [], gradient_difference=difference)
    compared = Comparison("gpt", "cpu", "", 2, 1, [], [], [result])
    assert bool(variants_table._wrong(compared)) == is_wrong


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------

LOGS = """V1125 12:00:00 1 torch/_inductor/cudagraph_utils.py:382] [__cudagraphs] skipping cudagraphs due to cpu device
W1125 skipping cudagraphs due to mutated inputs (1 instances). Found from
W1125 skipping cudagraphs due to mutated inputs (1 instances). Found from
"""


def test_reasons_for_which_graphs_are_left_out_are_told_once() -> None:
    reasons = cuda_graphs.skip_reasons(LOGS)
    assert reasons == [
        "skipping cudagraphs due to cpu device",
        "skipping cudagraphs due to mutated inputs (1 instances). Found from",
    ]


def test_a_step_that_launches_no_graph_is_wrong() -> None:
    good = {**FOUND, "skip_reasons": []}
    assert cuda_graphs._not_replayed(good) == []
    ours = {**FOUND["variants"][cuda_graphs.OURS], "launches": {"kernel launches": 7}}
    bad = {**FOUND, "variants": {**FOUND["variants"], cuda_graphs.OURS: ours}, "skip_reasons": ["because"]}
    (line,) = cuda_graphs._not_replayed(bad)
    assert line == f"{cuda_graphs.OURS} on large gpt: a step launches no CUDA graph; because"
    text = cuda_graphs.render({"workloads": [good, bad]})
    assert text.count(f"| {cuda_graphs.OURS} ") == 2 and text.endswith("- because")


def test_a_row_that_failed_says_why() -> None:
    variants = {name: of_one for name, of_one in FOUND["variants"].items() if name != cuda_graphs.OURS}
    failed = {**FOUND, "variants": variants, "errors": {cuda_graphs.OURS: "RuntimeError: no"}, "skip_reasons": []}
    text = cuda_graphs.render({"workloads": [failed]})
    assert f"| {cuda_graphs.OURS}: RuntimeError: no " in text


def test_recorded_graphs_are_counted_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.for_tests.recorded_cuda_graphs(0) == 0
    leaf = SimpleNamespace(children={})
    root = SimpleNamespace(children={1: [leaf, leaf], 2: [SimpleNamespace(children={3: [leaf]})]})
    trees = SimpleNamespace(roots={0: [root], 5: [leaf]})
    managers = "torch._inductor.cudagraph_trees.get_manager"
    monkeypatch.setattr(managers, lambda index, create_if_none_exists: None if create_if_none_exists else trees)
    assert torch_private.for_tests.recorded_cuda_graphs(0) == 6


@pytest.mark.inductor
@pytest.mark.slow
def test_steps_that_ask_for_cuda_graphs_run_without_them_on_the_cpu(one_rank: RankPool) -> None:
    names = (cuda_graphs.PLAIN, cuda_graphs.OURS)
    (found,) = one_rank.run(_alone, "tiny mlp", names, "inductor", timeout_seconds=300)
    assert overhead.what_is_wrong(found) == []
    for of_one in found["variants"].values():
        assert of_one["recorded"] == 0 and not of_one["launches"]["graph launches"]
    assert cuda_graphs._not_replayed({**found, "skip_reasons": []})


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_probe_that_fails_costs_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(kind: str, arguments: Mapping[str, Any], *, ranks: int, environment: object) -> dict[str, Any]:
        assert (kind, ranks) == ("probe", 1)
        (name,) = arguments["variants"]
        if name == "torch.compile(DDP)":
            raise RuntimeError("out of | memory")
        return {"first_step_s": 1.0, "peak_memory_bytes": (3 if name == "EagerDDP" else 2) << 20}

    monkeypatch.setattr(memory, "run_job", job)
    answer = memory.measure(SETTINGS)
    assert len(answer["rows"]) == 2 * len(memory.VARIANTS)
    assert answer["failed"] == [
        f"torch.compile(DDP) on {model}: RuntimeError: out of | memory" for model in of_size("tiny")
    ]
    text = memory.render(json.loads(json.dumps(answer)))
    (line,) = (line for line in text.splitlines() if line.startswith("| EagerDDP "))
    assert line.split()[3:8:2] == ["3.0", "1.500", "1.0"]
    assert "- torch.compile(DDP), tiny gpt: RuntimeError: out of \\| memory" in text
