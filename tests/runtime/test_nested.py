"""A wrapped module inside a wrapped module: each wrapper reduces what is its own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    assert_equal_on_all_ranks,
    assert_gradients,
    gradient_copies,
    local_gradients,
    mean_over_ranks,
    row_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp import EagerDDP, compile_ddp
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.norm(self.one(x))))


class Whole(nn.Module):
    """Parts may be wrapped; without a wrapper it is the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 5)
        self.part = Part()
        self.out = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(torch.tanh(self.into(x)))
        return self.norm(self.out(x)).square().sum() + x.sum()


def _bare(ddp: Any) -> nn.Module:
    """A copy without any wrapper."""
    bare = Whole()
    bare.load_state_dict({name.replace("part.module.", "part."): v for name, v in ddp.module.state_dict().items()})
    return bare


def _under_bare_names(ddp: Any) -> nn.Module:
    renamed = nn.Module()
    named = [(name.replace("part.module.", "part."), p) for name, p in ddp.module.named_parameters()]
    renamed.named_parameters = lambda: iter(named)  # type: ignore[method-assign, assignment]
    return renamed


def _expected(ddp: Any, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    bare = _bare(ddp)
    return mean_over_ranks(local_gradients(bare, loss), bare)


def _assert_step(ddp: Any, loss: Callable[[nn.Module], Tensor]) -> None:
    expected = _expected(ddp, loss)
    ddp.zero_grad()
    loss(ddp).backward()
    assert_gradients(_under_bare_names(ddp), expected, rtol=1e-4, atol=1e-6)


def _nested(rank: int, outer: str, inner: str) -> None:
    model = Whole()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(rank)
    model.part = wrappers([inner])[inner](model.part)
    ddp = wrappers([outer])[outer](model)
    assert_equal_on_all_ranks([value.tolist() for value in ddp.module.state_dict().values()])
    assert not any("part" in name for name in ddp.plan.parameter_names) if ddp.plan else True
    for step in range(3):
        _assert_step(ddp, lambda module: module(row_batch(rank, step)))  # noqa: B023
        assert_equal_on_all_ranks([gradient.tolist() for gradient in gradient_copies(ddp).values()])
    assert {name.partition(".")[0] for name in ddp.plan.parameter_names} == {"into", "out", "norm"}
    origins = {section.origin for section in ddp.plan.launched}
    assert origins == {"graph" if outer == "compile_ddp" else "hooks"}
    origins = {section.origin for section in model.part.plan.launched}
    assert origins == {"graph" if inner == "compile_ddp" else "hooks"}
    # In the forward after a synchronised one each wrapper's buffers are those of rank 0 again.
    with torch.no_grad():
        for buffer in ddp.module.buffers():
            buffer.add_(rank)
    ddp.eval()
    ddp(row_batch(0))
    assert_equal_on_all_ranks([buffer.tolist() for buffer in ddp.module.buffers()])
    ddp.train()
    _accumulated(ddp, model.part, rank)
    _skipped(ddp, rank, forward=True)
    _skipped(ddp, rank, forward=False)
    ddp.unwrap()
    model.part = model.part.unwrap()
    wrappers([outer])[outer](model).unwrap()


def _accumulated(ddp: Any, inner: Any, rank: int) -> None:
    """no_sync() of the outer wrapper leaves the inner one synchronised, that of both leaves all local."""
    bare, x = _bare(ddp), row_batch(rank)
    local = local_gradients(bare, lambda module: module(x))
    mean = mean_over_ranks(local, bare)
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(x).backward()
    for name, parameter in _under_bare_names(ddp).named_parameters():
        expected = mean[name].float() if name.startswith("part.") else local[name]
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)
    ddp.zero_grad()
    with ddp.no_sync(), inner.no_sync():
        ddp(x).backward()
    for name, parameter in _under_bare_names(ddp).named_parameters():
        torch.testing.assert_close(parameter.grad, local[name], rtol=1e-4, atol=1e-6, msg=name)
    ddp(x).backward()
    assert_gradients(_under_bare_names(ddp), {n: 2 * g for n, g in mean.items()}, rtol=1e-4, atol=1e-6)


def _skipped(ddp: Any, rank: int, *, forward: bool) -> None:
    """A rank that skips the step counts as zero for both wrappers, with or without a forward before."""
    expected = _expected(ddp, lambda module: module(row_batch(rank)) * float(rank != 0))
    ddp.zero_grad()
    if rank != 0 or forward:
        loss = ddp(row_batch(rank))
    if rank == 0:
        ddp.skip_step()
    else:
        loss.backward()
    assert_gradients(_under_bare_names(ddp), expected, rtol=1e-4, atol=1e-6)


