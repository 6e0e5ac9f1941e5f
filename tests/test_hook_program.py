"""`HookProgram`: what a communication hook does, traced, and what it can never do."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_ddp import comm_hooks
from compiled_ddp.comm_hooks import PowerSGD, Ranks, StatefulHook, TopK
from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.reducers.traced_hook import HookProgram, check_hook, elementwise_state, example, initial_state

CPU = torch.device("cpu")
RANKS = Ranks(2, "nobody")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
HOOKS = (
    comm_hooks.bf16_compress,
    comm_hooks.fp16_compress,
    comm_hooks.fp32_reduce,
    TopK(0.3),
    TopK(1.0),
    PowerSGD(1),
    PowerSGD(4),
)


@dataclasses.dataclass(frozen=True)
class Keeps(StatefulHook):
    """A hook with one tensor as long as the bucket."""

    function: Callable[..., Any]

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(gradients),)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> Any:
        return self.function(gradients, ranks, *state)


def traced(hook: Any, numel: int = 6, dtype: torch.dtype = torch.float32) -> tuple[HookProgram, list[Tensor]]:
    flat = example(numel, dtype, CPU)
    state = initial_state(hook, flat)
    return HookProgram(hook, RANKS, flat, state), state


def gradients(numel: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(1))


# ---- memory ----------------------------------------------------------------------------------------------------------


def in_place(flat: Tensor, ranks: Ranks, error: Tensor) -> tuple[Tensor, Tensor]:
    error.add_(flat)
    flat.div_(ranks.size)
    return ranks.all_reduce(flat), error


SHARING = {
    "the input as result and state": lambda flat, ranks, error: (flat, flat),
    "the state as result": lambda flat, ranks, error: (error, ranks.all_reduce(flat)),
    "one tensor as both": lambda flat, ranks, error: (ranks.all_reduce(flat),) * 2,
    "views of one tensor": lambda flat, ranks, error: (lambda t: (t.view(2, 3).view(6), t[:]))(flat + error),
    "the input written to": in_place,
    "a view of the state as state": lambda flat, ranks, error: (ranks.all_reduce(flat), error.view(-1)),
}


@pytest.mark.parametrize("name", SHARING)
def test_what_a_hook_returns_shares_memory_with_nothing(name: str) -> None:
    program, _ = traced(Keeps(SHARING[name]))
    flat, before = gradients(), [torch.randn(6)]
    kept = [flat.clone(), before[0].clone()]
    tensors = [*program.run_alone(flat, before), flat, *before]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(addresses) == len(tensors)
    assert torch.equal(flat, kept[0]) and torch.equal(before[0], kept[1]), "its arguments are as they were"
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_a_hook_may_write_into_its_arguments() -> None:
    program, _ = traced(Keeps(in_place))
    flat, error = gradients(), torch.ones(6)
    mean, new = program.run_alone(flat, [error])
    assert torch.equal(mean, flat / 2) and torch.equal(new, error + flat)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda flat, ranks: ranks.all_gather(flat).view(ranks.size, -1)[1], lambda flat: flat),  # the last rank's
        (lambda flat, ranks: ranks.all_reduce(flat.sum()).expand(flat.numel()), lambda flat: flat.sum().expand(6)),
        (lambda flat, ranks: torch.stack([flat, 2 * flat], 1)[:, 1], lambda flat: 2 * flat),
    ],
)
def test_a_result_that_is_a_part_of_something_is_laid_out_as_a_bucket(
    function: Callable[..., Tensor], expected: Callable[[Tensor], Tensor]
) -> None:
    """Graphs read it by offsets from the beginning of its memory."""
    program, _ = traced(function)
    (mean,) = program.run_alone(gradients(), [])
    for value in (mean, output_values(program.graph)[0].meta["val"]):
        assert value.is_contiguous() and value.storage_offset() == 0
    assert torch.equal(mean, expected(gradients()))


def test_state_is_contiguous_and_of_its_own_from_the_beginning() -> None:
    shared = torch.zeros(())

    class Expanded(StatefulHook):
        def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
            return shared.expand(gradients.numel()), torch.zeros(2, 3).t(), torch.zeros(2, 3).t()

        def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
            one, two, three = state
            return gradients, one + 1, two.t().contiguous().t(), three

    program, state = traced(Expanded())
    new = program.run_alone(gradients(), state)
    for tensor in [*state, *new]:
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().data_ptr() != shared.data_ptr()


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [TopK(0.5), PowerSGD(2), Keeps(lambda g, ranks, e: (ranks.all_reduce(g + e), g - e))])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("how_many", [1, 6])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(hook: Any, bad: float, how_many: int) -> None:
    program, state = traced(hook)
    _, *state = program.run_alone(gradients(), state)
    flat = gradients()
    flat[:how_many] = bad
    mean, *after = program.run_alone(flat, state)
    assert not mean.isfinite().all()
    for new, old in zip(after, state, strict=True):
        assert torch.equal(new, old)
    mean, *_ = program.run_alone(gradients(), after)
    assert mean.isfinite().all()


def test_a_state_that_alone_would_not_be_finite_is_left_as_it_was() -> None:
    program, state = traced(Keeps(lambda flat, ranks, error: (torch.ones_like(flat), error + flat)))
    flat = gradients()
    flat[2] = torch.inf
    mean, new = program.run_alone(flat, state)
    assert mean.isfinite().all() and torch.equal(new, state[0])


def test_a_state_may_begin_infinite() -> None:
    class Smallest(StatefulHook):
        def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
            return (torch.full_like(gradients, torch.inf),)

        def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
            return gradients, torch.minimum(gradients, state[0])

    program, state = traced(Smallest())
    _, new = program.run_alone(gradients(), state)
    assert torch.equal(new, gradients())


@pytest.mark.parametrize("hook", [TopK(0.3), TopK(1.0), PowerSGD(1), PowerSGD(4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 2, 3, 24])
def test_what_is_sent_and_what_is_owed_are_the_gradients(hook: Any, dtype: torch.dtype, numel: int) -> None:
    """Over three steps; what 16 bits round off is owed too."""
    program, state = traced(hook, numel, dtype)
    sent = total = torch.zeros(numel, dtype=torch.float64)
    for step in range(3):
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(dtype)
        mean, *state = program.run_alone(flat, state)
        sent, total = sent + mean.double(), total + flat.double()
    torch.testing.assert_close(sent + state[0].double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hook", [TopK(0.1), PowerSGD(1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_owed_never_grows_beyond_what_can_be_sent(hook: Any, dtype: torch.dtype) -> None:
    """Else no mean would be finite again, as the state is kept where it is not."""
    program, state = traced(hook, 24, dtype)
    large = (torch.finfo(dtype).max / 4 * torch.rand(24, generator=torch.Generator().manual_seed(0))).to(dtype)
    for step in range(40):
        before = state[0].double()
        flat = large if step < 20 else torch.zeros_like(large)
        mean, *state = program.run_alone(flat, state)
        if step >= 20 or dtype == torch.float16:
            assert mean.isfinite().all(), f"step {step}"
        if mean.isfinite().all():
            found, expected = mean.double() + state[0].double(), flat.double() + before
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert state[0].abs().max() < large.max(), "nothing was sent"


def test_power_sgd_goes_on_after_a_step_of_zeros() -> None:
    """Its factor would be zero, and nothing of gradients that begin with zeros would ever be sent again."""
    program, state = traced(PowerSGD(1), 16)
    _, *state = program.run_alone(torch.zeros(16), state)
    flat = gradients(16)
    flat[:8] = 0.0
    for _ in range(3):
        mean, *state = program.run_alone(flat, state)
    assert mean.any()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_hook_takes_every_dtype(hook: Any, dtype: torch.dtype) -> None:
    check_hook(hook, {"weight": torch.empty(3, dtype=dtype)})


def test_float64_is_not_cut_down_by_fp32_reduce() -> None:
    program, _ = traced(comm_hooks.fp32_reduce, 6, torch.float64)
    flat = 1 + 2.0**-40 * torch.arange(6, dtype=torch.float64)
    (mean,) = program.run_alone(flat, [])
    assert torch.equal(mean, flat / 2)


def test_complex_gradients_are_pairs_of_real_ones() -> None:
    assert example(5, torch.complex64, CPU).shape == (10,)
    program, _ = traced(lambda flat, ranks: ranks.all_reduce(flat), 5, torch.complex128)
    flat = gradients(5, torch.complex128)
    (mean,) = program.run_alone(flat, [])
    assert torch.equal(torch.view_as_complex(mean.view(-1, 2)), flat)


@pytest.mark.parametrize(
    "hook", [PowerSGD(2), lambda flat, ranks: ranks.all_reduce(flat.view(2, 3) @ flat.view(3, 2)).sum() * flat]
)
def test_autocast_changes_neither_the_program_nor_its_run(hook: Any) -> None:
    program, state = traced(hook)
    plain = program.run_alone(gradients(), state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, state = traced(hook)
        found = [under_autocast.run_alone(gradients(), state), program.run_alone(gradients(), state)]
    assert under_autocast.identity == program.identity
    for results in found:
        for one, other in zip(results, plain, strict=True):
            assert torch.equal(one, other)


# ---- what distinguishes programs -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counts(StatefulHook):
    dtype: torch.dtype

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros(64, dtype=self.dtype), torch.zeros_like(gradients)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        return ranks.all_reduce(gradients), state[0] + 1, state[1]


def test_programs_with_other_types_of_state_have_other_identities() -> None:
    identities = {traced(Counts(dtype))[0].identity for dtype in (torch.float32, torch.float64)}
    assert len(identities) == 2
    assert traced(Counts(torch.float64))[0].identity in identities


def test_a_state_is_elementwise_if_it_is_as_long_as_every_bucket() -> None:
    assert elementwise_state(Counts(torch.float32), torch.float32, CPU) == {1}, "one has 64 elements by chance"
    assert elementwise_state(PowerSGD(1), torch.complex64, CPU) == {0}
    assert elementwise_state(comm_hooks.bf16_compress, torch.float32, CPU) == set()


# ---- what is refused -------------------------------------------------------------------------------------------------

SEVERAL = {
    "first": torch.empty(2),
    "other": torch.empty(2, dtype=torch.float64),
    "low.weight": torch.empty(2, dtype=torch.bfloat16),
}


def decomposes(flat: Tensor, ranks: Ranks) -> Tensor:
    """In an operator that has no kernel for 16 bits, which a trace does not tell."""
    return torch.linalg.qr(ranks.all_reduce(flat.view(8, -1))).Q.reshape(-1)[: flat.numel()] * 0 + flat


@dataclasses.dataclass(frozen=True)
class Owing(Counts):
    owed = (0,)


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (decomposes, TypeError, "parameter low.weight, torch.bfloat16 on cpu.*geqrf_cpu.*BFloat16"),
        (lambda flat, ranks: flat.to(torch.float32), TypeError, "parameter other, torch.float64"),
        (Owing(torch.float32), ValueError, r"owed=\(0,\).*those at \[1\]"),
        (Keeps(lambda flat, ranks, error: (flat, error.double())), TypeError, "1 tensors of state as they were given"),
    ],
)
def test_a_hook_is_tried_with_every_dtype_among_the_parameters(hook: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        check_hook(hook, SEVERAL)


def test_an_initial_state_that_is_one_tensor_is_refused() -> None:
    class One(StatefulHook):
        def initial_state(self, gradients: Tensor) -> Any:
            return torch.zeros_like(gradients)

        def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
            return gradients, *state

    with pytest.raises(TypeError, match="must return a tuple of tensors"):
        check_hook(One(), SEVERAL)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        *((functools.partial(TopK, value), f"at most 1, found {value!r}") for value in (0.0, -1.0, 1.5, 2, True, "1")),
        (functools.partial(TopK, fraction=float("nan")), "at most 1, found nan"),
        *((functools.partial(PowerSGD, value), f"1 or more, found {value!r}") for value in (0, -2, 1.5, True, None)),
    ],
)
def test_a_compression_that_could_send_nothing_is_refused(construct: Callable[[], StatefulHook], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct()


def test_a_compression_may_send_everything() -> None:
    assert TopK(1).fraction == 1 and TopK(fraction=1.0).fraction == 1.0 and PowerSGD(rank=1).rank == 1


# ---- what a hook keeps in Python -------------------------------------------------------------------------------------


def mean(gradients: Tensor, ranks: Ranks) -> Tensor:
    return ranks.all_reduce(gradients / ranks.size)


CALLS, CALLED = 0, {"n": 0}


def counts_in_a_global(gradients: Tensor, ranks: Ranks) -> Tensor:
    global CALLS
    CALLS += 1
    return mean(gradients, ranks)


def counts_in_a_globals_entry(gradients: Tensor, ranks: Ranks) -> Tensor:
    CALLED["n"] += 1
    return mean(gradients, ranks)


def counts_in_a_default(gradients: Tensor, ranks: Ranks, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return mean(gradients, ranks)


def counts_in_an_attribute(state: Any, gradients: Tensor, ranks: Ranks) -> Tensor:
    state.step += 1
    return mean(gradients, ranks)


def counts_around() -> Any:
    counts = {"n": 0}

    def hook(gradients: Tensor, ranks: Ranks) -> Tensor:
        counts["n"] += 1
        return mean(gradients, ranks)

    return hook


def wraps(hook: Any) -> Any:
    @functools.wraps(hook)
    def in_float64(gradients: Tensor, ranks: Ranks) -> Any:
        return hook(gradients.double(), ranks).to(gradients.dtype)

    return in_float64


@dataclasses.dataclass(slots=True)
class Slots:
    step: int = 0


class OneSlot:
    __slots__ = "step"

    def __init__(self) -> None:
        self.step = 0


class CountsInAGlobal:
    def __call__(self, gradients: Tensor, ranks: Ranks) -> Tensor:
        CALLED["n"] += 1
        return mean(gradients, ranks)


class Keeper:
    """Keeps several things, of which `function` changes some."""

    def __init__(self, function: Callable[["Keeper", Tensor], object]) -> None:
        self.function = function
        self.calls, self.seen, self.state = [0], {1}, SimpleNamespace(inner=SimpleNamespace(step=0))
        self.cache: dict[Any, Any] = {}
        self.log: list[Any] = []
        self.itself = self

    def __call__(self, gradients: Tensor, ranks: Ranks) -> Tensor:
        self.function(self, gradients)
        return mean(gradients, ranks)

    def hook(self, gradients: Tensor, ranks: Ranks) -> Tensor:
        return self(gradients, ranks)


def _increment(keeper: Keeper, _: Tensor) -> None:
    keeper.calls[0] += 1


@pytest.mark.parametrize(
    ("hook", "what"),
    [
        (functools.partial(counts_in_an_attribute, SimpleNamespace(step=0)), r"args\[0\].step"),
        (functools.partial(counts_in_an_attribute, Slots()), r"args\[0\].step"),
        (counts_around(), r"counts\['n'\]"),
        (wraps(counts_around()), r"hook.counts\['n'\]"),
        (counts_in_a_global, "CALLS"),
        (counts_in_a_globals_entry, r"CALLED\['n'\]"),
        (counts_in_a_default, r"calls\[0\]"),
        (CountsInAGlobal(), r"CALLED\['n'\]"),
        (functools.partial(counts_in_an_attribute, OneSlot()), r"args\[0\].step"),
        (Keeper(_increment), r"calls\[0\]"),
        (Keeper(_increment).hook, r"__self__.calls\[0\]"),
        (Keeper(lambda keeper, _: keeper.seen.add(len(keeper.seen) + 1)), "seen"),
        (
            Keeper(lambda keeper, _: setattr(keeper.state.inner, "step", keeper.state.inner.step + 1)),
            "state.inner.step",
        ),
        (Keeper(lambda keeper, _: setattr(keeper, "log", [*keeper.log, 1])), r"log\[\d\]"),
    ],
)
def test_a_hook_that_counts_in_python_is_refused_wherever_it_counts(hook: Any, what: str) -> None:
    with pytest.raises(ValueError, match=rf"changes its {what} in each call, and is traced once .* must be tensors"):
        check_hook(hook, {"weight": torch.empty(3)})


@pytest.mark.parametrize(
    "function",
    [
        lambda keeper, flat: keeper.cache.setdefault((flat.shape, flat.dtype), object()),
        lambda keeper, flat: vars(keeper).update(
            device=flat.device, shape=tuple(flat.shape), numel=1000 + flat.numel()
        ),
        lambda keeper, flat: vars(keeper).update(log=[float(flat.numel())]),
        lambda keeper, flat: logging.getLogger("hook").debug("%s", flat.shape),
    ],
    ids=["a cache", "the same values", "an equal list", "a logger"],
)
def test_a_hook_may_keep_what_stays_the_same(function: Callable[[Keeper, Tensor], object]) -> None:
    for hook in (Keeper(function), Keeper(function).hook, functools.partial(Keeper(function))):
        check_hook(hook, SEVERAL)


def test_a_hook_may_hold_more_than_is_looked_into() -> None:
    keeper = Keeper(lambda keeper, _: None)
    keeper.log = [[[[[[[number]]]]]] for number in range(3000)]
    check_hook(keeper, {"weight": torch.empty(3)})
