"""The ranks that functional gradients are reduced over, and what each of them launches next."""

import array
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.checks.proof import Proof, Recording, conclude_together
from compiled_ddp.functional.agreements import Agreements, ReductionOrder
from compiled_ddp.functional.wanted import Agreed, Arrival, Wanted
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.plan import COUNT_MODULUS, FIRST_USED
from compiled_ddp.planning.planners import Planner
from compiled_ddp.ranks import communicator as ranks
from compiled_ddp.ranks.host_numbers import LateRows, to_copy
from compiled_ddp.ranks.rank_group import RankGroup

# ---- what the leading riders of a reduction tell, and reading it without making a GPU wait ---------------------------

# | element | value on each rank, summed over ranks |
# |---|---|
# | `_CALL`, `_CALL_SQUARED` | reductions begun, modulo `COUNT_MODULUS`, and its square |
# | `_DEPARTED` | 1 where this rank cannot launch what all expect, and has sent zeros |
# | `_REMAINING` | how many more this rank launches before it looks at what the others tell |
# | `_WISHES` | 1 where a rank wishes to see the next launch of this reduction proven |
# | `_GROUPS`, `_GROUPS_SQUARED` | on how many communicators this rank launches before it looks, and its square |
_CALL, _CALL_SQUARED, _DEPARTED, _REMAINING, _WISHES, _GROUPS, _GROUPS_SQUARED = range(7)


class Leading:
    """The leading riders of a reduction: a `tensor`, which the host writes in each call."""

    def __init__(self, device: torch.device) -> None:
        # On CPU the tensor is memory of Python's: operators would take longer to write seven numbers into it.
        self._on_host = array.array("f", bytes(4 * FIRST_USED)) if device.type == "cpu" else None
        with torch_private.tracing.outside_of_traces():
            if self._on_host is not None:
                self.tensor = torch.asarray(self._on_host, dtype=torch.float32, device="cpu", copy=False)
            else:
                self.tensor = torch.zeros(FIRST_USED, dtype=torch.float32, device=device)

    def write(self, *, call: int, remaining: int, groups: int, departs: bool = False, wishes: bool = False) -> None:
        values = [0.0] * FIRST_USED
        values[_CALL] = float(call % COUNT_MODULUS)
        values[_CALL_SQUARED] = values[_CALL] ** 2
        values[_DEPARTED], values[_REMAINING], values[_WISHES] = float(departs), float(remaining), float(wishes)
        values[_GROUPS], values[_GROUPS_SQUARED] = float(groups), float(groups) ** 2
        if self._on_host is not None:
            self._on_host[:] = array.array("f", values)
            return
        with torch_private.tracing.outside_of_traces():
            self.tensor.copy_(to_copy(values, self.tensor.device), non_blocking=True)


@dataclass(frozen=True)
class Turn:
    """What the summed riders of one reduction say, on all ranks alike."""

    departed: int  # ranks that could not launch what was expected
    ends: bool  # whether every rank looks at the riders behind this reduction
    same_call: bool
    wishes: bool  # whether some rank wishes to see the next launch proven
    same_groups: bool  # whether all ranks launch on as many communicators before they look

    @classmethod
    def of(cls, sums: Sequence[float], world_size: int) -> "Turn":
        same_call = world_size * sums[_CALL_SQUARED] == sums[_CALL] ** 2
        same_groups = world_size * sums[_GROUPS_SQUARED] == sums[_GROUPS] ** 2
        return cls(int(sums[_DEPARTED]), sums[_REMAINING] == 0, same_call, sums[_WISHES] > 0, same_groups)


def are_sound(sums: Tensor, world_size: int) -> Tensor:
    """Whether one reduction has summed what ranks were to send, in the same call: in a graph, by its summed riders."""
    call, squared = sums[_CALL], sums[_CALL_SQUARED]
    return (sums[_DEPARTED] == 0) & (world_size * squared == call * call)


