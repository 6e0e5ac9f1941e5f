"""What a captured graph's backward computes until each gradient is ready: counted, by hand-computed numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calibrations import calibration
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from compiled_ddp import compile_ddp
from compiled_ddp.functional.wanted import Arrival
from compiled_ddp.graph import program
from compiled_ddp.graph.backward_work import count_backward, count_gradients
from compiled_ddp.graph.capture import gradient_order
from compiled_ddp.planning.cost_model import BackwardWork, Compute, Work
from compiled_ddp.ranks import pretended


def counted(model: nn.Module, *inputs: Any, dynamic: bool | None = None) -> tuple[list[str], BackwardWork]:
    """The parameters' names in the order of their gradients, and what is counted."""
    found: list[tuple[list[str], BackwardWork]] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def keep(graph_module: GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
        trained = [place for place, value in enumerate(values) if id(value) in names]
        order = gradient_order(graph_module.graph, trained)
        found.append(([names[id(values[place])] for place in order], count_backward(graph_module.graph, order)))
        return graph_module.forward

    torch.compiler.reset()
    torch.compile(model, backend=keep, dynamic=dynamic)(*inputs)
    (one,) = found
    return one


def test_a_product_takes_its_operations_once_for_each_gradient_that_of_the_weight_first() -> None:
    names, work = counted(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), torch.ones(4, 3))
    first, second = 2 * 4 * 3 * 5, 2 * 4 * 5 * 7
    flops = dict(zip(names, (each.flops for each in work.until_ready), strict=True))
    assert flops == {
        "1.bias": second,
        "1.weight": second,
        "0.bias": 2 * second + first,  # the gradient of what the second layer has read is between them
        "0.weight": 2 * second + first,
    }
    assert work.total.flops == 2 * second + first, "the input has no gradient"


def test_elementwise_work_is_counted_by_memory() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.scale)

    names, work = counted(Scaled(), torch.ones(4, 8))
    assert names == ["scale"]
    assert work.total.flops == 0
    assert work.total.nbytes == 2 * (2 * 4 * 8 * 4), "two results, read and written"


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(
    ("model", "x", "flops"),
    [
        (Convolution(), torch.ones(2, 3, 8, 8), 2 * (6 * 6 * 6 * 2) * (3 * 3 * 3)),
        (Attention(), torch.ones(2, 5, 8), 2 * (2 * 5 * 8 * 8) + 0),
    ],
    ids=["a convolution", "attention"],
)
def test_whatever_multiplies_is_counted(model: nn.Module, x: Tensor, flops: int) -> None:
    _, work = counted(model, x)
    assert work.total.flops >= flops


def test_a_checkpoint_computes_its_forward_once_more() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x.tanh(), use_reentrant=False)

    plain, again = nn.Sequential(nn.Tanh(), nn.Linear(4, 4, bias=False)), Checkpointed()
    once, twice = counted(plain, torch.ones(2, 4))[1], counted(again, torch.ones(2, 4))[1]
    assert twice.total.flops == once.total.flops + 2 * 2 * 4 * 4


def test_symbolic_sizes_count_as_they_were_captured() -> None:
    model = nn.Linear(3, 5)
    assert counted(model, torch.ones(4, 3), dynamic=True)[1].total == counted(model, torch.ones(4, 3))[1].total


def test_ragged_sizes_are_no_error() -> None:
    class OfRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, rows: Tensor) -> Tensor:
            return self.layer(rows).values().sum()

    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    names, work = counted(OfRows(), rows)
    assert sorted(names) == ["layer.bias", "layer.weight"]
    assert work.total.nbytes > 0


def test_what_cannot_be_counted_is_warned_of_and_stops_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("of a new kind of tensor")

    monkeypatch.setattr(program, "count_backward", fail)
    model = nn.Linear(3, 5)
    with (
        pretended.world(2, backend="gloo", calibration=calibration()),
        pytest.warns(UserWarning, match="could not be counted, and is taken by sizes: .*of a new kind of tensor"),
    ):
        compile_ddp(model, backend="aot_eager").warmup(torch.ones(4, 3))


def test_counting_leaves_the_random_state_and_the_modes_as_they_were() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        counted(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5)), torch.ones(4, 3))
        assert torch.is_autocast_enabled("cpu")
    torch.set_rng_state(before)
    assert torch.equal(torch.get_rng_state(), before)


def test_work_in_seconds_never_falls() -> None:
    _, work = counted(nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]), torch.ones(2, 4))
    readiness = work.readiness(Compute(1e9, 1e9))
    assert list(readiness.seconds) == sorted(readiness.seconds)
    assert readiness.seconds[-1] <= readiness.backward_seconds == work.total.seconds(Compute(1e9, 1e9))


# ---- steps that were traced operator by operator ---------------------------------------------------------------------


def traced(loss: Callable[..., Tensor], *inputs: Tensor) -> list[Any]:
    """The nodes of the gradients with respect to all inputs but the last."""
    graph = make_fx(torch.func.grad(loss, tuple(range(len(inputs) - 1))))(*inputs).graph
    return [*graph.output_node().args[0]]


def test_in_a_traced_step_what_hangs_on_the_seed_is_counted() -> None:
    def loss(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        return ((x @ first) @ second).sum()

    of_first, of_second = traced(loss, torch.ones(4, 16), torch.ones(16, 2), torch.ones(8, 4))
    work = count_gradients([of_second, of_first])
    assert work is not None
    of_weight, of_hidden, of_input = 2 * 16 * 8 * 2, 2 * 8 * 2 * 16, 2 * 4 * 8 * 16
    assert [each.flops for each in work.until_ready] == [of_weight, of_weight + of_hidden + of_input]
    assert work.total == work.until_ready[-1]


def test_a_traced_step_without_products_or_without_a_seed_tells_nothing() -> None:
    assert count_gradients(traced(lambda weight, x: (weight * x).sum(), torch.ones(4), torch.ones(4))) is None
    graph = make_fx(lambda weight, x: weight @ x)(torch.ones(4, 4), torch.ones(4, 4)).graph
    assert count_gradients([graph.output_node().args[0]]) is None


def test_what_rank_zero_has_counted_travels_as_text() -> None:
    work = BackwardWork((Work(1.0, 2.0), Work(3.0, 4.5)), Work(5.0, 6.0))
    for arrival in (Arrival((1, 0), work), Arrival((0, 1))):
        assert Arrival.from_json(arrival.to_json()) == arrival
