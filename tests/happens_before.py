"""Races between streams, found in what is done behind what, however fast or late it then runs.

Each stream has a vector clock, and so has the host: how far it has seen each other one come, by the points that it has
waited for. Two uses of the same bytes, of which one writes, race unless the later one's stream had seen the earlier
one. Memory is that of a block of the allocator, whatever view of it is used: a gradient that lies in its bucket and the
bucket's all-reduce are the same bytes. torch's own sanitizer for CUDA asks by the address at which a tensor begins.

A tensor with gaps counts as all bytes from its first element to its last one. All threads of the host are one, in the
order in which they come; asking whether an event has come (`query`) is no wait.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Actor = tuple[int, int]  # a device and its stream
HOST: Actor = (-1, -1)
Range = tuple[int, int, int]  # a block of memory, and from which byte of it to which


@dataclass(frozen=True)
class Step:
    """A kernel that is put on a stream ("use"), a point that it comes to ("reach"), one that it waits for ("wait").

    Or the allocator, before it hands a block out again, has seen that a stream had come to a point ("recorded"). That
    orders nothing else: whether it has come there in time is luck.
    """

    kind: str
    device: int
    stream: int
    point: int = 0
    name: str = ""
    reads: Sequence[Range] = ()
    writes: Sequence[Range] = ()

    @property
    def actor(self) -> Actor:
        return self.device, self.stream


@dataclass(frozen=True)
class Use:
    """What a kernel, or the host, does to bytes of a block."""

    operator: str
    actor: Actor
    time: int  # by the actor's own clock
    begin: int
    end: int
    writes: bool

    def conflicts_with(self, other: "Use") -> bool:
        return (self.writes or other.writes) and self.begin < other.end and other.begin < self.end

    def __str__(self) -> str:
        where = "the host" if self.actor == HOST else "stream {1} of device {0}".format(*self.actor)
        return f"{self.operator} {'writes' if self.writes else 'reads'} on {where}"


@dataclass(frozen=True)
class Race:
    """Two uses of a block that nothing orders; `begin` to `end` are the bytes that both of them touch."""

    first: Use
    second: Use
    block: int

    @property
    def begin(self) -> int:
        return max(self.first.begin, self.second.begin)

    @property
    def end(self) -> int:
        return min(self.first.end, self.second.end)

    @property
    def operators(self) -> tuple[str, str]:
        return self.first.operator, self.second.operator

    def __str__(self) -> str:
        return f"{self.first}, {self.second}: bytes {self.begin} to {self.end} of {self.block:#x}"


class _Clocks:
    """How far each actor has seen the others come."""

    def __init__(self) -> None:
        self._seen: defaultdict[Actor, dict[Actor, int]] = defaultdict(dict)
        self._at_point: dict[int, dict[Actor, int]] = {}

    def advance(self, actor: Actor) -> int:
        """The time of what `actor` does next, which is behind all that the host had seen when it asked for it."""
        seen = self._seen[actor]
        if actor != HOST:
            self._join(actor, self._seen[HOST])
        seen[actor] = seen.get(actor, 0) + 1
        return seen[actor]

    def reach(self, actor: Actor, point: int) -> None:
        self.advance(actor)
        self._at_point[point] = dict(self._seen[actor])

    def wait(self, actor: Actor, point: int) -> None:
        """For nothing, where nobody has been seen to reach that point."""
        self._join(actor, self._at_point.get(point, {}))

    def had_seen(self, point: int, use: Use) -> bool:
        """Whether who reached the point was behind `use` then."""
        return self._at_point.get(point, {}).get(use.actor, 0) >= use.time

    def _join(self, actor: Actor, other: dict[Actor, int]) -> None:
        seen = self._seen[actor]
        for each, time in other.items():
            seen[each] = max(time, seen.get(each, 0))

    def has_seen(self, actor: Actor, use: Use) -> bool:
        return self._seen[actor].get(use.actor, 0) >= use.time


def races(steps: Iterable[Step]) -> list[Race]:
    """Every pair of conflicting uses that nothing orders; of those behind one that was ordered, none."""
    clocks, found = _Clocks(), []
    uses: defaultdict[int, list[Use]] = defaultdict(list)  # of each block, those that a later one may race with
    for step in steps:
        if step.kind == "reach":
            clocks.reach(step.actor, step.point)
        elif step.kind == "wait":
            clocks.wait(step.actor, step.point)
        elif step.kind == "recorded":
            for block, _, _ in step.writes:
                uses[block] = [use for use in uses[block] if not clocks.had_seen(step.point, use)]
        else:
            time = clocks.advance(step.actor)
            for writes, ranges in ((False, step.reads), (True, step.writes)):
                for block, begin, end in ranges:
                    use = Use(step.name, step.actor, time, begin, end, writes)
                    earlier = uses[block]
                    late = [other for other in earlier if not clocks.has_seen(step.actor, other)]
                    found += [Race(other, use, block) for other in late if other.conflicts_with(use)]
                    uses[block] = [other for other in earlier if other in late or not _replaces(use, other)] + [use]
    return found


def _replaces(use: Use, other: Use) -> bool:
    """Whether who is behind `use` is behind `other`, and who conflicts with that conflicts with `use` too."""
    return (use.writes or not other.writes) and use.begin <= other.begin and other.end <= use.end
