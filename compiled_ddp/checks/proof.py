"""Proving that gradients were reduced: what each is after the reduction is what the ranks' own ones add up to.

[Note: all ranks verify or none does] A backward that verifies ends with two collectives more, so every rank must know
by then that it is one. It is one because of what all ranks know alike: the number of synchronised backwards, what the
last such exchange left unverified, or a wish a rank has sent in the riders. A rank whose backward broke off, or that
raises because of what the riders say, takes part all the same, and proves nothing.

[Note: two steps of a proof] From gradients to buckets: what lies in a graph's bucket before it is launched is compared
with the same backward without the passes, where the graph is new (`checks.values`); hooks' gradients are noted where
autograd leaves them. From there to the result: sums with random signs, of what each rank brings and of what comes out
(`checks.sums`), and checksums, which must be the same on all ranks.

[Note: two collectives] What ranks tell each other of reduced gradients. The first adds up what ranks have brought:
[Note: proof by random signs]. The second takes maxima: of what each rank finds by it, and of checksums, which are equal
where their maximum is their minimum.
"""

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.checks.sums import (
    as_row,
    batched,
    batched_in_place,
    rounding,
    rounding_of_signed_sums,
    smallest,
)
from compiled_ddp.checks.values import INFINITE, ZERO, Reference, compare, explained, fill_with_pattern
from compiled_ddp.formatting import format_names
from compiled_ddp.plan import Bucket, BucketPlan, GradientSpec
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import LaunchObserver

# Under verify="first", the backwards that verify while gradients are unverified, counted from the first one and again
# from each that ran a new graph; in these the graph is compared again, while that has told nothing of some gradients.
# Beyond them a gradient stays so, and `explain()` lists it. Of a functional reduction the launches up to
# `_LAUNCHES_UP_TO` verify whatever is proven: each may come from another graph than the one before.
TRIES = (1, 2, 4, 8, 16, 32, 64)
_LAUNCHES_UP_TO = 8

_OF_A_FAULT = 0.5  # of a gradient, that a fault changes, and so of its signed sum, which may be small by chance
_VAGUE_FROM = 0.25  # of a result, as a norm, that rounding may change: more is near a fault whatever the signs

# Why a gradient was not proven in a backward; of several ranks' reasons the largest one counts.
_NOTHING = 0
_LEFT_OUT = 1  # a graph, of which everything is seen, has not reduced it
_NOT_SEEN = 2  # its launch: the backward did not record, or the graph launches from C++
_NO_GRADIENT = 3
_NOT_FINITE = 4
_BROKEN_OFF = 5  # or neither what went in nor what came out was seen

_WORDS = {_NO_GRADIENT: "no gradient so far", _NOT_FINITE: INFINITE}
_EQUAL = "zero or equal gradients so far"  # which a communication hook reduces
_VAGUE = "so far a fault could be taken for rounding"
_DIFFERENT = "different on the ranks after the reduction"
_NOT_THE_SUM = "not what the ranks' gradients add up to"
_WRONG_IN_BUCKET = "wrong in its bucket"
_UNKNOWN = "not looked at yet"
_NEW = "in a new graph, not looked at yet"
_UNPLANNED = "the graph launched other collectives than planned"
_UNSEEN = "the graph launches where nobody can look, and ran first in a backward that did not verify"

_REMEDY = (
    "COMPILED_DDP_MODE=hooks in the environment reduces everything by hooks; if that helps, please report the model "
    "with the output of explain()."
)
_REMEDY_OF_FUNCTIONS = "Please report the function; eager calls, without compiled_ddp.functional.compile, may be right."
_NO_SUM_OF_FUNCTIONS = (
    "rank {rank}: the gradients of {functions} with respect to {named} are not the sum over ranks: on some rank they "
    f"were left out, added twice, or changed on the way. {_REMEDY_OF_FUNCTIONS}"
)


@dataclass(frozen=True)
class _Errors:
    """What is raised for gradients `named`, by what is wrong with them."""

    in_buckets: str
    different: str
    no_sums: str


