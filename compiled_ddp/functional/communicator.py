"""The ranks that functional gradients are reduced over, and what each of them launches next."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.checks.proof import Proof, Recording, conclude_together
from compiled_ddp.functional.agreements import Agreements
from compiled_ddp.functional.launch_order import ReductionOrder
from compiled_ddp.functional.turn_riders import Departures, Turn, TurnReader, new_leading, write_turn
from compiled_ddp.functional.wanted import Agreed, Wanted
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.ranks import communicator as ranks
from compiled_ddp.ranks.rank_group import RankGroup


class Communicator:
    """A communicator over ranks, for one gradient function or to be shared by several.

    `process_group` is a process group of torch.distributed's, None for the default one. The collectives run on a group
    of their own, which is made when its first user is called. Functions that share a communicator must be called in
    the same order on every rank; each of them has one of its own where none is given.

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
        """With a group that has yet to be made."""
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
        """The same on every rank."""
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

    def note_agreed(self, wanted: Wanted, order: tuple[int, ...], *, is_next: bool = True) -> Agreed:
        """All ranks have agreed on this reduction, through the store. Makes the group at the first one. A collective.

        The first one without a size of its buckets measures the link. It is the next one, or one that others put into
        their graphs.
        """
        if self._made is None:
            remedy = "make the gradient functions anew on every rank"
            self._made = ranks.Communicator(self._ranks, occasion=self.agreements.occasion, remedy=remedy)
            self.agreements.groups.note_open(self.name)
        agreed = self.order.known(wanted)
        if agreed is None:
            cap_mb = wanted.bucket_cap_mb
            if cap_mb is None:
                cap_mb = self.agreements.bucket_cap_mb(self._made, wanted.device)
            agreed = Agreed(wanted, order, self.world_size, cap_mb)
            self.order.add(agreed)
        if is_next:
            self.order.note_next(agreed)
        else:
            self._is_in_graphs = True
            self.agreements.groups.note_kept(self.name)
        return agreed

    def begin(
        self, leading: Tensor, *, remaining: int, groups: int = 1, departs: bool = False, wishes: bool = False
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
            proof = self._proofs[agreed] = Proof(agreed, own, function=agreed.wanted.function)
        proof.begin_backward()
        self._calls += 1
        own.progress.forward_began(self._calls)
        own.progress.note_wait(f"the gradients of {agreed.wanted.function}")
        write_turn(leading, call=self._calls, remaining=remaining, groups=groups, departs=departs, wishes=wishes)
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
        """That of one that has been launched."""
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
        leading = new_leading(agreed_next.wanted.device)
        with torch_private.tracing.outside_of_traces():
            agreed = self.begin(leading, remaining=0, departs=True)
            with self._explaining(agreed.wanted.function):
                *_, sums = agreed.launch(*agreed.zeros(), leading, self.group_name)
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
        here = self._ranks.ranks[self.rank]
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
