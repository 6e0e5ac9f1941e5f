"""torch.func's transforms inside of a loss and around a gradient; cases that were reported, by their numbers."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_grad import assert_same, by_hand, loss, parameters, rows
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp import functional as ddp
from ranks import RankPool

Tree = dict[str, Tensor]

WAYS = ("eager", "compiled")
ROWS = rows(0), rows(1)  # drawn outside of vmap


def in_way(way: str, step: Any) -> Any:
    return step if way == "eager" else ddp.compile(step, backend="aot_eager")


def mean_loss(params: Tree, x: Tensor | None = None) -> Tensor:
    """The objective of two ranks, in one process."""
    return (loss(params, ROWS[0]) + loss(params, ROWS[1])) / 2


# ---- inside of the loss ----------------------------------------------------------------------------------------------


def _private(rank: int, way: str) -> None:
    """DP-SGD: a gradient per row, clipped, then one mean over ranks."""

    def clipped(params: Tree, row: Tensor) -> Tree:
        gradient = torch.func.grad(loss)(params, row[None])
        norm = torch.stack([value.square().sum() for value in gradient.values()]).sum().sqrt()
        return {name: value * (1.0 / norm).clamp(max=1.0) for name, value in gradient.items()}

    def surrogate(params: Tree, x: Tensor) -> Tensor:
        gradients = vmap(clipped, in_dims=(None, 0))({name: value.detach() for name, value in params.items()}, x)
        return sum((params[name] * gradients[name].mean(0).detach()).sum() for name in params)

    found = in_way(way, ddp.grad(surrogate))(parameters(), rows(rank))
    every = [clipped(parameters(), row) for r in range(2) for row in rows(r)]
    assert_same(found, {name: torch.stack([one[name] for one in every]).mean(0) for name in found})


def _second_orders_inside(rank: int, way: str) -> None:
    """A loss that takes derivatives itself: of a jvp, a Hessian's trace, and an inner step that stays local (MAML)."""

    def through_jvp(params: Tree, x: Tensor) -> Tensor:
        return jvp(lambda p: loss(p, x), (params,), (params,))[1]

    def penalty(params: Tree, x: Tensor) -> Tensor:
        return hessian(lambda bias: loss(params | {"bias": bias}, x))(params["bias"]).diagonal().sum()

    def maml(params: Tree, x: Tensor) -> Tensor:
        inner = torch.func.grad(loss)(params, x[:2])
        return loss({name: value - 0.01 * inner[name] for name, value in params.items()}, x[2:])

    for f in (through_jvp, penalty, maml):
        found = in_way(way, ddp.grad(f))(parameters(), rows(rank))
        expected = torch.func.grad(lambda p: (f(p, rows(0)) + f(p, rows(1))) / 2)(parameters())  # noqa: B023
        assert_same(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [_private, _second_orders_inside])
def test_transforms_inside_of_a_loss_stay_local(ranks2: RankPool, case: Any, way: str) -> None:
    ranks2.run(case, way)


# ---- around the gradient ---------------------------------------------------------------------------------------------


def _ensemble(rank: int, way: str) -> None:
    members = {name: torch.stack([value, value * 0.5, -value]) for name, value in parameters().items()}
    gradient = ddp.grad_and_value(loss, reduce_value=True)
    found, values = in_way(way, vmap(gradient, in_dims=(0, None)))(members, rows(rank))
    for number in range(3):
        member = {name: value[number] for name, value in members.items()}
        expected, value = torch.func.grad_and_value(mean_loss)(member)
        assert_same({name: g[number] for name, g in found.items()}, expected)
        torch.testing.assert_close(values[number], value)
    if way == "eager":
        graph = make_fx(vmap(gradient, in_dims=(0, None)), tracing_mode="fake")(members, rows(rank))
        assert len([node for node in graph.graph.nodes if "sum_over_ranks" in str(node.target)]) == 1
    weights = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    weighted = ddp.grad(loss, reduction="weighted")
    found = in_way(way, lambda m, x, w: vmap(lambda one, v: weighted(one, x, weight=v))(m, w))(
        members, rows(rank), weights
    )
    first = {name: value[0] for name, value in members.items()}
    expected = torch.func.grad(lambda p: (loss(p, rows(0)) + 2 * loss(p, rows(1))) / 3)(first)
    assert_same({name: g[0] for name, g in found.items()}, expected)


