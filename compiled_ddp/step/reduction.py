"""What all backwards of one wrapper share, and what one leaves to the next.

[Note: models that communicate] Ranks meet in such a model's own collectives, in the middle of its backward
(SyncBatchNorm in eager code, experts that exchange tokens). A graph waits there too, for what other ranks launch. A
rank that launches it later, as it runs other parts of the model, would come to the model's collective first, and both
would wait for ever. So the ranks of such a wrapper begin each backward by telling each other whether they will run the
graphs of their sequence, all of them and in its order. If one will not, hooks reduce everything, which wait for nothing
before the backward ends. And the sequence has its graphs first, so that no graph waits for gradients of eager code.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.checks.proof import Proof
from compiled_ddp.model.watch import ModelWatch
from compiled_ddp.options import Options
from compiled_ddp.plan import Section
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.averaging import Averaging
from compiled_ddp.reducers.ddp_hook import REGISTERED, DDPHook, TorchCommHook
from compiled_ddp.reducers.reducer import Reducer
from compiled_ddp.reducers.traced_hook import BucketHook, TracedHook
from compiled_ddp.step.agreed_sequence import AgreedSequence
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.step.channel import CarriedOver, Message
from compiled_ddp.step.gradients import ExistingGradients
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.hooks import GradientHooks, Listener
from compiled_ddp.step.join import UnevenInputs
from compiled_ddp.step.launches import Usage
from compiled_ddp.step.sparse_gradients import SparseGradients, SparseListener
from compiled_ddp.step.synchronised import Circumstances, SynchronisedBackward
from compiled_ddp.users_code import warn_user

# ---- what hooks reduce although a graph was wanted, told once --------------------------------------------------------

FROZEN = "the parameter was frozen between forward and backward, so that on this rank it counts as zero"
DOES_NOT_FIT = "the graph does not fit the agreed sequence of this backward"


class Fallback:
    def __init__(self, *, strict: bool) -> None:
        """With `strict` there is none: what would be one is an error."""
        self._strict = strict
        self._reasons: set[str] = set()

    def report(self, reason: str, names: str) -> None:
        """Warn, once for each reason, that hooks reduce the parameters of these `names`; raise if `strict`."""
        message = f"gradients of {names} are reduced by hooks: {reason}."
        if self._strict:
            raise RuntimeError(f"{message} compile_ddp(strict=True) does not fall back.")
        if reason not in self._reasons:
            self._reasons.add(reason)
            warn_user(message)

    @property
    def reasons(self) -> Sequence[str]:
        return sorted(self._reasons)


# ---- collectives of the model's own ----------------------------------------------------------------------------------


_QUIET_UNTIL_FORGOTTEN = 64  # forwards and backwards of a model that has communicated, and does no more


class _Counted:
    """The process groups whose collectives may be the model's, and how each is counted: for all wrappers."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[dist.ProcessGroup]] = []  # all that there were at the latest look
        self._counters: list[tuple[weakref.ref[dist.ProcessGroup], Callable[[dist.ProcessGroup], int]]] = []

    def number(self) -> int:
        """How many collectives this rank has launched on groups that this package has not made for itself."""
        groups = [*map(weakref.ref, torch_private.groups.all_groups())]  # the same objects as long as these are kept
        if groups != self._groups:
            self._take(groups)
        number = 0
        for reference, launched_on in self._counters:
            group = reference()
            number += 0 if group is None else launched_on(group)
        return number

    def _take(self, groups: list[weakref.ref[dist.ProcessGroup]]) -> None:
        alive = [(reference, group) for reference in groups if (group := reference()) is not None]
        self._counters = [
            (reference, torch_private.groups.launch_counter(group))
            for reference, group in alive
            if torch_private.groups.is_of_others(group)
        ]
        self._groups = groups


_counted = _Counted()


class ModelsCollectives:
    """Compares counts of collectives, on all process groups but those of this package."""

    def __init__(self) -> None:
        self.seen = False  # in one of the latest forwards and backwards
        self._looks = True
        self._before = 0
        self._quiet = 0  # forwards and backwards since one was seen

    def begin(self) -> None:
        """The model's forward or backward begins."""
        if self._looks:
            self._before = _counted.number()

    def end(self) -> None:
        """It has ended. What was seen once, maybe of another thread, is not taken for the model's for ever."""
        if not self._looks:
            return
        if _counted.number() != self._before:
            self.seen, self._quiet = True, 0
        elif self.seen:
            self._quiet += 1
            self.seen = self._quiet < _QUIET_UNTIL_FORGOTTEN

    def stop_looking(self) -> None:
        """A communication hook of torch's kind is registered: its collectives would count as the model's, and no graph
        launches anything any more."""
        self._looks = False


