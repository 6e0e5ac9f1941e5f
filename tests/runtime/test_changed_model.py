"""Models that are not in every step what they were when they were wrapped: unused parts, frozen parts, other dtypes."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import (
    Mlp,
    assert_equal_on_all_ranks,
    assert_gradients,
    expected_mean,
    mean_by_hand,
    mean_over_ranks,
    row_batch,
    wrappers,
)
from models import local_gradients as gradients_here
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from compiled_ddp import EagerDDP, compile_ddp, torch_private
from compiled_ddp.plan import FIRST_USED
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
Loss = Callable[[nn.Module], Tensor]


def assert_steps_to_the_mean(ddp: nn.Module, loss: Loss, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """One step on this rank; each .grad is the mean by hand, and None where no rank has a gradient."""
    ddp.zero_grad()
    expected = expected_mean(ddp.module, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of buckets that go by hooks
        loss(ddp).backward()
    for name, parameter in ddp.module.named_parameters():
        if parameter.grad is None:
            assert not expected[name].any(), f"{name} has no gradient"
        else:
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=rtol, atol=atol, msg=name)


def sections(ddp: nn.Module) -> list[tuple[str, set[str]]]:
    """Who launches what: origin and parameters of each section of the sequence."""
    names = ddp.plan.parameter_names
    return [(section.origin, {names[index] for index in section.plan.indices}) for section in ddp.plan.sections]


# ---- unused parameters -----------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Four experts, of which each call uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for number in chosen:
            x = torch.tanh(self.experts[number](x))
        return self.head(x).square().sum()


def parameters_of(*experts: int) -> set[str]:
    return {f"experts.{number}.{kind}" for number in experts for kind in ("weight", "bias")}


HEAD = {"head.weight", "head.bias"}


def _route(rank: int, wrapper: str, routes: list[list[tuple[int, ...]]]) -> list[list[tuple[str, set[str]]]]:
    """One step per route; a route has the experts that each rank uses. Returns the sections after each step."""
    ddp = wrappers([wrapper])[wrapper](Experts(), bucket_cap_mb=1, first_bucket_mb=1)
    after = []
    for step, route in enumerate(routes):
        assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, step), route[rank]))  # noqa: B023
        after.append(sections(ddp))
    return after


@pytest.mark.parametrize("wrapper", BOTH)
def test_parameters_that_no_rank_uses_are_set_apart_and_admitted_when_one_does(ranks2: RankPool, wrapper: str) -> None:
    routes = [[(0,), (0,)], [(0,), (0,)], [(0,), (0, 2)], [(0,), (0,)], [(0, 3), (0, 2)], [(0,), (0,)]]
    for after in ranks2.run(_route, wrapper, routes):
        launched = [set().union(*(names for origin, names in step if origin != "unused")) for step in after]
        unused = [set().union(*(names for origin, names in step if origin == "unused")) for step in after]
        assert launched[0] == launched[1] == HEAD | parameters_of(0)
        assert unused[0] == unused[1] == parameters_of(1, 2, 3)
        assert launched[2] == launched[3] == HEAD | parameters_of(0, 2)
        assert launched[4] == launched[5] == HEAD | parameters_of(0, 2, 3)
        assert unused[5] == parameters_of(1)


@pytest.mark.parametrize("wrapper", BOTH)
def test_experts_routed_differently_on_every_rank_agree_with_autograd(ranks3: RankPool, wrapper: str) -> None:
    generator = torch.Generator().manual_seed(3)
    routes = [
        [tuple(torch.randperm(4, generator=generator)[: 1 + (step + rank) % 3].tolist()) for rank in range(3)]
        for step in range(8)
    ]
    ranks3.run(_route, wrapper, routes)


def _unused_costs_nothing(rank: int, wrapper: str) -> tuple[int, int, str]:
    ddp = wrappers([wrapper])[wrapper](Experts(), bucket_cap_mb=1, first_bucket_mb=1, verify="off")
    for step in range(2):
        assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, step), (1,)))  # noqa: B023
    launched = []

    def count(group: dist.ProcessGroup, flat: Tensor) -> dist.Work:
        launched.append(flat.numel() * flat.element_size())
        return start_sum(group, flat)

    start_sum = torch_private.groups.start_sum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private.groups, "start_sum", count)
        ddp(row_batch(rank), (1,)).backward()
    return sum(launched), ddp.plan.nbytes, str(ddp.explain())


def never_used(explained: str) -> list[str]:
    (line,) = (line for line in explained.splitlines() if line.startswith("Not reduced"))
    return line.removeprefix("Not reduced, because no rank has used them so far: ").rstrip(".").split(", ")


def test_parameters_that_are_never_used_cost_no_bandwidth_and_are_named(ranks2: RankPool) -> None:
    gradients = (5 * 5 + 5) + (5 * 1 + 1)  # elements of expert 1 and of the head
    for sent, planned, explained in ranks2.run(_unused_costs_nothing, "EagerDDP"):
        assert planned == 4 * (gradients + FIRST_USED + 4), "more than these four gradients and their riders"
        assert sent == planned
        assert set(never_used(explained)) == parameters_of(0, 2, 3)
    for _, planned, explained in ranks2.run(_unused_costs_nothing, "compile_ddp"):
        assert planned == 4 * (gradients + FIRST_USED + 4)
        assert set(never_used(explained)) == parameters_of(0, 2, 3)


def _used_under_no_sync(rank: int, wrapper: str) -> None:
    """An expert that is used for the first time by one rank, in a local backward."""
    ddp = wrappers([wrapper])[wrapper](Experts())
    for step in range(2):
        assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, step), (0,)))  # noqa: B023
    ddp.zero_grad()
    chosen = (2, 0) if rank == 1 else (0,)
    expected = expected_mean(
        ddp.module, lambda module: module(row_batch(rank, 2), chosen) + module(row_batch(rank, 3), (0,))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ddp.no_sync():
            ddp(row_batch(rank, 2), chosen).backward()
        ddp(row_batch(rank, 3), (0,)).backward()
    for name, parameter in ddp.module.named_parameters():
        if name in HEAD | parameters_of(0, 2):
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_first_use_under_no_sync_counts(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_used_under_no_sync, wrapper)


class LateInCheckpoint(Experts):
    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        reentrant = len(chosen) > 1
        x = checkpoint(lambda x: torch.tanh(self.experts[chosen[-1]](x)), x, use_reentrant=reentrant)
        return self.head(x).square().sum()


def _first_use_in_a_reentrant_checkpoint(rank: int) -> None:
    ddp = EagerDDP(LateInCheckpoint())
    x = row_batch(rank).requires_grad_()
    ddp(x, (0,)).backward()
    loss = ddp(x, (0, 2))
    with pytest.raises(RuntimeError, match=r"experts\.2\.(weight|bias) had been used on no rank.*use_reentrant=False"):
        loss.backward()


def test_a_first_use_inside_a_reentrant_checkpoint_is_an_error_that_names_it(ranks2: RankPool) -> None:
    ranks2.run(_first_use_in_a_reentrant_checkpoint)


# ---- freezing and unfreezing -----------------------------------------------------------------------------------------


def mlp_loss(rank: int, step: int) -> Loss:
    return lambda module: module(row_batch(rank, step)).square().sum()


def _unfrozen_after_wrapping(rank: int, wrapper: str) -> list[list[tuple[str, set[str]]]]:
    model = Mlp()
    model.first.requires_grad_(False)
    ddp = wrappers([wrapper])[wrapper](model)
    after = []
    for step in range(6):
        if step == 2:
            model.first.requires_grad_(True)
        assert_steps_to_the_mean(ddp, mlp_loss(rank, step))
        assert (model.first.weight.grad is None) == (step < 2)
        after.append(sections(ddp))
    return after


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_that_was_frozen_when_wrapped_is_reduced_once_it_is_trained(ranks2: RankPool, wrapper: str) -> None:
    for after in ranks2.run(_unfrozen_after_wrapping, wrapper):
        by = "graph" if wrapper == "compile_ddp" else "hooks"
        assert {origin for origin, _ in after[-1]} == {by}
        assert set().union(*(names for _, names in after[1])) == HEAD | {"norm.weight", "norm.bias"}
        assert set().union(*(names for _, names in after[-1])) >= {"first.weight", "first.bias"}


def _frozen_for_a_while(rank: int, wrapper: str) -> list[list[tuple[str, set[str]]]]:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    after = []
    for step in range(14):
        if step in (3, 8):
            ddp.module.first.requires_grad_(step == 8)
        assert_steps_to_the_mean(ddp, mlp_loss(rank, step))
        assert (ddp.module.first.weight.grad is None) == (3 <= step < 8)
        after.append(sections(ddp))
    return after


@pytest.mark.parametrize("wrapper", BOTH)
def test_freezing_parts_and_unfreezing_them_later_simply_works(ranks2: RankPool, wrapper: str) -> None:
    for after in ranks2.run(_frozen_for_a_while, wrapper):
        if wrapper == "compile_ddp":
            assert [{origin for origin, _ in step} for step in (after[2], after[7], after[13])] == [
                {"graph"},
                {"graph", "unused"},
                {"graph"},
            ]


def _frozen_behind_its_forward(rank: int, wrapper: str, frozen_in: list[list[int]], accumulated: bool) -> None:
    """`frozen_in` has the ranks that freeze the head's weight between forward and backward of each step."""
    ddp = wrappers([wrapper])[wrapper](Mlp())

    def backward(module: nn.Module, weight: nn.Parameter, step: int) -> None:
        loss = mlp_loss(rank, step)(module)
        weight.requires_grad_(rank not in frozen_in[step])
        loss.backward()
        weight.requires_grad_(True)

    for step, ranks in enumerate(frozen_in):
        twin = copy.deepcopy(ddp.module)
        twin.zero_grad()
        backward(twin, twin.head.weight, step)
        expected = mean_over_ranks({name: parameter.grad for name, parameter in twin.named_parameters()}, twin)
        for parameter in ddp.module.parameters():
            parameter.grad = torch.ones_like(parameter) if accumulated else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of buckets that go by hooks
            backward(ddp, ddp.module.head.weight, step)
        if not accumulated and len(ranks) == dist.get_world_size():
            assert ddp.module.head.weight.grad is None, "no rank has a gradient of it"
            ddp.module.head.weight.grad = torch.zeros_like(ddp.module.head.weight)
        assert_gradients(ddp.module, {name: mean + accumulated for name, mean in expected.items()}, atol=1e-6)


