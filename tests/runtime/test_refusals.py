"""What is refused in the middle of training: an error that says what to do, and a step after it that is right."""

import contextlib
import copy
import warnings

import pytest
import torch
from models import Mlp, assert_gradients, assert_step, expected_mean, row_batch, wrappers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def step(ddp: nn.Module, rank: int, number: int, unused: tuple[str, ...] = ()) -> None:
    """One step, right on this rank."""
    x = row_batch(rank, number)
    assert_step(ddp, lambda module: loss_of(module, x), unused=unused)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _other_dtype(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    step(ddp, rank, 0)
    ddp.zero_grad()
    weight = ddp.module.head.weight
    weight.grad_dtype = None
    weight.grad = torch.zeros_like(weight, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter head\.weight is torch\.float64 on cpu"):
        loss_of(ddp, row_batch(rank, 1)).backward()
    weight.grad = None
    weight.grad_dtype = torch.float32
    step(ddp, rank, 2)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_gradient_of_another_dtype_is_refused_by_its_name(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_other_dtype, wrapper)


def _shared_gradient(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    step(ddp, rank, 0)
    ddp.zero_grad()
    ddp.module.first.bias.grad = ddp.module.norm.bias.grad = torch.zeros(8)
    with pytest.raises(RuntimeError, match=r"parameters first\.bias, norm\.bias share memory.*a tensor of its own"):
        loss_of(ddp, row_batch(rank, 1)).backward()
    step(ddp, rank, 2)


@pytest.mark.parametrize("wrapper", BOTH)
def test_one_tensor_as_the_gradient_of_two_parameters_is_refused_by_their_names(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_shared_gradient, wrapper)


class Tower(nn.Module):
    """One layer under two reentrant checkpoints, each of which accumulates by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.twice = True

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        if self.twice:
            x = checkpoint(self.layer, torch.tanh(x), use_reentrant=True)
        return self.head(x)


def _second_gradient(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Tower())
    with pytest.raises(RuntimeError, match=r"parameter layer\.\w+ got a second gradient.*use_reentrant=False"):
        loss_of(ddp, row_batch(rank)).backward()
    ddp.module.twice = False
    step(ddp, rank, 1)


def test_a_second_gradient_after_its_bucket_was_launched_is_refused_by_its_name(ranks2: RankPool) -> None:
    ranks2.run(_second_gradient)


# ---- captured graphs -------------------------------------------------------------------------------------------------


def _from_outside_later(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    step(ddp, rank, 0)
    step(ddp, rank, 1)
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match=r"parameter head\.weight got a gradient from outside of its captured graph"):
        (loss_of(ddp, row_batch(rank, 2)) + ddp.module.head.weight.sum()).backward()
    step(ddp, rank, 3)


def test_a_gradient_from_outside_of_a_graph_that_was_not_there_at_first_is_refused_by_its_name(
    ranks2: RankPool,
) -> None:
    ranks2.run(_from_outside_later)


class Mixing(nn.Module):
    """What it has computed is an output too, to mix samples and apply the head to them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden), hidden

    def loss(self, wrapped: nn.Module, x: Tensor, *, mixes: bool) -> Tensor:
        output, hidden = wrapped(x)
        return (self.head(hidden + hidden.flip(0)) if mixes else output).square().sum()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_from_outside_alone_where_the_graph_was_to_have_one_is_refused_by_its_name(
    ranks2: RankPool, set_to_none: bool
) -> None:
    ranks2.run(_from_outside_alone, set_to_none)


def _from_outside_alone(rank: int, set_to_none: bool) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mixing())
    for number, mixes in enumerate([False, False, True, False]):
        x = row_batch(rank, number)
        if not mixes:
            assert_step(ddp, lambda module: ddp.module.loss(module, x, mixes=False))  # noqa: B023
            continue
        ddp.zero_grad(set_to_none=set_to_none)
        with pytest.raises(RuntimeError, match=r"head\.weight, head\.bias got a gradient from outside of its captured"):
            ddp.module.loss(ddp, x, mixes=True).backward()


def _from_outside_on_one_rank(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp(), verify="off")  # verification would tell all ranks at once
    step(ddp, rank, 0)
    for number in (1, 3):
        loss = loss_of(ddp, row_batch(rank, number))
        if rank == 1:
            with pytest.raises(RuntimeError, match=r"head\.weight got a gradient from outside of its captured graph"):
                (loss + ddp.module.head.weight.sum()).backward()
        else:
            loss.backward()
        with pytest.raises(RuntimeError, match=r"an exception ended the one before it on 1 rank\(s\)"):
            loss_of(ddp, row_batch(rank, number)).backward()
        step(ddp, rank, number + 1)


def test_where_one_rank_alone_refuses_it_all_are_told_in_the_next_backward(ranks2: RankPool) -> None:
    ranks2.run(_from_outside_on_one_rank)


def backward_that_creates_a_graph(ddp: nn.Module, rank: int, number: int) -> None:
    """It leaves the mean."""
    x = row_batch(rank, number)
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))
    ddp.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the cycle that create_graph=True makes
        loss_of(ddp, x).backward(create_graph=True)
    assert_gradients(ddp.module, expected)


