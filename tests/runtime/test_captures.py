"""What wrappers share of what Dynamo captures, and what becomes of what cannot be captured or compiled."""

import contextlib
import copy
import functools
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, assert_step, expected_mean, mean_by_hand, row_batch
from torch import Tensor, nn

from compiled_ddp import compile_ddp, torch_private
from compiled_ddp.graph import backend
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.ranks.communicator import SHARED_NAME
from compiled_ddp.ranks.launch_observer import LaunchObserver
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler


def bare(width: int = 4) -> nn.Module:
    """A model of torch's own class, whose forward Dynamo does not capture by itself."""
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def graphs_captured() -> int:
    return torch_private.for_tests.compiler_counters().get("stats", {}).get("unique_graphs", 0)


def loss_at(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda module: module(x).square().sum()


@contextlib.contextmanager
def backwards_rewritten() -> Iterator[list[Pipeline]]:
    """The programs of the backwards that are compiled in here."""
    rewritten: list[Pipeline] = []
    run = Pipeline.run

    def noted(pipeline: Pipeline, *arguments: Any, **keywords: Any) -> None:
        rewritten.append(pipeline)
        run(pipeline, *arguments, **keywords)

    with unittest.mock.patch.object(Pipeline, "run", noted):
        yield rewritten


def all_by_graphs(ddp: Any) -> bool:
    return {section.origin for section in ddp.plan.sections} == {"graph"}


# ---- many wrappers ---------------------------------------------------------------------------------------------------


def _many(rank: int, model: Callable[[], nn.Module], backend: str, count: int) -> None:
    before = graphs_captured()
    alive = []
    with backwards_rewritten() as rewritten:
        for number in range(count):
            ddp = compile_ddp(model(), strict=True, backend=backend, smallest_graph_mb=0, compile_once=False)
            alive.append(ddp)
            for step in range(2):
                _right_step(ddp, row_batch(rank, 10 * number + step))
            assert all_by_graphs(ddp)
    assert graphs_captured() == before + 1, "another wrapper of the same class was captured anew"
    assert len(rewritten) == 1, "the backward was compiled anew"
    for number, ddp in enumerate(alive[:3]):  # in turns
        _right_step(ddp, row_batch(rank, number))
    for ddp in alive:
        ddp.unwrap()


def _right_step(ddp: Any, x: Tensor) -> None:
    expected = expected_mean(copy.deepcopy(ddp.module), loss_at(x))
    ddp.zero_grad()
    ddp(x).square().sum().backward()
    assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)


class OfItsOwn(nn.Sequential):
    """Of a class that no other test has captured."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("model", [OfItsOwn, functools.partial(bare, width=29)], ids=["OfItsOwn", "bare"])
def test_ten_wrappers_of_one_class_share_one_capture_and_all_reduce_in_graphs(
    ranks2: RankPool, model: Callable[[], nn.Module]
) -> None:
    ranks2.run(_many, model, "aot_eager", 10)  # more than Dynamo's limit for captures of one function


@pytest.mark.inductor
def test_wrappers_share_a_capture_under_inductor(ranks2: RankPool) -> None:
    ranks2.run(_many, functools.partial(bare, width=31), "inductor", 3, **LIMITS)


# ---- [Note: one name in all graphs] ----------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        if tied:
            self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


def _tied_after_untied(rank: int) -> None:
    before = graphs_captured()
    for tied in (False, True, False):
        ddp = compile_ddp(Pair(tied=tied), backend="aot_eager")
        for step in range(3):
            assert_step(ddp, loss_at(row_batch(rank, step)))
        by_hooks = [section.plan.indices for section in ddp.plan.sections if section.origin == "hooks"]
        names = [ddp.plan.parameter_names[index] for indices in by_hooks for index in indices]
        assert names == (["one.weight"] if tied else [])
        assert graphs_captured() == before + 1, "Dynamo took another graph for the model"
        local, last = row_batch(rank, 3), row_batch(rank, 4)
        expected = mean_by_hand(ddp, loss_at(torch.cat([local, last])))
        ddp.zero_grad()
        with ddp.no_sync():
            loss_at(local)(ddp).backward()
        loss_at(last)(ddp).backward()
        assert_gradients(ddp.module, expected)


def test_a_capture_of_two_parameters_serves_a_model_whose_two_are_tied(ranks2: RankPool) -> None:
    ranks2.run(_tied_after_untied, **LIMITS)


class KnowsItsParent(nn.Module):
    """Which torch registers as one of its parts: a walk that enters each part by each of its names has no end."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        self.one.parent = self

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


