"""Sums over ranks of buffers most of whose rows are zero, as an embedding's gradient: what is zero is not sent.

A batch of tokens touches few rows of a large vocabulary, and the gradient of all others is zero. Each rank looks at its
buffer, not at the batch, so that a sum of several backwards, or of several uses of a weight, is right as it is. The
ranks tell each other how many rows they have, in one small collective, and then gather these rows and their numbers,
or, where that would be no less, all-reduce the whole buffer.

What the ranks have in one row is added in the order of ranks, so the sum has the same bits on all of them.

[Note: two groups and a thread] The small collective is launched on the communicator's group, in the order of all
buckets, and counts as that bucket's one. What follows depends on its result. So that nothing waits for it, a thread
launches that, on a group of its own, one buffer after the other; the order there is that of the launches.
"""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.plan import Bucket

_INDEX_BYTES = 8
_AS_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
# A ring moves almost two times the bytes of a buffer for an all-reduce, and what the others have for an all-gather.
_MOVED_BY_ALL_REDUCE = 2


def sends_rows(counts: Sequence[int], rows: int, row_bytes: int) -> bool:
    """Whether it takes fewer bytes to gather what the ranks have, so many rows each, than to all-reduce all `rows`.

    A gather takes as many bytes of each rank as of the one that has most.
    """
    return max(counts) * len(counts) * (row_bytes + _INDEX_BYTES) < _MOVED_BY_ALL_REDUCE * rows * row_bytes


def sent_bytes(counts: Sequence[int], rows: int, row_bytes: int) -> int:
    """How large a buffer is whose all-reduce moves as many bytes."""
    if not sends_rows(counts, rows, row_bytes):
        return rows * row_bytes
    return max(counts) * len(counts) * (row_bytes + _INDEX_BYTES) // _MOVED_BY_ALL_REDUCE


# How many rows each rank had, in the latest sum of so many elements by rows of this width.
CountedRows = Mapping[tuple[int, int], Sequence[int]]


def bytes_of(bucket: Bucket, counted: CountedRows) -> int:
    """The size of a bucket, or of one whose all-reduce moves as many bytes as the latest step has of this one."""
    counts = () if bucket.row is None else counted.get((bucket.numel, bucket.row), ())
    if bucket.row is None or not counts:
        return bucket.nbytes
    return sent_bytes(counts, bucket.numel // bucket.row, bucket.row * bucket.dtype.itemsize)


# ---- what is launched ------------------------------------------------------------------------------------------------


class _SumOfRows(dist.Work):
    """A sum under way. C++ waits for it by `wait`, for which Python must keep it: `RowSums` does, until it is over."""

    def __init__(self, forget: Callable[["_SumOfRows"], None]) -> None:
        super().__init__()
        self._over, self._forget = threading.Event(), forget
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def end(self, error: BaseException | None) -> None:
        """The sum is there, or `error` has ended it."""
        self._error = error
        self._future.set_result(None)
        self._over.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises what has ended it. Each collective in it has the group's timeout; this has none of its own."""
        self._over.wait()
        self._forget(self)
        if self._error is not None:
            raise _of_collective(self._error) from self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def get_future(self) -> Any:
        """For a recorder, which notes the end."""
        return self._future


def _of_collective(error: BaseException) -> BaseException:
    """`error` as one that is known to come of a collective, wherever it is caught; an interrupt as it is."""
    is_other = isinstance(error, RuntimeError) and not isinstance(error, dist.DistError)
    return dist.DistBackendError(str(error)) if is_other else error


class _RowGroup(dist.ProcessGroup):
    """What graphs and hooks call to sum buffers by rows of one width."""

    def __init__(self, group: dist.ProcessGroup, start: Callable[[Tensor, int], dist.Work], row: int) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # torch's stubs know a store
        self._start, self._row = start, row

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]
        """Launch the sum, in place, of one contiguous buffer of whole rows."""
        (buffer,) = tensors
        try:
            return self._start(buffer, self._row)
        except RuntimeError as error:
            raise _of_collective(error) from error


