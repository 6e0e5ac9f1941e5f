"""The post-accumulate hooks by which a runtime learns that autograd has accumulated a gradient, and users' hooks.

Autograd calls every post-accumulate hook of a parameter, ours and the users', as soon as it has accumulated. A user's
hook must see the reduced gradient. So it is replaced by a stand-in that defers it, in the very dictionary it was
registered in: its handle still removes it.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from compiled_ddp import torch_private
from compiled_ddp.plan import Gradient
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.step.buffers import MOST_ELEMENTS_GATHERED, MOST_ELEMENTS_TOGETHER, SequenceBuffers
from compiled_ddp.torch_private.modules import hooks_registered, own_hooks_registered

# ---- users' hooks, deferred until they can see the reduced gradient --------------------------------------------------

Hook = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Deferred:
    """A user's hook; does nothing while `waits()`, when `run_deferred` calls it later.

    `comes` is told before.
    """

    hook: Hook
    comes: Callable[[], None]
    waits: Callable[[], bool]

    @torch_private.dynamo.untraced
    def __call__(self, parameter: torch.Tensor) -> object:
        self.comes()
        return None if self.waits() else self.hook(parameter)  # autograd refuses what a hook returns


def defer(parameter: torch.Tensor, own_id: int, comes: Callable[[], None], waits: Callable[[], bool]) -> None:
    """Defer every hook of `parameter` but our own, whose handle has the id `own_id`."""
    hooks = torch_private.tensors.post_accumulate_hooks(parameter)
    for key, hook in list(hooks.items()):
        if key != own_id and not isinstance(hook, Deferred):
            hooks[key] = Deferred(hook, comes, waits)


def defers_any(parameter: torch.Tensor) -> bool:
    """Whether a hook of the user's on `parameter` is deferred."""
    return any(isinstance(hook, Deferred) for hook in torch_private.tensors.post_accumulate_hooks(parameter).values())


def run_deferred(parameter: torch.Tensor) -> None:
    """Call the users' hooks of `parameter`, in the order of their registration: its .grad is reduced now.

    Raises RuntimeError, as autograd does, where one returns something, which is no gradient.
    """
    for hook in list(torch_private.tensors.post_accumulate_hooks(parameter).values()):
        if isinstance(hook, Deferred) and hook.hook(parameter) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None: change .grad in place.")


def restore(parameter: torch.Tensor) -> None:
    """Put the users' hooks back in their places."""
    hooks: MutableMapping[int, Hook] = torch_private.tensors.post_accumulate_hooks(parameter)
    for key, hook in list(hooks.items()):
        if isinstance(hook, Deferred):
            hooks[key] = hook.hook


def refuse_late(parameters: TrainedParameters, indices: Sequence[int]) -> None:
    """Raise RuntimeError where a hook of the user's was registered too late to be deferred in this backward."""
    for place in torch_private.tensors.with_several_hooks(map(parameters.tensors.__getitem__, indices)):
        hooks = torch_private.tensors.post_accumulate_hooks(parameters.tensors[indices[place]]).values()
        if sum(not isinstance(hook, Deferred) for hook in hooks) > 1:
            raise RuntimeError(
                f"parameter {parameters.names[indices[place]]} got a post-accumulate hook in the middle of a backward, "
                "which would see its gradient before it is reduced. Register it before the backward."
            )


# ---- our hooks -------------------------------------------------------------------------------------------------------

# [Note: tripwire] Where graphs reduce a gradient no hook need tell of it. But the loss may reach none of a forward's
# graphs (it is of `ddp.module` alone, say), and its backward begins with the first gradient all the same. So the
# parameters that are not watched keep our place among their hooks, with one object for all of them that does nothing,
# without a frame of Python. Between a synchronised forward and its backward that object tells of a gradient as our
# hooks do, which are then put back: so no step has to do anything for each parameter.

_DO_NOTHING: Callable[[object], None] = deque[object](maxlen=0).append  # written in C, keeps nothing


