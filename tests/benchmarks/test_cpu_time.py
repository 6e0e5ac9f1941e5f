"""Whose CPU time is whose: threads by their names, samples by their functions."""

import os
import threading
import time

import pytest

from benchmarks import cpu_time
from benchmarks.cpu_rounds import CpuTime
from benchmarks.perf_samples import (
    COMPUTE,
    COPIES,
    GLOO,
    KERNEL,
    KERNEL_COPIES,
    PAGES,
    PYTHON,
    Sample,
    consumer,
    parse_line,
)
from benchmarks.threads import GROUPS, MAIN, OTHER, THREAD_GROUPS, ThreadTime, read_threads, time_between

WORKERS, LOOPS = GROUPS.values()


def spin(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_time_of_the_main_thread_is_apart_from_that_of_others() -> None:
    before = read_threads()
    spin(0.05)
    other = threading.Thread(target=lambda: (spin(0.02), after.update(read_threads())))
    after: dict = {}
    other.start()
    other.join()
    used = time_between(before, after)
    assert before[os.getpid()][0] == MAIN
    assert 0.05 <= used[MAIN].run_s < 0.2
    assert 0.02 <= used[OTHER].run_s < 0.2


def test_a_new_thread_has_used_all_of_its_time() -> None:
    before, after = {1: (MAIN, ThreadTime(1, 1, 2, 3))}, {1: (MAIN, ThreadTime(2, 1, 3, 3))}
    used = time_between(before, after | {2: (WORKERS, ThreadTime(4, 5, 9, 1))})
    assert used == {
        MAIN: ThreadTime(1, 0, 1, 0),
        WORKERS: ThreadTime(4, 5, 9, 1),
        LOOPS: ThreadTime(),
        OTHER: ThreadTime(),
    }


@pytest.mark.parametrize(
    ("group", "symbol", "binary", "expected"),
    [
        (MAIN, "[unknown]", "/venv/torch/lib/libtorch_cpu.so", COMPUTE),
        (MAIN, "cpp_fused_gelu_3", "/tmp/cache/ab/cab.so", COMPUTE),
        (MAIN, "_PyEval_EvalFrameDefault", "/usr/bin/python3.11", PYTHON),
        (MAIN, "THPVariable_Wrap", "/venv/torch/lib/libtorch_python.so", PYTHON),
        (MAIN, "__memmove_avx512_unaligned_erms", "/usr/lib/libc.so.6", COPIES),
        (WORKERS, "gloo::sum<float>", "/venv/torch/lib/libtorch_cpu.so", GLOO),
        (WORKERS, "rep_movs_alternative", "[kernel.kallsyms]", KERNEL_COPIES),
        (LOOPS, "_copy_to_iter", "[kernel.kallsyms]", KERNEL_COPIES),
        (MAIN, "clear_page_erms", "[kernel.kallsyms]", PAGES),
        (LOOPS, "tcp_recvmsg_locked", "[kernel.kallsyms]", KERNEL),
    ],
)
def test_samples_are_sorted_by_function(group: str, symbol: str, binary: str, expected: str) -> None:
    assert consumer(group, symbol, binary) == expected


def test_lines_of_perf_are_read() -> None:
    line = "   12537 13366.512507123:      7f7a6391b29e void at::native::copy_kernel(at::Tensor&) (/usr/lib/a (1).so)"
    assert parse_line(line) == Sample(
        12537, 13366.512507123, "void at::native::copy_kernel(at::Tensor&)", "/usr/lib/a (1).so"
    )
    assert parse_line("") is None


def cpu_time_of(variant: str, rank: int, **main: float) -> CpuTime:
    threads = dict.fromkeys(THREAD_GROUPS, ThreadTime()) | {MAIN: ThreadTime(**main)}
    threads[WORKERS] = ThreadTime(user_s=0.01, system_s=0.02, run_s=0.03)
    return CpuTime(variant, rank, [0.2], [threads], {COMPUTE: 0.1}, {})


def test_parts_of_the_main_thread_make_up_the_step() -> None:
    found = [cpu_time_of("a", rank, user_s=0.1, system_s=0.02, run_s=0.12, ready_s=0.03) for rank in (0, 1)]
    lines = cpu_time.lines_of_threads(found)
    parts = [f"{MAIN}: {part}" for part in ("user", "kernel", "ready, core taken", "waiting")]
    assert sum(lines[part] for part in parts) == pytest.approx(lines["step, mean"]) == pytest.approx(200)
    assert lines["all threads: CPU"] == pytest.approx(150)
    assert lines["core left to others, or idle"] == pytest.approx(50)


def test_table_has_a_column_for_each_variant() -> None:
    found = [cpu_time_of(name, 0, user_s=0.1, run_s=0.1) for name in ("torch DDP", "compile_ddp")]
    assert "compute" in cpu_time.table(found, cpu_time.lines_of_samples)
    line = next(line for line in cpu_time.table(found, cpu_time.lines_of_threads).splitlines() if "waiting" in line)
    assert line.split()[-2:] == ["100.0", "100.0"]
