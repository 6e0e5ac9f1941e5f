"""A wrapper's program in a captured segment: the plan over the graph's inputs, and the backwards that reduce by it."""

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from compiled_ddp import torch_private
from compiled_ddp.checks.values import Expected, Reference
from compiled_ddp.graph.compiled_graph import CompiledGraph
from compiled_ddp.graph.reference import NoReference
from compiled_ddp.graph.telling import Teller
from compiled_ddp.passes.inline_hook import TracedHook
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import BucketPlan
from compiled_ddp.ranks.communicator import SHARED_NAME, Communicator, NameInGraphs
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.graphs import ReservedSection
from compiled_ddp.step.steady import SteadyGraph
from compiled_ddp.torch_private.inductor import Rewriting

# ---- a wrapper's program ---------------------------------------------------------------------------------------------

# [Note: backward variants] A graph has one forward and several backwards, each compiled when it is first needed:
# local          no collective, no scaling: what plain torch.compile produces, and shares its cache entry
# synchronised   the passes' program, which wrappers share where their plans are equal: [Note: one name in all graphs]
# folding        the same, with gradients of earlier local backwards as further inputs
# Which one runs is decided when the backward starts.
Variant = Literal["synchronised", "folding"]
VARIANTS: tuple[Variant, ...] = ("synchronised", "folding")


_GONE = "the backward of a graph that is gone"
AnySection = ReservedSection | SteadyGraph


class Captured(Protocol):
    """What Dynamo calls in place of a graph."""

    @property
    def graph(self) -> CompiledGraph: ...


