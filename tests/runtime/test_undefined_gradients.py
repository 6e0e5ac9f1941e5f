"""A parameter that only feeds outputs which no rank's loss uses has no gradient: [Note: undefined gradients]."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_gradients, assert_step, expected_mean, wrappers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler


class Heads(nn.Module):
    """Two heads on one body. `how` changes what lies between a head and its output."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)  # whose buffers the graph overwrites
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.norm(self.body(x)))
        a, b = self.a(hidden), self.b(hidden)
        if self.how == "views":
            return a.view(-1), b.unsqueeze(0).transpose(1, 2)
        if self.how == "graph break":
            torch._dynamo.graph_break()
            return a.relu(), b.tanh()
        if self.how == "overwritten":  # b's parameters reach a's output through memory
            part = a[0]
            part.add_(b[0])
            return a, b
        if self.how == "overwritten later":  # the result of one graph, in another, and used behind that
            early = hidden * 1
            torch._dynamo.graph_break()
            early[:, :3].add_(b)
            torch._dynamo.graph_break()
            return a, early
        if self.how == "checkpoint":
            return a, checkpoint(lambda h: self.b(h).tanh(), hidden, use_reentrant=False)
        if self.how == "hook":
            hooked = hidden * 1
            hooked.register_hook(lambda gradient: gradient * 0.5)
            return a, self.b(hooked)
        return a, b


def _loss(uses: str, x: Tensor) -> Callable[[nn.Module], Tensor]:
    def loss(module: nn.Module) -> Tensor:
        outputs = dict(zip("ab", module(x), strict=True))
        return torch.stack([outputs[name].square().sum() for name in uses]).sum()

    return loss


def _expected(module: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]]) -> dict[str, Tensor | None]:
    """As under DDP: the mean where a rank has a gradient, None where none has."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    for loss in losses:
        loss(twin).backward()
    expected: dict[str, Tensor | None] = {}
    for name, parameter in twin.named_parameters():
        used = torch.tensor(float(parameter.grad is not None))
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(used)
        dist.all_reduce(total)
        expected[name] = total / dist.get_world_size() if used else None
    return expected


def _assert_as_expected(module: nn.Module, expected: dict[str, Tensor | None], what: object) -> None:
    for name, parameter in module.named_parameters():
        mean = expected[name]
        if mean is None:
            assert parameter.grad is None, f"{what}: {name} has a gradient"
        else:
            assert parameter.grad is not None, f"{what}: {name} has no gradient"
            torch.testing.assert_close(
                parameter.grad, mean, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{what} {n}: {m}"
            )


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


# What the loss uses in each step, on rank 0 and 1.
ONE_IN_EVERY_STEP = (("a", "a"),) * 4
ALIKE = (("a", "a"), ("a", "a"), ("ab", "ab"), ("b", "b"), ("a", "a"), ("ab", "ab"))
UNLIKE = (("ab", "ab"), ("a", "ab"), ("b", "a"), ("a", "a"), ("a", "a"), ("ab", "b"), ("b", "b"))


def _train(rank: int, wrapper: str, how: str, steps: Sequence[Sequence[str]], backend: str) -> None:
    torch.manual_seed(0)
    options = {"backend": backend} if wrapper == "compile_ddp" else {}
    ddp = wrappers([wrapper])[wrapper](Heads(how), **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), weight_decay=0.1)
    for step, uses in enumerate(steps):
        loss = _loss(uses[rank], _batch(rank, step))
        expected = _expected(ddp.module, [loss])
        before = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of graphs that do not fit the sequence
            loss(ddp).backward()
        _assert_as_expected(ddp.module, expected, (step, uses))
        optimizer.step()
        for name, parameter in ddp.module.named_parameters():
            assert torch.equal(parameter, before[name]) == (expected[name] is None), "weight decay has moved it"
    if wrapper == "compile_ddp" and steps is ONE_IN_EVERY_STEP and how == "plain":
        (reduced,) = (section for section in ddp.plan.sections if section.origin == "graph")
        names = {ddp._runtime.parameters.names[index] for index in reduced.plan.indices}
        assert names == {"body.weight", "body.bias", "norm.weight", "norm.bias", "a.weight", "a.bias"}
    ddp.unwrap()


HOW = ("plain", "views", "graph break", "checkpoint", "hook", "overwritten", "overwritten later")


@pytest.mark.parametrize("steps", [ALIKE, UNLIKE], ids=["alike", "unlike"])
@pytest.mark.parametrize("how", HOW)
def test_what_no_loss_uses_has_no_gradient_in_graphs(
    ranks2: RankPool, how: str, steps: Sequence[Sequence[str]]
) -> None:
    ranks2.run(_train, "compile_ddp", how, steps, "aot_eager")


def test_it_has_none_under_eager_ddp(ranks2: RankPool) -> None:
    for steps in (ALIKE, UNLIKE):
        ranks2.run(_train, "EagerDDP", "plain", steps, "")


def test_graphs_reduce_the_others(ranks2: RankPool) -> None:
    ranks2.run(_train, "compile_ddp", "plain", ONE_IN_EVERY_STEP, "aot_eager")


class Teacher(nn.Module):
    """A copy of the head that follows it, updated and asked in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.teacher = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for follows, leads in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                follows.mul_(0.9).add_(leads, alpha=0.1)
            target = self.teacher(x)
        return (self.head(x) - target).square().sum()


