"""Proving that gradients were reduced: what differed between ranks before the reduction must agree after it.

[Note: all ranks verify or none does] A backward that verifies ends with one collective more, so every rank must know
by then that it is one. It is one because of what all ranks know alike: the number of synchronised backwards, what the
last such exchange left unverified, or a wish a rank has sent in the riders. A rank whose backward broke off, or that
raises because of what the riders say, takes part all the same, and proves nothing.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from compiled_ddp.checks.batches import batched, batched_in_place
from compiled_ddp.checks.checksum import as_row
from compiled_ddp.plan import Bucket, BucketPlan
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import LaunchObserver

# Under verify="first", the backwards that verify while parameters are unverified, counted from the first one and again
# from each that ran a new graph. Beyond them a parameter stays so, and `explain()` lists it.
TRIES = (1, 2, 4, 8, 16, 32, 64)

# Why a parameter was not proven in a backward; of several ranks' reasons the largest one counts.
_NOTHING = 0
_NOT_SEEN = 1  # its launch: the backward did not record, or the graph launches from C++
_NO_GRADIENT = 2
_NOT_FINITE = 3
_BROKEN_OFF = 4

_WORDS = {_NO_GRADIENT: "no gradient so far", _NOT_FINITE: "gradients that are not finite"}
_EQUAL = "zero or equal gradients so far"
_DIFFERENT = "different on the ranks after the reduction"
_UNKNOWN = "not looked at yet"
_NEW = "in a new graph, not looked at yet"


class _Recording:
    """Checksums of this rank's gradients right before they are reduced, in one backward."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.not_seen: set[int] = set()
        self._added: list[tuple[Sequence[int], torch.Tensor]] = []  # gradients, checksums of them

    def launching(self, bucket: Bucket, flat_buffer: torch.Tensor) -> None:
        self.seen.update(bucket.indices)
        sizes = [gradient.numel for gradient in bucket.gradients]
        values = flat_buffer.narrow(0, 0, sum(sizes))
        self._added += [
            (indices, batch.checksums()) for indices, batch in batched_in_place(bucket.indices, values, sizes)
        ]

    def before(self, parameters: int, device: torch.device) -> torch.Tensor:
        """The checksums of all parameters, int64, shape (parameters,); 0 where nothing was seen."""
        sums = torch.zeros(parameters, dtype=torch.int64, device=device)
        for indices, added in self._added:
            # A parameter of several sections is launched in each of them, on every rank in the same order.
            places = torch.tensor(indices, dtype=torch.int64, device=device)
            sums[places] = 3 * sums[places] + added.to(device)
        return sums


