"""Communication hooks with state: what was sent plus what is still owed is the sum of the true means, on every path."""

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from ledger import Ledger, integers, make_integer, mean_of, owed_here
from models import Chain, local_gradients, wrappers
from torch import Tensor, nn

from compiled_ddp import comm_hooks
from compiled_ddp.comm_hooks import PowerSGD, Ranks, StatefulHook, TopK
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
HOOKS = [TopK(0.25), PowerSGD(1)]
ROUNDED = 1e-5  # PowerSGD's factors, relative to the largest gradient


def wrap(wrapper: str, model: nn.Module, hook: Any, **options: Any) -> Any:
    make_integer(model)
    return wrappers([wrapper])[wrapper](model, comm_hook=hook, **options)


def ledger_of(ddp: Any, hook: Any) -> Ledger:
    return Ledger(ddp, tolerance=ROUNDED if isinstance(hook, PowerSGD) else 0.0)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    return (out * torch.arange(1.0, 1 + out.shape[-1]).to(out.dtype)).sum()


def eagerly(condition: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if condition else contextlib.nullcontext()


# ---- types -----------------------------------------------------------------------------------------------------------


def _converted(rank: int, wrapper: str, hook: Any, backend: str) -> None:
    options = {"backend": backend} if wrapper == "compile_ddp" else {}
    ddp = wrap(wrapper, Chain(), hook, **options)
    ledger, dtype = ledger_of(ddp, hook), torch.float32
    for step in range(6):
        if step in (2, 4):
            dtype = torch.float64 if step == 2 else torch.float32
            ddp.to(dtype)
            ledger.assert_as_before(ddp, "after a conversion")
        ddp.zero_grad()
        ledger.step(ddp, lambda module: loss_of(module, integers(rank, step, 3, 5).to(dtype)))  # noqa: B023
        state = ddp.comm_hook_state_dict()
        assert {tensor.dtype for tensors in state.values() for tensor in tensors} == {dtype}
    assert any(owed.any() for owed in ledger.owed.values()), "everything was sent"


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_state_follows_parameters_that_are_converted(ranks2: RankPool, wrapper: str, hook: Any) -> None:
    ranks2.run(_converted, wrapper, hook, "aot_eager")


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_reads_state_in_the_dtype_that_it_has(ranks2: RankPool) -> None:
    ranks2.run(_converted, "compile_ddp", TopK(0.25), "inductor")


def _channels_last(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 2)), TopK(0.25))
    ledger = Ledger(ddp)
    for step in range(4):
        if step == 2:
            ddp.to(memory_format=torch.channels_last)
            ledger.assert_as_before(ddp, "in another memory format")
        ddp.zero_grad()
        ledger.step(ddp, lambda module: module(integers(rank, step, 1, 3, 4, 4)).sum())  # noqa: B023


@pytest.mark.parametrize("wrapper", BOTH)
def test_state_follows_the_memory_format(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_channels_last, wrapper)


def _loads(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Chain(), TopK(0.25))
    ledger = Ledger(ddp)
    ledger.step(ddp, lambda module: loss_of(module, integers(rank, 0, 3, 5)))
    state = ddp.comm_hook_state_dict()
    key, (error,) = next(iter(state.items()))
    with pytest.raises(ValueError, match=f"for the parameters {key}; found"):
        ddp.load_comm_hook_state_dict({key: [error[:-1]]})
    with pytest.raises(ValueError, match=f"for the parameters {key}; found"):
        ddp.load_comm_hook_state_dict({key: [error, error]})
    with pytest.raises(ValueError, match=f"owes the parameters {key} is not finite"):
        ddp.load_comm_hook_state_dict({key: [error * torch.nan]})
    with pytest.raises(KeyError, match="elsewhere"):
        ddp.load_comm_hook_state_dict({"elsewhere": [error]})
    ledger.assert_as_before(ddp, "after what was refused")
    ddp.load_comm_hook_state_dict({key: [t.double() for t in tensors] for key, tensors in state.items()})
    ledger.assert_as_before(ddp, "after loading")
    ddp.zero_grad()
    ledger.step(ddp, lambda module: loss_of(module, integers(rank, 1, 3, 5)))


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_loaded_is_converted_or_refused_by_name(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_loads, wrapper)