# ---- what all backwards share ----------------------------------------------------------------------------------------


class AnyListener(Listener, SparseListener, Protocol):
    """Told by hooks on parameters of both kinds."""


@dataclass(frozen=True)
class Wrapped:
    """What a wrapper gives to its run time."""

    parameters: TrainedParameters  # with dense gradients
    sparse: TrainedParameters  # with sparse ones
    communicator: Communicator
    options: Options
    why_not_graph: str | None = None  # with it no graph takes part: hooks reduce everything, and that is why
    # Returns the calls of graphs whose backward may still run, latest first.
    live_calls: Callable[[], Sequence[GraphCall]] = tuple


class Reduction:
    """What all backwards of one wrapper have in common: the parameters, the agreed sequence, hooks and the proof."""

    def __init__(self, wrapped: Wrapped, listener: AnyListener) -> None:
        """Hooks on parameters of both kinds tell `listener`."""
        parameters, communicator, options = wrapped.parameters, wrapped.communicator, wrapped.options
        self.parameters, self.communicator, self.options = parameters, communicator, options
        self.live_calls = wrapped.live_calls
        self.traced_hook: BucketHook | None = None  # reduces buckets in place of an all-reduce
        if options.comm_hook is not None:
            self.traced_hook = BucketHook(options.comm_hook, communicator.for_hooks())
        self.ddp_hook: TorchCommHook | None = None
        self.uneven: UnevenInputs | None = None
        self.agreed = AgreedSequence(options, communicator, wrapped.why_not_graph, self.traced_hook)
        adds_up = options.planned_reduction != "hook"
        self.proof = Proof(parameters, communicator, options.verify, adds_up=adds_up)
        self.fallback = Fallback(strict=options.strict)
        self.models_collectives = ModelsCollectives()
        self.carried = CarriedOver()
        # Takes the reduced flat buckets of each backward, and none when the next one begins; None where nobody does.
        self.receive: Callable[[list[torch.Tensor]], None] | None = None
        self.watch: ModelWatch | None = None  # what the model is compared with
        self.hooks = GradientHooks(parameters.tensors, listener)
        self.sparse = SparseGradients(wrapped.sparse, communicator, listener)
        self.forget_sequence()

    # ---- changes -----------------------------------------------------------------------------------------------------

    def retrain(self, parameters: TrainedParameters) -> None:
        """Reduce these parameters from the next backward on."""
        self.hooks.remove()
        places = {id(tensor): place for place, tensor in enumerate(parameters.tensors)}
        before = self.parameters.tensors
        self.carried.renumber(lambda index: places.get(id(before[index])))
        self.parameters = parameters
        self.hooks = self.hooks.on(parameters.tensors)
        self.forget_sequence()

    def forget_sequence(self) -> None:
        """Let ranks agree on a new sequence in the next backward. On all ranks before the same one."""
        self.agreed.begin_anew(self.parameters)
        self.carried.begin_anew()
        self.proof.begin_anew(self.parameters)
        self.hooks.install()

    def forget_unless_refined(self) -> None:
        """After a torch.autograd.grad, or a backward that broke off: the sequence may lack what others will run."""
        if not self.agreed.refined:
            self.forget_sequence()

    def prove_nothing(self) -> None:
        """The backward has ended otherwise than by a mean in .grad, on every rank."""
        self.proof.postpone()
        self.forget_unless_refined()

    def register_comm_hook(self, ddp_hook: TorchCommHook) -> None:
        """Let a communication hook reduce every bucket. On all ranks before the same backward."""
        self.ddp_hook = ddp_hook
        self.models_collectives.stop_looking()
        self.agreed.leave_to_comm_hook(REGISTERED)
        self.proof.switch_off(REGISTERED)
        self.forget_sequence()

    @property
    def keeps_first_buckets(self) -> bool:
        """Whether the buckets stay in the order of their first backward, whatever order gradients come in.

        [Note: replicas] A hook in a group of one rank may reduce over others, as TorchFT's does over its replicas. One
        of these that comes back is in its first backward when the others are in a later one, of the same buckets.
        """
        return self.ddp_hook is not None and self.communicator.world_size == 1

    def follow_join(self, uneven: UnevenInputs) -> None:
        """Take part in the joins of these."""
        self.uneven = uneven

    def expect_static_graph(self) -> None:
        """A parameter may get several gradients in one backward, from here on as many in each."""
        self.options = replace(self.options, static_graph=True)

    def newcomers(self) -> dict[str, torch.nn.Parameter]:
        """What has been put into the model since the latest look at it and is to be trained, by name."""
        if self.watch is None or not self.watch.has_grown:  # as in most steps, which ask
            return {}
        return self.watch.newcomers({*map(id, self.parameters.tensors), *map(id, self.sparse.tensors)})

    def compare_with(self, watch: ModelWatch) -> None:
        """The model is as `watch` knows it."""
        self.watch = watch

    def hand_out_to(self, receive: Callable[[list[torch.Tensor]], None]) -> None:
        """Let `receive` have the reduced flat buckets of each backward, and none when the next one begins."""
        self.receive = receive

    def remove_needless_hooks(self) -> None:
        """Where no graph has fallen back, those that graphs reduce are watched no more."""
        if not any(section.falls_back for section in self.agreed.by_hooks):
            by_hooks = (index for section in self.agreed.by_hooks for index in section.plan.indices)
            self.hooks.rest(keep=self.agreed.unused.union(by_hooks))

    # ---- questions ---------------------------------------------------------------------------------------------------

    def will_accumulate(self, index: int) -> bool:
        """Whether the running backward will bring this parameter a gradient."""
        return torch_private.autograd.backward_will_accumulate(self.parameters.tensors[index])

    def with_tensor_hooks(self, index: int) -> bool:
        """Whether users' tensor hooks see this parameter's gradient."""
        return torch_private.tensors.has_tensor_hooks(self.parameters.tensors[index])

    def leaves_to_hooks(self, call: GraphCall) -> bool:
        """Whether hooks reduce the call as a matter of course: it is too small, or has tensor hooks, as was planned."""
        if self.agreed.leaves_to_hooks(call):
            return True
        return self.agreed.was_left_for_tensor_hooks(call) and any(map(self.with_tensor_hooks, call.plan.indices))

    def named(self, indices: Iterable[int]) -> str:
        """These parameters, in a message."""
        return self.parameters.named(sorted(indices))

    # ---- for each backward -------------------------------------------------------------------------------------------

    def refuse_if_broken(self) -> None:
        """Raise RuntimeError if nothing can be reduced any more."""
        self.communicator.refuse_if_failed()
        if self.ddp_hook is not None:
            self.ddp_hook.refuse_if_broken()

    def new_backward(
        self,
        sections: Sequence[Section],
        buffers: SequenceBuffers,
        *,
        used_before: set[int],
        message: Message,
        circumstances: Circumstances,
        existing: ExistingGradients | None = None,
    ) -> SynchronisedBackward:
        """One that launches these sections; with `existing`, one that has begun: see `SynchronisedBackward`."""
        backward = SynchronisedBackward(
            sections,
            buffers,
            self.communicator,
            self.parameters,
            usage=Usage(
                used_before,
                sends_zeros=circumstances.returned is not None,
                delayed=circumstances.delayed,
                expected_gradients=circumstances.expected_gradients,
            ),
            message=message,
            circumstances=circumstances,
            averaging=Averaging(
                sections[0].plan,
                weight=message.weight,
                scaling=self.options.scaling,
                correction=self._correction,
            ),
            recording=self.proof.recording,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
            reducer=self._reducer_of(sections, buffers),
            existing=existing,
        )
        if existing is None:
            names, collectives = self.parameters.names, backward.launches.collectives
            self.communicator.progress.backward_began(
                message.forwards.begun, buffers.buckets, buffers.origins, names, collectives
            )
        return backward

    def _reducer_of(self, sections: Sequence[Section], buffers: SequenceBuffers) -> Reducer:
        """What reduces the buckets that hooks launch."""
        if self.ddp_hook is not None:
            buckets = [bucket for _, bucket in buffers.buckets]
            return DDPHook(self.communicator, self.ddp_hook, buckets, self.parameters.tensors)
        if self.traced_hook is not None:
            return TracedHook(self.communicator, self.traced_hook, sections)
        return Reducer(self.communicator, buffers.rows)

    @property
    def _correction(self) -> float:
        """What a mean over all ranks is multiplied by: some may have joined. A hook of torch's kind divides itself."""
        if self.uneven is None or self.uneven.factor == 1.0 or self.ddp_hook is not None:
            return 1.0
        return self.uneven.factor if self.options.planned_reduction == "mean" else 1.0
