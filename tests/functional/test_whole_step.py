"""compile_step: a whole step as one graph, held against a loop of plain autograd, means by hand and torch.optim."""

import contextlib
import copy
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from compiled_ddp import EagerDDP, compile_step
from ranks import RankError, RankPool

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), foreach=True),
    # Whose update no graph has:
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Own": lambda p: Own(p, lr=0.1),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
}


DEFAULTS: dict[str, Any] = {"backend": "aot_eager"}


@contextlib.contextmanager
def stepping_with(**options: Any) -> Iterator[None]:
    """Let the steps of these tests be made with other options too."""
    before = dict(DEFAULTS)
    DEFAULTS.update(options)
    try:
        yield
    finally:
        DEFAULTS.clear()
        DEFAULTS.update(before)


class Net(nn.Module):
    """A norm with buffers, a tied weight, a frozen layer, and a scalar."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.same = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.same.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (each.to(self.scale.dtype) for each in (x, y))
        hidden = self.dropout(self.norm(torch.tanh(self.first(x))))
        hidden = self.frozen(self.again(torch.tanh(self.same(hidden))))
        return F.mse_loss(hidden.mean(1) * self.scale, y)


def batch(rank: int, step: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, generator=generator)


class Loop:
    """The loop that a step stands for, by hand."""

    def __init__(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], clip: float | None = None) -> None:
        self.model, self.clip = copy.deepcopy(model), clip
        self.optimizer = make(self.model.parameters())

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None = None) -> "Loop":
        """With a model and an optimizer that there are."""
        loop = cls.__new__(cls)
        loop.model, loop.optimizer, loop.clip = model, optimizer, clip
        return loop

    def step(self, *given: Any) -> Tensor:
        loss: Tensor = self.model(*given)
        loss.backward()
        self.update()
        return loss.detach()

    def update(self) -> None:
        """With the means over ranks of what is in `.grad`: zeros where another rank alone has any."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        has = torch.tensor([float(p.grad is not None) for p in trained])
        dist.all_reduce(has)
        parameters = [parameter for parameter, ranks in zip(trained, has, strict=True) if ranks]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_same(step: Any, loop: Loop) -> None:
    """Weights, buffers and the optimizer's state."""
    found, expected = step.model.state_dict(), loop.model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    of_step, of_loop = step.optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"]
    assert of_step.keys() == of_loop.keys()
    for number, own in of_loop.items():
        of_torch = {name: value for name, value in own.items() if value is not None}
        assert {name for name, value in of_step[number].items() if value is not None} == of_torch.keys()
        for name, value in of_torch.items():
            torch.testing.assert_close(of_step[number][name], value, rtol=1e-5, atol=1e-6, msg=f"{number} {name}")
    assert all(parameter.grad is None for parameter in step.model.parameters())


def graphs(step: Any) -> int:
    return sum(known.graphs for every in step._known.values() for known in every)


