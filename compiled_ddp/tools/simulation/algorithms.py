"""What an all-reduce of n ranks takes, where a message of m bytes from one rank to the next takes a + m / B: a hop.

Each algorithm is so many messages one after the other, and so many times the tensor's bytes through the busiest rank:

    ring        2 (n - 1) a      2 (n - 1) / n times the bytes
    tree        2 log2(n) a      twice
    halving     2 log2(n) a      2 (n - 1) / n times, where n is a power of two

On hosts with several ranks each, a ring inside every host and one of these between the hosts: see `Network`. What the
links carry besides, and what messages do to each other where paths cross (incast, contention), is not in it, nor is a
rank that is late.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from compiled_ddp.planning.cost_model import Link

_FREE = Link(0.0, math.inf)


@dataclass(frozen=True)
class Hop:
    """A message from one rank to another, which takes start-up + bytes / bandwidth. A rank sends while it receives."""

    startup_seconds: float
    bytes_per_second: float  # in each direction


@dataclass(frozen=True)
class Steps:
    """What an all-reduce is made of."""

    messages: float  # one after the other
    volume: float  # times the bytes of the tensor, through the busiest rank

    def link(self, hop: Hop) -> Link:
        """The all-reduce over such hops. Of no message it is free: a rank by itself."""
        if not self.volume:
            return _FREE
        return Link(self.messages * hop.startup_seconds, hop.bytes_per_second / self.volume)

    def hop(self, link: Link) -> Hop:
        """The hop of which `link` is made, of an all-reduce that was measured: the inverse of `link`."""
        return Hop(link.startup_seconds / self.messages, link.bytes_per_second * self.volume)


def ring(ranks: int) -> Steps:
    """Reduce-scatter and all-gather around a ring: n - 1 messages each, of 1 / n of the tensor.

    Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005. No algorithm has a
    smaller volume (Patarasuk, Yuan, Bandwidth optimal all-reduce algorithms, 2009), and this one has the most messages.
    """
    return Steps(2 * (ranks - 1), 2 * (ranks - 1) / ranks)


def tree(ranks: int) -> Steps:
    """Two binary trees, each of which reduces one half of the tensor and broadcasts it, in pieces one after the other.

    A rank that is inside of one tree is a leaf of the other, so that each sends and receives twice its bytes. Sanders,
    Speck, Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009; NCCL has them from 2.4 on,
    and takes half of the bandwidth and these messages in its own choice (src/graph/tuning.cc). How long the first piece
    takes to fill the trees is not in it.
    """
    return Steps(2 * math.ceil(math.log2(ranks)), 2.0 if ranks > 1 else 0.0)


def halving(ranks: int) -> Steps:
    """Recursive halving, then recursive doubling: log2 n messages each, of a half, a quarter, ... of the tensor.

    Rabenseifner's algorithm, in Thakur et al., 2005. Ranks beyond a power of two hand their tensors to a partner first
    and get the result at the end: two messages, and twice the bytes, more.
    """
    power = 1 << (ranks.bit_length() - 1)
    beyond = 2 if ranks > power else 0
    return Steps(2 * math.log2(power) + beyond, 2 * (power - 1) / power + beyond)


ALGORITHMS: Mapping[str, Callable[[int], Steps]] = {"ring": ring, "tree": tree, "halving": halving}


@dataclass(frozen=True)
class Network:
    """The hops between ranks, and how ranks reduce over them, for any number of ranks.

    With several ranks a host an all-reduce is hierarchical, as Horovod has it: reduce-scatter inside of the host,
    all-reduce between hosts of what each rank has then, all-gather inside. The two parts inside are those of a ring.
    Between hosts, the ranks of a host share its links, and send together what one rank would send alone.
    """

    algorithm: str  # of ALGORITHMS, between hosts
    between: Hop  # of one link of a host
    within: Hop | None = None  # None where each rank is a host
    ranks_per_host: int = 1
    links_per_host: int = 1
    besides: Link = _FREE  # what it has beside start-up and bandwidth holds for any number of ranks

    def link(self, ranks: int) -> Link:
        """What an all-reduce of so many ranks takes. Raises ValueError where they do not fill their hosts."""
        hosts, inside = self.hosts(ranks)
        between = self._steps(hosts).link(self._of_all_links())
        within = ring(inside).link(self.within or self.between)
        startup = within.startup_seconds + between.startup_seconds
        per_byte = 1 / within.bytes_per_second + 1 / between.bytes_per_second
        return replace(self.besides, startup_seconds=startup, bytes_per_second=1 / per_byte if per_byte else math.inf)

    def hosts(self, ranks: int) -> tuple[int, int]:
        """How many hosts so many ranks have, and how many ranks each of these."""
        inside = min(ranks, self.ranks_per_host)
        if ranks % inside:
            raise ValueError(f"{ranks} ranks do not fill hosts of {inside}: take a multiple of it")
        return ranks // inside, inside

    def fitted(self, link: Link, ranks: int) -> Self:
        """With the hops of which `link` is made, of an all-reduce of so many ranks that was measured.

        Of several hosts it is the hop between them, and that inside is taken as it is; of one host, that inside.
        Raises ValueError where the part inside takes as long as all that was measured.
        """
        known = replace(self, besides=link)
        hosts, inside = self.hosts(ranks)
        if hosts == 1:
            return replace(known, within=ring(inside).hop(link))
        left = _without(link, ring(inside).link(self.within or self.between))
        hop = self._steps(hosts).hop(left)
        return replace(known, between=replace(hop, bytes_per_second=hop.bytes_per_second / self.links_per_host))

    def _steps(self, hosts: int) -> Steps:
        return ALGORITHMS[self.algorithm](hosts)

    def _of_all_links(self) -> Hop:
        return replace(self.between, bytes_per_second=self.between.bytes_per_second * self.links_per_host)


def _without(both: Link, first: Link) -> Link:
    startup = both.startup_seconds - first.startup_seconds
    per_byte = 1 / both.bytes_per_second - 1 / first.bytes_per_second
    if startup < 0 or per_byte <= 0:
        raise ValueError(
            f"the measured all-reduce takes {both.startup_seconds * 1e6:.3g} us and {1e9 / both.bytes_per_second:.3g} "
            f"ns a byte, of which the part inside of a host would take {first.startup_seconds * 1e6:.3g} us and "
            f"{1e9 / first.bytes_per_second:.3g} ns: the hop inside is slower than what was measured over it"
        )
    return Link(startup, 1 / per_byte)
