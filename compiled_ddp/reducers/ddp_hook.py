"""A communication hook of the user's that reduces each bucket, as torch's DDP has it (`register_comm_hook`)."""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.futures import Future

from compiled_ddp import torch_private
from compiled_ddp.errors import WrongKindError
from compiled_ddp.plan import Bucket
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.reducer import NothingLaunched, Reducer, Work

Hook = Callable[[Any, Any], Any]

REGISTERED = "a communication hook is registered"  # why no graph reduces anything


class HookBucket:
    """One bucket as a hook sees it: what torch's `dist.GradBucket` offers, which Python cannot make."""

    def __init__(
        self,
        bucket: Bucket,
        flat_buffer: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        *,
        index: int,
        is_last: bool,
    ) -> None:
        # An alias: batched_powerSGD_hook resizes it for a while.
        self._bucket, self._buffer, self._parameters = bucket, flat_buffer.detach(), parameters
        self._index, self._is_last = index, is_last

    def index(self) -> int:
        """The bucket's place in the launch order, from 0; the same in every backward after the first."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket follows in this backward."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The gradients, one after the other in one dimension, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Let `buffer()` and `gradients()` be of `tensor` from here on."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer in each parameter's shape, elements in the order in which memory has them."""
        return [
            self._buffer.narrow(0, gradient.offset_elements, gradient.numel).view(gradient.size)
            for gradient in self._bucket.gradients
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients()`."""
        return [self._parameters[gradient.index] for gradient in self._bucket.gradients]


class DDPHookWork:
    """What a hook has launched for one bucket."""

    def __init__(
        self, comm_hook: "TorchCommHook", future: "torch_private.groups.AnyFuture[Any]", flat_buffer: torch.Tensor
    ) -> None:
        self._comm_hook, self._future, self._flat_buffer = comm_hook, future, flat_buffer

    def wait(self) -> None:
        """Leave the hook's result in the flat buffer.

        Raises RuntimeError for a future that failed, that is not done within the group's timeout, or that holds
        anything but one tensor of the bucket's size, complex if the bucket is.
        """
        if self._comm_hook.broken:
            return  # what the others launched may never end
        try:
            self._take_result()
        except BaseException:
            self._comm_hook.note_broken()
            raise

    def wait_for_collectives(self) -> None:
        self.wait()

    @torch.no_grad()
    def _take_result(self) -> None:
        name, seconds = self._comm_hook.name, self._comm_hook.timeout.total_seconds()
        if not self._future.done():
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(seconds):
                raise RuntimeError(f"the future of the communication hook {name} was not done within {seconds:g} s")
        result = self._future.wait()  # orders the streams of a GPU
        if isinstance(result, list | tuple) and len(result) == 1:
            (result,) = result
        if not isinstance(result, torch.Tensor) or result.numel() != self._flat_buffer.numel():
            found = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(type(result))
            raise RuntimeError(
                f"the future of the communication hook {name} must hold one tensor of {self._flat_buffer.numel()} "
                f"elements, as bucket.buffer() has, found {found}"
            )
        if result.is_complex() != self._flat_buffer.is_complex():
            raise RuntimeError(
                f"the future of the communication hook {name} holds {result.dtype} for gradients of "
                f"{self._flat_buffer.dtype}, whose imaginary part would be lost: return a tensor of the buffer's dtype"
            )
        # In the order and with the signs that it stands for, where it is a view of the buffer itself.
        result = result.resolve_conj().resolve_neg().reshape(-1)
        if result.data_ptr() != self._flat_buffer.data_ptr() or result.dtype != self._flat_buffer.dtype:
            self._flat_buffer.copy_(result)


class TorchCommHook:
    """A registered hook with its state."""

    def __init__(self, state: object, hook: Hook, *, name: str, timeout: timedelta) -> None:
        """`timeout` bounds each wait for a future that the hook returns."""
        self.name, self.timeout = name, timeout
        self.broken = False  # it failed on some rank: its collectives may not match those of other ranks any more
        self._state, self._hook = state, hook

    def launch(self, bucket: HookBucket, flat_buffer: torch.Tensor) -> DDPHookWork:
        """Hand a bucket to the hook; its result will be in `flat_buffer`.

        Raises what the hook raises, TypeError if it returns no future.
        """
        future = self._hook(self._state, bucket)
        if not isinstance(future, torch_private.groups.AnyFuture):
            raise TypeError(
                f"the communication hook {self.name} must return a torch.futures.Future, found {type(future)!r}."
            )
        return DDPHookWork(self, future, flat_buffer)

    def note_broken(self) -> None:
        """It has failed, here or on another rank."""
        self.broken = True

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(
                f"the communication hook {self.name} failed in an earlier backward, so its collectives may not match "
                "those of other ranks any more. Call unwrap(), and wrap the model again with new process groups; load "
                "a checkpoint on every rank."
            )


class DDPHook(Reducer):
    """One backward's use of such a hook, which gets every bucket of gradients. Riders go out by an all-reduce."""

    counts_collectives = False

    def __init__(
        self,
        communicator: Communicator,
        hook: TorchCommHook,
        buckets: Sequence[Bucket],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        """`buckets` are all that the backward launches, in launch order."""
        super().__init__(communicator)
        self._hook, self._buckets, self._parameters = hook, buckets, parameters
        with_gradients = [position for position, bucket in enumerate(buckets) if bucket.gradients]
        self._numbers = {position: number for number, position in enumerate(with_gradients)}  # as hooks know them

    def start(self, position: int, flat_buffer: torch.Tensor, unused: Callable[[], Set[int]]) -> Work:
        """Raises what the hook raises. From then on nothing is handed to it: only riders go out."""
        bucket = self._buckets[position]
        if not bucket.gradients:
            return super().start(position, flat_buffer, unused)
        if self._hook.broken:
            return NothingLaunched()
        handed = HookBucket(
            bucket,
            flat_buffer,
            self._parameters,
            index=self._numbers[position],
            is_last=self._numbers[position] == len(self._numbers) - 1,
        )
        try:
            return self._hook.launch(handed, flat_buffer)
        except BaseException:
            self._hook.note_broken()
            raise

    @property
    def name(self) -> str:
        return f"the communication hook {self._hook.name}"

    @property
    def has_failed(self) -> bool:
        return self._hook.broken

    def note_failed(self) -> None:
        self._hook.note_broken()


def check_comm_hook(hook: object) -> str:
    """The hook's name. Raises TypeError or ValueError, with DDP's words, for what cannot be one."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"Communication hook must take (state, bucket): {error}.") from error
    # Annotations that were left as text are not resolved.
    bucket = signature.parameters["bucket"].annotation if "bucket" in signature.parameters else Any
    if not isinstance(bucket, str) and bucket not in (inspect.Parameter.empty, dist.GradBucket, HookBucket, Any):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if not isinstance(returned, str) and returned not in (inspect.Signature.empty, Future, Future[torch.Tensor], Any):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def check_takes_complex(hook: Hook, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError if a complex parameter meets one of torch's hooks that cast gradients to 16-bit real numbers."""
    name = next((name for name, parameter in parameters.items() if parameter.is_complex()), None)
    if name is None or getattr(hook, "__module__", "") != fp16_compress_hook.__module__:
        return
    if "16_compress" in hook.__qualname__:
        raise TypeError(
            f"torch's {hook.__name__} would drop the imaginary part of the gradient of parameter {name}. Pass "
            "comm_hook=fp16_compress or bf16_compress of compiled_ddp.comm_hooks to the wrapper instead, which keep it."
        )


def builtin_hook(kind: dist.BuiltinCommHookType) -> Hook:
    """What DDP's built-in hook of this kind does, for the wrapper's communicator as its state."""
    hooks = {
        dist.BuiltinCommHookType.ALLREDUCE: allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: fp16_compress_hook,
    }
    if kind not in hooks:
        raise WrongKindError(
            f"the built-in communication hook must be one of {[str(k) for k in hooks]}, found {kind!r}."
        )

    @functools.wraps(hooks[kind])
    def reduce(communicator: Communicator, bucket: Any) -> Any:
        return hooks[kind](communicator.group, bucket)

    return reduce
