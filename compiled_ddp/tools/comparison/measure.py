"""The core: every variant warmed up, then a turn of each per round in a rotating order.

Absolute times drift with the machine's other work, by 20 % within minutes. Within a round all variants see the same
machine, so differences and ratios are taken round by round, and medians over rounds.

A turn is one timed step, behind some that are not: in training a step follows its like, and finds in the caches what
that has left there. Behind another variant's step it would have to fetch its code and data anew, which costs most where
most is Python.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compiled_ddp.tools.command_line.batches import fresh_copy
from compiled_ddp.tools.comparison.collectives import CommunicationAlone, count_collectives, even_buckets
from compiled_ddp.tools.comparison.progress import Progress
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.reference import Reference, largest_of, trainable
from compiled_ddp.tools.comparison.result import Comparison, Samples, VariantResult
from compiled_ddp.tools.comparison.variants import Variant
from compiled_ddp.tools.comparison.workload import Workload, on_device, samples_in, total_samples
from compiled_ddp.wrapper import DataParallelWrapper

T = TypeVar("T")

UNTIMED_S, MOST_UNTIMED = 0.1, 5  # of the steps before a timed one


def untimed_steps(step_s: Sequence[float]) -> int:
    """How many steps a turn begins with, where they take so many seconds: the longer, the less do caches matter."""
    longest = max(step_s, default=0.0) or UNTIMED_S  # nothing is known without a warm-up
    return min(MOST_UNTIMED, int(UNTIMED_S / longest))


class Contender:
    """A variant in training: its own model, optimizer and pass through the data."""

    def __init__(self, variant: Variant, workload: Workload, rank: Rank) -> None:
        self.variant = variant
        self.rank = rank
        self.workload = workload
        self.module = variant.wrap(workload.build_model(variant.label, rank.device))
        self.optimizer = workload.optimizer(trainable(self.module))
        self.batches = workload.batches(rank.index, rank.world_size)
        self.step_s = 0.0  # what the last step of the warm-up took

    def next_batch(self) -> Any:
        """This rank's next batch, on its device: a copy, as a list begins again and a step may change its batch."""
        return on_device(fresh_copy(next(self.batches)), self.rank.device)

    def step(self, batch: Any) -> list[float]:
        """Seconds of forward, backward and optimizer, the last with clearing the gradients."""
        marks = [self._now()]
        loss = self.workload.loss(self.module, batch)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self._now())
        return [after - before for before, after in pairwise(marks)]

    def compile_ahead(self, batch: Any) -> None:
        """Where the variant is one that is warmed up: with what the model is called with for the loss of `batch`."""
        if self.variant.warms_up:
            assert isinstance(self.module, DataParallelWrapper)
            args, kwargs = _arguments(self.module, lambda: self.workload.loss(self.module, batch))
            self.module.warmup(*args, **kwargs)

    def take_turn(self, untimed: int) -> list[float]:
        """As `step`, from where all ranks have come to it, behind so many steps that are not timed."""
        for _ in range(untimed):
            self.step(self.next_batch())
        batch = self.next_batch()
        self.rank.barrier()
        return self.step(batch)

    def warm_up(self, reference: Reference, steps: int) -> float:
        """Train `steps` steps; returns the largest gradient difference at the first backward and after them."""
        self.compile_ahead(fresh_copy(reference.batch))
        communicates = self.variant.communicates
        first = reference.difference(self.workload, self.module, self.rank, communicates=communicates)
        for _ in range(steps):
            self.step_s = sum(self.step(self.next_batch()))
        settled = reference.difference(self.workload, self.module, self.rank, communicates=communicates)
        return largest_of([first, settled])

    def bucket_bytes(self) -> list[int] | None:
        """The size of each all-reduce, after a backward, if the variant can tell."""
        return None if self.variant.bucket_bytes is None else self.variant.bucket_bytes(self.module)

    def collectives(self) -> dict[str, int]:
        """Calls per operation in one more step."""
        batch = self.next_batch()
        return count_collectives(lambda: self.step(batch))

    def give_up(self) -> None:
        """Let go of the model, its wrapper and its optimizer: nothing else can be asked of the contender then."""
        if self.variant.unwrap is not None:
            self.variant.unwrap(self.module)
        del self.module, self.optimizer
        self.workload.forget_model()

    def _now(self) -> float:
        self.rank.synchronize()
        return time.perf_counter()


