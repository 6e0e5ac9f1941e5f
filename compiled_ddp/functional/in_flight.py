"""Parameters that ranks still gather when a step returns, as the next one awaits them: `pipeline_updates`.

What is gathered are parameters, where ranks share their update, and else the sums of their gradients.

[Note: whoever reads a parameter has it] While they are under way, parameters are of a class whose `__torch_function__`
awaits them: whatever reads one through torch, in Python, finds what it would have found without pipelining. What has
other names for their memory (`parameter.data` of an earlier time, an array of numpy's) reads that of the step before.
So it is with the optimizer's state, where that is behind, too.
"""

import atexit
import contextlib
import copy
import inspect
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.functional.shares import rows_of_bucket
from compiled_ddp.passes.ops import noting_what_is_taken, put_together_in_place, wait_tensor
from compiled_ddp.plan import Bucket
from compiled_ddp.ranks.progress import failed_in_collective
from compiled_ddp.torch_private.dynamo import untraced
from compiled_ddp.users_code import warn_user


class InFlight:
    """What one rank has launched, and not awaited yet, of one model's parameters: a flat buffer for each bucket.

    Here parameters themselves are gathered. `DeferredUpdate` overrides what is another thing for gradients.
    """

    def __init__(self, model: nn.Module, *, check_stale: bool) -> None:
        """Registers a hook with the model. With `check_stale` the memory of what is under way has NaN in it."""
        self._model, self._check_stale = model, check_stale
        self._parameters: list[nn.Parameter] = []
        self._memory: set[int] = set()  # theirs; empty where it may have become other memory since it was known
        self._buckets: tuple[Bucket, ...] = ()
        self._gathered: list[Tensor] = []  # empty where the parameters are what they are; the same list for good
        self._sent: list[Tensor] = []  # from which they are gathered
        self._sound = torch.ones((), dtype=torch.bool, device="cpu")  # whether that is what ranks meant to send
        self._failure: RuntimeError | None = None  # of waiting for it, which torch tells once
        self._awaited = {kind: _awaited_by(self, kind) for kind in (nn.Parameter, Tensor)}
        self._shown = {awaited: kind for kind, awaited in self._awaited.items()}
        _await_left()
        weakref.finalize(self, _left.append, self._gathered).atexit = False
        _every.add(self)
        model.register_forward_pre_hook(_land_before_forward)

    def of(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """From now on it is about these, of which no other step has any under way; `Bucket.indices` are their places.

        Raises TypeError for parameters of a class of their own.
        """
        if [*map(id, parameters.values())] != [*map(id, self._parameters)]:
            self.land()
            refuse_other_classes(parameters)
            self._parameters = [*parameters.values()]
        for other in [*_every]:
            if other is not self and other.shares_with(self):
                other.land()

    # ---- for a graph -------------------------------------------------------------------------------------------------

    def given_to(self, buckets: tuple[Bucket, ...]) -> list[Tensor]:
        """What a graph of these buckets begins with: what was gathered of each, and whether it is sound."""
        if self._gathered and self._buckets == buckets and self._failure is None:
            return [*self._gathered, self._sound]
        self.land()
        packed, is_sound = self._begin(buckets)
        return [*packed, torch.full((), is_sound, dtype=torch.bool, device=packed[0].device)]

    def _begin(self, buckets: tuple[Bucket, ...]) -> tuple[list[Tensor], bool]:
        """What there is of each where nothing is under way, and whether it is to be used."""
        with torch.no_grad():
            return [rows_of_bucket(bucket, self._parameters).view(-1) for bucket in buckets], True

    @contextlib.contextmanager
    def awaited_by_graph(self) -> Iterator[None]:
        """In here a graph runs that writes what it has begun with into parameters. Where it raises, that is done.

        Where it was a wait that has raised, torch tells it that once: what nothing has read by then has not come.
        """
        try:
            with noting_what_is_taken() as taken:
                yield
        except BaseException as error:
            have_all_come = taken.issuperset(each.untyped_storage().data_ptr() for each in self._gathered)
            if isinstance(error, RuntimeError) and failed_in_collective(error) and not have_all_come:
                self._failure = error
            try:
                self.land()
            except RuntimeError as not_landed:
                warn_user(str(not_landed))
            raise

    def launched(self, buckets: tuple[Bucket, ...], results: list[Tensor]) -> list[Tensor]:
        """The results of a graph, without the last ones: what it has launched of these buckets, for the next."""
        *results, self._sound = results
        others, count = len(results) - 2 * len(buckets), len(buckets)
        self._buckets = buckets
        self._gathered[:], self._sent = results[others : others + count], results[others + count :]
        return results[:others]

    # ---- for everybody else ------------------------------------------------------------------------------------------

    def land(self) -> None:
        """Await what is under way, and write it into the parameters, which are of their own class again.

        They stay what they were where a rank had failed. Raises RuntimeError where something does not come.
        """
        self._show()
        if not self._gathered:
            return
        with torch_private.tracing.outside_of_traces():  # of a loss that reads the parameters of another model
            self.wait()
            gathered, failure = [*self._gathered], self._failure
            self._gathered.clear()
            self._sent, self._memory, self._failure = [], set(), None
            if failure is not None:
                raise RuntimeError(
                    "what other ranks have sent in the latest step has not come, and parameters of this rank, or some "
                    f"of them, are those of the step before: load a checkpoint ({failure})."
                ) from failure
            self._write(gathered, self._sound)

    def _write(self, gathered: Sequence[Tensor], sound: Tensor) -> None:
        """Into the parameters what has come."""
        for bucket, flat in zip(self._buckets, gathered, strict=True):
            own = [self._parameters[index] for index in bucket.indices]
            put_together_in_place(flat, sound, own, bucket.ranks)

    @contextlib.contextmanager
    def within_step(self) -> Iterator[None]:
        """In here parameters are of their own class, whether or not they are under way."""
        self._show()
        try:
            yield
        finally:
            if self._gathered:
                self._hide()

    def wait(self) -> None:
        """Until nothing is under way any more, as before its group is closed; where it does not come, `land` raises."""
        for flat in self._gathered:
            try:
                wait_tensor(flat)
            except RuntimeError as error:
                self._failure = error

    def has(self, memory: Collection[int]) -> bool:
        """Whether there is a parameter under way in some of this memory."""
        return bool(self._gathered) and not self._memory.isdisjoint(memory)

    def shares_with(self, other: "InFlight") -> bool:
        """Whether there is a parameter under way that is the other one's too."""
        return bool(self._gathered) and not {*map(id, self._parameters)}.isdisjoint(map(id, other._parameters))

    def is_of(self, model: nn.Module) -> bool:
        return self._model is model

    def _behind(self) -> Sequence[Tensor]:
        """What has old values while something is under way."""
        return self._parameters

    def _show(self) -> None:
        for tensor in self._behind():
            if type(tensor) in self._shown:  # and not that of another step
                tensor.__class__ = self._shown[type(tensor)]

    def _hide(self) -> None:
        behind = self._behind()
        if not self._memory:
            self._memory = {*torch_private.tensors.memory_of_each(behind)}
        if self._check_stale and self._sound:  # else they stay what they are
            self._spoil()
        for tensor in behind:
            if type(tensor) in self._awaited:
                tensor.__class__ = self._awaited[type(tensor)]

    @torch.no_grad()
    def _spoil(self) -> None:
        """For who reads parameters by another name."""
        for parameter in self._parameters:
            parameter.fill_(float("nan"))


_every = weakref.WeakSet[InFlight]()
_left: list[list[Tensor]] = []  # what those have left under way that were collected as garbage with their models


def _await_left() -> None:
    """Torch keeps what nobody has awaited, and with it the threads and connections of the group that it came by.

    A destructor must not wait for other ranks: the next step to be made does.
    """
    while _left:
        for flat in _left.pop():
            with contextlib.suppress(RuntimeError):
                wait_tensor(flat)


@untraced
def _land_before_forward(model: nn.Module, _: object) -> None:
    """Before compiled code looks at parameters: Dynamo cannot trace what changes their class.

    One function for all models: it is copied and pickled with them, and does nothing there.
    """
    for in_flight in [*_every]:
        if in_flight.is_of(model):
            in_flight.land()


def land_what_is_read(tensors: Sequence[Tensor]) -> None:
    """What a graph is about to read by these names, if a step has left that under way."""
    if _every:
        memory = torch_private.tensors.memory_of_each(tensors)
        for in_flight in [*_every]:
            if in_flight.has(memory):
                in_flight.land()


def wait_for_all() -> None:
    for in_flight in [*_every]:
        in_flight.wait()


def _land_all() -> None:
    """Before a process ends, from which other ranks still need something, or is forked, without what receives it."""
    for in_flight in [*_every]:
        with contextlib.suppress(RuntimeError):
            in_flight.land()


atexit.register(_land_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_land_all)


def refuse_other_classes(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise TypeError for parameters of a class of their own, which cannot be given another one for a time."""
    other = next((name for name, each in parameters.items() if type(each) is not nn.Parameter), None)
    if other is not None:
        raise TypeError(
            f"pipeline_updates watches parameters while they are under way, and {other} is of a class of its own, "
            f"{type(parameters[other]).__name__}: leave out pipeline_updates."
        )


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad", "layout", "grad_fn")
_GRAD = inspect.getattr_static(Tensor, "grad")
# What tells of a parameter without reading it.
_TELLING = {
    *(inspect.getattr_static(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point")),
    *(_GRAD.__set__, _GRAD.__delete__),
}


def _awaited_by(in_flight: InFlight, kind: type[Tensor]) -> type[Tensor]:
    """The class of parameters, or of tensors of state, as long as they are under way."""

    class Awaited(kind):  # type: ignore[valid-type, misc]
        """A tensor that is being gathered."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """One that is made anew, as `type(parameter)(...)`, is not."""
            return kind(*args, **kwargs)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func in _TELLING:
                return super().__torch_function__(func, types, args, kwargs or {})
            in_flight.land()
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            in_flight.land()
            return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            in_flight.land()
            return self.__reduce_ex__(protocol)

    return Awaited