def open_files() -> int:
    """How many there are, connections among them, behind what is garbage."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def both(
    kind: str, make: Callable[[], nn.Module] = Net, *, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[Any, Loop]:
    torch.manual_seed(0)  # as the loop's model is copied before rank 0's values are sent
    model = make()
    loop = Loop(model, OPTIMIZERS[kind], options.get("clip_grad_norm"))
    return compile_step(model, optimizer or OPTIMIZERS[kind](model.parameters()), **{**DEFAULTS, **options}), loop


# ---- the same as the loop --------------------------------------------------------------------------------------------


def _trains(rank: int, kind: str, backend: str) -> None:
    step, loop = both(kind, backend=backend)
    schedulers = [torch.optim.lr_scheduler.StepLR(each.optimizer, 2, gamma=0.5) for each in (step, loop)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler")  # of one before the first step
        for n in range(5):
            torch.testing.assert_close(step(*batch(rank, n)), loop.step(*batch(rank, n)))
            assert_same(step, loop)
            for scheduler in schedulers:
                scheduler.step()
    assert graphs(step) == 1


@pytest.mark.parametrize("kind", ["SGD", "momentum", "nesterov", "Adam", "AdamW"])
def test_a_step_is_what_the_loop_does(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_trains, kind, "aot_eager")


def test_inductors_code_is_what_the_loop_does(ranks2: RankPool) -> None:
    ranks2.run(_trains, "AdamW", "inductor")


def _clips(rank: int) -> None:
    for most in (0.01, 100.0):
        step, loop = both("momentum", clip_grad_norm=most)
        for n in range(3):
            step(*batch(rank, n))
            loop.step(*batch(rank, n))
            assert_same(step, loop)


def test_gradients_are_clipped_by_their_norm_over_all_ranks(ranks2: RankPool) -> None:
    ranks2.run(_clips)


def _clips_what_is_infinite(rank: int) -> None:
    """As torch does: what is finite becomes zero where the norm is infinite, and all of it NaN where that is NaN."""
    for too_large in (1e18, float("inf")):
        step, loop = both("SGD", clip_grad_norm=0.1)
        for n in range(3):
            x, y = batch(rank, n)
            if n == 1 and rank == 1:
                y = y * too_large
            step(x, y), loop.step(x, y)
        for found, value in zip(step.model.parameters(), loop.model.parameters(), strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_an_infinite_norm_is_clipped_as_by_torch(ranks2: RankPool) -> None:
    ranks2.run(_clips_what_is_infinite)


def _is_profiled(rank: int) -> None:
    """A profiler around some steps changes nothing, compiles nothing, and sees each bucket by name."""
    step, loop = both("AdamW", bucket_cap_mb=0.0)
    for n in range(12):
        is_seen = n in (4, 5, 11)
        with torch.profiler.profile() if is_seen else contextlib.nullcontext() as profile:
            torch.testing.assert_close(step(*batch(rank, n)), loop.step(*batch(rank, n)))
        if profile is not None:
            named = {event.key for event in profile.key_averages() if event.key.startswith("compiled_ddp: launch")}
            assert any("scale" in name for name in named), named
    assert_same(step, loop)
    assert graphs(step) == 1


def test_a_profiler_around_changes_nothing(ranks2: RankPool) -> None:
    ranks2.run(_is_profiled)


def _between_steps(rank: int) -> None:
    """Whatever users do to a model and an optimizer between two steps, to both."""
    step, loop = both("AdamW", lambda: Net().double())  # Adam's first steps make a rounding error large
    step(*batch(rank, 0))
    loop.step(*batch(rank, 0))

    def change(how: Callable[[nn.Module, torch.optim.Optimizer], None], *, rows: int = 5) -> None:
        for each in (step, loop):
            how(each.model, each.optimizer)
        looked = list[object]()
        for n in (1, 2, 3):
            step(*batch(rank, n, rows))
            loop.step(*batch(rank, n, rows))
            assert_same(step, loop)
            looked.append(step._latest)
        assert looked[1] is looked[2], "where nothing has changed, nothing is looked at anew"

    def set_group(**numbers: Any) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
        return lambda _, optimizer: optimizer.param_groups[0].update(numbers)

    change(set_group(lr=0.3))
    change(set_group(lr=0.05, betas=(0.5, 0.6), eps=1e-3))
    change(set_group(weight_decay=0.5))
    assert graphs(step) == 1
    change(set_group(weight_decay=0.0))
    assert graphs(step) == 2
    change(lambda *_: None, rows=3)  # a last batch that is smaller
    change(lambda model, _: model.eval())
    change(lambda model, _: model.train())
    change(lambda model, _: model.first.weight.data.mul_(0.5))
    change(lambda model, _: setattr(model.first.weight, "data", torch.ones(8, 6).double()))
    change(lambda model, _: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=False))
    change(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    change(lambda model, _: model.scale.requires_grad_(False))
    change(lambda model, _: model.scale.requires_grad_(True))

    def grow(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model.frozen.requires_grad_(True)
        optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p.dim() != 0]
        optimizer.add_param_group({"params": [model.scale], "lr": 0.2})

    change(grow)

    def transpose(model: Any, _: object) -> None:
        model.same.weight.data = model.same.weight.data.t()  # of the same memory

    change(transpose)
    change(transpose)
    change(lambda model, _: setattr(model.norm, "running_mean", torch.ones(8).double()))
    change(lambda model, _: setattr(model.norm, "momentum", 0.5))
    change(lambda model, _: setattr(model, "norm", copy.copy(model.norm)))
    change(lambda model, _: model.norm.register_forward_pre_hook(lambda _, args: (args[0] * 0.9,)) and None)
    kept = step.model.state_dict()["first.weight"].clone()
    every = [each.optimizer.param_groups[0]["params"] for each in (step, loop)]
    for each, parameters in zip((step, loop), every, strict=True):
        each.optimizer.param_groups[0]["params"] = parameters[1:]  # whose state is still there
    step(*batch(rank, 4))
    loop.step(*batch(rank, 4))
    assert torch.equal(step.model.first.weight, kept)
    loop.model.zero_grad()
    for each, parameters in zip((step, loop), every, strict=True):
        each.optimizer.param_groups[0]["params"] = parameters
    change(lambda *_: None)
    change(lambda _, optimizer: optimizer.state.clear())
    change(lambda model, optimizer: optimizer.state[model.scale].update(exp_avg=torch.tensor(0.3).double()))
    change(lambda _, optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0]) and None)
    # An ordinary loop in between, an average of weights, an evaluation and a copy.
    average = torch.optim.swa_utils.AveragedModel(step.model)
    average.update_parameters(step.model)
    before = {name: value.clone() for name, value in average.module.state_dict().items()}
    other = Loop.of(step.model, step.optimizer)
    for n in (7, 8):
        torch.testing.assert_close(other.step(*batch(rank, n)), loop.step(*batch(rank, n)))
    assert_same(step, loop)
    step.model.eval()
    with torch.no_grad():
        step.model(*batch(rank, 9))
    step.model.train()
    copied = copy.deepcopy(step.model)
    change(lambda *_: None)
    assert all(torch.equal(value, average.module.state_dict()[name]) for name, value in before.items())
    assert not torch.equal(copied.first.weight, step.model.first.weight)


def test_changes_between_steps_are_followed(ranks2: RankPool) -> None:
    ranks2.run(_between_steps)


def _learn(optimizers: list[torch.optim.SGD], which: int, loss: Tensor) -> None:
    for each in optimizers:
        each.zero_grad()
    loss.backward()
    for group in optimizers[which].param_groups:
        for parameter in group["params"]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    optimizers[which].step()


def _two_steps(rank: int) -> None:
    """Two models with a step each, one of which reads the other, as a GAN's do."""
    torch.manual_seed(0)
    makes, judges = nn.Linear(4, 4), nn.Linear(4, 1)
    loops = [copy.deepcopy(each) for each in (makes, judges)]

    def loss_of_judge(judge: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = makes(x)
        return F.softplus(judge(made)).mean() + F.softplus(-judge(x)).mean()

    def loss_of_maker(maker: nn.Module, x: Tensor) -> Tensor:
        return F.softplus(-F.linear(maker(x), judges.weight.detach(), judges.bias.detach())).mean()

    options = DEFAULTS
    first = compile_step(judges, torch.optim.SGD(judges.parameters(), lr=0.1), loss_of_judge, **options)
    second = compile_step(makes, torch.optim.SGD(makes.parameters(), lr=0.1), loss_of_maker, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in loops]
    for n in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * n + rank))
        first(x)
        second(x)
        maker, judge = loops
        _learn(optimizers, 1, F.softplus(judge(maker(x).detach())).mean() + F.softplus(-judge(x)).mean())
        _learn(optimizers, 0, F.softplus(-judge(maker(x))).mean())
    for found, expected in zip((makes, judges), loops, strict=True):
        for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_two_models_take_turns(ranks2: RankPool) -> None:
    ranks2.run(_two_steps)


