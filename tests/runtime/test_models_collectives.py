"""Models that communicate by themselves, in the middle of forward and backward: no two ranks wait for each other."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import BrokenBlock, SumOverRanks, expected_mean, row_batch, wrappers
from torch import Tensor, nn

from compiled_ddp import compile_ddp
from compiled_ddp.plan import AMONG_COLLECTIVES
from compiled_ddp.step.reduction import ModelsCollectives
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}

sum_in_eager_code = torch.compiler.disable(SumOverRanks.apply)


def step(ddp: nn.Module, rank: int, number: int) -> None:
    """One step, compared with plain autograd averaged by hand. What no rank used must have no gradient."""
    x = row_batch(rank, number)
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x))
    ddp.zero_grad()
    ddp(x).backward()
    for name, parameter in ddp.module.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6, msg=f"step {number}, {name}")


def origins(ddp: Any) -> list[str]:
    return [section.origin for section in ddp.plan.sections]


class MeetsOthers(nn.Module):
    """Ranks meet in eager code, in forward and backward; behind that comes a part that not every rank runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        x = sum_in_eager_code(torch.tanh(self.first(x)))
        return self.second(x).square().sum() if self.active else x.square().sum()


class MeetsOthersWithTiedWeight(MeetsOthers):
    """A rank that does not run the last part gets the gradient of its weight late: behind the model's collective."""

    def forward(self, x: Tensor) -> Tensor:
        x = sum_in_eager_code(torch.tanh(self.second(self.first(x))))
        return self.second(x).square().sum() if self.active else x.square().sum()


def _meets_others(rank: int, wrapper: str, model: type[MeetsOthers], active: Callable[[int, int], bool]) -> None:
    ddp = wrappers(BOTH)[wrapper](model(), **ONE_BUCKET_EACH)
    for number in range(6):
        ddp.module.active = active(rank, number)
        step(ddp, rank, number)


def _from_the_second_step(rank: int, number: int) -> bool:
    return number % 2 == 0 or rank == number % 3 % 2


def _from_the_first_step(rank: int, number: int) -> bool:
    return (rank + number) % 2 == 0


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("model", [MeetsOthers, MeetsOthersWithTiedWeight])
@pytest.mark.parametrize("active", [_from_the_second_step, _from_the_first_step])
def test_a_rank_that_does_not_run_a_graph_does_not_keep_others_from_the_models_own_collectives(
    ranks2: RankPool, wrapper: str, model: type[MeetsOthers], active: Callable[[int, int], bool]
) -> None:
    ranks2.run(_meets_others, wrapper, model, active)


# ---- what it costs ---------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Two graphs with the model's collective between them, and a parameter of eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    @torch.compiler.disable
    def normalised(self, x: Tensor) -> Tensor:
        return SumOverRanks.apply(x) * self.scale  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.normalised(torch.tanh(self.first(x)))).square().sum()


def _alike(rank: int) -> tuple[list[str], list[str], list[int]]:
    ddp = compile_ddp(Between(), backend="aot_eager", verify="off", smallest_graph_mb=0)
    launched = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            before = ddp._runtime.communicator.progress.launches
            step(ddp, rank, number)
            launched.append(ddp._runtime.communicator.progress.launches - before)
    return origins(ddp), [str(w.message) for w in caught if AMONG_COLLECTIVES in str(w.message)], launched


def test_where_all_ranks_run_the_same_graphs_these_reduce_and_come_first(ranks2: RankPool) -> None:
    for sections, complaints, launched in ranks2.run(_alike):
        assert sections == ["graph", "graph", "hooks"]
        assert not complaints
        assert launched[1:] == [len(sections) + 1] * 3  # a bucket each, and one small exchange


def _without_collectives(rank: int) -> list[int]:
    ddp = compile_ddp(nn.Sequential(BrokenBlock(5)), backend="aot_eager", verify="off", smallest_graph_mb=0)
    launched = []
    for number in range(3):
        before = ddp._runtime.communicator.progress.launches
        ddp(row_batch(rank, number)).square().sum().backward()
        launched.append(ddp._runtime.communicator.progress.launches - before)
    assert origins(ddp) == ["graph", "graph"]
    return launched


def test_other_models_exchange_nothing_but_their_buckets(ranks2: RankPool) -> None:
    for launched in ranks2.run(_without_collectives):
        assert launched[1:] == [2, 2]


# ---- what the user is told -------------------------------------------------------------------------------------------


def _differs(rank: int, first_step: bool) -> tuple[list[str], list[str]]:
    ddp = compile_ddp(MeetsOthers(), backend="aot_eager", smallest_graph_mb=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            ddp.module.active = rank == 0 or number != (0 if first_step else 2)
            step(ddp, rank, number)
    return origins(ddp), [str(w.message) for w in caught if AMONG_COLLECTIVES in str(w.message)]


@pytest.mark.parametrize("first_step", [True, False])
def test_every_rank_says_once_that_hooks_reduce_where_one_differs(ranks2: RankPool, first_step: bool) -> None:
    for sections, complaints in ranks2.run(_differs, first_step):
        assert sections == (["hooks"] if first_step else ["graph", "graph"])
        assert len(complaints) == 1


def _differs_strictly(rank: int) -> None:
    ddp = compile_ddp(MeetsOthers(), backend="aot_eager", strict=True, smallest_graph_mb=0)
    ddp.module.active = rank == 0
    with pytest.raises(RuntimeError, match="the model communicates by itself"):
        ddp(row_batch(rank)).backward()


def test_strict_refuses_it_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_differs_strictly)


