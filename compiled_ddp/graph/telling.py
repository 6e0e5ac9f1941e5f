"""What a wrapper tells of its compilers, where they take long."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator

import torch

from compiled_ddp import torch_private
from compiled_ddp.graph import compile_once
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.telling.slow_work import SlowWork

_log = logging.getLogger(__name__)
_MOST_OF_A_GUARD = 200  # characters


class Teller:
    """Of one wrapper, on rank 0 of its group."""

    def __init__(self, runtime: Runtime, model: str, *, compiles_once: bool) -> None:
        """`model` is the name of its class; `compiles_once` tells whether ranks of a host take turns at compiling."""
        self.takes_turns = compiles_once and runtime.communicator.world_size > 1
        self._runtime = weakref.ref(runtime)  # captured graphs, which have a teller, last as long as the process
        self._model, self._is_told = model, runtime.communicator.rank == 0
        self._graphs = 0  # that have been captured and compiled for this wrapper
        self._is_warming_up = False

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """What is compiled in this context is compiled ahead."""
        self._is_warming_up = True
        try:
            yield
        finally:
            self._is_warming_up = False

    def capturing(self) -> contextlib.AbstractContextManager[None]:
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

    def compiling_forward(self, graph: int) -> contextlib.AbstractContextManager[None]:
        """The work of a compiler on a captured graph."""
        occasion, guard = self._occasion(), _failed_guard()()
        return self._compiling("forward", graph, f"{occasion}{guard}" if guard else f"first used {occasion}")

    def compiling_backward(
        self, name: str, graph: int, *, spares_saved_tensors: bool
    ) -> contextlib.AbstractContextManager[None]:
        """The same for a backward of it, that needs to leave the saved tensors as they are or does not."""
        occasion = self._occasion()
        again = f"again {occasion}, for backwards with retain_graph=True"
        return self._compiling(f"backward ({name})", graph, again if spares_saved_tensors else f"first used {occasion}")

    def in_turn(self, work: str | None) -> contextlib.AbstractContextManager[object]:
        """To compile `work` in, as `compile_once.in_turn`."""
        return compile_once.in_turn(work, self._waiting_for)

    @property
    def backward_follows(self) -> bool:
        """Whether the forward under way is a synchronised one, whose backward is the first that is needed."""
        runtime = self._runtime()
        return runtime is not None and runtime.backwards.forward.synchronises

    def _waiting_for(self, owner: compile_once.Owner | None) -> contextlib.AbstractContextManager[None]:
        return self._work(("waiting", "waited"), compile_once.waiting_for(owner), self._model, str)

    def _compiling(self, what: str, graph: int, why: str) -> contextlib.AbstractContextManager[None]:
        return self._work(("compiling", "compiled"), what, f"{self._model} (graph {graph})", lambda: why)

    @contextlib.contextmanager
    def _work(self, verb: tuple[str, str], what: str, of: str, why: Callable[[], str]) -> Iterator[None]:
        runtime = self._runtime()
        living = contextlib.nullcontext() if runtime is None else runtime.communicator.ranks.living()
        with living, SlowWork(_log, verb, what=what, of=of, why=why, is_told=lambda: self._is_told):
            yield

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

    def in_turn(self, work: str | None) -> contextlib.AbstractContextManager[object]:
        return self._teller.in_turn(work)

    def compiling_backward(
        self, name: str, teller: Teller | None, *, spares_saved_tensors: bool
    ) -> contextlib.AbstractContextManager[None]:
        """For another wrapper if that is given."""
        whose = self._teller if teller is None else teller
        return whose.compiling_backward(name, self._number, spares_saved_tensors=spares_saved_tensors)