# ---- memory ----------------------------------------------------------------------------------------------------------


class Last(StatefulHook):
    """Keeps what it is given."""

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(gradients),)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        return self.mean(gradients, ranks, *state)

    def mean(self, gradients: Tensor, ranks: Ranks, last: Tensor) -> tuple[Tensor, ...]:
        return ranks.all_reduce(gradients) / ranks.size, gradients


class LastMean(Last):
    """Keeps what it returns."""

    def mean(self, gradients: Tensor, ranks: Ranks, last: Tensor) -> tuple[Tensor, ...]:
        mean = ranks.all_reduce(gradients) / ranks.size
        return mean, mean


class OneStepLate(Last):
    """Returns what it has kept, and writes into what it is given."""

    def mean(self, gradients: Tensor, ranks: Ranks, last: Tensor) -> tuple[Tensor, ...]:
        return last, ranks.all_reduce(gradients.div_(ranks.size))


def _shared_memory(rank: int, wrapper: str, hook: Last) -> None:
    ddp = wrap(wrapper, Chain(), hook)
    late: dict[str, Tensor] = {}
    for step in range(4):

        def loss(module: nn.Module) -> Tensor:
            return loss_of(module, integers(rank, step, 3, 5))  # noqa: B023

        local = local_gradients(copy.deepcopy(ddp.module), loss)
        means = {name: mean_of(gradient).float() for name, gradient in local.items()}
        ddp.zero_grad(set_to_none=step % 2 == 0)  # else .grad is written to in place
        loss(ddp).backward()
        state = ddp.comm_hook_state_dict()
        kept = owed_here(ddp)
        for name, parameter in ddp.module.named_parameters():
            assert torch.equal(kept[name], (local if type(hook) is Last else means)[name]), f"step {step}, {name}"
            expected = late.get(name, torch.zeros(())) if isinstance(hook, OneStepLate) else means[name]
            assert torch.equal(parameter.grad, expected.expand_as(parameter)), f"step {step}, {name}"
        late = means
        nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        for parameter in ddp.parameters():
            parameter.grad.fill_(7.0)
        for key, tensors in ddp.comm_hook_state_dict().items():
            assert torch.equal(tensors[0], state[key][0]), f"step {step}, {key} was changed through .grad"
        if step == 1:
            ddp.load_comm_hook_state_dict(state)


@pytest.mark.parametrize("hook", [Last(), LastMean(), OneStepLate()])
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_a_hook_returns_shares_memory_with_neither_gradients_nor_state(
    ranks2: RankPool, wrapper: str, hook: Last
) -> None:
    ranks2.run(_shared_memory, wrapper, hook)


def _shared_memory_under_inductor(rank: int) -> None:
    for hook in (LastMean(), Last()):
        torch.compiler.reset()
        ddp = wrap("compile_ddp", Chain(), hook, backend="inductor", bucket_cap_mb=1)
        for step in range(2):
            ddp.zero_grad()
            loss_of(ddp, integers(rank, step, 3, 5)).backward()
            state = ddp.comm_hook_state_dict()
            for parameter in ddp.parameters():
                parameter.grad.fill_(7.0)
            for key, tensors in ddp.comm_hook_state_dict().items():
                assert torch.equal(tensors[0], state[key][0]) and not (tensors[0] == 7.0).all()


@pytest.mark.inductor
@pytest.mark.slow
def test_nor_does_it_in_what_inductor_generates(ranks2: RankPool) -> None:
    ranks2.run(_shared_memory_under_inductor)


# ---- places ----------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A layer that is called twice, with a graph break between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return self.head(self.layer(x))


def sections(ddp: Any) -> list[set[str]]:
    return [{ddp.plan.parameter_names[index] for index in section.plan.indices} for section in ddp.plan.sections]


def _twice(rank: int, hook: Any, eager_on: tuple[int, ...], alternating: bool, backend: str) -> None:
    ddp = wrap("compile_ddp", Twice(), hook, backend=backend)
    ledger = ledger_of(ddp, hook)
    for step in range(6):
        if step == 1:
            assert ["layer.weight" in section for section in sections(ddp)].count(True) == 2
        ddp.zero_grad()
        with eagerly(rank in eager_on and (step % 2 == 1 if alternating else step > 2)):
            ledger.step(ddp, lambda module: loss_of(module, integers(rank, step, 2, 4)))  # noqa: B023


