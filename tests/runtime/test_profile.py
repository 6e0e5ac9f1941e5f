"""`profile()`: when each bucket of a backward was launched, awaited and there, on ranks of gloo."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TokenModel, assert_step, expected_mean, token_batch, wrappers
from torch import Tensor, nn

from compiled_ddp import EagerDDP, comm_hooks, compile_ddp
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import Compute, Link
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
CALIBRATION = Calibration("gloo", 2, 1, "cpu", Link(1e-4, 1e9), Compute(1e10, 1e10))


def make(wrapper: str, **options: Any) -> nn.Module:
    if wrapper == "inductor":
        return compile_ddp(TokenModel(), bucket_cap_mb=0.002, first_bucket_mb=0.001, **options)
    return wrappers([wrapper])[wrapper](TokenModel(), **options)


def step(ddp: nn.Module, rank: int) -> None:
    ddp.zero_grad()
    ddp(*token_batch(rank)).backward()


def hooks_on(module: nn.Module) -> int:
    """That torch calls after a gradient is accumulated."""
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


def _profile(rank: int, wrapper: str) -> None:
    ddp = make(wrapper, calibration=CALIBRATION)
    for _ in range(3):
        step(ddp, rank)
    assert ddp.explain().measured is None
    before = hooks_on(ddp.module)
    recorder = ddp.profile(steps=4)
    assert recorder.remaining == 4
    for _ in range(3):  # local ones are no such steps
        with ddp.no_sync():
            step(ddp, rank)
    assert recorder.remaining == 4 and len(recorder.local_seconds) == 3
    for remaining in (3, 2, 1, 0):
        assert_step(ddp, lambda module: module(*token_batch(rank)))
        assert recorder.remaining == remaining
    assert ddp._runtime.communicator.recorder is None and hooks_on(ddp.module) == before, "nothing is left installed"
    step(ddp, rank)
    assert len(recorder.recorded) == 4 and len(recorder.local_seconds) == 3
    assert ddp._runtime.number == 8

    explanation = ddp.explain()
    measured = explanation.measured
    assert measured is not None and measured.backwards == 3
    assert len(measured.buckets) == len(ddp.plan.buckets) > 2
    launches = [bucket.launch for bucket in measured.buckets]
    assert launches == sorted(launches) and launches[0] >= 0
    for bucket in measured.buckets:
        assert bucket.end_is == "completion", "gloo tells it, in graphs too"
        assert bucket.launch <= bucket.wait[0] <= bucket.wait[1] <= measured.seconds
        assert bucket.launch <= bucket.end <= bucket.wait[1]
    assert 0 <= measured.waiting_seconds <= measured.seconds
    assert measured.local_seconds is not None
    assert "measured launch" in str(explanation) and "by difference to local ones" in str(explanation)
    assert json.loads(explanation.to_json())["measured"]["backwards"] == 3
    assert explanation.predicted is not None
    assert len(explanation.predicted.assumed) == (0 if wrapper != "EagerDDP" else len(ddp.plan.buckets))


@pytest.mark.parametrize("wrapper", [*BOTH, pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_profile_has_the_launch_the_wait_and_the_end_of_every_bucket(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_profile, wrapper, timeout_seconds=400, collective_timeout_seconds=120)


def _predict_without_profile(rank: int, path: str) -> tuple[str, bool]:
    ddp = compile_ddp(TokenModel(), backend="aot_eager", calibration=CALIBRATION)
    with pytest.raises(RuntimeError, match="timeline"):
        ddp.timeline(Path(path) / f"{rank}.json")
    step(ddp, rank)
    ddp.timeline(Path(path) / f"{rank}.json")
    explanation = ddp.explain()
    transfers = explanation.predicted.prediction.transfers
    ready = [transfer.ready for transfer in transfers]
    assert len(ready) == len(ddp.plan.buckets) and ready == sorted(ready) and ready[0] > 0
    names = {event["name"] for event in json.loads((Path(path) / f"{rank}.json").read_text())["traceEvents"]}
    return str(explanation), any(name.startswith("bucket 0 (head.bias") for name in names)


def test_a_graphs_backward_is_predicted_alike_on_all_ranks_as_soon_as_there_is_a_plan(
    ranks2: RankPool, tmp_path: Path
) -> None:
    (text, named), other = ranks2.run(_predict_without_profile, str(tmp_path))
    assert (text, named) == other
    assert "Predicted: a backward of" in text and named


def _on_one_rank(rank: int) -> int:
    ddp = EagerDDP(TokenModel(), bucket_cap_mb=0.002)
    if rank == 1:
        ddp.profile(2)
    for _ in range(3):
        assert_step(ddp, lambda module: module(*token_batch(rank)))
    return 0 if ddp.explain().measured is None else ddp.explain().measured.backwards


def test_one_rank_may_profile_alone_from_its_first_step_on(ranks2: RankPool) -> None:
    assert ranks2.run(_on_one_rank) == [0, 1]


def _by_comm_hook(rank: int, wrapper: str) -> set[str]:
    ddp = make(wrapper, comm_hook=comm_hooks.bf16_compress)
    for _ in range(2):
        step(ddp, rank)
    ddp.profile(2)
    for _ in range(2):
        step(ddp, rank)
    measured = ddp.explain().measured
    for bucket in measured.buckets:
        assert bucket.launch <= bucket.wait[0] <= bucket.wait[1]
    assert ddp.explain().predicted is None
    return {bucket.end_is for bucket in measured.buckets}


@pytest.mark.parametrize(("wrapper", "end_is"), [("compile_ddp", "completion"), ("EagerDDP", "wait")])
def test_buckets_of_a_communication_hook_are_measured_too(ranks2: RankPool, wrapper: str, end_is: str) -> None:
    """The ends of what hooks launch for it are those of the waits, and `end_is` says so."""
    for ends in ranks2.run(_by_comm_hook, wrapper):
        assert end_is in ends, ends


class Fails(nn.Module):
    """Whose gradient raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.armed:
            hidden.register_hook(_raise)
        return self.head(hidden).square().sum()


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError("planted")


