"""torch.autograd.grad and backward(inputs=...): the mean over ranks or an error, never a local gradient."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from models import (
    Mlp,
    TokenModel,
    assert_equal_on_all_ranks,
    assert_gradients,
    expected_mean,
    gradient_copies,
    local_gradients,
    mean_by_hand,
    row_batch,
    token_batch,
    wrappers,
)
from torch import Tensor, nn

from compiled_ddp import compile_ddp
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler


class Branch(nn.Module):
    """A trunk in one graph and, where asked for, a branch in another."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, branched: bool) -> Tensor:
        x = self.trunk(x)
        torch._dynamo.graph_break()
        return (self.branch(x) if branched else x).square().sum()


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def _assert_returned(module: nn.Module, gradients: tuple[Tensor, ...], expected: dict[str, Tensor]) -> None:
    for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-6)


def _assert_unchanged(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    for name, parameter in module.named_parameters():
        if before[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, before[name], rtol=0, atol=0)


def _returns_the_mean(rank: int, backend: str) -> None:
    """As the first backward, between steps, with local and reduced gradients there, and before a backward."""
    ddp = compile_ddp(Mlp(), backend=backend, bucket_cap_mb=0.0001, first_bucket_mb=0.0001, smallest_graph_mb=0)
    parameters = list(ddp.module.parameters())
    x, other = row_batch(rank), row_batch(rank, 1)
    mean, other_mean = (expected_mean(ddp.module, lambda module: loss_of(module, b)) for b in (x, other))  # noqa: B023

    def returned() -> None:
        before = gradient_copies(ddp.module)
        objects = [parameter.grad for parameter in parameters]
        gradients = torch.autograd.grad(loss_of(ddp, x), parameters)
        _assert_returned(ddp.module, gradients, mean)
        _assert_unchanged(ddp.module, before)
        assert all(parameter.grad is grad for parameter, grad in zip(parameters, objects, strict=True))

    returned()  # nothing is there yet, no sequence either
    loss_of(ddp, other).backward()
    assert_gradients(ddp.module, other_mean, rtol=1e-4, atol=1e-6)
    returned()  # with means there
    loss_of(ddp, x).backward()
    total = {name: mean[name] + other_mean[name] for name in mean}
    assert_gradients(ddp.module, total, rtol=1e-4, atol=1e-6)
    ddp.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, other).backward()
    returned()  # with local ones there, which stay local
    loss_of(ddp, x).backward()
    assert_gradients(ddp.module, total, rtol=1e-4, atol=1e-6)
    kept = torch.autograd.grad(loss_of(ddp, x), parameters[:2])
    values = [gradient.clone() for gradient in kept]
    ddp.zero_grad()
    loss_of(ddp, other).backward()
    assert all(torch.equal(*pair) for pair in zip(kept, values, strict=True)), "a returned gradient changed"
    assert_gradients(ddp.module, other_mean, rtol=1e-4, atol=1e-6)
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    assert not ddp.explain().fallback_reasons


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_graph_returns_the_mean_and_leaves_grad_alone(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_returns_the_mean, backend, **LIMITS)


def _returns_some(rank: int) -> None:
    """Gradients of some parameters only, of an input, and with a graph that is kept."""
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    x = row_batch(rank).requires_grad_()
    mean = expected_mean(ddp.module, lambda module: loss_of(module, x.detach()))
    (of_input,) = torch.autograd.grad(loss_of(ddp.module, x), x)
    for _ in range(2):
        loss = loss_of(ddp, x)
        for _ in range(2):
            weight, found = torch.autograd.grad(loss, [ddp.module.first.weight, x], retain_graph=True)
            torch.testing.assert_close(weight.double(), mean["first.weight"], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found, of_input)
        assert ddp.module.first.weight.grad is None
        loss.backward()
        assert_gradients(ddp.module, mean)
        ddp.zero_grad()


