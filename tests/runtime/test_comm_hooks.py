"""Communication hooks that are part of the graph, in both wrappers."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    Mlp,
    TokenModel,
    assert_equal_on_all_ranks,
    assert_gradients,
    local_gradients,
    mean_by_hand,
    row_batch,
    token_batch,
    wrappers,
)
from torch import Tensor, nn

from compiled_ddp import comm_hooks
from compiled_ddp.comm_hooks import PowerSGD, Ranks, StatefulHook, TopK
from compiled_ddp.torch_private.for_tests import generated_code
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def plain(gradients: Tensor, ranks: Ranks) -> Tensor:
    return ranks.all_reduce(gradients / ranks.size)


def wrap(wrapper: str, model: nn.Module, hook: Any, **options: Any) -> nn.Module:
    return wrappers([wrapper])[wrapper](model, comm_hook=hook, **options)


# ---- without state ---------------------------------------------------------------------------------------------------


def _by_hook(rank: int, wrapper: str, hook: Any, precision: float) -> None:
    """Accumulation, a .grad to fold in, and a step that one rank skips."""
    ddp = wrap(wrapper, Mlp(), hook)
    for step in range(4):

        def loss(module: nn.Module) -> Tensor:
            skipped = step == 3 and rank == 1  # noqa: B023
            return module(row_batch(rank, step)).square().sum() * (0.0 if skipped else 1.0)  # noqa: B023

        mean = mean_by_hand(ddp, loss)
        before = {n: 0.0 if p.grad is None else p.grad.double().clone() for n, p in ddp.module.named_parameters()}
        if step == 3 and rank == 1:
            ddp.skip_step()
        else:
            loss(ddp).backward()
        expected = {name: mean[name] + before[name] for name in mean}
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        assert_gradients(ddp.module, expected, rtol=precision, atol=precision * largest)
        if step == 1:
            ddp.zero_grad()
    if wrapper == "compile_ddp":
        assert {section.origin for section in ddp.plan.sections} == {"graph"}
        assert not ddp.explain().fallback_reasons
    assert f"The communication hook {hook.__name__} reduces each bucket" in str(ddp.explain())


@pytest.mark.parametrize(
    ("hook", "precision"), [(plain, 1e-5), (comm_hooks.bf16_compress, 2e-2), (comm_hooks.fp16_compress, 2e-3)]
)
@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_are_what_the_hook_makes_of_them(ranks2: RankPool, wrapper: str, hook: Any, precision: float) -> None:
    ranks2.run(_by_hook, wrapper, hook, precision)


def test_the_hook_divides_by_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_by_hook, "compile_ddp", plain, 1e-5)


def _in_float32(rank: int, wrapper: str) -> None:
    """Gradients of bfloat16 whose sum over ranks in bfloat16 would be rounded: 1 + 1/256 is not one of its numbers."""
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    ddp = wrap(wrapper, model, comm_hooks.fp32_reduce)
    x = torch.full((1, 4), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    ddp(x).sum().backward()
    others = dist.get_world_size() - 1
    expected = torch.full((1, 4), (1 + others * 2.0**-8) / (1 + others)).to(torch.bfloat16)
    assert torch.equal(model.weight.grad, expected), model.weight.grad


@pytest.mark.parametrize("wrapper", BOTH)
def test_low_precision_gradients_are_reduced_in_float32(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_in_float32, wrapper)


@pytest.mark.parametrize("wrapper", BOTH)
def test_low_precision_gradients_are_reduced_in_float32_on_three_ranks(ranks3: RankPool, wrapper: str) -> None:
    ranks3.run(_in_float32, wrapper)


class Broken(nn.Module):
    """A graph on both sides of a break, the second of which one rank runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.eagerly = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return (self.in_eager_code(x) if self.eagerly else self.second(x)).square().sum()

    @torch.compiler.disable
    def in_eager_code(self, x: Tensor) -> Tensor:
        return self.second(x)


