"""The sequence that a wrapper's ranks keep: proposed by rank 0, refined once, and how it changes after that."""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from compiled_ddp.collector import collector_paused
from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, ReductionKind, ReductionSequence, Section
from compiled_ddp.planning.sequence import Observations, SequencePlanner
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.agreement import agree_on_description
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.traced_hook import BucketHook
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.step.graph_call import GraphCall

# ---- how long a sequence is kept whose graphs run on no rank ---------------------------------------------------------

# [Note: what a first backward shows] Only a graph that has reduced tells which of its parameters are used outside of it
# too. Where no rank has run the sequence's graphs, because of what will pass (a weight of 0, a rank that skips, a
# stance, another wrapper's turn), the next backward begins a new sequence; so often at most, as some ranks' graphs
# never run.
BEGINNINGS_UNSEEN = 3


class Patience:
    """Counts backwards in which no rank's graphs fitted, as after parts were frozen.

    A model whose graphs differ from step to step has no sequence that fits: the patience doubles every time it ends.
    """

    def __init__(self) -> None:
        self.is_over = False  # whether the sequence should be built anew
        self._mismatches = 0  # in a row
        self._most = 2  # of them
        self._seen = False  # whether the graphs of this sequence have run on some rank
        self._unseen = 0  # sequences that were left because they had not

    def begin_anew(self) -> None:
        """There is another sequence."""
        self._seen, self._mismatches = False, 0

    def note_backward(self, *, fits_some_rank: bool) -> None:
        """A backward has ended. [Note: what a first backward shows]"""
        self.is_over = False
        if fits_some_rank:
            self._mismatches, self._seen = 0, True
        elif not self._seen and self._unseen < BEGINNINGS_UNSEEN:
            self._unseen += 1
            self.is_over = True
        else:
            self._mismatches += 1
            if self._mismatches >= self._most:
                self._most *= 2
                self.is_over = True


# ---- the sequence ----------------------------------------------------------------------------------------------------


