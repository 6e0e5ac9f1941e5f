"""How the sequence that all ranks keep is built.

1. When the first synchronised backward begins, rank 0 proposes it: a section per captured segment that this backward
   will run, in the order in which it will run them, and the remaining parameters, in reverse registration order, for
   the hooks. A wrapper without graphs needs no proposal; all parameters are the hooks'.
2. When that backward ends, rank 0 orders the hooks' parameters by their arrival in it, between the segments they
   arrived between, adds the parameters that turned out to be used both inside a graph and outside of it, and sets
   those apart that no rank has used.

Both go through the store, as plain lists of parameter indices. From then on the sequence changes only where the riders
of a backward tell every rank to change it in the same way: `admit`s what is used after all, or begins again at 1.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from compiled_ddp.plan import (
    ADMITTED,
    MIXED,
    NOT_CAPTURED,
    TOO_SMALL,
    BucketPlan,
    GradientSpec,
    ReductionSequence,
    Section,
)
from compiled_ddp.planning.assignment import BucketPolicy
from compiled_ddp.planning.trained_parameters import TrainedParameters


@dataclass
class Observations:
    """What rank 0 saw in a backward, from which the sequence for all later ones is made."""

    arrivals: dict[tuple[str, int], None] = field(default_factory=dict)  # ("graph", section) or ("hook", parameter)
    graph_and_eager: set[int] = field(default_factory=set)  # in a graph's bucket, but used outside of the graph too

    def note_arrival(self, kind: str, number: int) -> None:
        """What gets several gradients is ready with the last one."""
        self.arrivals.pop((kind, number), None)
        self.arrivals[kind, number] = None


class SequencePlanner:
    """Makes sequences from what a rank knows; the same inputs give the same sequence on every rank."""

    def __init__(self, parameters: TrainedParameters, policy: BucketPolicy) -> None:
        self._parameters, self._policy = parameters, policy
        # Often the first backward changes nothing: what the latest sequence has is not made again.
        self._latest: ReductionSequence | None = None
        self._plans: dict[tuple[int, ...], BucketPlan] = {}  # those of its sections by hooks, by parameters in order

    def propose(
        self, segments: Sequence[BucketPlan], whys: Mapping[int, str] | None = None, *, reason: str = NOT_CAPTURED
    ) -> ReductionSequence:
        """The sequence for a backward that will run `segments` (plans over parameters) in this order.

        The parameters in `whys` are of graphs that are to have no section, for these reasons; others are the hooks'
        for that `reason`.
        """
        captured = {index for plan in segments for index in plan.indices}
        rest = [index for index in reversed(range(len(self._parameters.names))) if index not in captured]
        reasons = {index: (whys or {}).get(index, reason) for index in rest}
        sections = [Section(plan, "graph") for plan in segments]
        return self._sequence([*sections, *self._hooks_of(rest, reasons)])

    def refine(
        self,
        sequence: ReductionSequence,
        observations: Observations,
        unused: Set[int] = frozenset(),
        *,
        graphs_first: bool = False,
    ) -> ReductionSequence:
        """The sequence for all later backwards, from what rank 0 observed in the first one.

        `unused` are parameters, of the hooks, that no rank used in it. With `graphs_first` no hooks' section comes
        before a graph's: [Note: models that communicate]. Those of graphs that are too small never do: a graph
        would wait for what a step skips.
        """
        by_hooks = {index: s.reason for s in sequence.sections if s.origin == "hooks" for index in s.plan.indices}
        if unused >= set(range(len(self._parameters.names))):
            unused = frozenset()  # something must carry the riders
        never = [index for index in by_hooks if index in unused]
        by_hooks = {index: reason for index, reason in by_hooks.items() if index not in unused}
        sections: list[Section] = []
        arrived: dict[int, None] = {}  # in order
        placed: set[int] = set()
        launched = {number for kind, number in observations.arrivals if kind == "graph"}
        graphs = [number for number, section in enumerate(sequence.sections) if section.origin == "graph"]
        not_launched = [number for number in graphs if number not in launched]
        arrivals = [*observations.arrivals, *(("graph", number) for number in not_launched)]
        if graphs_first:
            arrivals = [*(("graph", number) for number in graphs), *(a for a in arrivals if a[0] != "graph")]
        for kind, number in arrivals:
            if kind == "graph":
                before = [index for index in arrived if by_hooks[index] != TOO_SMALL]
                sections += [*self._hooks_of(before, by_hooks), sequence.sections[number]]
                placed.update(before)
                arrived = {index: None for index in arrived if index not in placed}
            elif number in by_hooks:
                arrived[number] = None
        rest = [index for index in dict.fromkeys([*arrived, *by_hooks]) if index not in placed]
        mixed = self._hooks(sorted(observations.graph_and_eager), MIXED)
        return self._sequence([*sections, *self._hooks_of(rest, by_hooks), *mixed, *self._unused(never)])

    def admit(self, sequence: ReductionSequence, used: Set[int]) -> ReductionSequence:
        """The sequence after a backward in which ranks have used these parameters of "unused" sections."""
        before = [section for section in sequence.launched if section.reason == ADMITTED]
        others = [section for section in sequence.launched if section.reason != ADMITTED]
        never = [index for section in sequence.unused for index in section.plan.indices]
        admitted = [index for section in before for index in section.plan.indices]
        admitted += [index for index in never if index in used]
        never = [index for index in never if index not in used]
        return self._sequence([*others, *self._hooks(admitted, ADMITTED), *self._unused(never)])

    def _unused(self, indices: Sequence[int]) -> list[Section]:
        return [replace(section, origin="unused") for section in self._hooks(indices, "")]

    def _hooks_of(self, indices: Sequence[int], reasons: dict[int, str]) -> list[Section]:
        """A section for each reason."""
        of_reason: dict[str, list[int]] = {}
        for index in indices:
            of_reason.setdefault(reasons[index], []).append(index)
        return [section for reason, those in of_reason.items() for section in self._hooks(those, reason)]

    def _hooks(self, indices: Sequence[int], reason: str) -> list[Section]:
        if not indices:
            return []
        return [Section(self._plan_of(tuple(indices)), "hooks", reason)]

    def _plan_of(self, indices: tuple[int, ...]) -> BucketPlan:
        if indices not in self._plans:
            self._plans[indices] = self._policy.assign(self._specs(indices), self._parameters.names)
        return self._plans[indices]

    def _specs(self, indices: Iterable[int]) -> list[GradientSpec]:
        return [self._parameters.gradients[index] for index in indices]

    def _sequence(self, sections: Iterable[Section]) -> ReductionSequence:
        sequence = tuple(sections)
        if self._latest is None or self._latest.sections != sequence:
            self._latest = ReductionSequence(sequence, self._parameters.names)
            used = {id(section.plan) for section in sequence}
            self._plans = {indices: plan for indices, plan in self._plans.items() if id(plan) in used}
        return self._latest

    # ---- as text, for the store --------------------------------------------------------------------------------------

    def encode(self, sequence: ReductionSequence) -> str:
        """A sequence as JSON: for each section its origin, its reason and its buckets' parameters."""
        return json.dumps(
            [[s.origin, s.reason, [bucket.indices for bucket in s.plan.buckets]] for s in sequence.sections]
        )

    def decode(self, text: str) -> ReductionSequence:
        """The sequence that `encode` wrote, on any rank."""
        sections = []
        for origin, reason, buckets in json.loads(text):
            sections.append(Section(self._decoded(buckets), origin, reason))
        return self._sequence(sections)

    def _decoded(self, buckets: list[list[int]]) -> BucketPlan:
        """The plan with these buckets, of which an empty last one has the riders alone."""
        known = self._plans.get(tuple(itertools.chain.from_iterable(buckets)))
        if known is not None and [[*bucket.indices] for bucket in known.buckets] == buckets:
            return known
        filled = [self._specs(bucket) for bucket in buckets if bucket]
        return self._policy.place(filled, riders_apart=not buckets[-1])