def _two_inside(rank: int, wrapper: str) -> None:
    """Rank 0 has no data for its very first step, and then some."""
    wrap = wrappers([wrapper])[wrapper]
    parts = [wrap(Part()), wrap(nn.Sequential(wrap(Part()), nn.Linear(5, 5)))]
    ddp = wrap(nn.Sequential(*parts, nn.Linear(5, 3)))
    for step in range(3):
        ddp.zero_grad()
        if rank == step:
            ddp.skip_step()
        else:
            ddp(row_batch(rank, step)).square().sum().backward()
        assert_equal_on_all_ranks([parameter.grad.tolist() for parameter in ddp.parameters()])


@pytest.mark.parametrize(("outer", "inner"), [("compile_ddp", "compile_ddp"), ("compile_ddp", "EagerDDP"), BOTH[::-1]])
def test_each_wrapper_reduces_its_own(ranks2: RankPool, outer: str, inner: str) -> None:
    ranks2.run(_nested, outer, inner)


@pytest.mark.parametrize(("outer", "inner"), [("EagerDDP", "EagerDDP"), ("compile_ddp", "compile_ddp")])
def test_each_wrapper_reduces_its_own_on_three_ranks(ranks3: RankPool, outer: str, inner: str) -> None:
    ranks3.run(_nested, outer, inner)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_rank_may_skip_steps_of_several_wrappers_inside_one(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_two_inside, wrapper)


def _side_by_side(rank: int) -> None:
    """Two wrappers in one backward, which one rank or the other skips in some steps, in the first one too."""
    wrap = wrappers(["compile_ddp"])["compile_ddp"]
    first, second = wrap(nn.Linear(5, 5)), wrap(nn.Linear(5, 3))
    bare = nn.ModuleList([copy.deepcopy(first.module), copy.deepcopy(second.module)])
    for step in range(5):
        x = row_batch(rank, step)
        skips = rank == step % 2 and step != 2
        scale = 0.0 if skips else 1.0
        mean = mean_over_ranks(local_gradients(bare, lambda m, x=x, s=scale: m[1](m[0](x)).square().sum() * s), bare)
        for ddp in (first, second):
            ddp.zero_grad()
        loss = second(first(x)).square().sum() if step % 2 == 0 or not skips else None
        if skips:
            first.skip_step(second)
        else:
            loss.backward()
        own = [*first.parameters(), *second.parameters()]
        for parameter, expected in zip(own, mean.values(), strict=True):
            torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_rank_may_skip_steps_of_wrappers_side_by_side(ranks2: RankPool) -> None:
    ranks2.run(_side_by_side)


def _refusals(rank: int) -> None:
    inner = EagerDDP(nn.Linear(5, 5))
    tied = nn.Linear(5, 5)
    tied.weight = inner.module.weight
    for wrap in wrappers(BOTH).values():
        with pytest.raises(ValueError, match=r"parameter \d\.weight belongs to a Linear that EagerDDP wraps"):
            wrap(nn.Sequential(inner, tied))
        with pytest.raises(ValueError, match="belongs to a Linear that EagerDDP wraps"):
            wrap(nn.Sequential(inner.module, nn.Linear(5, 5)))
        with pytest.raises(ValueError, match="besides those to ignore and those of wrappers inside"):
            wrap(nn.Sequential(inner))
    whole = compile_ddp(nn.Sequential(inner, nn.Linear(5, 5)), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"torch\.compiler\.disable"):
        whole(row_batch(rank))
    with (
        pytest.raises(RuntimeError, match="none with wrapped modules inside"),
        EagerDDP(nn.Sequential(inner, nn.Linear(5, 5))).join(),
    ):
        pass
    of_torch = nn.Sequential(DistributedDataParallel(nn.Linear(5, 5)), nn.Linear(5, 5))
    with pytest.raises(ValueError, match=r"0 is wrapped by torch's DistributedDataParallel.*with EagerDDP"):
        wrappers(["compile_ddp"])["compile_ddp"](of_torch)
    outer = EagerDDP(of_torch)
    x = row_batch(rank)
    bare = nn.Sequential(copy.deepcopy(of_torch[0].module), copy.deepcopy(of_torch[1]))
    mean = mean_over_ranks(local_gradients(bare, lambda m: m(x).square().sum()), bare)
    outer(x).square().sum().backward()
    for parameter, expected in zip(outer.parameters(), mean.values(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_of_both_is_refused_and_torch_ddp_inside_is_left_alone(ranks2: RankPool) -> None:
    ranks2.run(_refusals)
