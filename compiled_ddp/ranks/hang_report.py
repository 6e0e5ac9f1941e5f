"""A failed wait explains itself: every rank says where it stands, through the store, and the message compares them.

Each rank has a thread that looks for a request now and then and answers it, also while the rank itself waits in a
collective or sits in Python. A rank whose wait fails makes the request, answers it itself, and gathers the others'
answers for a bounded time. The thread has a connection to the store of its own: a blocking call on the shared one
would keep everybody waiting.

The same threads find out that ranks wait for each other in vain, long before the timeout ends these waits: see
[Note: ranks on different courses]. Then each of them ends the waits of its own rank, which raises why.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.ranks.clock import OUTLAST_SECONDS
from compiled_ddp.ranks.progress import Course, Position, RankProgress

_POLLS_PER_TIMEOUT = 20
_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.2, 5.0
_GATHER_POLLS = 3  # how long a rank has to answer, beside one second
_MOST_GROUPS = 8  # of ranks with different positions, in a message
_LOOK_SECONDS = 1.0  # how often, at least, a thread looks whether its own rank goes on
_REQUESTS, _FIRST_VERDICT = "hang/requests", "hang/first verdict"
_IN_BACKWARD, _REASON = "hang/in backward", "hang/reason"
_REASON_KNOWN, _REPORTED = "hang/reason known", "hang/reported"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank wrote into the store."""

    request: int  # the latest one that it knew of
    failed: bool  # its own wait has failed: it goes nowhere from here
    position: Position

    def encode(self) -> str:
        position = self.position
        return json.dumps([self.request, self.failed, *dataclasses.astuple(position)])

    @classmethod
    def decode(cls, text: str) -> "Answer":
        request, failed, launches, point, words, python, course = json.loads(text)
        return cls(request, failed, Position(launches, tuple(point), words, tuple(python), Course(*course)))


@dataclasses.dataclass(frozen=True)
class Report:
    """Where every rank stands, when a wait has failed."""

    text: str
    is_reason: bool = False  # whether it says why ranks fail, the same on all of them: more than what failed


class HangReporter:
    """Answers other ranks' requests in the background, and makes the report of a wait that has failed on this one."""

    def __init__(
        self,
        rank_progress: RankProgress,
        store: dist.Store,
        group: dist.ProcessGroup,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
    ) -> None:
        """`rank` is this one's place in `ranks`, which are global; `timeout` is that of the `group`'s collectives."""
        self._rank_progress = rank_progress
        self.failed_before = ""  # says where, once a wait has failed
        self._exchange = _Exchange(rank_progress, store, group, rank, ranks, timeout)
        self._end: Callable[[], object] = self._exchange.stop
        if len(ranks) > 1:
            # The thread knows nothing of this object: it ends with it, or with the interpreter, whichever comes first.
            thread = threading.Thread(target=self._exchange.serve, name="compiled_ddp hang report", daemon=True)
            thread.start()
            self._end = weakref.finalize(self, functools.partial(_end, self._exchange, thread, os.getpid()))

    @property
    def knows_why(self) -> bool:
        """Whether ranks have found out why they wait in vain."""
        return self._exchange.reason != ""

    def report(self, frames: Sequence[FrameType]) -> Report:
        """For the message of a wait that failed in `frames`, innermost first."""
        position = self._rank_progress.read(frames)
        if self.failed_before:
            return Report(self.failed_before)
        place = f"A wait on this communicator failed before, at {position.text}"
        self.failed_before = f"{place}: see the report of that one."
        return self._exchange.ask(position)

    def most_launches(self) -> int:
        """How many collectives the rank that is furthest has launched, of those that answer."""
        return max(position.launches for position in self._exchange.positions().values())

    def note_failure(self, why: str) -> None:
        """No wait has failed, but others may have to wait for this rank."""
        self.failed_before = f"{why[0].upper()}{why[1:]}, at {self._rank_progress.read().text}."

    def close(self) -> None:
        """End the thread."""
        self._end()


