"""The reductions that a rank launches before it looks at what others tell: one of an eager call, all of a graph."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.checks.proof import Proof, Recording
from compiled_ddp.checks.values import Reference, compare
from compiled_ddp.functional.agreements import Agreements
from compiled_ddp.functional.communicator import Communicator, Leading
from compiled_ddp.functional.first_parameters import FirstParameters
from compiled_ddp.functional.loss_group import LossGroup, LossLaunch, LossLaunches
from compiled_ddp.functional.on_buckets import in_launch_order
from compiled_ddp.functional.shares import gather
from compiled_ddp.functional.wanted import Agreed, Arrival, Wanted, agreed_apart, describe
from compiled_ddp.passes.ops import wait_tensor
from compiled_ddp.plan import Bucket
from compiled_ddp.ranks.agreement import Description
from compiled_ddp.ranks.launch_observer import UNNAMED, LaunchObserver, profiled, start_collective
from compiled_ddp.ranks.progress import failed_in_collective
from compiled_ddp.ranks.step_recorder import StepRecorder

# ---- what has been launched when something fails: it would fail a later wait -----------------------------------------


def forget_launches(error: BaseException, memory: Sequence[Tensor] = ()) -> None:
    """Forget collectives on `memory`, and on the tensors of the code that has raised `error`, that nobody has awaited.

    Their groups have been closed on this rank, so that none of them is under way any more. torch.distributed keeps what
    is not awaited, and with it the connections, whose end others may wait for.
    """
    for tensor in (*memory, *_tensors_of_frames(error)):
        with contextlib.suppress(RuntimeError):
            wait_tensor(tensor)


def _tensors_of_frames(error: BaseException) -> Iterator[Tensor]:
    for frame, _ in walk_tb(error.__traceback__):
        for value in [*frame.f_locals.values()]:
            for leaf in value if isinstance(value, list | tuple) else (value,):
                if type(leaf) is Tensor and not leaf.is_meta:
                    yield leaf


# ---- units -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """One reduction; `leading` is where its leading riders are read from."""

    communicator: Communicator
    wanted: Wanted
    leading: Leading

    @property
    def key(self) -> Hashable:
        """Identifies the reduction on all ranks."""
        return self.communicator.name, self.wanted


Launch = Run | LossLaunch


@dataclass(frozen=True)
class _Launched:
    """A reduction as it is launched; where ranks verify it, it has a recording."""

    communicator: Communicator
    agreed: Agreed
    proof: Proof
    recording: Recording | None
    shares: list[tuple[Bucket, Tensor]] = field(default_factory=list)  # of sums, which ranks have not put together yet

    def gather(self) -> None:
        """Let its recording know what has come out of buckets of which each rank has its share. A collective."""
        scattered = self.agreed.wanted.scattered
        for bucket, share in self.shares:
            assert scattered is not None and self.recording is not None
            whole = gather(share, bucket.ranks, self.communicator.group_name, scattered.by)
            self.recording.come_out(bucket.indices, [bucket.view(each, whole) for each in bucket.gradients])


class Unit:
    """[Note: every rank launches what all expect]"""

    def __init__(self, launches: Sequence[Launch]) -> None:
        """At least one of them a reduction; those in losses only where a graph launches them."""
        self._runs = [each for each in launches if isinstance(each, Run)]
        self.communicators = tuple(dict.fromkeys(run.communicator for run in self._runs))
        self._agreements = self.communicators[0].agreements
        self._launches, self._apart = _split(launches, self._agreements)
        self._launched: list[_Launched] = []  # the latest time

    @property
    def _name(self) -> str:
        return self._runs[0].wanted.function

    @property
    def reductions(self) -> list[Agreed]:
        """What was launched the latest time."""
        return [each.agreed for each in self._launched]

    def take_turn(self, arrivals: Sequence[Arrival], first: FirstParameters | None = None) -> list[Agreed]:
        """What is launched for each reduction; new ones have the `arrivals` of rank 0, and are compared by `first`.

        Raises RuntimeError on every rank where other ranks want something else.
        """
        self._apart.agree()
        if self._agreements.groups.are_several({_group_of(each) for each in self._launches}):
            self._agree_in_turn(arrivals, first)
        elif self._unexpected():
            self._agree(arrivals, first)
        ahead = {each: iter(each.order.ahead(len(self._of(each)))) for each in self.communicators}
        return [next(ahead[run.communicator]) for run in self._runs]

    def begin(self, *, is_new: bool = False) -> None:
        """The reductions are about to be launched, behind `take_turn`; by a graph that `is_new`, to be proven."""
        remaining = {each: len(self._of(each)) for each in self.communicators}
        launched = []
        for run in self._runs:
            remaining[run.communicator] -= 1
            left, groups = remaining[run.communicator], len(self.communicators)
            agreed = run.communicator.begin(run.leading, remaining=left, groups=groups, wishes=is_new)
            proof = run.communicator.proof_of(agreed)
            launched.append(_Launched(run.communicator, agreed, proof, proof.recording))
        self._launched = launched
        self._agreements.order.note_launched([each.key for each in self._launches])
        self._apart.note_launched()

    @contextlib.contextmanager
    def watching(
        self, *, in_cuda_graphs: Callable[[torch.device], bool], reference_of: Callable[[int], Reference] | None = None
    ) -> Iterator[None]:
        """Note, where ranks verify it, what the graph that runs in here launches; `prove` compares it.

        A profiler is told the names of its buckets.

        `reference_of` tells of each reduction what it should be, where that is to be looked at.
        """
        sees_values = not any(in_cuda_graphs(run.wanted.device) for run in self._runs)
        is_profiled = torch_private.autograd.profiler_is_on()
        with contextlib.ExitStack() as stack:
            for communicator in self.communicators:
                on_its_group = [
                    (each, None if reference_of is None else reference_of(number))
                    for number, each in self._launched_on(communicator)
                    if each.agreed.wanted.hook is None  # what that launches is not the gradients
                ]
                if is_profiled or any(each.recording is not None for each, _ in on_its_group):
                    stack.enter_context(_watching(on_its_group, communicator.group_name, sees_values=sees_values))
            yield

    def recorded_by(self, recorder: StepRecorder) -> contextlib.AbstractContextManager[object]:
        """Within the context the graph of the one reduction here runs, whose times are taken."""
        (agreed,), (communicator,) = self.reductions, self.communicators
        assert communicator.made is not None
        of_hook = [position for position, _ in in_launch_order(agreed.programs)]
        return recorder.watching(agreed.plan, communicator.group_name, communicator.made.group, of_hook)

    @property
    def verifies(self) -> bool:
        """Whether ranks verify every reduction that is about to be launched."""
        return all(each.recording is not None for each in self._launched)

    def note_reduced(self, gradients: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Note, where ranks verify it, what the one reduction here has made of gradients."""
        (launched,) = self._launched
        if launched.recording is not None:
            launched.recording.reduced(gradients, sums[: len(gradients)])

    def prove(self) -> None:
        """Raise RuntimeError, on every rank, where a gradient is not what was sent; behind `check`."""
        with self._heeding_calls():
            for each in self._launched:
                each.gather()
            for communicator in self.communicators:
                on_it = self._launched_on(communicator)
                communicator.prove([(each.proof, each.recording) for _, each in on_it if each.recording is not None])

    def _launched_on(self, communicator: Communicator) -> list[tuple[int, _Launched]]:
        """What was launched on one communicator, with its number among all."""
        return [(number, each) for number, each in enumerate(self._launched) if each.communicator is communicator]

    def check(self, sums: Sequence[Tensor]) -> None:
        """Raise RuntimeError where the sums of the leading riders say that another rank has launched zeros."""
        with self._heeding_calls():
            self._check(sums)

    def _check(self, sums: Sequence[Tensor]) -> None:
        for each in self.communicators:
            each.look([own for run, own in zip(self._runs, sums, strict=True) if run.communicator is each])
        departed = [each for each in self.communicators if each.departures.launches]
        if departed:
            _depart_until_known(departed)
            self._compare(self._runs)
            raise departed[0].give_up(f"a rank has not launched what {self._name} was expected to")

    def _of(self, communicator: Communicator) -> list[Run]:
        return [run for run in self._runs if run.communicator is communicator]

    def _unexpected(self) -> list[Run]:
        """The launches that ranks must agree on first."""
        found = []
        for each in self.communicators:
            own = self._of(each)
            found += own[: each.order.unexpected([run.wanted for run in own])]
        return [run for run in self._runs if run in found]

    def _agree(self, arrivals: Sequence[Arrival], first: FirstParameters | None) -> None:
        """On what is unexpected of reductions on which nobody waits elsewhere."""
        runs = self._unexpected()
        with self._heeding_calls():
            is_alone = _depart(self.communicators)
        self._compare(self._runs if is_alone else runs, first)
        if is_alone:
            raise self.communicators[0].give_up(f"other ranks have launched something else than {self._name}")
        self._note_agreed(runs, arrivals)

    def _agree_in_turn(self, arrivals: Sequence[Arrival], first: FirstParameters | None) -> None:
        """On what is unexpected, where others may wait for something else."""
        keys = [each.key for each in self._launches]
        while number := self._agreements.order.unexpected(keys):
            following = self._launches[:number]
            self._agreements.call()
            self._compare(following, first)
            self._note_agreed([each for each in following if isinstance(each, Run)], arrivals)
            for each in following:
                if isinstance(each, LossLaunch):
                    each.group.open()
            self._agreements.order.note_agreed(keys[:number])
        for communicator in self.communicators:
            communicator.order.expect([run.wanted for run in self._of(communicator)])

    def _note_agreed(self, runs: Sequence[Run], arrivals: Sequence[Arrival]) -> None:
        known = [(run, run.communicator.order.known(run.wanted)) for run in runs]
        own = [arrivals[self._runs.index(run)] if one is None else one.arrival for run, one in known]
        agreed = self._agreements.arrivals_of_first(own, self._name) if runs else []
        for run, arrival in zip(runs, agreed, strict=True):
            run.communicator.note_agreed(run.wanted, arrival)

    def _compare(self, launches: Sequence[Launch], first: FirstParameters | None = None) -> None:
        """Raise the same error on every rank unless all want these; what they do not know is compared by `first`."""
        for each in self.communicators:
            each.forget_departures()
        describe, made = functools.partial(_description, launches), self.communicators[0].made
        if first is None:
            self._agreements.compare(describe, self._name, made)
            return
        new = {
            number: run.wanted.function
            for number, run in enumerate(self._runs)
            if run in launches and run.communicator.order.known(run.wanted) is None
        }
        checksums = functools.partial(first.checksums, new)
        first.note(self._agreements.ranks, self._agreements.compare(describe, self._name, made, checksums=checksums))

    @contextlib.contextmanager
    def launching(self, memory: Sequence[Tensor] = ()) -> Iterator[None]:
        """Raise what goes wrong in here, where the reductions are launched and awaited, on every rank by name.

        `memory` is what a graph that runs in here has been lent.
        """
        agreements, name = self._agreements, self._name
        try:
            yield
        except Exception as error:
            told: RuntimeError | None = None
            if agreements.is_called:
                agreements.heed_call()
                forget_launches(error, memory)
                told = self._of_a_call()
            elif failed_in_collective(error):
                told = self.communicators[0].failure(name, error)
                agreements.give_up()
                forget_launches(error, memory)
            elif agreements.ranks.is_gloo:  # else others wait for what can be sent by nobody any more
                agreements.call_at_once(is_error=True)
                forget_launches(error, memory)
                agreements.tell(error, name)
            if told is None:
                raise
            raise told from error

    @contextlib.contextmanager
    def _heeding_calls(self) -> Iterator[None]:
        """Where a wait in here fails as another rank has closed the groups, raise what that one has to say."""
        try:
            yield
        except RuntimeError as error:
            if not self._agreements.is_called:
                raise
            self._agreements.heed_call()
            forget_launches(error)
            raise self._of_a_call() from error

    def _of_a_call(self) -> RuntimeError:
        """The error that all ranks raise, where another one has ended the waits of this one."""
        return self._agreements.come(functools.partial(_description, self._launches, are_launched=True), self._name)


