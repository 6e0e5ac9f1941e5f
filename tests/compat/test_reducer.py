"""apex's Reducer: averaging when the user says so."""

import copy
import warnings

import pytest
import torch
from models import Mlp, assert_gradients, local_gradients, mean_over_ranks, row_batch
from torch import nn

from compiled_ddp.compat.apex import Reducer
from ranks import RankPool


class Mixed(nn.Module):
    """Two dtypes, a part that need not be used, and a frozen parameter."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.into, self.out, self.extra = nn.Linear(5, 4), nn.Linear(4, 2).double(), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("mark", torch.full((2,), value))
        self.with_extra = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        return self.out((self.extra(x) if self.with_extra else x).double()).square().sum()


def _of_a_module(rank: int) -> str:
    torch.manual_seed(rank)
    model = Mixed(1.0 + rank)
    reducer = Reducer(model)
    assert model.frozen.eq(1.0).all()
    assert model.mark.eq(1.0 + rank).all(), "buffers stay each rank's own"

    for _ in range(2):
        model.zero_grad()
        local = local_gradients(copy.deepcopy(model), lambda module: module(row_batch(rank)))
        for _ in range(2):
            model(row_batch(rank)).backward()
        objects = [parameter.grad for parameter in model.parameters()]
        reducer.reduce()
        assert all(p.grad is found for p, found in zip(model.parameters(), objects, strict=True))
        assert model.extra.weight.grad is None, "skipped, as no rank has one"
        mean = mean_over_ranks({name: g if g is None else 2 * g for name, g in local.items()}, model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad.double(), mean[name], rtol=1e-5, atol=1e-6)

    model.with_extra = rank == 0
    model.zero_grad()
    model(row_batch(rank)).backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        reducer.reduce()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert (gradient is None) == (parameter.grad is None)
        assert gradient is None or parameter.grad.equal(gradient)
    # Zeros where a rank has none, and it goes on.
    for parameter in model.extra.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    reducer.reduce()
    reducer.close()
    return str(caught.value)


def test_gradients_of_a_module_are_averaged_and_one_that_a_rank_lacks_is_named_on_every_rank(ranks2: RankPool) -> None:
    for message in ranks2.run(_of_a_module):
        assert "nothing was averaged (a rank that did not use a parameter may set its .grad to zeros)" in message
        assert "the gradient of extra.weight, the gradient of extra.bias are missing here" in message


def _of_a_list(rank: int) -> str:
    one, two = torch.full((2, 3), 1.0 + rank), torch.full((4,), 3.0 * rank, dtype=torch.float64)
    # The same numbers in other strides on the other rank.
    rows = torch.arange(12.0).view(1, 3, 2, 2) * (1 + rank)
    rows = rows.contiguous(memory_format=torch.channels_last) if rank else rows
    reducer = Reducer([one, (two, None, [rows]), 3])
    reducer.reduce()
    assert one.eq(2.0).all()  # of 1, 2 and 3
    assert two.eq(3.0).all()
    torch.testing.assert_close(rows, torch.arange(12.0).view(1, 3, 2, 2) * 2)
    with pytest.raises(RuntimeError) as caught:
        Reducer([torch.zeros(2 + rank)])
    return str(caught.value)


def test_tensors_in_lists_are_averaged_in_place_on_three_ranks(ranks3: RankPool) -> None:
    for message in ranks3.run(_of_a_list):
        assert "there is no Reducer, on any rank" in message
        assert "tensor 0 is shape (3,)" in message


def _nothing(rank: int) -> list[str]:
    model = Mlp()
    messages = []
    for nothing in ([], [p.grad for p in model.parameters()], [torch.zeros(2)] if rank else []):
        with pytest.raises((ValueError, RuntimeError), match=r"got no tensor to average.*Reducer\(model\)") as caught:
            Reducer(nothing)
        messages.append(type(caught.value).__name__)
    return messages


def test_a_list_without_tensors_is_refused_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_nothing)


def _stale(rank: int) -> list[str]:
    model = nn.Linear(4, 2)
    backward(model, rank)
    reducer = Reducer([p.grad for p in model.parameters()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reducer.reduce()
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            backward(model, rank)
            reducer.reduce()
        assert not caught, "nothing is stale so far"
        for _ in range(3):
            model.zero_grad()
            backward(model, rank)
            reducer.reduce()
    assert [warning.filename for warning in caught] == [__file__]
    return [str(warning.message) for warning in caught]


def backward(model: nn.Module, rank: int) -> None:
    model(row_batch(rank)[:, :4]).square().sum().backward()


def test_tensors_that_are_the_gradients_no_more_are_told_once(ranks2: RankPool) -> None:
    for messages in ranks2.run(_stale):
        (message,) = messages
        assert "none of the 2 tensors that the Reducer was given has been written to since the last reduce()" in message


def _sparse(rank: int) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    reducer = Reducer(model)
    model(torch.tensor([rank])).sum().backward()
    with pytest.raises(RuntimeError, match=r"the gradient of weight is torch.sparse_coo: only dense"):
        reducer.reduce()
    mlp = Mlp()
    reducer = Reducer(mlp)
    local = local_gradients(mlp, lambda module: module(row_batch(rank)).square().sum())
    mlp(row_batch(rank)).square().sum().backward()
    reducer.reduce()
    assert_gradients(mlp, mean_over_ranks(local, mlp))


def test_a_sparse_gradient_is_refused_by_name(ranks2: RankPool) -> None:
    ranks2.run(_sparse)
