"""The core: every variant in the same process, warmed up, then one step of each per round in a rotating order.

Absolute times drift with the machine's other work, by 20 % within minutes. Within a round all variants see the same
machine, so differences and ratios are taken round by round, and medians over rounds.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.collectives import CommunicationAlone, count_collectives, even_buckets
from benchmarks.parity import Reference, trainable
from benchmarks.ranks import Rank
from benchmarks.result import Comparison, Samples, VariantResult
from benchmarks.variants import Variant
from benchmarks.workload import Workload


class Contender:
    """A variant in training: its own model, optimizer and pass through the data."""

    def __init__(self, variant: Variant, workload: Workload, rank: Rank) -> None:
        self.variant = variant
        self.rank = rank
        self.module = variant.wrap(workload.build_model(variant.label, rank.device))
        self.optimizer = workload.optimizer(trainable(self.module))
        self.batches = workload.batches(rank.index, rank.world_size)

    def next_batch(self) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.rank.device) for tensor in next(self.batches))

    def step(self, batch: tuple[Tensor, ...]) -> list[float]:
        """Seconds of forward, backward and optimizer, the last with clearing the gradients."""
        marks = [self._now()]
        loss = self.module(*batch)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self._now())
        return [after - before for before, after in pairwise(marks)]

    def _now(self) -> float:
        self.rank.synchronize()
        return time.perf_counter()


def _progress(items: Iterable, label: str, rank: Rank) -> tqdm:
    return tqdm(items, desc=label, disable=rank.index != 0, leave=False)


def warm_up(
    variants: Sequence[Variant], workload: Workload, steps: int, rank: Rank
) -> tuple[list[Contender], list[float]]:
    """Every contender after `steps` steps, and its largest gradient difference at the first backward and after them."""
    reference = Reference.compute(workload, rank)
    contenders, differences = [], []
    bar = _progress(variants, "warm-up", rank)
    for variant in bar:
        bar.set_postfix_str(variant.name)
        contender = Contender(variant, workload, rank)
        first = reference.difference(contender.module, rank, communicates=variant.communicates)
        for _ in range(steps):
            contender.step(contender.next_batch())
        settled = reference.difference(contender.module, rank, communicates=variant.communicates)
        contenders.append(contender)
        differences.append(max(first, settled))
    return contenders, differences


def bucket_sizes(contenders: Sequence[Contender]) -> list[int]:
    """Bytes of each all-reduce of the contender with the fewest; pieces of 4 MiB if none can tell."""
    readers = [(contender.variant.bucket_bytes, contender.module) for contender in contenders]
    told = [read(module) for read, module in readers if read is not None]
    if sizes := min(filter(None, told), key=len, default=None):
        return sizes
    parameters = trainable(contenders[0].module)
    return even_buckets(sum(parameter.numel() * parameter.element_size() for parameter in parameters))


def run_rounds(
    contenders: Sequence[Contender], communication: CommunicationAlone, rounds: int, rank: Rank
) -> tuple[list[list[list[float]]], list[float]]:
    """This rank's samples: for each contender and round the three phases, and for each round communication alone."""
    samples: list[list[list[float]]] = [[] for _ in contenders]
    communication_samples = []
    slots = len(contenders) + 1  # the last slot is communication alone
    for round_index in _progress(range(rounds), "rounds", rank):
        for offset in range(slots):
            slot = (round_index + offset) % slots
            if slot == len(contenders):
                rank.barrier()
                communication_samples.append(communication.step())
            else:
                batch = contenders[slot].next_batch()
                rank.barrier()
                samples[slot].append(contenders[slot].step(batch))
    return samples, communication_samples


def _by_round(ranks: Sequence[Sequence]) -> list:
    return [list(round_samples) for round_samples in zip(*ranks, strict=True)]


def compare(
    workload: Workload, variants: Sequence[Variant], *, warmup: int, rounds: int, link: str, rank: Rank
) -> Comparison:
    """Train `workload` under every variant for `rounds` interleaved steps. Every rank returns the same result."""
    contenders, differences = warm_up(variants, workload, warmup, rank)
    communication = CommunicationAlone(bucket_sizes(contenders), rank)
    communication.step()
    samples, communication_samples = run_rounds(contenders, communication, rounds, rank)
    gathered = rank.gather((samples, communication_samples))

    results = []
    for i, (contender, difference) in enumerate(zip(contenders, differences, strict=True)):
        batch = contender.next_batch()
        variant_samples: Samples = _by_round([of_rank[0][i] for of_rank in gathered])
        results.append(
            VariantResult(
                name=contender.variant.name,
                floor=contender.variant.floor,
                communicates=contender.variant.communicates,
                samples=variant_samples,
                collectives=count_collectives(lambda c=contender, b=batch: c.step(b)),
                gradient_difference=difference,
            )
        )
    return Comparison(
        workload=workload.name,
        device=torch.cuda.get_device_name() if rank.device.type == "cuda" else "cpu",
        link=link,
        world_size=rank.world_size,
        parameters=sum(parameter.numel() for parameter in trainable(contenders[0].module)),
        bucket_bytes=[buffer.nbytes for buffer in communication.buffers],
        communication_samples=_by_round([of_rank[1] for of_rank in gathered]),
        variants=results,
    )
