"""What a comparison leaves behind: raw samples and single measurements, as plain data that goes to JSON and back."""

import math
from dataclasses import asdict, dataclass
from typing import Any

# seconds of forward, backward and optimizer, for each rank, for each round
Samples = list[list[list[float]]]


@dataclass(frozen=True)
class FirstStep:
    """Where the seconds of a first step went, on the rank that compiled for longest: others may have waited for it."""

    seconds: float  # until the slowest rank was done
    wrapping_s: float  # building the model, and a wrapper around it
    capture_s: float  # Dynamo, and nothing that it calls
    forward_s: float  # compiling forwards
    backward_s: float  # compiling backwards
    inductor_s: float  # of both
    compiled: int  # by Inductor: each forward and each backward is a graph
    loaded: int  # by Inductor, from its cache

    @property
    def rest_s(self) -> float:
        """What is none of these: running it, and what ranks agree on and check."""
        return max(0.0, self.seconds - self.wrapping_s - self.capture_s - self.forward_s - self.backward_s)


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
    first_step_parts: FirstStep | None = None  # of the cold one
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
    # of the eager model without a wrapper, from one run to the next, as a variant's; None: not measured
    own_difference: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads. A number that is not finite, which JSON has not, is None."""
        plain: dict[str, Any] = finite(asdict(self))
        return plain

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Comparison":
        """What `to_json` wrote."""
        return Comparison(**{**data, "variants": [_variant_from_json(variant) for variant in data["variants"]]})


def finite(data: Any) -> Any:
    """Plain data with None for each number that is not finite."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _variant_from_json(data: dict[str, Any]) -> VariantResult:
    parts = data.get("first_step_parts")
    return VariantResult(**{**data, "first_step_parts": parts and FirstStep(**parts)})
