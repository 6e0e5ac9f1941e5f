"""When a backward's buckets were launched, awaited and there, by this rank's clock: what `ddp.profile` records."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.plan import ReductionSequence

Act = Literal["launch", "wait for"]

now: Callable[[], float] = time.perf_counter


@dataclass
class BucketTimes:
    """Of one bucket, by the clock; None for what was not seen. What comes a second time in a backward is not noted."""

    launched: float | None = None
    arrived: float | None = None  # its all-reduce had ended
    wait_began: float | None = None
    wait_ended: float | None = None

    def begin(self, what: Act) -> None:
        if what == "launch" and self.launched is None:
            self.launched = now()
        elif what == "wait for" and self.wait_began is None:
            self.wait_began = now()

    def end(self, what: Act) -> None:
        if what == "wait for" and self.wait_ended is None:
            self.wait_ended = now()

    def arrive(self, _: object = None) -> None:
        """Called where the all-reduce ends, in a thread of the backend."""
        if self.arrived is None:
            self.arrived = now()


@dataclass
class RecordedBackward:
    """One synchronised backward. Times are by the clock."""

    number: int  # among the wrapper's synchronised ones
    began: float = field(default_factory=now)
    ended: float = 0.0
    sequence: ReductionSequence | None = None  # as it was at the end
    buckets: dict[int, BucketTimes] = field(default_factory=dict)  # by position in the launch order

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def of_bucket(self, position: int) -> BucketTimes:
        return self.buckets.setdefault(position, BucketTimes())

    def end(self, sequence: ReductionSequence | None) -> None:
        self.ended, self.sequence = now(), sequence


def check_steps(steps: object) -> None:
    """Raise TypeError or ValueError unless this is a number of steps to record, of which the first is left out."""
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"profile(steps=...) takes a whole number, found {steps!r}.")
    if steps < 2:
        raise ValueError(f"profile(steps=...) needs at least 2, as the first is left out, found {steps}.")


class Recorder:
    """Takes times of so many synchronised backwards, and of the local ones before the last of them.

    Lasts longer than it records: `remaining` is 0 then.
    """

    def __init__(self, backwards: int, *, follows_collectives: bool) -> None:
        """With `follows_collectives` the backend's futures tell when a collective has ended."""
        self.remaining = backwards
        self.recorded: list[RecordedBackward] = []
        self.local_seconds: list[float] = []
        self.follows_collectives = follows_collectives
        self._open: RecordedBackward | None = None
        self._local_task = -1

    # ---- synchronised backwards --------------------------------------------------------------------------------------

    def backward_began(self, number: int) -> None:
        """One that an exception has ended before is forgotten."""
        self._open = RecordedBackward(number)

    def backward_ended(self, number: int, sequence: ReductionSequence | None) -> None:
        """A no-op for one of which no beginning was told."""
        backward, self._open = self._open, None
        if backward is not None and backward.number == number and self.remaining:
            backward.end(sequence)
            self.recorded.append(backward)
            self.remaining -= 1

    def timing(self, what: Act, position: int, named: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Within the context this is done to a bucket, which has the context `named` besides."""
        backward = self._open
        return named if backward is None else timing(backward.of_bucket(position), what, named)

    def follow(self, position: int, work: dist.Work) -> None:
        """Note when the collective of a bucket, just launched, has ended."""
        if self._open is not None and self.follows_collectives:
            work.get_future().add_done_callback(self._open.of_bucket(position).arrive)

    # ---- local backwards ---------------------------------------------------------------------------------------------

    def watch_local(self, outputs: Iterable[torch.Tensor]) -> None:
        """Time the backward of a forward under `no_sync`, from where it reaches these outputs.

        Not of one that a checkpoint runs again.
        """
        if torch_private.autograd.current_graph_task() != -1:
            return
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            torch_private.autograd.register_own_prehook(node, self._local_began)

    @torch_private.dynamo.untraced
    def _local_began(self, *_: object) -> None:
        task = torch_private.autograd.current_graph_task()
        if task != self._local_task and self.remaining:
            self._local_task = task
            torch_private.autograd.call_at_end_of_backward(functools.partial(self._local_ended, now()))

    @torch_private.dynamo.untraced
    def _local_ended(self, began: float) -> None:
        self.local_seconds.append(now() - began)


@contextlib.contextmanager
def timing(bucket: BucketTimes, what: Act, named: AbstractContextManager[Any]) -> Iterator[None]:
    """Within the context this is done to a bucket, which has the context `named` besides."""
    bucket.begin(what)
    with named:
        yield
    bucket.end(what)
