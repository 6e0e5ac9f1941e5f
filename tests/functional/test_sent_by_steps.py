"""compile_step: what a step sends of its gradients, by a communication hook, and in which buckets, by a plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_whole_step import OPTIMIZERS, Net, batch
from torch import Tensor, nn

from compiled_ddp import SavedPlan, compile_ddp, compile_step
from compiled_ddp.comm_hooks import PowerSGD, TopK, bf16_compress, fp16_compress, fp32_reduce
from compiled_ddp.plan import GradientSpec, contiguous_stride
from ranks import RankPool


def stretched(gradients: Tensor, ranks: Any) -> Tensor:
    """Something that no mean is: its square is sent in half the bytes, and the root is taken of the sum."""
    sent = (gradients * gradients).to(torch.bfloat16)
    return ranks.all_reduce(sent).to(gradients.dtype).sqrt() / ranks.size


def squared(gradients: Tensor, ranks: Any) -> Tensor:
    """The same, in the dtype of the gradients: what is made of the sums may lie where they did."""
    return ranks.all_reduce(gradients * gradients).sqrt() / ranks.size


# Each hook with what it does to a gradient, by hand: before the sum over two ranks, and behind it.
HOOKS: dict[str, tuple[Any, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bf16_compress": (bf16_compress, lambda g: (g / 2).bfloat16(), lambda s: s.float()),
    "fp16_compress": (fp16_compress, lambda g: (g / 2).half(), lambda s: s.float()),
    "stretched": (stretched, lambda g: (g * g).bfloat16(), lambda s: s.float().sqrt() / 2),
    "squared": (squared, lambda g: g * g, lambda s: s.sqrt() / 2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "sharded": {"shard_optimizer": True},
    "pipelined": {"shard_optimizer": True, "pipeline_updates": True},
    "deferred": {"pipeline_updates": True},
    "deferred, accumulated and clipped": {"pipeline_updates": True, "accumulate": 2, "clip_grad_norm": 0.2},
    "accumulated and clipped": {"accumulate": 2, "clip_grad_norm": 0.2},
}


class Hooked:
    """The loop that a step with a hook stands for, by hand."""

    def __init__(self, step: Any, before: Callable[[Tensor], Tensor], behind: Callable[[Tensor], Tensor]) -> None:
        self.model = type(step.model)()
        self.model.load_state_dict(step.model.state_dict())
        self.optimizer = OPTIMIZERS["momentum"](self.model.parameters())
        self.before, self.behind = before, behind

    def step(self, batches: list[Any], clip: float | None = None) -> None:
        for each in batches:
            (self.model(*each) / len(batches)).backward()
        used = [each for each in self.model.parameters() if each.grad is not None]
        for parameter in used:
            assert parameter.grad is not None
            sent = self.before(parameter.grad)
            dist.all_reduce(sent)
            parameter.grad = self.behind(sent)
        if clip is not None:
            nn.utils.clip_grad_norm_(used, clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return compile_step(model, optimizer, **{"backend": "aot_eager", **options})


def sent_dtypes(step: Any) -> set[torch.dtype]:
    _, compiled, _ = step._explained
    return {bucket.dtype for bucket in compiled.reductions[0].plan.buckets if bucket.indices}


# ---- communication hooks ---------------------------------------------------------------------------------------------


def _sends(rank: int, hook: str, options: str) -> str:
    given, before, behind = HOOKS[hook]
    step = made(comm_hook=given, **OPTIONS[options])
    loop, batches = Hooked(step, before, behind), OPTIONS[options].get("accumulate", 1)
    for n in range(3):
        taken = [batch(rank, n * batches + number) for number in range(batches)]
        for each in taken:
            step(*each)
        loop.step(taken, OPTIONS[options].get("clip_grad_norm"))
    found = step.model.state_dict()
    for name, value in loop.model.state_dict().items():
        # Of gradients that round to another number of 16 bits there is one or the other.
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=lambda told, name=name: name + told)
    assert sent_dtypes(step) == {before(torch.ones(1)).dtype}
    everywhere = [torch.empty_like(step.model.scale) for _ in range(2)]
    dist.all_gather(everywhere, step.model.scale.detach())
    assert torch.equal(*everywhere)
    return str(step.explain())


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_makes_of_gradients_is_sent(ranks2: RankPool, hook: str) -> None:
    assert f"Gradients are sent, and averaged, as {hook} has it." in ranks2.run(_sends, hook, "")[0]


@pytest.mark.parametrize("options", [name for name in OPTIONS if name])
def test_with_other_options_too(ranks2: RankPool, options: str) -> None:
    for hook in ("bf16_compress", "squared"):
        ranks2.run(_sends, hook, options)


def _inductor_sends(rank: int, hook: str, options: str) -> None:
    given, before, behind = HOOKS[hook]
    step = made(comm_hook=given, backend="inductor", bucket_cap_mb=0.0001, **OPTIONS[options])
    loop = Hooked(step, before, behind)
    for n in range(4):
        step(*batch(rank, n))
        loop.step([batch(rank, n)])
    for found, value in zip(step.model.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("hook", "options"), [("bf16_compress", ""), pytest.param("squared", "deferred", marks=pytest.mark.slow)]
)
def test_inductors_code_sends_it(ranks2: RankPool, hook: str, options: str) -> None:
    ranks2.run(_inductor_sends, hook, options)


class Small(nn.Module):
    """Parameters of 16 bits, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 3).to(torch.bfloat16)
        self.turn = nn.Parameter(torch.tensor([0.5 + 0.1j, 0.3j, 1.0 - 0.2j]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = (self.narrow(x.to(torch.bfloat16)).float() * self.turn).abs()
        return ((hidden.sum(1) - y) ** 2).mean()


def _sums_in_float32(rank: int) -> None:
    model = Small()
    own = Small()
    step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), comm_hook=fp32_reduce, backend="aot_eager")
    own.load_state_dict(model.state_dict())
    step(*batch(rank, 0))
    own(*batch(rank, 0)).backward()
    for found, parameter in zip(model.parameters(), own.parameters(), strict=True):
        gradient = parameter.grad
        assert gradient is not None
        wide = gradient.clone() if gradient.is_complex() else gradient.float()
        dist.all_reduce(torch.view_as_real(wide) if wide.is_complex() else wide)
        expected = parameter - 0.1 * (wide / 2).to(parameter.dtype)
        torch.testing.assert_close(found, expected.to(parameter.dtype), rtol=1e-2, atol=1e-3)
    assert sent_dtypes(step) == {torch.float32}


