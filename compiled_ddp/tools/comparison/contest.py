"""All variants of the user's model on this rank, each in a process of its own, taking turns."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from compiled_ddp.tools.comparison.contestant import Instructions
from compiled_ddp.tools.comparison.expectation import Expectation
from compiled_ddp.tools.comparison.measure import bucket_sizes, by_round, take_turns, untimed_steps
from compiled_ddp.tools.comparison.probe import MALLOC_ENVIRONMENT
from compiled_ddp.tools.comparison.progress import Progress, in_words
from compiled_ddp.tools.comparison.remote import Failures, RemoteContender, VariantFailed, agreed
from compiled_ddp.tools.comparison.result import Comparison, FirstStep, VariantResult
from compiled_ddp.tools.comparison.variants import WrapperOptions, make_variants

REFERENCE, COMMUNICATION = "reference", "communication alone"


class ComparisonFailed(Exception):
    """There is nothing to compare; the message says why, and is the same on every rank."""


@dataclass(frozen=True)
class Order:
    """What to compare, and for how long."""

    users_function: str  # SCRIPT:FUNCTION
    variants: Sequence[str]
    wrapper_options: WrapperOptions
    warmup: int
    rounds: int
    probes: bool
    device: str
    process_group: str
    seed: int
    timeout_s: float


class Contest:
    """The processes of this rank: made one by one, asked together, and ended."""

    def __init__(self, order: Order, folder: Path) -> None:
        self._order, self._folder = order, folder
        self._kinds = make_variants(order.wrapper_options)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._prefix = folder.name  # the store may hold what a comparison before a restart has left
        self._failures = Failures(f"{self._prefix}/failures")
        self._running: dict[str, RemoteContender] = {}
        self._progress = Progress(shown=self._rank == 0)

    def end(self) -> None:
        """End what is left of the processes."""
        for contender in self._running.values():
            contender.end()
        self._running.clear()

    def compare(self) -> Comparison:
        """The comparison, the same on every rank. Raises ComparisonFailed where there is none."""
        made, expectation = self._make_reference()
        answers = {name: self._prepare(name, expectation) for name in self._order.variants}
        ready = {name: answer for name, answer in answers.items() if not isinstance(answer, VariantFailed)}
        sizes = bucket_sizes([answer["bucket_bytes"] for answer in ready.values()], made["gradient_bytes"])
        buckets = self._start(COMMUNICATION, None, "prepare communication", sizes, {})
        if isinstance(buckets, VariantFailed):
            raise ComparisonFailed(f"communication alone: {buckets}")
        untimed = untimed_steps([answer["step_s"] for answer in ready.values()])
        samples, alone = self._take_turns([*ready], untimed)
        counted = {name: self._ask(name, "count collectives") for name in ready}
        failures = self._failures_of_all()
        if COMMUNICATION in failures:
            raise ComparisonFailed(f"communication alone: {failures[COMMUNICATION]}")
        results = []
        for name in self._order.variants:
            kind, error = self._kinds[name], failures.get(name)
            measured: dict[str, Any] = {"samples": []}
            if error is None:
                measured = {**ready[name], "samples": samples[name], "collectives": counted[name]}
                del measured["bucket_bytes"], measured["step_s"]
            results.append(VariantResult(name, kind.floor, kind.communicates, error=error, **measured))
        return Comparison(
            workload=made["workload"],
            device=made["device"],
            link=self._link(),
            world_size=self._world_size,
            parameters=made["parameters"],
            bucket_bytes=buckets,
            communication_samples=alone,
            variants=results,
            batch_size=made["batch_size"],
            own_difference=made["own_difference"],
        )

    def _make_reference(self) -> tuple[dict[str, Any], Expectation]:
        """What it told of the model, and how long everything may take. Raises ComparisonFailed where it failed."""
        began = time.monotonic()
        made = self._alone(REFERENCE, None, "make reference", None, {})
        if isinstance(made, VariantFailed):
            raise ComparisonFailed(str(made))
        expectation = Expectation(
            {name: self._kinds[name].floor for name in self._order.variants},
            rounds=self._order.rounds,
            starts=2 if self._order.probes else 1,
            start_s=time.monotonic() - began,
            step_s=made["step_s"],
        )
        what = f"{len(self._order.variants)} variants and {self._order.rounds} rounds"
        self._progress.say(f"{what}, {in_words(expectation.seconds_left())} expected")
        return made, expectation

    def _prepare(self, name: str, expectation: Expectation) -> Any:
        """As `_first_steps`, and `expectation` knows of it."""
        began, number = time.monotonic(), [*self._order.variants].index(name) + 1

        def say(elapsed_s: float) -> str:
            elapsed = f", {elapsed_s:.0f} s" if elapsed_s else ""
            left = in_words(expectation.seconds_left(elapsed_s))
            return f"first steps of {name}, {number} of {len(self._order.variants)}{elapsed}, {left} left"

        with self._progress.under_way(say):
            answer = self._first_steps(name)
        step_s = None if isinstance(answer, VariantFailed) else answer["step_s"]
        expectation.note(name, time.monotonic() - began, step_s)
        return answer

    def _first_steps(self, name: str) -> Any:
        """What a variant's probe and warm-up found, after which it is running; VariantFailed where it is not."""
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / self._kinds[name].label)}
        found: dict[str, Any] = {}
        if self._order.probes:
            probed = self._alone(f"probe of {name}", name, "probe", self._order.warmup, {**MALLOC_ENVIRONMENT, **cache})
            if isinstance(probed, VariantFailed):
                self._failures.note(self._label(name), str(probed))  # as every rank does
                return probed
            if probed["memory_unknown"] is not None:
                self._progress.say(f"peak memory of {name} is not known: {probed['memory_unknown']}")
            found["first_step_parts"] = FirstStep(**probed["first_step"])
            found["first_step_cold_s"] = probed["first_step"]["seconds"]
            found["peak_memory_bytes"] = probed["peak_memory_bytes"]
        warm = self._start(name, name, "warm up", self._order.warmup, cache)
        return warm if isinstance(warm, VariantFailed) else {**found, **warm}

    def _take_turns(self, names: Sequence[str], untimed: int) -> tuple[dict[str, Any], Any]:
        """For each variant, and for communication alone, what every rank measured in each round."""
        slots: list[Callable[[], Any]] = [partial(self._ask, name, "step", untimed) for name in names]
        slots.append(partial(self._ask, COMMUNICATION, "communicate"))
        samples = take_turns(slots, self._progress.each(range(self._order.rounds), "round"))
        of_ranks = agreed(samples, self._world_size)
        by_slot = [by_round([of_rank[slot] for of_rank in of_ranks]) for slot in range(len(slots))]
        return dict(zip(names, by_slot, strict=False)), by_slot[-1]

    def _failures_of_all(self) -> dict[str, str]:
        """What failed on any rank, and why: the same on every rank, as none tells anything after the barrier."""
        dist.barrier()
        noted = {name: self._failures.noted(self._label(name)) for name in (*self._order.variants, COMMUNICATION)}
        return {name: failure for name, failure in noted.items() if failure is not None}

    def _alone(
        self, name: str, variant: str | None, request: str, argument: Any, environment: Mapping[str, str]
    ) -> Any:
        """The answer of a process that is asked for one thing."""
        answer = self._start(name, variant, request, argument, environment)
        self._running.pop(name).end()
        return answer

    def _start(
        self, name: str, variant: str | None, request: str, argument: Any, environment: Mapping[str, str]
    ) -> Any:
        """A new process's answer to its first request, on every rank; or VariantFailed, on every rank."""
        order = self._order
        instructions = Instructions(
            users_function=order.users_function,
            label=self._label(name),
            variant=variant,
            wrapper_options=order.wrapper_options,
            device=order.device,
            process_group=order.process_group,
            seed=order.seed,
            timeout_s=order.timeout_s,
            reference=str(self._folder / f"reference-{self._rank}.pt"),
        )
        quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        self._running[name] = RemoteContender(instructions, self._folder, self._failures, {**quiet, **environment})
        answer = self._ask(name, request, argument)
        dist.barrier()  # every rank has its answer, or has told why not
        failure = self._failures.noted(self._label(name))
        if failure is None:
            return answer
        self._running[name].end()
        return VariantFailed(failure)

    def _ask(self, name: str, request: str, argument: Any = None) -> Any:
        """The answer, or None: the failure is noted then."""
        try:
            return self._running[name].ask(request, argument)
        except VariantFailed:
            return None

    def _label(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _link(self) -> str:
        machines = self._world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        where = f"between {machines} machines" if machines > 1 else "within one machine"
        return f"{self._order.process_group} {where}"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder of the ranks of this machine, removed in the end; its name is the same on all machines."""
    name, *_ = agreed(uuid4().hex, dist.get_world_size())
    folder = Path(tempfile.gettempdir()) / f"compiled-ddp-compare-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def compare(order: Order) -> Comparison:
    """Compare as a rank of the default process group, which is gloo's and for nothing else."""
    with shared_folder() as folder:
        contest = Contest(order, folder)
        try:
            return contest.compare()
        finally:
            contest.end()
