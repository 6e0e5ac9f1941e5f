"""[Note: equal calls] One backward through several calls of a graph, and through fewer graphs than the sequence has."""

import contextlib
import copy
import unittest.mock
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from models import (
    Mlp,
    SumOverRanks,
    assert_gradients,
    assert_step,
    expected_mean,
    local_gradients,
    mean_by_hand,
    mean_over_ranks,
    row_batch,
)
from torch import Tensor, nn

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.graph.program import Program
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@contextlib.contextmanager
def reducing() -> Iterator[list[set[str]]]:
    """The parameters of each graph that reduces in here, in order."""
    ran: list[set[str]] = []
    run = Program.run

    def noted(program: Program, section: Any, call: Any, *arguments: Any) -> Any:
        ran.append({section._reduction.parameters.names[index] for index in call.plan.indices})
        return run(program, section, call, *arguments)

    with unittest.mock.patch.object(Program, "run", noted):
        yield ran


def wrap(model: nn.Module, backend: str = "aot_eager", **options: Any) -> Any:
    return compile_ddp(model, backend=backend, strict=True, smallest_graph_mb=0, **options)


def loss_of(module: nn.Module, *batches: Tensor) -> Tensor:
    """Of as many forwards as there are batches."""
    return torch.stack([module(batch).square().sum() for batch in batches]).sum()


def batches(rank: int, step: int, count: int) -> list[Tensor]:
    return [row_batch(rank, 10 * step + number) for number in range(count)]


def names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


# ---- one graph, several calls ----------------------------------------------------------------------------------------


def _right_steps(rank: int, backend: str, counts: Sequence[int]) -> None:
    """As many forwards before each backward as `counts` has."""
    ddp = wrap(Mlp(), backend)
    for step, count in enumerate(counts):
        x = batches(rank, step, count)
        expected = mean_by_hand(ddp, lambda module: loss_of(module, *x))  # noqa: B023
        ddp.zero_grad()
        with reducing() as ran:
            loss_of(ddp, *x).backward()
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)
        assert ran == [names(ddp.module)], step
        (section,) = ddp.plan.sections
        assert {index for bucket in section.plan.buckets for index in bucket.indices} == {
            *range(len(names(ddp.module)))
        }


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_forwards_before_a_backward_send_each_gradient_once(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_right_steps, backend, [2, 2, 2], **LIMITS)


def test_a_backward_fits_the_sequence_however_often_it_calls_the_graph(ranks2: RankPool) -> None:
    ranks2.run(_right_steps, "aot_eager", [2, 1, 3, 1, 4], **LIMITS)
    ranks2.run(_right_steps, "aot_eager", [1, 2, 1, 3], **LIMITS)


def _of_other_sizes(rank: int) -> None:
    """Dynamo captures the model once for each size, or for all of them: their gradients are alike."""
    ddp = wrap(Mlp())
    for step in range(3):
        x = [row_batch(rank, 2 * step), torch.cat([row_batch(rank, 2 * step + 1)] * 2)]
        with reducing() as ran:
            assert_step(ddp, lambda module: loss_of(module, *x))  # noqa: B023
        assert len(ran) == 1


def test_calls_of_other_sizes_are_reduced_together(ranks2: RankPool) -> None:
    ranks2.run(_of_other_sizes, **LIMITS)


