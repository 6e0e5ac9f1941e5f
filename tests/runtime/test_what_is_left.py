"""[Note: what a backward leaves] What comes past the reduction is reduced after all, or refused by name."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_equal_on_all_ranks, assert_gradients, expected_mean, row_batch, wrappers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
# By the proof where it looks on, as at a graph that folds for the first time.
PAST = (
    r"parameter layer\.\w+, layer\.\w+ got a gradient from outside of its captured graph"
    r"|the gradient of layer\.\w+, layer\.\w+ differs between the ranks"
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)))


class BackwardInside(torch.autograd.Function):
    """Runs a backward of its own inside of its backward, as reversible networks do."""

    @staticmethod
    def forward(context: Any, x: Tensor, layer: nn.Module) -> Tensor:
        context.layer = layer
        context.save_for_backward(x)
        return layer(x).detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            (x,) = context.saved_tensors
            x = x.detach().requires_grad_()
            context.layer(x).backward(gradient)
        return x.grad, None


AUXILIARY: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": lambda layer, x: checkpoint(layer, x.clone().requires_grad_(), use_reentrant=True),
    "Function": lambda layer, x: BackwardInside.apply(x.clone().requires_grad_(), layer),
}


def loss_of(call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, auxiliary: str | None) -> Tensor:
    """The auxiliary part comes first, so that its backward comes last, behind what a graph has reduced."""
    first = 0.0 if auxiliary is None else AUXILIARY[auxiliary](layer, x).square().sum()
    return first + call(x).square().sum()


def step(
    ddp: Any, loss: Callable[[nn.Module, nn.Module], Tensor], *, refused: str = "", set_to_none: bool = True
) -> bool:
    """A backward that is right, which is returned, or with `refused` an error of these words; all else fails.

    `loss` is given the wrapper, or what stands for it, and its module.
    """
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss(module, module))
    ddp.zero_grad(set_to_none=set_to_none)
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what goes by hooks
        try:
            loss(ddp, ddp.module).backward()
        except RuntimeError as raised:
            error = raised
    if error is None:
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-5)
    else:
        assert refused and re.search(refused, str(error)), error
    return error is None


# ---- behind the launch -----------------------------------------------------------------------------------------------


def _reentrant(rank: int, auxiliary: str, first: int, set_to_none: bool) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Model())
    outcomes = []
    for number in range(first + 3):
        x, kind = row_batch(rank, number), auxiliary if number >= first else None
        loss = lambda call, module, x=x, kind=kind: loss_of(call, module.layer, x, kind)  # noqa: E731
        outcomes.append(step(ddp, loss, refused=PAST, set_to_none=set_to_none))
    # From the first step on it is known, and reduced; what comes later is refused.
    assert outcomes == ([True] * 3 if first == 0 else [True] * first + [False] * 3)
    assert step(ddp, lambda call, _: call(row_batch(rank, 10)).square().sum())


@pytest.mark.parametrize("auxiliary", AUXILIARY)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_a_reentrant_backward_adds_behind_a_graph_is_reduced_or_refused(
    ranks2: RankPool, auxiliary: str, first: int
) -> None:
    ranks2.run(_reentrant, auxiliary, first, first != 2)


def _reentrant_sums(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Model(), reduction="sum")
    for number in range(3):
        x = row_batch(rank, number)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda m: loss_of(m, m.layer, x, "checkpoint"))  # noqa: B023
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(ddp, ddp.module.layer, x, "checkpoint").backward()
        assert_gradients(ddp.module, {name: 2 * mean for name, mean in expected.items()}, rtol=1e-4, atol=1e-5)


def test_a_sum_of_which_a_part_comes_behind_its_graph_is_right_from_the_first_step_on(ranks2: RankPool) -> None:
    ranks2.run(_reentrant_sums)


def _on_one_rank(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Model(), verify="off")
    plain = lambda number: lambda call, _: call(row_batch(rank, number)).square().sum()  # noqa: E731
    assert step(ddp, plain(0))
    auxiliary = "checkpoint" if rank == 1 else None
    ddp.zero_grad()
    loss = loss_of(ddp, ddp.module.layer, row_batch(rank, 1), auxiliary)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"parameter layer\.\w+, layer\.\w+ got a gradient from outside"):
            loss.backward()
    else:
        loss.backward()
    assert not step(ddp, plain(2), refused=r"an exception ended the one before it on 1 rank\(s\)")
    assert step(ddp, plain(3))


def test_where_it_comes_on_one_rank_alone_all_are_told_in_the_next_backward(ranks2: RankPool) -> None:
    ranks2.run(_on_one_rank)


def _written_to(rank: int, wrapper: str) -> None:
    """A hook of a parameter that is reached last writes to the .grad of the one that was first in its bucket."""
    ddp = wrappers([wrapper])[wrapper](nn.Sequential(nn.Linear(5, 64), nn.Linear(64, 64)))
    last, first = ddp.module[0].weight, ddp.module[1].bias
    plain = lambda number: lambda call, _: call(row_batch(rank, number)).square().sum()  # noqa: E731

    def add(_: object) -> None:
        first.grad.add_(1.0)  # type: ignore[union-attr]

    def replace(_: object) -> None:
        first.grad = first.grad.clone()  # type: ignore[union-attr]

    for change in (add, replace):
        assert step(ddp, plain(0))
        output = ddp(row_batch(rank, 1))
        ddp.zero_grad()
        node = last.expand_as(last).grad_fn.next_functions[0][0]
        handle = node.register_prehook(change)
        with pytest.raises(RuntimeError, match=r"the \.grad of parameter 1\.bias was written to, or replaced"):
            output.square().sum().backward()
        handle.remove()
    assert step(ddp, plain(3))


def test_what_is_written_to_a_grad_that_is_in_its_bucket_is_refused_by_its_name(ranks2: RankPool) -> None:
    ranks2.run(_written_to, "EagerDDP")


# ---- hooks of the user's ---------------------------------------------------------------------------------------------


def _scale(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3)  # type: ignore[union-attr]


CHANGES: dict[str, Callable[[nn.Parameter], None]] = {
    "clone": lambda p: setattr(p, "grad", p.grad.clone()),
    "three times": lambda p: setattr(p, "grad", p.grad * 3),
    "in place": _scale,
    "none": lambda p: setattr(p, "grad", None),
}


def _hooks(rank: int, wrapper: str, change: str, begins: int) -> None:
    ddp = wrappers([wrapper])[wrapper](Model())
    for number in range(begins + 3):
        if number == begins:
            for parameter in ddp.module.parameters():
                parameter.register_post_accumulate_grad_hook(CHANGES[change])
        changed = change if number >= begins else ""
        bare = Model()
        bare.load_state_dict(ddp.module.state_dict())
        x = row_batch(rank, number)
        expected = expected_mean(bare, lambda module: module(x).square().sum())  # noqa: B023
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        if changed == "none":
            assert all(parameter.grad is None for parameter in ddp.module.parameters())
        else:
            factor = 3 if changed in ("three times", "in place") else 1
            assert_gradients(ddp.module, {name: factor * mean for name, mean in expected.items()})


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_post_accumulate_hook_makes_of_the_mean_stays(ranks2: RankPool, wrapper: str, change: str) -> None:
    for begins in (0, 1):
        ranks2.run(_hooks, wrapper, change, begins)


def _prehook_that_keeps(rank: int, begins: int) -> None:
    ddp, kept = wrappers(["compile_ddp"])["compile_ddp"](Model()), []
    for number in range(begins + 2):
        if number == begins:
            for parameter in ddp.module.parameters():
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                kept.append(node)
                node.register_prehook(lambda gradients: kept.append(gradients[0]))
        x = row_batch(rank, number)
        assert step(ddp, lambda call, _: call(x).square().sum())  # noqa: B023
    assert "by hooks" not in str(ddp.explain()), "a copy of the mean is no gradient from elsewhere"


def test_a_prehook_that_keeps_what_it_sees_leaves_the_mean_as_it_is(ranks2: RankPool) -> None:
    for begins in (0, 1):
        ranks2.run(_prehook_that_keeps, begins)


# ---- what appears in the model ---------------------------------------------------------------------------------------


class Growing(nn.Module):
    """Makes a layer in a forward, with other values on every rank; or a parameter, or unfreezes what it has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.head, self.grows, self.kind = nn.Linear(5, 5), nn.Linear(5, 3), False, kind
        if kind == "parameter registered as None":
            self.register_parameter("late", None)
        elif kind == "layer for a placeholder":
            self.late = nn.Identity()
        elif kind == "unfrozen layer":
            self.late = nn.Linear(5, 5).requires_grad_(False)

    @torch.compiler.disable  # in a graph what is new under a known name is refused
    def by_late(self, x: Tensor) -> Tensor:
        self.grow()
        return x * self.late if isinstance(self.late, nn.Parameter) else self.late(x)

    def grow(self) -> None:
        if self.kind == "parameter registered as None":
            if self.late is None:
                self.late = nn.Parameter(torch.randn(5))
        elif self.kind == "unfrozen layer":
            self.late.requires_grad_(True)
        elif not isinstance(getattr(self, "late", None), nn.Linear):
            self.late = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        if self.grows:
            x = torch.tanh(self.by_late(x))
        return self.head(x)


