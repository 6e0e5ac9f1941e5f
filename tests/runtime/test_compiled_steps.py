"""torch.compile around what calls a wrapper: Dynamo traces nothing of the package, and every step is right.

[Note: never traced] in compiled_ddp/torch_private/dynamo.py.
"""

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, ThreeEqualBlocks, expected_mean, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import compiled_ddp
import compiled_ddp.passes
from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import Ranks
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
STEPS = 3
FOLDERS = tuple(f"{Path(package.__file__).parent}/" for package in (compiled_ddp, compiled_ddp.passes))

Step = Callable[[Tensor], Any]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Dynamo traces something in here, and nothing of the package."""
    with torch_private.for_tests.noting_traced_code() as traced:
        yield
    assert traced, "nothing was compiled"
    # A dataclass writes its methods into a file "<string>", so what Dynamo has traced below our frames counts too.
    own = {f"{code.co_filename}:{code.co_name}" for code in traced if code.co_filename.startswith((*FOLDERS, "<str"))}
    assert not own, sorted(own)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


# ---- what is compiled ------------------------------------------------------------------------------------------------
# Each makes a step out of a wrapper and an optimizer; `compiled` is torch.compile with a backend.


def whole_step(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(ddp, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return compiled(step)


def whole_step_with_clipping(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    def step(x: Tensor) -> None:
        loss_of(ddp, x).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1e6)
        optimizer.step()
        ddp.zero_grad()

    return compiled(step)


def gradients_kept_zero(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    def step(x: Tensor) -> None:
        loss_of(ddp, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return compiled(step)


def accumulation(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, x[:1]).backward()
        loss_of(ddp, x[1:]).backward()
        optimizer.step()

    return compiled(step)


def optimizer_outside(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    @compiled
    def forward_and_backward(x: Tensor) -> None:
        loss_of(ddp, x).backward()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        forward_and_backward(x)
        optimizer.step()

    return step


def accumulation_around(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    @compiled
    def forward_and_backward(x: Tensor) -> None:
        loss_of(ddp, x).backward()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with ddp.no_sync():
            forward_and_backward(x[:1])
        forward_and_backward(x[1:])
        optimizer.step()

    return step


def loss_alone(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    loss = compiled(lambda outputs: outputs.square().sum())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        loss(ddp(x)).backward()
        optimizer.step()

    return step


def forward_alone(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    forward = compiled(lambda x: loss_of(ddp, x))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        forward(x).backward()
        optimizer.step()

    return step


def backward_alone(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    backward = compiled(lambda loss: loss.backward())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(loss_of(ddp, x))
        optimizer.step()

    return step


def wrapper_itself(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    compiled_again = compiled(ddp)

    @compiled  # torch.compile(ddp) has nothing to trace by itself
    def loss(outputs: Tensor) -> Tensor:
        return outputs.square().sum()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        loss(compiled_again(x)).backward()
        optimizer.step()

    return step


def step_with_weight_and_passengers(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    ranks = dist.get_world_size()

    @compiled
    def forward_and_backward(x: Tensor) -> Tensor:
        loss = loss_of(ddp, x)
        ddp.set_weight(2.0)
        ddp.piggyback(rows=len(x))
        loss.backward()
        return ddp.piggybacked["rows"]

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        assert forward_and_backward(x) == ranks * len(x)
        optimizer.step()

    return step


def step_with_questions(ddp: Any, optimizer: torch.optim.Optimizer, compiled: Compile) -> Step:
    def step(x: Tensor) -> tuple[Any, ...]:
        optimizer.zero_grad()
        ddp.train()
        loss = loss_of(ddp, x) * ddp.scale + 0.0 * ddp.head.weight.sum().detach()
        loss.backward()
        optimizer.step()
        told = str(ddp.explain()), ddp.stats(), ddp.device, ddp.plan, ddp.state_dict(), ddp.reduction
        return *told, ddp.abandon_backward(), ddp.doubled(loss.detach())

    return compiled(step)


KINDS: dict[str, Callable[..., Step]] = {
    kind.__name__: kind
    for kind in (
        whole_step,
        whole_step_with_clipping,
        gradients_kept_zero,
        accumulation,
        accumulation_around,
        loss_alone,
        forward_alone,
        backward_alone,
        wrapper_itself,
        step_with_questions,
    )
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
}


class Model(Mlp):
    scale = 1.0

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * x


def train(ddp: Any, make: Callable[..., Step], backend: str, optimizer: str = "SGD", **check: Any) -> None:
    """Several steps, each compared with plain autograd, averaged by hand, and the same optimizer outside of any graph.

    `loss` (module, x), in `check`, is the loss of the reference; `prepare` is called with the wrapper first.
    """
    loss = check.get("loss", loss_of)
    reference = copy.deepcopy(ddp.module)
    make_optimizer = OPTIMIZERS[optimizer]
    optimizer_by_hand = make_optimizer(reference.parameters())
    step = make(ddp, make_optimizer(ddp.parameters()), functools.partial(torch.compile, backend=backend))
    for number in range(STEPS):
        x = row_batch(dist.get_rank(), number)
        expected = expected_mean(reference, lambda module: loss(module, x))  # noqa: B023
        for name, parameter in reference.named_parameters():
            parameter.grad = expected[name].to(parameter.dtype)
        optimizer_by_hand.step()
        with untraced() if number == 0 else contextlib.nullcontext():
            step(x)
        torch.testing.assert_close(ddp.module.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


def _train(
    rank: int, wrapper: str, kind: str, backend: str, optimizer: str = "SGD", options: dict[str, Any] | None = None
) -> None:
    train(wrappers([wrapper])[wrapper](Model(), **(options or {})), KINDS[kind], backend, optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_every_step_is_right_and_nothing_of_the_package_is_traced(wrapper: str, kind: str, ranks2: RankPool) -> None:
    ranks2.run(_train, wrapper, kind, "eager")


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("whole_step", "SGD"), ("whole_step", "Adam"), ("accumulation", "SGD")]
)
@pytest.mark.parametrize("wrapper", BOTH)
def test_the_same_of_steps_through_aotautograd(wrapper: str, kind: str, optimizer: str, ranks2: RankPool) -> None:
    ranks2.run(_train, wrapper, kind, "aot_eager", optimizer)


@pytest.mark.inductor
@pytest.mark.parametrize("wrapper", ["compile_ddp", pytest.param("EagerDDP", marks=pytest.mark.slow)])
def test_the_same_of_a_whole_step_through_inductor(wrapper: str, ranks2: RankPool) -> None:
    options = {"backend": "inductor"} if wrapper == "compile_ddp" else {}
    ranks2.run(_train, wrapper, "whole_step", "inductor", "SGD", options, timeout_seconds=600)


# ---- with everything that reduces otherwise --------------------------------------------------------------------------


# None of it is for the optimizer, which Dynamo would trace twice: it stays outside.


def plain(gradients: Tensor, ranks: Ranks) -> Tensor:
    return ranks.all_reduce(gradients / ranks.size)


def _with_options(rank: int, wrapper: str, options: dict[str, Any]) -> None:
    train(wrappers([wrapper])[wrapper](Model(), **options), optimizer_outside, "eager")


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize(
    "options",
    [{"comm_hook": plain}, {"verify": "always"}, {"gradient_as_bucket_view": False}, {"static_graph": True}],
    ids=lambda options: next(iter(options)),
)
def test_the_same_with_options(wrapper: str, options: dict[str, Any], ranks2: RankPool) -> None:
    ranks2.run(_with_options, wrapper, options)


def _weighted(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Model(), reduction="weighted", piggyback=("rows",))
    train(ddp, step_with_weight_and_passengers, "eager")


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_travels_with_the_gradients_may_be_given_inside(wrapper: str, ranks2: RankPool) -> None:
    ranks2.run(_weighted, wrapper)


def _torch_hook(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Model())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    train(ddp, optimizer_outside, "eager")


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_hook_of_torchs_kind_reduces_inside(wrapper: str, ranks2: RankPool) -> None:
    ranks2.run(_torch_hook, wrapper)


def _users_hooks(rank: int, wrapper: str, mode: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_DDP_MODE", mode)
        ddp = wrappers([wrapper])[wrapper](Model())
    seen: dict[str, Tensor] = {}

    def note(name: str, parameter: Tensor) -> None:
        seen[name] = parameter.grad.clone()

    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(note, name))
    ddp.module.first.weight.register_hook(lambda gradient: 2 * gradient)
    reference = copy.deepcopy(ddp.module)
    step = torch.compile(lambda x: loss_of(ddp, x).backward(), backend="eager")
    for number in range(STEPS):
        x = row_batch(rank, number)
        expected = expected_mean(reference, lambda module: loss_of(module, x))  # noqa: B023
        expected["first.weight"] *= 2
        ddp.zero_grad()
        with untraced() if number == 0 else contextlib.nullcontext():
            step(x)
        assert seen.keys() == expected.keys()
        torch.testing.assert_close({name: gradient.double() for name, gradient in seen.items()}, expected)


@pytest.mark.parametrize(
    ("wrapper", "mode"), [("compile_ddp", "graph"), ("compile_ddp", "hooks"), ("EagerDDP", "graph")]
)
def test_users_hooks_see_the_mean_inside(wrapper: str, mode: str, ranks2: RankPool) -> None:
    ranks2.run(_users_hooks, wrapper, mode)


def _skipped(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Model())

    def step(x: Tensor, skip: bool) -> None:
        loss = loss_of(ddp, x)
        if skip:
            ddp.skip_step()
        else:
            loss.backward()

    compiled_step = torch.compile(step, backend="eager")
    for number in range(STEPS):
        x, skip = row_batch(rank, number), number % 2 == rank
        weight = 0.0 if skip else 1.0
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: weight * loss_of(module, x))  # noqa: B023
        ddp.zero_grad()
        with untraced() if number == 0 else contextlib.nullcontext():
            compiled_step(x, skip)
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_rank_may_skip_inside(wrapper: str, ranks2: RankPool) -> None:
    ranks2.run(_skipped, wrapper)


def _of_parts(rank: int, wrapper: str) -> None:
    """Graph breaks of the model's own, and a wrapper inside of it."""
    wrap = wrappers([wrapper])[wrapper]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    ddp = wrap(ThreeEqualBlocks())
    reference = copy.deepcopy(ddp.module)
    expected = expected_mean(reference, lambda module: module(x))
    ddp.module.blocks[1] = wrap(ddp.unwrap().blocks[1])
    ddp = wrap(ddp.module)
    step = torch.compile(lambda x: ddp(x).backward(), backend="eager")
    for _ in range(STEPS):
        ddp.zero_grad()
        step(x)
        for name, parameter in ddp.module.named_parameters():
            mean = expected[name.replace("module.", "")]
            torch.testing.assert_close(parameter.grad.double(), mean, rtol=1e-5, atol=1e-6)
    with untraced():
        torch.compiler.reset()
        step(x)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_model_in_parts_is_right_inside(wrapper: str, ranks2: RankPool) -> None:
    ranks2.run(_of_parts, wrapper)


