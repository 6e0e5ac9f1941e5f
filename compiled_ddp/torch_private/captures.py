"""What Dynamo captures of a module, each time through an entry of its own, and when it gives up."""

import functools
import inspect
import itertools
import linecache
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from compiled_ddp.torch_private.versions import minor_version

_compiled_in_place: "weakref.WeakKeyDictionary[torch.nn.Module, Any]" = weakref.WeakKeyDictionary()


def without_own_compilation(module: torch.nn.Module) -> torch.nn.Module:
    """Undo model.compile(), which would compile the module's call a second time inside ours."""
    if module._compiled_call_impl is not None:
        _compiled_in_place[module], module._compiled_call_impl = module._compiled_call_impl, None
    return module


def restore_own_compilation(module: torch.nn.Module) -> None:
    """Do again what `without_own_compilation` has undone."""
    if module in _compiled_in_place:
        module._compiled_call_impl = _compiled_in_place.pop(module)


class Capture:
    """A way for Dynamo to run modules: those that share one share what it captures, and compiles by `backend`."""

    def __init__(
        self,
        backend: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
        *,
        fullgraph: bool,
        dynamic: bool | None,
        recurrent: bool,
        compiling: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """`fullgraph` and `dynamic` as in torch.compile; `recurrent` layers are captured, or run eagerly as there.

        `compiling` decorates what Dynamo calls wherever it has no code yet: capturing, and compiling by `backend`.
        """
        # From torch 2.13 on, graphs of other ways through the same code do not count for Dynamo's recompile limit.
        knows_isolation = "isolate_recompiles" in inspect.signature(torch.compile).parameters
        apart: dict[str, Any] = {"isolate_recompiles": True} if knows_isolation else {}
        context: Any = torch._dynamo.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **apart)
        if isinstance(context, torch._dynamo.eval_frame.OptimizeContext):  # and Dynamo is not switched off
            callback: Any = context.callback  # what is put around it has its attributes, by which Dynamo knows backends
            context.callback = compiling(callback)
        self._context: Any = context
        self._recurrent = recurrent
        self._entry: Callable[..., Any] = self._context(_entry_function())

    def of(self, module: torch.nn.Module) -> Callable[..., Any]:
        """`module`, run in this way, in the state that it is in at each call."""
        if not isinstance(module.forward, types.MethodType) or torch._dynamo.trace_rules.check(module.forward):
            run: Callable[..., Any] = functools.partial(self._entry, module)  # [Note: an entry's own code]
        else:
            run = self._context(module)
        return _captured_as_it_is(run, module, recurrent=self._recurrent)


# [Note: an entry's own code] Dynamo does not capture the forward of torch's own modules when that is called from the
# outside; torch.compile then puts one function around each, the same for all. What Dynamo knows of sizes that change
# goes by code: two such models of other sizes are one model of dynamic sizes to it. A function of its own, with code of
# its own, for all modules that may share graphs keeps them apart.
_ENTRY = "def forward(module, /, *args, **kwargs):\n    return module(*args, **kwargs)\n"

_entries = itertools.count()


def _entry_function() -> Callable[..., Any]:
    filename = f"<entry {next(_entries)} of compiled_ddp>"
    linecache.cache[filename] = len(_ENTRY), None, _ENTRY.splitlines(keepends=True), filename  # Dynamo looks for it
    names: dict[str, Any] = {}
    exec(compile(_ENTRY, filename, "exec"), names)
    entry: Callable[..., Any] = names["forward"]
    return entry


def _captured_as_it_is(run: Callable[..., Any], module: torch.nn.Module, *, recurrent: bool) -> Callable[..., Any]:
    """`run` under the settings by which Dynamo captures `module` in the state that it is in.

    It leaves nn.LSTM, nn.GRU and nn.RNN to eager unless told otherwise. torch 2.11 takes a parameter for unchanged
    as long as it is in the same place: an unfrozen one would get no gradient, and one of other strides would go into an
    old graph.
    """
    settings: dict[str, Any] = {}
    if recurrent and any(isinstance(part, torch.nn.RNNBase) for part in module.modules()):
        settings["allow_rnn"] = True
    if minor_version() == (2, 11):
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    if not settings:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(settings):
            return run(*args, **kwargs)

    return call


_UNTIL_RESET = _entry_function.__code__  # among the code that Dynamo has seen, since something was given up


class RecompileLimits(logging.Handler):
    """Notes what Dynamo has given up capturing in this process, because it had been captured too often.

    It does so for code, whoever runs it: also for a model of the same class that was not captured so far.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, str) and record.msg.startswith("torch._dynamo hit config.%s"):
            limit, value, function, *_ = record.args if isinstance(record.args, tuple) else ("?", "?", "?")
            self.note(f"{function} has been captured as often as torch._dynamo.config.{limit} ({value}) allows")

    def note(self, given_up: str) -> None:
        self.notes.append(given_up)
        torch._dynamo.convert_frame.input_codes.add(_UNTIL_RESET)

    def forget_if_reset(self) -> None:
        """Forget what was given up before torch.compiler.reset(), with which Dynamo begins anew."""
        if _UNTIL_RESET not in torch._dynamo.convert_frame.input_codes:
            self.notes.clear()

    def given_up_in(self, module: torch.nn.Module) -> list[str]:
        """The notes about the forward of `module` or of a part of it."""
        # Looked up without asking the class: TorchScript's has one that only objects have.
        forwards = {inspect.getattr_static(type(part), "forward") for part in module.modules()}
        codes = [forward.__code__ for forward in forwards if isinstance(forward, types.FunctionType)]
        places = [f"({code.co_filename}:{code.co_firstlineno})" for code in codes]
        return [note for note in self.notes if any(place in note for place in places)]


@functools.cache
def recompile_limits() -> RecompileLimits:
    limits = RecompileLimits()
    logging.getLogger("torch._dynamo.convert_frame").addHandler(limits)
    return limits
