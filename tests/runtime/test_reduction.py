"""reduction="mean" | "sum" | "weighted", and numbers that travel with the gradients."""

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, local_gradients, mean_over_ranks, row_batch, wrappers
from torch import Tensor, nn

from compiled_ddp.torch_private.for_tests import generated_code
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class SharedByBoth(nn.Module):
    """`shared` is used in a captured graph and, on the ranks that are told to, in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shared = nn.Linear(5, 5), nn.Parameter(torch.ones(5))
        self.outside = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x) * self.shared))

    @torch.compiler.disable
    def head(self, x: Tensor) -> Tensor:
        return (x * self.shared).square().sum() if self.outside else x.square().sum()


def expected(module: nn.Module, weight: float, reduction: str, *losses: Any) -> dict[str, Tensor]:
    """Gradients of the sum of these losses by plain autograd, reduced by hand in float64."""
    module = copy.deepcopy(module)
    module.zero_grad()
    local = local_gradients(module, lambda m: torch.stack([loss(m) for loss in losses]).sum())
    world_size = dist.get_world_size()
    if reduction != "weighted":
        weight, weights = 1.0, torch.tensor(1.0 if reduction == "sum" else float(world_size))
    else:
        weights = torch.tensor(weight)
        dist.all_reduce(weights)
    weighted = {name: None if g is None else g.double() * weight for name, g in local.items()}
    return {name: g * world_size / weights for name, g in mean_over_ranks(weighted, module).items()}


def _reduces(rank: int, wrapper: str, reduction: str) -> None:
    """Accumulation under no_sync, a .grad to fold in, a weight that changes, gradients that hooks reduce."""
    ddp = wrappers([wrapper])[wrapper](Mlp(), reduction=reduction)
    for step in range(4):
        weight = 1.0 + 2 * rank + step
        if reduction == "weighted":
            ddp.set_weight(weight)
        losses = [lambda module, n=n, step=step: module(row_batch(rank, 3 * step + n)).square().sum() for n in range(2)]
        reference = expected(ddp.module, weight, reduction, *losses[: 1 + step % 2])
        ddp.zero_grad()
        for n in reversed(range(1 + step % 2)):
            with ddp.no_sync() if n else contextlib.nullcontext():
                losses[n](ddp).backward()
        assert_gradients(ddp.module, reference, rtol=1e-4, atol=1e-5)
    words = {"sum": "Gradients are summed over ranks.", "weighted": "Gradients are averaged by each rank's weight."}
    assert words[reduction] in str(ddp.explain())


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_are_summed_or_weighted(ranks2: RankPool, wrapper: str, reduction: str) -> None:
    ranks2.run(_reduces, wrapper, reduction)


def test_gradients_are_weighted_on_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_reduces, "compile_ddp", "weighted")


def _reduces_again(rank: int, reduction: str) -> None:
    """A parameter of a graph and of eager code, in the first backward on one rank alone, and a skipped step."""
    ddp = wrappers(["compile_ddp"])["compile_ddp"](SharedByBoth(), reduction=reduction)
    weight = 2.0 + rank
    if reduction == "weighted":
        ddp.set_weight(weight)
    for step in range(4):
        ddp.module.outside = step > 1 or rank == step
        skips = step == 3 and rank == 0

        def loss(module: nn.Module) -> Tensor:
            return module(row_batch(rank, step)) * (0.0 if skips else 1.0)  # noqa: B023

        reference = expected(ddp.module, 0.0 if skips else weight, reduction, loss)
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what goes by hooks
            if skips:
                ddp.skip_step()
            else:
                loss(ddp).backward()
        assert_gradients(ddp.module, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_what_is_used_in_a_graph_and_outside_is_reduced_once_in_effect(ranks2: RankPool, reduction: str) -> None:
    ranks2.run(_reduces_again, reduction)


def _sums_again(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp(), reduction="sum")
    losses = [lambda module, n=n: module(row_batch(rank, n)).square().sum() for n in range(2)]
    first, second = (expected(ddp.module, 1.0, "sum", loss) for loss in losses)
    for loss in losses:
        loss(ddp).backward()
    again = {name: dist.get_world_size() * first[name] + second[name] for name in first}
    assert_gradients(ddp.module, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_sum_sums_again_what_was_not_cleared(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_sums_again, wrapper)


def _no_weight_at_all(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp(), reduction="weighted")
    ddp.set_weight(0)
    ddp(row_batch(rank)).sum().backward()
    assert all(parameter.grad.count_nonzero() == 0 for parameter in ddp.parameters())
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            ddp.set_weight(weight)
    with pytest.raises(RuntimeError, match='reduction="mean"'):
        wrappers([wrapper])[wrapper](Mlp()).set_weight(1.0)


@pytest.mark.parametrize("wrapper", BOTH)
def test_without_any_weight_gradients_are_zero_and_bad_weights_are_refused(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_no_weight_at_all, wrapper)


class MeanOverTokens(nn.Module):
    """The mean over the tokens that count, which is not a number where none does; with an embedding's rows if asked."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.rows = nn.Embedding(4, 3, sparse=True) if sparse else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        y = self.mlp(x)
        if self.rows is not None:
            y = y + self.rows(torch.arange(4))
        return (y.square().sum(1) * counts).sum() / counts.sum()