@pytest.mark.parametrize(
    ("hook", "eager_on", "alternating"),
    [
        (TopK(0.25), (0, 1), False),
        (TopK(0.25), (1,), False),
        (TopK(0.25), (0,), True),
        (PowerSGD(1), (0, 1), True),
        (PowerSGD(1), (1,), False),
    ],
)
def test_a_layer_that_is_called_twice_owes_in_two_places(
    ranks2: RankPool, hook: Any, eager_on: tuple[int, ...], alternating: bool
) -> None:
    ranks2.run(_twice, hook, eager_on, alternating, "aot_eager")


@pytest.mark.inductor
@pytest.mark.slow
def test_what_inductor_generates_and_hooks_take_turns(ranks2: RankPool) -> None:
    ranks2.run(_twice, TopK(0.25), (1,), True, "inductor")


class InGraphAndEager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    @torch.compiler.disable
    def in_eager_code(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x) + self.in_eager_code(x))


def _in_graph_and_eager(rank: int, hook: Any) -> None:
    made = [wrap("compile_ddp", InGraphAndEager(), hook)]
    ledger = ledger_of(made[0], hook)

    def step(number: int) -> None:
        made[-1].zero_grad()
        ledger.step(made[-1], lambda module: loss_of(module, integers(rank, number, 2, 4)))

    for number in range(3):
        step(number)
    assert len([s for s in made[0].plan.sections if s.reduces_again]) == 1
    state = made[0].comm_hook_state_dict()
    module = made[0].unwrap()
    torch.compiler.reset()
    made.append(wrap("compile_ddp", module, hook))
    made[1].load_comm_hook_state_dict(state)
    ledger.assert_as_before(made[1], "after a resume")
    for number in range(3, 6):
        step(number)


@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_owed_in_a_graph_and_in_eager_code_is_all_saved(ranks2: RankPool, hook: Any) -> None:
    ranks2.run(_in_graph_and_eager, hook)


def _resumes_elsewhere(rank: int, names: tuple[str, ...]) -> None:
    """Each wrapper takes up what the one before has left, with other buckets."""
    model, state, number = Chain(), {}, itertools.count()
    owed: dict[str, Tensor] | None = None
    for place, name in enumerate(names):
        torch.compiler.reset()
        ddp = wrap(name, model, TopK(0.25), bucket_cap_mb=(1, 1e-4, 1e-3)[place], first_bucket_mb=1e-4)
        if state:
            ddp.load_comm_hook_state_dict(state)
        ledger = Ledger(ddp)
        assert owed is None or all(torch.equal(owed[name], now) for name, now in ledger.owed.items())
        for _ in range(3):
            ddp.zero_grad()
            x = integers(rank, next(number), 3, 5)
            ledger.step(ddp, lambda module: loss_of(module, x))  # noqa: B023
        state, owed = ddp.comm_hook_state_dict(), ledger.owed
        model = ddp.unwrap()


@pytest.mark.parametrize("names", [("compile_ddp", "EagerDDP", "compile_ddp"), ("EagerDDP", "EagerDDP", "EagerDDP")])
def test_a_resume_with_other_buckets_loses_nothing(ranks2: RankPool, names: tuple[str, ...]) -> None:
    ranks2.run(_resumes_elsewhere, names)


def _goes_on_alike(rank: int, wrapper: str) -> None:
    """With a factor that belongs to the bucket as a whole, and in EagerDDP to buckets of the second backward on."""
    first = wrap(wrapper, Chain(), PowerSGD(1))
    for step in range(3):
        first.zero_grad()
        loss_of(first, integers(rank, step, 3, 5)).backward()
    second = wrappers([wrapper])[wrapper](copy.deepcopy(first.module), comm_hook=PowerSGD(1))
    second.load_comm_hook_state_dict(first.comm_hook_state_dict())
    second.zero_grad()
    if wrapper == "EagerDDP":  # the first backward finds its buckets
        loss_of(second, 0 * integers(rank, 3, 3, 5)).mul(0).backward()
        second.load_comm_hook_state_dict(first.comm_hook_state_dict())
    for ddp in (first, second):
        ddp.zero_grad()
        loss_of(ddp, integers(rank, 3, 3, 5)).backward()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_resumed_run_goes_on_as_the_saved_one(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_goes_on_alike, wrapper)