class Forces(nn.Module):
    """The gradient of an energy, on which the bias of its last layer has no bearing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda positions: self.energy(torch.tanh(self.first(positions))).sum())(x).square().sum()


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Scaled(nn.Module):
    """A Function has no gradient for the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(StraightThrough.apply(x.requires_grad_(), self.scale)).square().sum()


@torch.library.custom_op("compiled_ddp_tests::straight_through", mutates_args=())
def straight_through(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


@straight_through.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


straight_through.register_autograd(lambda _, gradient: (gradient, None))


class ScaledByOperator(Scaled):
    """The same by an operator, which AOTAutograd keeps in its cache."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(straight_through(x.requires_grad_(), self.scale)).square().sum()


WITHOUT_GRADIENT = {
    Teacher: {"teacher.weight", "teacher.bias"},
    Forces: {"energy.bias"},
    Scaled: {"scale"},
    ScaledByOperator: {"scale"},
}


def _without_gradient(rank: int, wrapper: str, model: type[nn.Module], options: dict[str, str]) -> None:
    torch.compiler.reset()
    ddp = wrappers([wrapper])[wrapper](model(), **options)
    for step in range(3):
        loss = lambda module: module(_batch(rank, step))  # noqa: B023, E731
        expected = _expected(ddp.module, [loss])
        assert {name for name, gradient in expected.items() if gradient is None} == WITHOUT_GRADIENT[model]
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* reduced by hooks")
            loss(ddp).backward()
        _assert_as_expected(ddp.module, expected, step)


@pytest.mark.parametrize("model", WITHOUT_GRADIENT)
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_what_the_loss_does_not_depend_on_has_none(ranks2: RankPool, wrapper: str, model: type[nn.Module]) -> None:
    ranks2.run(_without_gradient, wrapper, model, {})


@pytest.mark.inductor
def test_it_has_none_where_the_graph_comes_from_a_cache(ranks2: RankPool) -> None:
    """Twice, so that the second time AOTAutograd and Inductor have it in their caches."""
    for model in 2 * (ScaledByOperator, Teacher):
        ranks2.run(_without_gradient, "compile_ddp", model, {"backend": "inductor"}, **LIMITS)


@pytest.mark.inductor
def test_what_no_loss_uses_has_no_gradient_under_inductor(ranks2: RankPool) -> None:
    ranks2.run(_train, "compile_ddp", "plain", UNLIKE, "inductor", **LIMITS)


def _accumulates(rank: int, wrapper: str) -> None:
    """Local backwards, a graph that is kept, and a backward of the other output alone."""
    torch.manual_seed(0)
    ddp = wrappers([wrapper])[wrapper](Heads())
    for step, (before, last) in enumerate((("a", "a"), ("b", "a"), ("a", "a"), ("a", "b"))):
        losses = [_loss(before, _batch(rank, step)), _loss(last, _batch(rank, step + 20))]
        expected = _expected(ddp.module, losses)
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ddp.no_sync():
                losses[0](ddp).backward()
            losses[1](ddp).backward()
        _assert_as_expected(ddp.module, expected, (step, before, last))
    x = _batch(rank, 40)
    expected = _expected(ddp.module, [_loss("a", x)])
    ddp.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept, _ = ddp(x)
        kept.square().sum().backward(retain_graph=True)
    _assert_as_expected(ddp.module, expected, "kept graph")
    ddp.unwrap()


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_gradients_of_several_backwards_are_those_of_eager_mode(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_accumulates, wrapper)


class Frozen(nn.Module):
    """A graph break behind a part that only feeds an unused output: no gradient comes back through the second graph."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other, self.head = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        used, other = self.used(x), self.other(x)
        torch._dynamo.graph_break()
        return self.head(used), other.tanh()


def _behind_a_break(rank: int) -> None:
    torch.manual_seed(0)
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Frozen())
    for step in range(5):
        loss = _loss("a", _batch(rank, step))
        expected = _expected(ddp.module, [loss])
        assert expected["other.weight"] is None
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss(ddp).backward()
        _assert_as_expected(ddp.module, expected, step)
    ddp.unwrap()


