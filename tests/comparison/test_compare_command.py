"""`compiled-ddp compare` as a user runs it: on own ranks, under torchrun, on two machines, and where it goes wrong."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torchrun

from benchmarks.link import LinkUnavailable, ShapedLink
from compiled_ddp.__main__ import main, parse
from compiled_ddp.tools.comparison.arguments import DEFAULT
from compiled_ddp.tools.comparison.result import Comparison, VariantResult
from ranks import RankPool

# What its process is for stands in the name of the file that it is started with.
SCRIPT = """
import os, signal, sys
import torch
from torch import nn

def small(rank, device):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    return model, nn.CrossEntropyLoss(), [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(2)]

class Unused(nn.Module):
    steps = 0

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.steps += 1
            if self.steps == 5 and "EagerDDP-1.json" in sys.argv[1]:
                os._exit(7)  # in the second round
        return self.used(x).square().mean()

def unused():
    return Unused(), [torch.randn(8, 16)]

def returns_nothing():
    pass

def breaks_on_one_rank(rank):
    if rank == 1:
        raise RuntimeError("no data here")
    return small(rank, "cpu")

def differs(rank):
    return nn.Linear(16, 4 + rank), [torch.randn(8, 16)]

def kills_its_rank_once(rank, device):
    if rank == 1 and "torch DDP" in sys.argv[1] and not os.path.exists(os.environ["KILLED"]):
        open(os.environ["KILLED"], "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
    return small(rank, device)
"""
QUICK = ["--backend", "aot_eager", "--rounds", "3", "--warmup", "1", "--timeout", "120"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def environment(**changes: str) -> dict[str, str]:
    """Without what would make the command take part in this test's own job."""
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in own} | changes


