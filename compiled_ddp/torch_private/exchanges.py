"""Exchanges, by which ranks scatter sums and gather shares where a backend's own collectives are no good for that.

[Note: both ways] Gloo announces a receipt on the connection on which it sends, and in an all-to-all sends first: on the
rank that comes last the announcement stands behind all that it sends, so that one direction of the link idles while the
other one is used (656 in place of 325 ms for 73 MiB on 1 Gbit/s, two ranks). So on gloo what ranks send to those above
them, and what they send to those below, are collectives of their own, on two groups, and a rank launches first that by
which it receives. They are collectives, and no receipts and sends, since gloo's threads launch those: announcing a
receipt waits for the thread that receives, and that, where ranks share cores, for other ranks to be done computing
(docs/compile-step/measured.md).
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp.torch_private.groups import is_gloo, start_sum_in_graph

SLICE_BYTES = 8 * 2**20  # docs/compile-step/measured.md: of what comes from one rank, to be added up at once

# The group by which ranks send to those below them, of the one by which they send to those above. torch.distributed
# owns both.
_way_back: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def let_send_back(group: dist.ProcessGroup, *, by: dist.ProcessGroup) -> None:
    """Have exchanges of `group` use another one of the same ranks too, which nothing else uses: [Note: both ways]."""
    _way_back[group] = weakref.ref(by)


def _back(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    reference = _way_back.get(group)
    return reference() if reference else None


def has_way_back(group: dist.ProcessGroup) -> bool:
    """Whether it was let send back by another one, which is there still."""
    return _back(group) is not None


@contextlib.contextmanager
def _unseen_by_profilers() -> Iterator[None]:
    """What is launched within a profiler and awaited when that has ended writes into freed memory there."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


