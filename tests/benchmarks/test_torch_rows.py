"""The rows of what torch itself offers average what they should, and those that an older torch lacks say so."""

import copy

import pytest
import torch
from generated_code import read_statements
from models import Mlp, TokenModel, expected_mean, row_batch, token_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks import compare, torch_rows
from benchmarks.models import GPT, Switch
from benchmarks.torch_rows import Here
from benchmarks.variants import make_variants
from compiled_ddp import torch_private
from compiled_ddp.tools.comparison.variants import WrapperOptions
from ranks import RankPool

VERSION = torch_private.versions.minor_version()
NAMES = [variant.name for variant in torch_rows.make_rows(WrapperOptions())]


class InBlocks(nn.Module):
    """As little as has blocks, and something before and behind them: products, for which no kernel is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = (nn.Linear(*sizes, bias=False) for sizes in ((5, 16), (16, 4)))
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


PARAMETERS = len(list(InBlocks().parameters()))


def _assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        found = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-4, atol=1e-6)


def _steps(rank: int, name: str) -> None:
    model = GPT(width=8, layers=2, heads=2, context=6) if "replicate" in name else TokenModel()
    bare = copy.deepcopy(model)  # before the row changes the classes of its modules
    module = make_variants(backend="aot_eager")[name].wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD(bare.parameters(), lr=0.1)
    for number in range(3):
        batch = token_batch(2 * number + rank)
        expected = expected_mean(bare, lambda bare: bare(*batch))  # noqa: B023
        module(*batch).backward()
        _assert_gradients(model, expected)
        for key, parameter in bare.named_parameters():
            parameter.grad = expected[key].to(parameter.dtype)
        for updates in (optimizer, others):
            updates.step()
            updates.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_autograd_averaged_by_hand(ranks2: RankPool, name: str) -> None:
    ranks2.run(_steps, name)


def _launches_and_waits(rank: int, name: str) -> list[str]:
    """Those of the backward that Inductor writes, in order; its gradients are those of autograd averaged by hand."""
    model, batch = InBlocks(), row_batch(rank)
    expected = expected_mean(copy.deepcopy(model), lambda bare: bare(batch).square().sum())
    module = make_variants(bucket_cap_mb=0.002)[name].wrap(model)
    sources = torch_private.for_tests.generated_code(lambda: module(batch).square().sum().backward())
    _assert_gradients(model, expected)
    (backward,) = [source for source in sources if "all_reduce" in source]
    return [statement.kind for statement in read_statements(backward)[0] if statement.kind in ("launch", "wait")]


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("name", "fewest", "most"),
    [
        (torch_rows.FUNCTIONAL, PARAMETERS, PARAMETERS),
        (f"{torch_rows.FUNCTIONAL}, bucketed", 1, 1),
        (f"{torch_rows.FUNCTIONAL}, buckets of 25 MiB", 2, PARAMETERS - 1),  # of bucket_cap_mb here
        (torch_rows.PER_BLOCK, 4, 4),  # what stands before, two blocks, and the head
        (torch_rows.SCHEDULED, 1, PARAMETERS),
    ],
)
def test_inductor_makes_the_buckets_that_a_row_is_named_for(
    ranks2: RankPool, name: str, fewest: int, most: int
) -> None:
    if reason := torch_rows.why_not(name):
        pytest.skip(reason)
    done = ranks2.run(_launches_and_waits, name, timeout_seconds=300, collective_timeout_seconds=120)[0]
    assert fewest <= done.count("launch") <= most
    if name == torch_rows.PER_BLOCK:
        assert done[:2] == ["launch", "launch"], "the first bucket is waited for behind the next launch"


def test_blocks_stand_in_the_outermost_lists_of_modules() -> None:
    assert list(torch_rows.blocks_of(GPT(width=8, layers=2, heads=2))) == ["blocks.0", "blocks.1"]
    switch = Switch(width=8, layers=2, heads=2, experts=2)
    assert list(torch_rows.blocks_of(switch)) == ["blocks.0", "blocks.1"]
    assert list(torch_rows.blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0", "2"]
    assert torch_rows.blocks_of(Mlp()) == {}


def test_buckets_per_block_hold_what_stands_before_and_behind_the_blocks_too() -> None:
    gpt = GPT(width=8, layers=2, heads=2)
    assert torch_rows.bucket_plan(gpt) == [["token", "position"], ["blocks.0"], ["blocks.1"], ["norm", "head"]]
    assert torch_rows.bucket_plan(Mlp()) == [["head", "first", "norm"]]


@pytest.mark.parametrize(
    ("name", "here", "reason"),
    [
        (torch_rows.PER_BLOCK, Here((2, 13), has_gpu=True), " needs torch 2.14, this is "),
        (torch_rows.PER_BLOCK, Here((2, 14), has_gpu=False), " needs a GPU, or torch 2.15: this is "),
        (torch_rows.SCHEDULED, Here((2, 14), has_gpu=False), " needs a GPU, or torch 2.15: this is "),
    ],
)
def test_a_row_that_cannot_be_measured_is_not_offered_and_refused_by_name(name: str, here: Here, reason: str) -> None:
    assert torch_rows.why_not(name, here=here).startswith(f"'{name}'{reason}")
    assert name not in [variant.name for variant in torch_rows.make_rows(WrapperOptions(), here=here)]
    there = Here((2, 14), has_gpu=True)
    assert not torch_rows.why_not(name, here=there)
    assert name in [variant.name for variant in torch_rows.make_rows(WrapperOptions(), here=there)]


@pytest.mark.skipif(VERSION >= (2, 14), reason="has it")
def test_the_command_refuses_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--variants", "torch DDP", torch_rows.PER_BLOCK])
    assert "needs torch 2.14, this is" in capsys.readouterr().err.splitlines()[-1]


def test_replicate_is_refused_where_ranks_use_different_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--model", "linears", "switch", "--variants", "torch replicate"])
    assert "switch: 'torch replicate' needs every parameter" in capsys.readouterr().err.splitlines()[-1]
    assert compare.parse(["--model", "linears", "--variants", "torch replicate"]).variants == ["torch replicate"]
