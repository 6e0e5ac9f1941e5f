"""Exchanges, by which ranks of gloo scatter sums and gather shares, point to point."""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp.torch_private.groups import is_gloo, start_sum_in_graph

SLICE_BYTES = 8 * 2**20  # docs/compile-step.md, "Measured": of what comes from one rank, to be added up at once


def start_exchange_of_sums(
    group: dist.ProcessGroup,
    sent: torch.Tensor,
    received: torch.Tensor,
    summed: torch.Tensor,
    number: int,
    arrived: Callable[[], None] | None = None,
) -> None:
    """Launch `summed` becoming the sum over ranks of what each sends this one, an equal part of what it has `sent`.

    That is there behind `wait_tensor`, by which `sent` may be changed: a slice is added up, in the order of ranks,
    while the next one is on its way. `received` is memory for what comes, of the size of `sent`; this rank's own row of
    it may be `summed`. `number` is that of the exchange. `arrived` is called, by another thread, when all has come.
    """
    rank, ranks = group.rank(), group.size()
    parts, rows = sent.view(ranks, -1), received.view(ranks, -1)
    count = -(-rows[0].nbytes // SLICE_BYTES)
    receipts, sends = start_exchange(group, parts, rows, number, count, arrived)
    slices = zip(parts[rank].tensor_split(count), rows.tensor_split(count, 1), summed.tensor_split(count), strict=True)
    additions = [functools.partial(_add_up, rank, *each) for each in slices]
    torch._C._distributed_c10d._register_work(summed, _Added([*zip(receipts, additions, strict=True)], sends))


def start_exchange_of_all(
    group: dist.ProcessGroup,
    share: torch.Tensor,
    received: torch.Tensor,
    number: int,
    arrived: Callable[[], None] | None = None,
) -> None:
    """Launch `received` becoming the `share` of each rank, for `wait_tensor`, by which that may be changed.

    The other arguments are those of `start_exchange_of_sums`. This rank's own row of `received` may be its share.
    """
    rank, ranks = group.rank(), group.size()
    rows = received.view(ranks, -1)
    receipts, sends = start_exchange(group, share.expand(ranks, -1), rows, number, 1, arrived)
    if rows[rank].data_ptr() != share.data_ptr():
        rows[rank].copy_(share)
    for work in (*receipts[0], *sends):
        torch._C._distributed_c10d._register_work(received, work)


def start_exchange(
    group: dist.ProcessGroup,
    parts: torch.Tensor,
    rows: torch.Tensor,
    number: int,
    count: int,
    arrived: Callable[[], None] | None,
) -> tuple[Sequence[Sequence[dist.Work]], Sequence[dist.Work]]:
    """Launch each of the other ranks being sent its part, and the rows for theirs filled with what comes.

    Returns what is to be awaited of each of `count` slices that have come, and what of what is sent.

    Gloo's all-to-all sends before it receives. It announces a receipt on the connection on which it sends, and on the
    rank that comes last, behind all of that: one direction of the link idles while the other one is used (656 in place
    of 325 ms for 73 MiB on 1 Gbit/s, two ranks). Here each receipt is announced first.
    """
    if not (is_gloo(group) and rows.is_cpu):
        return start_all_to_all(group, parts, rows, number, count, arrived)
    rank, ranks = group.rank(), group.size()
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    with _unseen_by_profilers():
        receipts = [
            [group.recv([each[other]], other, number + 1) for other in others]  # 0 is that of `end_waits`
            for each in rows.tensor_split(count, 1)
        ]
        sends = [group.send([each[o]], o, number + 1) for each in parts.tensor_split(count, 1) for o in others]
    if arrived is None:
        return receipts, sends
    awaited = iter(_by_thread([*itertools.chain(*receipts), *sends], count * len(others), arrived))
    return [[*itertools.islice(awaited, len(others))] for _ in receipts], [*awaited]


def start_all_to_all(
    group: dist.ProcessGroup,
    parts: torch.Tensor,
    rows: torch.Tensor,
    _: int,
    count: int,
    arrived: Callable[[], None] | None,
) -> tuple[Sequence[Sequence[dist.Work]], Sequence[dist.Work]]:
    """Launch the same as the backend's own all-to-all, in one slice."""
    work = group.alltoall_base(rows.view(-1), parts.reshape(-1), [], [])
    if arrived is not None:
        _tell_of_end(work, arrived)
    return [[work], *([] for _ in range(1, count))], []


def _tell_of_end(work: dist.Work, arrived: Callable[[], None]) -> None:
    """Those of gloo's collectives tell when they have ended, by their futures."""
    work.get_future().add_done_callback(lambda _: arrived())


def _add_up(rank: int, own: torch.Tensor, rows: torch.Tensor, into: torch.Tensor) -> None:
    """Let `into` be the sum of this rank's `own` and the others' rows; it may lie where this rank's would."""
    parts = [own if number == rank else row for number, row in enumerate(rows)]
    if len(parts) == 2:
        torch.add(*parts, out=into)
    else:
        torch.sum(torch.stack(parts), 0, out=into)


def exchange_of_sums(
    group: dist.ProcessGroup, sent: torch.Tensor, ranks: int, number: int, arrived: Callable[[], None] | None = None
) -> torch.Tensor:
    """Launch the same into new memory, which is returned; `sent` may be changed at once, as by compiled code."""
    summed = sent.new_empty(sent.numel() // ranks)
    start_exchange_of_sums(group, sent.clone(), torch.empty_like(sent), summed, number, arrived)
    return summed


def exchange_of_all(
    group: dist.ProcessGroup, share: torch.Tensor, ranks: int, number: int, arrived: Callable[[], None] | None = None
) -> torch.Tensor:
    """Launch the same into new memory, which is returned; `share` may be changed at once, as by compiled code."""
    received = share.new_empty(share.numel() * ranks)
    start_exchange_of_all(group, share.clone(), received, number, arrived)
    return received


@contextlib.contextmanager
def _unseen_by_profilers() -> Iterator[None]:
    """What is sent, and received, within a profiler and awaited when that has ended writes into freed memory there."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


class _Added(dist.Work):
    """What is added up as it comes: each slice's receipts, with what adds it up; and then what was sent."""

    def __init__(
        self, slices: Sequence[tuple[Sequence[dist.Work], Callable[[], None]]], sends: Sequence[dist.Work]
    ) -> None:
        super().__init__()
        self._slices, self._sends = slices, sends

    def wait(self, timeout: timedelta | None = None) -> bool:
        for receipts, add in self._slices:
            for work in receipts:
                work.wait()
            add()
        for work in self._sends:
            work.wait()
        return True


class _Awaited(dist.Work):
    """Something that another thread awaits."""

    def __init__(self) -> None:
        super().__init__()
        self.done = Future[None]()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.done.result()
        return True


def _by_thread(works: Sequence[dist.Work], count: int, arrived: Callable[[], None]) -> list[_Awaited]:
    """The same, awaited by a thread, which calls `arrived` behind the first so many: those of gloo do not tell."""
    awaited = [_Awaited() for _ in works]

    def await_each() -> None:
        for number, (work, here) in enumerate(zip(works, awaited, strict=True), 1):
            try:
                work.wait()
                if number == count:
                    arrived()
            except BaseException as error:  # for who waits
                here.done.set_exception(error)
            else:
                here.done.set_result(None)

    threading.Thread(target=await_each, daemon=True).start()
    return awaited


def start_in_graph(
    group: dist.ProcessGroup, operator: Any, args: tuple[Any, ...], arrived: Callable[[], None]
) -> torch.Tensor:
    """What is to be awaited of a functional collective of `group`; `arrived` is called when it has come, on gloo."""
    ours = torch.ops.compiled_ddp
    if operator is ours.exchange_of_sums_into.default:
        sent, received, summed, number, *_ = args
        start_exchange_of_sums(group, sent, received, summed, number, arrived)
        return summed  # type: ignore[no-any-return]
    if operator is ours.exchange_of_all_into.default:
        share, received, number, *_ = args
        start_exchange_of_all(group, share, received, number, arrived)
        return received  # type: ignore[no-any-return]
    if operator in (ours.exchange_of_sums.default, ours.exchange_of_all.default):
        sent, ranks, number, _ = args
        start = exchange_of_sums if operator is ours.exchange_of_sums.default else exchange_of_all
        return start(group, sent, ranks, number, arrived)
    if not is_gloo(group):
        return operator(*args)  # type: ignore[no-any-return]
    result, work = start_sum_in_graph(group, operator, args)
    if work is not None:
        _tell_of_end(work, arrived)
    return result  # type: ignore[no-any-return]
