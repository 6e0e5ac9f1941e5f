"""Process groups, their stores and their collectives."""

import contextlib
import functools
import operator
import unittest.mock
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Result = TypeVar("Result")

GLOO_COLLECTIVES_IN_FLIGHT = 4  # docs/benchmarks.md, "Collectives in flight"


def _with_concurrent_gloo() -> contextlib.AbstractContextManager[object]:
    """Make groups whose gloo backend has `GLOO_COLLECTIVES_IN_FLIGHT` threads, each running one collective at a time.

    torch gives it two for each device, and takes no options for it. A small all-reduce is bound by the latency of its
    steps; with four under way the link does not idle between them.
    """
    if not dist.is_gloo_available():
        return contextlib.nullcontext()
    gloo: Any = dist.ProcessGroupGloo

    # Not a subclass: a group whose class is Python's was not always torn down in order, and then ended the process with
    # "terminate called without an active exception" (2 of 10 times, where groups are made and destroyed quickly).
    class MakesGloo(type):
        def __instancecheck__(cls, candidate: object) -> bool:
            return isinstance(candidate, gloo)

    class ConcurrentGloo(metaclass=MakesGloo):
        def __new__(cls, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            # What torch makes of the rest, another set of arguments in every version, is read from a group of one.
            options = gloo(dist.HashStore(), 0, 1, *args, **kwargs).options
            options._threads = max(options._threads, GLOO_COLLECTIVES_IN_FLIGHT)
            return gloo(store, rank, size, options)

    return unittest.mock.patch.object(distributed_c10d, "ProcessGroupGloo", ConcurrentGloo)


def new_group_named(
    name: str,
    ranks: Sequence[int],
    parent: dist.ProcessGroup,
    *,
    timeout: timedelta,
    occasion: str = "",
    is_models: bool = False,
) -> tuple[dist.ProcessGroup, str]:
    """Make a process group of the global `ranks`, with `parent`'s backend, under a name of our choice.

    When the one of this name has been destroyed, it can be made again, on another `occasion`. `is_models` is for
    collectives that `collectives_of_others` counts.

    Only its members call this. torch's own `new_group` counts names up, and the name is part of a compiled graph and
    so of its cache key; its local variant hashes in the number of groups that a rank happens to know.
    """
    group_name = distributed_c10d.GroupName(name)
    backend, _ = distributed_c10d._world.pg_map[parent]
    # ncclCommSplit is a collective of all ranks of the default group, which is split where it is bound to a device.
    without_split = unittest.mock.patch.object(distributed_c10d, "_get_split_source", return_value=None)
    with _with_concurrent_gloo(), without_split if len(ranks) < dist.get_world_size() else contextlib.nullcontext():
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            backend,
            dist.PrefixStore(occasion, default_store()),
            group_name,
            timeout=timeout,
            device_id=distributed_c10d._get_default_group().bound_device_id,
            group_desc="compiled_ddp",
        )
    distributed_c10d._world.pg_group_ranks[group] = {
        global_rank: group_rank for group_rank, global_rank in enumerate(ranks)
    }
    if not is_models:
        _our_groups.add(group)
    return group, group_name


_our_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def check_backends(group: dist.ProcessGroup, devices: Sequence[torch.device]) -> None:
    """Raise ValueError where `group` cannot reduce tensors of all these devices."""
    for kind in sorted({device.type for device in devices}):
        try:
            group._get_backend(torch.device(kind))
        except RuntimeError as error:
            raise ValueError(
                f"parameters are on {kind}, for which the process group ({dist.get_backend_config(group)}) has no "
                'backend: name one for each kind of device, as in init_process_group("cpu:gloo,cuda:nccl").'
            ) from error
    bound = distributed_c10d._get_default_group().bound_device_id
    if bound is None or bound.type == "cpu":  # which has no parts; torch 2.15 takes it
        return
    if any(device.type == bound.type and device != bound for device in devices):
        raise ValueError(
            f"parameters are on {', '.join(map(str, devices))}, and this process is bound to {bound}, by "
            "init_process_group(device_id=...), or by NCCL from torch 2.15 on, which goes by LOCAL_RANK: put the model "
            "there, or name the model's device."
        )


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Let graphs find `group` under `name` too, and no other one any more. Forgotten when all groups are destroyed."""
    forget_group_name(name)
    torch._C._distributed_c10d._register_process_group(distributed_c10d.GroupName(name), group)


def forget_group_name(name: str) -> None:
    """Let graphs find no group under `name`."""
    torch._C._distributed_c10d._unregister_process_group(distributed_c10d.GroupName(name))


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether `group` has no other backend, for no kind of device."""
    backends = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    return {_stands_for.get(backend, backend) for backend in backends} == {"gloo"}


_stands_for = dict[str, str]()  # a backend that is pretended


@contextlib.contextmanager
def pretended(size: int, store: dist.Store | None = None, backend: str = "fake") -> Iterator[str]:
    """A default group of `size` ranks that communicates nothing, and stands for one of `backend`; its name."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=store or FakeStore(), rank=0, world_size=size)
    _stands_for["fake"] = backend
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        del _stands_for["fake"]
        dist.destroy_process_group()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether `group` is one of those that torch.distributed was initialised with, or that were made since."""
    return group in distributed_c10d._world.pg_map


