"""One backward's use of a communication hook: what hooks launch, and what becomes of the state at its end."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from compiled_ddp.hook_program import HookProgram, as_real
from compiled_ddp.hook_state import BucketHook
from compiled_ddp.plan import Section


class HookedWork:
    """What stands for the Work of an all-reduce where a hook has launched it: one run of its program by hand.

    In two parts: up to its collectives at once, and what comes after them in `wait`.
    """

    def __init__(
        self,
        program: HookProgram,
        flat: torch.Tensor,
        state: Sequence[torch.Tensor],
        keep: Callable[[Sequence[torch.Tensor]], None],
        sent: int = 0,
    ) -> None:
        """`keep` is given the new state. `sent` collectives have gone out, from a graph that an exception ended."""
        self._program, self._flat, self._keep = program, flat, keep
        self._values = program.inputs(flat, state)
        program.run_but_for(sent, self._values)

    def wait(self) -> None:
        """Leave the mean in the flat buffer; a no-op the second time."""
        if not self._values:
            return
        self._program.run(self._program.then, self._values)
        reduced, *state = self._program.results(self._values)
        self._values.clear()
        with torch.no_grad():
            as_real(self._flat).copy_(reduced)
        self._keep(state)


@dataclass
class _Change:
    """What a backward makes of the state at one place."""

    new: list[torch.Tensor]
    left_out: Set[int] | None  # parameters whose gradients nobody has asked for; None where hooks launched
    held_back: Set[int] = frozenset()  # parameters whose debt took no part


class HookedBackward:
    """One backward's use of a communication hook, by position in what it launches. No state changes before `settle`."""

    def __init__(self, hook: BucketHook, sections: Sequence[Section]) -> None:
        """`sections`, of the sequence that the hook has adopted, are what this backward launches."""
        self._hook, self._places = hook, hook.places(sections)
        self._changes: dict[int, _Change] = {}

    def reduces(self, position: int) -> bool:
        """Whether the hook reduces this bucket."""
        return self._hook.program(self._places[position].bucket) is not None

    def launches(self, position: int) -> int:
        """How many collectives this bucket takes."""
        program = self._hook.program(self._places[position].bucket)
        return 1 if program is None else program.launches

    def state(self, positions: Iterable[int]) -> list[torch.Tensor]:
        """What the hook keeps for these buckets, one after the other, for the graph that launches them."""
        return [tensor for position in positions for tensor in self._hook.state(self._places[position])]

    def keep(self, positions: Iterable[int], new: Sequence[torch.Tensor], left_out: Set[int]) -> None:
        """Take what a graph has made of `state(positions)`; nothing becomes of its gradients of `left_out`."""
        rest = iter(new)
        for position in positions:
            state = [next(rest) for _ in self._hook.state(self._places[position])]
            self._note(position, _Change(state, left_out))
        assert next(rest, None) is None

    def launch(self, position: int, flat: torch.Tensor, unused: Set[int], sent: int) -> HookedWork:
        """Reduce a bucket by hand: launch now, but for `sent` collectives; `wait` leaves the mean in `flat`.

        What is owed to the parameters that this rank leaves `unused` is held back. Else it would be sent, and could be
        thrown away: other ranks may not use them either, which nobody knows before the bucket has come back.
        """
        place = self._places[position]
        program = self._hook.program(place.bucket)
        assert program is not None
        state = self._hook.state(place)
        held_back: Set[int] = unused & set(place.bucket.indices) if self._hook.owed else frozenset()
        if held_back:
            state = [tensor.clone() if slot in self._hook.owed else tensor for slot, tensor in enumerate(state)]
            for slot, index in _pairs(self._hook.owed, held_back):
                place.part(slot, index, state).zero_()

        def keep(new: Sequence[torch.Tensor]) -> None:
            self._note(position, _Change(list(new), None, held_back))

        return HookedWork(program, flat, state, keep, sent)

    def _note(self, position: int, change: _Change) -> None:
        for new, old in zip(change.new, self._hook.state(self._places[position]), strict=True):
            assert (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device), f"{new} for {old}"
        change.new = [tensor.contiguous() for tensor in change.new]
        self._changes[position] = change

    @torch.no_grad()
    def settle(self, unused: Set[int]) -> None:
        """The backward has ended well: from now on the state is what it has made of it.

        `unused` are those of the parameters reduced by hooks that no rank has used, whose .grad stays as it was.
        """
        for position, change in self._changes.items():
            place = self._places[position]
            indices = set(place.bucket.indices)
            as_before = indices & (change.left_out if change.left_out is not None else unused)
            if as_before == indices:
                continue  # also what belongs to the bucket as a whole
            for slot, index in _pairs(self._hook.elementwise(place.bucket), as_before):
                place.part(slot, index, change.new).copy_(place.part(slot, index))
            for slot, index in _pairs(self._hook.owed, change.held_back - as_before):
                place.part(slot, index, change.new).add_(place.part(slot, index))
            place.state = change.new
        self._changes.clear()


def _pairs(slots: Set[int], indices: Set[int]) -> Iterator[tuple[int, int]]:
    return ((slot, index) for slot in slots for index in indices)
