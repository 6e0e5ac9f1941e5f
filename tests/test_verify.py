"""verify_parity and `python -m compiled_ddp verify`: they see what is right, and what is wrong."""

import contextlib
import functools
import io
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrun
from models import Mlp, TokenModel, assert_equal_on_all_ranks, row_batch, token_batch
from torch import Tensor, nn

from compiled_ddp import EagerDDP, ParityReport, compile_ddp, verify_parity
from compiled_ddp.__main__ import main
from compiled_ddp.step.synchronised import SynchronisedBackward
from compiled_ddp.tools.command_line.target import find_function
from compiled_ddp.tools.parity.verify import ParameterDifference
from compiled_ddp.wrapper import DataParallelWrapper
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
ROOT = Path(__file__).resolve().parent.parent


def wrap(name: str, **options: Any) -> Any:
    if name == "EagerDDP":
        return functools.partial(EagerDDP, **options)
    return functools.partial(compile_ddp, backend="aot_eager", **options)


def _token_model(rank: int, name: str) -> ParityReport:
    model = TokenModel()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    report = verify_parity(model, lambda step: token_batch(10 * step + rank), steps=3, wrap=wrap(name))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal_on_all_ranks(report)
    return report


@pytest.mark.parametrize("name", BOTH)
def test_parity_of_a_model_that_returns_its_loss(ranks2: RankPool, name: str) -> None:
    report, _ = ranks2.run(_token_model, name)
    assert [d.name for d in report.differences] == [n for n, _ in TokenModel().named_parameters()]
    assert report.within(1e-5) and report.largest >= 0
    assert report.steps == 3 and report.world_size == 2
    assert "token.weight" in str(report) and "[32, 16]" in str(report)