def _derivatives_of_gradients(rank: int, way: str) -> None:
    params, tangents = parameters(), {name: torch.ones_like(value) for name, value in parameters().items()}
    gradient, expected = ddp.grad(loss), torch.func.grad(mean_loss)

    def hvp(f: Any) -> Any:
        return lambda p, x: jvp(lambda q: f(q, x), (p,), (tangents,))[1]

    assert_same(in_way(way, hvp(gradient))(params, rows(rank)), hvp(expected)(params, None))

    def reverse(f: Any) -> Any:
        return lambda p, x: vjp(lambda q: f(q, x), p)[1](tangents)[0]

    # In reverse each rank gets its own share; their mean is that of the objective.
    found = in_way(way, reverse(gradient))(params, rows(rank))
    assert_same({name: ddp.all_reduce(g) for name, g in found.items()}, reverse(expected)(params, None))

    def of_bias(jacobian: Any, f: Any) -> Any:
        return lambda p, x: jacobian(lambda bias: f(p | {"bias": bias}, x)["bias"])(p["bias"])

    backward = in_way(way, of_bias(jacrev, gradient))(params, rows(rank))
    torch.testing.assert_close(ddp.all_reduce(backward), of_bias(jacrev, expected)(params, None))
    forward = in_way(way, of_bias(jacfwd, gradient))(params, rows(rank))
    torch.testing.assert_close(forward, of_bias(jacfwd, expected)(params, None))


def _nested(rank: int, way: str) -> None:
    """An outer mean over ranks of a loss that looks at an inner one: the norm of the mean gradient."""
    inner = ddp.grad(loss)

    def norm(params: Tree, x: Tensor) -> Tensor:
        return sum(value.square().sum() for value in inner(params, x).values())

    found = in_way(way, ddp.grad(norm))(parameters(), rows(rank))
    expected = torch.func.grad(lambda p: sum(value.square().sum() for value in torch.func.grad(mean_loss)(p).values()))(
        parameters()
    )
    assert_same(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [_ensemble, _derivatives_of_gradients, _nested])
def test_transforms_around_a_gradient(ranks2: RankPool, case: Any, way: str) -> None:
    ranks2.run(case, way)


def _linear_on_one(rank: int, way: str) -> None:
    """On rank 0 neither the loss nor its gradient is another one for each member."""

    def f(params: Tree, x: Tensor) -> Tensor:
        return params["head"].square().sum() if rank else x.sum()

    members = {name: torch.stack([value, -value]) for name, value in parameters().items()}
    gradient = vmap(ddp.grad_and_value(f, reduce_value=True), in_dims=(0, None))
    found, values = in_way(way, gradient)(members, rows(rank))
    expected = {name: torch.zeros_like(value) for name, value in members.items()}
    assert_same(found, expected | {"head": members["head"]})
    torch.testing.assert_close(values, (rows(0).sum() + members["head"].square().sum((1, 2))) / 2)


@pytest.mark.parametrize("way", WAYS)
def test_members_of_an_ensemble_may_differ_on_one_rank_alone(ranks2: RankPool, way: str) -> None:
    ranks2.run(_linear_on_one, way)


def _ensembles_differ(rank: int) -> str:
    members = {name: torch.stack([value] * (2 + rank)) for name, value in parameters().items()}
    with pytest.raises(RuntimeError) as error:
        vmap(ddp.grad(loss), in_dims=(0, None))(members, rows(rank))
    return str(error.value)


