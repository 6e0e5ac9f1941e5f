"""The ranks that functional gradients are reduced over, and what each of them launches next."""

import contextlib
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.functional.agreements import Agreements
from compiled_ddp.functional.proof import Evidence, Proof
from compiled_ddp.functional.turn_riders import Departures, Turn, TurnReader, new_leading, write_turn
from compiled_ddp.functional.wanted import SEEN, Agreed, Wanted, likely_next
from compiled_ddp.ranks import communicator as ranks

_REMEMBERED = 4096  # launches


class Communicator:
    """Ranks, for one gradient function or for several.

    `process_group` is a process group of torch.distributed's, None for the default one. The collectives run on a group
    of their own, which is made when its first user is called. Functions that share a communicator must be called in
    the same order on every rank; each of them has one of its own where none is given.

    [Note: every rank launches what all expect] What is launched next follows from what has been launched, which is the
    same on all ranks. So a rank that wants something else sends zeros in the shape of what is expected, and says so in
    the riders: collectives of different sizes never meet. Only then do ranks compare, through the store, what they
    want. The others may be in a graph that launches more before they look; so it sends zeros until none is.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not in it."""
        self.agreements = Agreements.of(process_group)
        self._ranks = ranks.RankGroup(process_group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self._made: ranks.Communicator | None = None
        self._calls = 0
        self._known: dict[Wanted, Agreed] = {}
        self._past: list[Agreed] = []
        self._agreed_ahead: list[Agreed] = []
        self._reader = TurnReader(self.world_size)
        self.proof = Proof()
        self._all_look = False  # whether the latest launch is one behind which all ranks look at the riders
        self.departures = Departures(self.world_size)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The user's."""
        return self._ranks.process_group

    @property
    def group_name(self) -> str:
        """What graphs call the group that gradients are reduced on."""
        return self._own().group_name

    def _own(self) -> ranks.Communicator:
        assert self._made is not None, "no agreement yet"
        return self._made

    # ---- what is launched next ---------------------------------------------------------------------------------------

    @property
    def made(self) -> "ranks.Communicator | None":
        """The group of its own, once there is one."""
        return self._made

    def known(self, wanted: Wanted) -> Agreed | None:
        return self._known.get(wanted)

    def ahead(self, number: int) -> list[Agreed]:
        """The next launches, as every rank expects them; none before the first agreement."""
        found = self._agreed_ahead[:number]
        past = [*self._past[-SEEN:], *found]
        while len(found) < number and (follows := likely_next(past)) is not None:
            found.append(follows)
            past.append(follows)
        return found

    def unexpected(self, wanted: Sequence[Wanted]) -> int:
        """How many of these, the next launches, ranks must agree on: up to the last one that none would expect."""
        past, ahead, last = self._past[-SEEN:], [*self._agreed_ahead], 0
        for number, each in enumerate(wanted, start=1):
            expected = ahead.pop(0) if ahead else likely_next(past)
            if expected is None or expected.wanted != each:
                last = number
                ahead.clear()
            past.append(self._known.get(each) or Agreed(each, (), self.world_size))
        return last

    def note_agreed(self, wanted: Wanted, order: tuple[int, ...], *, is_next: bool = True) -> Agreed:
        """All ranks have agreed on this reduction, through the store. Makes the group at the first one."""
        agreed = self._known.setdefault(wanted, Agreed(wanted, order, self.world_size))
        if is_next:
            self._agreed_ahead.append(agreed)
        if self._made is None:
            self._made = ranks.Communicator(self._ranks)
        return agreed

    def begin(self, leading: Tensor, *, remaining: int, departs: bool = False, wishes: bool = False) -> Agreed:
        """Note that the next launch comes, and write what this rank tells the others of it into `leading`.

        It launches `remaining` more before it looks at theirs, and `wishes` to see the next one proven. Raises
        RuntimeError once a wait has failed.
        """
        own = self._own()
        own.refuse_if_failed()
        (agreed,) = self.ahead(1)
        self._past.append(agreed)
        if len(self._past) > 2 * _REMEMBERED:
            del self._past[:_REMEMBERED]
        self._agreed_ahead = self._agreed_ahead[1:]
        self.proof.note_launch(agreed)
        self._calls += 1
        own.progress.forward_began(self._calls)
        own.progress.note_wait(f"the gradients of {agreed.wanted.function}")
        write_turn(leading, call=self._calls, remaining=remaining, departs=departs, wishes=wishes)
        return agreed

    # ---- what other ranks tell ---------------------------------------------------------------------------------------

    def look(self, sums: Sequence[Tensor]) -> None:
        """Take note of what the riders of the latest launches say."""
        self._own().progress.note_wait("")
        launched = self._past[-len(sums) :]
        turns = self._reader.read(sums)
        if self.proof.is_pending or any(map(self.proof.verifies, launched)):
            turns += self._reader.rest()
        self._note_turns(turns)
        self._all_look = bool(turns) and turns[-1].ends
        if self._reader.was_at_once:
            self.proof.note_wishes([agreed for agreed, turn in zip(launched, turns, strict=True) if turn.wishes])
        if self._all_look:
            self.proof.heed_wishes()

    def prove(self, evidence: Sequence[Evidence]) -> None:
        """Compare what a reduction has made of the gradients, when all ranks do. Raises RuntimeError on every rank."""
        for each in evidence:
            self.proof.note(each)
        if self._all_look:
            self.proof.conclude(self._own())

    def _note_turns(self, turns: Sequence[Turn]) -> None:
        if not all(turn.same_call for turn in turns):
            raise self._own().give_up(
                f"the ranks have called {self._past[-1].wanted.function} in different steps: on this one it was "
                f"reduction {self._calls}, on others another one. Call it the same number of times on every rank"
            )
        self.departures.note(turns)

    def depart(self) -> None:
        """Send zeros for the next launch, and tell the others that this rank wants another one, or cannot go on."""
        agreed_next = self.ahead(1)[0]
        leading = new_leading(agreed_next.wanted.device)
        with torch_private.tracing.outside_of_traces():
            agreed = self.begin(leading, remaining=0, departs=True)
            with self.explaining(agreed.wanted.function):
                *_, sums = agreed.launch(*agreed.zeros(), leading, self.group_name)
            self.look([sums])
            self._note_turns(self._reader.rest())

    def depart_until_known(self, ends: int) -> None:
        """Depart until, since the first rank did, this often all ranks have been about to look at the riders."""
        while self.departures.ends < ends:
            self.depart()

    @property
    def ends_to_know(self) -> int:
        """How often ranks look at riders until all know of those of a launch: a GPU tells them when they look again."""
        return 1 if self.ahead(1)[0].wanted.device.type == "cpu" else 2

    def forget_departures(self) -> None:
        """All ranks know of them. What was launched since the first one says nothing about what follows what."""
        del self._past[len(self._past) - self.departures.launches :]
        self.departures, self._agreed_ahead = Departures(self.world_size), []
        self.proof.forget()

    # ---- errors ------------------------------------------------------------------------------------------------------

    def give_up(self, why: str) -> RuntimeError:
        return self._own().give_up(why)

    def explaining(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Raise a RuntimeError in here, of a collective, with a report of where every rank stands."""
        return self._own().explaining(f"the gradients of {what} could not be reduced")