class RowSums:
    """Sums buffers by rows, for one communicator."""

    def __init__(self, counting: dist.ProcessGroup, moving: dist.ProcessGroup) -> None:
        """`counting` is the communicator's group, `moving` another one of the same ranks, used by nothing else."""
        # torch.distributed owns the groups.
        self._counting, self._moving = weakref.ref(counting), weakref.ref(moving)
        self._world_size = counting.size()
        self._groups: dict[int, _RowGroup] = {}
        self._under_way: set[_SumOfRows] = set()
        self.counted: dict[tuple[int, int], Sequence[int]] = {}  # `CountedRows`
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []  # what has ended a sum here, the first one
        has_begun = threading.Event()
        what = self._tasks, torch.get_num_threads(), has_begun
        threading.Thread(target=_run_all, args=what, name="compiled_ddp rows", daemon=True).start()
        has_begun.wait()
        self._at_end = weakref.finalize(self, self._tasks.put, None)
        self._at_end.atexit = False

    def close(self) -> None:
        """Let the thread end, when it is done with what was launched."""
        self._at_end()

    def group_of(self, row: int) -> dist.ProcessGroup:
        """What sums buffers by rows of so many elements, when it is asked for an all-reduce."""
        if row not in self._groups:
            counting, sums = self._counting(), weakref.ref(self)
            assert counting is not None, "the group of a communicator that is gone"

            def start(buffer: Tensor, row: int) -> dist.Work:
                alive = sums()
                assert alive is not None, "the sums of a communicator that is gone"
                return alive._launch(buffer, row)

            self._groups[row] = _RowGroup(counting, start, row)
        return self._groups[row]

    @torch.no_grad()
    def _launch(self, buffer: Tensor, row: int) -> dist.Work:
        counting, moving = self._counting(), self._moving()
        assert counting is not None and moving is not None, "the groups of a communicator that is gone"
        rows = buffer.view(-1, row)
        own = rows.view(_AS_BITS[rows.itemsize]).any(1).nonzero().flatten()  # -0.0 is no zero: of equal bits everywhere
        counts = torch.zeros(self._world_size, dtype=torch.int64, device="cpu")
        count = torch.tensor([len(own)], dtype=torch.int64, device="cpu")
        counted = torch_private.groups.start_gather(counting, counts, count)
        work = _SumOfRows(self._under_way.discard)
        self._under_way.add(work)
        note, failed = functools.partial(self.counted.__setitem__, (buffer.numel(), row)), self._failed

        def finish() -> None:
            try:
                if failed:  # the other ranks may be in the sum that has failed here, and would take this for it
                    raise failed[0]
                counted.wait()
                of_ranks = counts.tolist()
                note(of_ranks)
                _sum_up(rows, own, of_ranks, moving)
            except BaseException as error:
                if not failed:
                    failed.append(error)
                    torch_private.groups.end_waits(moving)
                work.end(error)
            else:
                work.end(None)

        self._tasks.put(finish)
        return work


def _run_all(tasks: "queue.SimpleQueue[Callable[[], None] | None]", threads: int, has_begun: threading.Event) -> None:
    torch.set_num_threads(threads)  # which a new thread has otherwise by the processors
    has_begun.set()
    while (task := tasks.get()) is not None:
        task()
        del task  # with the buffer that it holds


# ---- one sum ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _sum_up(rows: Tensor, own: Tensor, counts: list[int], group: dist.ProcessGroup) -> None:
    """Leave the sum over ranks in `rows`, of which this rank's `own` are not zero; the ranks have so many of them."""
    most, row_bytes = max(counts), rows.shape[1] * rows.itemsize
    if not sends_rows(counts, len(rows), row_bytes):
        torch_private.groups.start_sum(group, rows.view(-1)).wait()
        return
    if most == 0:
        return
    # Numbers first, then rows, in one message of as many bytes from each rank.
    size = -(-most * (_INDEX_BYTES + row_bytes) // _INDEX_BYTES) * _INDEX_BYTES
    message = torch.zeros(size, dtype=torch.uint8, device="cpu")
    numbers, values = _parts(message, len(own), most, rows)
    numbers.copy_(own)
    torch.index_select(rows, 0, own, out=values)
    gathered = torch.empty(len(counts), size, dtype=torch.uint8, device="cpu")
    torch_private.groups.start_gather(group, gathered.view(-1), message).wait()
    rows.index_fill_(0, own, 0)
    for count, received in zip(counts, gathered, strict=True):
        numbers, values = _parts(received, count, most, rows)
        rows.index_copy_(0, numbers, rows.index_select(0, numbers).add_(values))  # each row once


def _parts(message: Tensor, count: int, most: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers and the values of `count` rows in a message that has room for `most`."""
    numbers = message[: _INDEX_BYTES * count].view(torch.int64)
    first, row_bytes = _INDEX_BYTES * most, rows.shape[1] * rows.itemsize
    return numbers, message[first : first + count * row_bytes].view(rows.dtype).view(count, rows.shape[1])