def _creates_graph(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    for number in range(2):
        backward_that_creates_a_graph(ddp, rank, number)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        ddp.module.head.weight.grad.square().sum().backward()
    ddp.zero_grad()
    step(ddp, rank, 2)


def test_a_backward_that_creates_a_graph_through_a_captured_one_leaves_the_mean(ranks2: RankPool) -> None:
    ranks2.run(_creates_graph)


def _creates_graph_by_hooks(rank: int) -> None:
    """The penalty of a gradient that `torch.autograd.grad` returns from inputs is differentiable; .grad is not."""
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    for number in range(2):
        backward_that_creates_a_graph(ddp, rank, number)
        assert not any(p.grad.requires_grad or p.grad.grad_fn for p in ddp.parameters())

    def penalised(module: nn.Module) -> Tensor:
        inputs = row_batch(rank).requires_grad_()
        loss = loss_of(module, inputs)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()

    expected = expected_mean(copy.deepcopy(ddp.module), penalised)
    ddp.zero_grad()
    penalised(ddp).backward()
    assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)


def test_by_hooks_a_backward_that_creates_a_graph_leaves_the_mean_without_one(ranks2: RankPool) -> None:
    ranks2.run(_creates_graph_by_hooks)


class Sandwich(nn.Module):
    """One layer in two graphs that are not alike, with an eager one between them, before them, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.eager, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.eager_at = "between"

    def forward(self, x: Tensor) -> Tensor:
        if self.eager_at == "before":
            x = self.run_eagerly(x)
        torch._dynamo.graph_break()
        x = torch.tanh(self.outer(x))
        torch._dynamo.graph_break()
        if self.eager_at == "between":
            x = self.run_eagerly(x)
        torch._dynamo.graph_break()
        return self.head(self.outer(x))

    @torch.compiler.disable
    def run_eagerly(self, x: Tensor) -> Tensor:
        return torch.tanh(self.eager(x))


def _in_another_order(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Sandwich())
    step(ddp, rank, 0)
    step(ddp, rank, 1)
    ddp.zero_grad()
    ddp.module.eager_at = "before"
    with pytest.raises(RuntimeError, match=r"parameter outer\.\w+.* stands in two captured graphs.*same order"):
        loss_of(ddp, row_batch(rank, 2)).backward()
    ddp.module.eager_at = "between"
    step(ddp, rank, 3)


def test_a_graph_that_comes_too_late_for_a_shared_parameter_is_refused_by_its_name(ranks2: RankPool) -> None:
    ranks2.run(_in_another_order)


def _without_the_middle(rank: int, skipped_on: tuple[int, ...]) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Sandwich())
    step(ddp, rank, 0)
    for number in (1, 2):
        ddp.module.eager_at = "nowhere" if rank in skipped_on else "between"
        step(ddp, rank, number, unused=("eager.weight", "eager.bias") if skipped_on == (0, 1) else ())
    ddp.module.eager_at = "between"
    step(ddp, rank, 3)
    assert [section.origin for section in ddp.plan.sections] == ["graph", "hooks", "graph"]


@pytest.mark.parametrize("skipped_on", [(0,), (1,), (0, 1)])
def test_a_graph_does_not_wait_for_what_this_step_skips(ranks2: RankPool, skipped_on: tuple[int, ...]) -> None:
    ranks2.run(_without_the_middle, skipped_on)


def _double_backward(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    x = row_batch(rank).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(ddp, x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()
    step(ddp, rank, 1)


def test_a_double_backward_through_a_captured_graph_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_double_backward)


# ---- hooks, calls ----------------------------------------------------------------------------------------------------


def _late_hook(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    step(ddp, rank, 0)
    ddp.zero_grad()
    weight, handles = ddp.module.first.weight, []

    def register(gradient: Tensor) -> None:
        handles.append(weight.register_post_accumulate_grad_hook(lambda _: None))

    forward_hook = ddp.module.first.register_forward_hook(lambda *call: call[-1].register_hook(register) and None)
    with pytest.raises(RuntimeError, match=r"first\.weight got a post-accumulate hook.*before the backward"):
        loss_of(ddp, row_batch(rank, 1)).backward()
    forward_hook.remove()
    step(ddp, rank, 2)
    handles[0].remove()
    step(ddp, rank, 3)


def test_a_post_accumulate_hook_that_comes_in_the_middle_of_a_backward_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_late_hook)


def _hook_returns(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    handle = ddp.module.first.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul(0.5))  # not mul_
    for where in (ddp.no_sync(), contextlib.nullcontext()):
        with where, pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
            loss_of(ddp, row_batch(rank, 0)).backward()
        ddp.zero_grad()
    handle.remove()
    step(ddp, rank, 1)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_post_accumulate_hook_that_returns_something_is_refused(ranks2: RankPool, wrapper: str) -> None:
    """As by autograd: by itself in a local backward, and behind a synchronised one, where such hooks are called."""
    ranks2.run(_hook_returns, wrapper)


def _assigns(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    with pytest.raises(ValueError, match="assign=True would replace the parameters"):
        ddp.load_state_dict(ddp.state_dict(), assign=True)
    step(ddp, rank, 0)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_state_dict_is_not_assigned(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_assigns, wrapper)