def _knows_its_parent(rank: int) -> None:
    before = graphs_captured()
    for _ in range(2):
        ddp = compile_ddp(KnowsItsParent(), backend="aot_eager", strict=True)
        for step in range(2):
            assert_step(ddp, loss_at(row_batch(rank, step)))
    assert graphs_captured() == before + 1


def test_a_part_may_know_its_parent(ranks2: RankPool) -> None:
    ranks2.run(_knows_its_parent)


def _unlike_plans(rank: int) -> None:
    with backwards_rewritten() as rewritten:
        for bucket_cap_mb in (None, 1e-5, 1e-5):
            ddp = compile_ddp(
                bare(37), strict=True, backend="aot_eager", bucket_cap_mb=bucket_cap_mb, smallest_graph_mb=0
            )
            for step in range(2):
                _right_step(ddp, row_batch(rank, step))
            ddp.unwrap()
    assert len(rewritten) == 2


def test_other_buckets_are_another_backward(ranks2: RankPool) -> None:
    ranks2.run(_unlike_plans)


def _subgroups(rank: int) -> None:
    """One wrapper over all ranks and one over some, in turns."""
    pair = dist.new_group([0, 1])
    both = compile_ddp(bare(41), strict=True, backend="aot_eager", smallest_graph_mb=0)
    two = (
        compile_ddp(bare(41), strict=True, backend="aot_eager", process_group=pair, smallest_graph_mb=0)
        if rank < 2
        else None
    )
    for step in range(3):
        _right_step(both, row_batch(rank, step))
        if two is not None:
            x = row_batch(rank, step + 10)
            local = copy.deepcopy(two.module)
            local.zero_grad()
            local(x).square().sum().backward()
            means = [parameter.grad for parameter in local.parameters()]
            for mean in means:
                dist.all_reduce(mean, group=pair)
            two.zero_grad()
            two(x).square().sum().backward()
            for parameter, mean in zip(two.module.parameters(), means, strict=True):
                torch.testing.assert_close(parameter.grad, mean / 2)
    both.unwrap()
    if two is not None:
        two.unwrap()


def test_graphs_of_other_ranks_reduce_over_these(ranks3: RankPool) -> None:
    ranks3.run(_subgroups)


def _at_the_same_time(rank: int) -> None:
    """While a graph of one wrapper runs, the other one's runs in another thread."""
    first, second = (compile_ddp(bare(43), strict=True, backend="aot_eager", smallest_graph_mb=0) for _ in range(2))
    for ddp in (first, second):
        _right_step(ddp, row_batch(rank, 0))
    expected = expected_mean(copy.deepcopy(second.module), loss_at(row_batch(rank, 1)))
    second.zero_grad()
    loss = second(row_batch(rank, 1)).square().sum()
    failures: list[BaseException] = []

    def backward() -> None:
        try:
            loss.backward()
        except BaseException as error:
            failures.append(error)

    def meanwhile(_: int, __: Tensor) -> contextlib.AbstractContextManager[None]:
        if not threads:
            threads.append(threading.Thread(target=backward))
            threads[0].start()
            threads[0].join()
        return contextlib.nullcontext()

    threads: list[threading.Thread] = []
    with backwards_rewritten() as rewritten, LaunchObserver(SHARED_NAME, launch=meanwhile):
        _right_step(first, row_batch(rank, 2))
    assert threads and not failures, failures
    assert [pipeline.group_name for pipeline in rewritten] == [second._runtime.communicator.group_name]
    assert_gradients(second.module, expected)
    first.unwrap()
    second.unwrap()


def test_graphs_that_run_at_the_same_time_have_names_of_their_own(ranks2: RankPool) -> None:
    ranks2.run(_at_the_same_time)