def test_16_bits_and_complex_numbers_are_summed_in_float32(ranks2: RankPool) -> None:
    ranks2.run(_sums_in_float32)


def _alone_as_among_others(rank: int) -> None:
    alone = [dist.new_group([each]) for each in range(2)][rank]
    step = made(comm_hook=fp16_compress, process_group=alone)
    loop = Hooked(step, lambda g: g, lambda s: s)
    step(*batch(rank, 0))
    loop.model(*batch(rank, 0)).backward()
    gradient = loop.model.scale.grad
    assert gradient is not None
    with torch.no_grad():
        weighed = gradient.half().float() + 0.1 * loop.model.scale
        torch.testing.assert_close(step.model.scale, loop.model.scale - 0.1 * weighed, rtol=0, atol=1e-7)


def test_a_rank_alone_has_its_hook_too(ranks2: RankPool) -> None:
    ranks2.run(_alone_as_among_others)


def by_largest(gradients: Tensor, ranks: Any) -> Tensor:
    largest = gradients.abs().amax()
    return ranks.all_reduce(gradients / largest) * largest / ranks.size


def with_the_rest(gradients: Tensor, ranks: Any) -> Tensor:
    sent = gradients.to(torch.bfloat16)
    return ranks.all_reduce(sent) / ranks.size + (gradients - sent)


def at_random(gradients: Tensor, ranks: Any) -> Tensor:
    return ranks.all_reduce(gradients + torch.rand_like(gradients)) / ranks.size


def twice(gradients: Tensor, ranks: Any) -> Tensor:
    return (ranks.all_reduce(gradients) + ranks.all_reduce(gradients * 2)) / (3 * ranks.size)


def by_size(gradients: Tensor, ranks: Any) -> Tensor:
    return ranks.all_reduce(gradients / gradients.numel()) * gradients.numel() / ranks.size


def signs(gradients: Tensor, ranks: Any) -> Tensor:
    return ranks.all_reduce(gradients.sign().to(torch.int8)).to(gradients.dtype) / ranks.size


