"""`compiled-ddp precompile`: a job finds in its folder all that it needs, and is told where that does not fit."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from calibrations import calibration
from torch import nn

from compiled_ddp import compile_ddp, torch_private
from compiled_ddp.__main__ import main
from compiled_ddp.graph import precompiled
from compiled_ddp.ranks import pretended
from compiled_ddp.tools.precompile import command
from ranks import RankPool

SCRIPT = """
import os
import torch
from torch import nn
from compiled_ddp import EagerDDP, compile_ddp

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))

def with_options():
    assert torch.distributed.get_world_size() == 2
    return compile_ddp(net(), bucket_cap_mb=1.0), [torch.zeros(3, 6)]

def without_batches():
    return compile_ddp(net(), bucket_cap_mb=1.0), []

def by_hooks():
    return EagerDDP(net()), [torch.zeros(3, 6)]

def nothing():
    return None

def elsewhere():
    os.chdir("elsewhere")
    return compile_ddp(net(), backend="aot_eager", bucket_cap_mb=1.0), [torch.zeros(3, 6), torch.zeros(3, 7)]
"""

LIMITS = {"timeout_seconds": 300, "collective_timeout_seconds": 120}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _trains(rank: int, folder: str) -> tuple[list[bool], str]:
    """Whether each program was found in the folder, by steps that accumulate, reduce and evaluate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.full((3, 6), float(rank + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        torch.compiler.reset()
        ddp = compile_ddp(model, bucket_cap_mb=1.0)
        ddp(x).square().sum().backward()
        expected = model[0].weight.grad.clone()
        with ddp.no_sync():
            ddp(x).square().sum().backward()
        ddp(x).square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad, 3 * expected)
        ddp.eval()
        with torch.no_grad():
            ddp(x)
        told = str(ddp.explain())
    return [each.was_found for each in ddp.teller.compilations], told


@pytest.mark.inductor
def test_a_job_compiles_nothing_that_was_precompiled(
    ranks2: RankPool, script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "filled"
    status = main(["precompile", f"{script}:with_options", "--ranks", "2", "--into", str(folder), "--evaluation"])
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert f"Start the job with TORCHINDUCTOR_CACHE_DIR={folder}" in printed.out
    assert "the given buckets: 5 programs" in printed.err
    for found, told in ranks2.run(_trains, str(folder), **LIMITS):
        assert found and all(found), told
        assert f"Loaded from {folder}: forward of graph 1 (by rank 0 on " in told and "Compiled here" not in told
    (entry,) = json.loads((folder / "compiled_ddp" / "precompiled.json").read_text())
    assert (entry["ranks"], entry["torch"]) == (2, torch.__version__)


@pytest.mark.parametrize(
    ("function", "why", "in_a_process"),
    [
        ("without_batches", "without_batches has no batches: return a list with one of each shape", False),
        ("by_hooks", "the model is wrapped by EagerDDP, which compiles nothing: take compile_ddp", False),
        ("nothing", "nothing: the function returned None: return (model, batches)", True),
        ("missing", "has no function 'missing': name one that returns (model, batches)", False),
    ],
)
def test_what_cannot_be_compiled_is_named(
    function: str,
    why: str,
    in_a_process: bool,
    script: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once as for a user, in a process of its own: each of these is seconds, and each error takes the same way."""
    if not in_a_process:
        _fill_in_this_process(script, monkeypatch)
    assert main(["precompile", f"{script}:{function}", "--ranks", "2", "--into", str(tmp_path / "filled")]) == 2
    told = capfd.readouterr().err
    assert why in told and "Traceback" not in told


def _fill_in_this_process(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda workers, **_: ThreadPoolExecutor(workers))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, script.stem, ModuleType(script.stem))


def test_the_note_is_in_the_folder_though_the_script_changes_the_directory_and_a_batch_fails(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, what has been compiled before that would be found on any kind of processor."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    _fill_in_this_process(script, monkeypatch)
    with pytest.raises(RuntimeError):
        main(["precompile", f"{script}:elsewhere", "--ranks", "2", "--into", "filled"])
    assert [*tmp_path.rglob("precompiled.json")] == [tmp_path / "filled" / "compiled_ddp" / "precompiled.json"]


@pytest.mark.parametrize(("arguments", "why"), [(["--ranks", "1"], "--ranks must be at least 2"), ([], "--ranks")])
def test_arguments_are_checked(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["precompile", "train.py:make", "--into", "filled", *arguments])
    assert ended.value.code == 2 and why in capsys.readouterr().err


# ---- the world that it compiles in -----------------------------------------------------------------------------------


def test_a_wrapper_of_many_ranks_is_made_and_warmed_up_on_one() -> None:
    with pretended.world(1000, backend="gloo", calibration=calibration(world_size=1000)) as world:
        ddp = compile_ddp(nn.Linear(4, 3), backend="aot_eager")
        ddp.warmup(torch.zeros(2, 4))
        assert dist.get_world_size() == 1000 and world.was_planned_for
        assert "where an all-reduce takes 122 us + bytes / 1,074 MB/s" in str(ddp.explain())
    assert not dist.is_initialized() and pretended.current() is None


def test_what_needs_other_ranks_fails_and_does_not_wait() -> None:
    with pretended.world(8, backend="gloo", calibration=calibration()):
        ddp = compile_ddp(nn.Linear(4, 3), backend="aot_eager")
        with pytest.raises(RuntimeError):
            ddp(torch.zeros(2, 4)).sum().backward()


# ---- a folder that was filled for something else ---------------------------------------------------------------------


def _other(name: str, value: object) -> Callable[[int], Any]:
    conditions = precompiled.conditions
    return lambda ranks: {**conditions(ranks), name: value}


@pytest.mark.parametrize(("name", "value"), [("torch", "2.0.0"), ("number of threads", 64), ("ranks", 7)])
def test_a_foreign_folder_is_told_of(
    name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COMPILED_DDP_LOG", "stderr")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(precompiled, "conditions", _other(name, value))
        precompiled.note_filled(tmp_path, 2, "train.py:make")
    precompiled.tell_if_foreign(2)
    here = precompiled.conditions(2)[name]
    assert f"does not fit, and is compiled anew: {name} {here} here, {value} there." in capsys.readouterr().err
    precompiled.note_filled(tmp_path, 2, "train.py:make")
    precompiled.tell_if_foreign(2)
    assert capsys.readouterr().err == "", "it was filled for both"


def test_a_folder_of_another_processor_is_refused(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch would find code for other instructions there, and run it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(precompiled, "conditions", _other("processor", "a VAX"))
        precompiled.note_filled(tmp_path, 2, "train.py:make")
    refusal = "on another kind of processor .a VAX; here .*name another folder"
    with (
        pretended.world(2, backend="gloo", calibration=calibration()),
        pytest.raises(ValueError, match=f"{tmp_path} was filled by `compiled-ddp precompile` {refusal}"),
    ):
        compile_ddp(nn.Linear(4, 3))
    assert main(["precompile", f"{script}:with_options", "--ranks", "2", "--into", str(tmp_path)]) == 2
    assert "on another kind of processor" in capfd.readouterr().err


def test_a_note_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precompiled.note_filled(tmp_path, 2, "train.py:make")
    (note,) = (path for path in tmp_path.rglob("*") if path.is_file())
    before = note.read_text()
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", mock.Mock(side_effect=OSError("No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            precompiled.note_filled(tmp_path, 3, "train.py:make")
    assert note.read_text() == before and [*note.parent.iterdir()] == [note]


CPUINFO = """processor\t: 0
flags\t\t: fpu cmov sse sse2 ht pni ssse3 fma sse4_1 popcnt aes avx f16c avx2 bmi2 {} avx512f amx_tile
bugs\t\t: spectre_v1
"""


def test_a_kind_of_processor_is_its_instructions_whatever_the_kernel_says_besides() -> None:
    """A new kernel, microcode or hypervisor must not make a folder another processor's."""
    instructions = torch_private.compiler_cache.instruction_sets
    before, after = CPUINFO.format("ibrs"), CPUINFO.format("md_clear arat hypervisor misalignsse rtm cpuid_fault")
    assert instructions(before) == instructions(after)
    assert {"pni", "ssse3", "sse4_1", "avx512f", "amx_tile", "fma", "bmi2"} <= set(instructions(before))
    assert instructions(before) != instructions(before.replace(" avx512f", ""))
    arm = "processor : 0\nFeatures : fp asimd evtstrm asimdhp cpuid ssbs paca sve2 i8mm bf16 dit\n"
    assert instructions(arm) == ["asimd", "asimdhp", "bf16", "fp", "i8mm", "sve2"]


@pytest.mark.parametrize("text", ["", "not json", "{}", "[1, null]"])
def test_a_broken_note_is_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "compiled_ddp").mkdir()
    (tmp_path / "compiled_ddp" / "precompiled.json").write_text(text)
    precompiled.tell_if_foreign(2)
    precompiled.note_filled(tmp_path, 2, "train.py:make")
    precompiled.tell_if_foreign(2)
