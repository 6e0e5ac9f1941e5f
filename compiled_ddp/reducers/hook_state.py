"""What a communication hook keeps from step to step, for each place in the sequence of buckets.

[Note: what was sent and what is owed] A compression sends a part of the gradients and owes the rest. For every
parameter, what backwards have left in .grad plus the mean over ranks of what is still owed is the sum of the true
means. That holds because

- a state belongs to a place in the agreed sequence, not to a set of parameters: the buckets of a layer that is called
  twice have states of their own, the same ones on every rank, whether a graph launches them or hooks do;
- it is replaced when a backward has ended well, and not by one that breaks off (`TracedHook.settle`);
- a parameter that a backward brings nothing to has of it what it had before;
- when the sequence changes, what a parameter has of it moves to where its gradients go from then on (`adopt`).
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from compiled_ddp.comm_hooks import CommHook, Ranks, StatefulHook
from compiled_ddp.plan import Bucket, Gradient, GradientSpec, ReductionSequence, Section
from compiled_ddp.planning.assignment import place_buckets
from compiled_ddp.reducers.hook_program import HookProgram, elementwise_state, example, initial_state
from compiled_ddp.users_code import warn_user


@dataclass
class Place:
    """A bucket's place in the sequence, with what the hook keeps for it: None before it is first asked for."""

    bucket: Bucket
    state: list[torch.Tensor] | None = None

    def keep(self, state: list[torch.Tensor] | None) -> None:
        self.state = state

    @functools.cached_property
    def _gradients(self) -> dict[int, Gradient]:
        return {gradient.index: gradient for gradient in self.bucket.gradients}

    def part(self, slot: int, index: int, state: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """What `state[slot]`, as long as the bucket, has of a parameter: a view of the parameter's shape."""
        tensors = self.state if state is None else state
        assert tensors is not None
        return part_of(tensors[slot], self.bucket, self._gradients[index])


@dataclass
class _Former:
    """A state whose place is no more, or not there yet."""

    place: Place
    remaining: set[int]  # the parameters whose part is still here
    waits: bool = False  # whether what belongs to the bucket as a whole is kept until there is such a bucket


def part_of(flat: torch.Tensor, bucket: Bucket, gradient: Gradient) -> torch.Tensor:
    """What a tensor as long as the bucket has of a gradient, in its shape; complex where the gradients are."""
    return gradient.view(torch.view_as_complex(flat.view(-1, 2)) if bucket.dtype.is_complex else flat)


class BucketHook:
    """A wrapper's communication hook: its programs by kind of bucket, and its state by place in the sequence."""

    def __init__(self, hook: CommHook, ranks: Ranks) -> None:
        self.owed: Set[int] = frozenset(hook.owed) if isinstance(hook, StatefulHook) else frozenset()
        self._hook, self._ranks = hook, ranks
        self._programs: dict[tuple[int, torch.dtype, torch.device], HookProgram] = {}
        self._elementwise: frozenset[int] | None = None
        self._sequence: ReductionSequence | None = None
        self._is_lasting = False
        self._places: dict[int, list[Place]] = {}  # by id of a section of the sequence
        self._former: list[_Former] = []

    def begin_anew(self) -> None:
        """Drop all state, and what is owed. On all ranks before the same backward."""
        for place in self._all():
            place.keep(None)
        self._former = []

    def program(self, bucket: Bucket) -> HookProgram | None:
        """None for a bucket of riders alone, or of nothing, which is reduced as it is."""
        if not bucket.gradients or not bucket.numel:
            return None
        kind = bucket.numel, bucket.dtype, bucket.device
        if kind not in self._programs:
            flat = example(*kind)
            self._programs[kind] = HookProgram(self._hook, self._ranks, flat, initial_state(self._hook, flat))
        return self._programs[kind]

    def elementwise(self, bucket: Bucket) -> Set[int]:
        """Which of the state's tensors are as long as a bucket like this one, so that each parameter has a part."""
        if self._elementwise is None:
            self._elementwise = elementwise_state(self._hook, bucket.dtype, bucket.device)
        return self._elementwise

    def state(self, place: Place) -> list[torch.Tensor]:
        """What the hook keeps there, from the last backward that ended."""
        if place.state is None:
            flat = example(place.bucket.numel, place.bucket.dtype, place.bucket.device)
            place.keep([] if self.program(place.bucket) is None else initial_state(self._hook, flat))
        assert place.state is not None
        return place.state

    def places(self, sections: Sequence[Section]) -> list[Place]:
        """The places of these sections of the sequence, in launch order. Equal sections have places of their own."""
        return [place for section in sections for place in self._places[id(section)]]

    # ---- when the sequence changes -----------------------------------------------------------------------------------

    def adopt(self, sequence: ReductionSequence, *, lasting: bool) -> None:
        """Take another sequence. A bucket that stays keeps its state; of others what their parameters have moves on.

        Unless it is `lasting`, another one follows at the end of the next backward.
        """
        kept: dict[Bucket, list[Place]] = defaultdict(list)
        for place in self._with_state():
            kept[place.bucket].append(place)
        self._sequence, self._is_lasting = sequence, lasting
        self._places = {id(s): [Place(bucket) for bucket in s.plan.buckets] for s in sequence.sections}
        assert len(self._places) == len(sequence.sections), "a section stands twice in the sequence"
        for place in self._all():
            if kept[place.bucket]:
                place.keep(kept[place.bucket].pop(0).state)
        self._former += [_Former(place, set(place.bucket.indices)) for places in kept.values() for place in places]
        self._move_on()

    def _all(self) -> Iterator[Place]:
        """Every place, those that backwards launch first."""
        for places in self._places.values():
            yield from places

    def _with_state(self) -> list[Place]:
        return [place for place in self._all() if place.state]

    @torch.no_grad()
    def _move_on(self) -> None:
        """Bring what former places hold to where it belongs now.

        To a new bucket of the same parameters if there is one, else part by part to the first place of each parameter.
        """
        first_of: dict[int, Place] = {}
        for place in self._all():
            for index in place.bucket.indices:
                first_of.setdefault(index, place)
        begun: set[tuple[int, int]] = set()  # places and parameters with what `initial_state` says
        for former in self._former:
            indices = former.place.bucket.indices
            new = next((p for p in self._all() if p.state is None and p.bucket.indices == indices), None)
            if new is not None:
                self._begin(new, begun)
                self._take_over(new, former)
                self._move_parts(former, dict.fromkeys(indices, new), begun)
        for former in self._former:
            self._move_parts(former, first_of, begun)
        self._former = [f for f in self._former if f.remaining or (f.waits and not self._is_lasting)]

    def _begin(self, place: Place, begun: set[tuple[int, int]]) -> None:
        if place.state is None:
            self.state(place)
            begun.update((id(place), index) for index in place.bucket.indices)

    def _take_over(self, place: Place, former: _Former) -> None:
        """Convert what belongs to the bucket as a whole."""
        assert place.state is not None and former.place.state is not None
        for slot, (new, old) in enumerate(zip(place.state, former.place.state, strict=True)):
            if slot not in self.elementwise(place.bucket) and new.shape == old.shape:
                place.state[slot] = old.to(new)
        former.waits = False

    def _move_parts(self, former: _Former, place_of: Mapping[int, Place], begun: set[tuple[int, int]]) -> None:
        """Move the parameters' parts, each to its place, on top of what it has already."""
        for index in sorted(former.remaining & place_of.keys()):
            place = place_of[index]
            self._begin(place, begun)
            for slot in self.elementwise(place.bucket) if place.state else ():
                part, into = former.place.part(slot, index), place.part(slot, index)
                if part.shape == into.shape:
                    moved = (part.real if part.is_complex() and not into.is_complex() else part).to(into)
                    into.copy_(moved if (id(place), index) in begun else into + moved)
                else:
                    self._warn_of_another_shape(index, part, into)
                part.zero_()
            begun.discard((id(place), index))
            former.remaining.discard(index)

    def _warn_of_another_shape(self, index: int, found: torch.Tensor, now: torch.Tensor) -> None:
        assert self._sequence is not None
        warn_user(
            f"parameter {self._sequence.parameter_names[index]} had the shape {tuple(found.shape)} and has "
            f"{tuple(now.shape)} now: what the communication hook {self._hook!r} kept of its gradients is dropped."
        )

    # ---- as a state dict ---------------------------------------------------------------------------------------------

    def state_dict(self, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Copies of the state of this rank, by the `names` of each bucket's parameters.

        What has a part for each parameter has them in the order of the names, each in the order of its elements
        whatever its memory format is. Where several buckets have the same parameters, `#2` and so on follow the names.
        """
        saved: dict[str, list[torch.Tensor]] = {}
        times: Counter[str] = Counter()
        for place in [*self._with_state(), *(former.place for former in self._former)]:
            key = ",".join(_escaped(names[index]) for index in place.bucket.indices)
            times[key] += 1
            elementwise = self.elementwise(place.bucket)
            saved[key if times[key] == 1 else f"{key}#{times[key]}"] = [
                _in_order_of_elements(tensor, place.bucket) if slot in elementwise else tensor.clone()
                for slot, tensor in enumerate(place.state or ())
            ]
        return saved

    def load_state_dict(
        self, state: Mapping[str, Sequence[object]], names: Sequence[str], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Take up what `state_dict` has returned, in place of all that there is; whatever the buckets are now.

        Raises KeyError for a parameter that is not there, ValueError for tensors that are not such a bucket's state.
        """
        index_of = {name: index for index, name in enumerate(names)}
        loaded = []
        for key, tensors in state.items():
            indices = [index_of[name] for name in _names_in(key)]
            place = Place(_bucket_of(indices, parameters))
            place.keep(self._checked(key, tensors, place.bucket))
            loaded.append(_Former(place, set(indices), waits=True))
        for place in self._all():
            place.keep(None)
        self._former = loaded
        self._move_on()

    def _checked(self, key: str, found: Sequence[object], bucket: Bucket) -> list[torch.Tensor]:
        """Copies of what was found, of the types that the hook's state for such a bucket has."""
        expected = self.state(Place(bucket))
        shapes = [tuple(tensor.shape) for tensor in expected]
        tensors = [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
        if len(tensors) != len(found) or [tuple(tensor.shape) for tensor in tensors] != shapes:
            words = [tuple(other.shape) if isinstance(other, torch.Tensor) else other for other in found]
            raise ValueError(
                f"the communication hook {self._hook!r} keeps tensors of the shapes {shapes} for the parameters {key}; "
                f"found {words}. Load what comm_hook_state_dict() returned with this hook and this model."
            )
        for slot in self.owed:
            if not tensors[slot].isfinite().all():
                raise ValueError(
                    f"what the communication hook {self._hook!r} owes the parameters {key} is not finite, and would "
                    "make every gradient so: load an earlier state, or none."
                )
        return [t.detach().to(like).clone() for t, like in zip(tensors, expected, strict=True)]


def _bucket_of(indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> Bucket:
    """A bucket of these parameters in which each lies in the order of its elements."""
    specs = [GradientSpec.of(index, parameters[index]) for index in indices]
    specs = [replace(spec, stride=torch.empty(spec.size, dtype=spec.dtype, device="meta").stride()) for spec in specs]
    return place_buckets([specs], world_size=1, reduction="hook").buckets[0]


def _in_order_of_elements(flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """A copy in which each gradient's part is row-major."""
    return torch.cat(
        [torch.view_as_real(p).reshape(-1) if p.is_complex() else p.reshape(-1) for p in _parts(flat, bucket)]
    )


def _parts(flat: torch.Tensor, bucket: Bucket) -> Iterator[torch.Tensor]:
    return (part_of(flat, bucket, gradient) for gradient in bucket.gradients)


def _escaped(name: str) -> str:
    return re.sub(r"([\\,#])", r"\\\1", name)


def _names_in(key: str) -> list[str]:
    """The names that a key of a state dict is made of."""
    of_one_name = r"(?:[^\\,#]|\\.)+"
    if not re.fullmatch(rf"{of_one_name}(,{of_one_name})*(#\d+)?", key):
        raise KeyError(key)
    return [re.sub(r"\\(.)", r"\1", name) for name in re.findall(rf"(?:^|,)({of_one_name})", key)]