def _group_of(launch: Launch) -> Communicator | LossGroup:
    return launch.communicator if isinstance(launch, Run) else launch.group


def _split(launches: Sequence[Launch], agreements: Agreements) -> tuple[list[Launch], LossLaunches]:
    """What ranks agree on in turn, and what is agreed on before: in losses of other ranks, or not by gloo."""
    apart = [
        each
        for each in launches
        if isinstance(each, LossLaunch) and not (each.group.agreements is agreements and agreements.ranks.is_gloo)
    ]
    return [each for each in launches if each not in apart], LossLaunches(apart)


def _description(launches: Sequence[Launch], *, are_launched: bool = False) -> Description:
    communicators = [each.communicator.name for each in launches if isinstance(each, Run)]
    return describe([each.wanted for each in launches], communicators, are_launched=are_launched)


def break_off(communicators: Sequence[Communicator], agreements: Agreements, what: str, error: BaseException) -> None:
    """Tell the other ranks of an error, which the caller raises, wherever they wait or compare."""
    if agreements.groups.are_several(communicators):
        agreements.call_at_once(is_error=True)
    else:
        try:
            _depart(communicators)
        except RuntimeError as failure:
            if not agreements.is_called:
                return  # nobody is there to be told
            agreements.heed_call()
            forget_launches(failure)
    for each in communicators:
        each.forget_departures()
    agreements.tell(error, what, next((each.made for each in communicators), None))