KINDS = ("new layer", "parameter registered as None", "layer for a placeholder", "unfrozen layer")


def _growing(rank: int, wrapper: str, kind: str, synchronised: bool) -> None:
    ddp: Any = wrappers([wrapper])[wrapper](Growing(kind))
    for number in range(4):
        ddp.module.grows = number >= 1
        x = row_batch(rank, number)
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(rank)
            if not synchronised and number == 1:
                with ddp.no_sync():
                    ddp(x).square().sum().backward()
            output = ddp(x)
            local = copy.deepcopy(ddp.module)  # with what has been made
            before = {name: p.grad for name, p in local.named_parameters()}
            expected = expected_mean(local, lambda module: module(x).square().sum())  # noqa: B023
            output.square().sum().backward()
        if synchronised or number != 1:
            assert all(gradient is None for gradient in before.values())
            for name, parameter in ddp.module.named_parameters():
                if parameter.requires_grad:
                    torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-7, msg=name)
    assert_equal_on_all_ranks({name: p.tolist() for name, p in ddp.module.named_parameters()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_the_model_begins_to_train_in_its_forward_is_averaged_in_that_step(
    ranks2: RankPool, wrapper: str, kind: str
) -> None:
    for synchronised in (True, False):
        ranks2.run(_growing, wrapper, kind, synchronised)


def _behind(rank: int, wrapper: str) -> None:
    ddp: Any = wrappers([wrapper])[wrapper](Model())
    plain = lambda number: lambda call, _: call(row_batch(rank, number)).square().sum()  # noqa: E731
    assert step(ddp, plain(0))
    ddp.zero_grad()
    output = ddp(row_batch(rank, 1))
    ddp.module.late = nn.Linear(3, 2)
    with pytest.raises(
        RuntimeError, match=r"parameter late\.weight, late\.bias was put into the model after its forward"
    ):
        ddp.module.late(output).square().sum().backward()
    ddp.zero_grad()
    plain(2)(ddp, ddp.module).backward()  # it is taken in, and used on no rank
    assert ddp.module.late.weight.grad is None


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_put_into_the_model_behind_its_forward_is_refused_by_its_name(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_behind, wrapper)


# ---- what no hook of ours sees ---------------------------------------------------------------------------------------


class ByCopies(nn.Module):
    """Trains copies of its layers' parameters, as with masters in another precision, whose gradients it hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.by_copies = nn.Linear(5, 4), nn.Linear(4, 3), ()

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.call("head", torch.tanh(self.call("body", x)))

    def call(self, name: str, x: Tensor) -> Tensor:
        layer: Any = getattr(self, name)
        if name not in self.by_copies:
            return layer(x)  # type: ignore[no-any-return]
        copies = [parameter.detach().clone().requires_grad_() for parameter in (layer.weight, layer.bias)]
        for of_copy, parameter in zip(copies, (layer.weight, layer.bias), strict=True):
            of_copy.register_post_accumulate_grad_hook(lambda of_copy, p=parameter: _hand_over(p, of_copy))
        return nn.functional.linear(x, *copies)


def _hand_over(parameter: Tensor, of_copy: Tensor) -> None:
    assert of_copy.grad is not None
    parameter.grad = of_copy.grad.clone() if parameter.grad is None else parameter.grad + of_copy.grad


def _by_copies(rank: int, wrapper: str, names: tuple[str, ...], first: int, on_ranks: tuple[int, ...]) -> None:
    ddp: Any = wrappers([wrapper])[wrapper](ByCopies())
    for number in range(8):
        x = row_batch(rank, number)
        ddp.module.by_copies = ()
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x).square().sum())  # noqa: B023
        ddp.module.by_copies = names if number >= first and rank in on_ranks else ()
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp(x).square().sum().backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize(
    ("names", "first", "on_ranks"),
    [(("body", "head"), 0, (0, 1)), (("head",), 0, (0, 1)), (("head",), 5, (0, 1)), (("body",), 3, (1,))],
    ids=["all", "some", "some later", "on one rank"],
)
def test_a_grad_that_is_assigned_in_the_backward_without_a_hook_of_ours_is_averaged(
    ranks2: RankPool, wrapper: str, names: tuple[str, ...], first: int, on_ranks: tuple[int, ...]
) -> None:
    ranks2.run(_by_copies, wrapper, names, first, on_ranks)