@_unseen_by_profilers()
def start_exchange_of_sums(
    group: dist.ProcessGroup,
    sent: torch.Tensor,
    received: torch.Tensor,
    summed: torch.Tensor,
    arrived: Callable[[], None] | None = None,
) -> None:
    """Launch `summed` becoming the sum over ranks of what each sends this one, an equal part of what it has `sent`.

    That is there behind `wait_tensor`, by which `sent` may be changed: of two ranks a slice is added up while the next
    one is on its way, of more all comes at once, and is added up in the order of ranks. `received` is memory for what
    comes, of the size of `sent`; this rank's own row of it may be `summed`. `arrived` is called, by another thread,
    when all has come.
    """
    under_way = list[tuple[slice, Sequence[dist.Work]]]()
    if not _goes_both_ways(group, received):
        under_way.append((slice(None), [group.alltoall_base(received.view(-1), sent.view(-1), [], [])]))
    else:
        # Slices of several ranks' rows lie apart, and no collective fills these at once.
        count = max(1, -(-summed.nbytes // SLICE_BYTES)) if group.size() == 2 else 1
        bounds = [summed.numel() * number // count for number in range(count + 1)]
        sent_bytes, come = sent.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
        for begin, end in itertools.pairwise(bounds):
            size = sent.itemsize
            under_way.append((slice(begin, end), _start_parts(group, sent_bytes, come, begin * size, end * size)))
    if arrived is not None:
        _tell_of_end([work for _, works in under_way for work in works], arrived)
    torch._C._distributed_c10d._register_work(summed, _Added(group, sent, received, summed, under_way))


def _goes_both_ways(group: dist.ProcessGroup, memory: torch.Tensor) -> bool:
    """In collectives of their own, [Note: both ways]; elsewhere it is the backend's all-to-all."""
    return memory.is_cpu and (group in _way_back or is_gloo(group))


def _start_parts(
    group: dist.ProcessGroup, sent: torch.Tensor, come: torch.Tensor, begin: int, end: int
) -> Sequence[dist.Work]:
    """Launch each other rank's part of what is `sent` going there, and coming from there, from byte `begin` to `end`.

    These are the bounds within a part. Those of several ranks are whole.
    """
    rank, ranks = group.rank(), group.size()
    part, size = len(sent) // ranks, end - begin
    lower, higher = [size] * rank + [0] * (ranks - rank), [0] * (rank + 1) + [size] * (ranks - rank - 1)
    of_lower = slice(begin, max(0, (rank - 1) * part + end))
    of_higher = slice((rank + 1) * part + begin, (ranks - 1) * part + end)

    def up(by: dist.ProcessGroup) -> list[dist.Work]:
        return [by.alltoall_base(come[of_lower], sent[of_higher], lower, higher)]

    def down(by: dist.ProcessGroup) -> list[dist.Work]:
        return [by.alltoall_base(come[of_higher], sent[of_lower], higher, lower)]

    return _both_ways(group, up, down)


@_unseen_by_profilers()
def start_exchange_of_all(
    group: dist.ProcessGroup,
    share: torch.Tensor,
    received: torch.Tensor,
    arrived: Callable[[], None] | None = None,
) -> None:
    """Launch `received` becoming the `share` of each rank, for `wait_tensor`, by which that may be changed.

    The other arguments are those of `start_exchange_of_sums`. This rank's own row of `received` may be its share.
    """
    rank, ranks = group.rank(), group.size()
    if not _goes_both_ways(group, received):
        works = [group.alltoall_base(received.view(-1), share.repeat(ranks), [], [])]
    else:
        rows = received.view(ranks, share.numel())
        if rows[rank].data_ptr() != share.data_ptr():
            rows[rank].copy_(share)
        works = _start_rows(group, rows.view(torch.uint8).unbind())
    if arrived is not None:
        _tell_of_end(works, arrived)
    for work in works:
        torch._C._distributed_c10d._register_work(received, work)


def _start_rows(group: dist.ProcessGroup, rows: Sequence[torch.Tensor]) -> list[dist.Work]:
    """Launch every row becoming that of its rank."""

    def launch(roots: range, by: dist.ProcessGroup) -> list[dist.Work]:
        return [by.broadcast([rows[root]], _from(root)) for root in roots]

    ranks = len(rows)
    lower, higher = range(ranks // 2), range(ranks // 2, ranks)
    return _both_ways(group, functools.partial(launch, lower), functools.partial(launch, higher))


@functools.cache
def _from(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    return options


def _both_ways(
    group: dist.ProcessGroup,
    up: Callable[[dist.ProcessGroup], list[dist.Work]],
    down: Callable[[dist.ProcessGroup], list[dist.Work]],
) -> list[dist.Work]:
    """Launch what goes up by `group`, and what goes down by its way back. [Note: both ways]"""
    back = _back(group)
    if back is None or group.rank() >= group.size() // 2:
        return [*up(group), *down(back or group)]
    return [*down(back), *up(group)]  # first what is received


def _tell_of_end(works: Sequence[dist.Work], arrived: Callable[[], None]) -> None:
    """Those of collectives tell when they have ended, by their futures."""
    torch.futures.collect_all([work.get_future() for work in works]).add_done_callback(lambda _: arrived())


def _add_up(rank: int, own: torch.Tensor, rows: torch.Tensor, into: torch.Tensor) -> None:
    """Let `into` be the sum of this rank's `own` and the others' rows; it may lie where this rank's would."""
    parts = [own if number == rank else row for number, row in enumerate(rows)]
    if len(parts) == 2:
        torch.add(*parts, out=into)
    else:
        torch.sum(torch.stack(parts), 0, out=into)


def exchange_of_sums(
    group: dist.ProcessGroup, sent: torch.Tensor, ranks: int, arrived: Callable[[], None] | None = None
) -> torch.Tensor:
    """Launch the same into new memory, which is returned; `sent` may be changed at once, as by compiled code."""
    summed = sent.new_empty(sent.numel() // ranks)
    start_exchange_of_sums(group, sent.clone(), torch.empty_like(sent), summed, arrived)
    return summed


def exchange_of_all(
    group: dist.ProcessGroup, share: torch.Tensor, ranks: int, arrived: Callable[[], None] | None = None
) -> torch.Tensor:
    """Launch the same into new memory, which is returned; `share` may be changed at once, as by compiled code."""
    received = share.new_empty(share.numel() * ranks)
    start_exchange_of_all(group, share.clone(), received, arrived)
    return received


class _Added(dist.Work):
    """What is added up as it comes: of each slice of a part its collectives."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sent: torch.Tensor,
        received: torch.Tensor,
        summed: torch.Tensor,
        slices: Sequence[tuple[slice, Sequence[dist.Work]]],
    ) -> None:
        super().__init__()
        self._rank, self._ranks = group.rank(), group.size()
        self._memory, self._slices = (sent, received, summed), slices

    def wait(self, timeout: timedelta | None = None) -> bool:
        sent, received, summed = self._memory
        parts, rows = (memory.view(self._ranks, summed.numel()) for memory in (sent, received))
        for elements, works in self._slices:
            for work in works:
                work.wait()
            _add_up(self._rank, parts[self._rank, elements], rows[:, elements], summed[elements])
        return True


def start_in_graph(
    group: dist.ProcessGroup, operator: Any, args: tuple[Any, ...], arrived: Callable[[], None]
) -> torch.Tensor:
    """What is to be awaited of a functional collective of `group`; `arrived` is called when it has come, on gloo."""
    ours = torch.ops.compiled_ddp
    if operator is ours.exchange_of_sums_into.default:
        sent, received, summed, *_ = args
        start_exchange_of_sums(group, sent, received, summed, arrived)
        return summed  # type: ignore[no-any-return]
    if operator is ours.exchange_of_all_into.default:
        share, received, *_ = args
        start_exchange_of_all(group, share, received, arrived)
        return received  # type: ignore[no-any-return]
    if operator in (ours.exchange_of_sums.default, ours.exchange_of_all.default):
        sent, ranks, *_ = args
        start = exchange_of_sums if operator is ours.exchange_of_sums.default else exchange_of_all
        return start(group, sent, ranks, arrived)
    if not is_gloo(group):
        return operator(*args)  # type: ignore[no-any-return]
    result, work = start_sum_in_graph(group, operator, args)
    if work is not None:
        _tell_of_end([work], arrived)
    return result  # type: ignore[no-any-return]
