"""Several wrappers in one backward that ranks run in other orders: [Note: waiting in one order] in conductor.py."""

import contextlib
import copy
import time
import unittest.mock
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, assert_gradients, expected_mean, mean_over_ranks, row_batch, wrappers
from models import local_gradients as gradients_here
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_ddp.ranks.store import Store
from compiled_ddp.step.conductor import Conductor, SharedOrder
from compiled_ddp.step.steady import SteadyStep
from ranks import RankPool

# ---- the order, without ranks ----------------------------------------------------------------------------------------


def test_events_come_in_the_order_of_the_rank_that_was_first() -> None:
    store = Store(dist.HashStore(), timedelta(seconds=10))
    here, there = SharedOrder(store), SharedOrder(store)
    assert here.events_before("b") == set()
    assert there.events_before("a") == {"b"}
    assert there.events_before("b") == set()
    assert here.events_before("a") == {"b"}
    assert here.events_before("c") == {"a", "b"}


def test_an_event_that_comes_too_late_takes_no_place_before_those_to_come() -> None:
    """Rank 0 has begun "a" and will come to its graph; rank 1 comes to "b" first, and may not wait before "a"."""
    store = Store(dist.HashStore(), timedelta(seconds=10))
    rank0, rank1 = SharedOrder(store), SharedOrder(store)
    assert rank0.precedes("begin a", {"begin b"})
    assert not rank1.precedes("begin b", {"begin a"})
    assert rank0.precedes("graph of a", {"begin b"})
    assert rank1.precedes("graph of a", {"begin b"})
    assert rank0.precedes("begin b", set())
    assert not rank1.precedes("begin b", {"graph of a"})


class Player:
    """A wrapper as the conductor sees it; writes down what it does."""

    def __init__(self, name: str, log: list[str], *, fails: str = "", waits: str | None = None) -> None:
        self.name, self._log, self._fails, self._waits = name, log, fails, waits

    def expect_in_task(self) -> None: ...

    def ends_with(self, task: int) -> bool:
        return task == 1

    def is_broken_off(self) -> bool:
        return False

    def waits_to_send(self) -> str | None:
        return self._waits

    def _does(self, what: str) -> None:
        self._log.append(f"{self.name} {what}")
        if what == self._fails:
            raise ValueError(f"{self.name} {what}")

    def send_rest(self) -> None:
        self._does("sends")

    def end(self) -> None:
        self._does("ends")


def conducted(players: Sequence[Player]) -> Conductor:
    conductor = Conductor()
    for player in players:
        conductor.add(player)
    order = SharedOrder(Store(dist.HashStore(), timedelta(seconds=10)))
    for event in ("z end", "y end", "x end", "second", "first"):
        order.events_before(event)
    conductor._order = lambda: order
    return conductor


def test_everything_is_sent_before_anything_is_awaited_in_the_order_of_all_ranks() -> None:
    log: list[str] = []
    players = [Player(name, log) for name in "xyz"]
    conducted(players).end(1)
    assert sorted(log[:3]) == ["x sends", "y sends", "z sends"]
    assert log[3:] == ["z ends", "y ends", "x ends"]


def test_who_waits_while_sending_comes_last_and_in_order() -> None:
    log: list[str] = []
    players = [Player("x", log, waits="first"), Player("y", log, waits="second"), Player("z", log)]
    conducted(players).end(1)
    assert log == ["z sends", "y sends", "x sends", "z ends", "y ends", "x ends"]


def test_an_error_of_one_wrapper_keeps_no_other_from_its_part() -> None:
    log: list[str] = []
    players = [Player("x", log), Player("y", log, fails="sends"), Player("z", log, fails="ends")]
    with pytest.raises(ValueError, match="y sends") as caught:
        conducted(players).end(1)
    assert log[3:] == ["z ends", "x ends"]
    assert caught.value.__notes__ == ["And of another wrapper in the same backward: ValueError: z ends"]


# ---- on ranks --------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """Two layers with a graph break between them if asked for, and one that only some ranks use."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.sometimes = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.breaks, self.active = breaks, True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.second(x)
        return x + self.sometimes(x) if self.active else x


def batch(rank: int, step: int, number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))