def _broken(rank: int) -> None:
    ddp = EagerDDP(Fails(), bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
    x = torch.full((2, 4), 1.0 + rank)
    for _ in range(2):
        ddp(x).backward()
    recorder = ddp.profile(3)
    ddp.module.armed = True
    with pytest.raises(ZeroDivisionError):
        ddp(x).backward()
    ddp.module.armed = False
    ddp.abandon_backward()
    assert recorder.remaining == 3, "it has not ended"
    for remaining in (2, 1, 0):
        ddp.zero_grad()
        ddp(x).backward()
        assert recorder.remaining == remaining
    for backward in recorder.recorded:
        assert len(backward.buckets) == len(ddp.plan.buckets)


def test_a_backward_that_an_exception_ends_is_not_recorded(ranks2: RankPool) -> None:
    ranks2.run(_broken)


def _beside_torchs_profiler(rank: int, wrapper: str) -> list[str]:
    ddp = make(wrapper)
    for _ in range(2):
        step(ddp, rank)
    ddp.profile(2)
    step(ddp, rank)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(ddp, rank)
    assert ddp.explain().measured is not None
    return [event.name for event in profile.events() if event.name.startswith("compiled_ddp: launch bucket")]


@pytest.mark.parametrize("wrapper", BOTH)
def test_torchs_profiler_names_the_buckets_meanwhile(ranks2: RankPool, wrapper: str) -> None:
    for names in ranks2.run(_beside_torchs_profiler, wrapper):
        assert len(names) > 2 and any("head.bias" in name for name in names)


def _accumulates(rank: int, wrapper: str) -> None:
    """What was accumulated under no_sync goes into a recorded backward as into any other."""
    ddp = make(wrapper)
    batch = token_batch(rank)
    step(ddp, rank)
    recorder = ddp.profile(2)
    for _ in range(2):
        ddp.zero_grad()
        expected = expected_mean(ddp.module, lambda module: 2 * module(*batch))
        with ddp.no_sync():
            ddp(*batch).backward()
        ddp(*batch).backward()
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-4, atol=1e-6)
    assert len(recorder.local_seconds) == 2 and recorder.remaining == 0


@pytest.mark.parametrize("wrapper", BOTH)
def test_accumulation_is_right_and_measured(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_accumulates, wrapper)


def _wrong(rank: int) -> None:
    ddp = EagerDDP(nn.Linear(2, 2))
    for steps in ("10", 2.0, True, None, [3]):
        with pytest.raises(TypeError, match=r"steps.*whole number"):
            ddp.profile(steps=steps)
    for steps in (1, 0, -3):
        with pytest.raises(ValueError, match=rf"steps.*at least 2.*{steps}"):
            ddp.profile(steps=steps)
    assert ddp._runtime.communicator.recorder is None
    step_of: Callable[[], None] = ddp(torch.ones(1, 2)).sum().backward
    step_of()
    with pytest.raises(ValueError, match=r"path.*step\.pdf"):
        ddp.timeline("step.pdf")
    ddp.unwrap()
    with pytest.raises(RuntimeError):
        ddp.profile()
    with pytest.raises(RuntimeError):
        ddp.timeline("step.json")


def test_wrong_arguments_are_refused_by_name(ranks2: RankPool) -> None:
    ranks2.run(_wrong)
