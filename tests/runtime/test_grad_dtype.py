"""Parameters whose gradients have a dtype of their own (`Tensor.grad_dtype`): bf16 weights with fp32 gradients."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, wrappers
from torch import Tensor, nn

from compiled_ddp import comm_hooks
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
# Of parameters, and of their gradients.
WIDER = torch.bfloat16, torch.float32
KINDS = (WIDER, (torch.float32, torch.bfloat16), (torch.float32, torch.float64))


class Product(torch.autograd.Function):
    """A product whose weight's gradient is computed in float32, whatever the weight is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return tangents[0] @ weight, tangents[0].float().t() @ x.float()


class Net(nn.Module):
    def __init__(self, dtypes: tuple[torch.dtype, torch.dtype | None] = WIDER) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)
        self.to(dtypes[0])
        self.let_gradients_be(dtypes[1])

    def let_gradients_be(self, dtype: torch.dtype | None) -> None:
        for parameter in self.parameters():
            parameter.grad_dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(Product.apply(x, self.first.weight)))


Means = dict[str, Tensor]


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).float().square().mean()


def rows(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def gradients_by_hand(model: nn.Module, *batches: Tensor) -> Means:
    """The gradients of a copy of the model, in float64, added up over `batches`."""
    copied = copy.deepcopy(model)
    total = {}
    for x in batches:
        for parameter, of_model in zip(copied.parameters(), model.parameters(), strict=True):
            parameter.grad, parameter.grad_dtype = None, of_model.grad_dtype
        loss_of(copied, x).backward()
        for name, parameter in copied.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, 0) + parameter.grad.double()
    return total


def averaged(gradients: Means) -> Means:
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return {name: gradient / dist.get_world_size() for name, gradient in gradients.items()}


def backward(loss: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back to hooks
        loss.backward()


def assert_means(model: nn.Module, expected: Means, dtype: torch.dtype, *, rtol: float | None = None) -> None:
    """Each .grad is the mean, in this dtype, to its rounding and not to the parameter's, and equal on all ranks."""
    rtol = rtol or {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-6}[dtype]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == dtype, f"{name}: {parameter.grad}"
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=0, atol=rtol * largest, msg=name)
    assert_equal_on_all_ranks([parameter.grad.double().tolist() for parameter in model.parameters()])


def step(ddp: nn.Module, rank: int, number: int) -> None:
    model = ddp.module
    model.zero_grad()
    x = rows(rank, number, model.first.weight.dtype)
    expected = averaged(gradients_by_hand(model, x))
    backward(loss_of(ddp, x))
    assert_means(model, expected, model.first.weight.grad_dtype)


# ---- reduced ---------------------------------------------------------------------------------------------------------


def _steps(rank: int, wrapper: str) -> None:
    for dtypes, as_view in [*zip(KINDS, (True, True, True), strict=True), (WIDER, False)]:
        model = Net(dtypes)
        ddp = wrappers([wrapper])[wrapper](model, gradient_as_bucket_view=as_view)
        step(ddp, rank, 0)
        step(ddp, rank, 1)
        model.zero_grad(set_to_none=False)
        there = [parameter.grad for parameter in model.parameters()]
        x = rows(rank, 2, dtypes[0])
        expected = averaged(gradients_by_hand(model, x))
        backward(loss_of(ddp, x))
        assert_means(model, expected, dtypes[1])
        assert all(p.grad is g for p, g in zip(model.parameters(), there, strict=True))
        origins = {section.origin for section in ddp.plan.sections}
        assert origins == ({"graph"} if wrapper == "compile_ddp" else {"hooks"})
        assert {bucket.dtype for bucket in ddp.plan.buckets if bucket.gradients} == {dtypes[1]}


@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_are_reduced_in_a_bucket_of_their_own_dtype_and_not_rounded(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_steps, wrapper)


def _accumulates(rank: int, wrapper: str) -> None:
    for dtypes in KINDS[:2]:
        model = Net(dtypes)
        ddp = wrappers([wrapper])[wrapper](model)
        for number in range(3):
            model.zero_grad(set_to_none=number < 2)
            batches = [rows(rank, 10 * number + part, dtypes[0]) for part in range(4)]
            expected = averaged(gradients_by_hand(model, *batches))
            for x in batches[:2]:
                with ddp.no_sync():
                    loss_of(ddp, x).backward()
            backward(loss_of(ddp, batches[2]) + loss_of(ddp, batches[3]))
            # What graphs leave local is of the parameter's dtype first, as under plain torch.compile.
            assert_means(model, expected, dtypes[1], rtol=2e-2)


@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_of_another_dtype_accumulate_under_no_sync_and_over_two_forwards(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_accumulates, wrapper)