_OF_WRAPPERS = _Errors(
    "rank {rank}: the gradient of {named} was reduced from a bucket in which some rank's compiled backward has left "
    "something else than its gradient ({found}). Take no step with these gradients. "
    f'{_REMEDY} verify="off" looks at nothing.',
    "rank {rank}: the gradient of {named} differs between the ranks after it was reduced: on some rank it stayed "
    "local, in whole or in part, and from here on the models would drift apart. If the model has changed since it was "
    f"wrapped, call unwrap() and wrap it again. {_REMEDY} A hook of yours that changes .grad in another way on every "
    'rank does this too: then pass verify="off".',
    "rank {rank}: the gradient of {named} is, after it was reduced, the same on all ranks, and not what their own "
    "gradients add up to: some were left out, added twice, divided wrongly, or changed on the way. Take no step with "
    f"these gradients. {_REMEDY}",
)
_OF_FUNCTIONS = _Errors(
    "rank {rank}: the gradients of {functions} with respect to {named} were reduced from a bucket in which some rank's "
    "compiled step has left something else ({found}). Use no result of it. "
    f"{_REMEDY_OF_FUNCTIONS}",
    _NO_SUM_OF_FUNCTIONS,
    _NO_SUM_OF_FUNCTIONS,
)

_NO_CONTEXT: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


# ---- what a rank has seen --------------------------------------------------------------------------------------------