def compare(script: Path, function: str, *options: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """The command on ranks of its own, from another folder than the checkout."""
    command = [sys.executable, "-m", "compiled_ddp", "compare", f"{script.name}:{function}", *QUICK, *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=script.parent, env=environment(), check=False
    )


def row(output: str, name: str) -> list[str]:
    """The cells of a variant's line, without its name."""
    line = next(line for line in output.splitlines() if line.startswith(f"{name} "))
    return line.removeprefix(name).split()


@pytest.mark.slow
def test_the_command_compares_and_advises_in_a_table_json_and_a_picture(script: Path) -> None:
    variants = ("no communication, eager", "torch DDP", "compile_ddp")
    done = compare(script, "small", "--variants", *variants)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on cpu, link gloo within one machine, 3 rounds" in done.stdout
    assert re.search(r"^compare: 3 variants and 3 rounds, about .* expected$", done.stderr, re.MULTILINE)
    for number, name in enumerate(variants, start=1):
        assert f"compare: first steps of {name}, {number} of 3, about " in done.stderr
    assert "compare: round 1 of 3" in done.stderr and "compare:" not in done.stdout
    for name in variants:
        *_, peak, first_step, _, difference = row(done.stdout, name)
        assert float(first_step) >= 0 and float(peak) >= 0 and float(difference) < 1e-5  # of a tiny model
    assert re.search(r"^Choose (torch DDP|compile_ddp)\.\n- A step takes", done.stdout, re.MULTILINE)
    data = json.loads((script.parent / "compare-small.json").read_text())
    assert data.keys() == {"recipe", "comparisons", "advice"}
    (found,) = data["comparisons"]
    assert found["batch_size"] == 16
    assert [variant["name"] for variant in found["variants"]] == [*variants]
    for variant in found["variants"]:
        assert [len(ranks) for ranks in variant["samples"]] == [2, 2, 2] and variant["error"] is None
        assert variant["first_step_cold_s"] == variant["first_step_parts"]["seconds"] > 0
        assert (variant["first_step_parts"]["forward_s"] > 0) == (variant["name"] == "compile_ddp")
    assert "script.py:small" in data["recipe"]["command"]
    assert (script.parent / "compare-small.png").stat().st_size > 10_000


@pytest.mark.slow
def test_variants_that_fail_have_their_errors_and_the_others_go_on(script: Path) -> None:
    """One is refused by its wrapper, another dies on one rank in the middle of the rounds: nobody waits for it."""
    variants = ("torch DDP", "EagerDDP", "compile_ddp")
    done = compare(script, "unused", "--variants", *variants, "--no-probe", "--timeout", "3000")
    assert done.returncode == 0, done.stderr
    assert [set(row(done.stdout, name)) == {"-"} for name in variants] == [True, True, False]
    assert re.search(r"^torch DDP failed: rank \d: RuntimeError: Expected to have finished", done.stdout, re.MULTILINE)
    assert "EagerDDP failed: rank 1: its process ended with status 7" in done.stdout
    assert "Choose compile_ddp." in done.stdout


# What is wrong, and what every rank says.
WRONG = {
    "script.py:breaks_on_one_rank": "rank 1: RuntimeError: no data here",
    "script.py:differs": "the models of the ranks differ: rank 0 has ('weight', (4, 16)",
}
# What else is wrong with a function, test_users_task.py and test_target.py see without a process for each rank.
ALSO_WRONG = {
    "missing.py:small": ": there is no file missing.py",  # on the rank that looks first
    "script.py:missing": "script.py has no function 'missing'",
    "script.py:returns_nothing": "TypeError: the function returned None: return (model, batches), (model",
}


def _compare_wrongly(rank: int, folder: str, target: str, port: int) -> tuple[int, str]:
    os.chdir(folder)
    errors = io.StringIO()
    with torchrun.environment(rank, 2, port), contextlib.redirect_stderr(errors):
        return main(["compare", target, *QUICK]), errors.getvalue()


@pytest.mark.parametrize("target", [*WRONG, *(pytest.param(one, marks=pytest.mark.slow) for one in ALSO_WRONG)])
def test_what_cannot_be_compared_is_said_on_every_rank(ranks2: RankPool, script: Path, target: str) -> None:
    answers = ranks2.run(
        _compare_wrongly, str(script.parent), target, torchrun.free_port(), process_group=False, timeout_seconds=100
    )
    for rank, (status, message) in enumerate(answers):
        assert status == 2
        assert f"compare, rank {rank}: {target} cannot be compared. rank " in message
        assert (WRONG | ALSO_WRONG)[target] in message
    assert len({message.partition("cannot be compared. ")[2] for _, message in answers}) == 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("missing.py:small", r"compare: there is no file missing\.py \(seen from"),
        ("no_module:small", r"compare: there is no module 'no_module' \(looked for from"),
        (":small", r"compare: there is no module '' \(looked for from"),
    ],
)
def test_a_file_that_is_not_there_is_one_line_of_words_before_any_rank_is_started(
    script: Path, target: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("compiled_ddp.tools.comparison.command.run_on_own_ranks", None)
    assert main(["compare", target, *QUICK]) == 2
    (told,) = capfd.readouterr().err.splitlines()
    assert re.match(words, told)


@pytest.mark.slow
def test_a_function_that_is_not_there_is_one_line_of_words(script: Path) -> None:
    done = compare(script, "missing")
    told = [line for line in done.stderr.splitlines() if "socket.cpp" not in line]
    assert done.returncode == 2
    assert len(told) == 1, done.stderr
    words = r"compare: script.py:missing cannot be compared. rank \d: script.py has no function 'mi"
    assert re.match(words, told[0])


# What would fail in the end is found in the beginning: SCRIPT is not even read.
LATE = {
    ("--json", "script.py/samples.json"): "rank 0: script.py/samples.json cannot be written (",
    ("--png", "picture.xyz"): "rank 0: picture.xyz is no picture (.xyz is none of ",
    ("--png", "folder"): "rank 0: folder cannot be written (Is a directory): name another file by --png",
    ("--device", "cuda"): "rank 0: --device cuda needs a GPU for each of 2 ranks on this machine, found 0",
}


def _fail_early(rank: int, folder: str, ports: list[int]) -> list[tuple[int, str]]:
    os.chdir(folder)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.device_count", lambda: 0)
        for options, port in zip(LATE, ports, strict=True):
            errors = io.StringIO()
            with torchrun.environment(rank, 2, port), contextlib.redirect_stderr(errors):
                found.append((main(["compare", "missing.py:small", *QUICK, *options]), errors.getvalue()))
    return found


def test_results_and_devices_that_are_not_there_are_told_of_before_anything_is_measured(
    ranks2: RankPool, script: Path
) -> None:
    (script.parent / "folder").mkdir()
    for found in ranks2.run(_fail_early, str(script.parent), torchrun.free_ports(len(LATE)), process_group=False):
        for (status, message), expected in zip(found, LATE.values(), strict=True):
            assert status == 2 and expected in message, message
    assert {path.name for path in script.parent.iterdir()} <= {"script.py", "folder", "__pycache__"}


def test_ranks_of_which_no_machines_number_is_told_are_not_compared(
    script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert main(["compare", f"{script}:small", *QUICK]) == 2
    (told,) = capfd.readouterr().err.splitlines()
    assert told.endswith("start with torchrun, or set LOCAL_WORLD_SIZE")


def _failed(rank: int, folder: str, port: int, errors: tuple[str | None, ...]) -> int:
    os.chdir(folder)
    names = ("no communication, eager", "torch DDP", "EagerDDP")
    variants = [
        VariantResult(name, "eager", number > 0, [] if error else [[[0.1, 0.1, 0.1]] * 2], error=error)
        for number, (name, error) in enumerate(zip(names, errors, strict=True))
    ]
    found = Comparison("small", "cpu", "gloo", 2, 1, [4], [[0.1, 0.1]], variants)
    with torchrun.environment(rank, 2, port), pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.tools.comparison.contest.compare", lambda _: found)
        return main(["compare", "script.py:small", *QUICK])


def test_the_status_says_that_every_wrapper_has_failed(ranks2: RankPool, script: Path) -> None:
    for status, errors in ((1, (None, "it broke", "it broke")), (0, (None, "it broke", None))):
        arguments = (str(script.parent), torchrun.free_port(), errors)
        assert ranks2.run(_failed, *arguments, process_group=False) == [status, status]


@pytest.mark.slow
def test_a_comparison_that_is_told_to_end_leaves_no_folder_and_no_process(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "compiled_ddp", "compare", "script.py:small", *QUICK, "--rounds", "100000"]
    process = subprocess.Popen(
        command, cwd=script.parent, env=environment(TMPDIR=str(folder)), stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 250
        while not any(folder.glob("compiled-ddp-compare-*/*.json")):  # the instructions of a process
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        process.wait(timeout=60)
    finally:
        process.kill()
    assert not [*folder.glob("compiled-ddp-compare-*")]


@pytest.fixture
def link() -> Iterator[ShapedLink]:
    """Two network namespaces, as two machines; removed in the end."""
    made = ShapedLink("1gbit")
    try:
        made.create()
    except LinkUnavailable as reason:
        pytest.skip(str(reason))
    try:
        yield made
    finally:
        made.remove()


@pytest.mark.slow
def test_two_machines_under_torchrun_begin_anew_when_a_rank_was_killed(
    link: ShapedLink, script: Path, tmp_path: Path
) -> None:
    agents, outputs = [], [tmp_path / f"machine{number}.txt" for number in range(2)]
    try:
        for number, output in enumerate(outputs):
            launcher = f"--nnodes 2 --nproc-per-node 1 --max-restarts 2 --rdzv-backend c10d --rdzv-id compare \
                --rdzv-endpoint {link.STORE_ADDRESS}:{link.STORE_PORT} --local-addr 10.213.0.{number + 1} \
                --rdzv-conf is_host={int(number == 0)}".split()
            command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "compiled_ddp"]
            options = [*QUICK, "--variants", "torch DDP", "EagerDDP", "--no-probe"]
            ours = environment(
                GLOO_SOCKET_IFNAME=link.interfaces[number], OMP_NUM_THREADS="1", KILLED=str(tmp_path / "killed")
            )
            agents.append(
                subprocess.Popen(
                    link.command(number, 2, [*command, "compare", "script.py:kills_its_rank_once", *options]),
                    stdout=output.open("w"),
                    stderr=subprocess.STDOUT,
                    cwd=script.parent,
                    env=ours,
                )
            )
        statuses = [agent.wait(timeout=300) for agent in agents]
    except subprocess.TimeoutExpired:
        statuses = ["no end"]
    finally:
        for agent in agents:
            agent.terminate()  # and with it the ranks, which are in sessions of their own
        for agent in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=60)
            agent.kill()
            agent.wait()
    printed = [output.read_text() for output in outputs]
    assert statuses == [0, 0], f"{statuses}\n" + "\n".join(printed)
    assert (tmp_path / "killed").exists(), "a rank was killed"
    (table,) = [text for text in printed if "Choose " in text]
    assert "2 ranks on cpu, link gloo between 2 machines, 3 rounds" in table
    assert set(row(table, "torch DDP")) != {"-"} and float(row(table, "EagerDDP")[-1]) < 1e-5


# ---- the arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["script.py"], "SCRIPT:FUNCTION"),
        (["s.py:f", "--rounds", "0"], "--rounds must be at least 1, found 0"),
        (["s.py:f", "--timeout", "nan"], "--timeout must be positive, found nan"),
        (["s.py:f", "--bucket-cap-mb", "-1"], "--bucket-cap-mb must be positive, found -1"),
        (["s.py:f", "--variants", "no communication, eager"], "--variants needs one that communicates"),
        (["s.py:f", "--variants", "DDP"], "invalid choice: 'DDP'"),
    ],
)
def test_arguments_that_cannot_be_used_say_what_to_write(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["compare", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_both_floors_and_four_wrappers_are_compared_unless_others_are_asked_for() -> None:
    assert parse(["compare", "s.py:f"]).variants == [*DEFAULT]
