"""A section of the backward under way, reserved for a captured graph that is about to run."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.riders import Flag, ranks_using, write_riders
from compiled_ddp.backward.synchronised import SynchronisedBackward
from compiled_ddp.checks.values import Reference, fill_with_pattern
from compiled_ddp.plan import BucketPlan
from compiled_ddp.step.graph_run import run_graph
from compiled_ddp.step.reduction import Reduction

T = TypeVar("T")


class ReservedSection:
    """Gives the graph its further inputs, and takes what it returns; or hears that it has broken off."""

    def __init__(self, backward: SynchronisedBackward, section: int, plan: BucketPlan, reduction: Reduction) -> None:
        """`plan` is the section's, over the wrapper's parameters."""
        self._backward, self._section, self._plan = backward, section, plan
        self._reduction = reduction
        self._positions = backward.launcher.positions_in[section]
        self._unused: set[int] = set()

    # ---- before it runs ----------------------------------------------------------------------------------------------

    def gradients_to_fold(self) -> Sequence[torch.Tensor]:
        """What the graph must fold in, one tensor per gradient in plan order; empty if there is nothing.

        The .grad tensors, which are None until the backward ends and gives the same tensors back, with what earlier
        calls have left: [Note: equal calls].
        """
        returned = self._backward.circumstances.returned is not None  # .grad does not matter
        folded = self._backward.folded
        existing = [] if returned else folded.take(self._plan, self._named_fold)
        return folded.withheld.fold(self._plan, existing, self._named_fold) if folded.withheld.repeated else existing

    def _named_fold(self, place: int) -> AbstractContextManager[object]:
        return self._backward.launches.named_fold(self._positions[place])

    def lend_buffers(self, buckets: Iterable[int]) -> list[torch.Tensor]:
        """Memory for these buckets of the section, for the graph to pack them into."""
        lent = self._backward.launches.lend(map(self._positions.__getitem__, buckets))
        if self._reduction.proof.reference is not None:
            for flat_buffer in lent:
                fill_with_pattern(flat_buffer)
        return lent

    def hook_state(self) -> list[torch.Tensor]:
        """What a communication hook keeps for the section."""
        return self._backward.launches.reducer.state(self._positions)

    def rider_values(self, without_gradient: Iterable[int]) -> torch.Tensor:
        """What the riders carry from this rank, on the plan's device; these parameters get no gradient here.

        Nor have they, where they count as unused, got one in an earlier local backward.
        """
        self._unused = set(without_gradient).difference(self._backward.usage.before)
        riders = self._plan.riders
        values = torch.empty(riders.numel, dtype=torch.float32, device=self._plan.buckets[-1].device)
        return write_riders(values, riders, self._backward.message, self._unused)

    def note_graph(
        self, compiled: Callable[..., object], fingerprint: str, run_without_passes: Callable[[float], Reference]
    ) -> None:
        """It is `compiled` that will run, for the plan with this fingerprint: a new one is to be proven.

        Then it is run without the passes too, which is given the factor of a gradient in its bucket.
        """
        proof = self._reduction.proof
        share = self._backward.message.weight if self._plan.reduction == "weighted" else self._plan.share
        proof.meet_graph(compiled, fingerprint, self._plan.indices, functools.partial(run_without_passes, share))
        if proof.renewed and proof.recording is None:  # in a backward that does not verify here
            self._backward.message.note(Flag.VERIFY)

    def give_up(self) -> None:
        """The graph has launched nothing, and will not: hooks launch the section, others get zeros."""
        self.break_off()
        self._reduction.proof.forget_reference()
        self._backward.launcher.release(self._section)

    # ---- while it runs -----------------------------------------------------------------------------------------------

    def run(self, graph: Callable[[], T], group_name: str, *, sees_values: bool) -> T:
        """What the graph returns, which calls the process group `group_name`.

        Without `sees_values` nothing can be computed from what it launches: it runs as a CUDA graph.
        """
        proof, watching = self._reduction.proof, None
        if proof.recording is not None or proof.reference is not None:
            watching = proof.watching(self._plan, group_name, sees_values=sees_values)
        return run_graph(graph, self._reduction.communicator, group_name, watching)

    # ---- after it has run --------------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """An exception has ended the graph: .grad gets back what it was to fold in."""
        self._backward.folded.give_back_as_they_were(self._plan.indices)

    def unused_everywhere(self, riders: torch.Tensor) -> set[int]:
        """Of the parameters without gradient here, those that no rank has used, by the reduced `riders`.

        On the CPU; elsewhere a device would have to be waited for, and they keep what the graph has made, zeros.
        """
        if not self._unused or not riders.is_cpu:
            return set()
        ranks = ranks_using(self._plan.riders, riders)
        return {index for index in self._unused if ranks[index] == 0}

    def keep_hook_state(self, state: Sequence[torch.Tensor], left_out: Set[int]) -> None:
        """Note the hook's new state. Before the graph's gradients reach the parameters.

        Nothing becomes of those of the `left_out` parameters.
        """
        self._backward.launches.reducer.keep(self._positions, state, left_out | set(self._without_use()))

    def _without_use(self) -> Iterator[int]:
        """The parameters of which the running backward wants no gradient."""
        for index in self._plan.indices:
            if torch_private.autograd.fate_of_gradient(self._reduction.parameters.tensors[index]) == "none":
                yield index

    def complete(
        self, riders: torch.Tensor, indices: Sequence[int], gradients: Sequence[torch.Tensor], left_out: Set[int]
    ) -> list[torch.Tensor]:
        """The graph has run, with these reduced riders, and gradients of the parameters `indices`.

        The parameters `left_out` get none. Returns what autograd is to get of the gradients.
        """
        backward = self._backward
        if left_out:
            backward.folded.leave_out(left_out)
            backward.of_graphs.note_left_out(left_out)
        backward.reservations.complete(self._section, riders)
        backward.launches.take_back()
        if self._reduction.proof.recording is not None:
            self._reduction.proof.recording.graph_returns(indices, gradients)
        backward.usage.note_gradients(indices)
        return backward.of_graphs.hand_out(indices, gradients)
