"""A calibration as data: the link that samples tell, and the file that holds it."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_ddp import Calibration, Compute, Link
from compiled_ddp.planning import calibration
from compiled_ddp.planning.calibration import Sample, fields_of, fit_link, predicted_seconds
from compiled_ddp.planning.cost_model import predict
from compiled_ddp.ranks import calibration as measuring

SIZES = tuple(4096 * 4**step for step in range(7))
LINKS = (
    Link(200e-6, 1e9, 0.0, 150e-6),
    Link(25e-6, 12.5e6, 0.0, 0.0),
    Link(5e-6, 2e11, 0.0, 20e-6),
    Link(0.05, 1e9, 0.0, 0.01),
)


def samples_of(link: Link, *, noise: float = 0.0, sizes: tuple[int, ...] = SIZES) -> list[Sample]:
    draw = random.Random(7)
    return [
        Sample(nbytes, k, predicted_seconds(link, nbytes, k) * (1 + noise * draw.uniform(-1, 1)))
        for nbytes, k in itertools.product(sizes, (1, 4))
    ]


def as_tuple(link: Link) -> tuple[float, ...]:
    return link.startup_seconds, link.bytes_per_second, link.latency_seconds


@pytest.mark.parametrize("link", LINKS)
def test_the_link_behind_exact_samples_is_found(link: Link) -> None:
    found, residual = fit_link(samples_of(link))
    assert as_tuple(found) == pytest.approx(as_tuple(link), rel=1e-6, abs=1e-12)
    assert residual < 1e-9


@pytest.mark.parametrize("link", LINKS)
def test_noise_moves_the_link_little(link: Link) -> None:
    found, residual = fit_link(samples_of(link, noise=0.05))
    assert found.bytes_per_second == pytest.approx(link.bytes_per_second, rel=0.2)
    one = link.startup_seconds + link.latency_seconds
    assert found.startup_seconds + found.latency_seconds == pytest.approx(one, rel=0.15)
    assert 0 < residual < 0.06


def test_three_sizes_are_enough() -> None:
    link = LINKS[1]
    found, _ = fit_link(samples_of(link, sizes=SIZES[:3]))
    assert as_tuple(found) == pytest.approx(as_tuple(link), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("link", LINKS[:3])
def test_what_a_shaped_link_lets_through_in_a_burst_is_not_its_bandwidth(link: Link) -> None:
    samples = [
        replace(sample, seconds=sample.seconds - min(sample.in_flight * sample.nbytes, 2**18) / link.bytes_per_second)
        for sample in samples_of(link, sizes=SIZES[:5])
    ]
    found, _ = fit_link(samples)
    assert found.bytes_per_second == pytest.approx(link.bytes_per_second, rel=0.15)


class _Shaped:
    """A shaped link, and its clock: `saved` bytes pass at once, of at most `BURST`, and all others at `RATE`."""

    RATE, BURST = 36e6, 2**18

    def __init__(self) -> None:
        self.now, self._saved, self._since = 0.0, 0.0, 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    process_time = thread_time = perf_counter

    def largest(self, numbers: Sequence[float]) -> list[float]:
        self.now += 5e-3  # in which it saves up
        return [*numbers]

    def all_reduce(self, piece: torch.Tensor) -> "_Shaped":
        self._saved = min(self.BURST, self._saved + self.RATE * (self.now - self._since))
        passed = min(self._saved, piece.nbytes)
        self._saved -= passed
        self.now += 1e-4 + (piece.nbytes - passed) / self.RATE
        self._since = self.now
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """All of it was sent as it was launched."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def communicator(self) -> "_Shaped":
        return self


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_no_round_times_what_the_link_has_saved_up_before_it(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    link: Any = _Shaped()
    monkeypatch.setattr(measuring, "time", link)
    rounds = measuring._Rounds(link)
    rounds.run(seconds)
    found, _ = fit_link(rounds.samples())
    assert found.bytes_per_second == pytest.approx(link.RATE, rel=0.02)


def test_one_size_alone_tells_a_bandwidth() -> None:
    found, _ = fit_link([Sample(2**20, 4, 0.5)])
    assert found.bytes_per_second == pytest.approx(2**23) and found.startup_seconds == found.latency_seconds == 0.0


def test_samples_are_what_the_cost_model_predicts() -> None:
    link = replace(LINKS[0])
    for k in (1, 2, 4):
        assert predicted_seconds(link, 1000, k) == pytest.approx(predict([1000] * k, [0.0] * k, 0.0, link).seconds)


@pytest.mark.parametrize(
    ("seconds_of", "startup", "rate"),
    [
        (lambda nbytes: 1e-9 * nbytes, 0.0, 1),  # no start-up at all
        (lambda nbytes: 1e-3 - 1e-12 * nbytes, None, 20),  # larger ones are faster
        (lambda nbytes: 1e-12 * nbytes**2, 0.0, 1),  # a straight line through these begins below zero
    ],
)
def test_nothing_is_below_zero_or_infinite(seconds_of: Any, startup: float | None, rate: float) -> None:
    """The bandwidth is at most 20 times the rate of the largest, however slow smaller ones were."""
    samples = [Sample(n, k, k * seconds_of(n)) for n in SIZES[:4] for k in (1, 4)]
    link, _ = fit_link(samples)
    assert min(as_tuple(link)) >= 0
    assert link.bytes_per_second == pytest.approx(rate * SIZES[3] / seconds_of(SIZES[3]))
    assert startup is None or link.startup_seconds == pytest.approx(startup, abs=1e-12)


def test_no_other_numbers_of_at_least_zero_are_nearer() -> None:
    """By brute force, around what is found and on the edges, for rows that nothing explains."""
    draw = random.Random(3)
    for _ in range(30):
        rows = [[draw.uniform(0, 10) ** 3, draw.uniform(0, 1), draw.uniform(0, 1) ** 4] for _ in range(6)]
        found = calibration._least_squares(rows)
        best = calibration._error(rows, found)
        assert min(found) >= 0
        for other in itertools.product(*((0.0, 1e-3, 0.1, 1.0, 0.9 * x, x, 1.1 * x) for x in found)):
            assert best <= calibration._error(rows, other) + 1e-9


# ---- the file --------------------------------------------------------------------------------------------------------

CALIBRATION = Calibration(
    "gloo",
    2,
    1,
    "cpu",
    Link(1.5e-4, 1.1e9, 2e-5, 7e-5),
    Compute(6e10, 2.5e10),
    0.08,
    (Sample(4096, 1, 3e-4), Sample(4096, 4, 9e-4)),
    "2026-11-28 14:20 UTC, torch 2.13.0",
)
ALONE = replace(CALIBRATION, world_size=1, link=Link(0.0, math.inf), residual=0.0, samples=())


@pytest.mark.parametrize("saved", [CALIBRATION, ALONE])
def test_what_is_saved_is_loaded(saved: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    saved.save(path)
    assert Calibration.load(path) == saved
    assert Calibration.from_json(saved.to_json()) == saved


def test_an_infinitely_fast_link_is_a_word_in_the_file() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(ALONE.to_json(), parse_constant=refuse)
    assert found["link"]["bytes_per_second"] == "infinite"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"calibration": 2}, "expected a JSON object of version 1, as `calibrate` writes, found 2"),
        ({"links": 3}, "a field is missing or unknown: .*links"),
        ({"link": {"startup_seconds": 1.0}}, "a field is missing or unknown: .*bytes_per_second"),
        ({"link": 3}, "a field is missing or unknown"),
        ({"samples": [{"nbytes": 1}]}, "a field is missing or unknown"),
        ({"link": {"startup_seconds": "1 us", "bytes_per_second": 1.0}}, "startup_seconds must be a number"),
        ({"link": {"startup_seconds": -1.0, "bytes_per_second": 1.0}}, "startup_seconds must be a number of at least"),
        ({"link": {"startup_seconds": 1.0, "bytes_per_second": 0}}, "bytes_per_second must be above 0, found 0"),
        ({"compute": {"flops_per_second": True, "bytes_per_second": 1.0}}, "flops_per_second must be a number"),
        ({"world_size": "2"}, "expected texts and numbers"),
        ({"device": None}, "expected texts and numbers"),
    ],
)
def test_another_file_is_refused_by_name(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(json.loads(CALIBRATION.to_json()) | change))
    with pytest.raises(ValueError, match=f"link.json holds no calibration: {told}"):
        Calibration.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"bucket_cap_mb": 2}'])
def test_what_is_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other.json holds no calibration"):
        Calibration.load(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.json")


def test_a_row_tells_where_it_was_measured_and_in_what_units() -> None:
    row = fields_of(CALIBRATION)
    assert (row["backend"], row["ranks"], row["hosts"], row["device"]) == ("gloo", 2, 1, "cpu")
    assert (row["start-up us"], row["latency us"], row["MB/s"]) == pytest.approx((150.0, 70.0, 1100.0))
