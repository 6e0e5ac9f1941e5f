"""What a backward and its all-reduces take: a link by start-up and bandwidth, and when each gradient is ready.

The link carries one all-reduce after the other, in launch order. One of n bytes takes start-up + n / bandwidth (the
alpha-beta model of Hockney, Parallel Computing 20, 1994; for gradients: MG-WFBP, arXiv 1912.09268), whatever else is
under way. That several share the link changes nothing in when all of them have arrived.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """What an all-reduce of one group takes, in seconds and bytes of the tensor that is reduced.

    Bandwidth is that of the result: a rank of a ring sends almost twice as much.
    """

    startup_seconds: float
    bytes_per_second: float
    host_seconds: float = 0.0  # that each collective takes from what computes the backward
    latency_seconds: float = 0.0  # between the end of the last transfer and the end of its wait
    host_seconds_per_byte: float = 0.0  # that the reduction itself takes from what computes the backward

    def seconds(self, nbytes: float) -> float:
        """What one all-reduce takes of the link."""
        return self.startup_seconds + nbytes / self.bytes_per_second

    def of_shares(self) -> "Link":
        """For what sends each rank its share alone, or gathers shares: half of what an all-reduce sends."""
        return replace(self, bytes_per_second=2 * self.bytes_per_second)

    def with_host(self, seconds: float) -> "Link":
        """On which each all-reduce takes so much more of what computes."""
        return replace(self, host_seconds=self.host_seconds + seconds)

    def dearer(self, factor: float) -> "Link":
        """On which each all-reduce costs so many times as much, but for its bytes."""
        costs = {"startup_seconds": self.startup_seconds * factor, "host_seconds": self.host_seconds * factor}
        return replace(self, **costs)

    def __str__(self) -> str:
        return f"{_readable(self.startup_seconds * 1e6)} us + bytes / {_readable(self.bytes_per_second / 1e6)} MB/s"

    def rounded(self) -> "Link":
        """On a grid on which the noise from one start to the next is rarely seen: each value to a power of two.

        Plans are made for this one, as they stand in the keys of compiled graphs.
        """
        return Link(
            _power_of_two(self.startup_seconds),
            _power_of_two(self.bytes_per_second),
            _power_of_two(self.host_seconds),
            host_seconds_per_byte=_power_of_two(self.host_seconds_per_byte),
        )


def _readable(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _power_of_two(value: float) -> float:
    return 2.0 ** round(math.log2(value)) if 0 < value < math.inf else value


@dataclass(frozen=True)
class Compute:
    """How fast one rank computes, in float32 (or as `torch.set_float32_matmul_precision` says)."""

    flops_per_second: float  # of a matrix product, with a product and a sum as two
    bytes_per_second: float  # that elementwise work reads and writes

    def rounded(self) -> "Compute":
        """As `Link.rounded`."""
        return Compute(_power_of_two(self.flops_per_second), _power_of_two(self.bytes_per_second))


# In a smaller vocabulary most tokens are in a batch. And so many times longer than looking for rows the all-reduce of
# all of them has to take, as in the worst case looking is all that is gained.
_FEWEST_ROWS, _WORTH = 4096, 8.0


def rows_may_pay(rows: int, nbytes: int, link: Link, compute: Compute) -> bool:
    """Whether to look, in each step, which of an embedding's `rows` are to be sent: see `compiled_ddp.ranks.row_sums`.

    What a step sends it decides by what it finds. To look takes a pass over the gradient and one collective more.
    """
    looking = link.startup_seconds + nbytes / compute.bytes_per_second
    return rows >= _FEWEST_ROWS and link.seconds(nbytes) >= _WORTH * looking


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes of memory that elementwise work reads and writes."""

    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)

    def seconds(self, compute: Compute) -> float:
        """One after the other: products and elementwise loops are different kernels."""
        return self.flops / compute.flops_per_second + self.nbytes / compute.bytes_per_second


