"""Users' hooks: post-accumulate hooks see the reduced gradient, whoever reduces it."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, assert_step, expected_mean, local_gradients, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.plan import BESIDE_TENSOR_HOOK, TENSOR_HOOK
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class PartlyEager(Mlp):
    """Its head is used in eager code, and its first layer both there and in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_head(self.norm(torch.tanh(self.first(x))))

    @torch.compiler.disable
    def apply_head(self, x: Tensor) -> Tensor:
        return self.head(x) + self.first.weight.sum()


def optimizer_in_backward(module: nn.Module) -> list[object]:
    """Each parameter steps, and forgets its gradient, as soon as that is there."""

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 1e-4 * parameter.grad
        parameter.grad = None

    return [parameter.register_post_accumulate_grad_hook(step) for parameter in module.parameters()]


def _optimizer_in_backward(rank: int, wrapper: str, model_class: type[nn.Module], early: bool) -> None:
    model = model_class()
    by_hand = copy.deepcopy(model)
    if early:
        optimizer_in_backward(model)
    ddp = wrappers([wrapper])[wrapper](model)
    by_hand.load_state_dict(model.state_dict())
    if not early:
        optimizer_in_backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            expected = expected_mean(by_hand, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023
            ddp(row_batch(rank, step)).square().sum().backward()
            with torch.no_grad():
                for name, parameter in by_hand.named_parameters():
                    parameter -= 1e-4 * expected[name]
            for name, parameter in model.named_parameters():
                assert parameter.grad is None, name
                torch.testing.assert_close(parameter, by_hand.get_parameter(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("model_class", [Mlp, PartlyEager])
@pytest.mark.parametrize("wrapper", BOTH)
def test_an_optimizer_in_backward_steps_with_the_reduced_gradient(
    ranks2: RankPool, wrapper: str, model_class: type[nn.Module], early: bool
) -> None:
    ranks2.run(_optimizer_in_backward, wrapper, model_class, early)


def _torchs_optimizer_in_backward(rank: int, wrapper: str) -> None:
    def give_optimizer(model: nn.Module) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, model.head.parameters(), {"lr": 0.1})

    named = r"parameter head\.\w+ has an optimizer of .*_apply_optimizer_in_backward.*register_post_accumulate"
    model = Mlp()
    if rank == 1:
        give_optimizer(model)
    with pytest.raises((RuntimeError, ValueError), match=named):
        wrappers([wrapper])[wrapper](model)
    ddp = wrappers([wrapper])[wrapper](Mlp())
    assert_step(ddp, lambda module: module(row_batch(rank)).square().sum())
    give_optimizer(ddp.module)
    with pytest.raises(ValueError, match=named):
        ddp(row_batch(rank))


def _raises_in_its_hook(rank: int, wrapper: str) -> None:
    """An optimizer in the backward, which raises on rank 0 when a part of it has stepped."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    at: list[int] = []

    def descend(parameter: Tensor, number: int) -> None:
        if at == [2] and rank == 0 and number == 1:
            raise ValueError("the user's")
        with torch.no_grad():
            parameter.sub_(1e-2 * parameter.grad)
        parameter.grad = None

    for number, parameter in enumerate(ddp.module.parameters()):
        parameter.register_post_accumulate_grad_hook(functools.partial(descend, number=number))
    for step in range(4):
        at[:] = [step]
        loss = ddp(row_batch(rank, step)).square().sum()
        if step == 2 and rank == 0:
            with pytest.raises(ValueError, match="the user's"):
                loss.backward()
            ddp.zero_grad()
        elif step == 3:
            with pytest.raises(RuntimeError, match=r"an exception ended the one before it on 1 rank\(s\)"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_users_hook_that_raises_on_one_rank_is_told_to_all_in_the_next_step(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_raises_in_its_hook, wrapper)


@pytest.mark.parametrize("wrapper", BOTH)
def test_torchs_optimizer_in_backward_is_refused_by_name_with_what_to_use(ranks2: RankPool, wrapper: str) -> None:
    """It steps when a gradient has been accumulated, which is before hooks reduce it: ranks would drift apart."""
    ranks2.run(_torchs_optimizer_in_backward, wrapper)


def _registered_at_any_time(rank: int, wrapper: str) -> None:
    """A hook sees the mean from its registration on until its handle removes it; under no_sync the local gradient."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    weight, seen = ddp.module.head.weight, []

    def backward(step: int, *, registers: bool = False) -> object:
        ddp.zero_grad()
        loss = ddp(row_batch(rank, step)).square().sum()
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())) if registers else None
        loss.backward()
        return handle

    def mean(step: int) -> Tensor:
        bare = copy.deepcopy(ddp.module)  # without hooks
        return expected_mean(bare, lambda module: module(row_batch(rank, step)).square().sum())["head.weight"]

    backward(0)
    handle = backward(1, registers=True)
    assert len(seen) == 1, "the hook was called once"
    torch.testing.assert_close(seen[-1].double(), mean(1), rtol=1e-5, atol=1e-6)
    backward(2)
    torch.testing.assert_close(seen[-1].double(), mean(2), rtol=1e-5, atol=1e-6)
    with ddp.no_sync():
        backward(3)
    bare = copy.deepcopy(ddp.module)
    local = local_gradients(bare, lambda module: module(row_batch(rank, 3)).square().sum())["head.weight"]
    torch.testing.assert_close(seen[-1], local, rtol=1e-5, atol=1e-6)
    handle.remove()
    backward(4)
    assert len(seen) == 3, "the hook was removed"
    module = ddp.unwrap()
    assert not weight._post_accumulate_grad_hooks
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    module(row_batch(rank)).square().sum().backward()
    assert len(seen) == 4


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_hook_may_be_registered_and_removed_at_any_time(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_registered_at_any_time, wrapper)