def test_no_gradient_goes_back_through_a_graph_that_gets_none(ranks2: RankPool) -> None:
    ranks2.run(_behind_a_break)


class MixesInTheFirstStep(nn.Module):
    """The backward begins in a second graph, so that the sequence has the head in the first one, which is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        output = self.head(hidden)
        torch._dynamo.graph_break()
        return output, hidden, self.other(hidden)


def _mixes_at_first(rank: int, wrapper: str, accumulated: bool, on_ranks: Sequence[int]) -> None:
    torch.manual_seed(0)
    ddp = wrappers([wrapper])[wrapper](MixesInTheFirstStep())
    for step in range(4):
        x = _batch(rank, step)

        def loss(module: nn.Module, x: Tensor = x) -> Tensor:
            _, hidden, other = module(x)
            mixed = getattr(module, "module", module).head(hidden + hidden.flip(0))
            return other.square().sum() + (mixed.square().sum() if rank in on_ranks else 0.0)

        expected = _expected(ddp.module, [loss])
        for parameter in ddp.module.parameters():
            parameter.grad = torch.ones_like(parameter) if accumulated else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss(ddp).backward()
        if accumulated:
            expected = {name: None if mean is None else mean + 1.0 for name, mean in expected.items()}
        _assert_as_expected(ddp.module, expected, step)
    ddp.unwrap()


@pytest.mark.parametrize("on_ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_what_the_first_backward_uses_outside_of_its_graph_alone_is_averaged(
    ranks2: RankPool, wrapper: str, accumulated: bool, on_ranks: Sequence[int]
) -> None:
    ranks2.run(_mixes_at_first, wrapper, accumulated, on_ranks)


class AddsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, trains: bool) -> Tensor:
        ctx.trains = trains
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradient, gradient.sum(0) if ctx.trains else None, None


class LeavesOneUndefined(nn.Module):
    """Autograd calls the hooks of `offset`, in eager code and behind a graph, without a gradient."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.linear, self.offset = nn.Linear(5, 3), nn.Parameter(torch.ones(3))
        self.eager = eager

    def forward(self, x: Tensor) -> Tensor:
        if self.eager:
            torch._dynamo.graph_break()
            return _add(self.linear(x), self.offset, False)
        return self.linear(x) + (2 * self.offset).detach()


@torch.compiler.disable
def _add(x: Tensor, weight: Tensor, trains: bool) -> Tensor:
    output: Tensor = AddsWeight.apply(x, weight, trains)
    return output


