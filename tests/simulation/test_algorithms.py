"""All-reduces made of hops: against values by hand, there and back, and by how they grow."""

import math
from collections.abc import Callable

import pytest

from compiled_ddp.planning.cost_model import Link
from compiled_ddp.tools.simulation.algorithms import ALGORITHMS, Hop, Network, Steps, halving, ring, tree
from compiled_ddp.tools.simulation.simulate import RANKS

HOP = Hop(10e-6, 1e9)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "messages", "volume"),
    [
        (ring, 2, 2, 1.0),
        (ring, 8, 14, 1.75),
        (tree, 2, 2, 2.0),
        (tree, 8, 6, 2.0),
        (tree, 5, 6, 2.0),
        (halving, 2, 2, 1.0),
        (halving, 8, 6, 1.75),
        (halving, 6, 6, 3.5),
    ],
)
def test_an_algorithm_has_so_many_messages_and_bytes(
    algorithm: Callable[[int], Steps], ranks: int, messages: float, volume: float
) -> None:
    assert algorithm(ranks) == Steps(messages, volume)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rank_by_itself_sends_nothing(name: str) -> None:
    assert ALGORITHMS[name](1) == Steps(0, 0)
    assert Network(name, HOP).link(1).seconds(10**9) == 0


def test_a_ring_of_eight_takes_what_it_takes_by_hand() -> None:
    link = Network("ring", HOP).link(8)
    assert link.seconds(8e6) == pytest.approx(14 * 10e-6 + 1.75 * 8e6 / 1e9)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 6, 64])
def test_a_measured_link_is_what_its_hops_make(name: str, ranks: int) -> None:
    measured = Link(120e-6, 3e8, 5e-6, 7e-6)
    link = Network(name, Hop(0, 1)).fitted(measured, ranks).link(ranks)
    assert link.startup_seconds == pytest.approx(120e-6) and link.bytes_per_second == pytest.approx(3e8)
    assert (link.host_seconds, link.latency_seconds) == (5e-6, 7e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_more_ranks_never_take_less(name: str) -> None:
    for network in (Network(name, HOP), Network(name, HOP, Hop(1e-6, 1e11), ranks_per_host=8)):
        links = [network.link(ranks) for ranks in RANKS]
        for nbytes in (1, 10**9):
            seconds = [link.seconds(nbytes) for link in links]
            assert seconds == sorted(seconds)


def test_a_tree_overtakes_a_ring_where_start_ups_do() -> None:
    few, many = (
        [Network(name, HOP).link(ranks).seconds(25 * 2**20) for name in ("ring", "tree")] for ranks in (4, 4096)
    )
    assert few[0] < few[1] and many[0] > many[1]


# ---- several ranks a host --------------------------------------------------------------------------------------------

HOSTS = Network("ring", HOP, Hop(1e-6, 1e11), ranks_per_host=8, links_per_host=4)


def test_an_all_reduce_of_hosts_is_a_ring_inside_and_one_between() -> None:
    link = HOSTS.link(32)
    assert link.startup_seconds == pytest.approx(14 * 1e-6 + 6 * 10e-6)
    assert link.seconds(1e9) - link.startup_seconds == pytest.approx(1.75 * 1e9 / 1e11 + 1.5 * 1e9 / 4e9)


def test_ranks_of_one_host_use_no_other_link() -> None:
    assert HOSTS.link(8) == ring(8).link(Hop(1e-6, 1e11))
    assert HOSTS.link(4) == ring(4).link(Hop(1e-6, 1e11))


def test_ranks_that_do_not_fill_their_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="12 ranks do not fill hosts of 8: take a multiple of it"):
        HOSTS.link(12)


def test_both_hops_come_back_from_two_measured_links() -> None:
    unknown = Network("ring", Hop(0, math.inf), Hop(0, math.inf), ranks_per_host=8, links_per_host=4)
    found = unknown.fitted(HOSTS.link(8), 8).fitted(HOSTS.link(64), 64)
    assert found.within is not None and HOSTS.within is not None
    for hop, expected in (found.between, HOSTS.between), (found.within, HOSTS.within):
        assert hop.startup_seconds == pytest.approx(expected.startup_seconds)
        assert hop.bytes_per_second == pytest.approx(expected.bytes_per_second)


def test_a_hop_inside_that_is_slower_than_what_was_measured_over_it_is_refused() -> None:
    with pytest.raises(ValueError, match="the hop inside is slower than what was measured over it"):
        HOSTS.fitted(Link(1e-6, 1e12), 64)
