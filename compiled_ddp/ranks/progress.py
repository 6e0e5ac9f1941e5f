"""Where this rank stands: what it writes down as it trains, and puts into words when a wait has failed somewhere."""

import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from compiled_ddp import torch_private
from compiled_ddp.formatting import format_bytes, format_names
from compiled_ddp.passes.ops import EXCHANGES
from compiled_ddp.plan import Bucket

_STAGES = ("before its backward", "in its backward", "after its backward")
_BEFORE, _IN, _AFTER = range(len(_STAGES))
_MOST_FRAMES = 3  # of the user's code in a report
_OWN_PACKAGES = ("torch", "compiled_ddp")  # Inductor's kernels too: they run as modules below torch
_TORCH_SOURCES = str(Path(torch.__file__).parent)  # also of functions that AOTAutograd writes
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def format_bucket(position: int, bucket: Bucket, parameter_names: Sequence[str]) -> str:
    """A bucket's name in messages and profiles: `position` in the launch order, parameters, size."""
    names = format_names([parameter_names[index] for index in bucket.indices])
    return f"bucket {position} ({names or 'riders'}; {format_bytes(bucket.nbytes)})"


class Course(NamedTuple):
    """How many of the things that all ranks do in one order a rank has begun.

    [Note: ranks on different courses] Of two ranks on one course, the one that has begun more backwards has not begun
    fewer broadcasts. If it has, they have parted: one of them waits for buffers at the beginning of a forward where the
    other one has gone into a backward, and neither will ever come to what the other waits for.
    """

    backwards: int  # synchronised ones
    broadcasts: int  # of parameters and buffers

    def has_parted_from(self, other: "Course") -> bool:
        """Whether this rank broadcasts where the other one has gone into a backward."""
        return self.broadcasts > other.broadcasts and self.backwards < other.backwards


_BEGINNING = Course(0, 0)


@dataclass(frozen=True)
class Position:
    """One rank's place, in words, and in numbers by which ranks can be compared."""

    launches: int  # collectives on the wrapper's communicator since it was made: the same on ranks that are level
    point: tuple[int, int, bool]  # step, stage, whether it waits: later is larger
    text: str
    python: tuple[str, ...]  # innermost first
    course: Course = _BEGINNING


_NO_MEMORY: Mapping[int, torch.Tensor] = {}


@dataclass
class _GraphRun:
    """A graph that launches the buckets from `first` on by itself."""

    first: int
    launches_before: int
    lent: Mapping[int, int]  # address of memory that it fills -> position of its bucket


def _places_of(memory: Mapping[int, torch.Tensor]) -> Mapping[int, int]:
    return dict(zip(map(torch.Tensor.data_ptr, memory.values()), memory, strict=True))


@dataclass
class _Backward:
    """One synchronised backward. The next one has another record, so that a reader sees one of them alone."""

    buckets: Sequence[tuple[int, Bucket]] = ()  # section, bucket, in launch order
    origins: Sequence[str] = ()  # of the sections
    parameter_names: Sequence[str] = ()
    collectives: Sequence[int] = ()  # how many reduce each bucket
    launched: int = -1  # position of the last bucket launched by hooks, or by a graph that has ended
    awaits: int | None = None  # position of the bucket that is waited for outside of a graph
    graph: _GraphRun | None = None
    launches_before: int = 0  # collectives launched on the communicator when it began

    def name(self, position: int) -> str:
        if position >= len(self.buckets):
            return "a further collective of the communication hook"
        _, bucket = self.buckets[position]
        return format_bucket(position, bucket, self.parameter_names)

    def last_launched(self, launches: int) -> int:
        """Position of the last bucket launched, or begun to be, when there have been `launches` in all; -1 for none."""
        graph = self.graph
        if graph is None:
            return self.launched
        position, left = graph.first, launches - graph.launches_before
        while left > 0 and position < len(self.buckets):
            left -= self.collectives[position]
            position += 1
        return position - 1

    def format_section(self, position: int) -> str:
        section, _ = self.buckets[position]
        if self.origins[section] != "graph":
            return "by hooks"
        graphs = [n for n, origin in enumerate(self.origins) if origin == "graph"]
        return f"of graph {graphs.index(section) + 1} of {len(graphs)}"

    def format_awaited(self, launches: int, frames: Sequence[FrameType]) -> str:
        graph = self.graph
        if graph is None:
            return "" if self.awaits is None else self.name(self.awaits)
        operator, awaited = next(_collectives_in(frames), (None, None))
        if operator is not torch.ops._c10d_functional.wait_tensor.default or not isinstance(awaited, torch.Tensor):
            return ""
        if awaited.data_ptr() in graph.lent:
            return self.name(graph.lent[awaited.data_ptr()])
        launched = range(graph.first, self.last_launched(launches) + 1)
        size = awaited.numel(), awaited.dtype
        alike = [p for p in launched if (self.buckets[p][1].numel, self.buckets[p][1].dtype) == size]
        return _one_of([self.name(position) for position in alike])


