"""Values of a compiled step that are computed again where a derivative reads them: equal, and not kept."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_grad import assert_same
from torch import Tensor
from torch.func import jvp, vmap
from torch.fx import Graph

from compiled_ddp import functional as ddp
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.torch_private import for_tests
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
LAYERS, WIDTH = 4, 16

Tree = dict[str, Tensor]
Call = Callable[..., Tensor]


def parameters() -> Tree:
    generator = torch.Generator().manual_seed(0)
    sizes = {f"{name} {n}": size for n in range(LAYERS) for name, size in (("up", (WIDTH, 64)), ("down", (64, WIDTH)))}
    return {name: torch.randn(size, generator=generator) / 4 for name, size in sizes.items()}


def rows(rank: int, count: int = 512) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1 + rank))


def plainly(function: Call, *args: Any) -> Tensor:
    return function(*args)


def loss(call: Call, params: Tree, x: Tensor) -> Tensor:
    for n in range(LAYERS):
        block = lambda x: x + F.gelu(x @ params[f"up {n}"]) @ params[f"down {n}"]  # noqa: E731, B023
        x = call(block, x)
    return x.square().mean()


def rewritten(monkeypatch: pytest.MonkeyPatch, step: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """What `step` returns, and how often each operator stands in the graphs that it compiles."""
    operators: Counter[str] = Counter()
    run = StepPipeline.run

    def counting(self: StepPipeline, graph: Graph) -> None:
        run(self, graph)
        operators.update(str(node.target) for node in graph.nodes)

    monkeypatch.setattr(StepPipeline, "run", counting)
    result = step()
    monkeypatch.setattr(StepPipeline, "run", run)
    return result, operators


@pytest.mark.parametrize("backend", BACKENDS)
def test_less_memory_is_taken_for_the_same_bits(backend: Any) -> None:
    params, x = parameters(), rows(0)
    found = {}
    for call in (plainly, ddp.checkpoint):
        step = ddp.compile(torch.func.grad(lambda params, x: loss(call, params, x)), backend=backend)  # noqa: B023
        result = step(params, x)
        found[call] = result, for_tests.peak_bytes(lambda: step(params, x))  # noqa: B023
    (plain, kept_bytes), (again, recomputing_bytes) = found[plainly], found[ddp.checkpoint]
    assert all(torch.equal(again[name], value) for name, value in plain.items())
    hidden = 512 * 64 * 4
    assert kept_bytes > 2 * LAYERS * hidden
    assert recomputing_bytes < kept_bytes / 2


def test_each_value_that_is_read_is_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def operators_of(call: Call) -> Counter[str]:
        step = ddp.compile(torch.func.grad(lambda params, x: loss(call, params, x)), backend="aot_eager")
        return rewritten(monkeypatch, lambda: step(parameters(), rows(0)))[1]

    plain, again = operators_of(plainly), operators_of(ddp.checkpoint)
    more = again - plain
    assert more["aten.gelu.default"] == LAYERS, "gelu's result is read by a weight's gradient"
    assert more["aten.mm.default"] == LAYERS, "of the two products of a block one is read"
    assert more["compiled_ddp.recompute_after.default"] == LAYERS


def _on_ranks(rank: int, backend: Any, what: Sequence[str]) -> None:
    """With what the graph has besides: reductions, a collective in the block, draws; batches; forward derivatives."""

    def noisy(call: Call, params: Tree, x: Tensor, generator: torch.Generator) -> Tensor:
        def block(x: Tensor) -> Tensor:
            kept = torch.empty_like(x).bernoulli_(0.5, generator=generator)
            x = torch.tanh(x @ params["up 0"]) @ params["down 0"] * kept
            return torch.exp(x - ddp.all_reduce(torch.sin(x).mean(0)))

        x = call(lambda x: call(block, x) * 2.0, x)
        return x.square().mean() + torch.rand((), generator=generator) * params["up 0"].sum()

    def batched(call: Call, params: Tree, x: Tensor, _: object) -> Tensor:
        return vmap(lambda row: call(lambda row: torch.tanh(row @ params["up 0"]).square().sum().sin(), row))(x).sum()

    def forward(call: Call, params: Tree, x: Tensor, _: object) -> Tensor:
        return jvp(lambda x: loss(call, params, x), (x,), (x.sin(),))[1]

    for f in (f for f in (noisy, batched, forward) if f.__name__ in what):
        steps = [ddp.compile(ddp.grad(lambda *a, call=call: f(call, *a)), backend=backend) for call in CALLS]  # noqa: B023
        generators = [torch.Generator().manual_seed(rank) for _ in CALLS]
        for _ in range(2):
            (plain, again) = (
                step(parameters(), rows(rank, 8), own) for step, own in zip(steps, generators, strict=True)
            )
            assert_same(again, plain)
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


CALLS = (plainly, ddp.checkpoint)


# What a compiler is given of all three is the same: values that are computed again.
@pytest.mark.parametrize(
    ("backend", "what"),
    [
        ("aot_eager", ("noisy", "batched", "forward")),
        pytest.param("inductor", ("noisy",), marks=[pytest.mark.inductor, pytest.mark.slow]),
        pytest.param("inductor", ("batched", "forward"), marks=[pytest.mark.inductor, pytest.mark.slow]),
    ],
)
def test_checkpoints_compose(ranks2: RankPool, backend: str, what: Sequence[str]) -> None:
    ranks2.run(_on_ranks, backend, what, **LIMITS)


def test_eager_calls_are_refused() -> None:
    with pytest.raises(RuntimeError, match="call it within a step of"):
        ddp.checkpoint(torch.sin, torch.ones(3))