@dataclass(frozen=True)
class BackwardWork:
    """What a backward computes: until each gradient is ready, in launch order, and in all."""

    until_ready: tuple[Work, ...]
    total: Work

    def readiness(self, compute: Compute) -> "Readiness":
        """In seconds, on a device that computes so fast."""
        ready = [work.seconds(compute) for work in self.until_ready]
        end = self.total.seconds(compute)
        return Readiness(tuple(itertools.accumulate(ready, max)), end, "by the operations of the captured graph")

    def only(self, places: Sequence[int]) -> "BackwardWork":
        """That of the gradients at these places."""
        return BackwardWork(tuple(self.until_ready[place] for place in places), self.total)


@dataclass(frozen=True)
class Readiness:
    """When each gradient of a backward is ready, in launch order and in seconds from its beginning; nondecreasing."""

    seconds: tuple[float, ...]
    backward_seconds: float  # its end, without any communication
    source: str = ""  # where the times come from, in words

    @classmethod
    def by_sizes(cls, nbytes: Sequence[int], link: Link) -> "Readiness":
        """Where no times are known: a gradient takes time by its bytes, and all of them what the link takes for them.

        A backward as long as its communication is the one that is hardest to plan for: the first bucket must start
        early, and the last one must be small. A plan for it does not go wrong by much where one of the two is shorter.
        """
        total = sum(nbytes) / link.bytes_per_second
        return cls(
            tuple(end / link.bytes_per_second for end in itertools.accumulate(nbytes)),
            total,
            "by the sizes of gradients, for a backward as long as its communication",
        )

    def hardest(self, link: Link, nbytes: float, *, within: float) -> "Readiness":
        """The backward that is hardest to plan for, among those up to `within` times as long or as short.

        That is the one as long as its communication, or the nearest to it. Counted times are no nearer than that: what
        else runs on the cores, the caches, the compiler. A plan that hides the link behind a backward of exactly one
        length lets it idle behind a longer one.
        """
        if not (self.backward_seconds and nbytes):
            return self
        return self.slower(min(max(nbytes / link.bytes_per_second / self.backward_seconds, 1 / within), within))

    def beside(self, link: Link, nbytes: float) -> "Readiness":
        """On a device that also does its part of the reduction of so many bytes, as far as that is in the backward.

        Evenly, whatever the buckets are: what a byte costs is the same in each.
        """
        if not (link.host_seconds_per_byte and nbytes and self.backward_seconds):
            return self
        share = min(1.0, self.backward_seconds * link.bytes_per_second / nbytes)
        return self.slower(1 + share * nbytes * link.host_seconds_per_byte / self.backward_seconds)

    def slower(self, factor: float) -> "Readiness":
        """With all times so many times as long."""
        return replace(
            self, seconds=tuple(at * factor for at in self.seconds), backward_seconds=self.backward_seconds * factor
        )

    def only(self, places: Sequence[int]) -> "Readiness":
        """That of the gradients at these places."""
        return replace(self, seconds=tuple(self.seconds[place] for place in places))


@dataclass(frozen=True)
class Transfer:
    """One bucket on the link, in seconds from the beginning of the backward."""

    ready: float  # its last gradient is there, and it is launched
    start: float  # the link is free for it
    end: float
    nbytes: int


@dataclass(frozen=True)
class Prediction:
    """A backward and its communication as the model sees them."""

    transfers: tuple[Transfer, ...]
    backward_seconds: float  # of the computation, with what collectives take of it
    seconds: float  # until both are at an end

    @property
    def exposed_seconds(self) -> float:
        """How much longer it takes than its computation."""
        return self.seconds - self.backward_seconds


def predict(nbytes: Sequence[int], ready: Sequence[float], backward_seconds: float, link: Link) -> Prediction:
    """What buckets of these sizes, whose last gradients are ready at these times, make of a backward."""
    transfers, free = list[Transfer](), 0.0
    for position, (size, at) in enumerate(zip(nbytes, ready, strict=True)):
        launched = at + position * link.host_seconds
        start = max(launched, free)
        free = start + link.seconds(size)
        transfers.append(Transfer(launched, start, free, size))
    computed = backward_seconds + len(transfers) * link.host_seconds
    end = free + link.latency_seconds if transfers else 0.0
    return Prediction(tuple(transfers), computed, max(end, computed))
