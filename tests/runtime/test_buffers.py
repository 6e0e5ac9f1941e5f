"""Initial parameters and buffers come from rank 0; later buffers are synchronised in forward, by torch DDP's rule."""

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, assert_gradients, mean_by_hand, row_batch, wrappers
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp.graph.program import MERGED
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class WithBuffers(nn.Module):
    """BatchNorm's statistics, a buffer that forward writes, one that it reads, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("total", torch.randn(3))
        self.register_buffer("scale", torch.randn(1))
        self.register_buffer("mask", torch.rand(4) > 0.5, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) * self.scale
        if self.training:
            self.total += x.sum()
        return self.head(torch.where(self.mask, hidden, hidden.square()))


def reference(model: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers, in torch 2.13
        return DistributedDataParallel(copy.deepcopy(model), **options)


def assert_same_state(ddp: nn.Module, expected: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    for one, other in ((ddp.parameters(), expected.parameters()), (ddp.buffers(), expected.buffers())):
        torch.testing.assert_close(list(one), list(other), rtol=rtol, atol=atol)


def _construct(rank: int, wrapper: str, init_sync: bool, broadcast_buffers: bool) -> tuple[float, float]:
    model = WithBuffers()  # another one on each rank
    own = copy.deepcopy(model)
    options = {"init_sync": init_sync, "broadcast_buffers": broadcast_buffers}
    expected = reference(model, **options)
    ddp = wrappers([wrapper])[wrapper](model, **options)
    assert_same_state(ddp.module, expected.module)
    if init_sync:
        assert_equal_on_all_ranks([parameter.tolist() for parameter in model.parameters()])
    if init_sync and broadcast_buffers:
        assert_equal_on_all_ranks([buffer.tolist() for buffer in model.buffers()])
    if rank == 0 or not init_sync:
        assert_same_state(model, own)
    return model.head.weight[0, 0].item(), model.total[0].item()


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrapped_model_starts_from_the_same_state_as_under_torch_ddp(
    ranks2: RankPool, wrapper: str, init_sync: bool, broadcast_buffers: bool
) -> None:
    (weight, total), (weight_1, total_1) = ranks2.run(_construct, wrapper, init_sync, broadcast_buffers)
    assert (weight == weight_1) == init_sync
    assert (total == total_1) == (init_sync and broadcast_buffers)


def _start_from_the_groups_first_rank(rank: int, wrapper: str) -> float | None:
    subgroup = dist.new_group([1, 2])
    if rank == 0:
        return None
    ddp = wrappers([wrapper])[wrapper](WithBuffers(), process_group=subgroup)
    return ddp.module.total[0].item() + ddp.module.head.bias[0].item()


def test_in_a_subgroup_the_first_state_is_that_of_the_groups_rank_0(ranks3: RankPool) -> None:
    outside, *inside = ranks3.run(_start_from_the_groups_first_rank, "EagerDDP")
    assert outside is None
    assert inside[0] == inside[1]


# What a loop may do with a model, one letter each.
# t: train and synchronise   n: train in no_sync   f: forward alone, with gradients   e: evaluate without gradients
# g: evaluate with gradients   i: evaluate in inference mode   x: the forward raises
# b: every rank changes its buffers by hand
PATTERNS = ("ttt", "tnnt", "btbntbtt", "tbebebtbe", "tbftb", "tbibt", "tbgbgbtbnbnbtb", "etbxbtb")


def _run_pattern(rank: int, wrapper: str, pattern: str, options: dict[str, Any]) -> int:
    model = WithBuffers()
    pair = reference(model, **options), wrappers([wrapper])[wrapper](model, **options)
    optimizers = [torch.optim.SGD(wrapped.parameters(), lr=0.1) for wrapped in pair]
    for step, action in enumerate(pattern):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        for wrapped, optimizer in zip(pair, optimizers, strict=True):
            _act(action, wrapped, optimizer, x, rank)
        expected, ddp = pair
        # Bit for bit where eager code made them; a compiled graph may round otherwise.
        tolerance = {} if wrapper == "EagerDDP" else {"rtol": 1e-5, "atol": 1e-6}
        assert_same_state(ddp.module, expected.module, **tolerance)
    return len(pattern)


def _act(action: str, wrapped: Any, optimizer: torch.optim.Optimizer, x: Tensor, rank: int) -> None:
    wrapped.train(action in "tnfx")
    match action:
        case "t":
            wrapped(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        case "n":
            with wrapped.no_sync():
                wrapped(x).square().sum().backward()
        case "f" | "g":
            wrapped(x)
        case "e":
            with torch.no_grad():
                wrapped(x)
        case "i":
            with torch.inference_mode():
                wrapped(x)
        case "b":
            wrapped.module.total += rank + 1
            wrapped.module.norm.running_var *= rank + 2
        case "x":
            with pytest.raises((RuntimeError, TypeError)):
                wrapped(x[:, :3])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_buffers_are_synchronised_exactly_when_torch_ddp_does(ranks2: RankPool, wrapper: str, pattern: str) -> None:
    assert ranks2.run(_run_pattern, wrapper, pattern, {}) == [len(pattern)] * 2


@pytest.mark.parametrize("wrapper", BOTH)
def test_with_broadcast_buffers_off_every_rank_keeps_its_own(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_run_pattern, wrapper, "tbntbebt", {"broadcast_buffers": False})


def _running_statistics(rank: int, wrapper: str) -> list[float]:
    ddp = wrappers([wrapper])[wrapper](WithBuffers())
    for step in range(3):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().sum().backward()
        ddp.zero_grad()
    after_training = ddp.module.norm.running_mean.tolist()
    with torch.no_grad():
        ddp.eval()(x)  # the forward that follows a synchronised one brings rank 0's
    assert_equal_on_all_ranks(ddp.module.norm.running_mean.tolist())
    assert ddp.module.norm.num_batches_tracked.item() == 3
    return after_training


@pytest.mark.parametrize("wrapper", BOTH)
def test_batch_statistics_are_local_in_a_step_and_rank_0s_in_the_next_forward(ranks2: RankPool, wrapper: str) -> None:
    first, second = ranks2.run(_running_statistics, wrapper)
    assert first != second


def _two_forwards(rank: int, wrapper: str) -> None:
    model = WithBuffers()
    expected, ddp = reference(model), wrappers([wrapper])[wrapper](model)
    for training in (True, False):
        # torch 2.11's own DDP writes into what its first forward has saved.
        for wrapped, context in ((expected, allow_mutation_on_saved_tensors()), (ddp, contextlib.nullcontext())):
            wrapped.train(training)
            wrapped.zero_grad()
            generator = torch.Generator().manual_seed(rank)
            with context:
                losses = [wrapped(torch.randn(6, 5, generator=generator)).square().sum() for _ in range(2)]
                (losses[0] + losses[1]).backward()
        for one, other in zip(ddp.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
        assert_same_state(ddp.module, expected.module, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_second_forward_does_not_spoil_the_buffers_that_the_first_saved_for_backward(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_two_forwards, wrapper)


def _replaced(rank: int, wrapper: str) -> list[float]:
    ddp = wrappers([wrapper])[wrapper](WithBuffers())
    x = torch.randn(6, 5)
    ddp(x).sum().backward()
    ddp.module.total = torch.full((3,), float(rank + 7))
    ddp.eval()(x)
    return ddp.module.total.tolist()


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_buffer_that_was_replaced_is_synchronised_too(ranks2: RankPool, wrapper: str) -> None:
    assert ranks2.run(_replaced, wrapper) == [[7.0] * 3] * 2


class RegistersLate(nn.Module):
    """Its first training forward registers a buffer of this rank's own values."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "center"):
            self.register_buffer("center", x.detach().mean(0))
        return self.head(x - self.center)