def agree_apart(communicator: Communicator, what: str, call: str) -> None:
    """All ranks are about to do `what`, which is none of their reductions, on the user's own group, in this `call`.

    Raises RuntimeError: on every rank, where some are about to reduce; here, where they do not come to that either.
    """
    agreements, is_alone = communicator.agreements, False
    if agreements.groups.are_several((communicator,)):
        agreements.call()
    elif communicator.made is not None:
        try:
            is_alone = _depart((communicator,))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {communicator.rank}: {call} is a collective, for {what}, and other ranks have not called it: "
                f"call it on every rank, not behind `if rank == 0:`. ({error})"
            ) from error
    communicator.forget_departures()
    agreements.compare(lambda: agreed_apart(what), what, communicator.made)
    if is_alone:
        raise communicator.give_up(f"other ranks have not come to {what}")


def _depart(communicators: Sequence[Communicator]) -> bool:
    """Send zeros for what is expected; returns whether other ranks have launched it."""
    used = [each for each in communicators if each.order.ahead(1)]
    if not used:
        return False
    used[0].depart()
    if used[0].departures.are_everybodys:
        return False
    for each in used[1:]:
        each.depart()
    _depart_until_known(used)
    return True


def _depart_until_known(communicators: Sequence[Communicator]) -> None:
    """Until, since the first rank did, all ranks have been about to look at the riders, and so know of it."""
    for ends in range(1, communicators[0].ends_to_know + 1):
        for each in communicators:
            while each.departures.ends < ends:
                each.depart()