def _in_inference_mode(rank: int) -> None:
    """Around some calls: what is kept from call to call is memory like any other."""
    step, loop = both("AdamW", bucket_cap_mb=0.0)
    for n in range(6):
        with torch.inference_mode(n in (0, 1, 4)):
            found = step(*batch(rank, n))
        torch.testing.assert_close(found.clone(), loop.step(*batch(rank, n)))
    assert_same(step, loop)


def test_inference_mode_around_some_calls_changes_nothing(ranks2: RankPool) -> None:
    ranks2.run(_in_inference_mode)


def _in_two_threads(rank: int) -> list[str]:
    """Two steps of two groups, whose first calls come in the same order, and the others in two threads."""
    made = [both("SGD", process_group=dist.new_group()) for _ in range(2)]
    for step, _ in made:
        step(*batch(rank, 0))
    errors = list[str]()

    def run(step: Any) -> None:
        for n in range(1, 5):
            try:
                step(*batch(rank, n))
            except RuntimeError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=run, args=(step,)) for step, _ in made[:: 1 if rank == 0 else -1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_steps_of_two_threads_end(ranks2: RankPool) -> None:
    """Where they come in another order on another rank that is an error, and no hang."""
    for errors in ranks2.run(_in_two_threads, timeout_seconds=60, collective_timeout_seconds=30):
        assert all("the communicator is" in each or "launched something else" in each for each in errors), errors


class Images(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def _others(rank: int) -> None:
    # Ranks that begin apart, dropout that is drawn anew, what comes with a loss, arguments by name.
    torch.manual_seed(rank)
    model = Net(dropout=0.5)
    step = compile_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda net, x, y, scale: ((loss := net(x, y)) * scale, {"loss": loss, "rows": len(x)}),
        has_aux=True,
        **DEFAULTS,
    )
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, model.first.weight.tolist())
    assert weights[0] == weights[1]
    x, y = batch(rank, 0)
    losses = [step(x, y=y, scale=2.0) for _ in range(3)]
    assert len({value.item() for value, _ in losses}) == 3
    for value, aux in losses:
        assert not value.requires_grad and aux["rows"] == 5
        torch.testing.assert_close(value, 2 * aux["loss"])
    assert graphs(step) == 1

    # channels_last, whose gradients are contiguous
    def of_images() -> nn.Module:
        return Images(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)

    step, loop = both("Adam", of_images)
    for n in range(3):
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(n + rank))
        step(x)
        loop.step(x)
        assert_same(step, loop)
    assert step.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_other_things_that_steps_do(ranks2: RankPool) -> None:
    ranks2.run(_others)


