"""torch.func around a wrapper: functional_call puts others in the place of its parameters, transforms look through."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    Mlp,
    assert_gradients,
    assert_step,
    expected_mean,
    gradient_copies,
    local_gradients,
    mean_by_hand,
    row_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp.compat.apex import DistributedDataParallel as ApexDDP
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    if wrapper == "apex":
        return ApexDDP(model)
    return wrappers([wrapper])[wrapper](model, **options)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def assert_trains(ddp: Any, rank: int) -> None:
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))


def others_of(
    module: nn.Module, *, add: float = 0.5, names: Callable[[str], bool] = lambda _: True
) -> dict[str, Tensor]:
    """Leaves to put in the place of some parameters."""
    named = module.named_parameters()
    return {name: (p.detach() + add).requires_grad_() for name, p in named if names(name)}


def under_bare_names(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value.detach().clone().requires_grad_() for name, value in given.items()}


def by_hand(module: nn.Module, given: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What a bare copy returns, and its gradients of what it is given."""
    bare, theirs = copy.deepcopy(module), under_bare_names(given)
    output = functional_call(bare, theirs, (x,))
    output.square().sum().backward()
    return output.detach(), {name: value.grad for name, value in theirs.items()}


def assert_local(ddp: Any, given: dict[str, Tensor], x: Tensor) -> None:
    """Gradients flow to what is given, by bare names or DDP's; the wrapper's own are what they were."""
    before = [(p.grad, None if p.grad is None else p.grad.clone()) for p in ddp.parameters()]
    expected, gradients = by_hand(ddp.module, given, x)
    for prefix in ("", "module."):
        named = {prefix + name: value for name, value in under_bare_names(given).items()}
        output = functional_call(ddp, named, (x,))
        torch.testing.assert_close(output.detach(), expected)
        output.square().sum().backward()
        for name, gradient in gradients.items():
            torch.testing.assert_close(named[prefix + name].grad, gradient, msg=name)
    for parameter, (kept, value) in zip(ddp.parameters(), before, strict=True):
        assert parameter.grad is kept and (kept is None or torch.equal(kept, value))


# ---- all trained parameters ------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Buffers, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.BatchNorm1d(5), Mlp()
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x)) * self.scale


def trained(name: str) -> bool:
    return "scale" not in name


def _all(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Normed().eval())
    x = row_batch(rank)
    for _ in range(2):
        if rank == 0:  # alone, and before any step
            for names in (trained, lambda _: True):
                assert_local(ddp, others_of(ddp, names=names), x)
            given = others_of(ddp)
            expected, _ = by_hand(ddp.module, given, x)
            with torch.no_grad():
                torch.testing.assert_close(functional_call(ddp, given, (x,)), expected)
            with pytest.raises(RuntimeError, match="running_mean should contain 2 elements not 5"):
                functional_call(ddp, others_of(ddp), (x[:, :2],))
        assert_step(ddp, lambda module: loss_of(module, x), unused=["scale"])
        ddp.module.scale.grad = None
        # Between a forward and its backward.
        expected = mean_by_hand(ddp, lambda module: loss_of(module, x))
        ddp.zero_grad()
        loss = loss_of(ddp, x)
        if rank == 0:
            assert_local(ddp, others_of(ddp), x)
        loss.backward()
        ddp.module.scale.grad = torch.zeros(3)
        assert_gradients(ddp.module, expected)
        ddp.zero_grad()
    # Where .grad is there already, and under no_sync.
    loss_of(ddp, x).backward()
    with ddp.no_sync():
        if rank == 1:
            assert_local(ddp, others_of(ddp), x)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", [*BOTH, "apex"])
def test_where_all_are_replaced_the_call_is_local_and_other_ranks_need_not_do_it(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_all, wrapper, collective_timeout_seconds=10)


def _as_under_ddp(rank: int, wrapper: str) -> None:
    model = Mlp()
    x = row_batch(rank)
    found = []
    for ddp in (DistributedDataParallel(copy.deepcopy(model)), wrap(wrapper, copy.deepcopy(model))):
        torch.manual_seed(3)
        given = {name: torch.randn_like(p).requires_grad_() for name, p in ddp.named_parameters()}
        functional_call(ddp, given, (x,)).square().sum().backward()
        assert all(parameter.grad is None for parameter in ddp.parameters())
        loss_of(ddp, x).backward()
        found.append([given[name].grad for name in given] + [p.grad for p in ddp.parameters()])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize("wrapper", BOTH)