def _given_back(rank: int) -> None:
    model = Mlp()
    seen = []
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    ddp = EagerDDP(model)
    ddp(row_batch(rank)).square().sum().backward()
    model = ddp.unwrap()
    model.zero_grad()
    model(row_batch(rank)).square().sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[-1], model.head.weight.grad)
    (hook,) = model.head.weight._post_accumulate_grad_hooks.values()
    assert "Deferred" not in repr(hook)


def test_unwrap_gives_the_users_hooks_back(ranks2: RankPool) -> None:
    ranks2.run(_given_back)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        return (self.always(x) + (self.sometimes(x) if branch else 0)).square().sum()


def _steps_on_a_rank_that_did_not_use_it(rank: int, wrapper: str) -> None:
    """The rank that did not use a parameter must step it all the same, or the ranks drift apart."""
    ddp = wrappers([wrapper])[wrapper](Branching())
    optimizer_in_backward(ddp.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(5):
            ddp(row_batch(rank, step), (rank + step) % 2 == 0 and step > 1).backward()
            for parameter in ddp.module.parameters():
                values = [torch.empty_like(parameter) for _ in range(2)]
                dist.all_gather(values, parameter.detach())
                assert torch.equal(*values)


@pytest.mark.parametrize("wrapper", BOTH)
def test_hooks_run_on_every_rank_for_what_any_rank_has_used(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_steps_on_a_rank_that_did_not_use_it, wrapper)


def _sees_the_local_gradient(rank: int, wrapper: str) -> None:
    """Tensor hooks see the local gradient, and what they return is reduced; those on activations see unscaled ones."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    local = local_gradients(ddp.module, lambda module: module(row_batch(rank)).square().sum())
    twice = expected_mean(ddp.module, lambda module: module(row_batch(rank)).square().sum())["head.weight"] * 2
    seen, activations = [], []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return 2 * gradient

    ddp.module.head.weight.register_hook(double)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            ddp.zero_grad()
            outputs = ddp(row_batch(rank))
            outputs.register_hook(lambda gradient: activations.append(gradient.clone()))
            outputs.square().sum().backward()
            torch.testing.assert_close(seen[-1], local["head.weight"], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(activations[-1], 2 * outputs.detach())
            torch.testing.assert_close(ddp.module.head.weight.grad.double(), twice, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", BOTH)
def test_tensor_hooks_see_local_and_unscaled_gradients(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_sees_the_local_gradient, wrapper)


def _module_hooks(rank: int, wrapper: str) -> None:
    """Hooks of modules, of autograd nodes and on saved tensors do what they do without a wrapper."""
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1

    def watched(model: nn.Module) -> nn.Module:
        model.head.register_forward_hook(lambda *_: count("forward"))
        model.head.register_full_backward_hook(lambda *_: count("backward"))
        return model

    ddp = wrappers([wrapper])[wrapper](watched(Mlp()))
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(row_batch(rank)).square().sum())
    counts.clear()
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        warnings.simplefilter("ignore")
        outputs = ddp(row_batch(rank))
    outputs.grad_fn.register_hook(lambda *_: count("node"))
    outputs.square().sum().backward()
    assert counts == {"forward": 1, "backward": 1, "node": 1}
    assert packed
    for name, parameter in ddp.module.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", BOTH)
def test_module_node_and_saved_tensor_hooks_behave_as_in_eager(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_module_hooks, wrapper)


# What each does on a module: input, output, gradients of the input, gradients of the output.
ON_THE_WRAPPER: dict[str, Callable[[nn.Module], Any]] = {
    "forward_pre_hook": lambda m: m.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
    "forward_hook": lambda m: m.register_forward_hook(lambda _, inputs, output: 2 * output),
    "full_backward_hook": lambda m: m.register_full_backward_hook(lambda _, of_inputs, __: (2 * of_inputs[0],)),
    "full_backward_pre_hook": lambda m: m.register_full_backward_pre_hook(lambda _, of_outputs: (3 * of_outputs[0],)),
}


def _on_the_wrapper(rank: int, wrapper: str) -> None:
    for name, register in ON_THE_WRAPPER.items():
        ddp = wrappers([wrapper])[wrapper](Mlp())
        bare, without = copy.deepcopy(ddp.module), copy.deepcopy(ddp.module)
        register(ddp)
        register(bare)
        for step in range(2):
            x, of_bare, of_none = (row_batch(rank, step).requires_grad_() for _ in range(3))
            expected = expected_mean(bare, lambda module: module(of_bare).square().sum())  # noqa: B023
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            assert_gradients(ddp.module, expected)
            torch.testing.assert_close(x.grad, of_bare.grad)
            without(of_none).square().sum().backward()
            assert not torch.allclose(x.grad, of_none.grad), f"{name} does nothing"


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_module_hooks_on_the_wrapper_itself_return_is_used(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_on_the_wrapper, wrapper)


def _added_after_compilation(rank: int) -> None:
    """A tensor hook that one rank alone adds after the graphs have been compiled, and removes again."""
    ddp = compile_ddp(Mlp(), backend="aot_eager", smallest_graph_mb=0)
    handle = None
    for step in range(6):
        if rank == 0 and step == 2:
            handle = ddp.module.first.weight.register_hook(lambda gradient: 3 * gradient)
        if handle is not None and step == 4:
            handle.remove()
        ddp.zero_grad()
        expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp(row_batch(rank, step)).square().sum().backward()
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_tensor_hook_may_come_and_go_after_compilation_on_one_rank(ranks2: RankPool) -> None:
    ranks2.run(_added_after_compilation)


# ---- hooks of modules that come later --------------------------------------------------------------------------------


def _assert_steps(rank: int, ddp: nn.Module, steps: range) -> None:
    for step in steps:
        assert_step(ddp, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023


def _doubled(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def _tripled(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 3 * output


def _come_and_go(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    first, norm, head = ddp.module.first, ddp.module.norm, ddp.module.head
    _assert_steps(rank, ddp, range(2))
    doubling = first.register_forward_hook(_doubled)
    _assert_steps(rank, ddp, range(2, 4))
    doubling.remove()
    _assert_steps(rank, ddp, range(4, 6))
    handles = [first.register_forward_hook(_tripled)]
    _assert_steps(rank, ddp, range(6, 8))
    handles.append(head.register_forward_pre_hook(lambda _, inputs: (0.5 * inputs[0],)))
    _assert_steps(rank, ddp, range(8, 10))
    handles.append(norm.register_full_backward_hook(lambda _, of_inputs, __: (2 * of_inputs[0],)))
    _assert_steps(rank, ddp, range(10, 12))
    handles.append(head.register_full_backward_pre_hook(lambda _, of_outputs: (3 * of_outputs[0],)))
    _assert_steps(rank, ddp, range(12, 14))
    for handle in handles:
        handle.remove()
    _assert_steps(rank, ddp, range(14, 16))
    kind = type(norm)  # in the model and in its copies
    with torch.nn.modules.module.register_module_forward_hook(
        lambda *of: _doubled(*of) if type(of[0]) is kind else None
    ):
        _assert_steps(rank, ddp, range(16, 18))
    _assert_steps(rank, ddp, range(18, 20))


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_hook_of_a_part_may_come_and_go_after_compilation(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_come_and_go, wrapper)


def _on_one_rank(rank: int, wrapper: str) -> None:
    """What it asks breaks that rank's graph."""
    ddp, seen = wrappers([wrapper])[wrapper](Mlp()), list[float]()
    _assert_steps(rank, ddp, range(3))
    if rank == 0:
        handle = ddp.module.norm.register_forward_hook(lambda _, inputs, output: seen.append(output.mean().item()))
    _assert_steps(rank, ddp, range(3, 6))
    if rank == 0:
        assert len(seen) >= 3  # and once more for each step that is done by hand
        handle.remove()
        seen.clear()
    _assert_steps(rank, ddp, range(6, 8))
    assert not seen


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_hook_that_logs_what_a_part_returns_may_come_on_one_rank(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_on_one_rank, wrapper)


def _equal_models(rank: int, wrapper: str) -> None:
    plain, hooked = Mlp(), Mlp()
    hooked.first.register_forward_hook(_doubled)
    ddps = [wrappers([wrapper])[wrapper](model) for model in (plain, hooked)]
    for steps in (range(2), range(2, 4)):
        for ddp in ddps:
            _assert_steps(rank, ddp, steps)


@pytest.mark.parametrize("wrapper", BOTH)
def test_equal_models_have_each_its_own_hooks(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_equal_models, wrapper)


# ---- tensor hooks that are there from the beginning, as those of loggers ---------------------------------------------


class InTwoGraphs(nn.Module):
    """Two captured graphs, with eager code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.head(x)


EVERY_PARAMETER = ("first.weight", "first.bias", "head.weight", "head.bias")
BOTH_BY_GRAPHS = {("graph", "", "head.bias, head.weight"), ("graph", "", "first.bias, first.weight")}
Row = tuple[str, str, str]  # launched by, why hooks, parameters


def _logged(rank: int, hooked: tuple[str, ...], on_ranks: tuple[int, ...]) -> list[tuple[set[Row], str, int]]:
    """After each step who reduces what, the proof, and how many sequences there were; hooks are in the first three."""
    ddp = compile_ddp(InTwoGraphs(), backend="aot_eager", smallest_graph_mb=0, bucket_cap_mb=25)
    model, told, seen = ddp.module, list[tuple[set[Row], str, int]](), list[Tensor]()
    handles = [model.get_parameter(name).register_hook(seen.append) for name in hooked if rank in on_ranks]
    for step in range(8):
        for handle in handles if step == 3 else ():
            handle.remove()
        assert_step(ddp, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023
        table = ddp.explain()
        rows = {(row[1], row[5], ", ".join(sorted(row[4].split(", ")))) for row in table.rows}
        told.append((rows, table.proof.splitlines()[-1], ddp._runtime.reduction.agreed.beginnings))
    assert len(seen) == 3 * len(handles)
    return told


@pytest.mark.parametrize("on_ranks", [(0, 1), (0,)])
def test_a_logger_on_every_parameter_is_planned_for_and_proven_at_once(
    ranks2: RankPool, on_ranks: tuple[int, ...]
) -> None:
    for told in ranks2.run(_logged, EVERY_PARAMETER, on_ranks):
        for rows, proof, beginnings in told[:3]:
            assert {(by, why) for by, why, _ in rows} == {("hooks", TENSOR_HOOK)}
            assert (proof, beginnings) == ("Proven to be reduced: 4 of 4 parameters.", 0)
        assert told[-1] == (BOTH_BY_GRAPHS, "Proven to be reduced: 4 of 4 parameters.", 1)


def test_a_tensor_hook_on_one_parameter_leaves_the_other_graphs_as_they_are(ranks2: RankPool) -> None:
    for told in ranks2.run(_logged, ("first.weight",), (0, 1)):
        for rows, proof, beginnings in told[:3]:
            assert rows == {
                ("graph", "", "head.bias, head.weight"),
                ("hooks", TENSOR_HOOK, "first.weight"),
                ("hooks", BESIDE_TENSOR_HOOK, "first.bias"),
            }
            assert (proof, beginnings) == ("Proven to be reduced: 4 of 4 parameters.", 0)
        assert told[-1] == (BOTH_BY_GRAPHS, "Proven to be reduced: 4 of 4 parameters.", 1)


def _told_of_a_logger(rank: int) -> tuple[list[str], str]:
    """The warnings where rank 0 alone has hooks, and the error under `strict`."""
    model = Mlp()
    model.head.weight.register_hook(torch.clone) if rank == 0 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = compile_ddp(model, backend="aot_eager", smallest_graph_mb=0)
        for step in range(3):
            ddp(row_batch(rank, step)).square().sum().backward()
    strict = compile_ddp(copy.deepcopy(model), backend="aot_eager", smallest_graph_mb=0, strict=True)
    strict.module.head.weight.register_hook(torch.clone)
    with pytest.raises(RuntimeError, match="tensor hook") as error:
        strict(row_batch(rank)).square().sum().backward()
    return [str(each.message) for each in caught if "by hooks" in str(each.message)], str(error.value)


def test_every_rank_is_told_once_of_a_tensor_hook_on_rank_0_and_strict_refuses_it(ranks2: RankPool) -> None:
    beside = "first.weight, norm.weight, head.bias, first.bias, norm.bias"
    for told, error in ranks2.run(_told_of_a_logger):
        assert sorted(told) == [
            f"gradients of {beside} are reduced by hooks: {BESIDE_TENSOR_HOOK}.",
            f"gradients of head.weight are reduced by hooks: {TENSOR_HOOK}.",
        ]
        assert error.startswith("gradients of ") and "strict=True" in error
