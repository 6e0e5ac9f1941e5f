"""What is known of a machine and a link, as a file that people read, compare and hand on."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from compiled_ddp.planning.cost_model import Link

_VERSION = 1


@dataclass(frozen=True)
class Compute:
    """How fast one rank computes, measured on its device in float32 (or as `torch.set_float32_matmul_precision` says)."""

    flops_per_second: float  # of a matrix product, with a product and a sum as two
    bytes_per_second: float  # that elementwise work reads and writes

    def seconds(self, flops: float, nbytes: float) -> float:
        """A roofline: work takes as long as the slower one of its arithmetic and its memory."""
        return max(flops / self.flops_per_second, nbytes / self.bytes_per_second)


@dataclass(frozen=True)
class Sample:
    """Measured all-reduces: so many of `nbytes` each under way at once, and the seconds until all were there."""

    nbytes: int
    in_flight: int
    seconds: float


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
        return json.dumps({"calibration": _VERSION} | dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, saying what is wrong."""
        found = json.loads(text)
        version = found.pop("calibration", None) if isinstance(found, dict) else None
        if version != _VERSION:
            raise ValueError(f"expected a JSON object of version {_VERSION}, as `calibrate` writes, found {version!r}")
        try:
            return cls(
                **found
                | {
                    "link": Link(**found["link"]),
                    "compute": Compute(**found["compute"]),
                    "samples": tuple(Sample(**sample) for sample in found.get("samples", ())),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or unknown: {error}") from error


def fields_of(calibration: Calibration) -> dict[str, Any]:
    """A row for a table: what was measured where, without the samples."""
    link, compute = calibration.link, calibration.compute
    return {
        "backend": calibration.backend,
        "ranks": calibration.world_size,
        "hosts": calibration.hosts,
        "device": calibration.device,
        "start-up us": link.startup_seconds * 1e6,
        "MB/s": link.bytes_per_second / 1e6,
        "host us": link.host_seconds * 1e6,
        "Gflop/s": compute.flops_per_second / 1e9,
        "GB/s": compute.bytes_per_second / 1e9,
        "residual": calibration.residual,
    }