# ---- refused ---------------------------------------------------------------------------------------------------------


def _refused_then_right(rank: int, wrapper: str, refuse: Callable[[Any, Tensor], BaseException]) -> None:
    """What is refused in the first step, and in a later one, leaves nothing behind."""
    ddp = wrappers([wrapper])[wrapper](Model())
    for number in range(STEPS):
        x = row_batch(rank, number)
        error = refuse(ddp, x)
        ddp.abandon_backward()  # while `error` keeps the forward's graph, on every rank
        assert all(parameter.grad is None for parameter in ddp.parameters()), "a gradient of the refused backward"
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))  # noqa: B023
        loss_of(ddp, x).backward()
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)
        ddp.zero_grad()
        assert re.search(r"torch\._dynamo\.config\.(compiled_autograd|trace_autograd_ops)", str(error)), error


def _compiled_autograd_around_the_step(ddp: Any, x: Tensor) -> BaseException:
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(RuntimeError) as raised:
        torch.compile(lambda x: loss_of(ddp, x).backward(), backend="eager")(x)
    return raised.value


def _compiled_autograd_around_the_backward(ddp: Any, x: Tensor) -> BaseException:
    loss = loss_of(ddp, x)
    with torch_private.for_tests.compiled_autograd("eager"), pytest.raises(RuntimeError) as raised:
        loss.backward()
    return raised.value