# ---- noticing it -----------------------------------------------------------------------------------------------------


class SumOfGradients(torch.autograd.Function):
    """As in tensor parallelism: the identity, whose backward all-reduces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.apply(gradient)  # type: ignore[no-any-return, no-untyped-call]


class MeetsOthersInBackward(MeetsOthersWithTiedWeight):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.compiler.disable(SumOfGradients.apply)(torch.tanh(self.second(self.first(x))))
        return self.second(x).square().sum() if self.active else x.square().sum()


def _only_in_backward(rank: int) -> bool:
    """The first backward shows it, and the next two bring a sequence about that knows."""
    ddp = compile_ddp(MeetsOthersInBackward(), backend="aot_eager", **ONE_BUCKET_EACH, smallest_graph_mb=0)
    for number in range(8):
        ddp.module.active = rank == 0 or number < 4
        step(ddp, rank, number)
    return ddp._runtime.reduction.agreed.among_collectives


@pytest.mark.filterwarnings("ignore:gradients of")
def test_collectives_of_the_backward_alone_are_noticed_too(ranks2: RankPool) -> None:
    assert ranks2.run(_only_in_backward) == [True, True]


def _counts(rank: int) -> tuple[bool, bool]:
    found, ours = ModelsCollectives(), wrappers(BOTH)["EagerDDP"](nn.Linear(5, 3))
    found.begin()
    ours(row_batch(rank)).sum().backward()
    found.end()
    before = found.seen
    found.begin()
    dist.barrier()
    found.end()
    return before, found.seen


def test_the_collectives_of_wrappers_are_not_the_models(ranks2: RankPool) -> None:
    assert ranks2.run(_counts) == [(False, True)] * 2


class Head(nn.Module):
    """Without collectives; the weight that a rank may use last is that of its first graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.first(x)))
        torch._dynamo.graph_break()
        return self.second(x).square().sum() if self.active else x.square().sum()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return sum_in_eager_code(torch.tanh(self.linear(x)))


def _chained(rank: int) -> None:
    """A graph of the head would wait for a rank that has gone on to the body's collective, in one backward."""
    body, head = (
        compile_ddp(model, backend="aot_eager", **ONE_BUCKET_EACH, smallest_graph_mb=0) for model in (Body(), Head())
    )
    for number in range(5):
        head.module.active = rank == 0 or number % 2 == 1
        x = row_batch(rank, number)
        twin = copy.deepcopy(nn.Sequential(body.module, head.module))
        expected = expected_mean(twin, lambda module: module(x))  # noqa: B023
        for ddp in (body, head):
            ddp.zero_grad()
        head(body(x)).backward()
        for name, parameter in nn.Sequential(body.module, head.module).named_parameters():
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:gradients of")
def test_collectives_of_another_wrappers_model_in_the_same_backward_count_too(ranks2: RankPool) -> None:
    ranks2.run(_chained)


class NotOnAllRanks(nn.Module):
    """Graphs of several buckets, the first of which not every rank runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x).sin() if self.active else x


def _behind_one_that_differs(rank: int, wrapper: str) -> None:
    """Where hooks hold back a bucket of one wrapper until the end, no rank waits in the middle for the other one."""
    body, head = MeetsOthersInBody(), NotOnAllRanks()
    twin = nn.Sequential(copy.deepcopy(body), copy.deepcopy(head))
    wrapped = [wrappers(BOTH)[wrapper](module, **ONE_BUCKET_EACH) for module in (body, head)]
    for number in range(6):
        x = row_batch(rank, number)
        twin[1].active = head.active = number == 0 or rank != number % 2
        twin.load_state_dict(nn.Sequential(body, head).state_dict())
        expected = expected_mean(twin, lambda module: module(x).square().sum())  # noqa: B023
        for ddp in wrapped:
            ddp.zero_grad()
        wrapped[1](wrapped[0](x)).square().sum().backward()
        for name, parameter in nn.Sequential(body, head).named_parameters():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)


class MeetsOthersInBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return sum_in_eager_code(torch.tanh(self.linear(x))) * self.scale


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_behind_a_wrapper_whose_ranks_differ_another_one_begins_alike(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_behind_one_that_differs, wrapper, collective_timeout_seconds=30)


def _begins_anew(rank: int) -> tuple[int, int]:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](MeetsOthers())
    beginnings = []
    for number in range(12):
        step(ddp, rank, number)
        beginnings.append(ddp._runtime.reduction.agreed.beginnings)
    return beginnings[2], beginnings[-1]


def test_hooks_of_a_model_that_communicates_keep_their_buckets(ranks2: RankPool) -> None:
    for before, after in ranks2.run(_begins_anew):
        assert before == after
