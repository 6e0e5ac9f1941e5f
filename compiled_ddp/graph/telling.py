"""What a wrapper tells of its compilers, where they take long: what is compiled, and for how long."""

import contextlib
import functools
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.collector import full_collections_put_off
from compiled_ddp.frames import with_room_for_frames
from compiled_ddp.graph import compile_once
from compiled_ddp.graph.other_hosts import OtherHosts, Owner
from compiled_ddp.ranks import pretended
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.telling import log
from compiled_ddp.telling.slow_work import SlowWork

# ---- what has been compiled or found in the cache, and how long that took the last time ------------------------------

# A graph's forward, and its three backwards: [Note: backward variants] in graph/program.py.
MOST_OF_A_GRAPH = 4


class Compilation(NamedTuple):
    """A forward or a backward that is there now. `by` is who has compiled it, if known."""

    what: str
    graph: int
    seconds: float
    was_found: bool
    by: str = ""

    def __str__(self) -> str:
        return f"{self.what} of graph {self.graph} ({self.by or f'{self.seconds:.1f} s'})"


def describe(compilations: Sequence[Compilation]) -> str:
    """A line for those that were compiled here, and one for those that were not; empty where there are none."""
    here = ", ".join(str(each) for each in compilations if not each.was_found)
    found = ", ".join(str(each) for each in compilations if each.was_found)
    lines = [f"Compiled here: {here}."] if here else []
    if found:
        lines.append(f"Loaded from {torch_private.compiler_cache.folder()}: {found}.")
    return "\n".join(lines)


def seconds_of_last_time(name: str) -> float | None:
    """How long it took to compile what has this name, in whatever process filled the same cache; None if unknown."""
    return _seconds().get(name)


def note_seconds(name: str, seconds: float) -> None:
    """For the next process. Of two that note at the same time one may be lost."""
    noted = json.dumps(_seconds() | {name: round(seconds, 1)})
    file = _file()
    with contextlib.suppress(OSError):  # it is only an estimate for somebody else
        file.parent.mkdir(parents=True, exist_ok=True)
        torch_private.compiler_cache.write_whole(file, noted.encode())


def _file() -> Path:
    return torch_private.compiler_cache.own_folder() / "seconds.json"


def _seconds() -> dict[str, float]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {name: seconds for name, seconds in items if isinstance(seconds, int | float)}


# ---- how Python is set up while compilers run in it ------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")


