"""Proving that each gradient came out of its reduction as the sum over ranks, once: neither left out nor added twice.

[Note: proof by random signs] The sum of a tensor's elements, each with a random sign that is the same on all ranks, is
linear in it: that of the sum over ranks is the sum of those of the ranks, to rounding. One number for each gradient is
enough, as an error that does not know the signs is found unless it is as small as rounding.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.checks.checksum import checksum
from compiled_ddp.formatting import format_names
from compiled_ddp.functional.wanted import Agreed
from compiled_ddp.plan import Bucket
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import LaunchObserver

_TRIES = (1, 2, 4, 8)  # the launches of a reduction that are verified, counted anew where a rank has a new graph
_CHUNK = 2**20  # elements that are looked at together
_SIGMAS = 8.0  # how far rounding goes


@dataclass
class Evidence:
    """What one reduction of a rank looked like, by gradient; where `before` has none, it was not launched.

    It `is_seen` unless its graph launches from C++ or as a CUDA graph.
    """

    agreed: Agreed
    is_seen: bool = True
    before: dict[int, tuple[float, float]] = field(default_factory=dict)  # signed sum, sum of squares
    after: dict[int, tuple[float, int]] = field(default_factory=dict)  # signed sum, checksum

    def note_unseen(self) -> None:
        self.is_seen = False

    def note_before(self, index: int, gradient: Tensor) -> None:
        self.before[index] = _signed_sum(gradient), float(_parts(gradient).double().square().sum())

    def note_after(self, index: int, total: Tensor) -> None:
        signed = _signed_sum(total)
        bits = int(checksum(total.detach().contiguous().view(-1))) if math.isfinite(signed) else 0
        self.after[index] = signed, bits

    def judge(self, index: int, signed: float, squares: float, world_size: int) -> tuple[int, int, bool, bool]:
        """What to compare of a gradient by maxima over ranks; whether it is not what all sums say, and is not seen."""
        if 0 in self.agreed.wanted.gradients[index][1]:
            return 0, ~0, False, False  # without elements; where such buckets are awaited nothing tells them apart
        if index not in self.before or index not in self.after:
            return 0, ~0, True, not self.is_seen
        found, bits = self.after[index]
        rounding = torch.finfo(self.agreed.wanted.gradients[index][2]).eps * world_size
        is_off = abs(found - signed) > _SIGMAS * rounding * squares**0.5  # not of what is not finite
        return bits, ~bits, is_off, False


class Proof:
    """Of the reductions of one communicator. All ranks verify the same launches."""

    def __init__(self) -> None:
        self._tried: dict[Agreed, int] = {}
        self._wished: set[Agreed] = set()
        self._evidence: list[Evidence] = []  # which ranks have not compared yet

    def note_launch(self, agreed: Agreed) -> None:
        self._tried[agreed] = self._tried.get(agreed, 0) + 1

    def note_wishes(self, wished: Sequence[Agreed]) -> None:
        """Some rank wishes to see the next launches of these proven."""
        self._wished.update(wished)

    def heed_wishes(self) -> None:
        """Verify them from now on; behind a launch at which all ranks look."""
        self._tried.update(dict.fromkeys(self._wished, 0))
        self._wished.clear()

    def verifies(self, agreed: Agreed) -> bool:
        """Whether its latest launch is verified."""
        return self._tried.get(agreed, 0) in _TRIES

    @property
    def is_pending(self) -> bool:
        """Whether there is something to compare."""
        return bool(self._evidence)

    def note(self, evidence: Evidence) -> None:
        self._evidence.append(evidence)

    def forget(self) -> None:
        """What was launched was not what ranks wanted."""
        self._evidence = []

    def conclude(self, communicator: Communicator) -> None:
        """Compare what has been noted; a no-op where nothing has. Raises RuntimeError, on every rank, by name."""
        evidence, self._evidence = self._evidence, []
        if not evidence:
            return
        every = [(each, index) for each in evidence for index in range(len(each.agreed.order))]
        before = [each.before.get(index, (0.0, 0.0)) for each, index in every]
        sums = torch.tensor(before, dtype=torch.float64, device=evidence[0].agreed.wanted.device)
        with communicator.explaining("what gradients should sum up to could not be compared"):
            communicator.all_reduce(sums).wait()
        rows = [
            each.judge(index, signed, squares, communicator.world_size)
            for (each, index), (signed, squares) in zip(every, sums.tolist(), strict=True)
        ]
        shared = torch.tensor(rows, dtype=torch.int64, device=sums.device)
        communicator.maximum(shared)
        wrong = [
            each
            for each, (most, most_inverted, is_off, is_unseen) in zip(every, shared.tolist(), strict=True)
            if not is_unseen and (is_off or most != ~most_inverted)
        ]
        if wrong:
            functions = ", ".join(dict.fromkeys(each.agreed.wanted.function for each, _ in wrong))
            names = [each.agreed.wanted.gradients[index][0] for each, index in wrong]
            raise RuntimeError(
                f"rank {communicator.rank}: the gradients of {functions} with respect to "
                f"{format_names(names)} are not the sum over ranks: on some rank they were left "
                "out, added twice, or changed on the way. Please report the function; eager calls, without "
                "compiled_ddp.functional.compile, may be right."
            )


@contextlib.contextmanager
def watching(runs: Sequence[tuple[Agreed, bool]], group_name: str, *, sees_values: bool) -> Iterator[list[Evidence]]:
    """Note what a graph launches on this group; `runs` are its reductions there, with whether each is verified.

    Without `sees_values` nothing can be computed from what it launches: it runs as a CUDA graph.
    """
    found = [Evidence(agreed) for agreed, _ in runs]
    if not any(verifies for _, verifies in runs):
        yield []
        return
    buckets = [(each, bucket) for each in found for bucket in each.agreed.plan.buckets]
    flat: dict[int, tuple[int, Tensor]] = {}  # launch -> its bucket, and what is reduced
    place = -1  # of the latest bucket

    def launching(number: int, flat_buffer: Tensor) -> AbstractContextManager[None]:
        nonlocal place
        size = flat_buffer.numel()
        ahead = (n for n in range(place + 1, len(buckets)) if buckets[n][1].numel == size)
        following = next(ahead, None)
        if following is not None:
            place = following
            evidence, bucket = buckets[place]
            for index, gradient in _in_bucket(bucket, flat_buffer):
                evidence.note_before(index, gradient)
        if place >= 0 and buckets[place][1].numel == size:  # where it is launched again too
            flat[number] = place, flat_buffer
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def waiting(number: int) -> Iterator[None]:
        yield
        if number in flat:
            where, flat_buffer = flat.pop(number)
            evidence, bucket = buckets[where]
            for index, total in _in_bucket(bucket, flat_buffer):
                evidence.note_after(index, total)

    verified = [each for each, (_, verifies) in zip(found, runs, strict=True) if verifies]
    observer = LaunchObserver(group_name, launch=launching, wait=waiting)
    with observer if sees_values else contextlib.nullcontext():
        yield verified
    if not observer.launched:
        for each in verified:
            each.note_unseen()


def observed(agreed: Agreed, gradients: Sequence[Tensor], sums: Sequence[Tensor]) -> Evidence:
    """That of a reduction whose gradients and sums are at hand."""
    evidence = Evidence(agreed)
    for index, (gradient, total) in enumerate(zip(gradients, sums, strict=False)):
        evidence.note_before(index, gradient)
        evidence.note_after(index, total)
    return evidence


def _in_bucket(bucket: Bucket, flat_buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    for gradient in bucket.gradients:
        yield gradient.index, gradient.view(flat_buffer)


def _parts(tensor: Tensor) -> Tensor:
    """The elements in a row, of a complex tensor both parts."""
    values = tensor.detach().contiguous()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def _signed_sum(tensor: Tensor) -> float:
    total = 0.0
    for chunk in _parts(tensor).split(_CHUNK):
        total += float(torch.dot(chunk.double(), _signs(chunk.device)[: chunk.numel()])) if chunk.numel() else 0.0
    return total


@functools.lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    with torch_private.tracing.outside_of_traces():
        generator = torch.Generator().manual_seed(16)
        drawn = torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int64, device="cpu")
        return (2 * drawn - 1).to(device=device, dtype=torch.float64)