def losses(parts: Sequence[nn.Module], rank: int, step: int, order: Sequence[int]) -> Tensor:
    """The sum of each part's loss, their forwards called in this order."""
    found = {number: parts[number](batch(rank, step, number)).square().sum() for number in order}
    return torch.stack([found[number] for number in sorted(found)]).sum()


def _in_any_order(rank: int, kinds: Sequence[str], breaks: bool, subgroups: bool) -> None:
    world_size = dist.get_world_size()
    groups: list[Any] = [None] * len(kinds)
    members = [list(range(world_size))] * len(kinds)
    if subgroups:
        members = [[0, 1], [1, 2], [0, 2]][: len(kinds)]
        groups = [dist.new_group(ranks) for ranks in members]
    models = [Part(breaks) for _ in kinds]
    mine = [number for number in range(len(kinds)) if rank in members[number]]
    ddps: dict[int, nn.Module] = {
        n: wrappers([kinds[n]])[kinds[n]](models[n], process_group=groups[n], bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
        for n in mine
    }
    for step in range(6):
        # Ranks turn the order round in other steps, from the first one on.
        order = [*mine] if (rank + step) % 2 else [*reversed(mine)]
        if step == 5:
            order = [*mine]
        expected = {}
        for n in mine:
            ddps[n].module.active = step < 2 or rank == step % world_size
            copied = copy.deepcopy(ddps[n].module)
            local = gradients_here(copied, lambda module, n=n: module(batch(rank, step, n)).square().sum())  # noqa: B023
            expected[n] = _mean(local, copied, groups[n], len(members[n]))
            ddps[n].zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what goes by hooks
            losses(ddps, rank, step, order).backward()  # type: ignore[arg-type]
        for n in mine:
            assert_gradients_or_none(ddps[n].module, expected[n])
    for n in mine:
        ddps[n].unwrap()


def _mean(
    local: dict[str, Tensor | None], module: nn.Module, group: dist.ProcessGroup | None, size: int
) -> dict[str, Tensor | None]:
    means: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        gradient = local[name]
        total = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        used = torch.tensor(float(gradient is not None))
        dist.all_reduce(total, group=group)
        dist.all_reduce(used, group=group)
        means[name] = total / size if used else None
    return means


def assert_gradients_or_none(module: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, parameter in module.named_parameters():
        mean = expected[name]
        if mean is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, mean, rtol=1e-4, atol=1e-6, msg=name)


KINDS = [
    ("EagerDDP", "EagerDDP"),
    ("compile_ddp", "compile_ddp"),
    ("compile_ddp", "EagerDDP"),
    ("EagerDDP", "compile_ddp", "compile_ddp"),
    ("EagerDDP", "EagerDDP", "EagerDDP"),
]


@pytest.mark.parametrize(
    ("kinds", "breaks"), [*((kinds, False) for kinds in KINDS[:4]), (KINDS[1], True), (KINDS[2], True)]
)
def test_ranks_may_run_wrappers_of_one_backward_in_other_orders(
    ranks2: RankPool, kinds: Sequence[str], breaks: bool
) -> None:
    ranks2.run(_in_any_order, kinds, breaks, False)


@pytest.mark.parametrize("kinds", [kinds for kinds in KINDS if len(kinds) == 3], ids=" ".join)
def test_the_same_on_three_ranks(ranks3: RankPool, kinds: Sequence[str]) -> None:
    ranks3.run(_in_any_order, kinds, True, False)


@pytest.mark.parametrize("kinds", [kinds for kinds in KINDS if len(kinds) == 3], ids=" ".join)
def test_the_same_in_subgroups_each_of_which_has_another_rank(ranks3: RankPool, kinds: Sequence[str]) -> None:
    """Where each waited for its own order, rank 0 would wait for 2, 2 for 1 and 1 for 0."""
    ranks3.run(_in_any_order, kinds, False, True)


@pytest.mark.inductor
def test_graphs_of_inductor_in_other_orders(ranks2: RankPool) -> None:
    ranks2.run(_with_inductor, timeout_seconds=400.0, collective_timeout_seconds=120.0)


def _with_inductor(rank: int) -> None:
    ddps = [wrappers(["compile_ddp"])["compile_ddp"](Part(), backend="inductor") for _ in range(2)]
    for step in range(4):
        expected = [
            expected_mean(copy.deepcopy(ddp.module), lambda m, n=n: m(batch(rank, step, n)).square().sum())  # noqa: B023
            for n, ddp in enumerate(ddps)
        ]
        for ddp in ddps:
            ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses(ddps, rank, step, (0, 1) if (rank + step) % 2 else (1, 0)).backward()
        for ddp, mean in zip(ddps, expected, strict=True):
            assert_gradients(ddp.module, mean, rtol=1e-4, atol=1e-6)


class UsesOneOutsideToo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(5))

    @torch.compiler.disable
    def shifted(self, x: Tensor) -> Tensor:
        return x + self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(torch.sin(x)) * self.shift