class AgreedSequence:
    """Holds the sequence and its flat buffers. Every change is made by all ranks, before or after the same backward.

    What it becomes is `SequencePlanner`'s; this class knows when, and that all ranks have the same one.
    """

    def __init__(
        self,
        options: Options,
        communicator: Communicator,
        why_not_graph: str | None,
        traced_hook: BucketHook | None = None,
    ) -> None:
        """With `why_not_graph`, no graph takes part: the hooks reduce everything, and that is why.

        `traced_hook` is told of every sequence.
        """
        self.sequence: ReductionSequence | None = None
        self.buffers = SequenceBuffers(())
        self.refined = False  # whether the first backward of this sequence has ended
        self.unused: frozenset[int] = frozenset()  # parameters that no rank has used: their sections are not launched
        self.graph_sections: dict[str, int] = {}  # fingerprint -> the launched section of equal graphs
        self.expects_graphs = False  # whether graphs have sections, or are to have some when tensor hooks have gone
        self.why_not_graph = why_not_graph
        self._reduction: ReductionKind | None = None  # in place of the options' own
        self._options, self._communicator, self._traced_hook = options, communicator, traced_hook
        self.all_graphs_ran = False  # in the latest backward, so that nothing is left to hooks that a graph reduces
        self.among_collectives = False  # [Note: models that communicate], whether the ranks know it of this one
        self.must_agree = True  # whether ranks agree on `sequence` in the next backward, and wait for each other
        self.beginnings = -1  # how often ranks have begun to agree on another sequence
        self.graphs_fit = False  # whether those of this sequence did on some rank, in the latest backward
        self._patience = Patience()

    def begin_anew(self, parameters: TrainedParameters) -> None:
        """Let ranks agree on a new sequence in the next synchronised backward."""
        policy = self._options.bucket_policy(self._communicator.world_size)
        if self._reduction is not None:
            policy = replace(policy, reduction=self._reduction)
        self._planner = SequencePlanner(parameters, policy)
        self.beginnings += 1
        self.must_agree, self.refined, self.all_graphs_ran = True, False, False
        if self.why_not_graph is not None:
            self._adopt(self._planner.propose([], reason=self.why_not_graph))
        self.unused = frozenset()
        self.graphs_fit = False
        self._patience.begin_anew()

    def leave_to_hooks(self, reason: str | None) -> None:
        """From the next `begin_anew` on, reduce everything by hooks, for that `reason`; None where graphs take part."""
        if self._reduction is None:
            self.why_not_graph = reason

    def note_among_collectives(self, known: bool) -> None:
        """Whether all ranks know now that the model communicates."""
        self.among_collectives = known

    def leave_to_comm_hook(self, reason: str) -> None:
        """From the next `begin_anew` on, plan buckets for a communication hook."""
        self.why_not_graph, self._reduction = reason, "hook"

    def propose(self, plans: Sequence[BucketPlan], whys: Mapping[int, str] | None = None) -> ReductionSequence:
        """The sequence for the backward that begins.

        Where `must_agree`, `plans` are of the calls it will run, but for those of the parameters in `whys`.
        """
        if self.must_agree:
            self._adopt(self._agree("proposal", lambda: self._planner.propose(plans, whys)))
        assert self.sequence is not None
        return self.sequence

    def refine(self, observations: Observations, unused: Set[int]) -> ReductionSequence:
        """Fix the sequence at the end of the first synchronised backward.

        By what rank 0 has observed in it, and by what any rank has used both in a graph and outside: rank 0 may have
        skipped that step.
        """
        before = self.sequence
        assert before is not None
        self.refined = True
        on_any_rank = self._graph_and_eager_on_any_rank(observations.graph_and_eager)
        observations = replace(observations, graph_and_eager=on_any_rank)
        with collector_paused():
            return self._adopt(self._agree("sequence", lambda: self._refined(before, observations, unused)))

    def _refined(self, before: ReductionSequence, observations: Observations, unused: Set[int]) -> ReductionSequence:
        return self._planner.refine(before, observations, unused, graphs_first=self.among_collectives)

    def _graph_and_eager_on_any_rank(self, here: set[int]) -> set[int]:
        """The union over ranks, on rank 0."""
        ranks, key = self._communicator.ranks, f"graph_and_eager/{self.beginnings}"
        if ranks.rank != 0:
            ranks.publish(f"{key}/{ranks.rank}", json.dumps(sorted(here)))
            return here
        return here.union(*map(json.loads, ranks.read_all(key, purpose="for the end of its backward")))

    def admit(self, used: Set[int]) -> None:
        """Launch these parameters of the unused sections in every backward from now on."""
        assert self.sequence is not None
        self._adopt(self._planner.admit(self.sequence, used))

    def note_graphs(self, sections: Set[int]) -> None:
        """Graphs have reduced these sections in the latest backward; none says that hooks are to go on watching."""
        graphs = {*self.graph_sections.values()}
        self.all_graphs_ran = bool(graphs) and graphs <= sections

    def note_mismatches(self, ranks: int) -> None:
        """On so many ranks the graphs of the backward that has ended did not fit."""
        self.graphs_fit = ranks < self._communicator.world_size
        self._patience.note_backward(fits_some_rank=self.graphs_fit)

    @property
    def should_rebuild(self) -> bool:
        """Whether no rank's graphs have fitted for a while."""
        return self._patience.is_over

    def leaves_to_hooks(self, call: GraphCall) -> bool:
        """Whether hooks reduce the call as a matter of course: it is too small, and in no graph's section."""
        if call.fingerprint in self.graph_sections:
            return False
        assert self.sequence is not None
        plan = call.every_parameter().plan
        return plan.nbytes < self._options.smallest_graph_bytes and self.sequence.in_graphs.isdisjoint(plan.indices)

    def was_left_for_tensor_hooks(self, call: GraphCall) -> bool:
        """Whether the sequence was made without the call's graph as it had tensor hooks, on rank 0."""
        return self.sequence is not None and not self.sequence.left_for_tensor_hooks.isdisjoint(call.plan.indices)

    def event_of(self, section: int) -> str:
        """A name for what ranks wait for in the graph of a section, the same on all of them."""
        assert self.sequence is not None
        fingerprint = self.sequence.launched[section].plan.fingerprint  # which refining the sequence does not change
        return f"{self._communicator.group_name} graph {fingerprint} {self.beginnings}"

    @property
    def by_hooks(self) -> list[Section]:
        """The sections that hooks launch."""
        return [] if self.sequence is None else [s for s in self.sequence.sections if s.origin == "hooks"]

    def _agree(self, what: str, make: Callable[[], ReductionSequence]) -> ReductionSequence:
        """Rank 0's sequence, on every rank."""
        ranks, key = self._communicator.ranks, f"{what}/{self.beginnings}"
        if ranks.rank == 0:
            sequence = make()
            ranks.publish(key, self._planner.encode(sequence))
        else:
            text = ranks.read(key, writer=0, purpose="for the sequence of the first backward")
            sequence = self._planner.decode(text)
        agree_on_description(
            ranks,
            lambda: {"the sequence of buckets": [sequence.fingerprint]},
            occasion=key,
            failure="the sequence of buckets was not adopted",
        )
        return sequence

    def _adopt(self, sequence: ReductionSequence) -> ReductionSequence:
        if sequence is not self.sequence:
            self.buffers = SequenceBuffers(sequence.launched, self.buffers)
        if self._traced_hook is not None:
            self._traced_hook.adopt(sequence.sections, sequence.parameter_names, lasting=self.refined)
        self.sequence, self.must_agree = sequence, False
        self.unused = frozenset(index for section in sequence.unused for index in section.plan.indices)
        launched = enumerate(sequence.launched)
        self.graph_sections = {s.plan.fingerprint: place for place, s in launched if s.origin == "graph"}
        self.expects_graphs = bool(self.graph_sections or sequence.left_for_tensor_hooks)
        return sequence
