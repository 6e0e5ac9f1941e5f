"""Proving that each gradient came out of its reduction as the sum over ranks, once: [Note: proof by random signs]."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiled_ddp.checks.proof import Account, exchange
from compiled_ddp.checks.sums import checksum, signed_sum
from compiled_ddp.checks.values import Reference, compare, explained
from compiled_ddp.formatting import format_names
from compiled_ddp.functional.wanted import Agreed
from compiled_ddp.plan import Bucket
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import LaunchObserver

_TRIES = (1, 2, 4, 8)  # the launches of a reduction that are verified, counted anew where a rank has a new graph


@dataclass
class Evidence:
    """What one reduction of a rank looked like, by gradient; where `before` has none, it was not launched.

    It `is_seen` unless its graph launches from C++ or as a CUDA graph.
    """

    agreed: Agreed
    is_seen: bool = True
    before: dict[int, tuple[float, float]] = field(default_factory=dict)  # signed sum, sum of squares
    after: dict[int, tuple[float, int]] = field(default_factory=dict)  # signed sum, checksum
    reference: Reference | None = None  # of what lies in its buckets, where a compiled step is to be compared
    wrong: dict[int, int] = field(default_factory=dict)  # what is wrong there

    def note_unseen(self) -> None:
        self.is_seen = False

    def note_bucket(self, bucket: Bucket, flat_buffer: Tensor) -> None:
        """A graph is about to launch it."""
        for index, gradient in _in_bucket(bucket, flat_buffer):
            self.note_before(index, gradient)
        if self.reference is not None:
            self.wrong |= compare(bucket, flat_buffer, self.reference)

    def note_before(self, index: int, gradient: Tensor) -> None:
        signed, squares = signed_sum(gradient).tolist()
        self.before[index] = signed, squares

    def note_after(self, index: int, total: Tensor) -> None:
        signed = float(signed_sum(total)[0])
        bits = int(checksum(total.detach().contiguous().view(-1))) if math.isfinite(signed) else 0
        self.after[index] = signed, bits

    def is_noted(self, index: int) -> bool:
        """On both sides of the reduction. Where empty buckets are awaited nothing tells them apart."""
        return index in self.before and index in self.after and self.kind(index)[1] > 0

    def is_missing(self, index: int) -> bool:
        return self.is_seen and self.kind(index)[1] > 0 and not self.is_noted(index)

    def kind(self, index: int) -> tuple[torch.dtype, int]:
        """Its dtype, and how many elements it has."""
        _, shape, dtype, _ = self.agreed.wanted.gradients[index]
        return dtype, math.prod(shape)


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
        account = _account(every)
        told = [
            [int(each.is_missing(index)) for each, index in every],
            [int(not each.is_seen) for each, _ in every],
            [each.wrong.get(index, 0) for each, index in every],
        ]
        others = torch.tensor(told, dtype=torch.int64, device=account.brought.device)
        with communicator.explaining("what gradients should sum up to could not be compared"):
            verdict = exchange(communicator, account, *others)
        missing, unseen, findings = verdict.others
        in_buckets = [(each, found) for each, found in zip(every, findings.tolist(), strict=True) if found]
        if in_buckets:
            raise RuntimeError(_told_of_buckets(communicator.rank, in_buckets))
        off = (verdict.are_off | verdict.results_differ | (missing != 0)) & (unseen == 0)
        wrong = [each for each, is_off in zip(every, off.tolist(), strict=True) if is_off]
        if wrong:
            functions = ", ".join(dict.fromkeys(each.agreed.wanted.function for each, _ in wrong))
            names = [each.agreed.wanted.gradients[index][0] for each, index in wrong]
            raise RuntimeError(
                f"rank {communicator.rank}: the gradients of {functions} with respect to "
                f"{format_names(names)} are not the sum over ranks: on some rank they were left "
                "out, added twice, or changed on the way. Please report the function; eager calls, without "
                "compiled_ddp.functional.compile, may be right."
            )


def _account(every: Sequence[tuple[Evidence, int]]) -> Account:
    """Nothing of a gradient that was not seen on both sides of its reduction."""
    seen = [(each, index, each.is_noted(index)) for each, index in every]
    device = every[0][0].agreed.wanted.device
    before = [(*each.before[index], 0.0) if noted else (0.0, 0.0, 0.0) for each, index, noted in seen]
    after = [each.after[index] if noted else (0.0, 0) for each, index, noted in seen]
    signed, checksums = zip(*after, strict=True)
    return Account(
        torch.tensor(before, dtype=torch.float64, device=device).t().contiguous(),
        torch.tensor(signed, dtype=torch.float64, device=device),
        torch.tensor(checksums, dtype=torch.int64, device=device),
        [each.kind(index) for each, index in every],
        1.0,
    )


def _told_of_buckets(rank: int, found: Sequence[tuple[tuple[Evidence, int], int]]) -> str:
    names = [(each.agreed.wanted.function, each.agreed.wanted.gradients[index][0]) for (each, index), _ in found]
    functions = ", ".join(dict.fromkeys(function for function, _ in names))
    listed = "; ".join(
        f"{name}: {explained(finding)}" for (_, name), (_, finding) in zip(names[:5], found[:5], strict=True)
    )
    return (
        f"rank {rank}: the gradients of {functions} with respect to {format_names([name for _, name in names])} were "
        f"reduced from a bucket in which some rank's compiled step has left something else ({listed}). Use no result "
        "of it. Please report the function; eager calls, without compiled_ddp.functional.compile, may be right."
    )


@contextlib.contextmanager
def watching(
    runs: Sequence[tuple[Agreed, bool, Reference | None]], group_name: str, *, sees_values: bool
) -> Iterator[list[Evidence]]:
    """Note what a graph launches on this group; `runs` are its reductions there, with whether each is verified.

    A reduction that has a reference is compared with it, before its buckets are launched.

    Without `sees_values` nothing can be computed from what it launches: it runs as a CUDA graph.
    """
    found = [Evidence(agreed, reference=reference) for agreed, _, reference in runs]
    if not any(verifies for _, verifies, _ in runs):
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
            evidence.note_bucket(bucket, flat_buffer)
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

    verified = [each for each, (_, verifies, _) in zip(found, runs, strict=True) if verifies]
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
