"""One backward's use of a communication hook: what hooks launch, and what becomes of the state at its end."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from compiled_ddp.passes.ops import wait_tensor
from compiled_ddp.plan import Section
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.hook_program import HookProgram, as_real
from compiled_ddp.reducers.hook_state import BucketHook
from compiled_ddp.reducers.reducer import Reducer, Work


class HookedWork:
    """What stands for the Work of an all-reduce where a hook has launched it: one run of its program by hand.

    In two parts: up to its collectives in `launch`, and what comes after them in `wait`.
    """

    def __init__(
        self,
        program: HookProgram,
        flat: torch.Tensor,
        state: Sequence[torch.Tensor],
        keep: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """`keep` is given the new state."""
        self._program, self._flat, self._keep = program, flat, keep
        self._values = program.inputs(flat, state)

    def launch(self) -> None:
        self._program.run(self._program.first, self._values)

    def wait(self) -> None:
        """Leave the mean in the flat buffer; a no-op the second time.

        The hook's own code may raise in here. Then this can be called again.
        """
        if not self._values:
            return
        self._program.run(self._program.then, self._values)
        reduced, *state = self._program.results(self._values)
        with torch.no_grad():
            as_real(self._flat).copy_(reduced)
        self._keep(state)
        self._values.clear()

    def wait_for_collectives(self) -> None:
        """Compute nothing of what comes after them, which `wait` may still do."""
        self._program.wait(self._values)


class LaunchedInPart:
    """What stands for the Work of a bucket of which an exception had left some collectives unlaunched."""

    def __init__(self, rest: Sequence[torch.Tensor], begun: HookedWork | None) -> None:
        """`rest` are the results of these, `begun` is what had launched the others, None for a graph."""
        self._rest, self._begun = rest, begun

    def wait(self) -> None:
        self.wait_for_collectives()

    def wait_for_collectives(self) -> None:
        if self._begun is not None:
            self._begun.wait_for_collectives()
        for result in self._rest:
            wait_tensor(result)  # nobody reads it


@dataclass
class _Change:
    """What a backward makes of the state at one place."""

    new: list[torch.Tensor]
    left_out: Set[int] | None  # parameters whose gradients nobody has asked for; None where hooks launched
    held_back: Set[int] = frozenset()  # parameters whose debt took no part


class TracedHook(Reducer):
    """One backward's use of a communication hook. No state changes before `settle`."""

    def __init__(self, communicator: Communicator, hook: BucketHook, sections: Sequence[Section]) -> None:
        """`sections`, of the sequence that the hook has adopted, are what this backward launches."""
        super().__init__(communicator)
        self._hook, self._places = hook, hook.places(sections)
        self._changes: dict[int, _Change] = {}
        self._begun: dict[int, HookedWork] = {}  # what an exception may have ended before all of it was launched

    def _program(self, position: int) -> HookProgram | None:
        """None for riders, which an all-reduce sums."""
        return self._hook.program(self._places[position].bucket)

    def runs_users_code(self, position: int) -> bool:
        return self._program(position) is not None

    def collectives(self, buckets: int) -> list[int]:
        programs = map(self._program, range(buckets))
        return [1 if program is None else len(program.launches) for program in programs]

    def has_state(self, position: int) -> bool:
        return bool(self._hook.state(self._places[position]))

    def state(self, positions: Iterable[int]) -> list[torch.Tensor]:
        return [tensor for position in positions for tensor in self._hook.state(self._places[position])]

    def keep(self, positions: Iterable[int], new: Sequence[torch.Tensor], left_out: Set[int]) -> None:
        rest = iter(new)
        for position in positions:
            state = [next(rest) for _ in self._hook.state(self._places[position])]
            self._note(position, _Change(state, left_out))
        assert next(rest, None) is None

    def start(self, position: int, flat_buffer: torch.Tensor, unused: Callable[[], Set[int]]) -> Work:
        """Reduce a bucket by hand; `wait` leaves the mean in `flat_buffer`.

        What is owed to the parameters that this rank leaves `unused` is held back. Else it would be sent, and could be
        thrown away: other ranks may not use them either, which nobody knows before the bucket has come back.
        """
        program = self._program(position)
        if program is None:
            return super().start(position, flat_buffer, unused)
        place = self._places[position]
        state = self._hook.state(place)
        held_back: Set[int] = unused() if self._hook.owed else frozenset()
        if held_back:
            state = [tensor.clone() if slot in self._hook.owed else tensor for slot, tensor in enumerate(state)]
            for slot, index in _pairs(self._hook.owed, held_back):
                place.part(slot, index, state).zero_()

        def keep(new: Sequence[torch.Tensor]) -> None:
            self._note(position, _Change(list(new), None, held_back))

        work = self._begun[position] = HookedWork(program, flat_buffer, state, keep)
        work.launch()
        del self._begun[position]
        return work

    def start_rest(self, position: int, launched: int) -> Work:
        program = self._program(position)
        assert program is not None
        return LaunchedInPart(program.launch_zeros(launched), self._begun.pop(position, None))

    def _note(self, position: int, change: _Change) -> None:
        for new, old in zip(change.new, self._hook.state(self._places[position]), strict=True):
            assert (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device), f"{new} for {old}"
        change.new = [tensor.contiguous() for tensor in change.new]
        self._changes[position] = change

    @torch.no_grad()
    def settle(self, unused: Callable[[], Set[int]]) -> None:
        used_by_none = unused()
        for position, change in self._changes.items():
            place = self._places[position]
            indices = set(place.bucket.indices)
            as_before = indices & (change.left_out if change.left_out is not None else used_by_none)
            if as_before == indices:
                continue  # also what belongs to the bucket as a whole
            for slot, index in _pairs(self._hook.elementwise(place.bucket), as_before):
                place.part(slot, index, change.new).copy_(place.part(slot, index))
            for slot, index in _pairs(self._hook.owed, change.held_back - as_before):
                place.part(slot, index, change.new).add_(place.part(slot, index))
            place.keep(change.new)
        self._changes.clear()


def _pairs(slots: Set[int], indices: Set[int]) -> Iterator[tuple[int, int]]:
    return ((slot, index) for slot in slots for index in indices)
