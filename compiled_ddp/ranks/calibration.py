"""What the link and the device of some ranks can do, measured by all of them together.

Every number is the slowest rank's, by a maximum over ranks, and so is every decision: how large the all-reduces become,
and how often they are repeated. Each round has all sizes, so that what disturbs the machine for a while does not meet
one size alone, and the best of all rounds is taken: what comes in between only ever makes them longer.
"""

import hashlib
import logging
import math
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from compiled_ddp.planning.calibration import Calibration, Sample, fit_link
from compiled_ddp.planning.cost_model import Compute, Link
from compiled_ddp.ranks import pretended
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.telling.slow_work import SlowWork

SECONDS, QUICK_SECONDS = 3.0, 0.5  # what a calibration takes that is asked for, and one while a model is wrapped

_log = logging.getLogger(__name__)

_SIZES = tuple(4096 * 4**step for step in range(7))  # 4 KiB to 16 MiB
_FEWEST_SIZES, _FEWEST_ROUNDS = 4, 2  # however slow the link is: up to 256 KiB
_IN_FLIGHT = 4
_LARGER_BYTES = 4 * 2**20
_SHARE_OF_COMPUTE = 0.2  # of the time there is; the link has the rest
_SHARE_OF_SIZE = 0.2  # of the link's time: the most that one round of the largest size may take
_SHARE_OF_REPEATS = 0.2  # of a round: a small size is repeated in it, until it takes so much
_MOST_REPEATS, _FEWEST_REPEATS = 10, 3
_MOST_ROUNDS = 100
_BUSY_ELEMENTS = 4096  # that one thread adds up


def measure(communicator: Communicator, device: torch.device, *, seconds: float = SECONDS) -> Calibration:
    """A calibration of the communicator's ranks, with tensors of `device`: the same on every rank. A collective.

    It takes about `seconds`. On a slow link large all-reduces are left out, and even those that are left may take
    longer: at 100 Mbit/s, the quick one took about a second. Draws no random numbers.
    """
    if (world := pretended.current()) is not None:
        return world.calibration()
    what = "how fast ranks compute and reduce"
    with (
        torch.no_grad(),
        communicator.explaining("the link could not be measured"),
        SlowWork(_log, ("measuring", "measured"), what=what, is_told=lambda: communicator.rank == 0) as work,
    ):
        calibration = _measure(_Agreement(communicator, device), seconds)
        work.note_result(str(calibration.link))
    return calibration


class _Agreement:
    """Numbers of which all ranks have the largest."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator, self.device = communicator, device

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Each number's maximum over ranks."""
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.communicator.maximum(shared)
        agreed: list[float] = shared.tolist()
        return agreed


def _measure(agreement: _Agreement, seconds: float) -> Calibration:
    communicator, device = agreement.communicator, agreement.device
    hosts, moment = _hosts_and_time(agreement)
    computing = _Computing(device)
    agreement.largest([0.0])  # after which all begin at once: those of one machine share its memory
    computing.run(seconds * _SHARE_OF_COMPUTE / 2)
    link, residual, samples = Link(0.0, math.inf), 0.0, tuple[Sample, ...]()
    if communicator.world_size > 1:
        rounds = _Rounds(agreement)
        rounds.run(seconds * (1 - _SHARE_OF_COMPUTE))
        samples = rounds.samples()
        link, residual = fit_link(samples)
        of_each, of_byte = rounds.host_seconds()
        link = replace(link, host_seconds=of_each, host_seconds_per_byte=of_byte)
    computing.run(seconds * _SHARE_OF_COMPUTE / 2)  # again: what disturbed the first time may have gone
    return Calibration(
        backend=backend_of(communicator.group, device),
        world_size=communicator.world_size,
        hosts=hosts,
        device=_of_first(communicator, f"calibration/{moment}", _name(device)),
        link=link,
        compute=computing.compute(*agreement.largest(computing.best())),
        residual=residual,
        samples=samples,
        measured=f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}",
    )


# ---- what is not measured --------------------------------------------------------------------------------------------