def _partly_by_hooks(rank: int, hook: Any) -> None:
    """One rank's graph goes by hooks from the second step on: both must launch alike."""
    ddp = wrap("compile_ddp", Broken(), hook)
    for step in range(4):
        ddp.module.eagerly = step > 0 and rank == 1
        mean = mean_by_hand(ddp, lambda module, step=step: module(row_batch(rank, step)))
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp(row_batch(rank, step)).backward()
        assert_gradients(ddp.module, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hook", [plain, TopK(1.0)])
def test_a_rank_by_hooks_and_one_with_graphs_reduce_together(ranks2: RankPool, hook: Any) -> None:
    ranks2.run(_partly_by_hooks, hook)


# ---- with state ------------------------------------------------------------------------------------------------------


def _error_feedback(rank: int, wrapper: str) -> None:
    """What is not sent in one step is sent later: nothing of a gradient is lost."""
    ddp = wrap(wrapper, Mlp(), TopK(0.3))
    sent = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in ddp.module.named_parameters()}
    produced = copy.deepcopy(sent)
    for step in range(5):
        x = row_batch(rank, step)
        for name, gradient in local_gradients(copy.deepcopy(ddp.module), lambda m, x=x: m(x).square().sum()).items():
            produced[name] += gradient
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        for name, parameter in ddp.module.named_parameters():
            sent[name] += parameter.grad
    state = ddp.comm_hook_state_dict()
    assert sorted(name for bucket in state for name in bucket.split(",")) == sorted(sent)
    left = {}
    for bucket, (error,) in state.items():
        names = bucket.split(",")
        sizes = [ddp.module.get_parameter(name).numel() for name in names]
        for name, part in zip(names, error.split(sizes), strict=True):
            left[name] = part.view(ddp.module.get_parameter(name).shape).double()
    assert any(error.abs().max() > 0 for (error,) in state.values()), "everything was sent"
    for name, total in produced.items():
        local_rest = total - left[name]  # what this rank has sent in all
        dist.all_reduce(local_rest)
        torch.testing.assert_close(sent[name], local_rest / dist.get_world_size(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_top_k_does_not_send_is_kept_for_later_steps(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_error_feedback, wrapper)


@pytest.mark.parametrize("wrapper", BOTH)
def test_top_k_divides_what_it_sends_and_keeps_by_three_ranks(ranks3: RankPool, wrapper: str) -> None:
    ranks3.run(_error_feedback, wrapper)


def _power(rank: int, wrapper: str) -> list[float]:
    """Equal batches in every step: the mean of the steps' gradients approaches the true one."""
    ddp = wrap(wrapper, TokenModel(), PowerSGD(rank=4))
    batch = token_batch(rank)
    mean = mean_by_hand(ddp, lambda module: module(*batch))
    total = {name: torch.zeros_like(gradient) for name, gradient in mean.items()}
    errors = []
    for step in range(1, 13):
        ddp.zero_grad()
        ddp(*batch).backward()
        for name, parameter in ddp.module.named_parameters():
            total[name] += parameter.grad
        difference = sum((total[name] / step - mean[name]).square().sum() for name in mean)
        errors.append((difference / sum(gradient.square().sum() for gradient in mean.values())).item())
        assert_equal_on_all_ranks([parameter.grad.tolist() for parameter in ddp.module.parameters()])
    return errors


@pytest.mark.parametrize("wrapper", BOTH)
def test_power_sgd_approaches_the_mean_of_a_repeated_gradient(ranks2: RankPool, wrapper: str) -> None:
    for errors in ranks2.run(_power, wrapper):
        assert errors[0] > 1e-3, "nothing was lost"
        assert errors[-1] < errors[0] / 4, errors


@pytest.mark.parametrize("wrapper", BOTH)
def test_power_sgd_approaches_the_mean_over_three_ranks(ranks3: RankPool, wrapper: str) -> None:
    for errors in ranks3.run(_power, wrapper):
        assert errors[0] > 1e-3, "nothing was lost"
        assert errors[-1] < errors[0] / 4, errors


def _resumes(rank: int) -> None:
    """A wrapper that takes up the state goes on as the first one would have."""
    made = [wrap("compile_ddp", Mlp(), TopK(0.2))]
    made[0](row_batch(rank)).square().sum().backward()
    second = Mlp()
    second.load_state_dict(made[0].module.state_dict())
    made.append(wrap("compile_ddp", second, TopK(0.2)))
    made[1].load_comm_hook_state_dict(made[0].comm_hook_state_dict())
    for ddp in made:
        ddp.zero_grad()
        ddp(row_batch(rank, 1)).square().sum().backward()
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with pytest.raises(RuntimeError, match="no comm_hook"):
        wrappers(["EagerDDP"])["EagerDDP"](Mlp()).load_comm_hook_state_dict({})


def test_a_hooks_state_can_be_saved_and_taken_up(ranks2: RankPool) -> None:
    ranks2.run(_resumes)


# ---- the generated code ----------------------------------------------------------------------------------------------


def _code(rank: int, hook: Any) -> str:
    ddp = wrap("compile_ddp", Mlp(), hook, backend="inductor", bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
    mean = mean_by_hand(ddp, lambda module: module(row_batch(rank)).square().mean())
    *_, backward = generated_code(lambda: ddp(row_batch(rank)).square().mean().backward())
    assert_gradients(ddp.module, mean, rtol=3e-2, atol=3e-3)
    return backward


@pytest.mark.inductor
def test_bfloat16_is_written_by_the_kernels_that_make_the_gradients(ranks2: RankPool) -> None:
    """No kernel reads a float32 bucket to write a bfloat16 one."""
    for code in ranks2.run(_code, comm_hooks.bf16_compress):
        calls = code[code.index("def call(") :]
        launches = [line for line in calls.splitlines() if "_c10d_functional.all_reduce" in line]
        assert len(launches) > 2
        assert calls.count("torch.bfloat16") >= len(launches) - 1, "buckets are allocated in bfloat16"
        order = [
            "launch" if "all_reduce" in line else "wait"
            for line in calls.splitlines()
            if "_c10d_functional.all_reduce" in line or "_c10d_functional.wait_tensor" in line
        ]
        assert order == ["launch"] * len(launches) + ["wait"] * len(launches), "all launches before the first wait"


# ---- what is refused -------------------------------------------------------------------------------------------------


class Grows(StatefulHook):
    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients,)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        return gradients, torch.cat([*state, gradients])


OUTSIDE = torch.ones(64)

REFUSED = [
    (lambda gradients, ranks: gradients[:-1], TypeError, r"must return the reduced gradients.*found a tensor of shape"),
    (lambda gradients, ranks: gradients.to(torch.float64), TypeError, "found a tensor of shape .*float64"),
    (lambda gradients, ranks: None, TypeError, "found None"),
    (lambda gradients, ranks: gradients * OUTSIDE, ValueError, "keep it as state"),
    (Grows(), TypeError, "1 tensors of state as they were given"),
    (7, TypeError, "comm_hook must be a function"),
]


def _refused(rank: int, wrapper: str) -> None:
    for hook, error, message in REFUSED:
        with pytest.raises(error, match=message):
            wrap(wrapper, Mlp(), hook)
    with pytest.raises(ValueError, match="returns the mean"):
        wrap(wrapper, Mlp(), plain, reduction="sum")
    with pytest.raises(RuntimeError, match="comm_hook"):  # of another function on each rank
        wrap(wrapper, Mlp(), plain if rank == 0 else comm_hooks.bf16_compress)


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_no_hook_is_refused_on_every_rank(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_refused, wrapper)


# ---- gathers ---------------------------------------------------------------------------------------------------------


def _gathers(rank: int) -> None:
    """Of every dtype, and many at once: torch's own gather on gloo corrupts memory with two in flight."""
    ranks = wrappers(["EagerDDP"])["EagerDDP"](nn.Linear(5, 3))._runtime.communicator.for_hooks()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn):
        for shape in ((3,), (2, 3), (0,)):
            mine = [torch.full(shape, float(owner)).to(dtype) for owner in range(2)]
            gathered = ranks.all_gather(mine[rank])
            assert gathered.dtype == dtype
            assert torch.equal(gathered.float(), torch.cat(mine).float()), (dtype, shape)
    assert not any("gather" in str(event.key) for event in _profile_of_top_k(rank))


def _profile_of_top_k(rank: int) -> Any:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp(), comm_hook=TopK(0.5))
    with torch.profiler.profile() as profile:
        ddp(row_batch(rank)).square().sum().backward()
    events = profile.key_averages()
    assert any("all_reduce" in event.key for event in events)
    return events


def test_on_gloo_gathers_are_sums_of_rows(ranks2: RankPool) -> None:
    ranks2.run(_gathers)
