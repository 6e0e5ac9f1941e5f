"""The sections of `make gpu`: what each finds wrong, and what its ranks do, as far as that shows without a GPU."""

import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu import (
    alone,
    cuda_graphs,
    environment,
    gpu_tests,
    memory,
    overhead,
    variants_table,
)
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.workloads import ALL, SIZES, of_size, of_table
from benchmarks.variants import make_variants
from compiled_ddp import torch_private
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.result import Comparison, VariantResult
from compiled_ddp.tools.comparison.variants import Variant
from ranks import RankPool

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


# ---- environment -----------------------------------------------------------------------------------------------------


def test_gpus_driver_and_versions_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 580.95.05\necho 580.95.05\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = SimpleNamespace(name="H100", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: found.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    answer = environment.measure(Settings(**{**SETTINGS.to_json(), "device": "cuda"}))
    rows = environment.render(json.loads(json.dumps(answer))).splitlines()
    told = {cells[1].strip(): cells[2].strip() for cells in (row.split("|") for row in rows[2:])}
    assert told["GPUs"] == "2 x H100, 80 GiB, compute capability 9.0"
    assert told["driver, CUDA, NCCL"] == f"580.95.05, {torch.version.cuda or 'none'}, 2.28.3"
    assert f"torch {importlib.metadata.version('torch')}" in told["versions"]
    assert (told["one rank"], told["several ranks"]) == (
        "1 nccl rank on one GPU",
        "2 nccl ranks each on a GPU of its own",
    )


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


def test_what_the_profiler_breaks_leaves_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile() -> None:
        raise RuntimeError("no CUPTI")

    model = nn.Linear(2, 2)
    contender = SimpleNamespace(next_batch=lambda: None, warm_up=lambda reference, steps: 0.0, step_s=1.0, module=model)
    monkeypatch.setattr(alone, "Contender", lambda *arguments: contender)
    monkeypatch.setattr(alone, "host_and_step", lambda contender: (1.0, 2.0))
    monkeypatch.setattr(alone.Reference, "compute", lambda *arguments: None)
    monkeypatch.setattr(torch.profiler, "profile", profile)
    rank = SimpleNamespace(device=torch.device("cpu"))
    found = alone.measure(ALL["tiny mlp"], [make_variants()["EagerDDP"]], 1, 2, rank)  # type: ignore[arg-type]
    assert found["errors"] == {"EagerDDP": "under the profiler RuntimeError: no CUPTI"}
    assert found["variants"]["EagerDDP"]["samples"] == [(1.0, 2.0)] * 2
    assert overhead.row("EagerDDP", found, ("EagerDDP", "torch DDP")).step == 2000


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
