"""What every section is told."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Plain data that goes to a section's process as JSON."""

    device: str  # "cuda", or "cpu" for the same code in small
    size: str  # "large" or "tiny": of the models (workloads.py)
    models: tuple[str, ...]  # these alone, of `workloads.ALL`; () for those of the size
    variants: tuple[str, ...]  # these alone, of those that a section compares; () for all of them
    backend: str  # of every compiled variant
    warmup: int  # steps of each variant before what is measured
    rounds: int  # each one timed step of every variant
    tests: tuple[str, ...]  # files and folders in which tests for a GPU are looked for

    def chosen_models(self, default: Sequence[str]) -> list[str]:
        """What a section trains that would train `default`."""
        return list(self.models or default)

    def chosen_variants(self, of_section: Sequence[str]) -> list[str]:
        """What a section compares that has these variants."""
        return [name for name in of_section if not self.variants or name in self.variants]

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Settings":
        """What `to_json` wrote."""
        return Settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