# ---- steps that bring a parameter nothing ----------------------------------------------------------------------------


class Routed(nn.Module):
    """Layers of which each call uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for number in chosen:
            x = self.layers[number](x)
        return self.head(x)


ROUTES = [
    [(0, 1, 2), (0, 1, 2)],
    [(0, 1), (0, 1)],
    [(0,), (0, 2)],
    [(), ()],
    [(1, 2), (0,)],
    [(0, 1, 2), (0, 1, 2)],
]


def _routed(rank: int, wrapper: str, hook: Any, zero: bool | None) -> None:
    """`zero` is set_to_none, None without zero_grad."""
    ddp = wrap(wrapper, Routed(), hook, bucket_cap_mb=1, first_bucket_mb=1)
    ledger = ledger_of(ddp, hook)
    for step, route in enumerate(ROUTES):
        if zero is not None:
            ddp.zero_grad(set_to_none=zero)

        def loss(module: nn.Module) -> Tensor:
            out = module(integers(rank, step, 2, 4), route[rank])  # noqa: B023
            return (out * torch.tensor([1.0, 2.0, 3.0])).sum()

        ledger.step(ddp, loss)


@pytest.mark.parametrize(
    ("hook", "zero"), [(TopK(0.25), True), (TopK(0.25), False), (TopK(0.25), None), (PowerSGD(1), True)]
)
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_owed_to_a_parameter_survives_steps_that_do_not_use_it(
    ranks2: RankPool, wrapper: str, hook: Any, zero: bool | None
) -> None:
    ranks2.run(_routed, wrapper, hook, zero)


def _frozen(rank: int, wrapper: str) -> None:
    """A part is frozen, and what is owed to it takes no room from the others; then it is trained again."""
    ddp = wrap(wrapper, Chain(), TopK(0.25), bucket_cap_mb=1, first_bucket_mb=1)
    ledger = Ledger(ddp)

    def step(number: int) -> None:
        ddp.zero_grad()
        ledger.step(ddp, lambda module: loss_of(module, integers(rank, number, 3, 5)))

    for number in range(3):
        step(number)
    ddp.module.second.requires_grad_(False)
    kept = {name: owed for name, owed in ledger.owed.items() if name.startswith("second")}
    assert any(owed.any() for owed in kept.values())
    for number in range(3, 8):
        step(number)
        others = [p.grad for name, p in ddp.module.named_parameters() if not name.startswith("second")]
        assert sum(int(gradient.count_nonzero()) for gradient in others) > 0, "nothing was sent"
    assert all(torch.equal(ledger.owed[name], owed) for name, owed in kept.items())
    ddp.module.second.requires_grad_(True)
    for number in range(8, 11):
        step(number)


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_owed_to_a_frozen_part_waits_for_it(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_frozen, wrapper)


def _starting_small(rank: int, wrapper: str) -> None:
    """A model of which a part is trained from the third step on."""
    model = Chain()
    model.first.requires_grad_(False)
    ddp = wrap(wrapper, model, TopK(0.25))
    ledger = Ledger(ddp)
    for step in range(6):
        if step == 2:
            model.first.requires_grad_(True)
        ddp.zero_grad()
        ledger.step(ddp, lambda module: loss_of(module, integers(rank, step, 3, 5)))  # noqa: B023


@pytest.mark.parametrize("wrapper", BOTH)
def test_an_added_part_leaves_what_is_owed_to_others(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_starting_small, wrapper)


def _skips(rank: int, wrapper: str, hook: Any) -> None:
    ddp = wrap(wrapper, Chain(), hook)
    ledger = ledger_of(ddp, hook)
    for step in range(6):
        ddp.zero_grad()
        skips = step in (1, 3) and rank == 1

        def loss(module: nn.Module) -> Tensor:
            return loss_of(module, integers(rank, step, 3, 5)) * (0.0 if skips else 1.0)  # noqa: B023

        ledger.step(ddp, loss, backward=lambda loss: ddp.skip_step() if skips else loss.backward())  # noqa: B023
        with ddp.no_sync():
            loss(ddp).backward()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_step_that_one_rank_skips_and_accumulation_conserve(ranks2: RankPool, wrapper: str, hook: Any) -> None:
    ranks2.run(_skips, wrapper, hook)


def _for_some_parameters(rank: int, wrapper: str, hook: Any) -> None:
    """backward(inputs=...) and torch.autograd.grad of some parameters: a graph computes the others' for nobody."""
    ddp = wrap(wrapper, Chain(), hook)
    ledger = ledger_of(ddp, hook)
    ddp.zero_grad()
    ledger.step(ddp, lambda module: loss_of(module, integers(rank, 0, 3, 5)))
    head = [ddp.module.head.weight, ddp.module.head.bias]
    kept = owed_here(ddp)
    x = integers(rank, 1, 3, 5)
    local = local_gradients(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))
    due = {name: mean_of(local[name]) + ledger.owed[name] for name in ("head.weight", "head.bias")}
    ddp.zero_grad()
    loss = loss_of(ddp, x)
    if wrapper == "EagerDDP":
        with pytest.raises(RuntimeError, match=r"torch.autograd.grad would return this rank's own gradient"):
            torch.autograd.grad(loss, head, retain_graph=True)
        ledger.assert_as_before(ddp, "after what was refused")
        ddp.zero_grad()
        loss_of(ddp, x).backward(inputs=head)
        found = [parameter.grad for parameter in head]
    else:
        found = list(torch.autograd.grad(loss, head))
    now = owed_here(ddp)
    for name, gradient in zip(due, found, strict=True):
        difference = gradient.double() + mean_of(now[name]) - due[name]
        assert difference.abs().max() <= ledger.tolerance * due[name].abs().max(), name
    for name in kept.keys() - due.keys():
        assert torch.equal(kept[name], now[name]), f"what is owed to {name} has changed"
    ledger.open(ddp)
    for step in range(2, 4):
        ddp.zero_grad()
        ledger.step(ddp, lambda module: loss_of(module, integers(rank, step, 3, 5)))  # noqa: B023


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_that_nobody_asked_for_are_owed_what_they_were(ranks2: RankPool, wrapper: str, hook: Any) -> None:
    ranks2.run(_for_some_parameters, wrapper, hook)


