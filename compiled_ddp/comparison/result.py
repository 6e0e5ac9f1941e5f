"""What a comparison leaves behind: raw samples and single measurements, as plain data that goes to JSON and back."""

from dataclasses import asdict, dataclass
from typing import Any

# seconds of forward, backward and optimizer, for each rank, for each round
Samples = list[list[list[float]]]


@dataclass(frozen=True)
class VariantResult:
    """One variant's measurements. None means not measured, or without meaning for this variant."""

    name: str
    floor: str
    communicates: bool
    samples: Samples
    collectives: dict[str, int] | None = None  # calls per step, by operation
    gradient_difference: float | None = None  # largest |gradient - reference|, over the largest |reference|
    peak_memory_bytes: int | None = None  # the rank that needs most
    first_step_cold_s: float | None = None
    first_step_warm_s: float | None = None
    error: str | None = None  # why it has no samples: it failed, on the rank that is named


@dataclass(frozen=True)
class Comparison:
    """One workload's table before anything is derived from it."""

    workload: str
    device: str
    link: str
    world_size: int
    parameters: int
    bucket_bytes: list[int]  # what communication alone reduces, one all-reduce each
    communication_samples: list[list[float]]  # seconds, for each rank, for each round
    variants: list[VariantResult]
    batch_size: int | None = None  # samples of a step over all ranks, by the first batch of each; None: not known

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Comparison":
        """What `to_json` wrote."""
        return Comparison(**{**data, "variants": [VariantResult(**variant) for variant in data["variants"]]})
