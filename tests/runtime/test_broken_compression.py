"""An exception on one rank in a backward whose buckets are reduced by several collectives each, before any of them.

Then the rank issues, with zeros, what is left of the bucket and of the others: no other rank waits for ever, or is
given one collective's numbers for another's.
"""

import contextlib
import copy
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ledger import Ledger, integers, make_integer, mean_of, owed_here
from models import Chain, local_gradients, wrappers
from torch import Tensor, nn

from compiled_ddp.comm_hooks import PowerSGD, Ranks, StatefulHook, TopK, bf16_compress
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
ERRORS = (ValueError, KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError)


@dataclass
class Plan:
    """At which of its next calls the operator `plant` raises, and what; `repeats` times from there on."""

    calls_left: int
    error: type[BaseException]
    repeats: int = 1


PLANS: list[Plan] = []


@torch.library.custom_op("compiled_ddp_tests::plant", mutates_args=())
def plant(x: Tensor) -> Tensor:
    if PLANS:
        PLANS[0].calls_left -= 1
        if PLANS[0].calls_left < 0:
            error = PLANS[0].error
            PLANS[0].repeats -= 1
            if not PLANS[0].repeats:
                PLANS.clear()
            raise error("planted")
    return x.clone()


plant.register_fake(torch.empty_like)


@dataclass(frozen=True)
class PlantedRanks(Ranks):
    """With the operator before each collective."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return super().all_reduce(plant(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return super().all_gather(plant(tensor))


@dataclass(frozen=True)
class Threshold(StatefulHook):
    """Two collectives, and in between what to send is chosen by the first one's result."""

    owed: ClassVar[tuple[int, ...]] = (0,)

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(gradients),)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        wanted = gradients + state[0]
        limit = ranks.all_reduce(wanted.abs().amax()) / (4 * ranks.size)
        sent = torch.where(wanted.abs() >= limit, wanted, 0.0)
        return ranks.all_reduce(sent) / ranks.size, wanted - sent