def _no_tokens(rank: int, wrapper: str, sparse: bool) -> None:
    ddp = wrappers([wrapper])[wrapper](MeanOverTokens(sparse), reduction="weighted")
    for step in range(5):
        without = {0: 0, 1: 1, 2: 0}.get(step)  # the rank that has no tokens
        counts = torch.zeros(4) if rank == without else torch.tensor([1.0, 0.0, 2.0, 1.0 + rank])
        batch = row_batch(rank, step), counts
        local = local_gradients(copy.deepcopy(ddp.module), lambda module, batch=batch: module(*batch))
        sent = {
            name: (g.to_dense() if g.is_sparse else g) * counts.sum()
            for name, g in local.items()
            if g is not None and rank != without
        }
        total = counts.sum()
        dist.all_reduce(total)
        reference = {name: g * 2 / total for name, g in mean_over_ranks(sent, ddp.module).items()}
        ddp.zero_grad(set_to_none=step != 3)
        if step == 2:  # what was accumulated is as good as nothing, too
            with ddp.no_sync():
                ddp(row_batch(rank, 9), counts if rank == without else counts * 0 + 1).mul(0.0).backward()
        ddp.set_weight(counts.sum().item())
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="gradients of")
            ddp(*batch).backward()
        for parameter in ddp.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        assert_gradients(ddp.module, reference, rtol=1e-4, atol=1e-5)
        if sparse:
            ddp.zero_grad()
    assert "by hooks" not in str(ddp.explain())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_rank_without_weight_counts_as_zeros_whatever_its_gradients_are(
    ranks2: RankPool, wrapper: str, sparse: bool
) -> None:
    """A mean over no tokens is not a number, and nothing times it is zero."""
    ranks2.run(_no_tokens, wrapper, sparse)


def _generated(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp(), backend="inductor", reduction="weighted", bucket_cap_mb=1e-4)
    ddp.set_weight(3.0 + rank)

    def loss(module: nn.Module) -> Tensor:
        return module(row_batch(rank)).square().sum()

    reference = expected(ddp.module, 3.0 + rank, "weighted", loss)
    *_, backward = generated_code(lambda: loss(ddp).backward())
    assert_gradients(ddp.module, reference, rtol=1e-4, atol=1e-6)
    launched = backward.count("_c10d_functional.all_reduce_.default(")
    assert launched == len(ddp.plan.buckets) > 1, (launched, len(ddp.plan.buckets), backward)


@pytest.mark.inductor
def test_a_weighted_mean_takes_no_further_collective_in_the_generated_code(ranks2: RankPool) -> None:
    ranks2.run(_generated)


# ---- numbers that travel along ---------------------------------------------------------------------------------------


def _piggybacks(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp(), piggyback=("loss", "tokens"))
    assert ddp.piggybacked == {}
    launches = []
    for step in range(3):
        loss = ddp(row_batch(rank, step)).square().sum()
        ddp.piggyback(loss=loss.detach(), tokens=10 + rank)
        with pytest.raises(ValueError, match="'los' is not among"):
            ddp.piggyback(los=1.0)
        loss.backward()
        launches.append(ddp._runtime.communicator.progress.launches)
        losses = loss.detach().clone()
        dist.all_reduce(losses)
        torch.testing.assert_close(ddp.piggybacked, {"loss": losses, "tokens": torch.tensor(21.0)})
    assert launches[2] - launches[1] <= len(ddp.plan.buckets) + 2, "at most the proof's exchange besides the buckets"
    with ddp.no_sync():
        ddp(row_batch(rank)).sum().backward()
    assert ddp.piggybacked["tokens"] == 21, "a local backward carries nothing"
    if rank == 0:
        ddp.piggyback(tokens=5)
        ddp.skip_step()
    else:
        ddp(row_batch(rank)).sum().backward()
    assert ddp.piggybacked["tokens"] == 5, "what is not given counts as zero"


@pytest.mark.parametrize("wrapper", BOTH)
def test_numbers_travel_with_the_gradients_without_a_collective_of_their_own(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_piggybacks, wrapper)