class RankProgress:
    """What a rank would report. Writing it down costs an assignment or two for each launch, forward or backward.

    Another thread may read it at any time. It keeps no tensor, no module and no wrapper alive.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._count_launches = torch_private.groups.launch_counter(group)
        self.counts_launches = torch_private.groups.counts_collectives(group)
        self._step, self._stage = 0, _BEFORE
        self._thread = threading.main_thread().ident
        self._backward = _Backward()
        self._awaits = ""  # what this rank waits for that is no bucket; empty for nothing
        self._backwards = self._broadcasts = 0  # begun so far
        self._comes = 0  # 1 where a backward waits for what ranks agree on before it begins

    # ---- writing -----------------------------------------------------------------------------------------------------

    def forward_began(self, step: int) -> None:
        """`step` is the number of synchronised forwards begun so far."""
        self._step, self._stage = step, _BEFORE
        self._thread = threading.get_ident()

    def note_wait(self, what: str) -> None:
        """This rank waits for `what`, which is no bucket, from here on; empty for nothing."""
        self._awaits = what

    def broadcast_began(self, what: str) -> None:
        """As `note_wait`, for a broadcast."""
        self._broadcasts += 1
        self._awaits = what

    def backward_comes(self) -> None:
        """Ranks agree on something before a backward begins."""
        self._comes = 1

    def backward_began(
        self,
        step: int,
        buckets: Sequence[tuple[int, Bucket]],
        origins: Sequence[str],
        parameter_names: Sequence[str],
        collectives: Sequence[int],
    ) -> None:
        """`buckets` come with their sections, in launch order; `collectives` tells how many reduce each of them."""
        self._backward = _Backward(buckets, origins, parameter_names, collectives, launches_before=self.launches)
        self._step, self._stage, self._awaits = step, _IN, ""
        self._comes, self._backwards = 0, self._backwards + 1
        self._thread = threading.get_ident()

    def backward_ended(self, *, launched_all: bool = False) -> None:
        """With `launched_all` it has launched all that it has, and nothing besides: `all_launched`."""
        if launched_all:
            self.all_launched()
        self._stage, self._backward.awaits = _AFTER, None

    def hooks_launched(self, position: int) -> None:
        self._backward.launched = position

    def all_launched(self) -> None:
        """The backward has launched all that it has. If they are not as many as it has told of, the count is no use."""
        if self.launches != self._backward.launches_before + sum(self._backward.collectives):
            self.counts_launches = False

    def hooks_await(self, position: int | None) -> None:
        """The bucket that is waited for from here on; None for none."""
        self._backward.awaits = position

    def graph_began(self, first: int, memory: Mapping[int, torch.Tensor] = _NO_MEMORY) -> None:
        """A graph is about to launch the buckets from position `first` on, and fills `memory`, as in `graph_fills`."""
        self._backward.graph = _GraphRun(first, self.launches, _places_of(memory))
        self._thread = threading.get_ident()

    def graph_fills(self, memory: Mapping[int, torch.Tensor]) -> None:
        """The flat buffers, by position, that the graph has been lent."""
        graph = self._backward.graph
        assert graph is not None
        graph.lent = _places_of(memory)

    def graph_ended(self) -> None:
        self._backward.launched = self._backward.last_launched(self.launches)
        self._backward.graph = None

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def launches(self) -> int:
        """Collectives launched on the communicator since it was made."""
        group = self._group()
        return 0 if group is None else self._count_launches(group)

    @property
    def launches_before(self) -> int:
        """Those before the latest backward."""
        return self._backward.launches_before

    @property
    def standing(self) -> tuple[object, ...]:
        """Another one as soon as this rank has gone on."""
        return self._step, self._stage, self._awaits, self._comes, self._backwards, self._broadcasts, self.launches

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun, or is about to."""
        return self._stage == _IN or self._comes == 1

    def at_most_broadcasts(self) -> Course:
        """When so many backwards had begun, there had been so many broadcasts, or fewer: it may go on meanwhile."""
        backwards = self._backwards + self._comes
        return Course(backwards, self._broadcasts)

    def at_most_backwards(self) -> Course:
        """When so many broadcasts had begun, there had been so many backwards, or fewer."""
        broadcasts = self._broadcasts
        return Course(self._backwards + self._comes, broadcasts)

    @property
    def first_of_graph(self) -> int:
        """Position of the first bucket of the graph that is running."""
        assert self._backward.graph is not None
        return self._backward.graph.first

    def bucket(self, position: int) -> str:
        """The name of the bucket at `position` of the latest backward's launch order."""
        return self._backward.name(position)

    def read(self, frames: Sequence[FrameType] | None = None) -> Position:
        """This rank's position now. `frames`, innermost first, are those of a wait that has failed."""
        if frames is None:
            frames = _frames_of(self._thread)
        backward, step, stage, launches = self._backward, self._step, self._stage, self.launches
        parts = [f"step {step}, {_STAGES[stage]}"]
        last = backward.last_launched(launches)
        if last >= 0:
            parts.append(f"last bucket launched: {backward.name(last)}, {backward.format_section(last)}")
        elif stage == _IN:
            parts.append("no bucket launched")
        awaited = self._awaits or backward.format_awaited(launches, frames)
        if awaited:
            parts.append(f"first awaited: {awaited}")
        python = python_position(frames) or python_position(_frames_of(threading.main_thread().ident))
        parts.append(f"collectives launched: {launches}")
        point = step, stage, bool(awaited)
        return Position(launches, point, "; ".join(parts), python, self.at_most_backwards())


