"""Sparse gradients of nn.Embedding and nn.EmbeddingBag."""

import copy
import functools
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import assert_equal_on_all_ranks, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from compiled_ddp import EagerDDP, comm_hooks, compile_ddp, torch_private, verify_parity
from compiled_ddp.ranks.communicator import Communicator
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class Sparse(nn.Module):
    """`use` tells of the forward: "both", "token" alone, or "neither", of the two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(12, 4, sparse=True)
        self.bag = nn.EmbeddingBag(12, 4, sparse=True)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self.use = "both"

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(len(x), 4)
        if self.use != "neither":
            hidden = hidden + self.token(x[:, 0])
        if self.use == "both":
            hidden = hidden + self.bag(x)
        return self.body(hidden).square().sum()


class _Awaited:
    """A collective under way, which says when it is awaited."""

    def __init__(self, work: dist.Work, note: Callable[[str], None]) -> None:
        self._work, self._note = work, note

    def wait(self) -> bool:
        self._note("waited")
        return self._work.wait()


def _order_of_sums(rank: int) -> list[str]:
    noted, launch = list[str](), Communicator.all_reduce

    def noting(communicator: Communicator, tensor: Tensor, row: int | None = None) -> Any:
        if not tensor.is_sparse:
            return launch(communicator, tensor, row)
        noted.append("launched")
        return _Awaited(launch(communicator, tensor), noted.append)

    with unittest.mock.patch.object(Communicator, "all_reduce", noting):
        EagerDDP(Sparse())(_tokens(rank)).backward()
    return noted


def test_one_sparse_sum_is_under_way_at_a_time(ranks2: RankPool) -> None:
    """Gloo's sparse all-reduces spoil the heap where two of a group run at once."""
    assert ranks2.run(_order_of_sums) == [["launched", "waited"] * 2] * 2


