"""Kinds of parameters, modules and hooks that torch's DDP takes: complex numbers, parametrizations, Horovod's habit."""

import contextlib
import copy
import functools
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    Mlp,
    SumOverRanks,
    assert_gradients,
    assert_step,
    expected_mean,
    gradient_copies,
    local_gradients,
    row_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.distributed import autograd as distributed_autograd
from torch.distributed import init_device_mesh, rpc
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).abs().square().sum()


# ---- complex parameters ----------------------------------------------------------------------------------------------


class Complex(nn.Module):
    """complex64, complex128 and float32 parameters; one is used where `use_all` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 4)
        self.narrow = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.sometimes = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.use_all = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = (torch.tanh(self.into(x)) + 0.5j) @ self.narrow
        if self.use_all:
            hidden = hidden * self.sometimes
        return hidden * self.wide


def _complex_mean(ddp: Any, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    bare = copy.deepcopy(ddp.module)
    bare.zero_grad()
    loss(bare).backward()
    means = {}
    for name, parameter in bare.named_parameters():
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(total)
        means[name] = total / dist.get_world_size()
    return means


def _assert_complex(ddp: Any, expected: dict[str, Tensor]) -> None:
    for name, gradient in gradient_copies(ddp.module).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _complex(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Complex(), verify="always")
    for step in range(3):
        loss = functools.partial(loss_of, x=row_batch(rank, step))
        ddp.module.use_all = step < 2 or rank == 0
        expected = _complex_mean(ddp, loss)
        ddp.zero_grad()
        loss(ddp).backward()
        _assert_complex(ddp, expected)
        if step == 1:  # from then on some rank runs another graph
            assert {section.origin for section in ddp.plan.launched} == {
                "graph" if wrapper == "compile_ddp" else "hooks"
            }
    ddp.module.use_all = True
    once = _complex_mean(ddp, loss)
    ddp.zero_grad()
    with ddp.no_sync():
        loss(ddp).backward()
    loss(ddp).backward()
    _assert_complex(ddp, {name: 2 * mean for name, mean in once.items()})
    assert not ddp._runtime.reduction.proof.unverified


@pytest.mark.filterwarnings("ignore:gradients of")
def test_complex_parameters_are_averaged_and_proven(ranks2: RankPool) -> None:
    ranks2.run(_complex, "compile_ddp")


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_complex_parameters_are_averaged_on_three_ranks(ranks3: RankPool, wrapper: str) -> None:
    ranks3.run(_complex, wrapper)


class OneComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _complex_under_inductor(rank: int) -> None:
    ddp = wrap("compile_ddp", OneComplex(), backend="inductor", verify="off")
    for step in range(2):
        loss = functools.partial(loss_of, x=row_batch(rank, step))
        expected = _complex_mean(ddp, loss)
        ddp.zero_grad()
        loss(ddp).backward()
        _assert_complex(ddp, expected)
    assert {section.origin for section in ddp.plan.launched} == {"graph"}
    assert not ddp.explain().fallback_reasons


@pytest.mark.inductor
def test_inductor_reduces_complex_gradients_in_its_graph(ranks2: RankPool) -> None:
    ranks2.run(_complex_under_inductor)


# ---- parameters computed from others ---------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def _parametrized(rank: int, wrapper: str) -> None:
    square = nn.Linear(5, 5)
    nn.utils.parametrize.register_parametrization(square, "weight", Symmetric())
    normed = parametrizations.weight_norm(nn.Linear(5, 4))
    spectral = parametrizations.spectral_norm(nn.Linear(4, 3))
    ddp = wrap(wrapper, nn.Sequential(square, nn.Tanh(), normed, spectral).eval())  # eval: no power iteration
    for step in range(2):
        assert_step(ddp, lambda module: loss_of(module, row_batch(rank, step)))  # noqa: B023
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, row_batch(rank)))
    ddp.zero_grad()
    with nn.utils.parametrize.cached():
        loss_of(ddp, row_batch(rank)).backward()
    assert_gradients(ddp.module, expected)
    nn.utils.parametrize.remove_parametrizations(ddp.module[0], "weight")  # the same parameter, in another place
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))
    nn.utils.parametrize.remove_parametrizations(ddp.module[2], "weight")  # in place of two: a new one
    with pytest.raises(RuntimeError, match=r"2\.\S+ was replaced or removed.*unwrap\(\)"):
        ddp(row_batch(rank))
    assert_step(wrap(wrapper, ddp.unwrap()), lambda module: loss_of(module, row_batch(rank)))


@pytest.mark.parametrize("wrapper", BOTH)
def test_parametrized_weights_are_averaged(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_parametrized, wrapper)


# ---- memory layouts --------------------------------------------------------------------------------------------------


class Layouts(nn.Module):
    """Expanded and gapped parameters next to channels_last and transposed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.expanded = nn.Parameter(torch.ones(1).expand(3))
        self.gapped = nn.Parameter(torch.randn(6)[::2])
        self.transposed = nn.Parameter(torch.randn(3, 4).mT)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x.reshape(2, 2, 5, 1).expand(2, 2, 5, 2)).flatten(2).sum(2)
        return (hidden * self.expanded + self.gapped) @ self.transposed.mT


