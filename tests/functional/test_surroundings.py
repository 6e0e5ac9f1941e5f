"""What a compiled step depends on besides its arguments, however it comes to it: the graph follows, or is another."""

import functools
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_grad import assert_same, rows
from torch import Tensor, nn
from torch.func import functional_call

from compiled_ddp import functional as ddp
from ranks import RankPool

Tree = dict[str, Tensor]
Loss = Callable[[Tree, Tensor], Tensor]


def weights() -> Tree:
    return {"w": torch.linspace(-1, 1, 8).view(4, 2)}


def batches(step: int = 0) -> list[Tensor]:
    return [rows(rank, step)[:, :4] for rank in range(2)]


def loss(params: Tree, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def by_hand(f: Loss, params: Tree, of_ranks: Sequence[Tensor], times: float = 1.0) -> Tree:
    """The mean over ranks of plain autograd's gradients."""
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for x in of_ranks:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        f(leaves, x).backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            total[name] += times * leaf.grad / len(of_ranks)
    return total


def compiled(gradient: Callable[..., Any]) -> Callable[..., Any]:
    return ddp.compile(lambda *args: gradient(*args), backend="aot_eager")


# ---- what it reaches by names, behind what that is wrapped in --------------------------------------------------------

FACTOR = 1.0
GRADIENT: Callable[..., Any] = len


def _annealed(f: Loss) -> Loss:
    @functools.wraps(f)
    def call(params: Tree, x: Tensor) -> Tensor:
        return FACTOR * f(params, x)

    return call


def _times(f: Loss, factor: float) -> Loss:
    @functools.wraps(f)
    def call(params: Tree, x: Tensor) -> Tensor:
        return factor * f(params, x)

    return call


def _wrapped(rank: int) -> None:
    global FACTOR, GRADIENT
    params, x = weights(), batches()[rank]

    annealed = compiled(ddp.grad(_annealed(loss)))
    for FACTOR in (1.0, 3.0):
        assert_same(annealed(params, x), by_hand(loss, params, batches(), FACTOR))

    GRADIENT = ddp.grad(loss)
    named = ddp.compile(lambda params, x: GRADIENT(params, x), backend="aot_eager")
    assert_same(named(params, x), by_hand(loss, params, batches()))
    GRADIENT = ddp.grad(loss, reduction="sum")
    assert_same(named(params, x), by_hand(loss, params, batches(), 2.0))

    objective = _times(loss, 1.0)
    closing = ddp.compile(lambda params, x: ddp.grad(objective)(params, x), backend="aot_eager")
    assert_same(closing(params, x), by_hand(loss, params, batches()))
    objective = _times(loss, 5.0)
    assert_same(closing(params, x), by_hand(loss, params, batches(), 5.0))


def test_what_a_wrapper_of_a_function_reads_is_looked_at_too(ranks2: RankPool) -> None:
    ranks2.run(_wrapped)


# ---- tensors, and modules --------------------------------------------------------------------------------------------


def _other_memory(rank: int) -> None:
    params, x, mean = weights(), batches()[rank], by_hand(loss, weights(), batches())
    rate, gradient = torch.tensor(0.5), ddp.grad(loss)

    def step(params: Tree, x: Tensor) -> Tree:
        return {name: rate * each for name, each in gradient(params, x).items()}

    run = ddp.compile(step, backend="aot_eager")
    for value in (0.5, 0.05):
        rate.data = torch.tensor(value)
        assert_same(run(params, x), {name: value * each for name, each in mean.items()})
    rate.fill_(0.25)  # in the memory that the graph reads
    assert_same(run(params, x), {name: 0.25 * each for name, each in mean.items()})

    torch.manual_seed(0)
    teacher = nn.Linear(4, 2).requires_grad_(False)

    def distil(params: Tree, x: Tensor) -> Tensor:
        return (x @ params["w"] - teacher(x)).square().mean()

    distilled = compiled(ddp.grad(distil))
    assert_same(distilled(params, x), by_hand(distil, params, batches()))
    teacher.load_state_dict({name: value + 1 for name, value in teacher.state_dict().items()}, assign=True)
    assert_same(distilled(params, x), by_hand(distil, params, batches()))


def test_a_tensor_that_is_given_other_memory_or_replaced_in_a_module_is_read_anew(ranks2: RankPool) -> None:
    ranks2.run(_other_memory)


def _of_module(params: Tree, model: nn.Module, x: Tensor) -> Tensor:
    return functional_call(model, params, (x,)).square().mean()  # type: ignore[no-any-return]


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.gradient = model, ddp.grad(self.loss)

    def loss(self, params: Tree, x: Tensor) -> Tensor:
        return _of_module(params, self.model, x)

    def step(self, params: Tree, x: Tensor) -> Tree:
        return self.gradient(params, x)  # type: ignore[no-any-return]


def _by_name(model: nn.Module) -> Callable[..., Any]:
    return compiled(ddp.grad(lambda params, x: _of_module(params, model, x)))


def _as_argument(model: nn.Module) -> Callable[..., Any]:
    run = compiled(ddp.grad(_of_module))
    return lambda params, x: run(params, model, x)


def _of_self(model: nn.Module) -> Callable[..., Any]:
    return ddp.compile(Trainer(model).step, backend="aot_eager")


def _as_default(model: nn.Module) -> Callable[..., Any]:
    gradient = ddp.grad(_of_module)

    def step(params: Tree, x: Tensor, m: nn.Module = model) -> Any:
        return gradient(params, m, x)

    return ddp.compile(step, backend="aot_eager")


def _in_a_dictionary(model: nn.Module) -> Callable[..., Any]:
    models = {"student": model}
    return compiled(ddp.grad(lambda params, x: _of_module(params, models["student"], x)))


def _switched(rank: int, way: Callable[[nn.Module], Callable[..., Any]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1))
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    run = way(model)
    run(params, batches()[rank])
    model.eval()
    expected = by_hand(lambda params, x: _of_module(params, model, x), params, batches())
    assert_same(run(params, batches()[rank]), expected)
    model[0].register_forward_hook(lambda *args: 2 * args[-1])
    expected = by_hand(lambda params, x: _of_module(params, model, x), params, batches())
    assert_same(run(params, batches()[rank]), expected)


@pytest.mark.parametrize("way", [_by_name, _as_argument, _of_self, _as_default, _in_a_dictionary])
def test_a_module_that_is_switched_or_gets_a_hook_is_traced_anew_however_the_step_has_it(
    ranks2: RankPool, way: Callable[[nn.Module], Callable[..., Any]]
) -> None:
    ranks2.run(_switched, way)


def _kinds(_: int) -> list[str]:
    rate = 1.0
    run = ddp.compile(lambda x: rate * x, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rate in torch.linspace(0, 1, 20).tolist():  # noqa: B007
            run(torch.ones(2))
    return [str(warning.message) for warning in caught if "has been compiled" in str(warning.message)]


def test_a_step_that_is_compiled_for_each_value_of_a_number_says_so_once(ranks2: RankPool) -> None:
    for (message,) in ranks2.run(_kinds):
        assert "compiled 16 times, the last time again: a value that it closes over is 0.7" in message
        assert ", and was 0.7" in message


SETTINGS = {"rate": 0.1, "optimizer": {"momentum": 0.5}}
optim = types.ModuleType("optim")  # as a user's file


def _scaled(by: Callable[[], float]) -> Callable[[Tensor], Tensor]:
    return ddp.compile(lambda x: by() * x, backend="aot_eager")


class Schedule:
    """Attributes of its own, in a method, in a property and in another object."""

    def __init__(self) -> None:
        self.rate, self.steps, self.options = 0.1, 0, types.SimpleNamespace(decay=1.0)

    @property
    def decayed(self) -> float:
        return self.options.decay * self.factor()

    def factor(self) -> float:
        return self.rate

    def step(self, x: Tensor) -> Tensor:
        return self.decayed * x


def test_a_value_in_a_container_an_object_or_a_module_of_python_is_read_again_when_it_is_replaced() -> None:
    x = torch.ones(2)
    of_dict = _scaled(lambda: SETTINGS["rate"] * SETTINGS["optimizer"]["momentum"])  # type: ignore[index,operator]
    optim.RATE = 1.0  # type: ignore[attr-defined]
    of_module = _scaled(lambda: optim.RATE)
    rates = [1.0, 2.0]
    of_list = _scaled(lambda: rates[0])
    schedule = Schedule()
    of_self = ddp.compile(schedule.step, backend="aot_eager")
    closing = _scaled(lambda: schedule.options.decay)
    for factor in (1.0, 3.0):
        SETTINGS["rate"], SETTINGS["optimizer"] = 2.0, {"momentum": factor / 2}
        optim.RATE = rates[0] = schedule.options.decay = factor  # type: ignore[attr-defined]
        for run in (of_dict, of_module, of_list, closing):
            assert torch.equal(run(x), factor * x)
        assert torch.equal(of_self(x), 0.1 * factor * x)
    schedule.rate = 5.0
    assert torch.equal(of_self(x), 15 * x)


def test_an_attribute_that_a_step_does_not_read_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, traced = Schedule(), list[int]()
    run = ddp.compile(schedule.step, backend="aot_eager")
    monkeypatch.setattr(Schedule, "decayed", property(lambda self: traced.append(1) or self.rate))
    for schedule.steps in range(3):
        run(torch.ones(2))
    assert traced == [1]


class OfLists(nn.Module):
    """Reads parameters of modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(2))
        self.weights = nn.ParameterList([torch.ones(4, 2)])
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x @ self.weights[0] * self.inner.scale)
        return y


@pytest.mark.parametrize("is_called", [True, False])
def test_parameters_of_modules_that_are_never_called_are_read_anew_when_they_are_replaced(is_called: bool) -> None:
    model, x = OfLists().requires_grad_(False), torch.ones(3, 4)
    run = ddp.compile(lambda x: (model if is_called else model.forward)(x), backend="aot_eager")
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: model.load_state_dict({n: v + 1 for n, v in model.state_dict().items()}, assign=True),
            lambda: setattr(model, "head", nn.Linear(2, 2, bias=False)),
        ):
            change()
            torch.testing.assert_close(run(x), model(x))


def test_a_tensor_that_is_transposed_in_place_is_read_anew() -> None:
    matrix = torch.arange(4.0).view(2, 2)
    run = ddp.compile(lambda x: matrix @ x, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(run(torch.eye(2)), matrix)
        matrix.t_()


def _adds_one(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a.add_(1)
    return a + b, b.clone()


def test_arguments_that_overlap_have_a_graph_of_their_own() -> None:
    """Beside each other or apart they share one."""
    traced: list[int] = []

    def step(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        traced.append(1)
        return _adds_one(a, b)

    run = ddp.compile(step, backend="aot_eager")
    apart = [(slice(0, 2), slice(2, 4)), (slice(4, 6), slice(0, 2))]
    overlapping = [(slice(0, 2), slice(0, 2)), (slice(0, 2), slice(1, 3)), (slice(1, 3), slice(0, 2))]
    for places in (*apart, *overlapping, *apart):
        given, expected = torch.arange(8.0), torch.arange(8.0)
        found = run(*(given[place] for place in places))
        for one, other in zip(found, _adds_one(*(expected[place] for place in places)), strict=True):
            assert torch.equal(one, other), places
        assert torch.equal(given, expected), places
    assert len(traced) == 1 + len(overlapping)
    a, b = torch.zeros(2), torch.ones(2)
    assert torch.equal(run(a, b)[0], torch.full((2,), 2.0))
    assert len(traced) == 1 + len(overlapping)


def test_whether_an_argument_requires_a_gradient_is_seen_in_the_step() -> None:
    """As who leaves frozen parameters alone asks."""
    asked, traced = [0], [0]

    def step(p: Tree) -> Tree:
        asked[0] += 1
        return {n: v - 1 if v.requires_grad else v for n, v in p.items()}

    def other(p: Tree) -> Tree:
        traced[0] += 1
        return torch.func.grad(lambda p: torch.stack([v.sum() for v in p.values()]).square().sum())(p)  # type: ignore[no-any-return]

    run, run_other = (ddp.compile(each, backend="aot_eager") for each in (step, other))
    for trained in ("a", "b"):
        params = {name: torch.zeros(2, requires_grad=name == trained) for name in ("a", "b")}
        found = run(params)
        assert {name: value.sum().item() for name, value in found.items()} == {"a": 0.0, "b": 0.0} | {trained: -2.0}
        assert not any(value.requires_grad for value in found.values())
        run_other(params)
    run(params)
    assert (asked, traced) == ([2], [1])


# ---- memory that is donated ------------------------------------------------------------------------------------------


def _bellman(online: Tree, target: Tree, x: Tensor) -> Tensor:
    return (x @ online["w"] - 1.0 - 0.9 * (x.flip(0) @ target["w"])).square().mean()


def _target_becomes_online(rank: int) -> None:
    gradient = ddp.grad(_bellman)

    def step(state: dict[str, Tree], x: Tensor) -> dict[str, Tree]:
        gradients = gradient(state["online"], state["target"], x)
        online = {name: p - 0.2 * gradients[name] for name, p in state["online"].items()}
        return {"online": online, "target": state["target"]}

    train = ddp.compile(step, donate="state", backend="aot_eager")
    state = train({"online": weights(), "target": weights()}, batches()[rank])
    state = train(state, batches()[rank])
    shared = {"online": state["online"], "target": state["online"]}
    with pytest.raises(ValueError, match="shares memory with"):
        train(shared, batches()[rank])
    copied = {"online": state["online"], "target": {name: p.clone() for name, p in state["online"].items()}}
    before = {name: p.clone() for name, p in state["online"].items()}
    assert_same(train(copied, batches()[rank])["target"], before)


def _donates_what_it_closes_over(rank: int) -> None:
    params, other = weights(), weights()
    gradient = ddp.grad(lambda p, x: loss(p, x) + (p["w"] - params["w"]).square().sum())

    def step(given: Tree, x: Tensor) -> Tree:
        return {name: given[name] - each for name, each in gradient(given, x).items()}

    train = ddp.compile(step, donate="given", backend="aot_eager")
    message = "shares memory with one that the step closes over"
    with pytest.raises(ValueError, match=message):
        train(params, batches()[rank])
    other = train(other, batches()[rank])
    with pytest.raises(ValueError, match=message):  # in a later call too
        train(params, batches()[rank])
    train(other, batches()[rank])


@pytest.mark.parametrize("case", [_target_becomes_online, _donates_what_it_closes_over])
def test_donated_memory_that_something_else_reads_is_refused_in_every_call(
    ranks2: RankPool, case: Callable[[int], None]
) -> None:
    ranks2.run(case)


# ---- autocast --------------------------------------------------------------------------------------------------------

POSITIONS = torch.arange(1024, dtype=torch.float32)
FREQUENCIES = 10000.0 ** (-torch.arange(8, dtype=torch.float32) / 8)


def _with_rotary_angles(params: Tree, x: Tensor) -> Tensor:
    """Positions above 256 are no bfloat16 numbers."""
    h = x @ params["w"]
    with torch.autocast("cpu", enabled=False):
        angles = POSITIONS[:, None] @ FREQUENCIES[None, :]
        return (h.float() * angles.cos()).mean()


def _under_autocast(rank: int, backend: str) -> None:
    params = {"w": torch.linspace(-1, 1, 32).view(4, 8)}
    of_ranks = [torch.randn(1024, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    gradient = ddp.grad_and_value(_with_rotary_angles)
    run = ddp.compile(lambda params, x: gradient(params, x), backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = by_hand(_with_rotary_angles, params, of_ranks)
        value = _with_rotary_angles(params, of_ranks[rank])
        for _ in range(2):
            found, found_value = run(params, of_ranks[rank])
            torch.testing.assert_close(found_value, value, rtol=0.02, atol=1e-4)
            torch.testing.assert_close(found["w"], expected["w"], rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_part_without_autocast_stays_without_it(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_under_autocast, backend, timeout_seconds=400)


def test_a_step_without_tensors_among_its_arguments_follows_autocast_and_the_defaults() -> None:
    matrix = torch.ones(2, 2)
    run = ddp.compile(lambda: (matrix @ matrix, torch.zeros(2)), backend="aot_eager")
    assert [each.dtype for each in run()] == [torch.float32, torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run()[0].dtype == torch.bfloat16
    torch.set_default_dtype(torch.float64)
    try:
        assert run()[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert run()[1].device.type == "meta"


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _before_there_are_ranks(rank: int, store: Path) -> None:
    params, x = weights(), batches()[rank]
    eager, inner = ddp.grad(loss), ddp.grad(loss)
    run = compiled(inner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same(eager(params, x), by_hand(loss, params, [x]))
            assert_same(run(params, x), by_hand(loss, params, [x]))
    assert len([each for each in caught if "torch.distributed is not initialised" in str(each.message)]) == 2
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    assert_same(eager(params, x), by_hand(loss, params, batches()))
    assert_same(run(params, x), by_hand(loss, params, batches()))


def test_a_function_that_was_called_before_there_were_ranks_reduces_once_there_are(
    ranks2: RankPool, tmp_path: Path
) -> None:
    ranks2.run(_before_there_are_ranks, tmp_path / "store", process_group=False)


def _in_two_worlds(rank: int, store: Path) -> None:
    params, x = weights(), batches()[rank]
    fails = [False]

    def may_fail(params: Tree, x: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("planted")
        return loss(params, x)

    eager, inner = ddp.grad(loss), ddp.grad(may_fail)
    run = compiled(inner)
    for world in range(2):
        dist.init_process_group("gloo", store=dist.FileStore(f"{store}{world}", 2), rank=rank, world_size=2)
        fails[0] = world == 1 and rank == 1
        if world == 1:  # the other rank hears of what is raised before anything was launched in this world
            with pytest.raises(ValueError if rank == 1 else RuntimeError, match="planted"):
                run(params, x)
        fails[0] = False
        for _ in range(2):
            assert_same(eager(params, x), by_hand(loss, params, batches()))
            assert_same(run(params, x), by_hand(loss, params, batches()))
        if world == 0:
            dist.destroy_process_group()


def test_a_function_reduces_in_another_world_too(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_in_two_worlds, tmp_path / "store", process_group=False)


def _power(power: int) -> Loss:
    def of_power(params: Tree, x: Tensor) -> Tensor:
        return (x @ params["w"]).abs().pow(power).mean()

    return of_power


def _another_one_of_the_same_name(rank: int) -> str:
    params, x = weights(), batches()[rank]
    gradients = [ddp.grad(_power(power)) for power in (2, 4)]
    for gradient, power in zip(gradients, (2, 4), strict=True):
        assert_same(gradient(params, x), by_hand(_power(power), params, batches()))
    with pytest.raises(RuntimeError) as error:
        gradients[rank](params, x)
    assert_same(gradients[0](params, x), by_hand(_power(2), params, batches()))
    return str(error.value)


def test_functions_of_one_name_in_another_order_are_refused_at_once(ranks2: RankPool) -> None:
    for message in ranks2.run(_another_one_of_the_same_name, collective_timeout_seconds=60, timeout_seconds=30):
        assert "the communicator is" in message


def _of_two_lines(rank: int) -> str:
    losses = [lambda p, x: (x @ p["w"]).sum(), lambda p, x: (x @ p["w"]).square().sum()]
    twice = [
        lambda p, x: (x @ p["w"]).square().sum(),
    ]
    with pytest.raises(RuntimeError) as error:
        ddp.grad((losses, twice)[rank][0])(weights(), batches()[rank])
    return str(error.value)


def test_lambdas_are_told_apart_by_their_lines(ranks2: RankPool) -> None:
    for message in ranks2.run(_of_two_lines):
        assert "where it is defined is test_surroundings.py:" in message


def made_anew(params: Tree, x: Tensor) -> Tensor:
    """A loss that no other test takes a gradient of."""
    return loss(params, x)


def _made_in_each_step(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(18):
            found = ddp.grad(made_anew)(weights(), batches(step)[rank])
            assert_same(found, by_hand(loss, weights(), batches(step)))
    return [str(warning.message) for warning in caught if "has been made" in str(warning.message)]


def test_a_gradient_function_that_is_made_in_each_step_says_so_once(ranks2: RankPool) -> None:
    """As in jax.grad(loss)(params, x)."""
    for (message,) in ranks2.run(_made_in_each_step):
        assert "grad(made_anew) has been made 16 times" in message


def test_a_step_may_close_over_a_sparse_tensor() -> None:
    matrix = torch.eye(3).to_sparse()

    def step(x: Tensor) -> Tensor:
        return torch.sparse.mm(matrix, x)

    run = ddp.compile(step, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(run(torch.ones(3, 2)), torch.ones(3, 2))