class Normalised(nn.Module):
    """Buffers, dropout, a bias whose gradient is zero but for rounding, and one parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
        return {"logits": scale * self.head(self.dropout(self.norm(self.first(x) * self.frozen)))}


def _with_a_loss(rank: int, name: str) -> list[ParityReport]:
    inputs = {"x": row_batch(rank), "scale": 2.0}
    targets = torch.tensor([0, 1, 1, 0])
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    return [
        verify_parity(
            Normalised(),
            inputs,
            loss=lambda output, given: F.cross_entropy(output["logits"], targets) * given["scale"],
            wrap=wrap(name),
            optimizer=optimizer,
        )
        for optimizer in (adam, None)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BOTH)
def test_parity_with_a_loss_of_the_users_buffers_dropout_and_unused_parameters(ranks2: RankPool, name: str) -> None:
    for report in ranks2.run(_with_a_loss, name)[0]:
        assert report.within(1e-4), str(report)
        unused = next(d for d in report.differences if d.name == "unused")
        assert (unused.absolute, unused.relative) == (0.0, 0.0)
        assert "frozen" not in [d.name for d in report.differences]


def _wrong(rank: int, name: str) -> list[ParityReport]:
    """Wrong by a tenth, and without a gradient, on the last rank alone; proofs are off, so that nothing raises."""
    original = SynchronisedBackward.write_back

    def planted(backward: SynchronisedBackward, leave: float) -> set[int]:
        written = original(backward)
        parameter = backward._parameters.tensors[0]
        if rank == 1 and leave:
            parameter.grad.mul_(leave)
        elif rank == 1:
            parameter.grad = None
        return written

    reports = []
    for leave in (1.1, math.nan, 0.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SynchronisedBackward, "write_back", lambda backward, leave=leave: planted(backward, leave))
            reports.append(
                verify_parity(Mlp(), row_batch(rank), 2, loss=lambda y, _: y.sum(), wrap=wrap(name, verify="off"))
            )
    return reports


@pytest.mark.parametrize("name", BOTH)
def test_a_wrong_gradient_on_one_rank_is_in_every_ranks_report(ranks2: RankPool, name: str) -> None:
    for by_a_tenth, not_a_number, without in ranks2.run(_wrong, name):
        first, *others = by_a_tenth.differences
        assert first.name == "head.weight" and first.relative == pytest.approx(0.1, rel=1e-3)
        assert all(other.relative < 1e-5 for other in others)
        assert not by_a_tenth.within(1e-2) and by_a_tenth.within(0.11)
        assert math.isnan(not_a_number.largest) and not not_a_number.within(1e9)
        assert without.largest == math.inf and not without.within(1e9)


def _twice_on_every_rank(rank: int, name: str) -> list[float]:
    def write_back_twice(backward: SynchronisedBackward) -> set[int]:
        written = original(backward)
        for parameter in backward._parameters.tensors:
            parameter.grad.mul_(2.0)
        return written

    original = SynchronisedBackward.write_back
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SynchronisedBackward, "write_back", write_back_twice)
        report = verify_parity(Mlp(), row_batch(rank), 1, loss=lambda y, _: y.sum(), wrap=wrap(name, verify="off"))
    return [difference.relative for difference in report.differences]


@pytest.mark.parametrize("name", BOTH)
def test_what_is_wrong_and_equal_on_all_ranks_is_seen_by_parity_where_the_proof_is_off(
    ranks2: RankPool, name: str
) -> None:
    for relative in ranks2.run(_twice_on_every_rank, name):
        assert relative == pytest.approx([1.0] * 6, rel=1e-4)


class Returning(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.mlp(x))


def _kinds_of_loss(rank: int) -> None:
    kinds = (lambda y: y.sum(), lambda y: {"loss": y.sum()}, lambda y: SimpleNamespace(loss=y.sum()))
    for make in kinds:
        assert verify_parity(Returning(make), (row_batch(rank),), 1, wrap=EagerDDP).within(1e-5)
    for make in (lambda y: y, lambda y: {"logits": y}, lambda y: (y.sum(), y)):
        with pytest.raises(TypeError, match="pass loss="):
            verify_parity(Returning(make), row_batch(rank), 1, wrap=EagerDDP)
    with pytest.raises(ValueError, match="steps must be positive"):
        verify_parity(Mlp(), row_batch(rank), 0)


def test_the_loss_is_found_in_the_output_or_asked_for(ranks2: RankPool) -> None:
    ranks2.run(_kinds_of_loss)


# What one rank passes wrongly, and what every rank's message says of it.
WRONG = {
    "model": ({"model": 3}, TypeError, "verify_parity takes a torch.nn.Module, found int"),
    "steps in words": ({"steps": "3"}, TypeError, "steps must be a number of steps, found '3'"),
    "a truth value": ({"steps": True}, TypeError, "steps must be a number of steps, found True"),
    "no steps": ({"steps": 0}, ValueError, "steps must be positive, found 0"),
    "more steps": ({"steps": 2}, RuntimeError, "steps is "),
    "loss": ({"loss": 3}, TypeError, r"loss must be a function of (output, inputs), found 3"),
    "wrap": ({"wrap": None}, TypeError, r"wrap must be a function of (model), found None"),
    "optimizer": ({"optimizer": "SGD"}, TypeError, r"optimizer must be a function of (parameters), found 'SGD'"),
    "no optimizer": ({"optimizer": lambda _: None}, TypeError, "optimizer must return one with a step(), found None"),
    "batch": ({"batch": "rows"}, TypeError, "TypeError: "),
    "a batch that raises": ({"batch": lambda step: {}[step]}, KeyError, "0"),
    "no loss": ({"loss": None}, TypeError, "pass loss="),
    "a loss that raises": ({"loss": lambda output, _: output.lost}, AttributeError, "no attribute 'lost'"),
}


def _wrong_on_one_rank(rank: int, name: str) -> str:
    wrong, error, _ = WRONG[name]
    arguments = {"model": Mlp(), "batch": row_batch(rank), "steps": 1, "loss": lambda y, _: y.sum(), "wrap": EagerDDP}
    good = dict(arguments)
    if rank == 1:
        arguments.update(wrong)
    begun = time.monotonic()
    with pytest.raises(error if rank == 1 else RuntimeError) as caught:
        verify_parity(**arguments)
    assert time.monotonic() - begun < 10.0, "it waited for the group's timeout"
    assert verify_parity(**good).within(1e-5)
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_on_one_rank_is_an_error_on_every_rank(ranks2: RankPool, name: str) -> None:
    for message in ranks2.run(_wrong_on_one_rank, name):
        assert WRONG[name][2].removeprefix("TypeError: ") in message


class WithAWrapperInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = EagerDDP(Mlp()), nn.Linear(3, 1)


def _wrapped_already(rank: int) -> None:
    model = WithAWrapperInside()
    with pytest.raises(ValueError, match=r"the model has a wrapper inside, part: verify models, or parts of them, bef"):
        verify_parity(model, row_batch(rank), 1)
    with pytest.raises(ValueError, match=r"the model is wrapped, by EagerDDP: verify models"):
        verify_parity(model.part, row_batch(rank), 1)


def test_a_model_that_is_wrapped_or_has_a_wrapper_inside_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_wrapped_already)


def _everything_given_back(rank: int) -> None:
    made: list[DataParallelWrapper] = []

    def keep(model: nn.Module) -> DataParallelWrapper:
        made.append(EagerDDP(model))
        return made[-1]

    verify_parity(Mlp(), row_batch(rank), 1, loss=lambda y, _: y.sum(), wrap=keep)
    with pytest.raises(RuntimeError, match="unwrapped"):
        made[0](row_batch(rank))
    dist.barrier()


def test_the_wrapper_is_given_back(ranks2: RankPool) -> None:
    ranks2.run(_everything_given_back)


def test_a_report_that_holds_nan_has_no_smaller_largest() -> None:
    rows = [ParameterDifference("a", (1,), math.nan, math.nan, 0), ParameterDifference("b", (1,), 1.0, 1.0, 0)]
    assert math.isnan(ParityReport(tuple(rows), 1, 2).largest)
    assert not ParityReport(tuple(rows), 1, 2).within(math.inf)


# ---- the command line ------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.randn(3, 4), lambda output, _: output.square().mean()
"""