REFUSED = {
    "TopK": (TopK(), "keeps tensors for each bucket"),
    "PowerSGD": (PowerSGD(), "keeps tensors for each bucket"),
    "by_largest": (by_largest, "amax"),
    "with_the_rest": (with_the_rest, "reads what it was given"),
    "at_random": (at_random, "rand"),
    "twice": (twice, "launches 2 collectives"),
    "by_size": (by_size, "does another thing for another number of elements"),
    "signs": (signs, "sends torch.int8"),
}


def _is_refused(rank: int, options: str) -> list[str]:
    told = []
    for hook, _ in REFUSED.values():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            made(comm_hook=hook if rank == 1 else None, **OPTIONS[options])
        told.append(str(caught.value))
        with pytest.raises(RuntimeError, match="comm_hook"):
            made(comm_hook=hook if rank == 1 else bf16_compress)
    with pytest.raises(RuntimeError, match="comm_hook"):
        made(comm_hook=bf16_compress if rank == 1 else fp16_compress)
    step = made(comm_hook=bf16_compress)
    step(*batch(rank, 0))
    return told


@pytest.mark.parametrize("options", ["sharded", "pipelined", "deferred"])
def test_what_is_not_elementwise_is_refused_on_every_rank_where_it_has_a_share(ranks2: RankPool, options: str) -> None:
    for told, (_, why) in zip(ranks2.run(_is_refused, options)[1], REFUSED.values(), strict=True):
        assert why in told, told
        assert "leave out these options" in told, told
        assert "compile_ddp(model, comm_hook=...)" in told