class Proof:
    """Which of the wrapper's parameters are proven; the same on every rank."""

    def __init__(self, parameters: TrainedParameters, communicator: Communicator, verify: str) -> None:
        """`verify` is the wrapper's option: "first", "always" or "off"."""
        self._communicator, self._verify = communicator, verify
        self._active = verify != "off" and communicator.world_size > 1
        self._why_off = 'verify="off"' if verify == "off" else ""
        self.unverified: dict[int, str] = {}  # parameter -> why
        self._tried = 0  # synchronised backwards since the first one, or since there was something new to look at
        self.verifies = False  # whether the backward under way ends with the exchange
        self.recording: _Recording | None = None  # in a backward that verifies
        self._met: weakref.WeakKeyDictionary[Callable[..., object], set[str]] = weakref.WeakKeyDictionary()
        self.renewed: set[int] = set()  # parameters of graphs that are new on this rank
        self.begin_anew(parameters)

    def begin_anew(self, parameters: TrainedParameters) -> None:
        """Hold nothing for proven: the sequence that all ranks keep is about to change, and so may the parameters."""
        self._parameters = parameters
        self.renewed.clear()
        self.unverified = dict.fromkeys(range(len(parameters.names)), _UNKNOWN)
        self.look_again()

    def look_again(self) -> None:
        """Verify the next backwards while something is unverified. On all ranks before the same backward."""
        self._tried = 0

    def switch_off(self, reason: str) -> None:
        """Look at nothing from here on: ranks need not agree after the reduction. On all ranks."""
        self._active, self._why_off = False, reason

    # ---- during a backward -------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Note that a synchronised backward begins, and decide whether it verifies."""
        if not self._active:
            return
        self._tried += 1
        self.verifies = self._verify == "always" or (bool(self.unverified) and self._tried in TRIES)
        self.recording = _Recording() if self.verifies else None

    def meet_graph(self, backward: Callable[..., object], fingerprint: str, indices: Iterable[int]) -> None:
        """Note that a compiled backward is about to reduce parameters `indices`, whose plan is `fingerprint`.

        A new one makes its parameters unverified again.
        """
        met = self._met.setdefault(backward, set())
        if self._active and fingerprint not in met:
            met.add(fingerprint)
            self.renewed.update(indices)

    def launching(self, bucket: Bucket, flat_buffer: torch.Tensor) -> None:
        """Note what hooks are about to reduce; a no-op in a backward that does not verify."""
        if self.recording is not None:
            self.recording.launching(bucket, flat_buffer)

    def watching(
        self, plan: BucketPlan, group_name: str, *, sees_values: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Note what a graph, run in this context, is about to reduce; a no-op in a backward that does not verify.

        It calls its process group `group_name`. Without `sees_values` nothing can be computed from what it launches:
        it runs as a CUDA graph.
        """
        # What a communication hook launches is not the gradients.
        if self.recording is not None and (plan.reduction == "hook" or not sees_values):
            self.recording.not_seen.update(plan.indices)
            return contextlib.nullcontext()
        if self.recording is None:
            return contextlib.nullcontext()
        return self._watching(plan, group_name, self.recording)

    @contextlib.contextmanager
    def _watching(self, plan: BucketPlan, group_name: str, recording: _Recording) -> Iterator[None]:
        def launching(number: int, flat_buffer: torch.Tensor) -> contextlib.AbstractContextManager[None]:
            if number < len(plan.buckets):
                recording.launching(plan.buckets[number], flat_buffer)
            return contextlib.nullcontext()

        with LaunchObserver(group_name, launch=launching) as observer:
            yield
        if observer.launched != len(plan.buckets):
            recording.not_seen.update(plan.indices)

    # ---- at its end --------------------------------------------------------------------------------------------------

    def heed_wish(self, wished: bool) -> None:
        """Verify at the end of this backward, and from the next one on anew, if a rank has asked for it."""
        if wished:
            self.verifies, self._tried = True, 0

    def postpone(self) -> None:
        """Take part in the exchange without proving anything; a no-op in a backward that does not verify."""
        if self.verifies:
            self._exchange([_BROKEN_OFF] * len(self._parameters.names), [None] * len(self._parameters.names))

    def conclude(self, outcome_of: Callable[[int], torch.Tensor | None]) -> None:
        """Compare the ranks' checksums; a no-op in a backward that does not verify.

        `outcome_of` tells what the reduction has left of a parameter's gradient on this rank; None where it left
        nothing, because no rank has produced one.

        Raises RuntimeError, on every rank, if a gradient differs between ranks.
        """
        if not self.verifies:
            return
        outcomes = [outcome_of(index) for index in range(len(self._parameters.names))]
        hindrances = [
            _NO_GRADIENT if outcome is None else _NOTHING if self._is_recorded(index) else _NOT_SEEN
            for index, outcome in enumerate(outcomes)
        ]
        different = self._exchange(hindrances, outcomes)
        if different:
            self._tried = 0  # and look again in the next backward
            raise RuntimeError(
                f"rank {self._communicator.rank}: the gradient of {self._parameters.named(different)} differs between "
                "the ranks after it was reduced: on some rank it stayed local, in whole or in part, and from here on "
                "the models would drift apart. If the model has changed since it was wrapped, call unwrap() and wrap "
                "it again. COMPILED_DDP_MODE=hooks in the environment reduces everything by hooks; if that helps, "
                "please report the model with the output of explain(). A hook of yours that changes .grad in another "
                'way on every rank does this too: then pass verify="off".'
            )

    def _is_recorded(self, index: int) -> bool:
        recording = self.recording
        return recording is not None and index in recording.seen and index not in recording.not_seen

    @torch.no_grad()
    def _exchange(self, hindrances: list[int], outcomes: list[torch.Tensor | None]) -> list[int]:
        """Share what this rank knows, settle what is unverified. Returns the parameters that differ between ranks."""
        device = self._parameters.tensors[0].device
        before = (self.recording or _Recording()).before(len(outcomes), device)
        rows = (
            (index, as_row(outcome, self._parameters.gradients[index].stride))
            for index, outcome in enumerate(outcomes)
            if outcome is not None
        )
        after = torch.zeros_like(before)
        finite = torch.ones_like(before, dtype=torch.bool)
        for indices, batch in batched(rows):
            places = torch.tensor(indices, dtype=torch.int64, device=device)
            after[places], finite[places] = batch.checksums().to(device), batch.are_finite().to(device)
        hindered = torch.where(finite, torch.tensor(hindrances, dtype=torch.int64, device=device), _NOT_FINITE)
        new_here = [index in self.renewed for index in range(len(outcomes))]
        renewed = torch.tensor(new_here, dtype=torch.int64, device=device)
        shared = torch.stack([*_to_compare(before), *_to_compare(after), hindered, renewed])
        self._communicator.maximum(shared)
        self.renewed.clear()
        self.recording, self.verifies = None, False
        return self._settle(shared)

    def _settle(self, shared: torch.Tensor) -> list[int]:
        """Of the rows that `_exchange` has shared. In tensors: in most exchanges all parameters are proven at once."""
        *rows, hindrances, renewed = shared.cpu()
        differs = _are_unequal(*rows[2:]) & (hindrances < _NO_GRADIENT)
        proven = _are_unequal(*rows[:2]) & (hindrances == _NOTHING) & ~differs
        for index in _where(renewed != 0):
            self.unverified.setdefault(index, _NEW)
        different = _where(differs)
        self.unverified.update(dict.fromkeys(different, _DIFFERENT))
        for index in _where(proven):
            self.unverified.pop(index, None)
        for index in _where(~differs & ~proven & (hindrances != _NOT_SEEN) & (hindrances != _BROKEN_OFF)):
            if index in self.unverified:
                self.unverified[index] = _WORDS.get(int(hindrances[index]), _EQUAL)
        return different

    def __str__(self) -> str:
        """How far the proof has come, in a sentence; empty where there is but one rank."""
        if self._why_off:
            return f"Whether gradients were reduced is not looked at: {self._why_off}."
        if not self._active:
            return ""
        everything = len(self._parameters.names)
        reasons: dict[str, list[int]] = {}
        for index, reason in self.unverified.items():
            reasons.setdefault(reason, []).append(index)
        listed = "; ".join(f"{self._parameters.named(indices)} ({reason})" for reason, indices in reasons.items())
        pending = f"; pending: {listed}" if listed else ""
        return f"Proven to be reduced: {everything - len(self.unverified)} of {everything} parameters{pending}."


def _to_compare(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows whose maxima over ranks tell whether the ranks' values are equal. Unlike -x, ~x cannot overflow."""
    return values, ~values


def _are_unequal(most: torch.Tensor, most_inverted: torch.Tensor) -> torch.Tensor:
    return most != ~most_inverted


def _where(mask: torch.Tensor) -> list[int]:
    places: list[int] = mask.nonzero().flatten().tolist()
    return places
