"""`step.profile()`: when each bucket of a whole step is launched, awaited and there, on ranks of gloo."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_whole_step import batch, both
from torch import nn

from compiled_ddp.planning.step_model import GATHERED_LATER
from ranks import RankPool

MODES: dict[str, dict[str, Any]] = {
    "all-reduced": {},
    "sharded": {"shard_optimizer": True},
    "pipelined": {"shard_optimizer": True, "pipeline_updates": True},
    "deferred": {"pipeline_updates": True},
}
EACH_ALONE = 1e-5  # MiB: a bucket for each gradient


def launched(recorded: Any) -> list[tuple[str, int]]:
    return [(each.kind, each.position) for each in recorded.transfers]


def expected_launches(mode: str, buckets: int) -> list[tuple[str, int]]:
    if mode == "all-reduced":
        return [("all-reduce", position) for position in range(buckets)]
    scattered = [("scatter", position) for position in range(1, buckets)]
    gathered = [("gather", position) for position in range(1, buckets)]
    return [("all-reduce", 0), *scattered, *(gathered[::-1] if mode in GATHERED_LATER else gathered)]


def _profile(rank: int, mode: str, backend: str) -> None:
    step, loop = both("AdamW", bucket_cap_mb=EACH_ALONE, backend=backend, **MODES[mode])
    for n in range(2):
        torch.testing.assert_close(step(*batch(rank, n)), loop.step(*batch(rank, n)))
    recorder = step.profile(steps=4)
    for n in range(2, 8):
        torch.testing.assert_close(step(*batch(rank, n)), loop.step(*batch(rank, n)))
        assert recorder.remaining == max(0, 5 - n)
    torch.testing.assert_close(dict(step.model.named_parameters()), dict(loop.model.named_parameters()))
    assert len(recorder.recorded) == 4, "and nothing is recorded behind that"

    expected = expected_launches(mode, len(step._agreed.plan.buckets))
    for recorded in recorder.recorded[1:]:
        assert sorted(launched(recorded)) == sorted(expected)
        for kind in ("scatter", "gather"):
            of_kind = [each for each in launched(recorded) if each[0] == kind]
            assert of_kind == [each for each in expected if each[0] == kind]
        for each in recorded.transfers:
            times = each.times
            assert recorded.began <= times.launched <= times.arrived and times.launched <= recorded.ended
            if mode not in GATHERED_LATER or each.kind != "gather":
                assert times.launched <= times.wait_began <= times.wait_ended <= recorded.ended
        left = [(each.kind, each.position) for each in recorded.left]
        assert left == ([each for each in launched(recorded) if each[0] == "gather"] if mode in GATHERED_LATER else [])
        assert all(recorded.began <= each.times.wait_began <= recorded.ended for each in recorded.left)
    told = step.explain()
    assert "Measured on this rank, the median of 3: a step of" in told
    assert "Predicted" not in told, "buckets of a size measure no link"


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        *((mode, "aot_eager") for mode in MODES),
        pytest.param("pipelined", "inductor", marks=pytest.mark.slow),
        ("deferred", "inductor"),
    ],
)
def test_each_transfer_is_seen_in_its_order_and_steps_stay_what_they_are(
    ranks2: RankPool, mode: str, backend: str
) -> None:
    ranks2.run(_profile, mode, backend)


def _draws(rank: int, mode: str, folder: str) -> None:
    step, _ = both("momentum", **MODES[mode])
    with pytest.raises(RuntimeError, match="nothing to show yet"):
        step.timeline(Path(folder) / "step.json")
    step(*batch(rank, 0))
    assert "Predicted: a step of" in step.explain(), "planned buckets have measured the link"
    step.profile(2)
    for n in range(3):
        step(*batch(rank, n))
        nn.utils.parameters_to_vector(step.model.parameters())  # reads what is under way
    path = Path(folder) / f"{mode} {rank}.json"
    step.timeline(path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    of_buckets = {"all-reduce"} if mode == "all-reduced" else {"scatter", "gather"}
    sent = {
        process: {
            event["name"].partition(" of ")[0] for event in events if (event["pid"], event["cat"]) == (process, "sends")
        }
        for process in (1, 101)  # predicted; measured, with the riders
    }
    measured = step._times().measured
    assert sent[1] == of_buckets and {each.kind for each in measured.transfers} == of_buckets | {"all-reduce"}
    assert sent[101] and sent[101] <= of_buckets | {"all-reduce"}, (
        "one that ends as another does has no time of the link"
    )
    assert {event["name"] for event in events if event["cat"] == "computes"} > {"step"}
    for wrong, error in ((1, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="profile"):
            step.profile(wrong)


@pytest.mark.parametrize("mode", MODES)
def test_a_timeline_has_what_is_predicted_and_what_was_measured(ranks2: RankPool, mode: str, tmp_path: Path) -> None:
    ranks2.run(_draws, mode, str(tmp_path))


def _fails(rank: int) -> None:
    step, _ = both("SGD", **MODES["pipelined"])
    step(*batch(rank, 0))
    recorder = step.profile(2)
    with pytest.raises((RuntimeError, ValueError)):  # on rank 0 what its loss raises
        step(*batch(rank, 1, rows=5 if rank else 1))  # a norm of one row
    assert recorder.remaining == 2 and not recorder.recorded
    for n in range(3):
        step(*batch(rank, n))
    assert recorder.remaining == 0 and len(recorder.recorded) == 2


def test_a_step_that_raises_is_not_recorded(ranks2: RankPool) -> None:
    ranks2.run(_fails)