def test_it_gives_what_it_gives_under_ddp(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_as_under_ddp, wrapper)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


def _tied(rank: int, wrapper: str) -> None:
    ddp, x = wrap(wrapper, Tied()), row_batch(rank)
    if rank == 0:
        assert_local(ddp, others_of(ddp), x)
        own = dict(ddp.named_parameters())
        output = functional_call(ddp, own, (x,))
        torch.testing.assert_close(output, ddp.module(x))
        del output
    # In one of its places alone, a parameter is still used in the other one.
    given = others_of(ddp)
    bare = copy.deepcopy(ddp.module)
    functional_call(bare, under_bare_names(given), (x,), tie_weights=False).square().sum().backward()
    total = bare.one.weight.grad if bare.one.weight.grad is not None else bare.other.weight.grad
    dist.all_reduce(total)
    ddp.zero_grad()
    functional_call(ddp, given, (x,), tie_weights=False).square().sum().backward()
    torch.testing.assert_close(ddp.module.one.weight.grad, total / 2)
    assert_trains(ddp, rank)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_tied_parameters_are_replaced_where_all_their_places_are(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_tied, wrapper)


# ---- some of them ----------------------------------------------------------------------------------------------------


def _some(rank: int, wrapper: str, on_ranks: tuple[int, ...]) -> None:
    ddp = wrap(wrapper, Mlp())
    for step in range(3):
        x = row_batch(rank, step)
        given = others_of(ddp, names=lambda name: "head" in name) if rank in on_ranks else {}
        theirs = under_bare_names(given)
        expected = expected_mean(
            copy.deepcopy(ddp.module),
            lambda module: functional_call(module, theirs, (x,)).square().sum(),  # noqa: B023
        )
        ddp.zero_grad()
        functional_call(ddp, given, (x,)).square().sum().backward()
        if len(on_ranks) == 2:
            assert ddp.module.head.weight.grad is None and ddp.module.head.bias.grad is None
            ddp.module.head.weight.grad, ddp.module.head.bias.grad = torch.zeros(3, 8), torch.zeros(3)
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-5)
        for name, value in given.items():
            torch.testing.assert_close(value.grad, theirs[name.removeprefix("module.")].grad)
    for _ in range(2):
        assert_trains(ddp, rank)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("on_ranks", [(0, 1), (1,), (0,)])
@pytest.mark.parametrize("wrapper", BOTH)
def test_where_some_are_replaced_these_are_unused_in_a_synchronised_step(
    ranks2: RankPool, wrapper: str, on_ranks: tuple[int, ...]
) -> None:
    ranks2.run(_some, wrapper, on_ranks)


def _frozen(rank: int, wrapper: str) -> None:
    """What requires a gradient in the place of a frozen parameter is no parameter of the model."""
    ddp, x = wrap(wrapper, Normed()), row_batch(rank)
    for _ in range(2):
        given = others_of(ddp, names=lambda name: "scale" in name)
        theirs = under_bare_names(given)
        bare = copy.deepcopy(ddp.module)
        expected = expected_mean(bare, lambda module: functional_call(module, theirs, (x,)).square().sum())  # noqa: B023
        ddp.zero_grad()
        functional_call(ddp, given, (x,)).square().sum().backward()
        ddp.module.scale.grad = torch.zeros(3)
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-5)
        ddp.module.scale.grad = None
        torch.testing.assert_close(given["scale"].grad, theirs["scale"].grad)
    assert_step(ddp, lambda module: loss_of(module, x), unused=["scale"])


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_frozen_parameters_may_be_replaced_too(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_frozen, wrapper)


def _its_own(rank: int, wrapper: str) -> None:
    ddp, x = wrap(wrapper, Mlp()), row_batch(rank)
    expected = mean_by_hand(ddp, lambda module: loss_of(module, x))
    for _ in range(2):
        ddp.zero_grad()
        functional_call(ddp, dict(ddp.named_parameters()), (x,)).square().sum().backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_with_its_own_parameters_it_is_a_call_of_the_wrapper(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_its_own, wrapper)