def _one_of(names: Sequence[str]) -> str:
    """An alternative of names; where memory does not tell buckets apart, their size may leave several."""
    return " or ".join(names[:3]) + (f" or one of {len(names) - 3} more" if len(names) > 3 else "")


# ---- Python's stack --------------------------------------------------------------------------------------------------


def _frames_of(thread: int | None) -> list[FrameType]:
    """The frames of a thread of this process, innermost first; none if it has ended."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    return list(_outwards(frame))


def frames_of_error(error: BaseException) -> list[FrameType]:
    """The frames from where `error` came up to the one that handles it, and on outwards; innermost first."""
    inner = []
    traceback = error.__traceback__
    while traceback is not None:
        inner.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return [*reversed(inner), *_outwards(sys._getframe(1))]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def python_position(frames: Sequence[FrameType]) -> tuple[str, ...]:
    """The innermost frames of the user's code as "file:line in function"."""
    return tuple(
        f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        for frame in frames
        if _is_users(frame)
    )[:_MOST_FRAMES]


def _is_users(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN_PACKAGES:
        return False
    path = frame.f_code.co_filename
    if path.startswith(("<", _TORCH_SOURCES)):  # "<": generated code
        return False
    return not path.startswith(_STANDARD_LIBRARY) or "site-packages" in path


def failed_in_collective(error: BaseException) -> bool:
    """Whether an operator that launches or awaits a collective raised `error`."""
    return isinstance(error, dist.DistError) or next(_collectives_in(frames_of_error(error)), None) is not None


def _collectives_in(frames: Iterable[FrameType]) -> Iterator[tuple[Any, Any]]:
    """(operator, first argument) of the calls of collectives among the innermost `frames`."""
    for frame in list(frames)[:4]:
        operator = frame.f_locals.get("self")
        if not isinstance(operator, OpOverload):
            continue
        if operator.namespace in ("_c10d_functional", "c10d") or operator in EXCHANGES:
            arguments = frame.f_locals.get("args", ())
            yield operator, arguments[0] if arguments else None