def _accumulated(rank: int, backend: str) -> None:
    ddp = wrap(Mlp(), backend)
    for step in range(3):
        ddp.zero_grad()
        x, more = batches(rank, 2 * step, 2), batches(rank, 2 * step + 1, 2)
        expected = mean_by_hand(ddp, lambda module: loss_of(module, *x, *more))  # noqa: B023
        with ddp.no_sync():
            loss_of(ddp, *x).backward()
        kept = [parameter.grad for parameter in ddp.parameters()]
        with reducing() as ran:
            loss_of(ddp, *more).backward()
        assert len(ran) == 1
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)
        assert all(parameter.grad is before for parameter, before in zip(ddp.parameters(), kept, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_accumulated_before_goes_in_with_all_calls(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_accumulated, backend, **LIMITS)


def _retained(rank: int) -> None:
    ddp = wrap(Mlp())
    for step in range(2):
        ddp.zero_grad()
        x = batches(rank, step, 2)
        mean = mean_by_hand(ddp, lambda module: loss_of(module, *x))  # noqa: B023
        loss = loss_of(ddp, *x)
        for times in (1, 2):
            loss.backward(retain_graph=times == 1)
            expected = {name: times * value for name, value in mean.items()}
            assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)


def test_a_graph_that_is_kept_runs_all_its_calls_again(ranks2: RankPool) -> None:
    ranks2.run(_retained, **LIMITS)


def _one_in_no_sync(rank: int) -> None:
    """Whichever of them comes first, as under torch's DDP: see `ORDERS`."""
    ddp = wrap(Mlp())
    for step in range(3):
        ddp.zero_grad()
        x, other = batches(rank, step, 2)
        expected = mean_by_hand(ddp, lambda module: loss_of(module, x, other))  # noqa: B023
        with ddp.no_sync():
            first = loss_of(ddp, x)
        (first + loss_of(ddp, other)).backward()
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)


def test_a_forward_under_no_sync_before_one_outside_of_it_is_reduced_too(ranks2: RankPool) -> None:
    ranks2.run(_one_in_no_sync, **LIMITS)


ORDERS = ("s", "sn", "ns", "ss", "ssn", "sns", "nss", "snn", "nsn", "nns", "sss")  # s: synchronised, n: under no_sync


def _in_order(ddp: Any, order: str, x: list[Tensor], *, eager: str = "") -> Tensor:
    """The loss of one forward for each letter; those of the letter `eager` run without graphs."""
    losses = []
    for letter, batch in zip(order, x, strict=True):
        torch.compiler.set_stance("force_eager" if letter == eager else "default")
        with contextlib.nullcontext() if letter == "s" else ddp.no_sync():
            losses.append(ddp(batch).square().sum())
    torch.compiler.set_stance("default")
    return torch.stack(losses).sum()


def _every_order(rank: int, wrapper: str, first: str, alone: bool) -> None:
    """After a first step in the order `first`; `alone`: rank 1 has the orders turned round."""
    ddp = compile_ddp(Mlp(), backend=wrapper) if wrapper != "EagerDDP" else EagerDDP(Mlp())
    clear = [partial(ddp.zero_grad, set_to_none=True), partial(ddp.zero_grad, set_to_none=False), lambda: None]
    for step, order in enumerate((first, *ORDERS)):
        order = order[::-1] if alone and rank == 1 else order
        clear[step % 3]()
        x = batches(rank, step, len(order))
        before = {name: p.grad.double() for name, p in ddp.module.named_parameters() if p.grad is not None}
        expected = mean_by_hand(ddp, lambda module: loss_of(module, *x))  # noqa: B023
        expected = {name: value + before.get(name, 0.0) for name, value in expected.items()}
        _in_order(ddp, order, x).backward()
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrapper", "first", "alone"),
    [
        ("aot_eager", "s", False),
        ("aot_eager", "nsn", True),
        ("aot_eager", "sn", False),
        ("EagerDDP", "s", True),
        pytest.param("inductor", "s", True, marks=pytest.mark.inductor),
    ],
)
def test_forwards_under_no_sync_and_outside_of_it_are_reduced_together_in_every_order(
    ranks2: RankPool, wrapper: str, first: str, alone: bool
) -> None:
    ranks2.run(_every_order, wrapper, first, alone, **LIMITS)


def test_three_ranks_reduce_them_together_in_every_order(ranks3: RankPool) -> None:
    ranks3.run(_every_order, "aot_eager", "ss", True, **LIMITS)


def _synchronised_without_a_graph(rank: int) -> None:
    """On rank 1, in the second step: what the graph of the local forward gives has come before the others begin."""
    ddp = compile_ddp(Mlp(), backend="aot_eager")
    for step, order in enumerate(("s", "sn", "snn", "s")):
        ddp.zero_grad()
        x = batches(rank, step, len(order))
        expected = mean_by_hand(ddp, lambda module: loss_of(module, *x))  # noqa: B023
        _in_order(ddp, order, x, eager="s" if rank == 1 and len(order) > 1 else "").backward()
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-5)


