"""What models of other libraries do in a whole step: parts that stand twice, checkpoints, asking for a compiler."""

import copy
import functools
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_steps import batch, plain_step, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_ddp import compile_step
from compiled_ddp.torch_private import for_tests

pytestmark = pytest.mark.usefixtures("alone")


def step_of(model: nn.Module) -> Any:
    return compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), square, backend="aot_eager")


class Twice(nn.Module):
    """A block and a norm that have two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again = self.first
        self.layers = nn.ModuleList([nn.Linear(4, 4)] * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](self.again(torch.tanh(self.first(x))))))  # type: ignore[no-any-return]


def test_a_module_that_stands_twice_keeps_its_own_tensors() -> None:
    torch.manual_seed(0)
    model = Twice()
    loop = copy.deepcopy(model)
    held = [*model.parameters(), *model.buffers()]
    step, plain = step_of(model), plain_step(loop, torch.optim.SGD(loop.parameters(), lr=0.1), square)
    for n in range(3):
        torch.testing.assert_close(step(batch(n)), plain(batch(n)))
        now = [*model.parameters(), *model.buffers()]
        assert all(ours is theirs for ours, theirs in zip(now, held, strict=True))
        for name, value in loop.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

WIDTH, ROWS = 64, 512


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.dropout(F.gelu(self.up(x)))
        return x + scale * self.down(hidden)


class Deep(nn.Module):
    """As transformers does it: what checkpoints is a partial that was made once, and embeddings require a gradient."""

    def __init__(self, checkpoints: Callable[..., Any] | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(6))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints is not None:
            x = x * 1.0
            x.requires_grad_(True)
        for block in self.blocks:
            x = block(x, 0.5) if self.checkpoints is None else self.checkpoints(block.__call__, x, 0.5)
        return x


WAYS = {
    "without": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True, preserve_rng_state=True),
}


def losses_and_bytes(checkpoints: Callable[..., Any] | None, dropout: float, backend: str) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = Deep(checkpoints, dropout)
    step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), square, backend=backend)
    x = torch.randn(ROWS, WIDTH)
    found = [float(step(x)) for _ in range(3)]
    return found, for_tests.peak_bytes(lambda: step(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoints_of_torch_take_less_memory_for_the_same_losses(way: str, dropout: float) -> None:
    expected, kept = losses_and_bytes(None, dropout, "aot_eager")
    found, peak = losses_and_bytes(WAYS[way], dropout, "aot_eager")
    assert found == expected and found[2] < found[0]
    assert peak < (0.5 if dropout == 0.0 else 0.75) * kept, "masks of dropout are kept"


@pytest.mark.inductor
def test_inductor_draws_once_in_a_checkpoint() -> None:
    expected, kept = losses_and_bytes(None, 0.5, "inductor")
    found, peak = losses_and_bytes(WAYS["without"], 0.5, "inductor")
    assert found == pytest.approx(expected, rel=1e-6)
    assert peak < kept


def test_checkpoints_are_torchs_own_behind_a_trace() -> None:
    x = torch.ones(3, requires_grad=True)
    step_of(nn.Linear(4, 4))(batch(0))
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3).cos())


# ---- batches ---------------------------------------------------------------------------------------------------------


class Encoding(UserDict[str, Tensor]):
    """As those of transformers, whose keys are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_batch_may_be_a_dictionary_of_a_librarys() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    loop = copy.deepcopy(model)

    def loss(model: nn.Module, given: Encoding, more: list[Encoding]) -> Tensor:
        return ((model(given.x) - more[0]["y"]) ** 2).mean()

    step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, backend="aot_eager")
    plain = plain_step(loop, torch.optim.SGD(loop.parameters(), lr=0.1), loss)
    for n in range(3):
        given, more = Encoding(x=batch(n)), [Encoding(y=batch(10 + n))]
        torch.testing.assert_close(step(given, more), plain(given, more))
    assert sum(known.graphs for every in step._known.values() for known in every) == 1


# ---- asking ----------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Looks at the values of its mask, as transformers does, unless a compiler is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > -1
        if not torch.compiler.is_compiling() and mask.all():
            return self.layer(x)  # type: ignore[no-any-return]
        return self.layer(torch.where(mask, x, 0.0))  # type: ignore[no-any-return]


def test_libraries_are_told_that_this_is_a_compiler() -> None:
    model = Masked()
    loop = copy.deepcopy(model)
    step, plain = step_of(model), plain_step(loop, torch.optim.SGD(loop.parameters(), lr=0.1), square)
    for n in range(3):
        torch.testing.assert_close(step(batch(n)), plain(batch(n)))
        assert not torch.compiler.is_compiling()


def test_a_part_of_torch_that_asks_for_a_value_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(RuntimeError, match=r"return model\(x\)\.pow\(2\)\.mean\(\)`, in BatchNorm1d\) for a value"):
        step_of(model)(batch(0))


def test_anomaly_mode_is_told_of_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    loop = copy.deepcopy(model)
    step, plain = step_of(model), plain_step(loop, torch.optim.SGD(loop.parameters(), lr=0.1), square)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(), pytest.warns(UserWarning, match="does not see a compiled step"):
            torch.testing.assert_close(step(batch(0)), plain(batch(0)))
    torch.testing.assert_close(step(batch(1)), plain(batch(1)))