def _assigned_by_hand(rank: int, wrapper: str, eager: bool) -> None:
    torch.manual_seed(0)
    ddp = wrappers([wrapper])[wrapper](LeavesOneUndefined(eager))
    for step in range(4):
        x = _batch(rank, step)
        expected = expected_mean(ddp.module.linear, lambda linear: linear(x).sum())  # noqa: B023
        ddp.zero_grad()
        if rank == 1:
            ddp.module.offset.grad = torch.full((3,), 7.0)
        ddp(x).sum().backward()
        assert_gradients(ddp.module.linear, expected)
        offset = ddp.module.offset.grad
        assert offset is None if rank == 0 else torch.equal(offset, torch.full((3,), 7.0)), (step, offset)
    ddp.unwrap()


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_grad_assigned_by_hand_is_no_sign_that_one_was_accumulated(
    ranks2: RankPool, wrapper: str, eager: bool
) -> None:
    ranks2.run(_assigned_by_hand, wrapper, eager)


class TrainsOffsetLast(nn.Module):
    """The gradients of `linear` arrive before that of `offset`, if that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.offset = nn.Linear(5, 3), nn.Parameter(torch.ones(5))
        self.trains_offset = True

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(_add(x, self.offset, self.trains_offset))


def _kept_in_its_bucket(rank: int, wrapper: str, zeroed: bool) -> None:
    """What is added to another .grad of the bucket, which shares memory, is no sign either."""
    ddp = wrappers([wrapper])[wrapper](TrainsOffsetLast(), reduction="sum")
    for step in range(5):
        ddp.module.trains_offset = step < 2
        before = None if ddp.module.offset.grad is None else ddp.module.offset.grad.clone()
        for parameter in ddp.module.linear.parameters():
            parameter.grad = None if parameter.grad is None or not zeroed else parameter.grad.zero_()
        ddp(_batch(rank, step)).sum().backward()
        if step >= 2:
            assert torch.equal(ddp.module.offset.grad, before), step
    ddp.unwrap()


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_grad_kept_in_its_bucket_stays_while_others_are_added_to(
    ranks2: RankPool, wrapper: str, zeroed: bool
) -> None:
    ranks2.run(_kept_in_its_bucket, wrapper, zeroed)


class KeepsALoss(nn.Module):
    """Whose backward reaches `gate` first, and not through an output of the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        output = hidden * 2
        self.kept = self.gate(hidden.detach()).square().mean()
        return output


def _begun_by_a_users_hook(rank: int, wrapper: str) -> None:
    torch.manual_seed(0)
    model = KeepsALoss()
    twin = copy.deepcopy(model)
    seen: list[Tensor] = []
    for parameter in model.gate.parameters():  # before wrapping: they run before the wrapper's own
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    ddp = wrappers([wrapper])[wrapper](model)
    for step in range(3):
        x = _batch(rank, step)
        expected = expected_mean(twin, lambda module: module(x).square().sum() + module.kept)  # noqa: B023
        ddp.zero_grad()
        output = ddp(x)
        (output.square().sum() + ddp.module.kept).backward()
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)
        assert {tuple(each.shape) for each in seen} == {(3, 4), (3,)} and len(seen) == 2
        for each in seen:
            mean = expected["gate.weight" if each.dim() == 2 else "gate.bias"]
            torch.testing.assert_close(each, mean.float(), rtol=1e-4, atol=1e-6)
        seen.clear()
    ddp.unwrap()


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_gradient_with_which_a_users_hook_begins_the_backward_has_arrived(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_begun_by_a_users_hook, wrapper)


# ---- several calls in one backward -----------------------------------------------------------------------------------


class Tasks(nn.Module):
    """Three heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(torch.tanh(self.body(x))) for head in self.heads]

    @staticmethod
    def heads_of(output: int) -> list[str]:
        """The modules that an output alone may depend on."""
        return [f"heads.{output}"]


class Repeated(nn.Module):
    """One block that runs twice, in a graph each time; what comes first of it goes on, the rest are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.side, self.last = nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        sides = []
        for _ in range(2):
            x, side = torch.tanh(self.block(x)), self.side(x)
            sides.append(side)
            torch._dynamo.graph_break()
        return [self.last(x), *sides]

    @staticmethod
    def heads_of(output: int) -> list[str]:
        """The modules that an output may depend on, but for the block where it is the first side output."""
        return [["last", "block"], ["side"], ["side", "block"]][output]