FROZEN_ALIKE = [[[0, 1], [0, 1], [], [0, 1], []], [[], [0, 1], [], [0, 1]]]
FROZEN_ON_ONE_RANK = [[[1], [0], [0, 1], []], [[], [0, 1], [1], []]]


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("frozen_in", [*FROZEN_ALIKE, *FROZEN_ON_ONE_RANK])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_that_is_frozen_behind_its_forward_gets_no_gradient(
    ranks2: RankPool, wrapper: str, frozen_in: list[list[int]], accumulated: bool
) -> None:
    ranks2.run(_frozen_behind_its_forward, wrapper, frozen_in, accumulated)


class Adapted(nn.Module):
    """With room for a part that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.extra = nn.Linear(5, 5), nn.Linear(5, 3), None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x if self.extra is None else self.eagerly(x))

    @torch.compiler.disable
    def eagerly(self, x: Tensor) -> Tensor:
        return self.extra(x)


def _added_frozen(rank: int, wrapper: str, by_assignment: bool) -> None:
    model = Adapted()
    if by_assignment:
        model.extra = nn.Linear(5, 5).requires_grad_(False)
    ddp = wrappers([wrapper])[wrapper](model)

    def steps(*numbers: int) -> None:
        for number in numbers:
            assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, number)).square().sum())  # noqa: B023

    steps(0)
    torch.manual_seed(1)
    if by_assignment:
        values = {name: torch.randn_like(value) for name, value in model.extra.state_dict().items()}
        model.extra.load_state_dict(values, assign=True)
    else:
        model.extra = nn.Linear(5, 5).requires_grad_(False)  # as peft adds an adapter that is not active
    steps(1)
    model.extra.requires_grad_(True)
    steps(2, 3)
    assert model.extra.weight.grad is not None


@pytest.mark.parametrize("by_assignment", [False, True])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_part_that_came_frozen_is_reduced_once_it_is_unfrozen(
    ranks2: RankPool, wrapper: str, by_assignment: bool
) -> None:
    ranks2.run(_added_frozen, wrapper, by_assignment)


def _unfrozen_on_one_rank(rank: int) -> None:
    model = Mlp()
    model.first.requires_grad_(False)
    ddp = EagerDDP(model)
    assert_steps_to_the_mean(ddp, mlp_loss(rank, 0))
    model.first.requires_grad_(True)
    if rank == 1:
        model.first.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"has changed since.*\n- rank 1: parameter first\.bias is .*frozen here"):
        ddp(row_batch(rank))


def test_ranks_that_unfreeze_different_parts_are_refused_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_unfrozen_on_one_rank)


# ---- added, converted ------------------------------------------------------------------------------------------------


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


def _grows(rank: int, wrapper: str) -> list[tuple[str, set[str]]]:
    ddp = wrappers([wrapper])[wrapper](Growing())
    for step in range(4):
        if step == 2:
            torch.manual_seed(rank)
            ddp.module.layers.append(nn.Linear(5, 5))  # other values on every rank
        if step >= 2:
            ddp(row_batch(rank, step)).backward()  # takes rank 0's values
        assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, step)))  # noqa: B023
    weights = [torch.empty(5, 5) for _ in range(2)]
    dist.all_gather(weights, ddp.module.layers[1].weight.detach())
    assert torch.equal(*weights)
    return sections(ddp)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_module_that_is_added_between_steps_is_reduced(ranks2: RankPool, wrapper: str) -> None:
    by = "graph" if wrapper == "compile_ddp" else "hooks"
    for found in ranks2.run(_grows, wrapper):
        assert {origin for origin, _ in found} == {by}
        assert set().union(*(names for _, names in found)) >= {"layers.1.weight", "layers.0.weight"}


def _converted(rank: int, wrapper: str, kind: str) -> list[tuple[str, set[str]]]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    ddp = wrappers([wrapper])[wrapper](model)

    def loss_of(step: int) -> Loss:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        return lambda module: module(x.to(model[0].weight.dtype)).square().sum()

    for step in range(2):
        assert_steps_to_the_mean(ddp, loss_of(step), rtol=1e-4)
    model.double() if kind == "dtype" else model.to(memory_format=torch.channels_last)
    for step in range(2, 4):
        assert_steps_to_the_mean(ddp, loss_of(step), rtol=1e-4)
        for parameter in model.parameters():
            assert parameter.grad.stride() == parameter.stride()
            assert parameter.grad.dtype == parameter.dtype == (torch.float64 if kind == "dtype" else torch.float32)
    return sections(ddp)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def _prune(model: Mlp) -> None:
    prune.l1_unstructured(model.head, "weight", amount=0.25)


def _put_into_a_container(model: Mlp) -> None:
    model.head = nn.Sequential(model.head, nn.Dropout(0.0))


def _parametrize(model: Mlp) -> None:
    nn.utils.parametrize.register_parametrization(model.head, "weight", Halved())


_MOVES: dict[str, tuple[Callable[[Mlp], object], Callable[[Mlp], object]]] = {
    "pruned": (_prune, lambda model: prune.remove(model.head, "weight")),
    "in a container": (_put_into_a_container, lambda model: setattr(model, "head", model.head[0])),
    "parametrized": (_parametrize, lambda model: None),
}


def _move(rank: int, wrapper: str, move: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(7):
        if step in (2, 4):
            _MOVES[move][step == 4](ddp.module)
        assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023
        assert all(parameter.grad is not None for parameter in ddp.parameters())
        optimizer.step()
    assert set(ddp.plan.parameter_names) == {name for name, _ in ddp.module.named_parameters()}
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])


@pytest.mark.parametrize("move", _MOVES)
@pytest.mark.parametrize("wrapper", BOTH)
def test_parameters_that_stand_elsewhere_after_a_change_are_reduced(ranks2: RankPool, wrapper: str, move: str) -> None:
    """As under DDP, which knows parameters by their identity alone."""
    ranks2.run(_move, wrapper, move)


@pytest.mark.parametrize("kind", ["dtype", "memory format"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_model_that_is_converted_between_steps_is_reduced(ranks2: RankPool, wrapper: str, kind: str) -> None:
    by = "graph" if wrapper == "compile_ddp" else "hooks"
    for found in ranks2.run(_converted, wrapper, kind):
        assert {origin for origin, _ in found} == {by}


def _skips_when_converted(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    assert_steps_to_the_mean(ddp, mlp_loss(rank, 0))
    ddp.module.double()
    ddp.zero_grad()

    def loss_of(module: nn.Module) -> Tensor:
        return module(row_batch(rank, 1).double()).square().sum()

    here = {} if rank == 0 else gradients_here(copy.deepcopy(ddp.module), loss_of)
    if rank == 0:
        ddp.skip_step()
    else:
        loss_of(ddp).backward()
    assert_gradients(ddp.module, mean_over_ranks(here, ddp.module))
    assert_steps_to_the_mean(ddp, loss_of)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_rank_may_skip_the_first_step_of_a_changed_model_without_a_forward(ranks2: RankPool, wrapper: str) -> None:
    """The others compared their models with its own, which it did not tell of."""
    ranks2.run(_skips_when_converted, wrapper)


def _gradients_carried_over(rank: int, wrapper: str) -> None:
    """A .grad from before the change is part of the next mean."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    assert_steps_to_the_mean(ddp, mlp_loss(rank, 0))
    expected = expected_mean(ddp.module, mlp_loss(rank, 0))
    ddp.module.double()
    x = row_batch(rank, 1).double()
    second = expected_mean(ddp.module, lambda module: module(x).square().sum())
    ddp(x).square().sum().backward()
    for name, parameter in ddp.module.named_parameters():
        assert parameter.grad.dtype == torch.float64
        torch.testing.assert_close(parameter.grad, expected[name] + second[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_from_before_a_change_are_carried_over(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_gradients_carried_over, wrapper)


class Alternating(nn.Module):
    """Another graph in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return (self.second(x) if both else x + self.second.weight.sum()).square().sum()


def _alternates(rank: int) -> int:
    ddp = compile_ddp(Alternating(), backend="aot_eager", smallest_graph_mb=0)
    plans = set()
    for step in range(12):
        assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, step), bool(step % 2)))  # noqa: B023
        plans.add(ddp.plan.fingerprint)
    return len(plans)


def test_graphs_that_alternate_do_not_make_the_ranks_agree_anew_in_every_step(ranks2: RankPool) -> None:
    assert ranks2.run(_alternates)[0] <= 3


def _changed_under_way(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    loss = lambda module: module(row_batch(rank)).square().sum()  # noqa: E731
    assert_steps_to_the_mean(ddp, loss)
    recomputed = checkpoint(ddp, row_batch(rank).requires_grad_(), use_reentrant=False).square().sum()
    ddp.module.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="Change the model between backward and forward"):
        recomputed.backward()
    assert_steps_to_the_mean(ddp, loss)
    assert "extra.weight" in ddp.plan.parameter_names


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_change_that_a_recomputation_meets_is_an_error(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_changed_under_way, wrapper)


def _two_change(rank: int, wrapper: str) -> None:
    """The same in each of two wrappers, whose forwards the ranks call in other orders."""
    wrapped = [wrappers([wrapper])[wrapper](Mlp()) for _ in range(2)]
    for dtype in (torch.float32, torch.float64, torch.float32):
        for ddp in wrapped:
            ddp.module.to(dtype)
            ddp.zero_grad()
        x = row_batch(rank).to(dtype)
        expected = [mean_by_hand(ddp, lambda module: module(x).square().sum()) for ddp in wrapped]  # noqa: B023
        torch.stack([ddp(x).square().sum() for ddp in (wrapped if rank == 0 else wrapped[::-1])]).sum().backward()
        for ddp, mean in zip(wrapped, expected, strict=True):
            assert_gradients(ddp.module, mean)


@pytest.mark.parametrize("wrapper", BOTH)
def test_two_models_that_change_may_be_called_in_another_order_on_each_rank(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_two_change, wrapper)


def _another_cannot_follow(rank: int, wrapper: str, ranks: tuple[int, ...]) -> None:
    """One model is loaded by assignment on some `ranks`, as for an evaluation, and the other one is converted."""
    evaluated, trained = (wrappers([wrapper])[wrapper](Mlp()) for _ in range(2))
    for ddp in (evaluated, trained):
        assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank)).square().sum())
    if rank in ranks:
        state = {name: tensor.clone() for name, tensor in evaluated.module.state_dict().items()}
        evaluated.module.load_state_dict(state, assign=True)
    trained.module.double()
    for step in range(2):
        x = row_batch(rank, step).double()
        assert_steps_to_the_mean(trained, lambda module: module(x).square().sum())  # noqa: B023
    if rank in ranks:
        with pytest.raises(RuntimeError, match="was replaced or removed after the model was wrapped"):
            evaluated(row_batch(rank))


@pytest.mark.parametrize("ranks", [(0, 1), (1,), (0,)])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_model_may_change_while_another_one_has_in_what_its_wrapper_cannot_follow(
    ranks2: RankPool, wrapper: str, ranks: tuple[int, ...]
) -> None:
    ranks2.run(_another_cannot_follow, wrapper, ranks)


def _frozen_after_no_sync(rank: int, wrapper: str) -> None:
    """On one rank alone, the last, it has accumulated something: the others get the mean too."""
    ddp = wrappers(BOTH)[wrapper](Mlp())
    head = {name for name, _ in ddp.module.named_parameters() if name.startswith("head")}
    assert_steps_to_the_mean(ddp, lambda module: module(row_batch(rank, 0)).square().sum())
    ddp.zero_grad()
    if rank == dist.get_world_size() - 1:
        with ddp.no_sync():
            ddp(row_batch(rank, 1)).square().sum().backward()
    local = {name: parameter.grad for name, parameter in ddp.module.named_parameters()}
    expected = {name: value for name, value in mean_over_ranks(local, ddp.module).items() if name in head}
    ddp.module.head.requires_grad_(False)
    for step in (2, 3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of buckets that go by hooks
            ddp(row_batch(rank, step)).square().sum().backward()
        found = {name: parameter.grad for name, parameter in ddp.module.named_parameters() if name in head}
        for name in head:
            torch.testing.assert_close(
                found[name], expected[name].to(found[name].dtype), rtol=1e-5, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_accumulated_under_no_sync_before_it_was_frozen_is_averaged(ranks2: RankPool, wrapper: str) -> None:
    """As under DDP: all optimizers would step with it."""
    ranks2.run(_frozen_after_no_sync, wrapper)