class Departures:
    """The launches since the first one in which a rank has departed, as far as this rank has read of them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._turns: list[Turn] = []

    def note(self, turns: Sequence[Turn]) -> None:
        first = 0 if self._turns else next((n for n, turn in enumerate(turns) if turn.departed), len(turns))
        self._turns += turns[first:]

    @property
    def launches(self) -> int:
        return len(self._turns)

    @property
    def ends(self) -> int:
        """How often all ranks were about to look at the riders."""
        return sum(turn.ends for turn in self._turns)

    @property
    def are_everybodys(self) -> bool:
        """Whether no rank has launched what was expected, nor is about to."""
        return bool(self._turns) and all(turn.departed == self._world_size and turn.ends for turn in self._turns)


class TurnReader:
    """Reads what ranks tell at once on CPU, elsewhere when the next ones are read: a GPU is not waited for."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.was_at_once = True  # whether what was read last is of what was launched last
        self._late = LateRows()

    def read(self, sums: Sequence[Tensor]) -> list[Turn]:
        """What has come to be known, in order. Where a rank has departed, everything."""
        self.was_at_once = sums[0].device.type == "cpu"
        if self.was_at_once:
            return [self._turn(row.tolist()) for row in sums]
        earlier = self.rest()
        self._late.copy(sums, sums[0].device)
        return [*earlier, *self.rest()] if any(turn.departed for turn in earlier) else earlier

    def rest(self) -> list[Turn]:
        """What has been launched and not been told yet."""
        return [self._turn(row) for row in self._late.take()]

    def _turn(self, row: Sequence[float]) -> Turn:
        return Turn.of(row, self._world_size)


# ---- the ranks -------------------------------------------------------------------------------------------------------