class Recording:
    """What this rank brings to the reductions of one backward, or to a functional one, and what comes out of them."""

    def __init__(self, gradients: Sequence[GradientSpec]) -> None:
        """`gradients` have the strides with which they lie in buckets."""
        self.seen: set[int] = set()
        self.not_seen: set[int] = set()
        self._gradients = gradients
        # Gradients, of each its signed sum, the sum of its squares and that of what it may be off; whether it is all.
        self._brought: list[tuple[Sequence[int], Tensor, bool]] = []
        self._returned: list[tuple[Sequence[int], Tensor]] = []  # gradients, signed sums of them and of their squares
        # Gradients, of what has come out checksums, signed sums and those of squares, and whether it is finite.
        self._outcomes: list[tuple[Sequence[int], Tensor, Tensor, Tensor]] = []

    def launching(self, bucket: Bucket) -> None:
        """Hooks are about to launch it."""
        self.seen.update(bucket.indices)

    def put(self, indices: Sequence[int], gradients: Sequence[Tensor], share: float, *, is_all: bool) -> None:
        """Hooks put `share` times these gradients into buckets; with `is_all` in place of what they had put."""
        for some, batch in batched(self._rows(indices, gradients)):
            sums = (
                _scaled(batch.signed_sums(), share)
                if share
                else torch.zeros(len(some), 2, dtype=torch.float64, device="cpu")
            )
            self._brought.append((some, sums, is_all))

    def graph_launches(self, bucket: Bucket, flat_buffer: Tensor) -> None:
        self.seen.update(bucket.indices)
        if bucket.ranks > 1:
            rows = self._rows(bucket.indices, [bucket.view(each, flat_buffer) for each in bucket.gradients])
            self._brought += [(some, batch.signed_sums(), False) for some, batch in batched(rows)]
            return
        sizes = [gradient.numel for gradient in bucket.gradients]
        values = flat_buffer.narrow(0, 0, sum(sizes))
        for indices, batch in batched_in_place(bucket.indices, values, sizes):
            self._brought.append((indices, batch.signed_sums(), False))

    def graph_launches_unseen(self, plan: BucketPlan, reference: Reference | None) -> None:
        """What a graph launches cannot be looked at: it is taken for what it should be, where that is known."""
        expected = {} if reference is None else reference.expected
        known = [index for index in plan.indices if index in expected and expected[index].why_vacuous in ("", ZERO)]
        self.seen.update(known)
        self.not_seen.update(set(plan.indices).difference(known))
        for indices, batch in batched(self._rows(known, [expected[index].value for index in known])):
            off = [expected[index].tolerances()[0] ** 2 for index in indices]
            slack = torch.tensor(off, dtype=torch.float64, device="cpu").view(-1, 1)
            self._brought.append((indices, torch.cat((batch.signed_sums().cpu(), slack), dim=1), False))

    def graph_returns(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        for some, batch in batched(self._rows(indices, gradients)):
            self._returned.append((some, batch.signed_sums()))

    def come_out(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """A reduction has left these of the gradients; of several the last counts."""
        for some, batch in batched(self._rows(indices, tensors)):
            self._outcomes.append((some, batch.checksums(), batch.signed_sums(), batch.are_finite()))

    def reduced(self, gradients: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """All gradients have been reduced at once, to `sums`."""
        indices = range(len(gradients))
        self.seen.update(indices)
        self.put(indices, gradients, 1.0, is_all=True)
        self.come_out(indices, sums)

    def reduced_unseen(self) -> None:
        """What has launched and awaited them cannot be looked at."""
        self.not_seen.update(range(len(self._gradients)))

    def _rows(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        for index, tensor in zip(indices, tensors, strict=True):
            yield index, as_row(tensor.detach().resolve_conj(), self._gradients[index].stride)

    def hindrances(self) -> list[int]:
        """For each gradient why nothing is known of it, where reductions are to be seen on both sides."""
        came_out = {index for indices, *_ in self._outcomes for index in indices}
        return [
            # Where empty buckets are awaited nothing tells them apart.
            _BROKEN_OFF
            if index in self.not_seen
            else _NOTHING
            if gradient.numel == 0 or (index in self.seen and index in came_out)
            else _LEFT_OUT
            for index, gradient in enumerate(self._gradients)
        ]

    def account(
        self, hindrances: Sequence[int], device: torch.device, by_hooks: Set[int], factor: float | None
    ) -> "Account":
        """See `Proof.conclude` for `by_hooks`."""
        checksums = torch.zeros(len(self._gradients), dtype=torch.int64, device=device)
        signed = torch.zeros(len(checksums), 2, dtype=torch.float64, device=device)
        finite = torch.ones_like(checksums, dtype=torch.bool)
        for indices, *looked_at in self._outcomes:
            places = torch.tensor(indices, dtype=torch.int64, device=device)
            for of_all, of_some in zip((checksums, signed, finite), looked_at, strict=True):
                of_all[places] = of_some.to(device)
        hindered = torch.tensor(hindrances, dtype=torch.int64, device=device)
        return Account(
            self._brought_of_all(device),
            self._returned_of_all(signed, by_hooks),
            checksums,
            torch.where(finite, hindered, hindered.clamp(min=_NOT_FINITE)),
            [(gradient.dtype, gradient.numel) for gradient in self._gradients],
            factor,
        )

    def _brought_of_all(self, device: torch.device) -> Tensor:
        """Float64, shape (3, gradients); 0 where nothing was seen."""
        sums = torch.zeros(len(self._gradients), 3, dtype=torch.float64, device=device)
        for indices, added, is_all in self._brought:
            places = torch.tensor(indices, dtype=torch.int64, device=device)
            columns = added.shape[1]
            if is_all:
                sums[places] = 0.0
            # A parameter of several sections is launched in each of them.
            sums[places, :columns] += added.to(device)
        return sums.t().contiguous()

    def _returned_of_all(self, signed: Tensor, by_hooks: Set[int]) -> Tensor:
        """The signed sums of all results and those of squares, shape (2, gradients): what graphs have returned.

        Of several it is the sum. Those that hooks have left in .grad, as `signed` has them, may have that in them.
        """
        of_graphs, are_of_graphs = torch.zeros_like(signed), torch.zeros_like(signed[:, :1], dtype=torch.bool)
        for indices, sums in self._returned:
            places = torch.tensor(indices, dtype=torch.int64, device=signed.device)
            of_graphs[places] += sums.to(signed.device)
            are_of_graphs[places] = True
        are_of_graphs[torch.tensor(sorted(by_hooks), dtype=torch.int64, device=signed.device)] = False
        return torch.where(are_of_graphs, of_graphs, signed).t().contiguous()


def _scaled(sums: Tensor, share: float) -> Tensor:
    return sums * torch.tensor((share, share * share), dtype=sums.dtype, device=sums.device)


# ---- what ranks tell each other --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """What this rank has seen of a number of gradients; each tensor has a number for each, on one device.

    `brought` is float64 of shape (3, gradients): the signed sum of what it put into the reduction, the sum of squares,
    and of the squares of what the first may be off. `results` are the signed sums of what came out, and those of its
    squares: float64, shape (2, gradients). `checksums` are of that, int64, and `hindrances` why a gradient cannot be
    proven. `kinds` are dtypes and numbers of elements. A result times `factor` is the sum of what ranks have brought;
    None where nothing makes it that.
    """

    brought: Tensor
    results: Tensor
    checksums: Tensor
    hindrances: Tensor
    kinds: Sequence[tuple[torch.dtype, int]]
    factor: float | None


@dataclass(frozen=True)
class Verdict:
    """What ranks have found together, equal on every rank: on the CPU, by gradient."""

    have_values: Tensor  # some rank brought more than zeros, and all ranks finite numbers
    brought_differ: Tensor
    results_differ: Tensor
    some_are_finite: Tensor  # where the results of other ranks are not: what was reduced cannot differ in that
    are_off: Tensor  # on some rank the result is something else than the sum; not of a result that is not finite
    are_vague: Tensor  # rounding may take the sum so far off that a fault might not show
    others: Sequence[Tensor]  # the maxima of hindrances, and of what each rank added

    def split(self, sizes: Sequence[int]) -> list["Verdict"]:
        """Split into verdicts on so many gradients each."""
        kept = (
            self.have_values,
            self.brought_differ,
            self.results_differ,
            self.some_are_finite,
            self.are_off,
            self.are_vague,
        )
        parts = zip(*(each.split([*sizes]) for each in (*kept, *self.others)), strict=True)
        return [
            Verdict(values, before, after, finite, off, vague, others)
            for values, before, after, finite, off, vague, *others in parts
        ]


def exchange(communicator: Communicator, account: Account, *others: Tensor) -> Verdict:
    """Compare the accounts of all ranks. `others` are int64, a number for each gradient, of which ranks take maxima."""
    expected = account.brought.clone()
    communicator.all_reduce(expected).wait()
    off, vague = _are_off(account, expected, communicator.world_size)
    finite, not_finite = account.hindrances < _NO_GRADIENT, account.hindrances == _NOT_FINITE
    masks = [mask.to(torch.int64) for mask in (finite, not_finite, off, vague)]
    own = account.brought[0].view(torch.int64)
    shared = torch.stack((*_to_compare(own), *_to_compare(account.checksums), *masks, account.hindrances, *others))
    communicator.maximum(shared)
    have_values = ((expected[1] > 0) & expected[:2].isfinite().all(0)).cpu()
    before, before_inverted, after, after_inverted, finite, not_finite, off, vague, *found = shared.cpu()
    return Verdict(
        have_values,
        _are_unequal(before, before_inverted),
        _are_unequal(after, after_inverted),
        (finite != 0) & (not_finite != 0),
        off != 0,
        vague != 0,
        found,
    )


def _are_off(account: Account, expected: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Which results are not the sum of what ranks brought, and of which that could hardly be told."""
    (results, squares), factor = account.results, account.factor
    if factor is None:
        return torch.zeros_like(results, dtype=torch.bool), torch.zeros_like(results, dtype=torch.bool)
    results, squares = results * factor, squares * factor**2
    signed, own_squares, slack = expected
    places: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for place, (dtype, _) in enumerate(account.kinds):
        places[dtype].append(place)
    by_rounding = torch.zeros_like(results)
    for dtype, some in places.items():
        of_dtype = torch.tensor(some, dtype=torch.int64, device=results.device)
        by_rounding[of_dtype] = rounding(dtype, world_size, own_squares[of_dtype], squares[of_dtype])
    absolute = [smallest(dtype) * max(numel, 1) ** 0.5 for dtype, numel in account.kinds]
    denormals = world_size * torch.tensor(absolute, dtype=torch.float64, device=results.device)
    numbers = torch.tensor([numel for _, numel in account.kinds], dtype=torch.float64, device=results.device)
    by_signs = rounding_of_signed_sums(numbers, world_size, signed, own_squares + squares)
    allowed = by_rounding + by_signs + 4.0 * slack.sqrt() + denormals
    is_lost = results.isfinite() & ~signed.isfinite()  # a sum of what is not finite is not finite either
    are_vague = (allowed > _VAGUE_FROM * squares.sqrt()) | (allowed > _OF_A_FAULT * signed.abs())
    return ((results - signed).abs() > allowed) | is_lost, are_vague


def _to_compare(values: Tensor) -> tuple[Tensor, Tensor]:
    """Two rows whose maxima over ranks tell whether the ranks' values are equal. Unlike -x, ~x cannot overflow."""
    return values, ~values


def _are_unequal(most: Tensor, most_inverted: Tensor) -> Tensor:
    return most != ~most_inverted


# ---- what is kept from backward to backward --------------------------------------------------------------------------


class Reduced(Protocol):
    """What is proven to be reduced: gradients by their numbers, the same on every rank."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def gradients(self) -> Sequence[GradientSpec]:
        """As they lie in buckets."""
        ...


class _Meeting:
    """What has come of comparing one graph, for one plan, with its backward without the passes."""

    def __init__(self, first: int, indices: Iterable[int]) -> None:
        """It first runs in the backward number `first`, and reduces the parameters `indices`."""
        self.untold = frozenset(indices)  # of which no comparison has told anything yet
        self.due: float = first  # the backward from which on it is compared
        self._first = first

    @property
    def is_first(self) -> bool:
        return self.due == self._first

    def note_compared(self, now: int, untold: Set[int]) -> None:
        """It has been, in the backward number `now`; of these parameters a later one may tell more."""
        self.untold &= untold
        later = (self._first + tried - 1 for tried in TRIES)
        self.due = next((due for due in later if due > now), math.inf) if self.untold else math.inf

    def close(self) -> None:
        """Nothing is to be compared any more."""
        self.due = math.inf


class Proof:
    """Which gradients are proven, of a wrapper's parameters or of a functional reduction; the same on every rank.

    What is called a backward is, of a functional reduction, one launch of it.
    """

    def __init__(
        self,
        reduced: Reduced,
        communicator: Communicator,
        verify: str = "first",
        *,
        adds_up: bool = True,
        function: str = "",
    ) -> None:
        """`verify` is the wrapper's option: "first", "always" or "off".

        Without `adds_up` a communication hook reduces, whose results need not be the sum of what goes in. `function`
        is the one whose gradients a functional reduction sums.
        """
        self._communicator, self._verify, self._adds_up = communicator, verify, adds_up
        self.function, self.errors = function, _OF_FUNCTIONS if function else _OF_WRAPPERS
        self._looks_at_graphs = verify != "off"
        self._active = verify != "off" and communicator.world_size > 1
        self._why_off = 'verify="off"' if verify == "off" else ""
        self.unverified: dict[int, str] = {}  # gradient -> why
        self._tried = 0  # synchronised backwards since the first one, or since there was something new to look at
        self.verifies = False  # whether the backward under way ends with the exchange
        self.recording: Recording | None = None  # in a backward that verifies
        self.reference: Reference | None = None  # of the graph that is about to run, where it is new
        self._met: weakref.WeakKeyDictionary[Callable[..., object], dict[str, _Meeting]] = weakref.WeakKeyDictionary()
        self._meeting: _Meeting | None = None  # of the graph that is about to run, where it is to be compared
        self._begun = 0  # synchronised backwards
        self.renewed: set[int] = set()  # gradients of graphs that are new on this rank
        self._compared: set[int] = set()  # whose latest new graph has left in its bucket what it was to leave, here
        self._not_compared: dict[int, str] = {}
        self._wrong: dict[int, int] = {}  # what is wrong in buckets, of which the other ranks do not know yet
        self._reduced = reduced
        self.begin_anew(reduced)

    @property
    def device(self) -> torch.device:
        """Where ranks share what they know."""
        return self._reduced.gradients[0].device

    def name_of(self, index: int) -> str:
        return self._reduced.names[index]

    def begin_anew(self, reduced: Reduced) -> None:
        """Hold nothing for proven: the sequence that all ranks keep is about to change, and so may the parameters."""
        if reduced is not self._reduced:  # which may have other numbers
            self._met.clear()
            self._compared.clear()
            self._not_compared.clear()
        self._reduced = reduced
        self.renewed.clear()
        self._wrong.clear()
        self.unverified = dict.fromkeys(range(len(reduced.names)), _UNKNOWN)
        self.look_again()

    def look_again(self) -> None:
        """Verify the next backwards while something is unverified. On all ranks before the same backward."""
        self._tried = 0

    def renew(self) -> None:
        """Hold nothing for proven, as some rank has a new graph. On all ranks before the same backward."""
        self.unverified = dict.fromkeys(range(len(self._reduced.names)), _NEW)
        self.look_again()

    def switch_off(self, reason: str) -> None:
        """Look at nothing from here on: ranks need not agree after the reduction. On all ranks."""
        self._active, self._looks_at_graphs, self._why_off = False, False, reason

    # ---- during a backward -------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Note that a synchronised backward begins, and decide whether it verifies."""
        self._begun += 1
        if not self._active:
            self.verifies = bool(self._wrong)  # which an earlier one could not raise
            return
        self._tried += 1
        may_be_wrong = self._tried <= _LAUNCHES_UP_TO if self.function else bool(self.unverified)
        self.verifies = self._verify == "always" or (may_be_wrong and self._tried in TRIES)
        self.recording = Recording(self._reduced.gradients) if self.verifies else None

    def meet_graph(
        self,
        backward: Callable[..., object],
        fingerprint: str,
        indices: Iterable[int],
        run_without_passes: Callable[[], Reference],
    ) -> None:
        """Note that a compiled backward is about to reduce parameters `indices`, whose plan is `fingerprint`.

        A new one makes its parameters unverified again. It is run without the passes too, before it runs itself, and
        so it is in a few later backwards while that tells nothing of some of its gradients.
        """
        if self.has_met(backward, fingerprint):
            return
        meeting = self._met.setdefault(backward, {}).setdefault(fingerprint, _Meeting(self._begun, indices))
        # Where this backward does not verify, the other ranks must be asked to, or they would not hear what is wrong.
        if self._active and (meeting.is_first or self.recording is None):
            self.renewed.update(meeting.untold)
        if self._adds_up:
            self.reference, self._meeting = run_without_passes(), meeting
        else:
            self._not_compared.update(dict.fromkeys(meeting.untold, "a communication hook reduces it"))
            meeting.close()

    def has_met(self, backward: Callable[..., object], fingerprint: str) -> bool:
        """Whether `meet_graph` has nothing to note of it."""
        if not self._looks_at_graphs:
            return True
        meetings = self._met.get(backward)
        return meetings is not None and fingerprint in meetings and meetings[fingerprint].due > self._begun

    def forget_reference(self) -> None:
        """The graph will not run."""
        self.reference, self._meeting = None, None

    @contextlib.contextmanager
    def watching(self, plan: BucketPlan, group_name: str, *, sees_values: bool = True) -> Iterator[None]:
        """Look at what a graph, run in this context, is about to reduce, where it is new or the backward verifies.

        It calls its process group `group_name`. Without `sees_values` nothing can be computed from what it launches:
        it runs as a CUDA graph.
        """
        recording, reference, meeting = self.recording, self.reference, self._meeting
        self.forget_reference()
        # What a communication hook launches is not the gradients.
        if plan.reduction == "hook":
            if meeting is not None:
                meeting.close()
            if recording is not None:
                recording.not_seen.update(plan.indices)
            yield
            return
        wrong: dict[int, int] = {}

        def launching(number: int, flat_buffer: Tensor) -> contextlib.AbstractContextManager[None]:
            if number < len(plan.buckets):
                if recording is not None:
                    recording.graph_launches(plan.buckets[number], flat_buffer)
                if reference is not None:
                    wrong.update(compare(plan.buckets[number], flat_buffer, reference))
            return contextlib.nullcontext()

        observer = LaunchObserver(group_name, launch=launching)
        kinds = {(bucket.numel, bucket.dtype) for bucket in plan.buckets} if reference is not None else set()
        filled = torch_private.inductor.allocations_filled(kinds, fill_with_pattern) if kinds else _NO_CONTEXT
        with filled, observer if sees_values else _NO_CONTEXT:
            yield
        if observer.launched == len(plan.buckets):
            self._note_compared(plan, reference, meeting, wrong)
        elif observer.launched == 0:
            self._note_unseen(plan, reference, meeting)
        else:
            if recording is not None:
                recording.not_seen.update(plan.indices)
            if reference is not None:
                self._note_compared(plan, Reference({}, _UNPLANNED), meeting, wrong)

    def note_wrong(self, wrong: Mapping[int, int]) -> None:
        """These lie in buckets as something else than what a compiled step was to leave there."""
        self._wrong.update(wrong)

    def forget_wrong(self) -> None:
        """What was launched was not what ranks wanted."""
        self._wrong.clear()

    def _note_compared(
        self, plan: BucketPlan, reference: Reference | None, meeting: _Meeting | None, wrong: dict[int, int]
    ) -> None:
        if reference is None or meeting is None:
            return
        self._wrong.update(wrong)
        if wrong and self._communicator.world_size == 1:
            self.verifies = True  # there is nobody to be told, and the backward's end raises
        expected = reference.expected
        why_not = {n: expected[n].why_vacuous if n in expected else reference.why_not for n in plan.indices}
        for index in meeting.untold.intersection(why_not):
            self._not_compared.pop(index, None)
            if index in expected and not why_not[index]:
                self._compared.add(index)
            else:
                self._compared.discard(index)
                self._not_compared[index] = why_not[index]
        meeting.note_compared(
            self._begun, {index for index, why in why_not.items() if index in expected and why in (ZERO, INFINITE)}
        )

    def _note_unseen(self, plan: BucketPlan, reference: Reference | None, meeting: _Meeting | None) -> None:
        """What comes out is compared all the same, with what every rank should have brought."""
        if self.recording is not None:
            self.recording.graph_launches_unseen(plan, reference)
        if reference is not None:
            self._note_compared(plan, reference if self.recording is not None else Reference({}, _UNSEEN), meeting, {})

    # ---- at its end --------------------------------------------------------------------------------------------------

    def heed_wish(self, wished: bool) -> None:
        """Verify at the end of this backward, and from the next one on anew, if a rank has asked for it."""
        if wished:
            self.verifies = True
            self.look_again()

    @torch.no_grad()
    def postpone(self) -> None:
        """Take part in the exchange without proving anything; a no-op in a backward that does not verify.

        What is wrong in buckets the next backward raises, as this one raises something else.
        """
        if self.verifies:
            count = len(self._reduced.names)
            faults = self._conclude([_BROKEN_OFF] * count, Recording(self._reduced.gradients), set(), None)
            if faults.are_any:
                self._wrong.update(faults.in_buckets)
                self.look_again()

    @torch.no_grad()
    def conclude(self, outcome_of: Callable[[int], Tensor | None], *, by_hooks: Set[int], factor: float | None) -> None:
        """Compare what has come out with what went in, on all ranks; a no-op in a backward that does not verify.

        `outcome_of` tells what the reduction has left of a parameter's gradient on this rank; None where it left
        nothing, because no rank has produced one. That is what has been reduced `by_hooks`, and what graphs have
        returned unless a hook of the user's has changed it. `factor` makes of that the sum of what ranks have
        brought; None where nothing does.

        Raises RuntimeError, on every rank, if a gradient is wrong.
        """
        if not self.verifies:
            return
        recording = self.recording or Recording(self._reduced.gradients)
        outcomes = {index: outcome_of(index) for index in range(len(self._reduced.names))}
        left = {index: outcome for index, outcome in outcomes.items() if outcome is not None}
        recording.come_out([*left], [*left.values()])
        hindrances = [
            _NO_GRADIENT
            if index not in left
            else _NOTHING
            if index in recording.seen and index not in recording.not_seen
            else _NOT_SEEN
            for index in outcomes
        ]
        faults = self._conclude(hindrances, recording, by_hooks, factor)
        if faults.are_any:
            self.look_again()
            raise RuntimeError(_told(self._communicator.global_rank, [(self, faults)]))

    def _conclude(
        self, hindrances: Sequence[int], recording: Recording, by_hooks: Set[int], factor: float | None
    ) -> "_Faults":
        """Share what this rank knows, settle what is unverified."""
        account = recording.account(hindrances, self.device, by_hooks, factor if self._adds_up else None)
        (verdict,) = _exchange(self._communicator, [(self, account)])
        self.recording, self.verifies = None, False
        return self.settle(verdict, adds_up=account.factor is not None)

    def others_of(self, device: torch.device) -> Tensor:
        """What ranks share besides their account: which gradients are renewed, and what is wrong. Forgets both."""
        indices = range(len(self._reduced.names))
        told = [[int(index in self.renewed) for index in indices], [self._wrong.get(index, 0) for index in indices]]
        self.renewed.clear()
        self._wrong.clear()
        return torch.tensor(told, dtype=torch.int64, device=device)

    def settle(self, verdict: Verdict, *, adds_up: bool) -> "_Faults":
        """Draw the conclusions. In tensors: in most exchanges all gradients are proven at once."""
        hindrances, renewed, findings = verdict.others
        looked_at = hindrances == _NOTHING
        is_seen = (hindrances < _NO_GRADIENT) | (verdict.some_are_finite & (hindrances == _NOT_FINITE))
        differs = verdict.results_differ & is_seen
        off = (verdict.are_off & looked_at | (hindrances == _LEFT_OUT)) & ~differs
        shows = verdict.have_values if adds_up else verdict.brought_differ & (not self._adds_up)
        vague = verdict.are_vague & verdict.have_values & looked_at
        proven = shows & looked_at & ~differs & ~off & ~vague & (findings == 0)
        for index in _where(renewed != 0):
            self.unverified.setdefault(index, _NEW)
        for index in _where(proven):
            self.unverified.pop(index, None)
        different, not_sums, in_buckets = _where(differs), _where(off), _where(findings != 0)
        for index in _where(looked_at & ~proven | (hindrances == _NO_GRADIENT) | (hindrances == _NOT_FINITE)):
            if index in self.unverified:
                looks_equal = _VAGUE if vague[index] else ZERO if self._adds_up else _EQUAL
                self.unverified[index] = _WORDS.get(int(hindrances[index]), looks_equal)
        self.unverified.update(dict.fromkeys(not_sums, _NOT_THE_SUM))
        self.unverified.update(dict.fromkeys(different, _DIFFERENT))
        self.unverified.update(dict.fromkeys(in_buckets, _WRONG_IN_BUCKET))
        return _Faults({index: int(findings[index]) for index in in_buckets}, different, not_sums)

    # ---- in words ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """How far the proof has come, in a sentence or two; empty where there is but one rank."""
        if self._why_off:
            return f"Whether gradients were reduced is not looked at: {self._why_off}."
        lines = [self._of_buckets()] if self._compared or self._not_compared else []
        if self._active:
            everything = len(self._reduced.names)
            pending = self._listed("pending", self.unverified)
            lines.append(
                f"Proven to be reduced: {everything - len(self.unverified)} of {everything} parameters{pending}."
            )
        return "\n".join(lines)

    def _of_buckets(self) -> str:
        """What the latest new graphs have left in their buckets on this rank."""
        count = len(self._compared) + len(self._not_compared)
        return (
            f"Compared with the same backward without the passes: {len(self._compared)} of {count} parameters of graphs"
            f"{self._listed('not compared', self._not_compared)}."
        )

    def _listed(self, what: str, whys: dict[int, str]) -> str:
        reasons: dict[str, list[int]] = {}
        for index, reason in whys.items():
            reasons.setdefault(reason, []).append(index)
        listed = "; ".join(
            f"{format_names([*map(self.name_of, indices)])} ({reason})" for reason, indices in reasons.items()
        )
        return f"; {what}: {listed}" if listed else ""


@dataclass(frozen=True)
class _Faults:
    """What an exchange has found, of each gradient of one proof at most one; the first by what was found."""

    in_buckets: Mapping[int, int]
    different: Sequence[int]
    no_sums: Sequence[int]

    @property
    def are_any(self) -> bool:
        return bool(self.in_buckets or self.different or self.no_sums)


def _told(rank: int, found: Sequence[tuple[Proof, _Faults]]) -> str:
    """The error's text. All proofs are of wrappers, or all of functions; faults of the first kind explain the rest."""
    errors = found[0][0].errors
    explanations = {
        (proof, index): explained(finding) for proof, faults in found for index, finding in faults.in_buckets.items()
    }
    different = [(proof, index) for proof, faults in found for index in faults.different]
    no_sums = [(proof, index) for proof, faults in found for index in faults.no_sums]
    if explanations:
        text, wrong = errors.in_buckets, [*explanations]
    elif errors.different == errors.no_sums:
        text, wrong = errors.no_sums, [*dict.fromkeys([*different, *no_sums])]
    else:
        text, wrong = (errors.different, different) if different else (errors.no_sums, no_sums)
    return text.format(
        rank=rank,
        functions=", ".join(dict.fromkeys(proof.function for proof, _ in wrong)),
        named=format_names([proof.name_of(index) for proof, index in wrong]),
        found="; ".join(f"{proof.name_of(index)}: {why}" for (proof, index), why in [*explanations.items()][:5]),
    )


def conclude_together(communicator: Communicator, recorded: Sequence[tuple[Proof, Recording]]) -> None:
    """Compare, in one exchange, what has been recorded of functional reductions, all of them seen on both sides.

    A no-op where nothing has been recorded. Raises RuntimeError, on every rank, by name.
    """
    if not recorded:
        return
    device = recorded[0][0].device
    accounts = [(proof, recording.account(recording.hindrances(), device, set(), 1.0)) for proof, recording in recorded]
    with communicator.explaining("what gradients should sum up to could not be compared"):
        verdicts = _exchange(communicator, accounts)
    found = [
        (proof, proof.settle(verdict, adds_up=True)) for (proof, _), verdict in zip(recorded, verdicts, strict=True)
    ]
    wrong = [(proof, faults) for proof, faults in found if faults.are_any]
    for proof, _ in wrong:
        proof.look_again()
    if wrong:
        raise RuntimeError(_told(communicator.global_rank, wrong))


def _exchange(communicator: Communicator, accounts: Sequence[tuple[Proof, Account]]) -> list[Verdict]:
    """One verdict for each."""
    (_, first), own = accounts[0], [account for _, account in accounts]
    others = torch.cat([proof.others_of(account.results.device) for proof, account in accounts], dim=1)
    whole = Account(
        torch.cat([account.brought for account in own], dim=1),
        torch.cat([account.results for account in own], dim=1),
        torch.cat([account.checksums for account in own]),
        torch.cat([account.hindrances for account in own]),
        [kind for account in own for kind in account.kinds],
        first.factor,
    )
    return exchange(communicator, whole, *others).split([len(account.kinds) for account in own])


def _where(mask: Tensor) -> list[int]:
    places: list[int] = mask.nonzero().flatten().tolist()
    return places
