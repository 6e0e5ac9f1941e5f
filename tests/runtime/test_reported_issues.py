"""What was reported of torch's DDP under torch.compile, and of what others put around a model, under both wrappers.

Each case is right, which is equal to plain autograd averaged by hand, or refused by name on every rank. The number in a
test's name is that of the issue in github.com/pytorch/pytorch. docs/limits/others.md lists them.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    Mlp,
    TokenModel,
    assert_equal_on_all_ranks,
    assert_gradients,
    assert_step,
    expected_mean,
    mean_by_hand,
    row_batch,
    token_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_ddp import torch_private
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrapped(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


# ---- 143580: static_graph with no_sync -------------------------------------------------------------------------------


class TwoLosses(nn.Module):
    """A loss and a speculative one, from one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.near, self.far = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.stem(x))
        return self.near(hidden).square().sum(), self.far(hidden).square().sum()


def _static_graph_under_no_sync(rank: int, wrapper: str) -> None:
    """The first steps of all are local, and each forward has two backwards."""
    ddp = wrapped(wrapper, TwoLosses(), static_graph=True)
    for window in range(3):
        batches = [row_batch(rank, 3 * window + number) for number in range(3)]
        total = mean_by_hand(ddp, lambda module: sum(sum(module(x)) for x in batches))  # noqa: B023
        ddp.zero_grad()
        with ddp.no_sync():
            for x in batches[:2]:
                loss, speculative_loss = ddp(x)
                loss.backward(retain_graph=True)
                speculative_loss.backward()
        sum(ddp(batches[2])).backward()
        assert_gradients(ddp.module, total, atol=1e-6)


@pytest.mark.parametrize("wrapper", BOTH)
def test_143580_static_graph_may_begin_with_two_backwards_under_no_sync(ranks2: RankPool, wrapper: str) -> None:
    """Reported: DDP(static_graph=True) whose first backward is under no_sync() ends in an internal assertion.

    Behind that assertion it stops reducing from the second window on (pull request 187732): so there are three here.
    """
    ranks2.run(_static_graph_under_no_sync, wrapper)


# ---- 196227: stochastic depth ----------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """Drops rows of a branch; its probability is a float of the module, which differs from block to block."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        kept = 1.0 - self.p
        return x * torch.empty_like(x[:, :1]).bernoulli_(kept).div_(kept)