class Listener(Protocol):
    """Who is told, from whichever of autograd's threads has accumulated the gradient."""

    def gradient_accumulated(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index` into its .grad."""

    def users_hook_comes(self, index: int) -> None:
        """Before a hook of the user's on parameter `index`, which may come before our own, of a new gradient."""

    def synchronises(self) -> bool:
        """Whether what has just been accumulated belongs to a synchronised backward, at whose end users' hooks run."""


class GradientHooks:
    """Our hooks on the parameters, and the users' ones that are held back behind them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], listener: Listener) -> None:
        self._parameters = parameters
        # A parameter must not keep the listener alive: the collector does not see through autograd's hooks.
        self._listener = weakref.ref(listener)
        self._ids: dict[int, int] = {}  # of our hooks, by parameter: what their handles would remove them by
        self._watched: set[int] = set()  # the parameters on which these are not the tripwire
        self.everywhere = not parameters  # whether every parameter is watched; asked in every step
        self._tripwire = functools.partial(_DO_NOTHING)  # [Note: tripwire]
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.tell = functools.partial(_tripped, self._listener, self.index_of)
        # Between forward and backward: let the first gradient of a parameter that is not watched be told of, or not.
        self.arm, self.disarm = _turned_into(self._tripwire, self.tell), _turned_into(self._tripwire, _DO_NOTHING)
        self._collected: dict[int, Collected] = {}  # by the position of their bucket
        self._collected_for: Callable[[], SequenceBuffers | None] = lambda: None  # whose buckets these are
        self.deferred: set[int] = set()  # the parameters on which users' hooks were found, which wait for `run_users`
        self.registered = 0  # how many others had registered, on anything, when users' hooks were looked for
        # What is left of a wrapper that was dropped must hold nothing back. Not when the interpreter ends.
        by_weak = [weakref.ref(parameter) for parameter in parameters]
        weakref.finalize(self, _remove_all, self._ids, by_weak).atexit = False

    def on(self, parameters: Sequence[torch.nn.Parameter]) -> "GradientHooks":
        """Hooks on other parameters, for the same listener."""
        listener = self._listener()
        assert listener is not None
        return GradientHooks(parameters, listener)

    def install(self) -> None:
        """Watch every parameter, and hold back the users' hooks on them; a no-op where every one is watched."""
        if not self.everywhere:
            self.watch(range(len(self._parameters)))

    def watch(self, indices: Iterable[int]) -> None:
        """Watch these parameters, and hold back the users' hooks on them."""
        unwatched = sorted(set(indices) - self._watched)
        if not unwatched:
            return
        for index in unwatched:
            parameter, hook = self._parameters[index], self.telling_of(index)
            if self._is_in_place(index):
                self.put(index, hook)
            elif parameter.requires_grad:
                self._ids[index] = parameter.register_post_accumulate_grad_hook(hook).id
            else:
                parameter.requires_grad_(True)  # one that was frozen refuses hooks, and may be trained again
                self._ids[index] = parameter.register_post_accumulate_grad_hook(hook).id
                parameter.requires_grad_(False)
            self._watched.add(index)
        self.everywhere = len(self._watched) == len(self._parameters)
        self._defer_on_watched()

    def telling_of(self, index: int) -> Hook:
        """A hook that tells the listener of a gradient of this parameter."""
        return functools.partial(_gradient_accumulated, self._listener, index)

    def rest(self, keep: Set[int]) -> None:
        """Watch only these parameters from now on, and those with hooks of the user's; others by the tripwire alone."""
        self._forget_removed()
        for index in self._watched.difference(keep, self.deferred):
            self.put(index, self._tripwire)
        self._watched &= keep | self.deferred
        self.everywhere = len(self._watched) == len(self._parameters)

    def put(self, index: int, hook: Hook) -> None:
        """Let our hook on a parameter be this one, at its place among the others."""
        if self._is_in_place(index):
            torch_private.tensors.post_accumulate_hooks(self._parameters[index])[self._ids[index]] = hook

    def _is_in_place(self, index: int) -> bool:
        """Whether a parameter has our hook, whatever it is now."""
        return self._ids.get(index) in torch_private.tensors.post_accumulate_hooks(self._parameters[index])

    def collect(self, buffers: SequenceBuffers) -> "Mapping[int, Collected]":
        """Let most gradients be noted and not told of until `Collected.stop`, by bucket: [Note: collected]

        Empty unless every parameter is watched.
        """
        if not self.everywhere:
            return {}
        if self._collected_for() is not buffers:
            self._collected_for = weakref.ref(buffers)
            for before in self._collected.values():
                before.give_up()
            self._collected = {}
            for position, (_, bucket) in enumerate(buffers.buckets):
                alone = [g for g in bucket.gradients if buffers.sole_positions.get(g.index) == position]
                indices = _noted_of(alone)
                if len(indices) >= _FEWEST_NOTED:
                    self._collected[position] = Collected(self, indices, last=bucket.gradients[-1].index)
        for collected in self._collected.values():
            collected.begin()
        return self._collected

    def remove(self) -> None:
        """Watch no parameter, and leave none of our hooks."""
        for index, own_id in self._ids.items():
            _remove(own_id, self._parameters[index])
        self._ids.clear()
        self._watched.clear()
        self.everywhere = not self._parameters

    def defer_users(self) -> None:
        """Let the users' hooks on parameters wait for `run_users`, where a backward is synchronised.

        Where any were registered since the latest look, on whatever it is, their parameters are watched from now on.
        """
        registered = hooks_registered() - own_hooks_registered()
        if registered == self.registered:
            return
        self.registered = registered
        if not self.everywhere:
            self.watch(torch_private.tensors.with_several_hooks(self._parameters))
        self._defer_on_watched()

    def _defer_on_watched(self) -> None:
        watched = list(self._watched)
        for place in torch_private.tensors.with_several_hooks(map(self._parameters.__getitem__, watched)):
            index = watched[place]
            comes = functools.partial(_users_hook_comes, self._listener, index)
            waits = functools.partial(_synchronises, self._listener)
            defer(self._parameters[index], self._ids[index], comes, waits)
            self.deferred.add(index)

    def run_users(self, indices: Iterable[int]) -> None:
        """Call the users' hooks that were held back on these parameters, whose .grad is reduced now."""
        for index in sorted(self.deferred.intersection(indices)):
            run_deferred(self._parameters[index])
        self._forget_removed()

    def _forget_removed(self) -> None:
        """Note whose hooks the users have removed meanwhile."""
        self.deferred = {index for index in self.deferred if defers_any(self._parameters[index])}


# [Note: collected] In a step like those before it there is nothing to do for a gradient until its bucket is full. So
# while a synchronised backward runs, a function written in C notes which of a bucket's parameters have got a gradient,
# in order. Python hears of the bucket's last gradient, of large ones, whose memory is to be freed at once, and of those
# at which much would be waiting; then it takes in what has been noted. What comes behind the last one is taken in when
# the backward ends, and in the next backward Python hears of that one instead.

_FEWEST_NOTED = 3  # of a bucket: fewer are not worth it
_MOST_SURPRISES = 3  # backwards in which another gradient came last, before Python hears of each again


def _noted_of(gradients: Sequence[Gradient]) -> list[int]:
    """The parameters of a bucket, in the order of its gradients, that are noted only."""
    noted, waiting = [], 0
    for gradient in gradients[:-1]:
        waiting += gradient.numel
        if gradient.numel > MOST_ELEMENTS_TOGETHER or waiting > MOST_ELEMENTS_GATHERED:
            waiting = 0
        else:
            noted.append(gradient.index)
    return noted


class Collected:
    """The parameters of one bucket of which it is noted that they have got a gradient: [Note: collected]"""

    def __init__(self, hooks: GradientHooks, indices: Sequence[int], *, last: int) -> None:
        """`last` is the one whose gradient fills the bucket, in the order in which they come."""
        self._hooks = weakref.ref(hooks)
        self._index_of, self._last, self._surprises = hooks.index_of, last, 0
        # Room for more than one of each, so that a second gradient is noticed when they are taken.
        self._come: deque[torch.Tensor] = deque(maxlen=2 * len(indices))
        self._hook = functools.partial(hooks.tell)
        self._note, self.stop = _turned_into(self._hook, self._come.append), _turned_into(self._hook, hooks.tell)
        self._indices = set[int]()
        for index in indices:
            self._collect(index)

    def _collect(self, index: int) -> None:
        hooks = self._hooks()
        assert hooks is not None
        self._indices.add(index)
        hooks.put(index, self._hook)

    def _tell_of(self, index: int) -> None:
        hooks = self._hooks()
        assert hooks is not None
        self._indices.discard(index)
        hooks.put(index, hooks.telling_of(index))

    def begin(self) -> None:
        """Note what comes from here on, unless it has surprised too often."""
        self._come.clear()
        if self._indices:
            self._note()

    def __len__(self) -> int:
        """How many have come since they were taken last."""
        return len(self._come)

    def take(self) -> list[int]:
        """The parameters that have got a gradient since, in this order, one as often as it has."""
        if not self._come:
            return []
        indices = [*map(self._index_of.__getitem__, map(id, self._come))]
        self._come.clear()
        return indices

    def forget(self) -> None:
        """An exception has ended the backward."""
        self.stop()
        self._come.clear()

    def note_late(self, index: int) -> None:
        """The gradient of this parameter has come behind the one that was to fill the bucket."""
        self._surprises += 1
        if self._surprises > _MOST_SURPRISES:
            self.give_up()
        elif index in self._indices:
            self._tell_of(index)
            self._collect(self._last)
            self._last = index

    def give_up(self) -> None:
        """Let each of them be told of."""
        for index in [*self._indices]:
            self._tell_of(index)


def _turned_into(hook: functools.partial[Any], function: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    """What lets `hook` be `function` from then on, without a frame of Python."""
    set_state: Callable[[tuple[object, ...]], object] = hook.__setstate__  # type: ignore[attr-defined]
    return functools.partial(set_state, (function, (), {}, None))


def _tripped(listener: weakref.ref[Listener], index_of: Mapping[int, int], parameter: torch.Tensor) -> None:
    """The hook of a parameter with the tripwire, whose index is found by its id."""
    _gradient_accumulated(listener, index_of[id(parameter)], parameter)


def _remove_all(ids: dict[int, int], parameters: Sequence[weakref.ref[torch.nn.Parameter]]) -> None:
    for index, own_id in ids.items():
        parameter = parameters[index]()
        if parameter is not None:
            _remove(own_id, parameter)


def _remove(own_id: int, parameter: torch.nn.Parameter) -> None:
    torch_private.tensors.post_accumulate_hooks(parameter).pop(own_id, None)
    restore(parameter)


def _gradient_accumulated(listener: weakref.ref[Listener], index: int, _: torch.Tensor) -> None:
    alive = listener()
    if alive is None:
        return
    if torch_private.dynamo.of_this_thread() is None:
        alive.gradient_accumulated(index)  # `_untraced` takes a call more, which would be one for each gradient
    else:
        _untraced(alive, index)


@torch_private.dynamo.untraced
def _untraced(listener: Listener, index: int) -> None:
    listener.gradient_accumulated(index)


def _users_hook_comes(listener: weakref.ref[Listener], index: int) -> None:
    alive = listener()
    if alive is not None:
        alive.users_hook_comes(index)


def _synchronises(listener: weakref.ref[Listener]) -> bool:
    alive = listener()
    return alive is not None and alive.synchronises()
