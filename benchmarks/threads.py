"""CPU time of each thread of this process, from /proc: in user space, in the kernel, and in the queue for a core."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# Threads by the name that torch and gloo give them.
MAIN, OTHER = "main thread", "other threads"
GROUPS = {
    "pt_gloo_runloop": "gloo's workers",  # run a collective: write, and sum up what came
    "gloo_tcp_loop": "gloo's socket loops",  # read, and write what the sockets did not take at once
}
THREAD_GROUPS = (MAIN, *GROUPS.values(), OTHER)


@dataclass(frozen=True)
class ThreadTime:
    """Seconds. `run_s` is exact; the kernel splits it into user and system by samples, which many steps even out.

    `ready_s` is time in which the thread could have run, but another one had the core.
    """

    user_s: float = 0.0
    system_s: float = 0.0
    run_s: float = 0.0
    ready_s: float = 0.0

    def __add__(self, other: "ThreadTime") -> "ThreadTime":
        return ThreadTime(*(a + b for a, b in zip(self.seconds, other.seconds, strict=True)))

    def __sub__(self, other: "ThreadTime") -> "ThreadTime":
        return ThreadTime(*(a - b for a, b in zip(self.seconds, other.seconds, strict=True)))

    @property
    def seconds(self) -> tuple[float, float, float, float]:
        return self.user_s, self.system_s, self.run_s, self.ready_s


def read_threads() -> dict[int, tuple[str, ThreadTime]]:
    """The group and the times since it started of each thread that is alive, by its id."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        try:
            found[int(folder.name)] = _read_thread(folder)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the folder was listed
    return found


def _read_thread(folder: Path) -> tuple[str, ThreadTime]:
    before_name, _, rest = (folder / "stat").read_text().partition("(")
    name, _, numbers = rest.rpartition(")")
    fields = numbers.split()  # from the third of proc(5) on: user time is the 14th, system time the 15th
    run_ns, ready_ns, _ = (folder / "schedstat").read_text().split()
    group = MAIN if int(before_name) == os.getpid() else GROUPS.get(name, OTHER)
    user_ticks, system_ticks = int(fields[11]), int(fields[12])
    return group, ThreadTime(
        user_ticks / TICKS_PER_SECOND, system_ticks / TICKS_PER_SECOND, int(run_ns) / 1e9, int(ready_ns) / 1e9
    )


def time_between(
    before: Mapping[int, tuple[str, ThreadTime]], after: Mapping[int, tuple[str, ThreadTime]]
) -> dict[str, ThreadTime]:
    """What each group of threads has used since `before`; a thread that is new has used all of its time since."""
    used = {group: ThreadTime() for group in THREAD_GROUPS}
    for thread, (group, time) in after.items():
        earlier = before[thread][1] if thread in before else ThreadTime()
        used[group] = used[group] + (time - earlier)
    return used