def test_ensembles_of_other_sizes_are_refused_by_name(ranks2: RankPool) -> None:
    for message in ranks2.run(_ensembles_differ):
        assert "argument 0['first'] is torch.float32, [3, 5, 8] here, torch.float32, [2, 5, 8] on rank 0" in message


# ---- modules ---------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.norm(self.first(x))))


def _modules(rank: int, way: str) -> None:
    torch.manual_seed(0)
    model = Normed()
    params = {name: value.detach() for name, value in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}

    def module_loss(params: Tree, buffers: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        new = dict(buffers)
        for name in new:
            new[name] = buffers[name].clone()
        return functional_call(model, (params, new), (x,)).square().mean(), new

    gradient = ddp.grad(module_loss, has_aux=True)
    found, new = in_way(way, gradient)(params, buffers, rows(rank))
    expected: Tree = {}
    for r in range(2):
        bare = copy.deepcopy(model)
        bare(rows(r)).square().mean().backward()
        for name, parameter in bare.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad / 2
        if r == rank:
            for name, buffer in bare.named_buffers():
                torch.testing.assert_close(new[name], buffer, msg=name)
    assert_same(found, expected)


def _autocast(rank: int, way: str) -> None:
    def mixed(params: Tree, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (torch.tanh(x @ params["first"] + params["bias"]) @ params["head"]).float().square().mean()

    found = in_way(way, ddp.grad(mixed))(parameters(), rows(rank))
    expected = torch.func.grad(lambda p: (mixed(p, rows(0)) + mixed(p, rows(1))) / 2)(parameters())
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], value, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [_modules, _autocast])
def test_modules_with_buffers_and_autocast(ranks2: RankPool, case: Any, way: str) -> None:
    ranks2.run(case, way)


# ---- reported to torch -----------------------------------------------------------------------------------------------


def _reported(rank: int, case: Any, way: str) -> None:
    torch.manual_seed(0)
    model = Normed().eval()
    state = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    params = {name: state.pop(name) for name, _ in model.named_parameters()}

    def run(params: Tree, x: Tensor) -> Tensor:
        return functional_call(model, (params, state), (x,))

    def f(params: Tree, x: Tensor) -> Tensor:
        return case(lambda x: run(params, x), x)

    found = in_way(way, ddp.grad(f))(params, rows(rank))
    assert_same(found, torch.func.grad(lambda p: (f(p, rows(0)) + f(p, rows(1))) / 2)(params))


def pytorch_102197_182661(model: Any, x: Tensor) -> Tensor:
    """jvp of a model that trains on several ranks: DDP's forward fails in it."""
    return jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()


def pytorch_130932(model: Any, x: Tensor) -> Tensor:
    """vmap and jacfwd of a model with buffers: DDP fails to broadcast them."""
    return vmap(jacfwd(lambda row: model(row[None])[0]))(x).square().mean()


def pytorch_91408(model: Any, x: Tensor) -> Tensor:
    """grad_and_value for each sample, on several ranks: "Cannot access storage of TensorWrapper"."""
    gradients, values = vmap(torch.func.grad_and_value(lambda row: model(row[None]).square().sum()))(x)
    return gradients.square().mean() + values.mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [pytorch_102197_182661, pytorch_130932, pytorch_91408])
def test_transforms_of_a_module_that_torch_ddp_refuses(ranks2: RankPool, case: Any, way: str) -> None:
    ranks2.run(_reported, case, way)