def _registered_late(rank: int, wrapper: str) -> list[float]:
    ddp = wrappers([wrapper])[wrapper](RegistersLate())
    x = torch.full((3, 5), float(rank + 7))
    ddp(x).sum().backward()
    assert ddp.module.center.tolist() == [float(rank + 7)] * 5
    ddp(x).sum().backward()
    return ddp.module.center.tolist()


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_buffer_that_a_forward_registers_is_synchronised_from_the_next_one_on(ranks2: RankPool, wrapper: str) -> None:
    assert ranks2.run(_registered_late, wrapper) == [[7.0] * 5] * 2


def _grown_on_one_rank(rank: int, wrapper: str) -> list[float]:
    ddp = wrappers([wrapper])[wrapper](WithBuffers(), broadcast_buffers=False)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank))
    ddp(x).square().sum().backward()
    if rank == 1:
        ddp.module.total = torch.ones(7)  # as caches of rotary embeddings do, for a longer batch
    ddp.zero_grad()
    ddp(x).square().sum().backward()
    assert_equal_on_all_ranks(ddp.module.head.weight.grad.tolist())
    return ddp.module.total.tolist()


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_buffer_may_grow_on_one_rank_where_buffers_are_its_own(ranks2: RankPool, wrapper: str) -> None:
    first, second = ranks2.run(_grown_on_one_rank, wrapper)
    assert (len(first), len(second)) == (3, 7)