def test_a_graph_of_a_local_forward_before_an_eager_synchronised_one_is_reduced_too(ranks2: RankPool) -> None:
    ranks2.run(_synchronised_without_a_graph, **LIMITS)


def _asked_for(rank: int) -> None:
    ddp = wrap(Mlp())
    order, parameters = zip(*ddp.module.named_parameters(), strict=True)
    for step in range(3):
        x = batches(rank, step, 2)
        expected = mean_by_hand(ddp, lambda module: loss_of(module, *x))  # noqa: B023
        gradients = torch.autograd.grad(loss_of(ddp, *x), parameters)
        for name, gradient in zip(order, gradients, strict=True):
            torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-5, atol=1e-6)
        assert all(parameter.grad is None for parameter in parameters)


def test_autograd_grad_returns_the_mean_of_all_calls(ranks2: RankPool) -> None:
    ranks2.run(_asked_for, **LIMITS)


class _Stop(Exception): ...


def _raise(_: Tensor) -> None:
    raise _Stop


def _broken_between(rank: int) -> None:
    ddp = wrap(Mlp())
    x = batches(rank, 0, 2)
    assert_step(ddp, lambda module: loss_of(module, *x))
    ddp.zero_grad()
    first = ddp(x[0])
    first.register_hook(_raise)  # reached when the later call has run, whose gradients wait
    with pytest.raises(_Stop):
        (first.square().sum() + ddp(x[1]).square().sum()).backward()
    for step in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_step(ddp, lambda module: loss_of(module, *batches(rank, step, 2)))  # noqa: B023


def test_after_an_exception_between_two_calls_the_next_step_is_right(ranks2: RankPool) -> None:
    ranks2.run(_broken_between, **LIMITS)


def _hooked(rank: int) -> None:
    """Then our hooks reduce, and the user's sees this rank's sum."""
    ddp = compile_ddp(Mlp(), backend="aot_eager", smallest_graph_mb=0)
    seen: list[Tensor] = []
    ddp.module.head.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for step in range(2):
        ddp.zero_grad()
        x = batches(rank, step, 2)
        local = local_gradients(copy.deepcopy(ddp.module), lambda module: loss_of(module, *x))  # noqa: B023
        expected = mean_over_ranks(local, ddp.module)
        seen.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what hooks reduce
            loss_of(ddp, *x).backward()
        (gradient,) = seen
        torch.testing.assert_close(gradient.double(), local["head.weight"].double(), rtol=1e-5, atol=1e-6)
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)


def test_a_users_tensor_hook_sees_the_sum_of_all_calls_once(ranks2: RankPool) -> None:
    ranks2.run(_hooked, **LIMITS)


