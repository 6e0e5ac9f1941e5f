"""The backwards of one wrapper, which begin and end where hooks, graphs and outputs tell that autograd has come."""

import functools
import threading
from typing import Any

from compiled_ddp import torch_private
from compiled_ddp.backward.returned_gradients import returns_inputs_alone, watch_returned
from compiled_ddp.backward.synchronised import SynchronisedBackward
from compiled_ddp.step.beginning import Beginning
from compiled_ddp.step.conducted import ConductedWrapper
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.graph_reservations import GraphReservations
from compiled_ddp.step.latest_forward import LatestForward
from compiled_ddp.step.phase import Phase
from compiled_ddp.step.reduction import Reduction, Wrapped
from compiled_ddp.step.reserved_section import ReservedSection
from compiled_ddp.step.under_way import UnderWay
from compiled_ddp.torch_private.autograd import current_graph_task, evaluating_node
from compiled_ddp.users_code import warn_user

_DISTRIBUTED_AUTOGRAD = (
    "the backward is torch.distributed.autograd's, which leaves .grad alone: there is nothing that could be averaged. "
    "Call loss.backward() outside of its context, or the forward under no_sync() and average the context's gradients "
    "by hand."
)


class Backwards:
    """What autograd reaches of a wrapper. Every method may be called in any of autograd's threads."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.forward = LatestForward()
        self.under_way = UnderWay()
        # Held from the reservation for a graph to what it launches, so that no other thread launches anything between.
        self.lock = threading.RLock()
        self.reduction = Reduction(wrapped, self)
        self._reservations = GraphReservations(self.reduction)
        self.beginning = Beginning(self.reduction, self._reservations, self.forward)
        accumulates = functools.lru_cache(maxsize=1)(functools.partial(_accumulates, self.reduction))
        self.conducted = ConductedWrapper(
            self.reduction,
            self.forward,
            self.under_way,
            self.beginning,
            accumulates=accumulates,
            task_ended=self._task_ended,
            lock=self.lock,
        )
        self._closed_because, self._accumulates = "", accumulates
        conductor.add(self.conducted)

    def close(self, why: str) -> None:
        """Remove every hook; `why` is the error of backwards that would still be synchronised."""
        self._closed_because = why
        for call in self.reduction.live_calls():
            if call.synchronise:
                call.when_reached(Backwards.output_reached)
        self.reduction.hooks.remove()
        self.reduction.sparse.close()

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def enter(self) -> SynchronisedBackward | None:
        """The synchronised backward that this thread is in, begun if need be; None where it is postponed."""
        if self._closed_because:
            raise RuntimeError(self._closed_because)
        with self.lock:
            under_way = self.under_way
            if current_graph_task() not in under_way.tasks.noted:
                self._enter_task()
            if under_way.phase is Phase.EXPECTED:
                under_way.expect_no_more()
            if under_way.phase is Phase.IDLE:
                self._begin()
            return under_way.backward

    def _begin(self) -> None:
        if self.beginning.waits and not conductor.may_wait(self.conducted, [self.conducted.begin_event]):
            self.under_way.postpone()
            self.reduction.hooks.install()
            self.reduction.hooks.defer_users()
            return
        accumulates = self._accumulates(current_graph_task())
        returned = None if accumulates else watch_returned(self.reduction.parameters.tensors)
        backward = self.beginning.in_task(returned)
        self.under_way.begin(backward)
        self.beginning.leave_to_hooks(backward)
        if returned is not None:
            returned.begin()  # with tensor hooks of its own: after what looks for users' ones

    def _enter_task(self) -> None:
        if torch_private.dynamo.in_compiled_autograd():
            raise RuntimeError(torch_private.dynamo.COMPILED_AUTOGRAD)
        if evaluating_node() is None and torch_private.autograd.in_distributed_backward():
            warn_user(_DISTRIBUTED_AUTOGRAD)  # a hook's error becomes "python_error" there
            raise RuntimeError(_DISTRIBUTED_AUTOGRAD)
        tasks = self.under_way.tasks
        if tasks.noted and self.reduction.parameters.on_cpu and tasks.are_of_other_threads():
            raise RuntimeError(
                "two threads run backwards of one wrapper at the same time, whose gradients would be mixed up: let "
                "one wait for the other, or give each thread a wrapper of its own."
            )
        tasks.note(self._task_ended)
        if len(conductor.references) > 1:
            conductor.backward_reached(self.conducted)

    def _is_local(self) -> bool:
        """Whether the running backward, which has not begun here, is one of which other ranks need not know."""
        if self.conducted.local:
            return True
        accumulates = self._accumulates(current_graph_task())
        return not accumulates and returns_inputs_alone(self.reduction.parameters.tensors)

    def _refuse_returned_sparse(self) -> None:
        if not self.conducted.local:
            self.reduction.sparse.refuse_returned()

    def output_reached(self) -> None:
        """A backward has come to an output of a synchronised forward."""
        if not self.under_way.has_begun():
            if self.reduction.sparse.names:
                self._refuse_returned_sparse()
            if self._is_local():
                return
        self.enter()

    # ---- told by graphs ----------------------------------------------------------------------------------------------

    def reserve(self, call: GraphCall) -> ReservedSection | None:
        """The section that `call` may launch in its graph now; None if it must run locally."""
        with self.lock:
            if not self.under_way.has_begun():
                synchronises = call.synchronise or self._will_reach_synchronised()
                if synchronises and self.reduction.sparse.names:
                    self._refuse_returned_sparse()
                if not synchronises or self._is_local():
                    self._note_local_run(call)
                    return None
            backward = self.enter()
            if backward is None:
                self.under_way.run_locally(call)
                self._note_local_run(call)
                return None
            return self._reservations.reserve(backward, call, self.conducted)

    def _will_reach_synchronised(self) -> bool:
        """Whether the running backward, come to a graph of a local forward, is to reach one of a synchronised one too.

        Then it is synchronised as a whole, and this is where it begins: what the local graph gives would be added to
        what the other one has reduced.
        """
        return any(call.synchronise and call.is_still_to_run() for call in self.reduction.live_calls())

    def _note_local_run(self, call: GraphCall) -> None:
        call.note_local_run()
        if self.conducted.local:
            self.forward.count.take_back()
        carried = self.reduction.carried
        carried.note_local_use(filter(self.reduction.will_accumulate, set(call.plan.indices) - carried.used))

    # ---- told by hooks -----------------------------------------------------------------------------------------------

    def gradient_accumulated(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index` into its .grad."""
        with self.lock:
            under_way = self.under_way
            # The one under way, where this task is known to be one of it: asked for every gradient, so without a call.
            backward = under_way.backward if current_graph_task() in under_way.tasks.noted else None
            if backward is None and self.synchronises():
                backward = self._enter_with(index)
            elif backward is None and self.conducted.local:
                self.forward.count.take_back()
            if backward is not None:
                backward.gradient_arrived(index)
            elif self.reduction.parameters.tensors[index].grad is not None:  # hooks run for an undefined gradient too
                self.reduction.carried.note_local_use([index])

    def users_hook_comes(self, index: int) -> None:
        """The same, of a user's hook that may come before ours."""
        with self.lock:
            if self.synchronises():
                self._enter_with(index)

    def gradient_comes(self) -> None:
        """The same, of a parameter that is not in the buckets."""
        with self.lock:
            if self.synchronises():
                self.enter()

    def _enter_with(self, index: int) -> SynchronisedBackward | None:
        """As `enter`, in a hook of a parameter, which has its gradient already if that begins the backward."""
        begins_here = not self.under_way.has_begun()
        backward = self.enter()
        if begins_here and backward is not None:
            backward.existing.begun_by(index)
        return backward

    def synchronises(self) -> bool:
        """Whether what autograd has just accumulated belongs to a synchronised backward."""
        return self.under_way.has_begun() or (self.forward.awaits_backward and not self.conducted.local)

    # ---- the end of a task -------------------------------------------------------------------------------------------

    @torch_private.dynamo.untraced
    def _task_ended(self, task: int) -> None:
        with self.lock:
            outer = torch_private.autograd.evaluating_node()
            tasks = self.under_way.tasks
            try:
                # With several devices, another task's thread may end the one that is inside of it.
                if outer is None and not tasks.are_running(but=task):
                    conductor.end(task)
            finally:  # only now: other threads must not take the backward for one that has broken off
                tasks.close(task)
                if self.under_way.phase is Phase.EXPECTED:
                    self.under_way.expect_no_more()
            if outer is None:
                return
            # A reentrant backward has ended inside `outer`. What follows `outer` runs in the outer backward, whose
            # end is the one to finish at.
            for following, _ in outer.next_functions:
                if following is not None:
                    self._enter_before(following)

    def _enter_before(self, node: Any) -> None:
        @torch_private.dynamo.untraced
        def enter(*_: object) -> None:
            handle.remove()
            self.enter()

        handle = node.register_prehook(enter)


def _accumulates(reduction: Reduction, _: int) -> bool:
    """Whether this task of autograd, which this thread runs, will bring any parameter a gradient."""
    return "accumulated" in map(torch_private.autograd.fate_of_gradient, reduction.parameters.tensors)