@dataclass(frozen=True)
class Turns(StatefulHook):
    """Sends the half whose turn it is: by a counter, which must be the same on every rank."""

    owed: ClassVar[tuple[int, ...]] = (0,)

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(gradients), torch.zeros((), dtype=torch.int64)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        wanted, counter = gradients + state[0], state[1]
        turn = (torch.arange((1 + len(wanted)) // 2) + counter) % len(wanted)
        mean = ranks.all_reduce(wanted[turn]) / ranks.size
        return torch.zeros_like(wanted).index_add(0, turn, mean), wanted.index_fill(0, turn, 0.0), counter + 1


@dataclass(frozen=True)
class Planted(StatefulHook):
    """Another hook, with the operator before each of its collectives and behind the last one."""

    inner: Any
    owed: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "owed", getattr(self.inner, "owed", ()))

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return self.inner.initial_state(gradients) if isinstance(self.inner, StatefulHook) else ()

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        results = self.inner(gradients, PlantedRanks(ranks.size, ranks.group_name, ranks.place), *state)
        mean, *new = results if isinstance(results, tuple) else (results,)
        return plant(mean), *new


# By name: the hook, its collectives for each bucket, how exact what it sends is, and whether one of its collectives
# waits for another one, so that hooks of gradients run all of it at once.
HOOKS: dict[str, tuple[Any, int, float, bool]] = {
    "bf16": (bf16_compress, 1, 2e-2, False),
    "TopK": (TopK(0.25), 2, 0.0, False),
    "PowerSGD": (PowerSGD(1), 2, 1e-5, True),
    "Threshold": (Threshold(), 2, 0.0, True),
    "Turns": (Turns(), 1, 0.0, False),
}


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    return (out * torch.arange(1.0, 1 + out.shape[-1])).sum()


class EqualChain(nn.Sequential):
    """The kernels of one layer are those of all, also of what its hook makes of its buckets."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(5, 5) for _ in range(3)))


def wrap(wrapper: str, hook: str, **options: Any) -> Any:
    model = EqualChain() if wrapper == "inductor" else Chain()
    make_integer(model)
    if wrapper == "inductor":
        wrapper, options["backend"] = "compile_ddp", "inductor"
    sizes = {"bucket_cap_mb": 6e-5, "first_bucket_mb": 6e-5}
    return wrappers([wrapper])[wrapper](model, comm_hook=Planted(HOOKS[hook][0]), **sizes, **options)


def batch(step: int) -> Tensor:
    return integers(dist.get_rank(), step, 3, 5)


class Steps:
    """Right steps, broken ones, and what each must leave."""

    def __init__(self, wrapper: str, hook: str, broken: int, **options: Any) -> None:
        self.ddp = wrap(wrapper, hook, **options)
        self.is_broken = dist.get_rank() == broken
        self.ledger = Ledger(self.ddp, tolerance=HOOKS[hook][2])
        self.number = 0

    def right(self) -> None:
        self.ddp.zero_grad()
        x = batch(self.number)
        self.number += 1
        self.ledger.step(self.ddp, lambda module: loss_of(module, x))

    def refused(self, match: str) -> None:
        """A step that is an error on every rank."""
        self.ddp.zero_grad()
        self.number += 1
        with pytest.raises(RuntimeError, match=match):
            loss_of(self.ddp, batch(self.number)).backward()
        self.ddp.zero_grad()

    def breaks(self, calls: int, error: type[BaseException], *, others: str | None) -> dict[str, Tensor]:
        """The operator raises at this call of it; returns the sum of the means and of what is owed then.

        `others` is the error of the ranks that it does not raise on; None for none.
        """
        self.ddp.zero_grad()
        self.number += 1
        x = batch(self.number)
        local = local_gradients(copy.deepcopy(self.ddp.module), lambda module: loss_of(module, x))
        due = {name: mean_of(gradient) + self.ledger.owed[name] for name, gradient in local.items()}
        loss = loss_of(self.ddp, x)
        if self.is_broken:
            PLANS.append(Plan(calls, error))
            with pytest.raises(error, match="planted"):
                loss.backward()
            assert not PLANS
            if self.number % 2:
                self.ddp.abandon_backward()
            else:
                with torch.no_grad():
                    self.ddp(x)
        else:
            with pytest.raises(RuntimeError, match=others) if others else contextlib.nullcontext():
                loss.backward()
        return due


def _breaks_everywhere(rank: int, wrapper: str, hook: str, broken: int, options: dict[str, Any]) -> None:
    """At every call of the operator, one after the other."""
    steps = Steps(wrapper, hook, broken, **options)
    steps.right()
    steps.right()
    buckets = sum(bool(b.gradients) for section in steps.ddp.plan.sections for b in section.plan.buckets)
    assert buckets >= 3
    _, collectives, tolerance, at_once = HOOKS[hook]
    by_hooks = wrapper == "EagerDDP"
    for call in range(buckets * (collectives + 1)):
        # Hooks of gradients run the operator behind a bucket's last collective before they launch the next bucket, or
        # when all of them have been launched; in a graph everything has then.
        sent = call >= buckets * collectives and not (by_hooks and at_once)
        error = ERRORS[call % len(ERRORS)]
        due = steps.breaks(call, error, others=None if sent else "broke off on 1 other rank")
        if not sent:
            steps.ledger.assert_as_before(steps.ddp, f"after an exception at call {call}")
        else:
            steps.ledger.open(steps.ddp)
            state_lost = not by_hooks and hook != "bf16"
            if not state_lost and not steps.is_broken:
                for name, parameter in steps.ddp.module.named_parameters():
                    difference = parameter.grad + steps.ledger.owed[name] - due[name]
                    assert difference.abs().max() <= tolerance * due[name].abs().max(), name
            kept = "begins anew on every rank" if state_lost else "load a checkpoint on every rank.$"
            steps.refused(f"when all of it had been sent.*{kept}")
            if state_lost:
                assert not any(owed.any() for owed in owed_here(steps.ddp).values())
                assert steps.ddp.comm_hook_state_dict() == {}
                steps.ledger.open(steps.ddp)
            else:
                steps.ledger.assert_as_before(steps.ddp, "after a step that is refused")
        steps.right()
        steps.right()
    origins = {section.origin for section in steps.ddp.plan.sections}
    assert origins == ({"hooks"} if by_hooks else {"graph"})
    steps.ddp.unwrap()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_wherever_an_exception_ends_a_hooks_program_the_next_step_is_right(
    ranks2: RankPool, wrapper: str, hook: str
) -> None:
    ranks2.run(_breaks_everywhere, wrapper, hook, 1, {})


@pytest.mark.parametrize("hook", ["TopK", "Threshold"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_the_same_on_the_rank_that_the_sequence_comes_from(ranks2: RankPool, wrapper: str, hook: str) -> None:
    ranks2.run(_breaks_everywhere, wrapper, hook, 0, {"check_steps": "off"})


@pytest.mark.inductor
@pytest.mark.parametrize("hook", ["Threshold", pytest.param("PowerSGD", marks=pytest.mark.slow)])
def test_the_same_in_graphs_of_inductor(ranks2: RankPool, hook: str) -> None:
    ranks2.run(_breaks_everywhere, "inductor", hook, 1, {}, timeout_seconds=300.0)


def _both_break(rank: int, wrapper: str) -> None:
    """Each rank in another place of another bucket: none waits for a collective that the other does not issue."""
    steps = Steps(wrapper, "Threshold", broken=rank)
    for calls in itertools.product((0, 1, 4), (0, 2, 3)):
        steps.right()
        steps.breaks(calls[rank], ValueError, others=None)
        steps.ledger.assert_as_before(steps.ddp, f"after exceptions at calls {calls}")
    steps.right()


@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_that_break_off_in_different_collectives_all_drop_the_step(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_both_break, wrapper)


def _mixed(rank: int) -> None:
    """One rank's graphs go by hooks: both launch alike, and what one of them leaves, too."""
    eager = rank == 0
    for broken in (0, 1):
        steps = Steps("compile_ddp", "PowerSGD", broken)
        steps.right()
        with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
            for call in range(5):
                steps.right()
                steps.breaks(call, ERRORS[call % 4], others="broke off on 1 other rank")
                steps.ledger.assert_as_before(steps.ddp, f"after an exception at call {call}")
        steps.right()
        steps.ddp.unwrap()


def test_a_rank_by_hooks_and_one_in_a_graph_leave_each_other_what_is_left(ranks2: RankPool) -> None:
    ranks2.run(_mixed)


def _three(rank: int) -> None:
    steps = Steps("compile_ddp", "PowerSGD", 2)
    steps.right()
    for call in (0, 1, 3):
        steps.breaks(call, KeyboardInterrupt, others="broke off on 1 other rank")
        steps.ledger.assert_as_before(steps.ddp, f"after an exception at call {call}")
        steps.right()


def test_the_same_on_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_three)