def _of_many_sizes(rank: int) -> None:
    for width in range(3, 13):
        ddp = compile_ddp(bare(width), strict=True, backend="aot_eager", smallest_graph_mb=0)
        with _no_symbolic_graphs():
            assert_step(ddp, loss_at(row_batch(rank, width)))
        assert all_by_graphs(ddp)
        ddp.unwrap()


@contextlib.contextmanager
def _no_symbolic_graphs() -> Iterator[None]:
    compiled = torch_private.inductor.compile_captured

    def compile_captured(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        assert not any(isinstance(value, torch.SymInt) for value in example_inputs), "sizes are symbolic"
        return compiled(graph_module, example_inputs, **kwargs)

    with unittest.mock.patch.object(torch_private.inductor, "compile_captured", compile_captured):
        yield


def test_bare_models_of_many_sizes_are_not_one_model_of_changing_sizes(ranks2: RankPool) -> None:
    ranks2.run(_of_many_sizes)


class Kinds(nn.Module):
    """Captured anew for each `kind`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        return self.linear(x) * len(kind)


def _limited(rank: int) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        ddp = compile_ddp(Kinds(), backend="aot_eager", smallest_graph_mb=0)
        for kind in ("a", "bb", "ccc", "dddd"):
            x = row_batch(rank, len(kind))
            expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x, kind).square().sum())  # noqa: B023
            ddp.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ddp(x, kind).square().sum().backward()
            assert_gradients(ddp.module, expected)
            named = [w for w in caught if "torch._dynamo.config.recompile_limit (2)" in str(w.message)]
            assert len(named) == (kind == "ccc"), [str(w.message) for w in caught]
        assert "a part of the model runs without graphs: 'forward'" in str(ddp.explain())
        ddp.unwrap()
        for again in range(2):
            ddp = compile_ddp(
                Kinds(), backend="aot_eager", dynamic=False, strict=True, smallest_graph_mb=0
            )  # captured apart
            with pytest.raises(RuntimeError, match=r"recompile_limit \(2\).*strict=True\) does not fall back"):
                ddp(row_batch(rank), "a" * again)
            ddp.unwrap()


def test_a_recompile_limit_that_is_reached_is_named(ranks2: RankPool) -> None:
    ranks2.run(_limited)


# ---- what is captured ------------------------------------------------------------------------------------------------


class Dlrm(nn.Module):
    """As torchrec's: sparse embeddings in a list comprehension that is part of an expression."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(7, 3, sparse=True) for _ in range(3))
        self.dense = nn.Linear(5, 3)
        self.over = nn.Linear(12, 1)

    def forward(self, x: Tensor, ids: list[Tensor]) -> Tensor:
        embeddings = self.embeddings
        parts = [self.dense(x)] + [e(ids[i]) for i, e in enumerate(embeddings[:-1])] + [embeddings[-1](ids[-1])]
        return self.over(torch.cat(parts, dim=1))


def _with_sparse_embeddings(rank: int) -> None:
    model = Dlrm()
    ids = [torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(10 * rank + n)) for n in range(3)]
    torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)(row_batch(rank), ids).sum().backward()
    ddp = compile_ddp(model, backend="aot_eager", fullgraph=True, smallest_graph_mb=0)
    assert str(ddp).startswith("CompiledDDP")
    twin = copy.deepcopy(model)
    for step in range(3):
        twin.zero_grad()
        twin(row_batch(rank, step), ids).square().sum().backward()
        ddp.zero_grad()
        ddp(row_batch(rank, step), ids).square().sum().backward()
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            mean = other.grad.to_dense()
            dist.all_reduce(mean)
            assert parameter.grad.is_sparse == name.startswith("embeddings"), name
            torch.testing.assert_close(parameter.grad.to_dense(), mean / dist.get_world_size())
    ddp.unwrap()


def test_sparse_embeddings_are_captured_without_a_break_as_by_plain_torch_compile(ranks2: RankPool) -> None:
    ranks2.run(_with_sparse_embeddings)


