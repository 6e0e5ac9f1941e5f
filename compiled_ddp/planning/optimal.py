"""The buckets that end a backward earliest, over all contiguous partitions of its gradients, by dynamic programming.

MG-WFBP (arXiv 1912.09268) merges greedily; this is exact in the model of `cost_model`. Let R(j) be when gradient j is
ready, B(j) the bytes up to it, and E(k, j) the earliest end of a link that has carried the first j gradients in at most
k buckets. Then

    E(k, j) = min over i < j of  max(R(j) + (k - 1) host, E(k - 1, i)) + startup + (B(j) - B(i)) / bandwidth

E(k, .) never falls with j: leave the last gradient out, and no plan ends later. So among all i at which the link is
free in time the last one is best, and it moves forward with j; among those at which it is busy still, E(k - 1, i) -
B(i) / bandwidth decides, whose least in a window that moves forward a queue keeps. So n gradients and k buckets take n
times k steps.

No gradient is ever split: a part is not ready before the whole, so a bucket that ends inside a gradient can as well end
before it, be launched earlier, and leave the rest to the next one, which is launched when it was.
"""

import math
from collections import deque
from collections.abc import Sequence

from compiled_ddp.planning.cost_model import Link, Prediction, Readiness, predict

TOLERANCE = 0.005  # of the backward's end: a plan with fewer buckets is taken where it ends so little later


def optimal_buckets(
    nbytes: Sequence[int],
    readiness: Readiness,
    link: Link,
    *,
    tolerance: float = TOLERANCE,
    largest_bytes: float = math.inf,
) -> list[int]:
    """How many gradients each bucket has, of those with these sizes, in the order in which they are ready.

    The fewest buckets with which the backward ends at most so much later than with the best of all plans whose buckets
    have at most `largest_bytes`, but for a larger gradient, which is a bucket by itself.
    """
    if not nbytes:
        return []
    table = _Table(nbytes, readiness, link, largest_bytes)
    good_enough = (1 + tolerance) * lower_bound(nbytes, readiness, link)
    ends = list[float]()
    for buckets in range(1, len(nbytes) + 1):
        table.add_bucket()
        if not table.last_bucket_helps:
            break
        ends.append(table.backward_end(buckets))
        if ends[-1] <= good_enough or readiness.backward_seconds + buckets * link.host_seconds > min(ends):
            break
    limit = (1 + tolerance) * min(ends)
    return table.partition(next(number for number, end in enumerate(ends, start=1) if end <= limit))


def lower_bound(nbytes: Sequence[int], readiness: Readiness, link: Link) -> float:
    """No plan ends its backward earlier: what is ready from each gradient on has still to be sent behind it."""
    left, bound = sum(nbytes), readiness.backward_seconds + link.host_seconds
    for size, ready in zip(nbytes, readiness.seconds, strict=True):
        bound = max(bound, ready + link.seconds(left) + link.latency_seconds)
        left -= size
    return bound


def predict_plan(lengths: Sequence[int], nbytes: Sequence[int], readiness: Readiness, link: Link) -> Prediction:
    """What the model says of a plan whose buckets have so many gradients each."""
    sizes, ready, first = list[int](), list[float](), 0
    for length in lengths:
        sizes.append(sum(nbytes[first : first + length]))
        ready.append(readiness.seconds[first + length - 1])
        first += length
    return predict(sizes, ready, readiness.backward_seconds, link)


class _Table:
    """E(k, .) for a k that grows, and which i it has come from."""

    def __init__(self, nbytes: Sequence[int], readiness: Readiness, link: Link, largest_bytes: float) -> None:
        self._ready, self._backward, self._link = readiness.seconds, readiness.backward_seconds, link
        self._sent = [0.0]  # B(j) / bandwidth
        for size in nbytes:
            self._sent.append(self._sent[-1] + size / link.bytes_per_second)
        self._first = _first_places(nbytes, largest_bytes)
        self._ends = [0.0] + [math.inf] * len(nbytes)  # with no bucket
        self._from: list[list[int]] = []  # of each k: the i of each j; -1 where fewer buckets do as well

    def add_bucket(self) -> None:
        """Admit one bucket more."""
        before, sent, startup = self._ends, self._sent, self._link.startup_seconds
        behind = len(self._from) * self._link.host_seconds
        ends, origins = [*before], [-1] * len(before)
        free, busy = 0, deque[int]()  # the last i with a link that is free in time; later ones, least of all first
        for j in range(1, len(before)):
            i = j - 1
            wait = before[i] - sent[i]
            while busy and before[busy[-1]] - sent[busy[-1]] >= wait:
                busy.pop()
            busy.append(i)
            launched = self._ready[j - 1] + behind
            while free + 1 < j and before[free + 1] <= launched:
                free += 1
            while busy and busy[0] <= max(free, self._first[j] - 1):
                busy.popleft()
            origin, end = free, math.inf
            if free >= self._first[j]:
                end = max(launched, before[free]) + startup + sent[j] - sent[free]
            if busy and (other := before[busy[0]] + startup + sent[j] - sent[busy[0]]) < end:
                origin, end = busy[0], other
            if end < ends[j]:
                ends[j], origins[j] = end, origin
        self._ends = ends
        self._from.append(origins)

    @property
    def last_bucket_helps(self) -> bool:
        """Whether anything ends earlier since it was admitted."""
        return any(origin >= 0 for origin in self._from[-1])

    def backward_end(self, buckets: int) -> float:
        """The earliest end of a backward with so many buckets, of which fewer may be used."""
        return max(self._ends[-1] + self._link.latency_seconds, self._backward + buckets * self._link.host_seconds)

    def partition(self, buckets: int) -> list[int]:
        """The lengths of the buckets of the best plan with at most so many."""
        lengths, j, k = list[int](), len(self._ends) - 1, buckets
        while j > 0:
            k -= 1
            i = self._from[k][j]
            if i >= 0:
                lengths.append(j - i)
                j = i
        return lengths[::-1]


def _first_places(nbytes: Sequence[int], largest_bytes: float) -> list[int]:
    """For each j the least i such that a bucket of the gradients i to j - 1 is not too large, or has one alone."""
    first, size, places = 0, 0, [0]
    for j, added in enumerate(nbytes, start=1):
        size += added
        while size > largest_bytes and first < j - 1:
            size -= nbytes[first]
            first += 1
        places.append(first)
    return places