def _weighted_and_compressed(rank: int, wrapper: str) -> None:
    for dtypes in KINDS[:2]:
        model = Net(dtypes)
        ddp = wrappers([wrapper])[wrapper](model, reduction="weighted")
        for number in range(2):
            model.zero_grad()
            x = rows(rank, number, dtypes[0])
            weighted = {name: (1 + rank) * gradient for name, gradient in gradients_by_hand(model, x).items()}
            expected = {name: 2 / 3 * mean for name, mean in averaged(weighted).items()}  # of the weights 1 and 2
            ddp.set_weight(1.0 + rank)
            backward(loss_of(ddp, x))
            assert_means(model, expected, dtypes[1])
        model = Net(dtypes)
        ddp = wrappers([wrapper])[wrapper](model, comm_hook=comm_hooks.fp16_compress)
        for number in range(2):
            model.zero_grad()
            x = rows(rank, number, dtypes[0])
            expected = averaged(gradients_by_hand(model, x))
            backward(loss_of(ddp, x))
            assert_means(model, expected, dtypes[1], rtol=2e-2)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_weighted_mean_and_a_hook_reduce_gradients_of_another_dtype(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_weighted_and_compressed, wrapper)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.head = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)
        self.bfloat16()
        for parameter in self.parameters():
            parameter.grad_dtype = torch.float32

    def forward(self, x: Tensor | None) -> Tensor:
        return self.head.bias if x is None else self.head(self.rows(x))


def _sparse(rank: int) -> None:
    model = Embedded()
    ddp = wrappers(["EagerDDP"])["EagerDDP"](model)
    for number in range(3):
        model.zero_grad()
        x = torch.tensor([rank, 2 + number])
        uses = not (number == 1 and rank == 1)  # then its part is empty
        by_hand = torch.zeros(6, 4, dtype=torch.float64)
        if uses:
            copied = copy.deepcopy(model)
            copied(x).float().sum().backward()
            by_hand += copied.rows.weight.grad.to_dense()
        dist.all_reduce(by_hand)
        ddp(x if uses else None).float().sum().backward()
        assert model.rows.weight.grad.dtype == torch.float32
        torch.testing.assert_close(model.rows.weight.grad.to_dense().double(), by_hand / 2, rtol=1e-2, atol=1e-3)


def test_a_sparse_gradient_of_another_dtype_is_averaged(ranks2: RankPool) -> None:
    ranks2.run(_sparse)


# ---- set later, on one rank, or to anything --------------------------------------------------------------------------


def _set_between_steps(rank: int, wrapper: str) -> None:
    model = Net((torch.bfloat16, torch.bfloat16))
    ddp = wrappers([wrapper])[wrapper](model)
    for number in range(5):
        model.zero_grad()
        model.let_gradients_be(torch.float32 if number in (1, 2) else torch.bfloat16)
        step(ddp, rank, number)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_grad_dtype_that_is_set_between_two_steps_holds_from_the_next_one_on(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_set_between_steps, wrapper)


def _converted_in_a_step(rank: int, wrapper: str) -> None:
    model = Net((torch.bfloat16, torch.bfloat16))
    ddp = wrappers([wrapper])[wrapper](model)
    step(ddp, rank, 0)
    model.zero_grad()
    loss = loss_of(ddp, rows(rank, 1, torch.bfloat16))
    model.let_gradients_be(torch.float32)
    with pytest.raises(RuntimeError, match=r"(weight|bias) .*grad_dtype.* after the forward .*Drop this step"):
        loss.backward()
    step(ddp, rank, 2)
    if wrapper == "compile_ddp":  # whose graphs leave gradients that autograd copies into the layout of the parameter
        model.zero_grad()
        x = rows(rank, 3, torch.bfloat16)
        expected = averaged(gradients_by_hand(model, x))
        loss = loss_of(ddp, x)
        model.first.weight.data = model.first.weight.data.t().contiguous().t()
        loss.backward()
        assert_means(model, expected, torch.float32, rtol=2e-2)
        step(ddp, rank, 4)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_that_is_converted_between_forward_and_backward_is_refused_by_name(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_converted_in_a_step, wrapper)


def _any_dtype(rank: int) -> None:
    model = Net((torch.bfloat16, None))
    ddp = wrappers(["EagerDDP"])["EagerDDP"](model)
    with pytest.raises(RuntimeError, match=r"first\.weight is torch\.float32.*set its grad_dtype to torch\.float32"):
        loss_of(ddp, rows(rank, 0, torch.bfloat16)).backward()
    model.zero_grad()
    model.let_gradients_be(torch.float32)
    step(ddp, rank, 1)


def test_a_gradient_of_any_dtype_is_reduced_in_the_parameters_own_and_refused_in_another(ranks2: RankPool) -> None:
    ranks2.run(_any_dtype)


def _another_on_rank_1(rank: int) -> None:
    model = Net((torch.bfloat16, torch.float32 if rank == 1 else torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"rank 1: parameter first\.weight is .*grad_dtype torch\.float32 here"):
        wrappers(["EagerDDP"])["EagerDDP"](model)


def test_ranks_that_differ_in_a_grad_dtype_are_refused_by_its_name_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_another_on_rank_1)


def _shared_graph(rank: int) -> None:
    """Dynamo runs one graph for equal modules, of which one may have gradients of another dtype."""
    wide, narrow = Net(), Net((torch.bfloat16, torch.bfloat16))
    wrapped = [wrappers(["compile_ddp"])["compile_ddp"](model) for model in (wide, narrow)]
    for number in range(2):
        for ddp in wrapped:
            step(ddp, rank, number)


def test_a_graph_that_two_models_share_reduces_each_ones_gradients_in_their_dtype(ranks2: RankPool) -> None:
    ranks2.run(_shared_graph)