def test_some_parameters_and_an_input_and_the_same_graph_again(ranks2: RankPool) -> None:
    ranks2.run(_returns_some)


def _returns_of_inputs(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for step in range(3):
        x = row_batch(rank, step).requires_grad_()
        mean = expected_mean(ddp.module, lambda module: loss_of(module, x.detach()))  # noqa: B023
        (of_input,) = torch.autograd.grad(loss_of(copy.deepcopy(ddp.module), x), x)
        loss = loss_of(ddp, x)
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(found, of_input)
        assert all(parameter.grad is None for parameter in ddp.module.parameters())
        loss.backward()
        assert_gradients(ddp.module, mean)
        torch.testing.assert_close(x.grad, of_input)
        ddp.zero_grad()


@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_of_inputs_alone_leave_the_backward_to_come(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_returns_of_inputs, wrapper)


def _hooks_refuse(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    x = row_batch(rank)
    mean = expected_mean(ddp.module, lambda module: loss_of(module, x))
    for _ in range(2):
        before = gradient_copies(ddp.module)
        with pytest.raises(RuntimeError, match=r"autograd.grad .* of first.weight, norm.bias, .*loss.backward\(\)"):
            torch.autograd.grad(loss_of(ddp, x), [ddp.module.first.weight, ddp.module.norm.bias])
        _assert_unchanged(ddp.module, before)
        with ddp.no_sync():
            local = torch.autograd.grad(loss_of(ddp, x), list(ddp.module.parameters()))
        expected = local_gradients(ddp.module, lambda module: loss_of(module, x))
        _assert_returned(ddp.module, local, {name: value.double() for name, value in expected.items()})
        _assert_unchanged(ddp.module, before)
        ddp.zero_grad()
        loss_of(ddp, x).backward()
        assert_gradients(ddp.module, mean)
    with ddp.no_sync():
        loss_of(ddp, x).backward()
    before = gradient_copies(ddp.module)
    with pytest.raises(RuntimeError, match="own gradient"):
        torch.autograd.grad(loss_of(ddp, x), list(ddp.module.parameters()))
    _assert_unchanged(ddp.module, before)
    loss_of(ddp, x).backward()
    assert_gradients(ddp.module, {name: 3 * value for name, value in mean.items()})


def test_where_hooks_reduce_it_is_an_error_that_names_the_parameter(ranks2: RankPool) -> None:
    ranks2.run(_hooks_refuse)


def _one_rank_refuses(rank: int) -> None:
    """In the first step and in a later one, with a gradient there to be kept."""
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    for step in range(4):
        mean = mean_by_hand(ddp, lambda module, step=step: loss_of(module, row_batch(rank, step)))
        if step % 2 == 0:
            loss, before = loss_of(ddp, row_batch(rank, step)), gradient_copies(ddp.module)
            if rank == 0:
                with pytest.raises(RuntimeError, match=r"would return this rank's own gradient of head\.weight"):
                    torch.autograd.grad(loss, [ddp.module.head.weight])
                _assert_unchanged(ddp.module, before)
            else:
                with pytest.raises(RuntimeError, match=r"broke off on 1 other rank"):
                    loss.backward()
        else:
            ddp.zero_grad()
            loss_of(ddp, row_batch(rank, step)).backward()
            assert_gradients(ddp.module, mean)


def test_where_one_rank_alone_asks_for_what_hooks_reduce_every_rank_raises(ranks2: RankPool) -> None:
    ranks2.run(_one_rank_refuses)


class EagerHead(nn.Module):
    """A captured body, and a head in eager code; `shared` is used in both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 2)
        self.shared = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.run_head(torch.tanh(self.body(x) * self.shared))

    @torch.compiler.disable
    def run_head(self, x: Tensor) -> Tensor:
        return self.head(x * self.shared).square().sum()


def _mixed(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](EagerHead())
    model, x = ddp.module, row_batch(rank)
    mean = expected_mean(model, lambda module: module(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            if step == 2:  # the graph's share of a sequence in which some sections are the hooks'
                with pytest.raises(RuntimeError, match=r"head\.weight"):
                    torch.autograd.grad(ddp(x), [model.head.weight])
            with pytest.raises(RuntimeError, match="shared"):
                torch.autograd.grad(ddp(x), [model.shared])
            assert all(parameter.grad is None for parameter in model.parameters())
            ddp(x).backward()
            assert_gradients(model, mean)
            ddp.zero_grad()
    assert_equal_on_all_ranks(ddp.plan.fingerprint)


def test_a_parameter_that_hooks_would_reduce_is_refused_in_a_model_of_both_kinds(ranks2: RankPool) -> None:
    ranks2.run(_mixed)


def _local_under_no_sync(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TokenModel())
    batch = token_batch(rank)
    parameters = list(ddp.module.parameters())
    mean = expected_mean(ddp.module, lambda module: module(*batch))
    local = {n: g.double() for n, g in local_gradients(ddp.module, lambda module: module(*batch)).items()}
    for _ in range(2):
        with ddp.no_sync():
            gradients = torch.autograd.grad(ddp(*batch), parameters)
        _assert_returned(ddp.module, gradients, local)
        assert all(parameter.grad is None for parameter in parameters)
        ddp(*batch).backward()
        assert_gradients(ddp.module, mean)
        ddp.zero_grad()


def test_under_no_sync_it_is_local(ranks2: RankPool) -> None:
    ranks2.run(_local_under_no_sync)


def _local_is_no_use(rank: int, wrapper: str) -> None:
    """The branch gets no gradient in any backward; torch.autograd.grad of it under no_sync leaves no trace."""
    ddp = wrappers([wrapper])[wrapper](Branch())
    ddp(row_batch(rank), True).backward()
    ddp.zero_grad()
    with ddp.no_sync():
        torch.autograd.grad(ddp(row_batch(rank), True), list(ddp.module.branch.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp(row_batch(rank), False).backward()
    assert all(parameter.grad is None for parameter in ddp.module.branch.parameters())
    assert all(parameter.grad is not None for parameter in ddp.module.trunk.parameters())


@pytest.mark.parametrize("wrapper", BOTH)
def test_under_no_sync_it_is_no_use_of_the_parameters(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_local_is_no_use, wrapper)


def _backward_to_some(rank: int, wrapper: str, make: Callable[[], nn.Module]) -> None:
    ddp = wrappers([wrapper])[wrapper](make())
    named = dict(ddp.module.named_parameters())
    some = {name: parameter for name, parameter in named.items() if "weight" in name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if make is EagerHead:  # whose parameter of both kinds must have its gradient in the first backward
            ddp(row_batch(rank)).sum().backward()
            ddp.zero_grad()
        for step in range(3):
            x = row_batch(rank, step)
            # On a copy: a backward of ddp.module itself counts as a local one, whose gradients are reduced too.
            mean = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x).sum())  # noqa: B023
            ddp(x).sum().backward(inputs=list(some.values()))
            for name, parameter in named.items():
                if name in some:
                    torch.testing.assert_close(parameter.grad.double(), mean[name], rtol=1e-5, atol=1e-6)
                else:
                    assert parameter.grad is None, name
            ddp.zero_grad()
            ddp(x).sum().backward()
            assert_gradients(ddp.module, mean)
            ddp(x).sum().backward(inputs=list(some.values()))
            assert_gradients(ddp.module, {name: (2 if name in some else 1) * value for name, value in mean.items()})
            ddp.zero_grad()


@pytest.mark.parametrize("make", [Mlp, EagerHead])
@pytest.mark.parametrize("wrapper", BOTH)
def test_backward_to_some_inputs_leaves_the_mean_in_those(
    ranks2: RankPool, wrapper: str, make: Callable[[], nn.Module]
) -> None:
    ranks2.run(_backward_to_some, wrapper, make)