@dataclass(frozen=True)
class _Expected:
    """A launch that is about to come in a graph; what has a reference is compared with it."""

    launched: _Launched
    reference: Reference | None
    position: int  # of its bucket, in the reduction's launch order

    @property
    def bucket(self) -> Bucket:
        return self.launched.agreed.plan.buckets[self.position]

    def named(self, what: str) -> contextlib.AbstractContextManager[object]:
        """A range of a profile."""
        return profiled(what, self.launched.agreed.bucket_name, self.position)


class _Watched:
    """What a graph launches on one group: recorded, named in profiles, and compared where it has a reference."""

    def __init__(self, launched: Sequence[tuple[_Launched, Reference | None]]) -> None:
        self._every = [
            _Expected(each, reference, position)
            for each, reference in launched
            for position in range(len(each.agreed.plan.buckets))
        ]
        self._under_way: dict[int, tuple[_Expected, Tensor]] = {}  # launch -> what was expected, where its sum is
        self._place = -1  # of the latest one expected

    def launching(self, number: int, flat_buffer: Tensor) -> contextlib.AbstractContextManager[object]:
        size, every = flat_buffer.numel(), self._every
        following = next((n for n in range(self._place + 1, len(every)) if every[n].bucket.numel == size), None)
        if following is not None:
            self._place = following
            expected = every[following]
            recording = expected.launched.recording
            if recording is not None:
                recording.graph_launches(expected.bucket, flat_buffer)
                if expected.reference is not None:
                    expected.launched.proof.note_wrong(compare(expected.bucket, flat_buffer, expected.reference))
        latest = every[self._place] if self._place >= 0 else None
        if latest is None or latest.bucket.numel != size:
            return UNNAMED
        self._under_way[number] = latest, flat_buffer  # where it is launched again too
        return latest.named("launch")

    def start(self, number: int, operator: Any, args: tuple[Any, ...]) -> Tensor:
        result = start_collective(operator, args)
        if number in self._under_way:
            self._under_way[number] = self._under_way[number][0], result
        return result

    @contextlib.contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        expected, result = self._under_way.pop(number, (None, None))
        with UNNAMED if expected is None else expected.named("wait for"):
            yield
        if expected is None or result is None or expected.launched.recording is None:
            return
        bucket = expected.bucket
        if bucket.ranks > 1:  # what a hook makes of the sums may come to lie there
            expected.launched.shares.append((bucket, result.flatten().clone()))
        else:
            views = [gradient.view(result) for gradient in bucket.gradients]
            expected.launched.recording.come_out(bucket.indices, views)


@contextlib.contextmanager
def _watching(
    launched: Sequence[tuple[_Launched, Reference | None]], group_name: str, *, sees_values: bool
) -> Iterator[None]:
    """See `_Watched`.

    Without `sees_values` nothing can be computed from what the graph launches: it runs as a CUDA graph.
    """
    watched = _Watched(launched)
    observer = LaunchObserver(group_name, launch=watched.launching, wait=watched.waiting, start=watched.start)
    with observer if sees_values else contextlib.nullcontext():
        yield
    for each, _ in launched if not observer.launched else ():
        if each.recording is not None:
            each.recording.reduced_unseen()