@pytest.mark.slow
def test_the_command_starts_its_own_ranks_and_exits_by_the_tolerance(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--ranks", "3", "--steps", "2", "--tolerance", "-1", "--wrapper", "EagerDDP"]
    command = [sys.executable, "-m", "compiled_ddp", "verify", f"{script}:make", *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
    assert "0.weight" in done.stdout and "(steps: 2, ranks: 3)" in done.stdout, done.stderr
    assert done.returncode == 1, "the largest difference is above the tolerance"


def _main(rank: int, arguments: list[str], port: int) -> tuple[int, str]:
    """The exit status and the output of the command on a rank that torchrun has started."""
    output = io.StringIO()
    with torchrun.environment(rank, 2, port), contextlib.redirect_stdout(output):
        return main(arguments), output.getvalue()


def test_the_command_joins_the_ranks_of_torchrun(ranks2: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*options: str) -> list[tuple[int, str]]:
        arguments = ["verify", f"{script}:make", "--wrapper", "EagerDDP", *options]
        return ranks2.run(_main, arguments, torchrun.free_port(), process_group=False)

    (status, printed), other = run("--steps", "1")
    assert status == 0 and "(steps: 1, ranks: 2)" in printed
    assert other == (0, ""), "one rank prints"
    assert [status for status, _ in run("--tolerance", "-1")] == [1, 1]


def test_the_command_says_how_to_name_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "script.py"])
    assert caught.value.code == 2
    assert "SCRIPT:FUNCTION" in capsys.readouterr().err


def test_the_command_says_that_there_is_no_such_function(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("make = None")
    with pytest.raises(ValueError, match=r"script.py has no function 'make': name one that returns \(model, batch\)"):
        find_function(f"{script}:make", returns="(model, batch) or these and a loss")
