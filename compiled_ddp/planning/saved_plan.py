"""A plan as a file that people read, compare and pin: which gradients share a bucket, and in which order they go.

ddp.plan.save("plan.json")
compile_ddp(model, plan=SavedPlan.load("plan.json"))
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_ddp.plan import GradientSpec, gradient_dtype
from compiled_ddp.plan.sequence import SAVED_VERSION, described, write_plan
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.planning.planners import Names


@dataclass(frozen=True, repr=False)
class SavedPlan:
    """What `ddp.plan.save()` has written, or `ddp.measured_plan()` made: the buckets in launch order, by names.

    `parameters` has the shape and dtype of each gradient, by which a plan of another model is known.
    """

    parameters: tuple[tuple[str, str], ...]
    buckets: tuple[tuple[str, ...], ...]
    world_size: int  # that it was made at, and made for
    by_rows: tuple[str, ...] = ()  # embeddings that send the rows that are not zero alone

    def __repr__(self) -> str:
        """Short, and another one for each plan: ranks compare it."""
        digest = hashlib.sha256(repr((self.parameters, self.buckets, self.by_rows)).encode()).hexdigest()[:8]
        return f"SavedPlan({len(self.parameters)} parameters in {len(self.buckets)} buckets, {digest})"

    @classmethod
    def load(cls, path: str | Path) -> "SavedPlan":
        """Raises ValueError, naming the file, for what `save` has not written; OSError as open does."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("plan") != SAVED_VERSION:
                raise ValueError(f"expected a JSON object with plan: {SAVED_VERSION}, as `ddp.plan.save()` writes")
            parameters = tuple((str(name), str(told)) for name, told in found["parameters"].items())
            buckets = tuple(tuple(map(str, names)) for names in found["buckets"])
            by_rows = tuple(map(str, found.get("by_rows", ())))
            saved = cls(parameters, buckets, int(found["world_size"]), by_rows)
            saved._check_names()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no plan: {error}") from error
        return saved

    def save(self, path: str | Path) -> None:
        """Write it as `ddp.plan.save` writes the plan of a wrapper."""
        write_plan(path, dict(self.parameters), self.buckets, self.world_size, self.by_rows)

    def _check_names(self) -> None:
        placed = [name for bucket in self.buckets for name in bucket]
        twice = sorted({name for name in placed if placed.count(name) > 1}) if len(set(placed)) < len(placed) else []
        if twice:
            raise ValueError(f"{twice[0]} stands in two buckets")
        missing = [name for name, _ in self.parameters if name not in self._bucket_of]
        if missing or len(placed) != len(self.parameters):
            unknown = sorted(set(placed).difference(name for name, _ in self.parameters))
            where = "in no bucket" if missing else "in a bucket, and not among the parameters"
            raise ValueError(f"{(missing or unknown)[0]} stands {where}")

    @functools.cached_property
    def _bucket_of(self) -> Mapping[str, tuple[int, int]]:
        """The bucket of each gradient, and its place in it."""
        return {
            name: (number, place) for number, bucket in enumerate(self.buckets) for place, name in enumerate(bucket)
        }

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError, with the first difference, unless it is a plan of these trained parameters."""
        known = dict(self.parameters)
        for name, parameter in parameters.items():
            here = described(tuple(parameter.shape), gradient_dtype(parameter))
            if name not in known:
                raise ValueError(f"plan= does not fit the model: it has no bucket for {name}. {_REMEDY}")
            if known[name] != here:
                raise ValueError(f"plan= does not fit the model: {name} is {here}, {known[name]} there. {_REMEDY}")
        gone = [name for name in known if name not in parameters]
        if gone:
            raise ValueError(f"plan= does not fit the model: {gone[0]} is not trained here. {_REMEDY}")

    # ---- a planner ---------------------------------------------------------------------------------------------------

    @property
    def naive(self) -> bool:
        return False

    @property
    def goes_by_names(self) -> bool:
        return True

    def fill(
        self, gradients: Sequence[GradientSpec], names: Names, work: BackwardWork | None = None
    ) -> list[list[GradientSpec]]:
        """Its buckets, as far as these gradients go: of a bucket that a graph has in part, this part.

        Of one that has gradients of several dtypes, or on several devices, one for each.
        """
        buckets: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, GradientSpec]]] = {}
        for gradient in gradients:
            number, place = self._bucket_of[names[gradient.index]]
            buckets.setdefault((number, gradient.dtype, gradient.device), []).append((place, gradient))
        ordered = [sorted(bucket, key=lambda pair: pair[0]) for bucket in buckets.values()]
        ordered.sort(key=lambda bucket: self._bucket_of[names[bucket[0][1].index]])
        return [[gradient for _, gradient in bucket] for bucket in ordered]

    def sends_rows(self, name: str, rows: int, nbytes: int) -> bool:
        return name in self.by_rows

    def __str__(self) -> str:
        return "Buckets are those of the plan that was given."


_REMEDY = "Leave out plan=, save a new one, or see whether layers were renamed, frozen or changed."


def first_difference(plan: SavedPlan, buckets: Sequence[Sequence[str]]) -> str | None:
    """In which bucket others than the plan's are launched, in words; None where they are the plan's."""
    for number, (planned, launched) in enumerate(zip(plan.buckets, buckets, strict=False)):
        if [*planned] != [*launched]:
            return f"bucket {number} has {', '.join(launched[:3])}, not {', '.join(planned[:3])}"
    if len(buckets) != len(plan.buckets):
        return f"there are {len(buckets)} buckets, not {len(plan.buckets)}"
    return None
