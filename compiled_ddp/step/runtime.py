"""What a wrapper tells of its forwards, and asks of its backwards."""

import functools
from collections.abc import Iterable, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.step.backwards import Backwards
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.graph_call import GraphCall, UntilBackward, may_leave_out
from compiled_ddp.step.reduction import Wrapped
from compiled_ddp.step.shadowing import Shadowing


class Runtime:
    """One wrapper's part of the run time."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.backwards = Backwards(wrapped)
        self.communicator = wrapped.communicator
        self.reduction = self.backwards.reduction
        self._forward, self._under_way = self.backwards.forward, self.backwards.under_way
        self.conducted = self.backwards.conducted  # as others call it: [Note: waiting in one order]
        self._shadowing = Shadowing(self.reduction, self._forward.count, self.conducted, self.backwards.lock)

    @property
    def parameters(self) -> TrainedParameters:
        return self.reduction.parameters

    @property
    def step(self) -> int:
        """The number of the step that is under way: of synchronised forwards begun, or, in a local one, to be begun."""
        begun = self._forward.count.value
        return begun if self._forward.synchronises and begun else begun + 1

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self, *, synchronise: bool, counted: bool) -> None:
        """Note a forward with gradients enabled, which is not a recomputation inside a backward.

        `counted` tells whether every rank is to begin as many such forwards as this one.
        """
        if synchronise and self.reduction.ddp_hook is not None:
            self.reduction.ddp_hook.refuse_if_broken()
        self._forward.begin(synchronise=synchronise, counted=counted)
        self.reduction.defer_users()
        if not self.reduction.options.keep_buffers:
            self.reduction.agreed.buffers.let_go()
        if synchronise and counted:
            self._forward.count.begin(after_exception=conductor.broken_off)
        self.communicator.progress.forward_began(self._forward.count.value)

    def begin_reentrant_forward(self, *, synchronise: bool) -> None:
        """Note a forward that a reentrant checkpoint runs inside a backward: of its own, which was without gradients.

        As under DDP, it is synchronised if this one is called outside of no_sync.
        """
        self._forward.begin_inside_backward(synchronise=synchronise, under_way=self._under_way.has_begun())

    def module_begins(self) -> None:
        """The wrapper's own part of the forward has ended."""
        self.reduction.models_collectives.begin()

    def module_ended(self) -> None:
        """The wrapped module has returned."""
        self.reduction.models_collectives.end()

    def forward_raised(self) -> None:
        """The forward that began has ended with an exception."""
        self._forward.raised()

    def drop_forwards(self) -> None:
        """Take back the forwards that wait for a backward: the step has ended without one, on every rank."""
        self._forward.drop()

    def end_forward(self, calls: Sequence[GraphCall]) -> None:
        """Watch the parameters by hooks unless the segments that this forward called cover every graph section.

        Even then its loss may reach none of these: [Note: tripwire]
        """
        agreed, hooks = self.reduction.agreed, self.reduction.hooks
        if agreed.sequence is not None and not hooks.everywhere:
            called = {call.fingerprint for call in calls}
            if not agreed.graph_sections.keys() <= called:
                hooks.install()
            elif self._forward.awaits_backward or any(map(may_leave_out, calls)):
                hooks.arm()  # also of a local one, whose backward may use outside of a graph what this leaves out

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Begin a synchronised backward when one reaches these outputs, before it has accumulated any gradient.

        The first gradient after a synchronised forward begins one too: the loss may not be among the outputs. A later
        backward that does not come through them, of `wrapper.module` called by itself, stays local, as under DDP.
        """
        if self._forward.synchronises:
            nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
            self._forward.returned(nodes)
            for node in nodes:
                if torch_private.autograd.attached(node) is None:  # a captured segment's node begins it by itself
                    until_backward = UntilBackward(self.backwards)
                    node.register_prehook(functools.partial(until_backward.tell, Backwards.output_reached))

    # ---- backward ----------------------------------------------------------------------------------------------------

    @property
    def awaits_backward(self) -> bool:
        """Whether the latest forward was synchronised and no backward has begun since."""
        return self._forward.awaits_backward

    def is_awaited(self) -> bool:
        """Whether a forward still waits for its backward, and its output has not just been thrown away."""
        return self._forward.is_awaited()

    def leaves_local(self) -> bool:
        """Whether the running backward brings parameters a gradient that nothing reduces, which nobody asked for."""
        if self.conducted.local or self.backwards.synchronises():
            return False
        return any(torch_private.autograd.fate_of_gradient(p) != "none" for p in self.parameters.tensors)

    def finish_broken_backward(self) -> None:
        """Take part, with zeros, in what is left of a backward that an exception ended; other ranks may wait in it.

        A no-op where there is none. A backward that another thread runs is none.
        """
        self.conducted.outlast_threads()
        if self._under_way.is_broken_off():
            conductor.finish_broken(also=[self.conducted])

    def shadow_backward(self, forward_count: int) -> None:
        """Take part in the other ranks' backward with nothing but zeros, until `end_shadowing`."""
        self._shadowing.shadow_backward(forward_count)

    def end_shadowing(self, *, if_untouched: bool = False) -> None:
        """Let all that this rank had accumulated itself be as it was before: see `Shadowing`."""
        self._shadowing.end(if_untouched=if_untouched)

    def close(self, why: str, *, abandon: bool = False) -> None:
        """Remove every hook and give the communicator back, or `abandon` it to the next one that is made.

        `why` is the error of backwards that would still be synchronised.
        """
        self.backwards.close(why)
        if abandon:
            self.communicator.abandon()
        else:
            self.communicator.close()
