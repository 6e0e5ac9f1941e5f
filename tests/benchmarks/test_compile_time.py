"""What the passes add to Inductor's time for a backward: the benchmark's shape, not its numbers."""

from benchmarks import compile_time


def test_a_backward_is_compiled_with_the_passes_and_without() -> None:
    times = compile_time.measure(layers=1, device="cpu", repetitions=1)
    assert (times.layers, times.device, times.parameters) == (1, "cpu", 12)
    assert min(times.plain_s, times.ours_s, times.plain_cpu_s, times.ours_cpu_s) > 0
    assert times.ratio == times.ours_cpu_s / times.plain_cpu_s