@contextlib.contextmanager
def _stride_warnings() -> Iterator[list[str]]:
    """The warnings of this rank about strides of gradients: all, also those that torch gives once in a process."""
    found: list[str] = []
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.set_warn_always(False)
    found += [str(warning.message) for warning in caught if "strides" in str(warning.message)]


def _layouts(rank: int, wrapper: str) -> None:
    model = Layouts()
    with pytest.raises(
        ValueError, match=r"^expanded is expanded.*clone\(\) it, or, for a wrapper, pass init_sync=False"
    ):
        wrap(wrapper, model)
    ddp = wrap(wrapper, model, init_sync=False)
    for step in range(2):
        x = row_batch(rank, step)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))  # noqa: B023
        ddp.zero_grad()
        with _stride_warnings() as found:
            loss_of(ddp, x).backward()
        assert_gradients(ddp.module, expected)
        assert not found, found
    strides = {name: parameter.grad.stride() for name, parameter in ddp.module.named_parameters()}
    assert strides["expanded"] == strides["gapped"] == (1,)
    assert strides["transposed"] == (1, 4)
    assert strides["conv.weight"] == ddp.conv.weight.stride()


@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_have_the_strides_of_dense_parameters_and_are_contiguous_elsewhere(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_layouts, wrapper)


def _other_strides(rank: int, wrapper: str) -> None:
    """A contiguous .grad of a channels_last parameter, which torch's DDP warns of."""
    model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    x = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(rank))
    ours = wrap(wrapper, copy.deepcopy(model))
    for ddp, warns in ((DistributedDataParallel(model), True), (ours, False)):
        for _ in range(2):
            expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))
            before = torch.zeros(3, 2, 2, 2)
            ddp.module.weight.grad, ddp.module.bias.grad = before, torch.zeros(3)
            with _stride_warnings() as found:
                loss_of(ddp, x).backward()
            assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)
            assert ddp.module.weight.grad is before and before.is_contiguous()
            assert any("bucket view strides" in message for message in found) == warns, found


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_gradient_of_other_strides_than_its_parameter_stays_as_it_is_without_a_warning(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_other_strides, wrapper)


def _memory_of_gradients(rank: int) -> list[int]:
    """In how many pieces of memory six gradients lie, by hooks without and with views, and from a graph."""
    found = []
    for wrapper, as_view in (("EagerDDP", False), ("EagerDDP", True), ("compile_ddp", False)):
        ddp = wrap(wrapper, Mlp(), gradient_as_bucket_view=as_view, bucket_cap_mb=25.0, first_bucket_mb=25.0)
        for step in range(2):
            assert_step(ddp, lambda module: loss_of(module, row_batch(rank, step)))  # noqa: B023
        found.append(len({parameter.grad.untyped_storage().data_ptr() for parameter in ddp.parameters()}))
    return found


def test_without_bucket_views_each_gradient_that_hooks_reduce_has_memory_of_its_own(ranks2: RankPool) -> None:
    assert ranks2.run(_memory_of_gradients) == [[6, 1, 1]] * 2


