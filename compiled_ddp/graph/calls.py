"""The calls of captured graphs that one wrapper has made."""

import contextlib
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence

from compiled_ddp.graph.program import Program
from compiled_ddp.graph.segment import Segment, SegmentCall


class SegmentCalls:
    """Those of the forward under way, and those whose backward may still run."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[SegmentCall]] = []
        self._of_forward: list[SegmentCall] = []
        self._segments: dict[Segment, Program | None] = {}
        self.stay_local = False  # whether graphs are called of which the wrapper reduces nothing

    @contextlib.contextmanager
    def apart(self, *, stay_local: bool) -> Iterator[None]:
        """Within this context a forward is run outside of any step: its calls are forgotten at the end."""
        before = self._made, self._of_forward, self._segments, self.stay_local
        self._made, self.stay_local = [], stay_local
        self.begin_forward()
        try:
            yield
        finally:
            self._made, self._of_forward, self._segments, self.stay_local = before

    def begin_forward(self) -> None:
        """The calls that follow belong to another forward."""
        self._made = [*filter(operator.call, self._made)]
        self._of_forward, self._segments = [], {}

    def note(self, segment: Segment, call: SegmentCall | None) -> None:
        """A segment was called; `call` is None where it reduces nothing of this wrapper."""
        self._segments[segment] = None if call is None else call.program
        if call is not None:
            self._of_forward.append(call)
            self._made.append(weakref.ref(call))

    def take_forward(self) -> Sequence[SegmentCall]:
        """The calls of the forward that has ended, which keeps them no longer."""
        calls, self._of_forward = self._of_forward, []
        return calls

    @property
    def follows_another(self) -> bool:
        """Whether the forward under way has called a segment that reduces something of this wrapper."""
        return any(program is not None for program in self._segments.values())

    @property
    def segments(self) -> Mapping[Segment, Program | None]:
        """What the latest forward has called, and the wrapper's program in it, if any."""
        return self._segments

    def live(self) -> Sequence[SegmentCall]:
        """The calls whose backward may still run, latest first."""
        return [*filter(None, map(operator.call, reversed(self._made)))]  # in C: asked some times in each step