def _end(exchange: "_Exchange", thread: threading.Thread, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such thread
        exchange.stop()
        if threading.current_thread() is not thread:  # which collects garbage too
            thread.join(timeout=1.0)


class _Exchange:
    """What the thread works with."""

    def __init__(
        self,
        rank_progress: RankProgress,
        store: dist.Store,
        group: dist.ProcessGroup,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
    ) -> None:
        self._rank_progress, self._store, self._rank, self._ranks = rank_progress, store, rank, ranks
        self._group, self._ends_waits = weakref.ref(group), torch_private.groups.is_gloo(group)
        share = timeout.total_seconds() / _POLLS_PER_TIMEOUT
        self._poll_seconds = min(max(share, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS)
        self._look_seconds = min(self._poll_seconds, _LOOK_SECONDS)
        self._gather_seconds = 1.0 + _GATHER_POLLS * self._poll_seconds
        self._wake = threading.Event()
        self._stopped = False
        self.reason = ""
        self._failure: Position | None = None
        self._report: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._world = weakref.ref(dist.group.WORLD)

    # ---- in the rank's own thread ------------------------------------------------------------------------------------

    def ask(self, position: Position) -> Report:
        """The report, or what there is without the store."""
        if len(self._ranks) == 1:
            return Report(compare(self._ranks, self._rank, {self._rank: position}))
        self._failure = position
        self._wake.set()
        report = None
        seconds = self._gather_seconds + 3 * self._poll_seconds + OUTLAST_SECONDS + 1.0
        with contextlib.suppress(queue.Empty):  # the store's host may be stopped: the thread never comes back
            report = self._report.get(timeout=seconds)
        if report is not None:
            return report
        own = compare(self._ranks, self._rank, {self._rank: position}).partition("\n")[2]
        return Report(f"The store does not answer, so nothing is known of other ranks.\n{own}")

    def positions(self) -> Mapping[int, Position]:
        """Where ranks stand, by place in the group, while nothing has failed; without those that do not answer."""
        own = self._rank_progress.read()
        return self._answers(own, self._ask_all(own, failed=False)) if len(self._ranks) > 1 else {self._rank: own}

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    # ---- in the thread that answers ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer requests until stopped, until this rank's own wait has failed, or until the store is gone."""
        try:
            with contextlib.suppress(dist.DistError):  # the store is gone, and with it everyone who could ask
                self._answer_requests()
                if self.reason:
                    self._report.put(Report(self.reason, is_reason=True))
                elif self._failure is not None and not self._stopped:
                    self._report.put(self._gather(self._failure))
        finally:  # also of what a user's store raises: a rank that has failed waits for the report
            self._report.put(None)

    def _answer_requests(self) -> None:
        answered, polled, before = 0, time.monotonic(), self._rank_progress.standing
        self._store = torch_private.groups.with_own_connection(self._store)
        while not self._wake.wait(self._look_seconds) and dist.is_initialized() and self._world_lives():
            now = self._rank_progress.standing
            stands_still, before = now == before, now
            if stands_still and self._ends_waits:
                self._look_for_those_who_parted()
            if stands_still or time.monotonic() - polled >= self._poll_seconds:
                polled, requests = time.monotonic(), self._requests()
                if requests > answered:
                    self._answer(Answer(requests, False, self._rank_progress.read()))
                    self._learn_reason()
                    answered = requests
            if self.reason:
                break

    def _world_lives(self) -> bool:
        return dist.group.WORLD is self._world()

    def _requests(self) -> int:
        """How many there have been. Never waits: `check` and `add` answer at once."""
        return self._store.add(_REQUESTS, 0) if self._store.check([_REQUESTS]) else 0

    def _answer(self, answer: Answer) -> None:
        self._store.set(f"hang/answer/{self._rank}", answer.encode())

    def _gather(self, own: Position) -> Report:
        """Ask all ranks where they stand; compare what comes within the time that three polls take."""
        request = self._ask_all(own, failed=True)
        self._learn_reason()
        if self.reason:
            return Report(self.reason, is_reason=True)
        positions = self._answers(own, request)
        report = self._with_first_verdict(compare(self._ranks, self._rank, positions))
        self._outlast(_REPORTED, len(positions))
        return Report(report)

    def _outlast(self, key: str, ranks: int) -> None:
        """Stay until so many have come here, for a second and a look at most: the store may end with this process."""
        known, deadline = self._store.add(key, 1), time.monotonic() + OUTLAST_SECONDS + self._look_seconds
        while known < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            known = self._store.add(key, 0)

    def _ask_all(self, own: Position, *, failed: bool) -> int:
        request = self._store.add(_REQUESTS, 1)
        self._answer(Answer(request, failed, own))
        return request

    def _answers(self, own: Position, request: int) -> Mapping[int, Position]:
        """By place in the group."""
        positions = {self._rank: own}
        deadline = time.monotonic() + self._gather_seconds
        while len(positions) < len(self._ranks) and time.monotonic() < deadline:
            for rank in range(len(self._ranks)):
                key = f"hang/answer/{rank}"
                if rank not in positions and self._store.check([key]):
                    answer = Answer.decode(self._store.get(key).decode())
                    if answer.failed or answer.request >= request:
                        positions[rank] = answer.position
            time.sleep(min(0.1, self._poll_seconds))
        return positions

    def _with_first_verdict(self, report: str) -> str:
        """A rank that comes late has caught up by the time it fails; the first one to fail saw who was behind."""
        verdict, _, _ = report.partition("\n")
        first = self._store.compare_set(_FIRST_VERDICT, "", verdict).decode()
        return report if first == verdict else f"The first rank to give up found: {first}\nThis one, now: {report}"

    # ---- ranks on different courses ----------------------------------------------------------------------------------

    def _look_for_those_who_parted(self) -> None:
        """This rank has not gone on for a while: say so, or find who will never come to what it waits for."""
        if self._rank_progress.is_in_backward:
            self._store.set(_IN_BACKWARD, json.dumps(self._rank_progress.at_most_broadcasts()))
            return
        own = self._rank_progress.at_most_backwards()
        if own.broadcasts and self._store.check([_IN_BACKWARD]):
            other = Course(*json.loads(self._store.get(_IN_BACKWARD)))
            if own.has_parted_from(other):
                self._publish_reason()

    def _publish_reason(self) -> None:
        positions = self.positions()
        if who_parted(self._ranks, positions):
            self._store.compare_set(_REASON, "", compare(self._ranks, self._rank, positions))
            self._store.add(_REQUESTS, 1)  # which is all that the others look at
            self._learn_reason()

    def _learn_reason(self) -> None:
        """If ranks have found out why they wait in vain, end the waits of this one, when all know it."""
        if self.reason or not self._store.check([_REASON]):
            return
        self.reason = self._store.get(_REASON).decode()
        self._outlast(_REASON_KNOWN, len(self._ranks))
        group = self._group()
        if self._ends_waits and group is not None:
            torch_private.groups.end_waits(group)


# ---- words -----------------------------------------------------------------------------------------------------------


def compare(ranks: Sequence[int], own: int, positions: Mapping[int, Position]) -> str:
    """A line that says who is behind or silent, then where each rank stands, equal ones together.

    `positions` is by place in `ranks`, which are global; a place that is missing did not answer.
    """
    groups: dict[Position, list[int]] = {}
    for place in [own, *(place for place in sorted(positions) if place != own)]:
        groups.setdefault(positions[place], []).append(place)
    lines = [_verdict(ranks, positions)]
    for position, places in list(groups.items())[:_MOST_GROUPS]:
        lines.append(f"  {_format_ranks(ranks, places)}: {position.text}")
        if position.python:
            lines.append(f"    Python: {' < '.join(position.python)}")
    left_out = [place for places in list(groups.values())[_MOST_GROUPS:] for place in places]
    if left_out:
        lines.append(f"  and {len(left_out)} more ranks at {len(groups) - _MOST_GROUPS} other positions")
    return "\n".join(lines)


def who_parted(ranks: Sequence[int], positions: Mapping[int, Position]) -> str:
    """Who has begun a forward instead of a backward; empty where nobody has. [Note: ranks on different courses]"""
    on_course: dict[Course, list[int]] = {}  # of thousands of ranks most are on one
    for place, position in positions.items():
        on_course.setdefault(position.course, []).append(place)
    parted, others = set[int](), set[int]()
    for (course, places), (other, places_of_other) in itertools.permutations(on_course.items(), 2):
        if course.has_parted_from(other):
            parted.update(places)
            others.update(places_of_other)
    if not parted:
        return ""
    counts = ", ".join(f"rank {ranks[place]}: {positions[place].point[0]}" for place in sorted(positions))
    one = len(parted) == 1
    return (
        f"{_format_ranks(ranks, sorted(parted))} {'has' if one else 'have'} begun another forward, which brings the "
        f"buffers of the group's first rank, where {_format_ranks(ranks, sorted(others))} "
        f"{'is' if len(others) == 1 else 'are'} in the backward of the one before. Synchronised forwards begun since "
        f"wrapping, {counts}. A rank that drops a step after its forward (if loss.isnan(): continue) must call "
        "skip_step() in place of backward, and a forward that other ranks do not run belongs on wrapper.module, under "
        "torch.no_grad(). Nothing of this step was averaged: load the latest checkpoint in new processes."
    )


def _verdict(ranks: Sequence[int], positions: Mapping[int, Position]) -> str:
    parted = who_parted(ranks, positions)
    if parted:
        return parted
    silent = [place for place in range(len(ranks)) if place not in positions]
    launches = {place: position.launches for place, position in positions.items()}
    points = {place: position.point for place, position in positions.items()}
    most, fewer, earlier = max(launches.values()), _behind(launches), _behind(points)
    found = []
    if silent:
        found.append(
            f"{_format_ranks(ranks, silent)} did not answer: stopped, ended, cut off, or in code that holds "
            "Python's lock."
        )
    if fewer or earlier:
        behind = fewer or earlier
        why = f"collectives launched: {min(positions[place].launches for place in behind)}, by others {most}"
        be = "is" if len(behind) == 1 else "are"
        found.append(f"{_format_ranks(ranks, behind)} {be} behind ({why if fewer else 'at an earlier point'}).")
    return " ".join(found) or f"No rank is behind (collectives launched by each: {most})."


def _behind(progress: Mapping[int, Any]) -> list[int]:
    """The places that are furthest behind; none where all are equal."""
    least = min(progress.values())
    return [place for place in sorted(progress) if progress[place] == least] if least < max(progress.values()) else []


def _format_ranks(ranks: Sequence[int], places: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 4-63": global numbers, consecutive ones together."""
    runs: list[list[int]] = []
    for rank in sorted(ranks[place] for place in places):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    more = f" and {len(words) - 10} more runs of ranks" if len(words) > 10 else ""
    return f"rank{'s' if len(places) > 1 else ''} {', '.join(words[:10])}{more}"
