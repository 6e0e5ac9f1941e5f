"""What is known of a machine and a link, as a file that people read, compare and hand on."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from compiled_ddp.planning.cost_model import Compute, Link

_VERSION = 1
_BURST = 1.5  # times the rate of the largest sample: what is faster was let through in a burst
_LEAST_OF_BYTES = 1 / 20  # of the largest sample's time: disturbed small ones would make start-ups of all of it
_INFINITE = "infinite"  # as a file has it, since JSON has no such number: the bandwidth of a rank alone


@dataclass(frozen=True)
class Sample:
    """Measured all-reduces: so many of `nbytes` each under way at once, and the seconds until all were there."""

    nbytes: int
    in_flight: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Of all together."""
        return self.in_flight * self.nbytes / self.seconds


@dataclass(frozen=True)
class Calibration:
    """A link and a device as measured: what plans are made from. The same on every rank.

    `residual` is the root mean square of the relative errors of `link` at `samples`.
    """

    backend: str  # of the process group: "gloo", "nccl"
    world_size: int
    hosts: int
    device: str  # "cpu", or the name of the GPU
    link: Link
    compute: Compute
    residual: float = 0.0
    samples: tuple[Sample, ...] = ()
    measured: str = ""  # when, and with which versions

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises ValueError, naming the file, for what `save` has not written; OSError as open does."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} holds no calibration: {error}") from error

    def to_json(self) -> str:
        return json.dumps({"calibration": _VERSION} | _without_infinity(dataclasses.asdict(self)), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, saying what is wrong."""
        found = json.loads(text)
        version = found.pop("calibration", None) if isinstance(found, dict) else None
        if version != _VERSION:
            raise ValueError(f"expected a JSON object of version {_VERSION}, as `calibrate` writes, found {version!r}")
        try:
            calibration = cls(
                **found
                | {
                    "link": _of_numbers(Link, found["link"]),
                    "compute": _of_numbers(Compute, found["compute"]),
                    "samples": tuple(_of_numbers(Sample, sample) for sample in found.get("samples", ())),
                }
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or unknown: {error}") from error
        calibration._check_kinds()
        return calibration

    def _check_kinds(self) -> None:
        """Raise ValueError where a file has something else for one of the simple fields."""
        texts, numbers = (self.backend, self.device, self.measured), (self.world_size, self.hosts, self.residual)
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(each, int | float) for each in numbers
        ):
            raise ValueError(f"expected texts and numbers, found {texts} and {numbers}")


Numbers = TypeVar("Numbers", Link, Compute, Sample)


def _of_numbers(kind: type[Numbers], fields: Mapping[str, Any]) -> Numbers:
    """Made of the numbers that a file has."""
    numbers: dict[str, Any] = {name: math.inf if value == _INFINITE else value for name, value in fields.items()}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
            raise ValueError(f"{name} must be a number of at least 0, found {number!r}")
        if number == 0 and name in ("bytes_per_second", "flops_per_second", "nbytes", "in_flight"):
            raise ValueError(f"{name} must be above 0, found {number!r}")
    return kind(**numbers)


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return _INFINITE if value == math.inf else value


# ---- the model of what was measured ----------------------------------------------------------------------------------


def fit_link(samples: Sequence[Sample]) -> tuple[Link, float]:
    """The link that explains these best, and the root mean square of its relative errors.

    Latency and start-up, and for them a bandwidth too, by least squares on the relative errors of `predicted_seconds`,
    none below zero: sizes differ by thousands, and by absolute errors the largest would be all that counts. Then the
    bandwidth by the largest sample alone, as buckets are large, and smaller ones may be let through in a burst.
    """
    largest = max(samples, key=lambda sample: sample.in_flight * sample.nbytes)
    limit = _BURST * largest.bytes_per_second
    _, startup, latency = _least_squares([_row(sample) for sample in samples if sample.bytes_per_second <= limit])
    of_bytes = max(largest.seconds - latency - largest.in_flight * startup, _LEAST_OF_BYTES * largest.seconds)
    link = Link(startup, largest.in_flight * largest.nbytes / of_bytes, latency_seconds=latency)
    errors = [predicted_seconds(link, each.nbytes, each.in_flight) / each.seconds - 1 for each in samples]
    return link, math.sqrt(sum(error * error for error in errors) / len(errors))


def _row(sample: Sample) -> tuple[float, float, float]:
    """The factors of 1 / bandwidth, start-up and latency in the time that the model says, over the measured one."""
    at_once = sample.in_flight / sample.seconds
    return sample.nbytes * at_once, at_once, 1 / sample.seconds


def predicted_seconds(link: Link, nbytes: int, in_flight: int) -> float:
    """What so many all-reduces of this size take that are launched at once."""
    return link.latency_seconds + in_flight * link.seconds(nbytes)


def _least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The x of at least 0 for which each row times x is nearest to 1; where several are, with the first columns.

    Whichever of x are not 0 are the best ones without that bound, of those columns: so try all choices of columns.
    """
    width = len(rows[0])
    found = [(0.0,) * width]
    for number in range(1, width + 1):
        for columns in itertools.combinations(range(width), number):
            solved = dict(zip(columns, _solve([[row[column] for column in columns] for row in rows]), strict=True))
            if all(x >= 0 for x in solved.values()):
                found.append(tuple(solved.get(column, 0.0) for column in range(width)))
    return min(found, key=lambda x: round(_error(rows, x), 12))


def _error(rows: Sequence[Sequence[float]], x: Sequence[float]) -> float:
    errors = [sum(a * b for a, b in zip(row, x, strict=True)) - 1 for row in rows]
    return sum(error * error for error in errors)


def _solve(rows: Sequence[Sequence[float]]) -> list[float]:
    """As `_least_squares`, whatever the sign: from the normal equations, by elimination; nan where many do as well."""
    width = len(rows[0])
    left = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    right = [sum(row[i] for row in rows) for i in range(width)]
    for i in range(width):
        for j in range(i + 1, width):
            factor = left[j][i] / left[i][i] if left[i][i] > 0 else math.nan
            left[j] = [below - factor * above for below, above in zip(left[j], left[i], strict=True)]
            right[j] -= factor * right[i]
    x = [math.nan] * width
    for i in reversed(range(width)):
        known = sum(left[i][j] * x[j] for j in range(i + 1, width))
        x[i] = (right[i] - known) / left[i][i] if left[i][i] > 0 else math.nan
    return x


def fields_of(calibration: Calibration) -> dict[str, Any]:
    """A row for a table: what was measured where, without the samples."""
    link, compute = calibration.link, calibration.compute
    return {
        "backend": calibration.backend,
        "ranks": calibration.world_size,
        "hosts": calibration.hosts,
        "device": calibration.device,
        "start-up us": link.startup_seconds * 1e6,
        "latency us": link.latency_seconds * 1e6,
        "MB/s": link.bytes_per_second / 1e6,
        "host us": link.host_seconds * 1e6,
        "host us/MB": link.host_seconds_per_byte * 1e12,
        "Gflop/s": compute.flops_per_second / 1e9,
        "GB/s": compute.bytes_per_second / 1e9,
        "residual": calibration.residual,
    }