def _lost_and_broken(rank: int) -> None:
    """The step that is to tell of a lost one breaks off itself: the next one tells it."""
    steps = Steps("EagerDDP", "TopK", 1)
    steps.right()
    last = 2 * sum(bool(b.gradients) for section in steps.ddp.plan.sections for b in section.plan.buckets)
    steps.breaks(last, ValueError, others=None)
    steps.breaks(1, ValueError, others="broke off on 1 other rank")
    steps.refused("when all of it had been sent")
    steps.ledger.open(steps.ddp)
    steps.right()


def test_a_lost_step_is_told_when_the_next_one_breaks_off(ranks2: RankPool) -> None:
    ranks2.run(_lost_and_broken)


def _raises_again(rank: int) -> None:
    """What a hook computes of the results raises, and again when the rank follows the others."""
    steps = Steps("EagerDDP", "TopK", 1, verify="off")  # a step that verifies would wait for this rank, too
    steps.right()
    steps.ddp.zero_grad()
    loss = loss_of(steps.ddp, batch(1))
    if rank == 0:
        loss.backward()
        with pytest.raises(RuntimeError, match=r"was launched but not reduced|has stopped|stayed silent"):
            loss_of(steps.ddp, batch(2)).backward()
        return
    last = 2 * sum(bool(b.gradients) for section in steps.ddp.plan.sections for b in section.plan.buckets)
    PLANS.append(Plan(last, ValueError, repeats=2))
    with pytest.raises(ValueError, match="planted"):
        loss.backward()
    with pytest.raises(ValueError, match="planted"):
        steps.ddp(batch(2))
    assert not PLANS
    with pytest.raises(RuntimeError, match="ValueError ended this rank's part in the end of a backward"):
        steps.ddp(batch(2)).sum().backward()


def test_a_hook_that_cannot_follow_the_other_ranks_gives_its_rank_up(ranks2: RankPool) -> None:
    ranks2.run(_raises_again, collective_timeout_seconds=4.0)


def _counts_otherwise(rank: int) -> None:
    """A backend whose count of collectives tells something else: a graph that breaks off cannot be followed."""
    steps = Steps("compile_ddp", "Threshold", 1)
    rank_progress = steps.ddp._runtime.communicator.progress
    count = rank_progress._count_launches
    rank_progress._count_launches = lambda group: 2 * count(group)
    steps.right()
    assert not rank_progress.counts_launches
    steps.ddp.zero_grad()
    loss = loss_of(steps.ddp, batch(1))
    if rank == 0:
        with pytest.raises(RuntimeError, match="collective"):
            loss.backward()
        return
    PLANS.append(Plan(1, ValueError))
    with pytest.raises(ValueError, match="planted"):
        loss.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="what it had reduced is lost"):
            loss_of(steps.ddp, batch(1)).backward()


def test_where_the_count_tells_nothing_a_graph_that_breaks_off_is_given_up(ranks2: RankPool) -> None:
    ranks2.run(_counts_otherwise, collective_timeout_seconds=4.0)


def _counts(rank: int) -> None:
    """What `break_off` relies on: the group counts each collective of a hook's program as one."""
    communicator = wrap("EagerDDP", "bf16")._runtime.communicator
    ranks = communicator.for_hooks()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (0, 1, 5):
            tensor = torch.zeros(numel, dtype=dtype)
            for collective in (ranks.all_reduce, ranks.all_gather):
                before = communicator.progress.launches
                collective(tensor)
                assert communicator.progress.launches == before + 1, (collective, tensor)


def test_each_collective_of_a_hook_counts_as_one(ranks2: RankPool) -> None:
    ranks2.run(_counts)
