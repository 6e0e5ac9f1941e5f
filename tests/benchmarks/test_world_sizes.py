"""What the number of ranks costs: a world that is measured here, and the medians of several."""

from benchmarks import world_sizes
from benchmarks.world_sizes import Wrapped


def test_a_model_is_wrapped_and_compiled_among_ranks_that_are_not_there() -> None:
    found = world_sizes.measure(100, "aot_eager")
    assert found.ranks == 100 and found.constructor_cpu_s > 0 and found.warmup_cpu_s > 0 and found.peak_mib > 1


def test_the_table_has_medians_of_each_number_of_ranks() -> None:
    found = [Wrapped(ranks, cpu, 1.0, 4, 500.0) for cpu in (1.0, 9.0, 2.0) for ranks in (8, 4096)]
    rows = [line.split() for line in world_sizes.table(found).splitlines()[-2:]]
    assert rows == [["8", "2.00", "1.00", "4", "500"], ["4,096", "2.00", "1.00", "4", "500"]]