# ---- what cannot be compiled -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _compiler_fails(where: str) -> Iterator[None]:
    """In "forward", "backward" (of any variant), or "passes" alone."""

    def compile_inner(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if bool(kwargs.get("is_backward")) == (where == "backward"):
            raise ZeroDivisionError("Cannot convert expression to float")
        return inner(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("Cannot convert expression to float")

    passes = unittest.mock.patch.object(Pipeline, "run", run)
    with passes if where == "passes" else torch_private.for_tests.inner_compiler_replaced(compile_inner):
        yield


def _not_compiled(rank: int, where: str, on: str, width: int, *, accumulates: bool = True) -> None:
    """`on` says on which ranks: "all", or rank "0" or "1" alone. `width` is that of no model compiled before.

    With `accumulates`, a backward without communication too, and one that folds in what it left.
    """
    backend = "aot_eager" if where == "passes" else "inductor"
    # Else a rank whose compiler fails would load what the other one has compiled.
    ddp = compile_ddp(Mlp(width), backend=backend, smallest_graph_mb=0, compile_once=False)
    failing = _compiler_fails(where) if on in ("all", str(rank)) else contextlib.nullcontext()
    with failing, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x = row_batch(rank, step)
            expected = expected_mean(copy.deepcopy(ddp.module), loss_at(x))
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)
        if accumulates:
            _accumulate(ddp, rank)
    quoting = [str(w.message) for w in caught if "Cannot convert expression to float" in str(w.message)]
    assert len(quoting) == (on in ("all", str(rank))) * (2 if where == "backward" else 1), quoting
    ddp.unwrap()


def _accumulate(ddp: Any, rank: int) -> None:
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(row_batch(rank)).square().sum().backward()
    ddp(row_batch(rank)).square().sum().backward()
    assert_gradients(ddp.module, _twice(ddp.module, rank), rtol=1e-4, atol=1e-6)


def _twice(module: nn.Module, rank: int) -> dict[str, Tensor]:
    expected = expected_mean(copy.deepcopy(module), loss_at(row_batch(rank)))
    return {name: 2 * gradient for name, gradient in expected.items()}


@pytest.mark.parametrize("on", ["all", "0", "1"])
@pytest.mark.parametrize(
    "where",
    [*(pytest.param(w, marks=pytest.mark.inductor) for w in ("forward", "backward")), "passes"],
)
def test_what_cannot_be_compiled_runs_with_hooks_and_one_warning_that_quotes_the_compiler(
    ranks2: RankPool, where: str, on: str
) -> None:
    width = 20 + 3 * ("forward", "backward", "passes").index(where) + ("all", "0", "1").index(on)
    ranks2.run(_not_compiled, where, on, width, **LIMITS)


def _not_compiled_but_strict(rank: int) -> None:
    words = r"(?s)Cannot convert expression to float.*strict=True\) does not fall back"
    for width, where in ((17, "forward"), (18, "backward")):
        for _ in range(2):  # also a second wrapper, for which nothing is compiled any more
            ddp = compile_ddp(Mlp(width), strict=True, smallest_graph_mb=0)
            with _compiler_fails(where), pytest.raises(RuntimeError, match=words):
                ddp(row_batch(rank)).square().sum().backward()
            ddp.unwrap()


@pytest.mark.inductor
def test_strict_raises_what_the_compiler_says(ranks2: RankPool) -> None:
    ranks2.run(_not_compiled_but_strict, **LIMITS)


def _backward_not_found(rank: int) -> None:
    ddp = compile_ddp(Mlp(13), backend="aot_eager", smallest_graph_mb=0)
    with (
        unittest.mock.patch.object(torch_private.aot, "compiled_function_of", return_value=None),
        pytest.raises(RuntimeError, match=r"gradients would stay local\. Set COMPILED_DDP_MODE=hooks"),
    ):
        ddp(row_batch(rank))
    ddp.unwrap()


def test_a_torch_that_keeps_its_backward_elsewhere_is_an_error_and_no_graph_without_one(ranks2: RankPool) -> None:
    ranks2.run(_backward_not_found, **LIMITS)


def _compared_by_inductor(rank: int) -> None:
    with torch_private.for_tests.inductor_compares_graphs():
        _not_compiled(rank, "forward", "0", width=14, accumulates=False)


@pytest.mark.inductor
@pytest.mark.skipif(torch.__version__ < (2, 12), reason="Inductor compares no graphs")
def test_no_rank_waits_for_another_in_the_middle_of_compiling(ranks2: RankPool) -> None:
    """Rank 1 compiles a backward that rank 0 cannot compile; torch 2.12 compares them by default."""
    ranks2.run(_compared_by_inductor, **LIMITS)


def test_what_dynamo_gave_up_is_looked_for_in_every_kind_of_module() -> None:
    limits = torch_private.captures.RecompileLimits()
    code = Mlp.forward.__code__
    limits.note(f"forward ({code.co_filename}:{code.co_firstlineno}) has been captured too often")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Linear(5, 4))
    assert limits.given_up_in(nn.Sequential(scripted, Mlp())) == limits.notes
    assert limits.given_up_in(scripted) == []