def _tokens(rank: int, step: int = 0) -> Tensor:
    return torch.randint(0, 12, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient.to_dense()


def _local(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    bare = copy.deepcopy(module)
    bare.zero_grad()
    bare(x).backward()
    return {name: _dense(parameter.grad, parameter) for name, parameter in bare.named_parameters()}


def _mean(local: dict[str, Tensor]) -> dict[str, Tensor]:
    for gradient in local.values():
        dist.all_reduce(gradient)
    return {name: gradient / dist.get_world_size() for name, gradient in local.items()}


def _assert_gradients(ddp: Any, expected: dict[str, Tensor], factor: float = 1.0) -> None:
    for name, parameter in ddp.module.named_parameters():
        is_sparse = name in ("token.weight", "bag.weight")
        assert parameter.grad is None or parameter.grad.is_sparse == is_sparse, name
        found = _dense(parameter.grad, parameter)
        torch.testing.assert_close(found, factor * expected[name], rtol=1e-5, atol=1e-6, msg=name)


def _steps(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Sparse())
    assert_equal_on_all_ranks(ddp.token.weight.tolist())
    rows: list[float] = []
    ddp.token.weight.register_post_accumulate_grad_hook(lambda p: rows.append(p.grad.to_dense().sum().item()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    # What each rank uses, step by step; the last rank skips a step with and without its forward.
    for step, uses in enumerate(
        [("both",) * 3, ("token", "both", "neither"), ("neither",) * 3, ("both", "token", "both")]
    ):
        ddp.module.use = uses[rank]
        expected = _mean(_local(ddp.module, _tokens(rank, step)))
        ddp.zero_grad()
        rows.clear()
        ddp(_tokens(rank, step)).backward()
        _assert_gradients(ddp, expected)
        assert_equal_on_all_ranks([_dense(p.grad, p).tolist() for p in ddp.parameters()])
        assert (ddp.token.weight.grad is None) == (step == 2)
        if step != 2:
            torch.testing.assert_close(torch.tensor(rows), expected["token.weight"].sum()[None])
        optimizer.step()
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])
    ddp.module.use = "both"
    _skipped(ddp, rank)
    _accumulated(ddp, rank)
    _broken(ddp, rank)
    calls: list[Tensor] = []
    ddp.token.forward = functools.partial(_counted, calls, type(ddp.token).forward, ddp.token)
    _assert_right(ddp, rank)
    assert calls and vars(ddp.token).pop("forward").func is _counted
    assert "averaged at the end of each backward: token.weight, bag.weight" in str(ddp.explain())
    assert "forward" not in vars(ddp.token)
    origins = {section.origin for section in ddp.plan.launched}
    assert origins == {"graph" if wrapper == "compile_ddp" else "hooks"}
    ddp.unwrap()
    assert len(torch_private.tensors.post_accumulate_hooks(ddp.module.token.weight)) == 1  # the user's


def _counted(calls: list[Tensor], forward: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Tensor:
    """What Accelerate and others put in the place of a module's forward."""
    calls.append(x)
    return forward(module, x)


def _skipped(ddp: Any, rank: int) -> None:
    skips = rank == dist.get_world_size() - 1
    for forward in (True, False):
        local = _local(ddp.module, _tokens(rank))
        expected = _mean({name: gradient * float(not skips) for name, gradient in local.items()})
        ddp.zero_grad()
        loss = ddp(_tokens(rank)) if forward or not skips else None
        ddp.skip_step() if skips else loss.backward()
        _assert_gradients(ddp, expected)


def _accumulated(ddp: Any, rank: int) -> None:
    """Under no_sync(), the embeddings on rank 0 alone; then a .grad that stays from step to step."""
    local = _local(ddp.module, _tokens(rank))
    once = _mean({name: gradient.clone() for name, gradient in local.items()})
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(_tokens(rank)).backward()
    _assert_gradients(ddp, local)
    ddp(_tokens(rank)).backward()
    _assert_gradients(ddp, once, 2.0)
    kept = ddp.token.weight.grad
    ddp(_tokens(rank)).backward()
    _assert_gradients(ddp, once, 3.0)
    assert ddp.token.weight.grad is kept
    ddp.zero_grad(set_to_none=False)
    ddp(_tokens(rank)).backward()
    _assert_gradients(ddp, once)
    ddp.zero_grad()
    if rank == 0:
        with ddp.no_sync():
            ddp(_tokens(rank)).backward()
    ddp.module.use = "neither"
    others = _mean(_local(ddp.module, _tokens(rank)))
    ddp(_tokens(rank)).backward()
    ddp.module.use = "both"
    share = local["token.weight"].clone() * float(rank == 0)
    dist.all_reduce(share)
    torch.testing.assert_close(ddp.token.weight.grad.to_dense(), share / dist.get_world_size())
    torch.testing.assert_close(others["token.weight"], torch.zeros(12, 4))


def _broken(ddp: Any, rank: int) -> None:
    """An exception in backward on rank 0 alone, a dense gradient on rank 0 alone: then a step that is right."""

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    ddp.zero_grad()
    handle = ddp.token.weight.register_hook(fail) if rank == 0 else None
    loss = ddp(_tokens(rank))
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        ddp.abandon_backward()
    else:
        with pytest.raises(RuntimeError, match="broke off on a rank before its sparse gradients were averaged"):
            loss.backward()
    if handle is not None:
        handle.remove()
    _assert_right(ddp, rank)
    if rank == 0:
        ddp.token.weight.grad = torch.ones(12, 4)
    with pytest.raises(
        RuntimeError, match=r"parameter token\.weight has sparse=True.*not sparse on some rank.*sparse=F"
    ):
        ddp(_tokens(rank)).backward()
    _assert_right(ddp, rank)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"own sparse gradient of bag\.weight"):
            torch.autograd.grad(ddp(_tokens(rank)), [ddp.bag.weight])
    else:
        ddp(_tokens(rank))
    _assert_right(ddp, rank)


def _assert_right(ddp: Any, rank: int) -> None:
    expected = _mean(_local(ddp.module, _tokens(rank)))
    ddp.zero_grad()
    ddp(_tokens(rank)).backward()
    _assert_gradients(ddp, expected)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_sparse_gradients_are_averaged_and_stay_sparse(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_steps, wrapper)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", [pytest.param("compile_ddp", marks=pytest.mark.slow), "EagerDDP"])
def test_sparse_gradients_are_averaged_on_three_ranks(ranks3: RankPool, wrapper: str) -> None:
    ranks3.run(_steps, wrapper)


def _other_reductions(rank: int) -> None:
    """Weights of 1 and 3, then of 3 and of a rank that skips the step; sums."""
    for wrap in wrappers(BOTH).values():
        weighted, summed = wrap(Sparse(), reduction="weighted"), wrap(Sparse(), reduction="sum")
        for skips in (False, True):
            weighted.set_weight(1.0 + 2.0 * rank)
            share = (rank if skips else (1.0 + 2.0 * rank) / 4) * dist.get_world_size()
            expected = _mean({n: share * g for n, g in _local(weighted.module, _tokens(rank)).items()})
            weighted.zero_grad()
            loss = weighted(_tokens(rank))
            weighted.skip_step() if skips and rank == 0 else loss.backward()
            _assert_gradients(weighted, expected)
        expected = _mean(_local(summed.module, _tokens(rank)))
        summed(_tokens(rank)).backward()
        _assert_gradients(summed, expected, dist.get_world_size())


def test_sparse_gradients_are_summed_and_weighted_as_dense_ones_are(ranks2: RankPool) -> None:
    ranks2.run(_other_reductions)


class Tied(nn.Module):
    """A sparse embedding whose weight is used densely too."""

    def __init__(self, dense: Callable[[], bool]) -> None:
        super().__init__()
        self.token, self.head, self.dense = nn.Embedding(12, 4, sparse=True), nn.Linear(4, 4), dense

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.head(self.token(x))
        return (F.linear(hidden, self.token.weight) if self.dense() else hidden).square().sum()


def _refused(rank: int) -> None:
    for wrap in wrappers(BOTH).values():
        ddp = wrap(Tied(lambda: rank == 1))
        with pytest.raises(RuntimeError, match=r"parameter token\.weight has sparse=True.*is used elsewhere too"):
            ddp(_tokens(rank)).backward()
        with pytest.raises(ValueError, match="every trained parameter has a sparse gradient"):
            wrap(nn.Embedding(3, 3, sparse=True))
        with pytest.raises(RuntimeError, match=r"token\.weight.*sparse gradient"):
            wrap(Tied(bool).requires_grad_(True) if rank == 0 else _not_sparse(Tied(bool)))
    ddp = EagerDDP(nn.Sequential(nn.Linear(3, 4)))
    ddp.module.append(nn.Embedding(3, 3, sparse=True))
    with pytest.raises(ValueError, match=r"parameter 1\.weight with a sparse gradient was added or unfrozen"):
        ddp(torch.ones(1, 3))
    with pytest.raises(
        ValueError, match=r"bag\.weight has a sparse gradient, which takes part in no communication hook"
    ):
        EagerDDP(Sparse(), comm_hook=comm_hooks.bf16_compress)
    sparse = EagerDDP(Sparse())
    with pytest.raises(RuntimeError, match=r"token\.weight has a sparse gradient, which no communication hook reduces"):
        sparse.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="no model with sparse gradients"), sparse.join():
        pass
    whole = compile_ddp(Tied(bool), fullgraph=True, backend="aot_eager")  # nothing of it is left out of graphs
    _assert_right(whole, rank)
    assert verify_parity(Sparse(), _tokens(rank), wrap=EagerDDP).within(1e-5)


def _not_sparse(model: Any) -> nn.Module:
    model.token.sparse = False
    return model


def test_what_is_not_sparse_as_expected_is_an_error_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_refused)


class EmbeddingBeside(nn.Module):
    """Uses its embedding where it is given tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        return self.net(x if tokens is None else x + self.embedding(tokens))


def _asks_in_between(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](EmbeddingBeside())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    with ddp.no_sync():
        ddp(x, torch.tensor([rank, rank + 1, 3])).square().sum().backward()
    mean = ddp.module.embedding.weight.grad.to_dense().clone()
    dist.all_reduce(mean)
    torch.autograd.grad(ddp(x).square().sum(), list(ddp.module.net.parameters()))
    ddp(x).square().sum().backward()
    torch.testing.assert_close(ddp.module.embedding.weight.grad.to_dense(), mean / 2)


def test_a_local_sparse_gradient_outlives_an_autograd_grad_of_others(ranks2: RankPool) -> None:
    ranks2.run(_asks_in_between, "compile_ddp")
