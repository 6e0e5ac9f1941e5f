"""How the gradients of one wrapper are reduced, in all of its backwards."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.riders import Message
from compiled_ddp.backward.synchronised import Circumstances, SynchronisedBackward
from compiled_ddp.backward.usage import Usage
from compiled_ddp.checks.proof import Proof
from compiled_ddp.options import Options
from compiled_ddp.plan import Section
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.averaging import Averaging
from compiled_ddp.reducers.choice import reducer_of
from compiled_ddp.reducers.ddp_hook import REGISTERED, TorchCommHook
from compiled_ddp.reducers.hook_state import BucketHook
from compiled_ddp.step import sparse_gradients
from compiled_ddp.step.agreed_sequence import AgreedSequence
from compiled_ddp.step.carried_over import CarriedOver
from compiled_ddp.step.fallback import Fallback
from compiled_ddp.step.gradient_hooks import GradientHooks, Listener
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.join import UnevenInputs
from compiled_ddp.step.models_collectives import ModelsCollectives
from compiled_ddp.step.sparse_gradients import SparseGradients


class Backwards(Listener, sparse_gradients.Backwards, Protocol):
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

    def __init__(self, wrapped: Wrapped, backwards: Backwards) -> None:
        """Hooks on parameters of both kinds tell `backwards`."""
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
        # What has been put into the model since its latest forward looked at it, by name.
        self.newcomers: Callable[[], Mapping[str, torch.nn.Parameter]] = dict
        self.hooks = GradientHooks(parameters.tensors, backwards)
        self.sparse = SparseGradients(wrapped.sparse, communicator, backwards)
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
        """Let the next synchronised backward bring a new one about. On all ranks before the same backward."""
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

    def ask_for_newcomers(self, newcomers: Callable[[], Mapping[str, torch.nn.Parameter]]) -> None:
        """Let `newcomers` tell, at the end of each backward, what nothing reduces yet."""
        self.newcomers = newcomers

    def hand_out_to(self, receive: Callable[[list[torch.Tensor]], None]) -> None:
        """Let `receive` have the reduced flat buckets of each backward, and none when the next one begins."""
        self.receive = receive

    def remove_needless_hooks(self) -> None:
        """Where no graph has fallen back, those that graphs reduce are watched no more."""
        if not any(section.falls_back for section in self.agreed.by_hooks):
            by_hooks = (index for section in self.agreed.by_hooks for index in section.plan.indices)
            self.hooks.rest(keep=self.agreed.unused.union(by_hooks))

    def defer_users(self) -> None:
        """Let the users' hooks on parameters wait for what is reduced."""
        self.hooks.defer_users()
        if self.sparse.names:
            self.sparse.defer_users()

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
    ) -> SynchronisedBackward:
        """One that launches these sections."""
        return SynchronisedBackward(
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
            reducer=reducer_of(
                self.communicator,
                sections,
                buffers.buckets,
                self.parameters.tensors,
                traced_hook=self.traced_hook,
                ddp_hook=self.ddp_hook,
            ),
        )

    @property
    def _correction(self) -> float:
        """What a mean over all ranks is multiplied by: some may have joined. A hook of torch's kind divides itself."""
        if self.uneven is None or self.uneven.factor == 1.0 or self.ddp_hook is not None:
            return 1.0
        return self.uneven.factor if self.options.planned_reduction == "mean" else 1.0
