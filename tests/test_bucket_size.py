"""Where the user gives no size of buckets: what they are planned for, the same on every rank and in the next run."""

import json
import math
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from calibrations import calibration
from torch import nn

from compiled_ddp import Calibration, Compute, EagerDDP, Link, compile_ddp
from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.planners import OptimalBuckets
from compiled_ddp.ranks import kept_calibration
from compiled_ddp.ranks.kept_calibration import calibration_for, pin
from ranks import RankPool


def _planned_for(rank: int) -> list[str]:
    """Measured here, and known from then on; all of it is compared by ranks where the model has changed."""
    with mock.patch.dict(kept_calibration._of_this_process, clear=True):
        wrappers = [wrap(nn.Linear(2, 2)) for wrap in (compile_ddp, EagerDDP)]
    return [str(wrapper._settings.options.calibration) for wrapper in wrappers] + [str(wrappers[0].explain())]


def test_every_rank_plans_for_the_same_link_and_explain_tells_it(ranks3: RankPool) -> None:
    told = ranks3.run(_planned_for)
    assert told[0] == told[1] == told[2]
    assert told[0][0] == told[0][1]
    assert "ends earliest, where an all-reduce takes " in told[0][2]


def _measured_without_need(rank: int) -> list[str]:
    with mock.patch.object(kept_calibration, "measure", side_effect=AssertionError("measured")):
        wrappers = [EagerDDP(nn.Linear(2, 2), bucket_cap_mb=3), EagerDDP(nn.Linear(2, 2), calibration=calibration())]
        return [str(wrapper.explain()) for wrapper in wrappers]


def test_a_given_size_and_a_given_calibration_need_no_measurement(ranks2: RankPool) -> None:
    for given, known in ranks2.run(_measured_without_need):
        assert "closes at 3 MiB; " in given
        assert "takes 122 us + bytes / 1,074 MB/s" in known


def _of_other_ranks(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        EagerDDP(nn.Linear(2, 2), calibration=calibration(world_size=64))
    return [str(each.message) for each in caught]


def test_a_calibration_of_another_number_of_ranks_is_warned_of_once(ranks2: RankPool) -> None:
    told, others = ranks2.run(_of_other_ranks)
    assert len(told) == 1 and "measured with 64 ranks, and there are 2" in told[0]
    assert not others


def _alone(rank: int) -> str:
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    return str(EagerDDP(nn.Linear(2, 2), process_group=alone).explain())


def test_in_a_group_of_one_nothing_is_sent(ranks2: RankPool) -> None:
    for told in ranks2.run(_alone):
        assert "there is no other rank" in told


# ---- what is kept ----------------------------------------------------------------------------------------------------


def _link_of(ddp: Any) -> tuple[float, float]:
    link = ddp._settings.options.calibration.link
    return link.startup_seconds, link.bytes_per_second


def _starts(rank: int, folder: Path, measured: list[Calibration]) -> list[tuple[float, float]]:
    """What jobs that begin one after the other plan for, of which each measures this."""
    found = []
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(folder / str(rank))}):
        for each in measured:
            with (
                mock.patch.dict(kept_calibration._of_this_process, clear=True),
                mock.patch.object(kept_calibration, "measure", return_value=each),
            ):
                found += [_link_of(EagerDDP(nn.Linear(2, 2))), _link_of(EagerDDP(nn.Linear(2, 2)))]
    return found


def test_what_was_measured_is_taken_again_while_a_new_measurement_is_near_it(ranks2: RankPool, tmp_path: Path) -> None:
    """So the plan, which stands in the keys of compiled graphs, is that of the run before."""
    first, near, far = (calibration(bytes_per_second=speed) for speed in (1e9, 1.6e9, 4e9))
    for found in ranks2.run(_starts, tmp_path, [first, near, far, far]):
        assert found == [(1e-4, 1e9)] * 4 + [(1e-4, 4e9)] * 4


def _measured_here(rank: int, folder: Path) -> list[tuple[float, float]]:
    """Rank 1 has measured something else, and knows of nothing."""
    own = calibration(bytes_per_second=1e9 * (1 + rank))
    with mock.patch.dict(kept_calibration._of_this_process, clear=True):
        return _starts(rank, folder, [own])


def test_rank_0_knows_for_all_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(_measured_here, tmp_path) == [[(1e-4, 1e9)] * 2] * 2


def _pinned(rank: int, folder: Path) -> tuple[float, float]:
    with (
        mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(folder)}),
        mock.patch.dict(kept_calibration._of_this_process, clear=True),
        mock.patch.object(kept_calibration, "measure", side_effect=AssertionError("measured")),
    ):
        return _link_of(EagerDDP(nn.Linear(2, 2)))


def test_what_a_folder_was_filled_for_is_taken_unmeasured(ranks2: RankPool, tmp_path: Path) -> None:
    pin(calibration(bytes_per_second=3e9), tmp_path)
    pin(calibration(bytes_per_second=7e9, world_size=4), tmp_path)
    assert ranks2.run(_pinned, tmp_path) == [(1e-4, 3e9)] * 2


def recorded() -> list[Calibration]:
    """Twenty measured in a row on one busy machine, two ranks on loopback, Intel Xeon, 2026-12-01, 0.5 s each."""
    numbers = json.loads(Path(__file__).with_name("recorded_calibrations.json").read_text())
    return [Calibration("gloo", 2, 1, "cpu", Link(*each[:5]), Compute(*each[5:])) for each in numbers]


def test_twenty_starts_on_one_machine_have_one_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 19 of 20 at least, whichever of them is the first."""
    gradients = [GradientSpec.of(n, torch.empty(250_000, device="meta")) for n in range(40)]
    for first in range(len(recorded())):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / str(first)))
        starts = recorded()[first:] + recorded()[:first]
        plans = Counter(len(OptimalBuckets.of(chosen(each)).fill(gradients)) for each in starts)
        assert max(plans.values()) >= 19, (first, plans)


class _Ranks:
    """A communicator of two ranks, as the first one of them knows it."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.ranks, self.group = mock.Mock(ranks=(0, 1)), mock.Mock()

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """The others get what this one has."""


def chosen(measured: Calibration) -> Calibration:
    """What rank 0 of a new process takes."""
    with (
        mock.patch.dict(kept_calibration._of_this_process, clear=True),
        mock.patch.object(kept_calibration, "measure", return_value=measured),
        mock.patch.object(kept_calibration, "backend_of", return_value="gloo"),
    ):
        return calibration_for(_Ranks(), torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", "[]", "[1]", '[{"pinned": false}]', '{"pinned": true}'])
def test_a_file_that_cannot_be_read_is_written_over(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    file = tmp_path / "compiled_ddp" / "calibrations.json"
    file.parent.mkdir()
    file.write_text(content)
    assert chosen(calibration()).link == calibration().link
    assert len(json.loads(file.read_text())) == 1


def test_a_folder_that_cannot_be_written_only_means_another_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiled_ddp").write_text("no folder")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for speed in (1e9, 1.5e9):
        assert chosen(calibration(bytes_per_second=speed)).link.bytes_per_second == speed


def test_another_link_or_device_has_an_entry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    here, elsewhere = calibration(), replace(calibration(bytes_per_second=1.5e9), hosts=2)
    assert chosen(here).link == here.link
    assert chosen(elsewhere).link == elsewhere.link
    assert chosen(replace(here, link=replace(here.link, bytes_per_second=1.2e9))).link == here.link
    assert math.isclose(chosen(elsewhere).link.bytes_per_second, 1.5e9)