def _traced_autograd(ddp: Any, x: Tensor) -> BaseException:
    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(RuntimeError) as raised:
        torch.compile(lambda x: loss_of(ddp, x).backward(), backend="eager")(x)
    return raised.value


@pytest.mark.parametrize(
    "refuse", [_compiled_autograd_around_the_step, _compiled_autograd_around_the_backward, _traced_autograd]
)
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_that_torch_would_trace_is_refused(
    wrapper: str, refuse: Callable[[Any, Tensor], BaseException], ranks2: RankPool
) -> None:
    ranks2.run(_refused_then_right, wrapper, refuse)


def _traced_autograd_elsewhere(rank: int, wrapper: str) -> None:
    """Of the backward alone, which begins outside of every graph, and of a forward without gradients."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        ddp = wrappers([wrapper])[wrapper](Model())
        train(ddp, backward_alone, "eager")
        with torch.no_grad():
            torch.compile(lambda x: loss_of(ddp, x), backend="eager")(row_batch(rank))


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_traced_backward_that_torch_does_run_is_right(wrapper: str, ranks2: RankPool) -> None:
    ranks2.run(_traced_autograd_elsewhere, wrapper)


def _one_graph(rank: int, wrapper: str) -> str:
    ddp = wrappers([wrapper])[wrapper](Model())
    with pytest.raises(Exception) as raised:  # noqa: PT011  (a class of Dynamo's)
        torch.compile(lambda x: loss_of(ddp, x).backward(), backend="eager", fullgraph=True)(row_batch(rank))
    return str(raised.value)


@pytest.mark.parametrize("wrapper", BOTH)
def test_one_graph_of_a_whole_step_is_refused_with_what_to_do(wrapper: str, ranks2: RankPool) -> None:
    for message in ranks2.run(_one_graph, wrapper):
        assert "Compile the step without fullgraph=True" in message


# ---- the decorator ---------------------------------------------------------------------------------------------------


def test_what_is_untraced_is_called_as_it_is_and_traces_nothing_of_what_it_calls() -> None:
    def of_a_library(x: Tensor) -> Tensor:
        return x + 1

    @torch_private.dynamo.untraced
    def called(x: Tensor, *, times: int) -> Tensor:
        """What it does."""
        return times * of_a_library(x)

    assert called.__doc__ == "What it does." and called.__name__ == "called"
    assert called(torch.zeros(2), times=3).tolist() == [3.0, 3.0]
    with torch_private.for_tests.noting_traced_code() as traced:
        found = torch.compile(lambda x: called(x.sin(), times=2).cos(), backend="eager")(torch.zeros(2))
    torch.testing.assert_close(found, torch.full((2,), 2.0).cos())
    assert of_a_library.__code__ not in traced and traced