# ---- Horovod's habit -------------------------------------------------------------------------------------------------


def _accumulate_grad(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def _horovod(rank: int, wrapper: str) -> None:
    model = Mlp()
    nodes, seen = [], []  # whoever wants the hooks to live keeps the nodes

    def watch(when: str) -> None:
        for name, parameter in model.named_parameters():
            node = _accumulate_grad(parameter)

            def hook(_: object, gradients: tuple[Tensor, ...], name: str = name) -> None:
                seen.append((when, name, gradients[0].clone()))

            node.register_hook(hook)
            nodes.append(node)

    watch("before")
    ddp = wrap(wrapper, model)
    watch("after")
    for step in range(3):
        if step == 2:
            watch("late")
        seen.clear()
        x = row_batch(rank, step)
        bare = copy.deepcopy(ddp.module)
        local = _local(bare, x)
        ddp.zero_grad()
        expected = expected_mean(bare, lambda module: loss_of(module, x))  # noqa: B023
        loss_of(ddp, x).backward()
        assert_gradients(ddp.module, expected)
        for when in ("before", "after", "late")[: 2 + (step == 2)]:
            names = sorted(name for moment, name, _ in seen if moment == when)
            assert names == sorted(local), (wrapper, step, when, names)
        for _, name, gradient in seen:
            wanted = expected[name].float() if wrapper == "compile_ddp" else local[name]
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6, msg=f"{wrapper} {step} {name}")


def _local(bare: nn.Module, x: Tensor) -> dict[str, Tensor]:
    bare.zero_grad()
    loss_of(bare, x).backward()
    return {name: parameter.grad.clone() for name, parameter in bare.named_parameters()}


@pytest.mark.parametrize("wrapper", BOTH)
def test_hooks_on_accumulate_grad_nodes_are_called_once_in_each_backward(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_horovod, wrapper)


def _local_until_the_end(rank: int) -> None:
    """What .grad holds in the hook: torch's DDP, then EagerDDP without and with views."""
    for ddp, is_local in (
        (DistributedDataParallel(Mlp()), True),
        (wrap("EagerDDP", Mlp(), gradient_as_bucket_view=False), True),
        (wrap("EagerDDP", Mlp()), False),
    ):
        seen: dict[str, Tensor] = {}
        nodes = []
        for name, parameter in ddp.module.named_parameters():

            def keep(*_: object, name: str = name, parameter: Tensor = parameter, seen: dict[str, Any] = seen) -> None:
                seen[name] = parameter.grad.clone()

            nodes.append(_accumulate_grad(parameter))
            nodes[-1].register_hook(keep)
        for step in range(2):
            x = row_batch(rank, step)
            local = _local(copy.deepcopy(ddp.module), x)
            ddp.zero_grad()
            loss_of(ddp, x).backward()
            assert sorted(seen) == sorted(local)
            assert all(torch.allclose(seen[name], local[name], atol=1e-5) for name in local) == is_local


def test_without_bucket_views_such_a_hook_finds_the_local_gradient_as_under_ddp(ranks2: RankPool) -> None:
    ranks2.run(_local_until_the_end)


# ---- a module with collectives of its own ----------------------------------------------------------------------------