class Program:
    """How a wrapper reduces the gradients of some of a graph's inputs."""

    def __init__(
        self,
        plan: BucketPlan,
        *,
        communicator: Communicator,
        naive: bool,
        hooks: Sequence[TracedHook | None],
        backend: str,
        compiler_options: dict[str, Any],
        captured: Callable[[], "Captured | None"],
        teller: Teller,
    ) -> None:
        """`plan` is over the graph's inputs; `hooks` reduce its buckets, one for each or none.

        `teller` tells of what compilers do for it. What was `captured` is asked for its graph when a backward is
        needed, as the first one of a graph is known before that is compiled.
        """
        self.plan, self.teller = plan, teller
        self._captured = captured
        self._in_cuda_graphs = backend == "inductor" and any(
            torch_private.compiler_options.uses_cuda_graphs(compiler_options, bucket.device) for bucket in plan.buckets
        )
        self._communicator = weakref.ref(communicator)  # an autograd graph that lives on is not to keep it
        self._shares_name = not hooks and not self._in_cuda_graphs  # hooks are traced with the communicator's own
        self._pipeline = Pipeline(
            plan,
            SHARED_NAME if self._shares_name else communicator.group_name,
            naive=naive,
            hooks=tuple(hooks),
            in_place=backend == "aot_eager",
            replayed=self._in_cuda_graphs,
        )
        self._rewritings: dict[tuple[Variant, str], Rewriting] = {}
        self._lent_buckets = self._pipeline.lent_buckets
        self._has_hooks = bool(hooks)
        self._failures: dict[Variant, str] = {}

    def rewriting(self, variant: Variant, group_name: str | None = None) -> Rewriting:
        """`group_name` is that of most runs by default."""
        key = variant, group_name or self._pipeline.group_name
        if key not in self._rewritings:
            fold, name = variant == "folding", key[1]
            pipeline = replace(self._pipeline, fold=fold, group_name=name)
            self._rewritings[key] = torch_private.inductor.rewriting_by(pipeline.run, pipeline.cache_identity, variant)
        return self._rewritings[key]

    def _graph(self) -> CompiledGraph:
        captured = self._captured()
        assert captured is not None, _GONE
        return captured.graph

    def compile_ahead(self, variant: Variant) -> bool:
        """Compile a backward before it is needed; returns False if it was compiled already."""
        with self.named():  # Inductor looks for the group
            _, is_new = self._graph().backward(self.rewriting(variant), self)
        return is_new

    def named(self) -> contextlib.AbstractContextManager[str]:
        """Within this context the communicator has the name that is returned: [Note: one name in all graphs]"""
        communicator = self._communicator()
        assert communicator is not None, "the program of a wrapper that is gone"
        return NameInGraphs(communicator.group, communicator.group_name, shared=self._shares_name)

    def compile(self, variant: Variant) -> str | None:
        """Compile a backward, unless it is; returns how the compiler has failed, if it has, now or before."""
        if variant in self._failures:
            return self._failures[variant]
        rewriting = self._rewritings.get((variant, self._pipeline.group_name))
        captured = self._captured()
        assert captured is not None, _GONE
        if rewriting is None or rewriting.identity not in captured.graph.compiled:
            try:
                self.compile_ahead(variant)
            except Exception as error:
                self._failures[variant] = quoted(error)
                return self._failures[variant]
        return None

    def run(self, section: AnySection, call: GraphCall, node: Any, saved_and_tangents: list[Any]) -> Any:
        """The gradients of the graph's inputs, reduced in a reserved `section` of the running backward."""
        with self.named() as group_name:
            section, compiled, state = self._take_inputs(section, call, saved_and_tangents, group_name)
            graph = functools.partial(compiled, node, saved_and_tangents)
            try:
                *gradients, riders = section.run(graph, group_name, sees_values=not self._in_cuda_graphs)
                return self._hand_over(section, call, gradients, riders, state)
            except BaseException:
                section.break_off()
                raise

    def _take_inputs(
        self, section: AnySection, call: GraphCall, saved_and_tangents: list[Any], group_name: str
    ) -> tuple[AnySection, torch_private.aot.BackwardImplementation, int]:
        """Add what the section gives; returns that, the compiled backward, and how many tensors are a hook's state."""
        graph = self._graph()
        try:
            if graph.inputs_when_traced_again is not None:
                graph.check_fits(saved_and_tangents)
            to_fold = section.gradients_to_fold()
            variant: Variant = "folding" if to_fold else "synchronised"
            rewriting = self._rewritings.get((variant, group_name)) or self.rewriting(variant, group_name)
            compiled = graph.compiled.get(rewriting.identity) or graph.backward(rewriting, self)[0]
            fingerprint = (
                graph.fingerprint_at(call.fingerprint, saved_and_tangents) if graph.is_dynamic else call.fingerprint
            )
            section = section.note_graph(
                compiled, fingerprint, functools.partial(self._without_passes, call, saved_and_tangents, to_fold)
            )
            flat_buffers = section.lend_buffers(self._lent_buckets)
            state: list[torch.Tensor] = []
            if self._has_hooks:
                assert isinstance(section, ReservedSection), "a steady step has no communication hook"
                state = section.hook_state()
            undefined = [call.index_of[n] for n in call.undefined & call.index_of.keys()] if call.undefined else []
            riders = section.rider_values(undefined)
            saved_and_tangents += [riders, *to_fold, *state, *flat_buffers]
        except BaseException:
            section.give_up()
            raise
        return section, compiled, len(state)

    def _without_passes(
        self, call: GraphCall, saved_and_tangents: Sequence[Any], to_fold: Sequence[torch.Tensor], share: float
    ) -> Reference:
        """What the gradients of the call's parameters are, and times `share` in their bucket: `checks.values`."""
        try:
            return self._run_without_passes(call, saved_and_tangents, to_fold, share)
        except NoReference as error:
            return Reference({}, str(error))
        except torch.OutOfMemoryError:
            torch_private.tensors.give_back_cached_memory()
            return Reference({}, "there was no memory for it")

    def _run_without_passes(
        self, call: GraphCall, saved_and_tangents: Sequence[Any], to_fold: Sequence[torch.Tensor], share: float
    ) -> Reference:
        gradients, epsilon = self._graph().run_without_passes(saved_and_tangents)
        folded = dict(zip(self.plan.indices, to_fold, strict=True)) if to_fold else {}
        expected = {}
        for place, index in call.index_of.items():
            rounded = gradients[place]
            if rounded is not None:
                value = rounded.gradient if place not in folded else rounded.gradient + folded[place]
                noise = (abs(share) * rounded.noise_norm, abs(share) * rounded.noise_most)
                expected[index] = Expected(value * share if share else torch.zeros_like(value), *noise, epsilon)
        return Reference(expected, "its gradient is known before the backward runs")

    def _hand_over(
        self, section: AnySection, call: GraphCall, gradients: list[Any], riders: torch.Tensor, state: int
    ) -> Any:
        """Give the section what the graph has returned, with `state` tensors of a hook; returns autograd's part."""
        left_out = set[int]()
        if isinstance(section, ReservedSection):  # a steady step has every gradient, and no communication hook
            if call.undefined:
                left_out = section.unused_everywhere(riders)
            if state:
                gradients, new_state = gradients[:-state], gradients[-state:]
                if self._in_cuda_graphs:  # the next replay writes over what this one returned
                    new_state = [tensor.clone() for tensor in new_state]
                section.keep_hook_state(new_state, left_out)
        positions = call.index_of
        if call.undefined:
            reduced_too = {place for place, index in positions.items() if index not in left_out}
            gradients = list(without(gradients, call.undefined - reduced_too))
        reduced = [*map(gradients.__getitem__, positions)]  # in C, as for every parameter in every step
        if any(map(operator.is_, reduced, itertools.repeat(None))):
            positions = {place: index for place, index in positions.items() if gradients[place] is not None}
            reduced = [*map(gradients.__getitem__, positions)]
        handed_out = section.complete(riders, [*positions.values()], reduced, left_out)
        for place, gradient in zip(positions, handed_out, strict=True):
            gradients[place] = gradient
        return tuple(gradients)


def without(gradients: Sequence[Any], undefined: Set[int]) -> tuple[Any, ...]:
    """The gradients of a graph's inputs, None in these places."""
    return tuple(None if place in undefined else gradient for place, gradient in enumerate(gradients))


def quoted(error: BaseException | None) -> str:
    """A compiler's error, for a message."""
    words = f"{type(error).__name__}: {error}"
    return words if len(words) < 2000 else f"{words[:2000]} ..."


# ---- bound to the parameters that a wrapper calls it with ------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """A program, bound to the parameters that a call runs it with."""

    program: Program
    plan: BucketPlan  # over parameters
    fingerprint: str
    index_of: dict[int, int]  # graph input -> parameter


class Binding:
    """What all calls of a graph with the same parameters are bound to."""

    def __init__(self, whole: Bound, bind_without: Callable[[frozenset[int]], Bound]) -> None:
        """`whole` has every parameter; `bind_without` leaves some graph inputs out."""
        self.whole, self._bind_without = whole, bind_without
        # The inputs that the latest backward brought no gradient: [Note: undefined gradients]
        self.left_out = frozenset[int]()

    def without(self, undefined: frozenset[int]) -> Bound:
        """The program bound without these graph inputs."""
        return self._bind_without(undefined) if undefined else self.whole

    def note_undefined(self, undefined: frozenset[int]) -> None:
        """A backward brings these graph inputs no gradient."""
        self.left_out = undefined