class Meets(nn.Module):
    """A block in a graph, called twice or once, with an all-reduce of the model's own between."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.twice = nn.Linear(5, 5), True

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if self.twice:
            x = torch.tanh(self.block(x))
        torch._dynamo.graph_break()
        x = self.meet(x)
        torch._dynamo.graph_break()
        return torch.tanh(self.block(x)).square().sum()

    @torch.compiler.disable
    def meet(self, x: Tensor) -> Tensor:
        return SumOverRanks.apply(x)


def _meets(rank: int) -> None:
    ddp = compile_ddp(Meets(), backend="aot_eager", smallest_graph_mb=0)
    for step in range(6):
        ddp.module.twice = step < 2 or rank == 0 or step == 4
        x = row_batch(rank, step).requires_grad_()
        assert_step(ddp, lambda module: module(x))  # noqa: B023


def test_ranks_that_call_a_graph_as_often_differently_do_not_meet_in_a_models_own_collective(ranks2: RankPool) -> None:
    ranks2.run(_meets, **LIMITS)


# ---- fewer graphs than the sequence has ------------------------------------------------------------------------------


def _adversaries(rank: int) -> None:
    """The discriminator's graph is called twice in its own backward, once in the generator's."""
    parts = {"generator": wrap(nn.Sequential(nn.Linear(5, 5), nn.Tanh())), "discriminator": wrap(Mlp())}
    bare = nn.ModuleDict({name: part.module for name, part in parts.items()})

    def of_discriminator(parts: Any) -> Tensor:
        made = parts["generator"](x).detach()
        return parts["discriminator"](made).square().sum() - parts["discriminator"](real).sum()

    def of_generator(parts: Any) -> Tensor:
        return (parts["discriminator"](parts["generator"](x)) - 1.0).square().sum()

    for step in range(3):
        x, real = batches(rank, step, 2)
        for loss, graphs in ((of_discriminator, 1), (of_generator, 2)):
            expected = expected_mean(copy.deepcopy(bare), loss)
            bare.zero_grad()
            with reducing() as ran:
                loss(parts).backward()
            assert len(ran) == graphs
            for name, parameter in bare.named_parameters():
                if parameter.grad is None:
                    assert loss is of_discriminator and name.startswith("generator.")
                else:
                    torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-4, atol=1e-6)


def test_a_gan_reduces_in_graphs_in_both_of_its_backwards(ranks2: RankPool) -> None:
    ranks2.run(_adversaries, **LIMITS)


class Layer(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Layers(nn.Module):
    """Layers in graphs of their own, of which a step leaves some out, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(outputs) for outputs in (5, 5, 5, 5, 3))

    def forward(self, x: Tensor, left_out: Sequence[int] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            torch._dynamo.graph_break()  # in a loop, so that Dynamo captures what the loop calls
            if number not in left_out:
                x = layer(x)
        return x


def parameters_of(layer: int) -> set[str]:
    return {f"layers.{layer}.linear.{kind}" for kind in ("weight", "bias")}


def _with_layers_left_out(rank: int, plan: Sequence[Sequence[Sequence[int]]]) -> None:
    """`plan` has the layers that each rank leaves out in each step."""
    ddp = compile_ddp(Layers(), backend="aot_eager", smallest_graph_mb=0, bucket_cap_mb=1)
    for step, left_out in enumerate(plan):
        x, by_all = row_batch(rank, step), set(left_out[0]).intersection(*left_out)
        unused = set[str]().union(*map(parameters_of, by_all))
        with reducing() as ran:
            assert_step(ddp, lambda module: module(x, left_out[rank]).square().sum(), unused=unused)  # noqa: B023
        assert ran == [parameters_of(layer) for layer in (4, 3, 2, 1, 0) if layer not in left_out[rank]], step
    assert [section.origin for section in ddp.plan.sections] == ["graph"] * 5


def test_what_follows_a_layer_that_is_left_out_still_runs_in_graphs(ranks2: RankPool) -> None:
    plan = [[(), ()], [(1,), ()], [(), (2,)], [(1,), (2,)], [(3,), (3,)], [(0, 3), (1, 2)], [(1, 2, 3), ()], [(), ()]]
    ranks2.run(_with_layers_left_out, plan, **LIMITS)


def test_steps_that_all_leave_layers_out_do_not_make_the_ranks_agree_anew(ranks2: RankPool) -> None:
    ranks2.run(_with_layers_left_out, [[(), ()], *[[(1, 2), (0, 2)]] * 12, [(), ()]], **LIMITS)


def _frozen(rank: int) -> None:
    ddp = compile_ddp(Layers(), backend="aot_eager", smallest_graph_mb=0, bucket_cap_mb=1)
    for step in range(8):
        if step == 2:
            ddp.module.layers[1].requires_grad_(False)
        frozen = parameters_of(1) if step >= 2 else set[str]()
        assert_step(ddp, lambda module: module(row_batch(rank, step)).square().sum(), unused=frozen)  # noqa: B023
    sent = {ddp.plan.parameter_names[index] for section in ddp.plan.launched for index in section.plan.indices}
    assert sent.isdisjoint(parameters_of(1))


def test_a_layer_that_is_frozen_is_sent_no_more(ranks2: RankPool) -> None:
    ranks2.run(_frozen, **LIMITS)