class SyncNorm(nn.Module):
    """Subtracts the mean over all ranks' rows."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.sum_over_ranks = torch.compiler.disable(SumOverRanks.apply) if apart else SumOverRanks.apply

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x) * dist.get_world_size()
        return (x - self.sum_over_ranks(x.sum(0)) / rows) * self.weight


def _sync_norm(rank: int, wrapper: str, apart: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 5), SyncNorm(apart), nn.Tanh(), nn.Linear(5, 5), SyncNorm(apart), nn.Tanh())
    ddp = wrap(wrapper, model)
    x = row_batch(rank)
    for _ in range(3):
        bare = copy.deepcopy(nn.Sequential(*ddp.module))
        expected = expected_mean(bare, lambda module: loss_of(module, x))
        ddp.zero_grad()
        loss_of(ddp, x).backward()
        assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize(("wrapper", "apart"), [("compile_ddp", True), ("compile_ddp", False), ("EagerDDP", False)])
def test_a_module_that_all_reduces_in_forward_and_backward_is_right(
    ranks2: RankPool, wrapper: str, apart: bool
) -> None:
    ranks2.run(_sync_norm, wrapper, apart)


# ---- several models at once ------------------------------------------------------------------------------------------


def _interleaved(rank: int, wrapper: str) -> None:
    first, second = wrap(wrapper, Mlp()), wrap(wrapper, Mlp(width=6))
    for step in range(3):
        x, y = row_batch(rank, step), row_batch(rank, step + 10)
        wanted = [
            expected_mean(copy.deepcopy(ddp.module), lambda module, v=value: loss_of(module, v))
            for ddp, value in ((first, x), (second, y))
        ]
        for ddp in (first, second):
            ddp.zero_grad()
        losses = loss_of(first, x), loss_of(second, y)
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        for ddp, expected in zip((first, second), wanted, strict=True):
            assert_gradients(ddp.module, expected)
    for ddp in (first, second):
        ddp.zero_grad()
    (loss_of(first, x) + loss_of(second, y)).backward()  # both in one backward
    for ddp, expected in zip((first, second), wanted, strict=True):
        assert_gradients(ddp.module, expected)
    _in_threads([first, second], [x, y], wanted)


def _in_threads(models: list[Any], inputs: list[Tensor], wanted: list[dict[str, Tensor]]) -> None:
    """Each wrapper's steps in a thread of its own; it is compiled by now, so ranks need not compile in turns."""
    errors: list[BaseException] = []

    def train(ddp: Any, x: Tensor, expected: dict[str, Tensor]) -> None:
        try:
            for _ in range(5):
                ddp.zero_grad()
                loss_of(ddp, x).backward()
                assert_gradients(ddp.module, expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=args) for args in zip(models, inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("wrapper", BOTH)
def test_two_wrappers_may_be_interleaved_and_trained_in_two_threads(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_interleaved, wrapper)


def _first_backwards_in_threads(rank: int, wrapper: str) -> None:
    """Each rank comes to another wrapper first, and waits there for what the other rank says of it later."""
    models = [wrap(wrapper, Mlp()), wrap(wrapper, Mlp(width=6))]
    inputs = [row_batch(rank), row_batch(rank, 10)]
    wanted = [
        expected_mean(copy.deepcopy(ddp.module), lambda module, v=value: loss_of(module, v))
        for ddp, value in zip(models, inputs, strict=True)
    ]
    losses = [loss_of(ddp, x) for ddp, x in zip(models, inputs, strict=True)]
    for ddp in models:
        ddp.zero_grad()
    first, second = (losses[rank], losses[1 - rank])
    waits = threading.Thread(target=first.backward)
    waits.start()
    time.sleep(1)
    second.backward()
    waits.join()
    for ddp, expected in zip(models, wanted, strict=True):
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_first_backwards_in_two_threads_may_come_in_other_orders(ranks2: RankPool, wrapper: str) -> None:
    """They agree on their sequences through one store, whose connection one of them blocked."""
    ranks2.run(_first_backwards_in_threads, wrapper, collective_timeout_seconds=20)


class WithPause(nn.Module):
    """Two layers in graphs of their own; the backward between them calls `pause`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), nn.Linear(3, 3)
        self.pause: Callable[[Tensor], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        if hidden.requires_grad:
            hidden.register_hook(self.pause)
        return self.second(hidden)


def _forward_during_backward(rank: int, wrapper: str, mode: str) -> None:
    """Another thread evaluates the model while this one is in the middle of its backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_DDP_MODE", mode)
        ddp = wrap(wrapper, WithPause())
    x = row_batch(rank)
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))
    evaluated = []

    def evaluate() -> None:
        with torch.no_grad():
            evaluated.append(ddp(row_batch(rank, 5)))

    def in_another_thread(_: Tensor) -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join(20.0)

    for step in range(3):
        ddp.module.pause = in_another_thread if step else lambda _: None
        ddp.zero_grad()
        loss_of(ddp, x).backward()
        assert len(evaluated) == step
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize(
    ("wrapper", "mode"), [("EagerDDP", "graph"), ("compile_ddp", "graph"), ("compile_ddp", "hooks")]
)
def test_another_thread_may_evaluate_the_model_during_a_backward(ranks2: RankPool, wrapper: str, mode: str) -> None:
    ranks2.run(_forward_during_backward, wrapper, mode)