class Breaks(Exception):
    pass


class Breaking(nn.Module):
    """Two graphs, with eager code between them whose backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
        self.raises = False

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        x = x * 1
        if self.raises:
            x.register_hook(_raise)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


def _raise(_: Tensor) -> None:
    raise Breaks


def _breaks_off(rank: int, wrapper: str, hook: Any) -> None:
    """A backward that breaks off on one rank is dropped by all, and so is what it has sent."""
    ddp = wrap(wrapper, Breaking(), hook)
    ledger = ledger_of(ddp, hook)
    for step in range(6):
        ddp.zero_grad()
        x = integers(rank, step, 3, 5)
        if step in (2, 4):
            ddp.module.raises = rank == 1
            loss = loss_of(ddp, x)
            with pytest.raises(Breaks if rank == 1 else RuntimeError, match=None if rank == 1 else "broke off"):
                loss.backward()
            ddp.module.raises = False
            ddp.abandon_backward()
            ledger.assert_as_before(ddp, "after a step that broke off")
        else:
            ledger.step(ddp, lambda module: loss_of(module, x))  # noqa: B023


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_step_that_breaks_off_is_owed_as_before(ranks2: RankPool, wrapper: str, hook: Any) -> None:
    ranks2.run(_breaks_off, wrapper, hook)


def _raises_too_late(rank: int, wrapper: str) -> None:
    """An exception when all has been launched: the other rank has a gradient, so that what is sent is sent."""
    ddp = wrap(wrapper, Chain(), TopK(0.25))
    ledger = Ledger(ddp)
    for step in range(2):
        ddp.zero_grad()
        ledger.step(ddp, lambda module: loss_of(module, integers(rank, step, 3, 5)))  # noqa: B023
    x = integers(rank, 2, 3, 5).requires_grad_()
    due = {
        name: mean_of(gradient) + ledger.owed[name]
        for name, gradient in local_gradients(copy.deepcopy(ddp.module), lambda m: loss_of(m, x.detach())).items()
    }
    ddp.zero_grad()
    begun = x * 1
    if rank == 1:
        begun.register_hook(_raise)
    with pytest.raises(Breaks) if rank == 1 else contextlib.nullcontext():
        loss_of(ddp, begun).backward()
    ddp.abandon_backward()
    ledger.open(ddp)
    for name, parameter in ddp.module.named_parameters():
        if rank == 0:
            assert torch.equal(parameter.grad + ledger.owed[name], due[name]), name


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_step_that_raises_when_all_has_been_sent_has_sent_it(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_raises_too_late, wrapper)


# ---- numbers ---------------------------------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(5, 4)
        self.first = nn.Parameter(torch.zeros(4, 3, dtype=torch.complex64))
        self.second = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        out = (self.real(x) + 1j) @ self.first @ self.second
        return out.real + 2 * out.imag


def make_complex(module: Complex) -> Complex:
    make_integer(module)
    with torch.no_grad():
        for parameter in (module.first, module.second):
            parameter.copy_(torch.complex(parameter.real, parameter.real.flip(0)))
    return module


def _complex(rank: int, wrapper: str, hook: Any, backend: str) -> None:
    options = {"backend": backend} if wrapper == "compile_ddp" else {}
    ddp = wrap(wrapper, Complex(), hook, **options)
    make_complex(ddp.module)
    ledger = ledger_of(ddp, hook)
    if isinstance(hook, StatefulHook):
        for step in range(4):
            ddp.zero_grad()
            ledger.step(ddp, lambda module: loss_of(module, integers(rank, step, 3, 5)))  # noqa: B023
            if step == 1:
                ddp.load_comm_hook_state_dict(ddp.comm_hook_state_dict())
                ledger.assert_as_before(ddp, "after loading")
        return
    for step in range(2):
        ddp.zero_grad()
        local = local_gradients(copy.deepcopy(ddp.module), lambda m: loss_of(m, integers(rank, step, 3, 5)))  # noqa: B023
        loss_of(ddp, integers(rank, step, 3, 5)).backward()
        for name, parameter in ddp.module.named_parameters():
            expected = mean_of(local[name])
            torch.testing.assert_close(parameter.grad.to(expected.dtype), expected, rtol=2e-2, atol=1.0, msg=name)
            assert not parameter.is_complex() or parameter.grad.imag.any()


COMPRESSIONS = [comm_hooks.bf16_compress, comm_hooks.fp16_compress, comm_hooks.fp32_reduce, TopK(0.25), PowerSGD(1)]


@pytest.mark.parametrize("hook", COMPRESSIONS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_complex_gradients_keep_both_parts(ranks2: RankPool, wrapper: str, hook: Any) -> None:
    ranks2.run(_complex, wrapper, hook, "aot_eager")


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_complex_gradients_keep_both_parts_under_inductor(ranks2: RankPool) -> None:
    ranks2.run(_complex, "compile_ddp", TopK(0.25), "inductor")


def _float64(rank: int, wrapper: str) -> None:
    model = nn.Linear(4, 1, bias=False).double()
    ddp = wrap(wrapper, model, comm_hooks.fp32_reduce)
    ddp(torch.full((1, 4), 1.0 + rank * 2.0**-40, dtype=torch.float64)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((1, 4), 1.0 + 2.0**-41, dtype=torch.float64))


@pytest.mark.parametrize("wrapper", BOTH)
def test_fp32_reduce_leaves_float64_as_it_is(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_float64, wrapper)


class Mixed(nn.Module):
    """Layers of several dtypes; the first one is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low, self.wide = nn.Linear(5, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.low(self.first(x).bfloat16()).double())