class _CalledWith(Exception):
    """Ends what calls a module, where that is called."""


def _arguments(module: nn.Module, call: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `call` calls `module` with, which does not run."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CalledWith(args, kwargs)

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call()
    except _CalledWith as called:
        args, kwargs = called.args
        return args, kwargs
    finally:
        handle.remove()
    raise AssertionError("the loss does not call the model")


def warm_up(
    variants: Sequence[Variant], workload: Workload, steps: int, rank: Rank
) -> tuple[list[Contender], list[float]]:
    """Every contender after `steps` steps, and its largest gradient difference at the first backward and after them."""
    reference = Reference.compute(workload, rank)
    contenders, differences = [], []
    for variant in Progress(shown=rank.index == 0).each(variants, "warm-up"):
        contender = Contender(variant, workload, rank)
        differences.append(contender.warm_up(reference, steps))
        contenders.append(contender)
    return contenders, differences


def bucket_sizes(told: Sequence[list[int] | None], gradient_bytes: int) -> list[int]:
    """The buckets of the variant that has the fewest; `gradient_bytes` in pieces of 4 MiB if none can tell."""
    return min(filter(None, told), key=len, default=None) or even_buckets(gradient_bytes)


def take_turns(slots: Sequence[Callable[[], T]], rounds: Iterable[int]) -> list[list[T]]:
    """What each slot's calls returned: one call in each of the `rounds`, whose numbers rotate the order."""
    samples: list[list[T]] = [[] for _ in slots]
    for round_index in rounds:
        for offset in range(len(slots)):
            slot = (round_index + offset) % len(slots)
            samples[slot].append(slots[slot]())
    return samples


def by_round(ranks: Sequence[Sequence[T]]) -> list[list[T]]:
    """For each rank and round -> for each round and rank."""
    return [list(round_samples) for round_samples in zip(*ranks, strict=True)]


def device_name(device: torch.device) -> str:
    """What a result says of the device that it was measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compare(
    workload: Workload, variants: Sequence[Variant], *, warmup: int, rounds: int, link: str, rank: Rank
) -> Comparison:
    """Train `workload` under every variant for `rounds` turns. Every rank returns the same result."""
    contenders, differences = warm_up(variants, workload, warmup, rank)
    parameters: list[Tensor] = [*trainable(contenders[0].module)]
    sizes = bucket_sizes([contender.bucket_bytes() for contender in contenders], sum(p.nbytes for p in parameters))
    communication = CommunicationAlone(sizes, rank)
    communication.step()
    untimed = untimed_steps(rank.gather(max(contender.step_s for contender in contenders)))
    slots: list[Callable[[], Any]] = [partial(contender.take_turn, untimed) for contender in contenders]
    numbers = Progress(shown=rank.index == 0).each(range(rounds), "round")
    samples = take_turns([*slots, communication.timed_step], numbers)
    gathered = rank.gather(samples)

    results = []
    for i, (contender, difference) in enumerate(zip(contenders, differences, strict=True)):
        variant_samples: Samples = by_round([of_rank[i] for of_rank in gathered])
        results.append(
            VariantResult(
                name=contender.variant.name,
                floor=contender.variant.floor,
                communicates=contender.variant.communicates,
                samples=variant_samples,
                collectives=contender.collectives(),
                gradient_difference=difference,
            )
        )
    return Comparison(
        workload=workload.name,
        device=device_name(rank.device),
        link=link,
        world_size=rank.world_size,
        parameters=sum(parameter.numel() for parameter in parameters),
        bucket_bytes=[buffer.nbytes for buffer in communication.buffers],
        communication_samples=by_round([of_rank[-1] for of_rank in gathered]),
        variants=results,
        batch_size=total_samples(rank.gather(samples_in(next(workload.batches(rank.index, rank.world_size))))),
    )