def _buckets_with(rank: int, options: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    step = made(bucket_cap_mb=0.0, **options)
    for n in range(options.get("accumulate", 1)):
        step(*batch(rank, n))
    assert step.plan is not None
    return step.plan.buckets


def test_gradients_are_ready_in_the_order_of_the_backward_whatever_is_done_to_them(ranks2: RankPool) -> None:
    (expected, _) = ranks2.run(_buckets_with, {})
    assert expected[-1] in (("first.weight",), ("first.bias",)) and len(expected) > 4
    for options in ({"comm_hook": stretched}, {"accumulate": 2}, {"accumulate": 2, "shard_optimizer": True}):
        assert ranks2.run(_buckets_with, options)[0] == expected, options


# ---- plans -----------------------------------------------------------------------------------------------------------


def _is_pinned(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    path = Path(folder) / f"plan-{rank}.json"
    ddp = compile_ddp(Net(), bucket_cap_mb=0.0002, backend="aot_eager")
    ddp(*batch(rank, 0)).backward()
    ddp.plan.save(path)
    of_wrapper = SavedPlan.load(path)
    assert len(of_wrapper.buckets) > 1
    step = made(plan=of_wrapper, shard_optimizer=True)
    assert step.plan is None
    step(*batch(rank, 0))
    assert step.plan is not None and step.plan.buckets == of_wrapper.buckets
    step.plan.save(path)
    again = made(plan=SavedPlan.load(path), comm_hook=bf16_compress)
    again(*batch(rank, 0))
    assert again.plan == step.plan
    compile_ddp(Net(), plan=again.plan)
    other = made(bucket_cap_mb=25.0)
    other(*batch(rank, 0))
    assert other.plan is not None and len(other.plan.buckets) == 1
    again.model.first.bias.requires_grad_(False)
    with pytest.raises((ValueError, RuntimeError), match=r"first\.bias is not trained here"):
        again(*batch(rank, 1))
    again.model.first.bias.requires_grad_(True)
    again(*batch(rank, 1))


def test_a_plan_is_pinned(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_is_pinned, str(tmp_path))


def _does_not_fit(rank: int, plan: SavedPlan) -> None:
    with pytest.raises((ValueError, RuntimeError), match="it has no bucket for scale"):
        made(plan=plan if rank else None)
    with pytest.raises(TypeError, match="plan must be a SavedPlan"):
        made(plan="plan.json")
    with pytest.raises(ValueError, match="alternatives"):
        made(plan=plan, bucket_cap_mb=1.0)
    with pytest.raises(ValueError, match="dynamic"):
        made(dynamic=True)


def test_what_does_not_fit_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_does_not_fit, SavedPlan((("other", "float32 [2]"),), (("other",),), 2))


def test_a_bucket_of_a_plan_holds_gradients_of_one_dtype() -> None:
    """Where a file was edited, or saved by a step that sent all of them in one."""
    cpu = torch.device("cpu")
    names = ("a", "b", "c", "d")
    plan = SavedPlan(tuple((name, "") for name in names), (("d", "a"), ("c", "b")), 2)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    gradients = [GradientSpec(n, (2,), contiguous_stride((2,)), dtype, cpu) for n, dtype in enumerate(dtypes)]
    filled = [[names[gradient.index] for gradient in bucket] for bucket in plan.fill(gradients, names)]
    assert filled == [["d", "a"], ["c"], ["b"]]


def _fails_beside(rank: int, options: dict[str, Any]) -> str:
    """What a rank that fails sends comes in the order and the dtypes of what the others send, and gather."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if fails["now"]:
            raise ValueError("no labels")
        result: Tensor = net(x, y)
        return result

    fails, message = {"now": False}, ""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = compile_step(model, optimizer, loss, **{"backend": "aot_eager", **options})
    for n in range(4):
        fails["now"] = n == 2 and rank == 1
        try:
            step(*batch(rank, n))
        except (RuntimeError, ValueError) as error:
            message = str(error)
    everywhere = [torch.empty_like(step.model.scale) for _ in range(2)]
    dist.all_gather(everywhere, step.model.scale.detach())
    assert torch.equal(*everywhere)
    return message


FAILING: dict[str, dict[str, Any]] = {
    **{
        f"{name}, a hook": {"comm_hook": bf16_compress, **OPTIONS[name]}
        for name in ("sharded", "pipelined", "deferred")
    },
    "deferred, clipped": {"pipeline_updates": True, "clip_grad_norm": 0.1},
    "deferred, clipped, inductor": {"pipeline_updates": True, "clip_grad_norm": 0.1, "backend": "inductor"},
    "pipelined, clipped": {"shard_optimizer": True, "pipeline_updates": True, "clip_grad_norm": 0.1},
}


@pytest.mark.parametrize("options", FAILING)
def test_a_rank_that_fails_sends_what_the_others_do(ranks2: RankPool, options: str) -> None:
    other, own = ranks2.run(_fails_beside, FAILING[options], collective_timeout_seconds=30.0)
    assert own == "no labels" and "no labels" in other, (own, other)


class Mixed(nn.Module):
    """Parameters of two dtypes, which a hook sends in one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8).bfloat16(), nn.LayerNorm(8), nn.Linear(8, 1).bfloat16()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.bfloat16()).float())
        return ((self.last(hidden.bfloat16()).float().squeeze(1) - y) ** 2).mean()


def _sends_in_one_dtype(rank: int, options: str, backend: str) -> None:
    torch.manual_seed(0)
    made = []
    for given in ({}, OPTIONS[options]):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        made.append(compile_step(model, optimizer, comm_hook=bf16_compress, backend=backend, **given))
    for n in range(3):
        torch.testing.assert_close(*(step(*batch(rank, n)) for step in made), rtol=1e-2, atol=1e-3)
    if made[1]._in_flight is not None:
        launched = made[1]._in_flight._gathered[:]
        begun, _ = made[1]._in_flight._begin(made[1]._in_flight._buckets)
        assert [each.dtype for each in begun] == [each.dtype for each in launched], "a graph reads either"
        # Sums as they were sent, and parameters of both dtypes in the wider one.
        assert {each.dtype for each in launched} == {torch.bfloat16 if options == "deferred" else torch.float32}
    plain, other = (step.model.state_dict() for step in made)
    for name, value in plain.items():
        # Of gradients that round to another number of 16 bits there is one or the other.
        torch.testing.assert_close(other[name], value, rtol=1e-2, atol=1e-3)
        assert other[name].dtype == value.dtype


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ("sharded", "aot_eager"),
        pytest.param("sharded", "inductor", marks=pytest.mark.slow),
        ("pipelined", "inductor"),
        ("deferred", "aot_eager"),
        ("deferred", "inductor"),
    ],
)
def test_parameters_of_two_dtypes_are_sent_in_one(ranks2: RankPool, options: str, backend: str) -> None:
    ranks2.run(_sends_in_one_dtype, options, backend)