def _functorch_1112(rank: int, way: str) -> None:
    """The Hessian of a functional_call's loss times a vector: DDP writes to a captured buffer."""
    torch.manual_seed(0)
    model = Normed().eval()
    params = {name: value.detach() for name, value in model.named_parameters()}
    tangents = {name: torch.full_like(value, 0.5) for name, value in params.items()}

    def module_loss(params: Tree, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().mean()

    def hvp(gradient: Any) -> Any:
        return lambda params, x: jvp(lambda p: gradient(p, x), (params,), (tangents,))[1]

    def objective(params: Tree, _: object) -> Tensor:
        return (module_loss(params, rows(0)) + module_loss(params, rows(1))) / 2

    assert_same(in_way(way, hvp(ddp.grad(module_loss)))(params, rows(rank)), hvp(torch.func.grad(objective))(params, 0))


@pytest.mark.parametrize("way", WAYS)
def test_functorch_1112(ranks2: RankPool, way: str) -> None:
    ranks2.run(_functorch_1112, way)


def _missing_tangents(rank: int, way: str) -> None:
    """Nothing, times what is infinite, stays nothing: a zero that is no number's."""

    def f(params: Tree) -> Tensor:
        infinite = torch.full((3,), torch.inf)
        return jvp(lambda x: (x * params["bias"].view(3, -1)).sum(), (infinite,), (torch.ones(3),))[1]

    params = {"bias": torch.arange(9.0)}
    assert_same(in_way(way, ddp.grad(f))(params), torch.func.grad(f)(params))


@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_tangent_is_a_zero_of_its_own(ranks2: RankPool, way: str) -> None:
    ranks2.run(_missing_tangents, way)


# ---- other people's graphs -------------------------------------------------------------------------------------------


def _make_fx(rank: int) -> None:
    gradient = ddp.grad(loss)
    graph = make_fx(lambda params, x: gradient(params, x), tracing_mode="fake")(parameters(), rows(rank))
    assert_same(graph(parameters(), rows(rank)), by_hand(loss, 2))


def test_a_graph_of_make_fx_reduces_as_it_stands(ranks2: RankPool) -> None:
    ranks2.run(_make_fx)


def _torch_compile(rank: int) -> None:
    gradient = ddp.grad(loss)

    @torch.compile(backend="aot_eager")
    def step(params: Tree, x: Tensor) -> Tree:
        gradients = gradient(params, x * 1)
        return {name: value - 0.1 * gradients[name] for name, value in params.items()}

    means = by_hand(loss, 2)
    expected = {name: value - 0.1 * means[name] for name, value in parameters().items()}
    with pytest.warns(UserWarning, match=r"compiled_ddp.functional.compile\(step\)"):
        assert_same(step(parameters(), rows(rank)), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(step(parameters(), rows(rank)), expected)


def test_plain_torch_compile_is_right_and_says_once_what_ours_adds(ranks2: RankPool) -> None:
    ranks2.run(_torch_compile)


@pytest.mark.filterwarnings("ignore:grad.* returns this process's own gradients")
def test_plain_torch_compile_of_a_full_graph_is_refused_with_what_to_do() -> None:
    gradient = ddp.grad(loss)
    step = torch.compile(lambda params, x: gradient(params, x * 1), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"Compile the step with compiled_ddp.functional.compile\(step\)"):
        step(parameters(), rows(0))


# ---- random numbers, checkpoints -------------------------------------------------------------------------------------


def _noise(rank: int) -> list[list[float]]:
    def noisy(params: Tree, x: Tensor, generator: torch.Generator) -> Tensor:
        return loss(params, x + torch.randn(x.shape, generator=ddp.fold_in_rank(generator)))

    gradient = ddp.grad(noisy)
    generator = torch.Generator().manual_seed(0)
    return [gradient(parameters(), torch.ones(4, 5), generator)["bias"].tolist() for _ in range(2)]


def test_explicit_generators(ranks2: RankPool) -> None:
    first, second = ranks2.run(_noise)
    assert first == second and first[0] != first[1]


def _checkpoint(rank: int) -> str:
    def f(params: Tree, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(loss, params, x, use_reentrant=False)

    with pytest.raises(RuntimeError) as error:
        ddp.grad(f)(parameters(), rows(rank))
    return str(error.value)


def test_a_checkpoint_is_refused_on_every_rank(ranks2: RankPool) -> None:
    for message in ranks2.run(_checkpoint):
        assert "saved tensor hooks" in message, message