class Statistics(nn.Module):
    """Buffers that are views of one, which forward writes; behind it another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("both", torch.zeros(8))
        self.register_buffer("mean", self.both[:4])
        self.register_buffer("spread", self.both[4:])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.spread.mul_(0.9).add_(hidden.std(0), alpha=0.1)
        hidden = self.second(torch.tanh(hidden - self.mean)) + self.both.sum()
        torch._dynamo.graph_break()
        return self.head(torch.tanh(hidden)).square().sum()


def _with_views(rank: int, wrapper: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    ddp = wrappers([wrapper])[wrapper](Statistics(), **options, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x = row_batch(rank, step)
            twin = copy.deepcopy(ddp.module)
            twin(x)
            expected = mean_by_hand(ddp, lambda module: module(x))  # noqa: B023
            optimizer.zero_grad()
            ddp(x).backward()
            assert_gradients(ddp.module, expected, atol=1e-6)
            torch.testing.assert_close(dict(ddp.module.named_buffers()), dict(twin.named_buffers()))
            optimizer.step()
    told = [str(w.message) for w in caught if MERGED in str(w.message)]
    assert len(told) == (wrapper == "compile_ddp"), told
    if wrapper == "compile_ddp":
        assert "first.weight" in told[0]
        assert "head.weight" not in told[0]
        assert ddp.explain().fallback_reasons == (MERGED,)
        by_graph, *others = (section.plan.indices for section in ddp.plan.sections if section.origin == "graph")
        assert {ddp._runtime.parameters.names[index] for index in by_graph} == {"head.weight", "head.bias"}
        assert not others
    ddp.unwrap()


@pytest.mark.parametrize(
    ("wrapper", "options"), [("compile_ddp", {}), ("compile_ddp", {"dynamic": True}), ("EagerDDP", {})]
)
def test_hooks_reduce_a_graph_that_writes_a_buffer_with_views(
    ranks2: RankPool, wrapper: str, options: dict[str, Any]
) -> None:
    ranks2.run(_with_views, wrapper, options)


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_so_they_do_with_inductor(ranks2: RankPool, dynamic: bool | None) -> None:
    for _ in range(2):  # the second time from the caches
        ranks2.run(_with_views, "compile_ddp", {"backend": "inductor", "dynamic": dynamic}, timeout_seconds=400)


def _with_views_but_strict(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Statistics(), strict=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"share memory.*strict=True\) does not fall back"):
            ddp(row_batch(rank))
    ddp.unwrap()


def test_strict_refuses_such_a_graph(ranks2: RankPool) -> None:
    ranks2.run(_with_views_but_strict)