def _two_backwards_at_once(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, WithPause())
    x = row_batch(rank)
    refused = []

    def backward_of(loss: Tensor) -> None:
        with pytest.raises(RuntimeError, match="two threads run backwards of one wrapper at the same time") as caught:
            loss.backward()
        refused.append(caught)

    for step in range(3):
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))
        ddp.zero_grad()
        loss_of(ddp, x).backward()
        assert_gradients(ddp.module, expected)
        if step != 1:
            continue
        other = loss_of(ddp, row_batch(rank, 5))

        def in_another_thread(_: Tensor, other: Tensor = other) -> None:
            ddp.module.pause = lambda _: None
            thread = threading.Thread(target=backward_of, args=(other,))
            thread.start()
            thread.join(20.0)

        ddp.module.pause = in_another_thread
        loss_of(ddp, x).backward()
        assert len(refused) == 1


@pytest.mark.parametrize("wrapper", BOTH)
def test_two_backwards_of_one_wrapper_at_the_same_time_are_refused(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_two_backwards_at_once, wrapper)


# ---- pickling --------------------------------------------------------------------------------------------------------


def _pickled(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    x = row_batch(rank)
    assert_step(ddp, lambda module: loss_of(module, x))
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    loaded = pickle.loads(pickle.dumps(ddp.module))
    other = Mlp()
    other.load_state_dict(ddp.state_dict())
    for again in (wrap(wrapper, loaded), wrap(wrapper, other)):
        for mine, old in zip(again.parameters(), ddp.parameters(), strict=True):
            assert torch.equal(mine, old)
        assert_step(again, lambda module: loss_of(module, x))


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_was_saved_of_a_wrapper_is_wrapped_again_and_trains_on(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_pickled, wrapper)


# ---- refused ---------------------------------------------------------------------------------------------------------


def _distributed_tensors(rank: int) -> None:
    for frozen in (False, True):
        model = Mlp()
        weight = distribute_tensor(model.head.weight.detach(), init_device_mesh("cpu", (2,)), [Replicate()])
        model.head.weight = nn.Parameter(weight, requires_grad=not frozen)
        for make in wrappers(BOTH).values():
            with pytest.raises(
                ValueError, match=r"parameter head\.weight is a DTensor.*_ddp_params_and_buffers_to_ign"
            ):
                make(model)


def test_distributed_tensors_are_refused_by_name(ranks2: RankPool) -> None:
    ranks2.run(_distributed_tensors)


def _distributed_autograd(rank: int, wrapper: str, folder: str) -> None:
    ddp = wrap(wrapper, Mlp())
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/{rank}")
    rpc.init_rpc(f"alone-{rank}", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))
        with (
            distributed_autograd.context(),
            pytest.raises(RuntimeError, match=r"torch\.distributed\.autograd context.*outside of the context"),
        ):
            ddp(row_batch(rank))
        for _ in range(2):  # its error leaves nothing behind
            loss = loss_of(ddp, row_batch(rank))
            with (
                distributed_autograd.context() as context,
                pytest.warns(match=r"the backward is torch\.distributed\.autograd's.*or the forward under"),
                pytest.raises(RuntimeError, match=r"torch\.distributed\.autograd's|python_error"),
            ):
                distributed_autograd.backward(context, [loss])
            assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))
        expected = local_gradients(copy.deepcopy(ddp.module), lambda module: loss_of(module, row_batch(rank)))
        with ddp.no_sync():
            loss = loss_of(ddp, row_batch(rank))
        with distributed_autograd.context() as context:
            distributed_autograd.backward(context, [loss])
            found = distributed_autograd.get_gradients(context)
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(found[parameter], expected[name])
        assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))
    finally:
        rpc.shutdown(graceful=False)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_context_of_distributed_autograd_is_refused(ranks2: RankPool, wrapper: str, tmp_path: Path) -> None:
    ranks2.run(_distributed_autograd, wrapper, str(tmp_path))
