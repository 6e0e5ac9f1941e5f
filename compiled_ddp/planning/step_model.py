"""What a whole step takes: forward, backward, update and what is on the link meanwhile, in each mode of `compile_step`.

One lane computes and one sends, as in `cost_model`; a step is one of many alike, so that what the step before has left
under way is on the link when this one begins.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from compiled_ddp.planning.cost_model import Link, Readiness
from compiled_ddp.planning.optimal import lower_bound

Mode = Literal["all-reduced", "sharded", "pipelined", "deferred"]
Kind = Literal["all-reduce", "scatter", "gather", "hook"]  # what is sent of a bucket; by a hook in several parts
GATHERED_LATER = frozenset[Mode]({"pipelined", "deferred"})  # the modes whose next step awaits what one has gathered


@dataclass(frozen=True)
class Job:
    """A step of one rank, without communication, and its gradients in the order in which they are ready.

    The forward reads parameters in the reverse of that order, each for the share of the time that it has of the
    backward.
    """

    nbytes: tuple[int, ...]  # of each gradient
    readiness: Readiness
    forward_seconds: float
    optimizer_seconds: float = 0.0

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.readiness.backward_seconds + self.optimizer_seconds

    def without_overlap(self) -> Self:
        """As if all gradients were ready at the end of the backward: communication begins behind it."""
        end = self.readiness.backward_seconds
        return replace(self, readiness=Readiness((end,) * len(self.nbytes), end, "all at the end of the backward"))

    def scaled(self, backward_seconds: float) -> Self:
        """With a backward of another length, in whose course gradients are ready as before."""
        ready = self.readiness
        slowed = ready.slower(backward_seconds / ready.backward_seconds)
        return replace(self, readiness=replace(slowed, source=f"{ready.source}, scaled"))

    def in_mode(self, mode: Mode, ranks: int) -> Self:
        """With an update that so many share, where they do."""
        is_shared = mode in ("sharded", "pipelined")
        return replace(self, optimizer_seconds=self.optimizer_seconds / ranks) if is_shared else self

    def beside(self, link: Link) -> Self:
        """On a device that also does its part of the reductions, evenly in all of the step."""
        if not (self.compute_seconds and link.host_seconds_per_byte):
            return self
        factor = 1 + sum(self.nbytes) * link.host_seconds_per_byte / self.compute_seconds
        return replace(
            self,
            readiness=self.readiness.slower(factor),
            forward_seconds=self.forward_seconds * factor,
            optimizer_seconds=self.optimizer_seconds * factor,
        )


@dataclass(frozen=True)
class Transfer:
    """One of a bucket on the link, in seconds from the beginning of the step."""

    kind: Kind
    bucket: int
    nbytes: int
    launched: float  # 0 for what the step before has left under way
    start: float
    end: float


@dataclass(frozen=True)
class Wait:
    """For a transfer of a bucket, which nothing is computed beside."""

    kind: Kind
    bucket: int
    begin: float
    end: float


@dataclass(frozen=True)
class Computing:
    """For a bucket: what reads its parameters, makes its gradients or updates; None for what is of no bucket."""

    bucket: int | None
    begin: float
    end: float


@dataclass(frozen=True)
class PredictedStep:
    """A step as the model sees it."""

    transfers: tuple[Transfer, ...]
    waits: tuple[Wait, ...]
    computing: tuple[Computing, ...]
    seconds: float
    compute_seconds: float  # of one without communication
    bound_seconds: float  # no buckets make a shorter one

    @property
    def exposed_seconds(self) -> float:
        """How much longer it takes than its computation."""
        return self.seconds - self.compute_seconds

    @property
    def waiting_seconds(self) -> float:
        return sum(wait.end - wait.begin for wait in self.waits)


def link_in_mode(mode: Mode, link: Link) -> Link:
    """What one transfer of a bucket takes, where an all-reduce takes `link`."""
    return link if mode == "all-reduced" else link.of_shares()


def predict_step(mode: Mode, buckets: Sequence[Sequence[int]], job: Job, link: Link) -> PredictedStep:
    """A step of a rank with this `job`, whose buckets have the gradients at these places; `link` is of all-reduces.

    "sharded" scatters sums, lets each rank update its share behind the backward, bucket by bucket, and gathers what
    comes of it; "pipelined" gathers that in the next step, the last bucket first, where its forward waits for it.
    "deferred" gathers sums so, with which each rank updates all of a bucket before that forward reads it.
    """
    step = _Step(link_in_mode(mode, link), host_seconds=link.host_seconds)
    beside = job.beside(link)
    every = [*_Bucket.of(buckets, beside)]
    if mode in GATHERED_LATER:
        for bucket in reversed(every):
            step.send("gather", bucket)
    for bucket in reversed(every):
        if mode in GATHERED_LATER:
            step.wait("gather", bucket)
        if mode == "deferred":
            step.compute(bucket.update_seconds, bucket)
        step.compute(bucket.forward_seconds, bucket)
    step.backward("all-reduce" if mode == "all-reduced" else "scatter", every, beside.readiness.backward_seconds)
    if mode == "all-reduced":
        for bucket in every:
            step.wait("all-reduce", bucket)
        step.compute(beside.optimizer_seconds)
    else:
        for bucket in every:
            step.wait("scatter", bucket)
            step.compute(link.host_seconds + (0.0 if mode == "deferred" else bucket.update_seconds), bucket)
            if mode == "sharded":
                step.send("gather", bucket)
    if mode == "sharded":
        for bucket in every:
            step.wait("gather", bucket)
    found = tuple(step.transfers.values()), tuple(step.waits), tuple(step.computing)
    return PredictedStep(*found, step.now, job.compute_seconds, _bound(mode, job, link))


def _bound(mode: Mode, job: Job, link: Link) -> float:
    """What no buckets can pass: that of the backward, or the link that is busy all the time that it may be."""
    sent = link.seconds(sum(job.nbytes))
    if mode == "all-reduced":
        others = job.forward_seconds + job.optimizer_seconds
        return others + lower_bound(job.nbytes, job.readiness, link)
    if mode == "sharded":
        return max(job.compute_seconds, job.forward_seconds + job.readiness.seconds[0] + sent)
    return max(job.compute_seconds, sent)


@dataclass(frozen=True)
class _Bucket:
    place: int
    nbytes: int
    ready: float  # from the beginning of the backward
    forward_seconds: float  # of what reads its parameters
    update_seconds: float

    @classmethod
    def of(cls, buckets: Sequence[Sequence[int]], job: Job) -> Iterator["_Bucket"]:
        ready, backward = job.readiness.seconds, job.readiness.backward_seconds
        of_each = [after - before for before, after in itertools.pairwise((0.0, *ready[:-1], backward))]
        total = sum(job.nbytes)
        for place, own in enumerate(buckets):
            nbytes = sum(job.nbytes[index] for index in own)
            share = sum(of_each[index] for index in own) / backward if backward else len(own) / len(ready)
            update = job.optimizer_seconds * nbytes / total if total else 0.0
            yield cls(place, nbytes, max(ready[index] for index in own), job.forward_seconds * share, update)


class _Step:
    """Two clocks: what computes, and the link, which carries one transfer after the other."""

    def __init__(self, link: Link, *, host_seconds: float) -> None:
        self.now = 0.0
        self.transfers: dict[tuple[Kind, int], Transfer] = {}
        self.waits: list[Wait] = []
        self.computing: list[Computing] = []
        self._free, self._link, self._host_seconds = 0.0, link, host_seconds

    def compute(self, seconds: float, bucket: _Bucket | None = None) -> None:
        if seconds > 0:
            self.computing.append(Computing(None if bucket is None else bucket.place, self.now, self.now + seconds))
            self.now += seconds

    def backward(self, kind: Kind, buckets: Sequence[_Bucket], seconds: float) -> None:
        done = 0.0
        for bucket in buckets:
            self.compute(bucket.ready - done, bucket)
            done = max(done, bucket.ready)
            self.send(kind, bucket)
            self.compute(self._host_seconds)
        self.compute(seconds - done)

    def send(self, kind: Kind, bucket: _Bucket) -> None:
        start = max(self.now, self._free)
        self._free = start + self._link.seconds(bucket.nbytes)
        self.transfers[kind, bucket.place] = Transfer(kind, bucket.place, bucket.nbytes, self.now, start, self._free)

    def wait(self, kind: Kind, bucket: _Bucket) -> None:
        end = self.transfers[kind, bucket.place].end + self._link.latency_seconds
        if end > self.now:
            self.waits.append(Wait(kind, bucket.place, self.now, end))
            self.now = end