class StochasticDepth(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.drops = nn.ModuleList(DropPath(0.2 * number) for number in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block, drop in zip(self.blocks, self.drops, strict=True):
            x = x + drop(torch.tanh(block(x)))
        return x


def _stochastic_depth(rank: int, wrapper: str) -> None:
    options = {"strict": True} if wrapper == "compile_ddp" else {}
    ddp = wrapped(wrapper, StochasticDepth(), **options)
    for step in range(4):
        x = row_batch(rank, step)

        def seeded(module: nn.Module, x: Tensor = x, step: int = step) -> Tensor:
            torch.manual_seed(100 * step + rank)  # other rows are dropped on every rank
            return loss_of(module, x)

        assert_step(ddp, seeded)
        with torch.no_grad():  # what is compiled for evaluation, in between, and a probability that is scheduled
            torch.testing.assert_close(ddp.eval()(x), ddp.module(x))
        ddp.train()
        for drop in ddp.module.drops:
            drop.p *= 0.9


@pytest.mark.parametrize("wrapper", BOTH)
def test_196227_stochastic_depth_with_floats_of_its_own_is_averaged(ranks2: RankPool, wrapper: str) -> None:
    """Reported: torch.compile of DDP crashes on blocks with different drop probabilities when they are recompiled.

    DDPOptimizer splits the graph and hands a float from part to part. compile_ddp splits nothing, and does not fall
    back to hooks (`strict`).
    """
    ranks2.run(_stochastic_depth, wrapper)


# ---- 140229: growing sequences ---------------------------------------------------------------------------------------


def _growing_sequences(rank: int, wrapper: str) -> None:
    model: nn.Module = TokenModel(blocks=3)
    ddp = wrapped(wrapper, model if wrapper == "compile_ddp" else torch.compile(model, backend="aot_eager"))
    bare = copy.deepcopy(model)
    compiled = []
    for step in range(12):
        x, y = token_batch(10 * step + rank, time=16 + 2 * step + rank)  # every rank has a length of its own
        expected = expected_mean(bare, lambda module: module(x, y))  # noqa: B023
        ddp.zero_grad()
        ddp(x, y).backward()
        assert_gradients(model, expected, rtol=1e-4, atol=1e-6)
        compiled.append(torch_private.for_tests.compilations())
    assert compiled[-1] == compiled[2], compiled


@pytest.mark.parametrize("wrapper", BOTH)
def test_140229_growing_sequences_are_compiled_for_all_lengths_once(ranks2: RankPool, wrapper: str) -> None:
    """Reported: under DDP each new length recompiles, until the recompile limit is reached."""
    ranks2.run(_growing_sequences, wrapper)


# ---- 141827: buffers under no_grad -----------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention with a mask, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.into = nn.Linear(5, 8)
        self.register_buffer("mask", torch.triu(torch.ones(4, 4, dtype=torch.bool), 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(x))[None]
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


def _buffers_under_no_grad(rank: int, wrapper: str) -> None:
    options = {"fullgraph": True} if wrapper == "compile_ddp" else {}
    ddp = wrapped(wrapper, Masked(), **options)
    for step in range(3):
        x = row_batch(rank, step)
        loss_of(ddp, x).backward()  # leaves statistics of its own on each rank
        statistics = ddp.module.norm.running_mean.clone()
        dist.broadcast(statistics, 0)
        twin = copy.deepcopy(ddp.module).eval()
        twin.norm.running_mean.copy_(statistics)
        ddp.eval()
        with torch.no_grad():
            found = ddp(x)
            assert_equal_on_all_ranks(ddp.module.norm.running_mean.tolist())
            torch.testing.assert_close(ddp.module.norm.running_mean, statistics)
            twin.norm.running_var.copy_(ddp.module.norm.running_var)
            torch.testing.assert_close(found, twin(x))
        ddp.train()
        assert_step(ddp, lambda module: loss_of(module, x))  # noqa: B023


@pytest.mark.parametrize("wrapper", BOTH)
def test_141827_buffers_are_broadcast_under_no_grad_without_a_graph_break(ranks2: RankPool, wrapper: str) -> None:
    """Reported: DDP's broadcast of the buffers, in a forward under no_grad, breaks the graph; here it does not."""
    ranks2.run(_buffers_under_no_grad, wrapper)


# ---- 112152: gradients of DDP(compile) that differ silently ----------------------------------------------------------


def _compiled_first(wrapper: str) -> Any:
    return wrapped(wrapper, torch.compile(Mlp(), backend="aot_eager"))


def _compiled_last(wrapper: str) -> Any:
    return torch.compile(wrapped(wrapper, Mlp()), backend="aot_eager")


def _compiled_in_place(wrapper: str) -> Any:
    model = Mlp()
    model.compile(backend="aot_eager")
    return wrapped(wrapper, model)


def _compiled_part(wrapper: str) -> Any:
    model = Mlp()
    model.norm = torch.compile(model.norm, backend="aot_eager")
    return wrapped(wrapper, model)


ORDERS = [_compiled_first, _compiled_last, _compiled_in_place, _compiled_part]


def _in_order(rank: int, wrapper: str, make: Callable[[str], Any]) -> None:
    model = make(wrapper)
    parameters = dict(model.named_parameters())
    bare = Mlp()
    for step in range(4):
        for own, other in zip(model.parameters(), bare.parameters(), strict=True):
            other.data.copy_(own.data)
        expected = expected_mean(bare, lambda module: loss_of(module, row_batch(rank, step)))  # noqa: B023
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of buckets that go by hooks
            loss_of(model, row_batch(rank, step)).backward()
        found = [parameter.grad.double() for parameter in parameters.values()]
        torch.testing.assert_close(found, list(expected.values()), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter -= 0.01 * parameter.grad


@pytest.mark.parametrize("make", ORDERS, ids=lambda make: make.__name__.strip("_"))
@pytest.mark.parametrize("wrapper", BOTH)
def test_112152_the_order_of_compiling_and_wrapping_changes_no_gradient(
    ranks2: RankPool, wrapper: str, make: Callable[[str], Any]
) -> None:
    """The thread was not found; it is said to be about gradients of DDP(torch.compile(model)) that differ silently."""
    ranks2.run(_in_order, wrapper, make)


# ---- 109191: checkpoints ---------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """The report's model: each layer is in a checkpoint of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.linear1, self.linear2 = nn.Linear(5, 8, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a1 = torch.relu(checkpoint(self.linear1, x, use_reentrant=self.reentrant))
        return x + checkpoint(self.linear2, a1, use_reentrant=self.reentrant)


def _checkpointed_layers(rank: int, wrapper: str, reentrant: bool, synchronised_forward_first: bool) -> None:
    ddp = wrapped(wrapper, TwoLayers(reentrant))
    for step in range(3):
        batches = [row_batch(rank, 3 * step + number).requires_grad_() for number in range(3)]
        total = mean_by_hand(ddp, lambda module: sum(loss_of(module, x) for x in batches))  # noqa: B023
        ddp.zero_grad()
        if synchronised_forward_first:
            synchronised = loss_of(ddp, batches[0])
        with ddp.no_sync():
            for x in batches[1:]:
                loss_of(ddp, x).backward()
        if not synchronised_forward_first:
            synchronised = loss_of(ddp, batches[0])
        synchronised.backward()
        assert_gradients(ddp.module, total, atol=1e-5)


@pytest.mark.parametrize("synchronised_forward_first", [False, True], ids=["forward last", "forward first"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_109191_checkpointed_layers_are_averaged_around_no_sync(
    ranks2: RankPool, wrapper: str, reentrant: bool, synchronised_forward_first: bool
) -> None:
    """Reported (and in 108556): with layers under checkpoint, DDP's gradients are not synchronised across ranks.

    In some orders of forwards and backwards around no_sync(), and silently.
    """
    ranks2.run(_checkpointed_layers, wrapper, reentrant, synchronised_forward_first)


# ---- 104336: a model that is moved away and back ---------------------------------------------------------------------


def _moved(rank: int, wrapper: str) -> None:
    ddp = wrapped(wrapper, Mlp())
    x = row_batch(rank)
    for _ in range(3):
        assert_step(ddp, lambda module: loss_of(module, x))
        before = [parameter.data_ptr() for parameter in ddp.parameters()]
        kept = ddp.double()
        ddp.float().cpu()  # to other memory and back, by .data, as .cpu() and .cuda() do
        assert kept is ddp and before != [parameter.data_ptr() for parameter in ddp.parameters()]


def _moved_to_new_parameters(rank: int, wrapper: str) -> None:
    ddp = wrapped(wrapper, Mlp())
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        ddp.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    with pytest.raises(RuntimeError, match=r"(head|first|norm)\.\w+ was replaced or removed after the model"):
        ddp(row_batch(rank))


@pytest.mark.parametrize("wrapper", BOTH)
def test_104336_a_model_that_is_moved_away_and_back_is_averaged(ranks2: RankPool, wrapper: str) -> None:
    """Reported: after .cpu() and .cuda() DDP reduces nothing, silently: autograd's nodes, with its hooks, are new."""
    ranks2.run(_moved, wrapper)


@pytest.mark.parametrize("wrapper", BOTH)
def test_104336_where_moving_makes_new_parameters_it_is_refused_by_name(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_moved_to_new_parameters, wrapper)