def compiling(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which runs a compiler: with room for its frames, and no collections of all objects."""

    @with_room_for_frames
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with full_collections_put_off():
            return function(*args, **kwargs)

    return call


# ---- what is told ----------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_MOST_OF_A_GUARD = 200  # characters


class Teller:
    """Tells users, on rank 0 of a wrapper's group, what compilers do for it."""

    def __init__(self, runtime: Runtime, model: str, *, backend: str, compiles_once: bool) -> None:
        """`model` is the name of its class; `compiles_once` tells whether ranks of a host take turns at compiling."""
        self._estimates = backend == "inductor"  # what another one takes is not noted
        self.takes_turns = compiles_once and runtime.communicator.world_size > 1
        self._runtime = weakref.ref(runtime)  # captured graphs, which have a teller, last as long as the process
        self._model, self._is_told = model, runtime.communicator.rank == 0
        self._graphs = 0  # that have been captured and compiled for this wrapper
        self._is_warming_up = False
        self.compilations = list[Compilation]()
        self._has_told_of_difference = False
        self._begun = set[tuple[str, int, bool]]()
        self._compiled_by: Owner | None = None  # what this process is to look for now

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """What is compiled in this context is compiled ahead."""
        self._is_warming_up = True
        try:
            yield
        finally:
            self._is_warming_up = False

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        """The work of Dynamo on the model's forward, in this thread."""
        occasion, guard = self._occasion(), _failed_guard()
        return self._work(("capturing", "captured"), "forward", self._model, lambda: f"{occasion}{guard()}")

    @property
    def next_graph(self) -> int:
        """The number of the graph that is captured next for this wrapper, from 1 on."""
        return self._graphs + 1

    def graph_compiled(self) -> None:
        """The one that was next has been captured, and its forward compiled. Dynamo may begin a capture anew."""
        self._graphs += 1

    def compiling_forward(self, graph: int) -> contextlib.AbstractContextManager[object]:
        """The work of a compiler on a captured graph."""
        occasion, guard = self._occasion(), _failed_guard()()
        return self._compiling("forward", graph, f"{occasion}{guard}" if guard else f"first used {occasion}")

    def compiling_backward(
        self, name: str, graph: int, *, spares_saved_tensors: bool
    ) -> contextlib.AbstractContextManager[object]:
        """The work of a compiler on a backward of the graph, which may have to spare the saved tensors."""
        occasion = self._occasion()
        why = (
            f"again {occasion}, for backwards with retain_graph=True"
            if spares_saved_tensors
            else f"first used {occasion}"
        )
        return self._compiling(f"backward ({name})", graph, why, again=spares_saved_tensors)

    @contextlib.contextmanager
    def in_turn(self, work: Mapping[str, str] | None, what: str, graph: int) -> Iterator[None]:
        """To compile `work` in, the forward or a backward of a graph, as `compile_once.in_turn`."""
        named, runtime = f"{what} of {self._model} (graph {graph})", self._runtime()
        other_hosts = None
        if work is not None and runtime is not None and dist.is_initialized() and pretended.current() is None:
            other_hosts = OtherHosts(runtime.communicator.ranks, named, work, self._tell_once)

        def waiting(owner: Owner | None) -> contextlib.AbstractContextManager[object]:
            compiles = compile_once.waiting_for(owner, named)
            return self._work(("waiting", "waited"), compiles, "", lambda: self._estimate(what, graph))

        with compile_once.in_turn(work, waiting, other_hosts) as owner:
            before, self._compiled_by = self._compiled_by, owner
            try:
                yield
            finally:
                self._compiled_by = before

    def _tell_once(self, line: str) -> None:
        """Tell of the first graph alone in which this rank differs from others: it may be one of 10,000 ranks."""
        if not self._has_told_of_difference:
            self._has_told_of_difference = True
            log.tell(_log, line)

    @property
    def backward_follows(self) -> bool:
        """Whether the forward under way is a synchronised one, whose backward is the first that is needed."""
        runtime = self._runtime()
        return runtime is not None and runtime.forward.synchronises

    @contextlib.contextmanager
    def _compiling(self, what: str, graph: int, why: str, *, again: bool = False) -> Iterator[None]:
        self._begun.add((what, graph, again))  # once, where Dynamo begins a capture anew
        number, most = len(self._begun), MOST_OF_A_GRAPH * max(graph, self._graphs)
        counted, estimate = f"{number} of at most {most}" if number <= most else "", self._estimate(what, graph)
        told = ", ".join(filter(None, [counted, why, estimate]))
        of, began = f"{self._model} (graph {graph})", time.perf_counter()
        looked_for = torch_private.compiler_cache.Lookups()
        with self._work(("compiling", "compiled"), what, of, lambda: told) as work:
            yield
            if looked_for.found and not looked_for.missed:
                work.note_result("it was in the cache")
        self._note(what, graph, time.perf_counter() - began, looked_for)

    def _note(self, what: str, graph: int, seconds: float, looked_for: torch_private.compiler_cache.Lookups) -> None:
        """What has been compiled, or has been found in the cache; neither is known of other backends than Inductor."""
        if looked_for.missed:
            note_seconds(self._name_of(what, graph), seconds)
        if looked_for.found or looked_for.missed:
            owner = None if looked_for.missed else self._compiled_by
            by = "" if owner is None else f"by rank {owner.rank} on {owner.host}"
            self.compilations.append(Compilation(what, graph, seconds, not looked_for.missed, by))

    def _estimate(self, what: str, graph: int) -> str:
        seconds = seconds_of_last_time(self._name_of(what, graph)) if self._estimates else None
        return "" if seconds is None else f"it took {seconds:.0f} s the last time"

    def _name_of(self, what: str, graph: int) -> str:
        runtime = self._runtime()
        elements = 0 if runtime is None else sum(parameter.numel() for parameter in runtime.parameters.tensors)
        return f"{what} of {self._model}, {elements} elements trained, graph {graph}"

    @contextlib.contextmanager
    def _work(self, verb: tuple[str, str], what: str, of: str, why: Callable[[], str]) -> Iterator[SlowWork]:
        runtime = self._runtime()
        living = contextlib.nullcontext() if runtime is None else runtime.communicator.ranks.living()
        with living, SlowWork(_log, verb, what=what, of=of, why=why, is_told=lambda: self._is_told) as work:
            yield work

    def _occasion(self) -> str:
        """In which step of its wrapper this thread is."""
        runtime = self._runtime()
        if self._is_warming_up or runtime is None:
            return "in warmup()"
        in_backward = torch_private.autograd.current_graph_task() != -1
        return f"in step {runtime.step}" if in_backward or torch.is_grad_enabled() else "in a forward without gradients"


def _failed_guard() -> Callable[[], str]:
    """Asked where Dynamo captures, tells later which guard of what it has captured before fails, if any."""
    ask = torch_private.dynamo.why_captured_again()

    def tell() -> str:
        guard = ask()
        return f", again: {guard[:_MOST_OF_A_GUARD]}" if guard else ""

    return tell


class CapturedFor:
    """The wrapper that a graph has been captured for, and the graph's number there."""

    def __init__(self, teller: Teller) -> None:
        self._teller, self._number = teller, teller.next_graph

    @contextlib.contextmanager
    def compiling_forward(self) -> Iterator[None]:
        with self._teller.compiling_forward(self._number):
            yield
        self._teller.graph_compiled()

    def in_turn(self, work: Mapping[str, str] | None, backward: str) -> contextlib.AbstractContextManager[object]:
        return self._teller.in_turn(work, f"backward ({backward})", self._number)

    def compiling_backward(
        self, name: str, teller: Teller | None, *, spares_saved_tensors: bool
    ) -> contextlib.AbstractContextManager[object]:
        """For another wrapper if that is given."""
        whose = self._teller if teller is None else teller
        return whose.compiling_backward(name, self._number, spares_saved_tensors=spares_saved_tensors)
