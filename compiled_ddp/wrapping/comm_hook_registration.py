"""Communication hooks of a wrapper: registering those of torch's kind, and the state of those in graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.ranks.agreement import agree_on_description
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.ddp_hook import Hook, TorchCommHook, builtin_hook, check_comm_hook, check_takes_complex
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapping.parts import HasParts


class TakesCommHooks(HasParts):
    """The part of a wrapper that is about communication hooks."""

    _registrations = 0  # so far

    @torch_private.dynamo.untraced
    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` reduce every bucket from the next backward on, as under torch's DDP.

            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)  # on every rank, before training

        Hooks written for DDP work as they are, torch's own in `torch.distributed.algorithms.ddp_comm_hooks` among
        them. `bucket` has the methods of `dist.GradBucket`: `index()`, `is_last()`, `buffer()`, `set_buffer()`,
        `gradients()` and `parameters()`. The gradients in it are not divided: the hook divides. It returns a
        `torch.futures.Future` that holds the reduced tensor, as large as the buffer. Buckets come in one order on all
        ranks, whatever a rank ran, and have the same sizes from the second backward on.

        Gradient hooks then launch all buckets, also under `compile_ddp`, whose graphs stay without communication. The
        proof is off (`verify`), because ranks need not agree after a hook of any kind.

        A collective: every rank calls it, between the same two steps. The wrapper compares the hooks' names.

        Raises TypeError or ValueError for what cannot be a hook; RuntimeError if one is registered already, if a rank
        does not register or registers another one, inside a backward, under `strict=True`, which wants graphs, and
        with a `reduction` other than the mean, whose place the hook takes. A hook that raises in a backward ends that
        backward on every rank, and the wrapper cannot reduce any more.
        """

        def name() -> str:
            checked = check_comm_hook(hook)
            check_takes_complex(hook, self._managed.trained())
            return checked

        self._register(state, hook, name)

    @torch_private.dynamo.untraced
    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Let the hook that DDP has built in reduce every bucket, on the wrapper's own communicator."""

        def name() -> str:
            check_takes_complex(builtin_hook(comm_hook_type), self._managed.trained())
            return str(comm_hook_type)

        def reduce(state: Communicator, bucket: Any) -> Any:
            return builtin_hook(comm_hook_type)(state, bucket)

        self._register(self._runtime.communicator, reduce, name)

    def _register(self, state: object, hook: Hook, checked_name: Callable[[], str]) -> None:
        self._check_in_use()
        if self._runtime.reduction.ddp_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if torch_private.autograd.current_graph_task() != -1:
            raise RuntimeError("register_comm_hook() was called inside a backward: call it before or after one.")
        self._runtime.finish_broken_backward()
        self._registrations += 1
        ranks, name, options = self._runtime.communicator.ranks, "", self._settings.options

        def describe() -> dict[str, list[object]]:
            nonlocal name
            name = checked_name()
            if options.strict and self._why_not_graph() is None:
                raise RuntimeError("strict=True wants graphs to reduce, and under a communication hook none does.")
            sparse = self._runtime.reduction.sparse.names
            if sparse:
                raise RuntimeError(
                    f"parameter {sparse[0]} has a sparse gradient, which no communication hook "
                    "reduces: pass sparse=False to its embedding."
                )
            if options.planned_reduction != "mean" or options.scaling is not None:
                what = f'reduction="{options.reduction}"' if options.reduction != "mean" else "other options"
                raise RuntimeError(
                    f"a communication hook takes the place of {what}, comm_hook= and scaling: drop them."
                )
            return {
                "communication hook": [name],
                "number of backwards before it": [self._runtime.beginning.number],
            }

        agree_on_description(
            ranks,
            describe,
            occasion=f"communication hook/{self._registrations}",
            purpose="to compare the communication hooks of all ranks",
            failure="the communication hook was not registered",
        )
        if options.verify == "always":
            warn_user('verify="always" is ignored under a communication hook.')
        self._runtime.reduction.register_comm_hook(TorchCommHook(state, hook, name=name, timeout=ranks.timeout))

    @torch_private.dynamo.untraced
    def comm_hook_state_dict(self) -> dict[str, list[torch.Tensor]]:
        """The state of the `comm_hook` on this rank, for a checkpoint of each rank; keys name each bucket's parameters.

        Copies, which later steps do not change.
        """
        hook = self._runtime.reduction.traced_hook
        return {} if hook is None else hook.state_dict(self._runtime.parameters.names)

    @torch_private.dynamo.untraced
    def load_comm_hook_state_dict(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Restore the state of the `comm_hook` from what `comm_hook_state_dict` returned on the same rank.

        The buckets, and the parameters' dtypes and devices, may be other ones than when it was saved: what is owed to a
        parameter goes to where its gradients go. What the hook keeps for a bucket as a whole, such as PowerSGD's
        factor, needs a bucket of the same parameters, else it begins anew.

        Raises KeyError for a parameter that the model does not have, ValueError, which names the bucket, for tensors of
        another number or shape than the hook's or owed values that are not finite, RuntimeError without a `comm_hook`.
        Nothing is taken up then.
        """
        if self._runtime.reduction.traced_hook is None:
            raise RuntimeError("the wrapper has no comm_hook, and so no state of one.")
        if not isinstance(state, Mapping):
            raise TypeError(f"the state must be what comm_hook_state_dict() has returned, found {state!r}.")
        parameters = self._runtime.parameters
        self._runtime.reduction.traced_hook.load_state_dict(state, parameters.names, parameters.tensors)