class Moving(nn.Module):
    """A buffer that forward replaces, one that it leaves alone, a number that it reads, and one that counts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4, dtype=dtype), nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.register_buffer("mean", torch.zeros(4, dtype=dtype))
        self.register_buffer("table", torch.arange(4.0, dtype=dtype))
        self.temperature, self.calls = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.layer(x.to(self.scale.dtype)) * self.scale + self.table
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return (hidden / self.temperature).square().mean()


def _follows(rank: int) -> None:
    """What a graph could have kept: numbers of the loss and of modules, buffers that are replaced."""
    step, loop = both("momentum", Moving)
    weight = {"of": 1.0}
    step = compile_step(step.model, step.optimizer, lambda model, x: model(x) * weight["of"], **DEFAULTS)
    bare = loop.model
    loop.model = nn.Module()
    loop.model.inner = bare
    loop.model.forward = lambda x: bare(x) * weight["of"]
    loop.model.state_dict = bare.state_dict
    for n, (of, temperature) in enumerate([(1.0, 1.0), (2.0, 1.0), (2.0, 3.0), (0.5, 3.0), (0.5, 3.0), (0.5, 3.0)]):
        weight["of"] = of
        step.model.temperature = bare.temperature = temperature
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * n + rank))
        torch.testing.assert_close(step(x), loop.step(x))
        assert_same(step, loop)
    assert graphs(step) == 4  # and not one for each call that forward has counted
    with torch.no_grad():
        step.model(x)


def test_numbers_of_losses_and_modules_and_replaced_buffers_are_followed(ranks2: RankPool) -> None:
    ranks2.run(_follows)


def _in_half(rank: int, dtype: torch.dtype) -> None:
    """A parameter of one number beside a loss of one number, both in 16 bits, to which no learning rate is rounded."""
    torch.manual_seed(0)
    model = Moving(dtype)
    twin = copy.deepcopy(model).float()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, betas=(0.9, 0.999)) for each in (model, twin)]
    step = compile_step(model, optimizers[0], **DEFAULTS, clip_grad_norm=1.0)
    loop = Loop.of(twin, optimizers[1], clip=1.0)
    for n in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * n + rank))
        loss, expected = step(x), loop.step(x)
        assert loss.data_ptr() != model.scale.data_ptr() and loss.dtype == dtype
        torch.testing.assert_close(loss.float(), expected.float(), rtol=3e-2, atol=3e-2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=3e-2, atol=1e-2)
    state = optimizers[0].state[model.layer.weight]
    assert state["exp_avg_sq"].dtype == dtype and state["step"].item() == 4
    assert state["exp_avg_sq"].sum() < 1e-2  # a beta of 0.999 is 1 in bfloat16, and nothing would decay


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_parameters_of_other_dtypes(ranks2: RankPool, dtype: torch.dtype) -> None:
    ranks2.run(_in_half, dtype)


def _in_half_by_sgd(rank: int, kind: str, dtype: torch.dtype) -> None:
    """With more elements than torch's vectors have, whose fused SGD is wrong in 16 bits on the CPU."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32).to(dtype)
    twin = copy.deepcopy(model).float()
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (model, twin)]
    step = compile_step(model, optimizers[0], lambda net, x: net(x).float().square().mean(), **DEFAULTS)
    before = twin.weight.detach().clone()
    for n in range(4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * n + rank))
        step(x.to(dtype))
        twin(x).square().mean().backward()
        for parameter in twin.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizers[1].step()
        optimizers[1].zero_grad()
    moved, expected = model.weight.detach().float() - before, twin.weight.detach() - before
    assert (moved - expected).norm() < 0.3 * expected.norm()  # of what the fault left nothing, or 0.8 were off


