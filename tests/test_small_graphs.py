"""Which graphs of a backward reduce their gradients themselves."""

import torch

from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.small_graphs import large_enough

SMALLEST_BYTES = 1000.0


def graph(*indices: int, numel: int = 2) -> BucketPlan:
    """A graph's plan over these parameters, each of `numel` float32 elements."""
    specs = [GradientSpec.of(index, torch.empty(numel)) for index in indices]
    return assign_buckets(specs, capacities_bytes=(4096, 4096), world_size=2)


def test_small_graphs_do_not_where_there_are_several() -> None:
    assert large_enough([graph(0), graph(1), graph(2, numel=500)], SMALLEST_BYTES) == [False, False, True]


def test_the_only_graph_does() -> None:
    assert large_enough([graph(0)], SMALLEST_BYTES) == [True]
    assert large_enough([], SMALLEST_BYTES) == []


def test_a_graph_that_shares_parameters_with_one_that_does_is_kept_with_it() -> None:
    plans = [graph(0), graph(0, 1), graph(1, 2, numel=500), graph(3)]
    assert large_enough(plans, SMALLEST_BYTES) == [True, True, True, False]


def test_small_graphs_that_share_parameters_with_each_other_alone_do_not() -> None:
    assert large_enough([graph(0), graph(0), graph(1)], SMALLEST_BYTES) == [False, False, False]


def test_at_zero_every_graph_does() -> None:
    assert large_enough([graph(0), graph(1)], 0.0) == [True, True]
