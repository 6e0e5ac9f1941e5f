"""What both wrappers share: the module, its state, its buffers, no_sync."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.agreement import agree_on_description
from compiled_ddp.backward import TrainedParameters
from compiled_ddp.communicator import Communicator, RankGroup
from compiled_ddp.explain import Explanation, explain_sequence
from compiled_ddp.model_check import WRAPPED_BY, check_model, describe_model, trainable_parameters
from compiled_ddp.options import Mode, Options, mode_from_environment
from compiled_ddp.plan import ReductionSequence
from compiled_ddp.runtime import Runtime, SegmentCall

# Components of state_dict keys that wrappers add and that no module of the user need have.
_WRAPPER_PREFIXES = ("module", "_orig_mod")


class DataParallelWrapper(nn.Module):
    """A module whose gradients are averaged over ranks. Base of `CompiledDDP` and `EagerDDP`."""

    is_compiled_ddp_wrapper = True
    module: nn.Module

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None, options: Options) -> None:
        super().__init__()
        torch_private.check_torch_version()
        self._options = options
        ranks = RankGroup(process_group)
        name = type(self).__name__
        agree_on_description(ranks, lambda: self._check_and_describe(module, name))
        self._mode: Mode = mode_from_environment()
        communicator = Communicator(ranks)
        self.module = module
        self._require_sync = True
        self._buffers_stale = True  # whether the next forward broadcasts buffers, by DDP's rule
        try:
            if options.init_sync:
                self._synchronise_state(communicator)
            named = trainable_parameters(module)
            self._runtime = Runtime(
                TrainedParameters(tuple(named), tuple(named.values())),
                communicator,
                options,
                live_calls=self._live_calls,
                hooks_reason=self._hooks_reason(),
            )
        except BaseException:
            communicator.close()
            raise
        vars(module)[WRAPPED_BY] = name
        self.register_load_state_dict_pre_hook(_accept_wrapped_keys)
        self.register_state_dict_post_hook(_strip_own_prefix)

    def _check_and_describe(self, module: nn.Module, name: str) -> dict[str, list[object]]:
        self._options.check()
        check_model(module, name)
        return {"wrapper": [name], **describe_model(module, self._options, mode_from_environment())}

    def _synchronise_state(self, communicator: Communicator) -> None:
        tensors = [parameter.detach() for parameter in self.module.parameters()]
        if self._options.broadcast_buffers:
            tensors += [buffer.detach() for buffer in self.module.buffers()]
        with torch.no_grad():
            communicator.broadcast(tensors)

    # ---- for the two wrappers to fill in -----------------------------------------------------------------------------

    def _hooks_reason(self) -> str | None:
        """Why hooks reduce everything; None where graphs take part."""
        raise NotImplementedError

    def _live_calls(self) -> Sequence[SegmentCall]:
        return ()

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            self._runtime.begin_forward(synchronise=self._require_sync)
        if self._buffers_stale and self._options.broadcast_buffers:
            self._broadcast_buffers()
        outputs = self._run_module(*args, **kwargs)
        if with_gradients:
            self._runtime.watch(tensors_in(outputs))
        self._buffers_stale = with_gradients and self._require_sync
        return outputs

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        self._runtime.communicator.broadcast(list(self.module.buffers()))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients local: backwards of forwards called in here accumulate into .grad without communication.

        They are reduced together with the next backward whose forward is called outside, as under DDP.
        """
        before, self._require_sync = self._require_sync, False
        try:
            yield
        finally:
            self._require_sync = before

    def abandon_backward(self) -> None:
        """Take part in what is left of a backward that an exception broke off on this rank.

        Other ranks may be waiting for it. The next forward does this by itself; call it where there is none, for
        example before leaving the training loop. A no-op when no backward is broken.
        """
        self._runtime.finish_broken_backward()

    # ---- what users look at ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ReductionSequence | None:
        """The agreed sequence of buckets; None until the first synchronised backward has begun."""
        return self._runtime.sequence

    def explain(self) -> Explanation:
        """What is reduced where, and why; `print` it for a table."""
        return explain_sequence(self._runtime.sequence, self._runtime.fallback_reasons)

    def unwrap(self) -> nn.Module:
        """Remove every hook, give the communicator back, and return the module, ready to be wrapped again.

        A collective: every rank calls it. The wrapper itself cannot be used afterwards.
        """
        self._runtime.close()
        vars(self.module).pop(WRAPPED_BY, None)
        return self.module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


def tensors_in(value: object, depth: int = 16) -> Iterator[torch.Tensor]:
    """The tensors in a module's output: in lists, tuples, sets, mappings, dataclasses and other plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float | bool | nn.Module):
        return
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, Sequence | Set):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from tensors_in(part, depth - 1)


def _strip_own_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    own = f"{prefix}module."
    for key in [key for key in state if key.startswith(own)]:
        state[prefix + key[len(own) :]] = state.pop(key)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        for key in [key for key in versions if key == own[:-1] or key.startswith(own)]:
            versions[(prefix + key[len(own) :]).rstrip(".")] = versions.pop(key)


def _accept_wrapped_keys(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Rename the keys under `prefix` to the wrapper's own, whatever wrappers they were saved from."""
    module = wrapper.module
    assert isinstance(module, nn.Module)
    known = {_bare(key): key for key in module.state_dict()}
    for key in [key for key in state if key.startswith(prefix)]:
        bare = _bare(key[len(prefix) :])
        state[f"{prefix}module.{known.get(bare, key[len(prefix):])}"] = state.pop(key)


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPER_PREFIXES)