@pytest.mark.parametrize("kind", ["SGD", "momentum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sgd_in_half_precision(ranks2: RankPool, kind: str, dtype: torch.dtype) -> None:
    ranks2.run(_in_half_by_sgd, kind, dtype)


# ---- several batches in an update, and parameters that a batch does not use ------------------------------------------


def _accumulates(rank: int, kind: str, backend: str) -> None:
    """Three batches an update, then two, which `flush` ends, then three again: each is the mean of its batches."""
    step, loop = both(kind, accumulate=3, clip_grad_norm=0.5, backend=backend)
    for _ in range(2):
        begins = 0
        for ends, batches in ((3, 3), (5, 2)):
            for n in range(begins, ends):
                before = [each.detach().clone() for each in step.model.parameters()]
                loss = loop.model(*batch(rank, n))
                (loss / batches).backward()
                torch.testing.assert_close(step(*batch(rank, n)), loss.detach())
                is_update = n == 2
                are_same = all(map(torch.equal, before, step.model.parameters()))
                assert are_same != is_update
            if batches == 2:
                assert "3 calls make an update; 2 were made for the next one" in step.explain()
                step.flush()
                step.flush()  # nothing is left
            loop.update()
            assert_same(step, loop)
            begins = ends
    assert graphs(step) == 3


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_an_update_of_several_batches_is_that_of_their_mean(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_accumulates, kind, "aot_eager")


def test_inductors_code_adds_up_batches(ranks2: RankPool) -> None:
    ranks2.run(_accumulates, "AdamW", "inductor")


class Branches(nn.Module):
    """Three parts, of which a batch takes those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = self.parts[name](x)
        return x.square().mean()


def _uses(rank: int, kind: str, accumulate: int) -> None:
    """Part c, in the first steps, on no rank; b on one alone; with other parts in a later micro-batch."""
    step, loop = both(kind, Branches, accumulate=accumulate)
    for n, names in enumerate(("ab" if rank else "a", "a", "b" if rank else "ab", "bc", "ca", "c" if rank else "ab")):
        for part in range(accumulate):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * n + rank + 5 * part))
            taken = names[part:] or names
            loss = loop.model(x, taken)
            (loss / accumulate).backward()
            torch.testing.assert_close(step(x, taken), loss.detach())
        loop.update()
        assert_same(step, loop)
    assert len(step.optimizer.state) == 6
    told = step.explain()
    assert ("one graph. Adagrad.step() is called behind it" in told) == (kind == "Adagrad"), told
    first = "c" if (rank, accumulate) == (0, 1) else "a"
    assert f"The latest batch of this rank did not use parts.{first}.weight" in told, told


@pytest.mark.parametrize(("kind", "accumulate"), [("momentum", 1), ("Adam", 2), ("Adagrad", 2)])
def test_a_parameter_that_no_rank_uses_is_left_as_it_is(ranks2: RankPool, kind: str, accumulate: int) -> None:
    ranks2.run(_uses, kind, accumulate)


# ---- updates outside of the graph ------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    """With a step of its own."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.99)


def _outside(rank: int, kind: str) -> None:
    step, loop = both(kind, clip_grad_norm=1.0)
    seen: dict[torch.optim.Optimizer, list[float]] = {step.optimizer: [], loop.optimizer: []}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen[optimizer].append(optimizer.param_groups[0]["params"][0].grad.sum().item())

    for n in range(4):
        if n == 2:
            for each in (step, loop):
                each.optimizer.register_step_pre_hook(note)
        torch.testing.assert_close(step(*batch(rank, n)), loop.step(*batch(rank, n)))
        assert_same(step, loop)
    assert seen[step.optimizer] and seen[step.optimizer] == pytest.approx(seen[loop.optimizer])
    told = step.explain()
    assert f"{type(step.optimizer).__name__}.step() is called behind it: it " in told and "1 all-reduce" in told, told


@pytest.mark.parametrize("kind", ["Adagrad", "Own", "dampened", "AdamW"])
def test_any_other_optimizer_takes_its_own_step(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_outside, kind)


def _complex(rank: int) -> None:
    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = net(x).abs().mean()
        return loss

    step, loop = both("Adam", lambda: nn.Linear(3, 2, dtype=torch.complex64), loss_fn=loss_of)
    for n in range(3):
        x = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(10 * n + rank))
        loss = loss_of(loop.model, x)
        torch.testing.assert_close(step(x), loss.detach())
        loss.backward()
        loop.update()
        assert_same(step, loop)
    assert "it has complex parameters" in step.explain()


def test_complex_parameters_are_updated_outside(ranks2: RankPool) -> None:
    ranks2.run(_complex)


def _scales(rank: int, kind: str) -> None:
    """A GradScaler: its factor is taken back, and what is infinite on one rank alone is applied on none."""
    step, loop = both(kind, Branches, scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for n in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * n + rank))
        is_infinite = n in (0, 3)
        if is_infinite and rank == 1:
            x *= float("inf")
        before = [each.detach().clone() for each in step.model.parameters()]
        loss = step(x, "ab")
        scaled = scaler.scale(loop.model(x, "ab"))
        torch.testing.assert_close(loss * scaler.get_scale(), scaled.detach(), equal_nan=True)
        scaled.backward()
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        assert_same(step, loop)
        assert step._scaler.state_dict() == scaler.state_dict()
        assert is_infinite == all(map(torch.equal, before, step.model.parameters()))


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_a_scaler_leaves_out_what_is_infinite_on_one_rank(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_scales, kind)


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def _refused(rank: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refuses(error: type[Exception], match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=match), _unchanged(model):
            compile_step(*args, **options)

    refuses(TypeError, "takes a model", optimizer, model)
    refuses(TypeError, "an optimizer of torch.optim's, found Net", model, model)
    refuses(TypeError, "LBFGS calls the loss itself", model, torch.optim.LBFGS(model.parameters()))
    refuses(ValueError, "accumulate must be a number of calls, 1 or more, found 0", model, optimizer, accumulate=0)
    refuses(TypeError, "scaler must be a torch.amp.GradScaler", model, optimizer, scaler=2.0)
    refuses(TypeError, "the bare model", EagerDDP(copy.deepcopy(model)), optimizer)
    refuses(ValueError, "clip_grad_norm must be a positive number", model, optimizer, clip_grad_norm=-1.0)
    refuses(TypeError, "did you mean|unexpected", model, optimizer, process_grup=None)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    refuses(ValueError, "is none of the model's", model, other)
    handle = model.first.weight.register_hook(lambda gradient: gradient)
    refuses(ValueError, r"first\.weight has hooks on its gradient", model, optimizer)
    handle.remove()
    fine = compile_step(model, optimizer, **DEFAULTS)
    fine(*batch(rank, 0))
    handle = model.scale.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match="scale has hooks on its gradient"):
        fine(*batch(rank, 1))
    handle.remove()
    fine(*batch(rank, 2))