class HandsOn(Mlp):
    """Between its graph breaks nothing happens to what an earlier graph has returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        x = x.contiguous()
        torch._dynamo.graph_break()
        return self.head(self.norm(x))


def _hands_on(rank: int) -> None:
    ddp = compile_ddp(HandsOn(), backend="aot_eager", smallest_graph_mb=0)
    for step in range(2):
        expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023
        ddp.zero_grad()
        ddp(row_batch(rank, step)).square().sum().backward()
        assert_gradients(ddp.module, expected)
    ddp.unwrap()


def test_a_graph_that_hands_on_what_it_was_given_needs_no_backward(ranks2: RankPool) -> None:
    ranks2.run(_hands_on, **LIMITS)


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(10, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 2, 1, 0, bias=False),
        nn.Sigmoid(),
    )


def _dcgan(rank: int, backend: str) -> None:
    """PyTorch's DCGAN tutorial in small."""
    torch.manual_seed(0)
    plain = generator(), discriminator()
    options: dict[str, Any] = {"backend": backend, "strict": True, "smallest_graph_mb": 0}
    wrapped = tuple(compile_ddp(copy.deepcopy(model), **options) for model in plain)
    data = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * rank + n)) for n in range(2)]
    noise = torch.randn(4, 10, 1, 1, generator=torch.Generator().manual_seed(rank))
    for real in data:
        found, local = _gan_step(*wrapped, real, noise), _gan_step(*plain, real, noise)
        for gradient, total in zip(found, local, strict=True):
            dist.all_reduce(total)
            torch.testing.assert_close(gradient, total / dist.get_world_size(), rtol=1e-3, atol=1e-5)


def _gan_step(g: nn.Module, d: nn.Module, real: Tensor, noise: Tensor) -> list[Tensor]:
    for model in (g, d):
        model.zero_grad()
    judge = nn.BCELoss()
    judge(d(real).view(-1), torch.ones(4)).backward()
    fake = g(noise)
    judge(d(fake.detach()).view(-1), torch.zeros(4)).backward()
    of_discriminator = [p.grad.clone() for p in d.parameters()]
    judge(d(fake).view(-1), torch.ones(4)).backward()
    return of_discriminator + [p.grad.clone() for p in g.parameters()]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]
)
def test_two_bare_models_that_are_wrapped_one_by_one_train_as_in_the_dcgan_tutorial(
    ranks2: RankPool, backend: str
) -> None:
    ranks2.run(_dcgan, backend, **LIMITS)


# ---- what is assigned after compilation ------------------------------------------------------------------------------


class Scaled(nn.Linear):
    factor: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def _squared(part: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, part.weight, part.bias).square()


def _assigned(rank: int) -> None:
    model = Mlp()
    model.first = Scaled(5, 8)
    ddp = compile_ddp(model, backend="aot_eager")

    def assert_steps() -> None:
        for step in range(2):
            assert_step(ddp, loss_at(row_batch(rank, step)))

    assert_steps()
    before = ddp(row_batch(rank)).detach()
    model.first.factor = 2.0
    assert_steps()
    assert not torch.allclose(ddp(row_batch(rank)), before)
    model.first.factor = torch.tensor(3.0)
    assert_steps()
    model.first.forward = functools.partial(_squared, model.first)
    assert_steps()
    torch.testing.assert_close(ddp(row_batch(rank)), model(row_batch(rank)))