# In each step, for each forward of its backward, the outputs that the loss uses.
Uses = Sequence[Sequence[Sequence[int]]]
TWO_TASKS: Uses = [[[0], [1]], [[0], [1]], [[1], [0]], [[0, 1], [2]], [[0], [1]], [[0], [1]], [[0], [1]]]


def _used_in_turns(rank: int, model: type[nn.Module], wrapper: str, plans: Sequence[Uses]) -> None:
    torch.manual_seed(0)
    ddp = wrappers([wrapper])[wrapper](model())
    for step, uses in enumerate(plans[rank]):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batches = [torch.randn(3, 5, generator=generator) for _ in uses]

        def loss(wrapped: nn.Module, batches: Sequence[Tensor] = batches, uses: Sequence[Any] = uses) -> Tensor:
            outputs = [wrapped(batch) for batch in batches]
            terms = [out[n].square().sum() for out, used in zip(outputs, uses, strict=True) for n in used]
            return torch.stack(terms).sum()

        used_somewhere = {n for plan in plans for used in plan[step] for n in used}
        heads = {n: model.heads_of(n) for n in range(3)}
        used = {head for n in used_somewhere for head in heads[n]}
        heads_without = {head for names in heads.values() for head in names} - used
        unused = [name for name, _ in ddp.module.named_parameters() if name.rpartition(".")[0] in heads_without]
        assert_step(ddp, loss, unused=unused)


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
@pytest.mark.parametrize("other", [TWO_TASKS, [uses[::-1] for uses in TWO_TASKS]], ids=["alike", "differently"])
def test_forwards_of_one_backward_may_use_other_outputs(ranks2: RankPool, wrapper: str, other: Uses) -> None:
    ranks2.run(_used_in_turns, Tasks, wrapper, [TWO_TASKS, other], **LIMITS)


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_block_that_runs_twice_may_have_one_output_used(ranks2: RankPool, wrapper: str) -> None:
    uses: Uses = [[[0, 2]], [[0, 2]], [[0, 1]], [[0, 1, 2]], [[0]], [[0, 2]]]
    ranks2.run(_used_in_turns, Repeated, wrapper, [uses, uses], **LIMITS)


def _asked_for(rank: int) -> None:
    torch.manual_seed(0)
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Tasks())
    names, parameters = zip(*ddp.module.named_parameters(), strict=True)
    for step, uses in enumerate([[0, 1, 2], [0, 1], [0, 1], [2], [0, 1, 2]]):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))

        def loss(wrapped: nn.Module, x: Tensor = x, uses: Sequence[int] = uses) -> Tensor:
            outputs = wrapped(x)
            return torch.stack([outputs[n].square().sum() for n in uses]).sum()

        expected = expected_mean(copy.deepcopy(ddp.module), loss)
        gradients = torch.autograd.grad(loss(ddp), parameters, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if any(name.startswith(f"heads.{n}.") for n in {0, 1, 2}.difference(uses)):
                assert gradient is None, name
            else:
                torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-5, atol=1e-7)


def test_autograd_grad_returns_none_for_what_the_loss_does_not_use(ranks2: RankPool) -> None:
    ranks2.run(_asked_for, **LIMITS)


def _hooked(rank: int) -> None:
    torch.manual_seed(0)
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Heads())
    for parameter in ddp.module.b.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.0)
    for step, uses in enumerate(["ab", "a", "a", "b", "ab"]):
        ddp.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = _loss(uses, x)
        expected = expected_mean(copy.deepcopy(ddp.module), loss)
        loss(ddp).backward()
        for name, parameter in ddp.module.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)
            else:
                assert not expected[name].any(), name


def test_a_users_hook_on_a_parameter_is_not_called_with_none(ranks2: RankPool) -> None:
    ranks2.run(_hooked, **LIMITS)