def _uses_one_outside_too(rank: int, late: int) -> list[bool]:
    ddps = [wrappers(["compile_ddp"])["compile_ddp"](model) for model in (UsesOneOutsideToo(), Part())]
    for step in range(4):
        expected = [
            expected_mean(copy.deepcopy(ddp.module), lambda m, n=n: m(batch(rank, step, n)).square().sum())  # noqa: B023
            for n, ddp in enumerate(ddps)
        ]
        for ddp in ddps:
            ddp.zero_grad()
        loss = losses(ddps, rank, step, (0, 1) if rank else (1, 0))  # backward runs what came last first
        time.sleep(0.5 * (rank == late))  # the other one begins its backward first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()
        for ddp, mean in zip(ddps, expected, strict=True):
            assert_gradients(ddp.module, mean, rtol=1e-5, atol=1e-6)
    return [section.reduces_again for section in ddps[0].plan.sections]


@pytest.mark.parametrize("late", [0, 1])
def test_a_graph_runs_at_first_where_another_wrapper_would_begin_before_it_on_one_rank(
    ranks2: RankPool, late: int
) -> None:
    """No rank ran it, and none saw that its parameter is used outside of it too: an error in the second step."""
    assert ranks2.run(_uses_one_outside_too, late) == [[False, True]] * 2


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.behind = nn.Linear(5, 5), inner, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.inner(torch.tanh(self.before(x))))