# ---- what leads back to the parameters -------------------------------------------------------------------------------


def adapted(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One step of an inner loop, differentiable (MAML)."""
    named = dict(module.named_parameters())
    fast = {name: parameter * 1.0 for name, parameter in named.items()}
    loss = functional_call(module, fast, (x,)).square().sum()
    gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
    return {name: value - 0.01 * g for (name, value), g in zip(fast.items(), gradients, strict=True)}


def meta_loss(module: nn.Module, x: Tensor) -> Tensor:
    return functional_call(module, adapted(module, x), (x + 1.0,)).square().sum()


def _leads_back(rank: int, wrapper: str) -> None:
    model = Mlp()
    theirs, ddp = DistributedDataParallel(copy.deepcopy(model)), wrap(wrapper, model)
    x = row_batch(rank)
    expected = mean_by_hand(ddp, lambda module: meta_loss(module, x))
    for _ in range(2):
        for wrapped in (theirs, ddp):
            wrapped.zero_grad()
            meta_loss(wrapped, x).backward()
            assert_gradients(wrapped.module, expected, rtol=1e-4, atol=1e-4)
    ddp.zero_grad()
    with ddp.no_sync():
        meta_loss(ddp, x).backward()
    local = local_gradients(copy.deepcopy(model), lambda module: meta_loss(module, x))
    for name, gradient in gradient_copies(ddp.module).items():
        torch.testing.assert_close(gradient, local[name], rtol=1e-4, atol=1e-4)
    meta_loss(ddp, x).backward()
    assert_gradients(model, {name: 2 * mean for name, mean in expected.items()}, rtol=1e-4, atol=1e-4)
    assert_trains(ddp, rank)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_that_reach_the_parameters_through_what_was_made_of_them_are_averaged_as_under_ddp(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_leads_back, wrapper)


# ---- what is no functional_call --------------------------------------------------------------------------------------


def _really_replaced(rank: int, wrapper: str) -> None:
    ddp, x = wrap(wrapper, Mlp()), row_batch(rank)
    assert_trains(ddp, rank)
    before = ddp.module.norm.weight
    ddp.module.norm.weight = nn.Parameter(torch.ones(8))
    for use in (
        lambda: ddp(x),
        lambda: functional_call(ddp, others_of(ddp, names=lambda name: "head" in name), (x,)),
        lambda: functional_call(nn.Sequential(ddp), {"0.module.head.bias": torch.zeros(3)}, (x,)),
    ):
        with pytest.raises(RuntimeError, match=r"norm\.weight was replaced or removed after the model was wrapped"):
            use()
    ddp.module.norm.weight = before
    ddp.module.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="the model has changed since it was wrapped, and a functional_call"):
        functional_call(ddp, others_of(ddp, names=lambda name: "head" in name), (x,))
    assert_step(ddp, lambda module: loss_of(module, x), unused=["extra.weight", "extra.bias"])


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_real_replacement_is_the_error_that_it_is(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_really_replaced, wrapper)


def _inside_of_another(rank: int, wrapper: str) -> None:
    ddp, x = wrap(wrapper, Mlp()), row_batch(rank)
    outer = nn.Sequential(nn.Linear(5, 5), ddp)
    others = {"0.weight": torch.eye(5), "0.bias": torch.zeros(5)}
    expected = mean_by_hand(ddp, lambda module: loss_of(module, x))
    for _ in range(2):
        ddp.zero_grad()
        functional_call(outer, others, (x,)).square().sum().backward()  # of what is not ours
        assert_gradients(ddp.module, expected)
    if rank == 0:
        given = {name: (p.detach() + 0.5).requires_grad_() for name, p in outer.named_parameters()}
        ddp.zero_grad()
        functional_call(outer, given, (x,)).square().sum().backward()
        assert all(parameter.grad is None for parameter in ddp.parameters())
        assert all(value.grad is not None for value in given.values())
    nested = wrap(wrapper, outer)
    if rank == 0:
        given = {name: (p.detach() + 0.5).requires_grad_() for name, p in nested.named_parameters()}
        functional_call(nested, given, (x,)).square().sum().backward()
        assert all(value.grad is not None for value in given.values())
    nested(x).square().sum().backward()
    assert_trains(ddp, rank)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_wrappers_inside_of_what_is_called_are_looked_through(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_inside_of_another, wrapper, collective_timeout_seconds=10)


# ---- transforms ------------------------------------------------------------------------------------------------------


def _loss_with(module: nn.Module, prefix: str, given: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, {prefix + name: value for name, value in given.items()}, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module, str, dict[str, Tensor], Tensor], Any]] = {
    "grad": lambda module, prefix, given, x: grad(lambda p: _loss_with(module, prefix, p, x))(given),
    "vmap of grad": lambda module, prefix, given, x: vmap(
        grad(lambda p, row: _loss_with(module, prefix, p, row.unsqueeze(0))), in_dims=(None, 0)
    )(given, x),
    "vmap over parameters": lambda module, prefix, given, x: vmap(lambda p: _loss_with(module, prefix, p, x))(
        {name: torch.stack([value, 2 * value]) for name, value in given.items()}
    ),
    "jacrev": lambda module, prefix, given, x: jacrev(lambda p: _loss_with(module, prefix, p, x))(given),
    "grad of some": lambda module, prefix, given, x: grad(lambda p: _loss_with(module, prefix, p, x))(
        {name: value for name, value in given.items() if "head" in name}
    ),
    "grad of inputs": lambda module, prefix, given, x: grad(lambda rows: module(rows).square().sum())(x),
    "jacrev of inputs": lambda module, prefix, given, x: jacrev(module)(x),
    "vmap of inputs": lambda module, prefix, given, x: vmap(module)(x),
    "jvp": lambda module, prefix, given, x: jvp(module, (x,), (torch.ones_like(x),)),
}


def _transformed(rank: int, wrapper: str) -> None:
    ddp, x = wrap(wrapper, Mlp()), row_batch(rank)
    for own in (False, True):  # detached, or the very parameters
        given = {n: p if own else p.detach() + 0.5 for n, p in ddp.module.named_parameters()}
        for name, transform in TRANSFORMS.items():
            if rank == 1:  # alone
                expected = transform(
                    copy.deepcopy(ddp.module), "", {n: v.detach().clone() for n, v in given.items()}, x
                )
                for prefix in ("module.", ""):
                    found = transform(ddp, prefix, given, x)
                    torch.testing.assert_close(found, expected, msg=lambda m, name=name: f"{name}: {m}")
        assert not any(p.grad is not None for p in ddp.parameters())
        for _ in range(2):
            assert_trains(ddp, rank)
            ddp.zero_grad()


@pytest.mark.parametrize("wrapper", BOTH)
def test_transforms_look_through_a_wrapper_on_one_rank_alone(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_transformed, wrapper, collective_timeout_seconds=10)


def penalised(module: nn.Module, prefix: str, x: Tensor) -> Tensor:
    """The gradient's norm, whose own gradient reaches the parameters outside of the transform."""
    own = {name.removeprefix("module."): parameter for name, parameter in module.named_parameters()}
    gradients = grad(lambda p: _loss_with(module, prefix, p, x))(own)
    return sum(gradient.square().sum() for gradient in gradients.values())


def _through_a_transform(rank: int, wrapper: str) -> None:
    model = Mlp()
    theirs, ddp = DistributedDataParallel(copy.deepcopy(model)), wrap(wrapper, model)
    x = row_batch(rank) / 4
    expected = mean_by_hand(ddp, lambda module: penalised(module, "", x))
    for wrapped, steps in ((theirs, 1), (ddp, 2)):  # DDP's second one fails: it rebuilds its buckets in the transform
        for _ in range(steps):
            wrapped.zero_grad()
            penalised(wrapped, "module.", x).backward()
            assert_gradients(wrapped.module, expected, rtol=1e-4, atol=1e-4)
    assert_trains(ddp, rank)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_through_a_transform_is_averaged_as_under_ddp(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_through_a_transform, wrapper)