def _several_dtypes(rank: int, wrapper: str, hook: Any) -> None:
    ddp = wrap(wrapper, Mixed(), hook)
    ledger = ledger_of(ddp, hook)
    for step in range(4):
        ddp.zero_grad()
        ledger.step(ddp, lambda module: loss_of(module, integers(rank, step, 2, 5)))  # noqa: B023


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_model_of_several_dtypes_is_compressed(ranks2: RankPool, wrapper: str, hook: Any) -> None:
    ranks2.run(_several_dtypes, wrapper, hook)


def decomposes(flat: Tensor, ranks: Ranks) -> Tensor:
    """In an operator that has no kernel for bfloat16, which a trace does not tell."""
    mean = ranks.all_reduce(flat) / ranks.size
    return mean + 0 * torch.linalg.qr(mean[:1].view(1, 1)).R.view(1)


def _no_kernel(rank: int, wrapper: str) -> None:
    with pytest.raises(TypeError, match=r"parameter low.weight, torch.bfloat16 on cpu.*geqrf_cpu"):
        wrap(wrapper, Mixed(), decomposes)
    model = Mixed()
    model.low.requires_grad_(rank == 1)
    with pytest.raises((TypeError, RuntimeError), match=r"low.weight, torch.bfloat16 on cpu.*geqrf_cpu"):
        wrap(wrapper, model, decomposes)  # an error on one rank reaches every rank
    ddp = wrap(wrapper, Chain(), decomposes)
    loss_of(ddp, integers(rank, 0, 2, 5)).backward()
    ddp.module.head.bfloat16()
    with pytest.raises(TypeError, match=r"parameter head.weight, torch.bfloat16 on cpu.*geqrf_cpu"):
        ddp(integers(rank, 0, 2, 5))


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_hook_without_a_kernel_for_one_of_the_dtypes_is_refused_on_every_rank(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_no_kernel, wrapper)