def _stays_in_graphs(rank: int) -> list[set[str]]:
    """In one order on all ranks every graph reduces, also where wrappers stand inside each other or in a row."""
    make = wrappers(["compile_ddp"])["compile_ddp"]
    inner = make(Part())
    outer = make(Around(inner))
    head = make(Part(breaks=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of")
        for step in range(4):
            head(outer(batch(rank, step, 0))).square().sum().backward()
            for ddp in (inner, outer, head):
                ddp.zero_grad()
    return [{section.origin for section in ddp.plan.sections} for ddp in (inner, outer, head)]


def test_in_one_order_every_graph_reduces(ranks2: RankPool) -> None:
    for origins in ranks2.run(_stays_in_graphs):
        assert origins == [{"graph"}] * 3


class Recomputed(nn.Module):
    """Autograd does not know that it will accumulate anything of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * checkpoint(self.linear, x, use_reentrant=True)


class Unused(Recomputed):
    """A backward reaches its output, and none of its parameters."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x * 3.0


def _reaches_outputs_alone(rank: int, wrapper: str, second: type[Recomputed]) -> None:
    both = [wrappers([wrapper])[wrapper](model) for model in (nn.Linear(5, 3), second(5))]
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        expected = [expected_mean(copy.deepcopy(ddp.module), lambda m, x=x: m(x).sum()) for ddp in both]
        for ddp in both:
            ddp.zero_grad()
        first, second = both if rank == 0 else reversed(both)
        (first(x).sum() + second(x).sum()).backward()
        for ddp, means in zip(both, expected, strict=True):
            for name, parameter in ddp.module.named_parameters():
                found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(found.double(), means[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
@pytest.mark.parametrize("second", [Recomputed, Unused])
def test_a_backward_may_reach_no_more_of_one_than_its_outputs(
    ranks2: RankPool, wrapper: str, second: type[Recomputed]
) -> None:
    """What its reentrant checkpoints accumulate autograd does not know, and unused parameters get nothing."""
    ranks2.run(_reaches_outputs_alone, wrapper, second)


def _breaks_between(rank: int, kinds: Sequence[str], hows: Sequence[str]) -> None:
    """An exception between two wrappers, or before both: the step is dropped everywhere, and the next one is right.

    In the first backward of all, where it is the first of `hows`, and in later ones.
    """
    first, second = (wrappers([kind])[kind](Part()) for kind in kinds)
    for how in hows:
        _break_between(rank, first, second, how)
    for ddp in (first, second):
        ddp.unwrap()


def _break_between(rank: int, first: nn.Module, second: nn.Module, how: str) -> None:
    def step_of(number: int, armed: bool = False) -> Tensor:
        hidden = first(batch(rank, number, 0))
        hidden = hidden * 1.0
        loss = second(hidden).square().sum() * 1.0
        if armed:
            (loss if how == "before" else hidden).register_hook(planted)
        return loss

    def planted(_: Tensor) -> None:
        raise ValueError("planted")

    for number in range(5):
        for ddp in (first, second):
            ddp.zero_grad()
        if number not in (0, 2):
            both = nn.ModuleList([copy.deepcopy(first.module), copy.deepcopy(second.module)])
            expected = mean_over_ranks(
                gradients_here(both, lambda m: m[1](m[0](batch(rank, number, 0)) * 1.0).square().sum()),  # noqa: B023
                both,
            )
            step_of(number).backward()
            assert_gradients(nn.ModuleList([first.module, second.module]), expected, rtol=1e-4, atol=1e-6)
        elif rank == 0:
            try:
                step_of(number, armed=True).backward()
            except ValueError:
                if how == "before":
                    first.abandon_backward(second)
            else:
                raise AssertionError("nothing was raised")
            if how == "abandon":
                second.abandon_backward()
            elif how == "forward":
                with torch.no_grad():
                    first(batch(rank, number, 0))
        else:
            with pytest.raises(RuntimeError, match=r"broke off on 1 other rank"):
                step_of(number).backward()
    assert_equal_on_all_ranks([first.plan.fingerprint, second.plan.fingerprint])


HOWS = ("before", "abandon", "forward")


@pytest.mark.parametrize(
    ("kinds", "hows"),
    [(kinds, HOWS[n:] + HOWS[:n]) for n, kinds in enumerate(KINDS[:3])] + [(KINDS[0], HOWS[::-1])],
)
def test_an_exception_that_keeps_a_backward_from_some_wrappers_is_of_all_of_them(
    ranks2: RankPool, kinds: Sequence[str], hows: Sequence[str]
) -> None:
    ranks2.run(_breaks_between, kinds, hows)


def _skips(rank: int, kinds: Sequence[str]) -> None:
    ddps = [wrappers([kind])[kind](Part()) for kind in kinds]
    for step in range(4):
        skips = rank == step % 2 and step != 3
        expected = [
            mean_over_ranks(
                {} if skips else gradients_here(copy.deepcopy(d.module), lambda m, n=n: m(batch(rank, step, n)).sum()),  # noqa: B023
                d.module,
            )
            for n, d in enumerate(ddps)
        ]
        for ddp in ddps:
            ddp.zero_grad()
        with warnings.catch_warnings(), contextlib.ExitStack():
            warnings.simplefilter("ignore")
            if skips:
                ddps[step % 2].skip_step(*[ddp for ddp in ddps if ddp is not ddps[step % 2]])
            else:
                order = (0, 1) if (rank + step) % 2 else (1, 0)
                found = {n: ddps[n](batch(rank, step, n)).sum() for n in order}
                (found[0] + found[1]).backward()
        for ddp, mean in zip(ddps, expected, strict=True):
            assert_gradients(ddp.module, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kinds", KINDS[:3], ids=" ".join)
def test_a_rank_may_skip_a_step_of_wrappers_that_others_run_in_another_order(
    ranks2: RankPool, kinds: Sequence[str]
) -> None:
    ranks2.run(_skips, kinds)


def _two_forwards_each(rank: int) -> None:
    """Both sections of a wrapper have its parameters: where one waits in the graph, hooks cannot take the other."""
    both = [wrappers(["compile_ddp"])["compile_ddp"](nn.Linear(5, 3)) for _ in range(2)]
    for step in range(6):
        x, y = batch(rank, step, 0), batch(rank, step, 1)
        expected = [expected_mean(copy.deepcopy(ddp.module), lambda m, x=x, y=y: (m(x) * m(y)).sum()) for ddp in both]
        turns = [(0, x), (1, x), (0, y), (1, y)]
        if step % 3:
            turns = turns[:: 1 if rank == 0 else -1] if step % 3 == 1 else sorted(turns, key=lambda t: t[0] != rank)
        for ddp in both:
            ddp.zero_grad()
        outputs: dict[int, list[Tensor]] = {0: [], 1: []}
        for number, value in turns:
            outputs[number].append(both[number](value))
        sum((one * other).sum() for one, other in outputs.values()).backward()
        for ddp, means in zip(both, expected, strict=True):
            assert_gradients(ddp.module, means)


@pytest.mark.filterwarnings("ignore:gradients of")
def test_two_forwards_of_each_in_other_orders(ranks2: RankPool) -> None:
    ranks2.run(_two_forwards_each)


def _both_steady(rank: int, wrapper: str) -> list[int]:
    """How many steady steps of two wrappers in one backward have begun, and how many were turned into general ones."""
    first, second = (wrappers([wrapper])[wrapper](nn.Linear(5, 5), verify="off") for _ in range(2))
    begun, turned = SteadyStep.begin, SteadyStep.as_general
    counts = [0, 0]

    def begin(steady: SteadyStep, forwards: Any) -> None:
        counts[0] += 1
        begun(steady, forwards)

    def as_general(steady: SteadyStep) -> Any:
        counts[1] += 1
        return turned(steady)

    for step in range(6):
        x = row_batch(rank, step)
        for ddp in (first, second):
            ddp.zero_grad()
        noting = step >= 3
        with (
            unittest.mock.patch.object(SteadyStep, "begin", begin) if noting else contextlib.nullcontext(),
            unittest.mock.patch.object(SteadyStep, "as_general", as_general) if noting else contextlib.nullcontext(),
        ):
            second(torch.tanh(first(x))).square().sum().backward()
    return counts


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_steps_of_two_wrappers_in_one_backward_are_both_steady(ranks2: RankPool, wrapper: str) -> None:
    assert ranks2.run(_both_steady, wrapper) == [[6, 0]] * 2


# ---- a GAN whose discriminator is frozen while the generator learns --------------------------------------------------


def _discriminator_is_frozen(rank: int, wrapper: str) -> None:
    options: dict[str, Any] = {} if wrapper == "EagerDDP" else {"strict": True}
    g = wrappers([wrapper])[wrapper](nn.Linear(5, 5), **options)
    d = wrappers([wrapper])[wrapper](nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), **options)
    for step in range(6):
        z, real = row_batch(rank, step), row_batch(rank, 10 + step)
        fake, twin = copy.deepcopy(g.module)(z).detach(), copy.deepcopy(d.module)
        expected = expected_mean(twin, lambda m: m(real).mean() - m(fake).mean())  # noqa: B023
        d.zero_grad()
        (d(real).mean() - d(g(z).detach()).mean()).backward()
        assert_gradients(d.module, expected)
        launches, before = d._runtime.communicator.progress.launches, [p.grad.clone() for p in d.parameters()]
        d.module.requires_grad_(False)
        expected = expected_mean(copy.deepcopy(g.module), lambda m: -twin(m(z)).mean())  # noqa: B023
        g.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=r".*by hooks.*|.*graphs.*")
            (-d(g(z)).mean()).backward()
        assert_gradients(g.module, expected)
        d.module.requires_grad_(True)
        assert d._runtime.communicator.progress.launches == launches, "the discriminator has launched something"
        assert all(torch.equal(p.grad, kept) for p, kept in zip(d.parameters(), before, strict=True))


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_discriminator_that_is_frozen_while_the_generator_learns_launches_nothing(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_discriminator_is_frozen, wrapper)


def _frozen_on_one_rank_alone(rank: int, wrapper: str) -> None:
    d = wrappers([wrapper])[wrapper](nn.Linear(5, 1))
    for step in range(2):
        d(row_batch(rank, step)).sum().backward()
    d.module.requires_grad_(rank == 0)
    with pytest.raises(RuntimeError, match="steps") if rank == 0 else contextlib.nullcontext():
        d(row_batch(rank, 3).requires_grad_()).sum().backward()
    d.module.requires_grad_(True)
    if rank == 1:
        with pytest.raises(RuntimeError, match="steps"):
            d(row_batch(rank, 4)).sum().backward()


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_where_one_rank_alone_has_frozen_all_ranks_are_told_that_they_are_in_different_steps(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_frozen_on_one_rank_alone, wrapper)