def _hosts_and_time(agreement: _Agreement) -> tuple[int, float]:
    """On how many hosts the ranks are, by the names of these; and what time it is."""
    numbers = [0.0] * agreement.communicator.world_size
    name = hashlib.sha256(socket.gethostname().encode()).digest()
    numbers[agreement.communicator.rank] = float(int.from_bytes(name[:6], "big"))  # which float64 holds exactly
    *names, now = agreement.largest([*numbers, time.time()])
    return len(set(names)), now


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of those that a group may have, the one for tensors of `device`."""
    config = str(dist.get_backend_config(group))
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part).get(device.type, config)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _of_first(communicator: Communicator, key: str, text: str) -> str:
    """Rank 0's text."""
    if communicator.rank == 0:
        communicator.ranks.publish(key, text)
        return text
    return communicator.ranks.read(key, writer=0, purpose="to learn what device it has measured")


# ---- the link --------------------------------------------------------------------------------------------------------


class _Rounds:
    """All-reduces of several sizes, several under way at once and one alone, timed in turn.

    [Note: links that take a burst] A shaped link, as clouds have them, lets through what it has saved up while it was
    idle, at whatever speed; and the best of all times would be one of these. So a round begins with one of its largest
    all-reduces, which uses that up and is not timed. What is timed while sizes are chosen does not count.
    """

    def __init__(self, agreement: _Agreement) -> None:
        self._agreement = agreement
        self._pieces = dict[int, list[torch.Tensor]]()  # of each size, so many as there are under way at once
        self._times = defaultdict[tuple[int, int], list[float]](list)  # by size and number at once
        self._host_times = list[float](), list[float]()  # of one of the smallest, and of some larger ones at once
        self._busy = torch.zeros(_BUSY_ELEMENTS, dtype=torch.float32, device="cpu")

    def run(self, seconds: float) -> None:
        """As many sizes, and as many rounds of them, as there is time for."""
        self._began, costs = time.perf_counter(), dict[int, float]()
        limit = seconds * _SHARE_OF_SIZE / 4  # as the next size takes four times as long, or less
        for nbytes in _SIZES:
            costs[nbytes] = self._cost(nbytes, limit, until=seconds / 2)
            if costs[nbytes] > limit and len(costs) >= _FEWEST_SIZES:
                break
        in_each = sum(costs.values()) * _SHARE_OF_REPEATS
        repeats = {size: max(1, min(_MOST_REPEATS, int(in_each / costs[size]))) for size in sorted(costs, reverse=True)}
        for rounds in range(1, _MOST_ROUNDS):
            elapsed, last = self._round(repeats)
            if rounds >= _FEWEST_ROUNDS and elapsed + last > seconds:
                break

    def _cost(self, nbytes: int, limit: float, *, until: float) -> float:
        """Begin with this size: the seconds that it takes, the best of some if the first seem to be above `limit`."""
        self._pieces[nbytes] = pieces = [
            torch.zeros(nbytes // 4, dtype=torch.float32, device=self._agreement.device) for _ in range(_IN_FLIGHT)
        ]
        costs = list[float]()
        while len(costs) < _FEWEST_REPEATS:
            begin = time.perf_counter()
            self._seconds(pieces)
            self._seconds(pieces[:1])
            end = time.perf_counter()
            elapsed, cost = self._agreement.largest([end - self._began, end - begin])
            costs.append(cost)
            if cost <= limit or elapsed > until:
                break
        return min(costs)

    def _round(self, repeats: dict[int, int]) -> tuple[float, float]:
        """Time each of these sizes so often. The seconds since `run` began, and those of this round."""
        begin, keys, own = time.perf_counter(), list[tuple[int, int]](), list[float]()
        self._reduce(self._pieces[next(iter(repeats))][:1])  # [Note: links that take a burst]
        for nbytes, times in repeats.items():
            for at_once in (_IN_FLIGHT, 1) * times:
                keys.append((nbytes, at_once))
                own.append(self._seconds(self._pieces[nbytes][:at_once]))
        own.append(statistics.median_low(self._host_seconds(piece) for piece in self._pieces[_SIZES[0]]))
        own.append(self._processor_seconds(self._pieces[self._larger]))
        end = time.perf_counter()
        *slowest, small, large, elapsed, last = self._agreement.largest([*own, end - self._began, end - begin])
        for key, seconds in zip(keys, slowest, strict=True):
            self._times[key].append(seconds)
        self._host_times[0].append(small)
        self._host_times[1].append(large)
        return elapsed, last

    def samples(self) -> tuple[Sample, ...]:
        """The best of each."""
        return tuple(Sample(*key, min(times)) for key, times in sorted(self._times.items()))

    @property
    def _larger(self) -> int:
        """The size at which it is measured what bytes take of the processors."""
        return min(max(self._pieces), _LARGER_BYTES)

    def host_seconds(self) -> tuple[float, float]:
        """What an all-reduce takes of the processors, however small it is, and for each byte.

        The medians: how often threads that share a processor change places is no disturbance.
        """
        small, large = (statistics.median_low(times) for times in self._host_times)
        nbytes = _IN_FLIGHT * (self._larger - _SIZES[0])
        of_byte = (large - _IN_FLIGHT * small) / nbytes if self._agreement.device.type == "cpu" else 0.0
        return small, max(0.0, of_byte)

    def _seconds(self, pieces: Sequence[torch.Tensor]) -> float:
        """From the first launch until all have arrived."""
        begin = time.perf_counter()
        self._reduce(pieces)
        _synchronize(self._agreement.device)  # there a wait only orders streams
        return time.perf_counter() - begin

    def _host_seconds(self, piece: torch.Tensor) -> float:
        """What one all-reduce takes of the processors: its launch, by this thread.

        And where tensors are in the CPU's memory, what other threads take to send and to add them while this one is
        busy, as in a backward: when it waits, waking up an idle processor is most of what they take, and varies by two.
        Of one alone, as each bucket is launched by itself: several at once are served by a thread that is awake.
        """
        process, begin = time.process_time(), time.thread_time()
        (work,) = self._launch([piece])
        seconds = time.thread_time() - begin
        if self._agreement.device.type == "cpu":
            while not work.is_completed():
                self._busy.add_(1.0)
            seconds += time.process_time() - process - (time.thread_time() - begin)
        work.wait()
        return seconds

    def _processor_seconds(self, pieces: Sequence[torch.Tensor]) -> float:
        """What all of them at once take of the processors, by all threads: to send the bytes, and to add them."""
        begin = time.process_time()
        self._reduce(pieces)
        return time.process_time() - begin

    def _reduce(self, pieces: Sequence[torch.Tensor]) -> None:
        for work in self._launch(pieces):
            work.wait()

    def _launch(self, pieces: Sequence[torch.Tensor]) -> list[dist.Work]:
        return [self._agreement.communicator.all_reduce(piece) for piece in pieces]


# ---- the device ------------------------------------------------------------------------------------------------------


def compute_here(device: torch.device, seconds: float) -> Compute:
    """How fast this process computes while others do what they do, measured for so long."""
    computing = _Computing(device)
    with torch.no_grad():
        computing.run(seconds)
    return computing.compute(*computing.best())


class _Computing:
    """A matrix product, and a sum of long vectors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        side, elements = (512, 4 * 2**20) if device.type == "cpu" else (2048, 16 * 2**20)
        self._a = torch.full((side, side), 1.0, dtype=torch.float32, device=device)
        self._product = torch.empty_like(self._a)
        self._x = torch.full((elements,), 1.0, dtype=torch.float32, device=device)
        self._y = torch.full_like(self._x, 1.0)
        self._of_product, self._of_sum = list[float](), list[float]()  # seconds

    def run(self, seconds: float) -> None:
        """Compute for so long."""
        self._repeat(lambda: torch.mm(self._a, self._a, out=self._product), self._of_product, seconds / 2)
        self._repeat(lambda: self._x.add_(self._y), self._of_sum, seconds / 2)

    def _repeat(self, call: Callable[[], object], times: list[float], seconds: float) -> None:
        """After once that does not count, as caches and clocks are others then."""
        call()
        until, fewest = time.perf_counter() + seconds, len(times) + _FEWEST_REPEATS
        while len(times) < fewest or time.perf_counter() < until:
            _synchronize(self._device)
            begin = time.perf_counter()
            call()
            _synchronize(self._device)
            times.append(time.perf_counter() - begin)

    def best(self) -> tuple[float, float]:
        """The seconds of a product, and of a sum."""
        return min(self._of_product), min(self._of_sum)

    def compute(self, of_product: float, of_sum: float) -> Compute:
        """Where they take so many seconds."""
        return Compute(2.0 * self._a.shape[0] ** 3 / of_product, 3.0 * self._x.nbytes / of_sum)


def _synchronize(device: torch.device) -> None:
    """Wait for the device; on the CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