# ---- steps that are not finite ---------------------------------------------------------------------------------------


def _not_finite(rank: int, wrapper: str, hook: Any, bad: float) -> None:
    ddp = wrap(wrapper, Chain(), hook, bucket_cap_mb=1, first_bucket_mb=1)
    ledger = ledger_of(ddp, hook)
    for step in range(6):
        ddp.zero_grad()
        x = integers(rank, step, 3, 5)
        if step in (0, 3):
            if rank == 1:
                x[0, 0] = bad
            loss_of(ddp, x).backward()
            gradients = [parameter.grad for parameter in ddp.parameters()]
            assert not all(gradient.isfinite().all() for gradient in gradients), "nothing to skip the step for"
            ledger.assert_as_before(ddp, "after a step that is not finite")
            continue
        ledger.step(ddp, lambda module: loss_of(module, x))  # noqa: B023
    state = ddp.comm_hook_state_dict()
    assert all(tensor.isfinite().all() for tensors in state.values() for tensor in tensors)


@pytest.mark.parametrize(("hook", "bad"), [(TopK(0.25), float("inf")), (PowerSGD(1), float("nan"))])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_step_that_is_not_finite_changes_nothing_that_is_owed(
    ranks2: RankPool, wrapper: str, hook: Any, bad: float
) -> None:
    ranks2.run(_not_finite, wrapper, hook, bad)


def _grad_scaler(rank: int, wrapper: str, hook: Any) -> list[bool]:
    """Overflow by a loss scale that is too large, which GradScaler makes smaller until it is not."""
    ddp = wrap(wrapper, Chain(), hook, bucket_cap_mb=1, first_bucket_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**124, backoff_factor=2.0**-16)
    stepped = []
    for step in range(12):
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        scaler.scale(loss_of(ddp, integers(rank, step, 3, 5))).backward()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(any(not torch.equal(p, b) for p, b in zip(ddp.parameters(), before, strict=True)))
        state = ddp.comm_hook_state_dict()
        assert all(tensor.isfinite().all() for tensors in state.values() for tensor in tensors)
    assert all(parameter.isfinite().all() for parameter in ddp.parameters())
    return stepped


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_training_goes_on_after_grad_scaler_has_skipped_steps(ranks2: RankPool, wrapper: str, hook: Any) -> None:
    for stepped in ranks2.run(_grad_scaler, wrapper, hook):
        assert not stepped[0] and stepped[-1], stepped