def on_this_device(call: Callable[[], Result]) -> Callable[[], Result]:
    """`call`, for another thread, which begins with another device than this one has chosen."""
    if not torch.accelerator.is_available():
        return call
    device = torch.accelerator.current_device_index()

    def on_device() -> Result:
        torch.accelerator.set_device_index(device)
        return call()

    return on_device


def end_waits(group: dist.ProcessGroup) -> None:
    """Let whatever this process waits for on a gloo `group`, in any thread, fail now, and on the other ranks too.

    A receipt that nobody has sent for: where gloo has waited in vain, it closes the connections of the whole group.
    """
    nothing = torch.zeros(1, dtype=torch.float32, device="cpu")
    neighbour = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):
        group.recv([nothing], neighbour, 0).wait(timedelta(milliseconds=1))


def default_store() -> dist.Store:
    return distributed_c10d._get_default_store()


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the user gave to `group`: its backend's for this machine's accelerator, or else for the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for device in (accelerator, torch.device("cpu")):
        if device is not None:
            # No backend for this device, or one from elsewhere, which does not tell.
            with contextlib.suppress(RuntimeError, AttributeError):
                return group._get_backend(device).options._timeout
    return distributed_c10d.default_pg_timeout


def with_own_connection(store: dist.Store) -> dist.Store:
    """A connection to the same store for another thread, which blocking calls on `store` do not hold up."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone


def start_sum(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    """`dist.all_reduce(tensor, group=group, async_op=True)` without the checks of what a user may pass."""
    work: dist.Work = group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], _sum())
    return work


def start_gather(group: dist.ProcessGroup, gathered: torch.Tensor, own: torch.Tensor) -> dist.Work:
    """Launch `gathered` becoming every rank's `own`, one after the other in rank order; both have one dimension."""
    work: dist.Work = group._allgather_base(gathered, own)
    return work


def start_sum_in_graph(group: dist.ProcessGroup, operator: Any, args: tuple[Any, ...]) -> tuple[Any, dist.Work | None]:
    """What a functional all-reduce of `group` returns, and its Work: what the operator keeps to itself.

    The Work is None where it is no sum, and the operator has run.
    """
    tensor, kind, _ = args
    if kind != "sum":
        return operator(*args), None
    if operator is not torch.ops._c10d_functional.all_reduce_.default:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    work = start_sum(group, tensor)
    torch._C._distributed_c10d._register_work(tensor, work)  # for `wait_tensor`
    return tensor, work


@functools.cache
def _sum() -> Any:
    options = distributed_c10d.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp(dist.ReduceOp.SUM), True
    return options


def group_called(name: str) -> dist.ProcessGroup:
    """The process group that graphs call so."""
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group


def collectives_launched(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has launched on `group`; 0 where the backend does not count."""
    return sum(number for backend in _backends(group) if (number := _launched_on(backend)) is not None)


def launch_counter(group: dist.ProcessGroup) -> Callable[[dist.ProcessGroup], int]:
    """`collectives_launched` for this group, as fast as it can be told: in a third of a microsecond."""
    one_backend = len(_backends(group)) == 1 and counts_collectives(group)
    if not one_backend:
        return collectives_launched
    return type(group)._get_sequence_number_for_group  # type: ignore[attr-defined, no-any-return]


def is_of_others(group: dist.ProcessGroup) -> bool:
    """Whether this package has not made it for itself, by `new_group_named`."""
    return group not in _our_groups


# All process groups of this process. In C: asked four times in a step.
all_groups: Callable[[], Iterable[dist.ProcessGroup]] = functools.partial(
    operator.attrgetter("pg_map"), distributed_c10d._world
)


def counts_collectives(group: dist.ProcessGroup) -> bool:
    """Whether `collectives_launched` tells of every collective on `group`."""
    return all(_launched_on(backend) is not None for backend in _backends(group))


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """A group's backends, each once: one may be there for several kinds of devices."""
    return list({id(backend): backend for backend in map(group._get_backend, group._device_types)}.values())


def _launched_on(backend: Any) -> int | None:
    with contextlib.suppress(RuntimeError):
        return int(backend._get_sequence_number_for_group())
    return None


BROADCAST_BYTES = 250 * 1024 * 1024  # as torch's DDP


_BROADCAST_AS_THEY_ARE = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.complex32, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    )
)
_AS_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}  # others: of their size, for any shape
_dtype_of = operator.attrgetter("dtype")


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[torch.Tensor], *, source: int) -> None:
    """Overwrite `tensors` with those of group rank `source`, in pieces of at most `BROADCAST_BYTES`.

    No backend knows float8, int16 and unsigned integers of every version: their bits travel as what it does know.
    """
    if not _BROADCAST_AS_THEY_ARE.issuperset(map(_dtype_of, tensors)):
        tensors = [
            tensor if tensor.dtype in _BROADCAST_AS_THEY_ARE else tensor.view(_AS_BITS[tensor.dtype.itemsize])
            for tensor in tensors
        ]
    dist._broadcast_coalesced(group, tensors, BROADCAST_BYTES, source)


AnyFuture = torch._C.Future  # what `then` and collectives return; torch.futures.Future is a subclass