class Communicator:
    """A communicator over ranks, for one gradient function or to be shared by several.

    `process_group` is one of torch.distributed's; None means the default one. The collectives run on a group of their
    own, created when the first function that uses it is called. Functions that share a communicator must be called in
    the same order on every rank; a function that is given none creates its own.

    [Note: every rank launches what all expect] What is launched next follows from what has been launched, which is the
    same on all ranks. So a rank that wants something else sends zeros in the shape of what is expected, and says so in
    the riders: collectives of different sizes never meet. Only then do ranks compare, through the store, what they
    want. The others may be in a graph that launches more before they look; so it sends zeros until none is.
    """

    @suggests_keywords
    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not in it."""
        self.agreements = Agreements.of(process_group)
        self._ranks = RankGroup(process_group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self.order = ReductionOrder(self.world_size)
        self._is_in_graphs = False  # of others, which call the group by its name and cannot be told of another one
        self._begin_anew()
        self.agreements.groups.add(self)

    def _begin_anew(self) -> None:
        """Reset to the state before the first agreement, when there is no group yet."""
        self._made: ranks.Communicator | None = None
        self._calls = 0
        self.order.forget_launches()
        self._reader = TurnReader(self.world_size)
        self._proofs: dict[Agreed, Proof] = {}  # of all that has been launched
        self._wished: set[Proof] = set()  # whose next launches some rank wishes to see proven
        self._recorded: list[tuple[Proof, Recording]] = []  # which ranks have not compared yet
        self._all_look = False  # whether the latest launch is one behind which all ranks look at the riders
        self._are_alike = True  # whether all ranks launch on as many communicators before they look
        self.departures = Departures(self.world_size)

    @property
    def name(self) -> str:
        """Identifies the communicator; the same on every rank."""
        return self._ranks.name

    @property
    def is_open(self) -> bool:
        """Whether there is a group of its own that can be closed."""
        return self._made is not None and not self._is_in_graphs

    @property
    def waits_for_this_rank(self) -> bool:
        """Whether some rank has launched more on the group than this one."""
        return self._own().waits_for_this_rank

    def close(self) -> None:
        """End this rank's part in the group; the next agreement makes another one. What ranks have agreed on stays."""
        if self._made is not None and not self._is_in_graphs:
            self._made.close()
            self._begin_anew()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group that the user passed."""
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

    def note_agreed(self, wanted: Wanted, arrival: Arrival, *, is_next: bool = True) -> Agreed:
        """All ranks have agreed on this reduction, through the store. Makes the group at the first one. A collective.

        The first one without a size of its buckets measures the link. It is the next one, or one that others put into
        their graphs.
        """
        if self._made is None:
            remedy = "make the gradient functions anew on every rank"
            self._made = ranks.Communicator(self._ranks, occasion=self.agreements.occasion, remedy=remedy)
            self.agreements.groups.note_open(self.name)
        if wanted.scattered is not None and wanted.scattered.by == "exchange":
            self._made.exchange_both_ways()
        agreed = self.order.known(wanted)
        if agreed is None:
            agreed = Agreed(wanted, arrival, self.world_size, self._planner(wanted))
            self.order.add(agreed)
        self._made.sum_rows(agreed.rows)
        if is_next:
            self.order.note_next(agreed)
        else:
            self._is_in_graphs = True
            self.agreements.groups.note_kept(self.name)
        return agreed

    def _planner(self, wanted: Wanted) -> Planner:
        if wanted.planner is not None:
            return wanted.planner
        planner = self.agreements.planner(self._own(), wanted.device)
        return planner if wanted.scattered is None else planner.of_shares()

    def begin(
        self, leading: Leading, *, remaining: int, groups: int = 1, departs: bool = False, wishes: bool = False
    ) -> Agreed:
        """Note that the next launch comes, and write what this rank tells the others of it into `leading`.

        It launches `remaining` more here before it looks at theirs, on so many `groups` in all, and `wishes` to see the
        next one proven. Raises RuntimeError once a wait has failed.
        """
        own = self._own()
        own.refuse_if_failed()
        agreed = self.order.note_launched()
        proof = self._proofs.get(agreed)
        if proof is None:
            verify = "first" if agreed.wanted.hook is None else "off"  # of whose results no sum tells anything
            proof = self._proofs[agreed] = Proof(agreed, own, verify, function=agreed.wanted.function)
        proof.begin_backward()
        self._calls += 1
        own.progress.forward_began(self._calls)
        own.progress.note_wait(f"the gradients of {agreed.wanted.function}")
        leading.write(call=self._calls, remaining=remaining, groups=groups, departs=departs, wishes=wishes)
        return agreed

    # ---- what other ranks tell ---------------------------------------------------------------------------------------

    def look(self, sums: Sequence[Tensor]) -> None:
        """Take note of what the riders of the latest launches say."""
        self._own().progress.note_wait("")
        launched = self.order.latest(len(sums))
        turns = self._reader.read(sums)
        if self._recorded or any(self.proof_of(agreed).verifies for agreed in launched):
            turns += self._reader.rest()
        self._note_turns(turns)
        self._all_look = bool(turns) and turns[-1].ends
        self._are_alike = all(turn.same_groups for turn in turns)
        if self._reader.was_at_once:
            wished = zip(launched, turns, strict=True)
            self._wished.update(self.proof_of(agreed) for agreed, turn in wished if turn.wishes)
        if self._all_look:
            for proof in self._wished:
                proof.renew()
            self._wished.clear()

    def proof_of(self, agreed: Agreed) -> Proof:
        """The proof of a reduction that has been launched."""
        return self._proofs[agreed]

    def prove(self, recorded: Sequence[tuple[Proof, Recording]]) -> None:
        """Compare what a reduction has made of the gradients, when all ranks do. Raises RuntimeError on every rank.

        They never do where some launch one by one, and wait for each, what others launch from one graph on several
        communicators.
        """
        if self._are_alike:
            self._recorded += recorded
            if self._all_look:
                due, self._recorded = self._recorded, []
                conclude_together(self._own(), due)

    def _note_turns(self, turns: Sequence[Turn]) -> None:
        if not all(turn.same_call for turn in turns):
            raise self._own().give_up(
                f"the ranks have called {self.order.latest(1)[0].wanted.function} in different steps: on this one it "
                f"was reduction {self._calls}, on others another one. Call it the same number of times on every rank"
            )
        self.departures.note(turns)

    def depart(self) -> None:
        """Send zeros for the next launch, and tell the others that this rank wants another one, or cannot go on."""
        agreed_next = self.order.ahead(1)[0]
        leading = Leading(agreed_next.wanted.device)
        with torch_private.tracing.outside_of_traces():
            agreed = self.begin(leading, remaining=0, departs=True)
            with self._explaining(agreed.wanted.function):
                sums = agreed.launch_zeros(leading.tensor, self.group_name)
            self.look([sums])
            self._note_turns(self._reader.rest())

    @property
    def ends_to_know(self) -> int:
        """How often ranks look at riders until all know of those of a launch: a GPU tells them when they look again."""
        return 1 if self.order.ahead(1)[0].wanted.device.type == "cpu" else 2

    def forget_departures(self) -> None:
        """All ranks know of them. What was launched since the first one says nothing about what follows what."""
        if self.departures.launches:
            self.agreements.forget_order()
        self.order.forget_latest(self.departures.launches)
        self.departures = Departures(self.world_size)
        for proof in self._proofs.values():
            proof.forget_wrong()
        self._recorded = []

    # ---- errors ------------------------------------------------------------------------------------------------------

    def give_up(self, why: str) -> RuntimeError:
        return self._own().give_up(why)

    def failure(self, what: str, error: Exception) -> RuntimeError:
        """`error`, of a collective that reduces the gradients of `what`, with a report of where every rank stands."""
        here = self._ranks.global_rank
        return self._own().failure(error, f"rank {here}: the gradients of {what} could not be reduced")

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """Raise a RuntimeError in here, of a collective, as `failure`, unless another rank has closed its end."""
        try:
            yield
        except RuntimeError as error:
            if self.agreements.is_called:
                raise
            raise self.failure(what, error) from error
