"""The warm-ups of one wrapper: everything is compiled, and the compiled model timed beside the model as it is."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compiled_ddp import torch_private
from compiled_ddp.graph.kept_state import state_kept
from compiled_ddp.graph.program import VARIANTS, SegmentCalls
from compiled_ddp.graph.telling import Teller
from compiled_ddp.graph.warmup import Choice, Compiled, Pass, PassTimes, tell, time_both, timed, warm_up
from compiled_ddp.model.managed import ManagedState, every_parameter
from compiled_ddp.ranks import pretended
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapping.parts import Settings


class WarmUps:
    """The warm-ups of a wrapper in use."""

    def __init__(
        self,
        managed: ManagedState,
        settings: Settings,
        runtime: Runtime,
        choice: Choice,
        teller: Teller,
        *,
        calls: SegmentCalls,
        run_compiled: Callable[..., Any],
    ) -> None:
        """`calls` are those that `run_compiled` makes; `choice` is what is to be decided."""
        self.teller = teller
        self._managed, self._settings, self._runtime, self._choice = managed, settings, runtime, choice
        self._calls, self._run_compiled = calls, run_compiled
        self._count = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> None:
        """One of them, with a forward's arguments: a collective. `training` is the wrapper's mode."""
        self._count += 1
        ranks = self._runtime.communicator.ranks
        chooses = training and self._may_choose()
        measure = functools.partial(self._time_both, args, kwargs) if chooses else lambda: None
        with state_kept(self._managed.module), self.teller.warming_up():
            of_ranks = warm_up(ranks, self._count, self._compile_ahead(args, kwargs), measure=measure)
            self._choice.note(of_ranks, steps=self._runtime.number)
            if None not in of_ranks:
                tell(ranks, str(self._choice))

    def _compile_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Compiled]:
        """Run the module, outside of any step, and compile the backwards of what it calls."""

        def run_forward() -> bool:
            self._run_compiled(*args, **kwargs)  # its graph goes with its outputs: no backward will ever reach it
            return True

        with self._calls.apart(stay_local=False):
            yield from timed("the forward", run_forward)
            called = self._calls.segments
        reducing = {segment: program for segment, program in called.items() if program is not None}
        for number, (segment, program) in enumerate(reducing.items(), start=1):
            graph = f"graph {number} of {len(reducing)} ({len(program.plan.indices)} gradients)"
            yield from timed(f"{graph}, local backward", functools.partial(segment.compile_local_ahead, self))
            for variant in VARIANTS:
                yield from timed(f"{graph}, {variant} backward", functools.partial(program.compile_ahead, variant))
        for segment in called.keys() - reducing.keys():
            compile_backward = functools.partial(segment.compile_local_ahead, self)
            yield from timed("backward of a graph without trained parameters", compile_backward)

    def _may_choose(self) -> bool:
        """Whether the compiled model may be given up, and another backward than a step's be run now."""
        options = self._settings.options
        if (
            pretended.current() is not None
            or not options.warmup_chooses
            or options.strict
            or options.backend != "inductor"
        ):
            return False
        # Wrappers inside would take what is timed for a step of theirs.
        return torch.is_grad_enabled() and not self._runtime.is_awaited() and not self._managed.wrappers_inside()

    def _time_both(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PassTimes | None:
        module = self._managed.module
        # A user's hook on a parameter would be called with what is timed.
        parameters = [
            p for p in every_parameter(module) if p.requires_grad and not torch_private.tensors.has_tensor_hooks(p)
        ]
        if not parameters:
            return None
        try:
            with self._calls.apart(stay_local=True):
                return time_both(Pass(args, kwargs, parameters), compiled=self._run_compiled, eager=module)
        except Exception as error:  # reentrant checkpoints refuse a backward that leaves .grad alone
            warn_user(
                f"warmup() could not time a forward and backward by themselves, and the model stays compiled: {error}"
            )
            return None