def test_what_no_graph_can_do_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_refused)


def _differ(rank: int) -> None:
    model = nn.Linear(3, 2 + rank)
    compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ranks_with_other_models_are_told(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="no step was made, on any rank"):
        ranks2.run(_differ)


def _raises(rank: int, kind: str, accumulate: int, fails_at: int) -> str:
    """Rank 1 fails in one micro-batch; behind the error each rank begins an update anew."""
    torch.manual_seed(0)
    model = Net()
    fails = {"now": False}

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if fails["now"]:
            raise ValueError("no labels")
        result: Tensor = net(x, y)
        return result

    options = {**DEFAULTS, "accumulate": accumulate}
    step = compile_step(model, OPTIMIZERS[kind](model.parameters()), loss, **options)
    for n in range(accumulate):
        step(*batch(rank, n))
    before = step.optimizer.state_dict()["state"][0]["step"].item()
    model.eval()  # a micro-batch that came before may have changed running means
    message = ""
    with _unchanged(model):
        for n in range(accumulate):
            fails["now"] = rank == 1 and n == fails_at
            try:
                step(*batch(rank, n))
            except (RuntimeError, ValueError) as error:
                message = str(error)
                break
    assert step.optimizer.state_dict()["state"][0]["step"].item() == before
    fails["now"] = False
    loop = Loop(model, OPTIMIZERS[kind])
    loop.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    for n in range(accumulate):  # of which none is one that was held before
        step(*batch(rank, 2 + n))
        (loop.model(*batch(rank, 2 + n)) / accumulate).backward()
    loop.update()
    assert_same(step, loop)
    return message