def test_what_is_assigned_to_a_part_after_compilation_is_used(ranks2: RankPool) -> None:
    ranks2.run(_assigned)


# ---- many graphs of one model ----------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Experts(nn.Module):
    """Each a graph of its own, as the forward itself is left to eager code for a break in a loop.

    With `replaces` the forward puts another parameter into the first one.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(number))
        self.replaces = False

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            torch.compiler.disable(self._replace)()
        for expert in self.experts:
            x = expert(x)
            torch._dynamo.graph_break()
        return x

    def _replace(self) -> None:
        self.experts[0].linear.weight = nn.Parameter(torch.ones(4, 4))


def _looks_through_model(_: int, number: int) -> int:
    ddp = compile_ddp(Experts(number), backend="aot_eager", smallest_graph_mb=0)
    parameters = ManagedState.parameters
    with unittest.mock.patch.object(ManagedState, "parameters", autospec=True, side_effect=parameters) as looks:
        ddp(torch.ones(2, 4)).sum().backward()
    assert sum(section.origin == "graph" for section in ddp.plan.sections) == number
    return looks.call_count


def test_a_graph_that_is_called_for_the_first_time_does_not_look_through_all_of_the_model(ranks2: RankPool) -> None:
    few, many = (ranks2.run(_looks_through_model, number)[0] for number in (2, 6))
    assert few == many


def _replaces_in_forward(_: int) -> str:
    ddp = compile_ddp(Experts(2), backend="aot_eager", smallest_graph_mb=0)
    ddp(torch.ones(2, 4)).sum().backward()
    ddp.module.replaces = True
    with pytest.raises(RuntimeError) as error:
        ddp(torch.ones(2, 4))
    return str(error.value)


def test_a_parameter_that_the_forward_has_replaced_before_its_graph_is_an_error(ranks2: RankPool) -> None:
    for message in ranks2.run(_replaces_in_forward):
        assert message.startswith("parameter experts.0.linear.weight was replaced or unfrozen after compile_ddp")


def _calls_that_live(_: int) -> list[int]:
    ddp, kept, numbers = compile_ddp(Experts(2), backend="aot_eager"), [], []
    for _ in range(4):
        kept.append(ddp(torch.ones(2, 4)).sum())
        numbers.append(len(ddp._calls.live()))
        kept[-1].backward()
    ddp(torch.ones(2, 4)).sum()  # thrown away
    kept.append(ddp(torch.ones(2, 4)).sum())
    kept[-1].backward(retain_graph=True)
    kept.append(ddp(torch.ones(2, 4)).sum())
    return [*numbers, len(ddp._calls.live())]


def test_losses_that_a_user_keeps_do_not_keep_their_calls(ranks2: RankPool) -> None:
    """Every backward looks through the calls whose backward may still run: also one that was run with retain_graph."""
    for numbers in ranks2.run(_calls_that_live):
        assert numbers == [2, 2, 2, 2, 4]


class TwoHeads(nn.Module):
    """Each parameter of a head feeds one output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.one(x), self.other(x)


def _looks_for_hooks(rank: int) -> int:
    ddp = compile_ddp(TwoHeads(), backend="aot_eager", smallest_graph_mb=0)
    found = backend.Entry._find
    with unittest.mock.patch.object(backend.Entry, "_find", autospec=True, side_effect=found) as looks:
        for step in range(4):
            if step == 2:
                looks.reset_mock()
            one, other = ddp(row_batch(rank, step))
            (one.square().sum() + other.square().sum()).backward()
        in_steps = looks.call_count
        ddp.module.body.register_forward_hook(lambda *_: None)
        ddp(row_batch(rank))
        assert looks.call_count == in_steps + 1, "a hook of a part was not found"
    return in_steps


def test_a_model_of_several_outputs_does_not_look_for_hooks_of_parts_in_every_step(ranks2: RankPool) -> None:
    assert ranks2.run(_looks_for_hooks) == [0, 0]
