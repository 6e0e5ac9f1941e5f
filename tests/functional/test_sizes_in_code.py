"""Whole steps are graphs of fixed shapes: each size is a number in what is compiled, and not a symbol."""

import copy
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from compiled_ddp import compile_step, torch_private

SYMBOL = re.compile(r"\bs\d+\b")


class Digits(nn.Module):
    """Its mean over pixels makes a float of sizes, and its BatchNorm another one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU())
        self.classifier = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*returns this process's own gradients")
def test_no_size_of_a_convolution_is_a_symbol_and_its_steps_are_the_loops() -> None:
    torch.manual_seed(0)
    model = Digits()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, plain)]
    step = compile_step(model, optimizers[0], loss_fn)
    batches = [(torch.randn(6, 1, 8, 8), torch.randint(10, (6,))) for _ in range(3)]
    losses: list[Tensor] = []
    code = torch_private.for_tests.generated_code(lambda: losses.append(step(*batches[0])))
    assert code and not [line for source in code for line in source.splitlines() if SYMBOL.search(line)]
    losses += [step(*batch) for batch in batches[1:]]
    for batch, found in zip(batches, losses, strict=True):
        expected = loss_fn(plain, *batch)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