@pytest.mark.parametrize(
    ("kind", "accumulate", "fails_at"), [("AdamW", 1, 0), ("AdamW", 3, 2), ("AdamW", 3, 0), ("Adagrad", 1, 0)]
)
def test_a_step_that_raises_changes_nothing_on_any_rank(
    ranks2: RankPool, kind: str, accumulate: int, fails_at: int
) -> None:
    first, second = ranks2.run(_raises, kind, accumulate, fails_at)
    assert "no labels" in first and "no labels" in second


class Fails(torch.optim.RMSprop):
    """Whose second update raises on rank 1; it is none that graphs have."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        if self.updates == 2 and dist.get_rank() == 1:
            raise MemoryError("no memory left")
        return super().step(closure)


def _raises_in_an_update(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, told = nn.Linear(3, 2), []
    step = compile_step(model, Fails(model.parameters(), lr=0.1), _of_outputs, backend="aot_eager")
    for n in range(4):
        try:
            step(torch.full((2, 3), 1.0 + rank + n))
            told.append("")
        except (MemoryError, RuntimeError) as error:
            told.append(str(error))
    return told


def _of_outputs(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().sum()
    return loss


def test_an_update_outside_that_raises_on_one_rank_is_told_on_all_in_the_next_call(ranks2: RankPool) -> None:
    first, second = ranks2.run(_raises_in_an_update)
    assert first[:2] == ["", ""] and second[:2] == ["", "no memory left"]
    assert "Fails.step() has raised in the call before" in first[2] and "Load the latest checkpoint" in second[2]
    assert first[3] == second[3] == ""


def _raises_in_graph(rank: int, accumulate: int) -> str:
    """Rank 1's first micro-batch asks for a row that is not there, which no trace sees."""
    step, loop = both("AdamW", lambda: nn.Embedding(4, 3), accumulate=accumulate, loss_fn=_of_rows)
    message = ""
    for is_wrong in (False, True, False):
        for n in range(accumulate):
            rows = torch.tensor([9 if is_wrong and rank == 1 and n == 0 else rank, n])
            try:
                step(rows)
            except (RuntimeError, IndexError) as error:
                message = str(error)
                break
            if not is_wrong:
                (_of_rows(loop.model, rows) / accumulate).backward()
        if not is_wrong:
            loop.update()
    assert_same(step, loop)
    return message


def _of_rows(net: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = net(rows).square().sum()
    return loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_graph_raises_is_raised_on_every_rank(ranks2: RankPool, accumulate: int) -> None:
    first, second = ranks2.run(_raises_in_graph, accumulate)
    assert "out of range" in first and "out of range" in second
