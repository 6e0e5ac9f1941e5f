"""The row of a user of torch alone, whose all-reduces stand in the compiled backward, averages what it should."""

import copy

import pytest
from generated_code import read_statements
from models import Mlp, TokenModel, assert_gradients, expected_mean, row_batch, token_batch

from benchmarks.variants import make_variants
from compiled_ddp import torch_private
from ranks import RankPool


def _steps(rank: int, name: str) -> None:
    model = TokenModel()
    module = make_variants(backend="aot_eager")[name].wrap(model)
    for number in range(3):
        batch = token_batch(2 * number + rank)
        expected = expected_mean(copy.deepcopy(model), lambda bare: bare(*batch))  # noqa: B023
        model.zero_grad()
        module(*batch).backward()
        assert_gradients(model, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["functional all-reduces", "functional all-reduces, bucketed"])
def test_gradients_are_those_of_autograd_averaged_by_hand(ranks2: RankPool, name: str) -> None:
    ranks2.run(_steps, name)


def _all_reduces(rank: int, name: str) -> int:
    batch, module = row_batch(rank, 0), make_variants()[name].wrap(Mlp())
    sources = torch_private.for_tests.generated_code(lambda: module(batch).square().sum().backward())
    (backward,) = [source for source in sources if "all_reduce" in source]
    return sum(statement.kind == "launch" for statement in read_statements(backward)[0])


@pytest.mark.inductor
def test_inductor_makes_buckets_where_it_is_asked_for_them(ranks2: RankPool) -> None:
    alone, bucketed = (
        ranks2.run(_all_reduces, name, timeout_seconds=300, collective_timeout_seconds=120)[0]
        for name in ("functional all-reduces", "functional all-reduces, bucketed")
    )
    assert alone == len(list(Mlp().parameters()))
    assert bucketed < alone
