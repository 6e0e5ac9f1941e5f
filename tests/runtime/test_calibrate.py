"""`calibrate()`: every rank gets the same, whatever the process has set up, and each slip is an error on every rank."""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from compiled_ddp import Calibration, calibrate
from compiled_ddp.ranks import calibration
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.rank_group import RankGroup
from ranks import RankPool

SECONDS = 0.1


def _calibrate(rank: int) -> Calibration:
    return calibrate(seconds=SECONDS)


def test_every_rank_gets_the_same(ranks2: RankPool) -> None:
    first, other = ranks2.run(_calibrate)
    assert first == other
    assert (first.backend, first.world_size, first.hosts, first.device) == ("gloo", 2, 1, "cpu")
    link, compute = first.link, first.compute
    assert link.startup_seconds >= 0 and link.latency_seconds >= 0 and link.host_seconds > 0
    assert link.startup_seconds + link.latency_seconds > 0 and link.bytes_per_second > 0
    assert 0 < compute.flops_per_second < math.inf and 0 < compute.bytes_per_second < math.inf
    assert {(sample.nbytes, sample.in_flight) for sample in first.samples} >= {
        (nbytes, k) for nbytes in (4096, 16384, 65536, 262144) for k in (1, 4)
    }
    assert all(sample.seconds > 0 for sample in first.samples)
    assert first.measured.endswith(f"UTC, torch {torch.__version__}")


def _in_a_changed_process(rank: int) -> list[Any]:
    before, threads = torch.default_generator.get_state(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            in_inference = calibrate(seconds=SECONDS)
        with torch.no_grad(), torch.autocast("cpu"):
            without_grad = calibrate(device="cpu", seconds=SECONDS)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.default_generator.get_state(), before) and torch.get_num_threads() == threads
    return [in_inference, without_grad]


def test_defaults_and_modes_of_the_process_are_no_matter(ranks2: RankPool) -> None:
    first, other = ranks2.run(_in_a_changed_process)
    assert first == other


def _alone(rank: int) -> tuple[Calibration, Calibration]:
    own = [dist.new_group([each]) for each in range(2)][rank]
    found = calibrate(own, seconds=SECONDS)
    return found, Calibration.from_json(found.to_json())


def test_the_link_of_one_rank_alone_is_infinitely_fast(ranks2: RankPool) -> None:
    for found, read in ranks2.run(_alone):
        assert found.world_size == 1 and found.samples == () and found.residual == 0
        assert found.link.seconds(10**12) == 0 and found.link.bytes_per_second == math.inf
        assert found.compute.flops_per_second > 0 and read == found


class _SlowRank:
    """On which time goes by with what it sends: 1 us for each KiB on rank 0, and 3 on rank 1."""

    def __init__(self, rank: int) -> None:
        self._now, self._seconds_per_byte = 0.0, (1 + 2 * rank) * 1e-9

    def now(self) -> float:
        return self._now

    def nbytes(self, pieces: Sequence[torch.Tensor]) -> int:
        return sum(piece.nbytes for piece in pieces)

    def send(self, pieces: Sequence[torch.Tensor]) -> float:
        seconds = self.nbytes(pieces) * self._seconds_per_byte
        self._now += seconds
        return seconds


def _on_a_slow_link(rank: int, *seconds: float) -> list[Calibration]:
    communicator, this = Communicator(RankGroup(None)), _SlowRank(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration._Computing, "run", lambda *_: None)
        patch.setattr(calibration._Computing, "best", lambda _: (1.0 + rank, 1.0))
        patch.setattr(calibration._Rounds, "_seconds", lambda _, pieces: this.send(pieces))
        patch.setattr(calibration._Rounds, "_host_seconds", lambda _, piece: piece.nbytes * 1e-9 * (1 + rank))
        patch.setattr(calibration._Rounds, "_processor_seconds", lambda _, each: this.nbytes(each) * 1e-9 * (1 + rank))
        patch.setattr(calibration.time, "perf_counter", this.now)
        return [calibration.measure(communicator, torch.device("cpu"), seconds=each) for each in seconds]


def test_ranks_agree_on_the_slowest_and_on_what_there_is_time_for(ranks2: RankPool) -> None:
    first, other = ranks2.run(_on_a_slow_link, 1e-4, 0.2, 0.5)
    assert first == other
    for found in first:
        assert found.link.host_seconds == pytest.approx(4096 * 2e-9) and found.residual < 1e-6
        assert found.link.host_seconds_per_byte == pytest.approx(2e-9)
        assert found.link.bytes_per_second == pytest.approx(1e9 / 3)
        assert found.compute.flops_per_second == 512**3
    assert [max(sample.nbytes for sample in found.samples) for found in first] == [2**18, 2**20, 2**22]


def _fails_half_way(rank: int) -> tuple[str, bool]:
    made = list[Communicator]()

    def fail(communicator: Communicator, *_: object, **__: object) -> None:
        made.append(communicator)
        raise RuntimeError("no more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.tools.calibration.calibrate.measure", fail)
        with pytest.raises(RuntimeError) as raised:
            calibrate()
    return str(raised.value), made[0].closed


def test_no_process_group_is_left_behind(ranks2: RankPool) -> None:
    assert ranks2.run(_fails_half_way) == [("no more", True)] * 2


def test_one_process_tells_how_fast_it_computes() -> None:
    found = calibration.compute_here(torch.device("cpu"), 0.0)
    assert 0 < found.flops_per_second < math.inf and 0 < found.bytes_per_second < math.inf


def _refusals(rank: int) -> list[str]:
    told = []
    for arguments in (
        {"seconds": 0.1 * (1 + rank)},
        {"seconds": 0 if rank else 0.1},
        {"seconds": "long"},
        {"seconds": math.inf},
        {"device": "meta"},
        {"device": 0},
        {"process_group": "gloo"},
        {"second": 1},
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
            calibrate(**arguments)
        told.append(f"{raised.type.__name__}: {raised.value}")
    return told


def test_a_slip_is_an_error_on_every_rank(ranks2: RankPool) -> None:
    first, other = ranks2.run(_refusals)
    assert (
        first[0] == other[0] and "nothing was measured, on any rank" in first[0] and "seconds is 0.2 here" in first[0]
    )
    assert other[1] == "ValueError: seconds must be positive and finite, found 0." and other[1] in first[1]
    assert first[2].startswith("TypeError: seconds must be a number, found 'long'")
    assert first[3].startswith("ValueError: seconds must be positive and finite, found inf")
    assert first[4].startswith("ValueError: device must be one whose tensors the process group (cpu:gloo,cuda:gloo)")
    assert first[5].startswith("TypeError: device must be a torch.device, a str or None, found 0")
    assert first[6].startswith("TypeError: process_group must be a ProcessGroup")
    assert first[7].endswith("Did you mean 'seconds'?")


def _one_stays_away(rank: int) -> str | None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank:
        return None
    with pytest.raises(RuntimeError) as raised:
        calibrate(group, seconds=SECONDS)
    return str(raised.value)


def test_a_rank_that_does_not_come_is_named(ranks2: RankPool) -> None:
    told, _ = ranks2.run(_one_stays_away)
    assert "rank 1" in told and "to compare what ranks want to measure" in told


def test_without_a_process_group_nothing_is_measured() -> None:
    with pytest.raises(RuntimeError, match=r"not initialised, .* or run `compiled-ddp calibrate --ranks 2`"):
        calibrate()
