"""A model that is wrapped once more while its wrapper is there, as in a notebook: the new wrapper takes over."""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, assert_step, mean_by_hand, row_batch, wrappers
from torch import Tensor, nn

from compiled_ddp.compat.apex import DistributedDataParallel as ApexDDP
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
CLASSES = {"compile_ddp": "CompiledDDP", "EagerDDP": "EagerDDP"}
CLOSED = r"this \w+ was closed when its module was wrapped once more, as by unwrap\(\): use the wrapper that was made"


def wrap(wrapper: str, model: Any, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def assert_trains(ddp: Any, rank: int) -> None:
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))


def hooks_on(model: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


@contextlib.contextmanager
def warned(times: int = 1) -> Iterator[None]:
    """So many warnings that a wrapper was closed, which point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [warning for warning in caught if "is wrapped once more" in str(warning.message)]
    assert len(found) == times, [str(warning.message) for warning in found]
    assert all("models.py" in warning.filename or __file__ == warning.filename for warning in found)


def _takes_over(rank: int, first: str, second: str) -> None:
    model, seen = Mlp(), []
    model.head.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.clone()))
    old = wrap(first, model)
    assert_trains(old, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new = wrap(second, model)
    (message,) = [str(warning.message) for warning in caught if "once more" in str(warning.message)]
    assert message.startswith(f"the Mlp is wrapped once more: its {CLASSES[first]} is closed, as by unwrap(), and the")
    assert f"the new {CLASSES[second]} takes its place" in message
    gc.collect()
    uses = (
        lambda: old(row_batch(rank)),
        lambda: old.warmup(row_batch(rank)),
        lambda: old.join(),
        lambda: old.skip_step(),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=CLOSED):
            use()
    for _ in range(2):
        seen.clear()
        assert_trains(new, rank)
        assert len(seen) == 1 and torch.equal(seen[0], model.head.bias.grad)
    assert old.unwrap() is model  # changes nothing
    assert_trains(new, rank)
    with warned():
        third = wrap(first, torch.compile(model, backend="eager"))
    assert_trains(third, rank)
    with warned(0):
        assert third.unwrap() is not None
        last = wrap(second, model)
    assert_trains(last, rank)
    last.unwrap()
    assert hooks_on(model) == 1


@pytest.mark.parametrize("second", BOTH)
@pytest.mark.parametrize("first", BOTH)
def test_the_new_wrapper_takes_over_with_one_warning(ranks2: RankPool, first: str, second: str) -> None:
    ranks2.run(_takes_over, first, second)


def _alive_on_one_rank(rank: int, wrapper: str, alive_on: int) -> None:
    model = Mlp()
    old = wrap(wrapper, model)
    assert_trains(old, rank)
    group = weakref.ref(old._runtime.communicator.group)
    if rank != alive_on:
        del old
        gc.collect()
    with warned(int(rank == alive_on)):
        new = wrap(wrapper, model)
    for _ in range(2):
        assert_trains(new, rank)
    gc.collect()
    assert group() is None, "its threads live on"
    new.unwrap()


@pytest.mark.parametrize("alive_on", [0, 1])
@pytest.mark.parametrize("wrapper", BOTH)
def test_the_old_one_may_be_alive_on_some_ranks_alone(ranks2: RankPool, wrapper: str, alive_on: int) -> None:
    ranks2.run(_alive_on_one_rank, wrapper, alive_on)


def _inside_a_step(rank: int, wrapper: str, init_sync: bool) -> None:
    model = Mlp()
    old = wrap(wrapper, model)
    assert_trains(old, rank)
    loss = loss_of(old, row_batch(rank))
    with old.no_sync():
        local = loss_of(old, row_batch(rank))
    inputs = row_batch(rank).requires_grad_()
    of_inputs = loss_of(old, inputs)
    with warned():
        new = wrap(wrapper, model, init_sync=init_sync)
    new.zero_grad()
    with pytest.raises(RuntimeError, match=r"the \w+ of this backward's forward has been replaced since"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    if not init_sync:  # else torch refuses them: rank 0's parameters have been written since
        torch.autograd.grad(of_inputs, inputs)
        local.backward()
        new.zero_grad()
    for _ in range(2):
        assert_trains(new, rank)
    loss = loss_of(new, row_batch(rank))
    new.unwrap()
    with pytest.raises(RuntimeError, match=r"forward has been unwrapped since.*Run the forward again"):
        loss.backward()


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_of_the_old_wrappers_forward_is_an_error(ranks2: RankPool, wrapper: str, init_sync: bool) -> None:
    ranks2.run(_inside_a_step, wrapper, init_sync)


def _broken_off(rank: int, wrapper: str) -> None:
    """On one rank an exception has ended a backward of the old one, in which the other rank waits for it."""
    model = Mlp()
    old = wrap(wrapper, model)
    assert_trains(old, rank)

    def planted(gradient: Tensor) -> None:
        raise KeyError("planted")

    loss = loss_of(old, row_batch(rank))
    handle = model.first.weight.register_hook(planted) if rank == 0 else None
    with pytest.raises((KeyError, RuntimeError), match=r"planted|broke off on 1 other rank"):
        loss.backward()
    if handle is not None:
        handle.remove()
    new = wrap(wrapper, model)
    for _ in range(2):
        assert_trains(new, rank)


@pytest.mark.filterwarnings("ignore:gradients of", "ignore:the Mlp is wrapped")
@pytest.mark.parametrize("wrapper", BOTH)
def test_after_a_backward_that_broke_off(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_broken_off, wrapper)


def _refused(rank: int, wrapper: str) -> None:
    """What all ranks refuse leaves the old wrapper in use."""
    model = Mlp()
    old = wrap(wrapper, model)
    with warned(0):
        with pytest.raises(ValueError, match=r"the model is a \w+ already"):
            wrap(wrapper, old)
        with pytest.raises(ValueError, match=r"parameter 0\.head\.weight belongs to a Mlp that \w+ wraps"):
            wrap(wrapper, nn.Sequential(model, nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="reduction"), warned():
        wrap(wrapper, model, reduction="sum" if rank else "mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 1 else "ignore")  # a warning that is an error is one on every rank
        with pytest.raises((UserWarning, RuntimeError), match="the Mlp is wrapped once more"):
            wrap(wrapper, model)
    for _ in range(2):
        assert_trains(old, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_refused_leaves_the_old_wrapper_in_use(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_refused, wrapper)


def _in_two_groups(rank: int, wrapper: str) -> None:
    model = Mlp()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
    old = wrap(wrapper, model, process_group=groups[0]) if rank < 2 else None
    if old is not None:
        old(row_batch(rank)).sum().backward()
        old.zero_grad()
    with warned(int(rank < 2)):
        new = wrap(wrapper, model, process_group=groups[1])
    assert_trains(new, rank)
    if old is not None:
        with pytest.raises(RuntimeError, match=CLOSED):
            old(row_batch(rank))


def test_the_later_of_two_groups_counts(ranks3: RankPool) -> None:
    ranks3.run(_in_two_groups, "EagerDDP")


def _dropped_before_backward(rank: int, wrapper: str) -> None:
    """The old one lives on in a graph alone."""
    model = Mlp()
    loss = loss_of(wrap(wrapper, model), row_batch(rank))
    with warned():
        new = wrap(wrapper, model)
    with pytest.raises(RuntimeError, match="has been replaced since"):
        loss.backward()
    assert_trains(new, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_one_that_only_a_graph_keeps_alive_is_replaced_too(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_dropped_before_backward, wrapper)


def _sweep(rank: int) -> None:
    """As in a notebook: the same cell over and over, other classes in between, one inside of another."""
    model, kept = Mlp(), []
    for number in range(6):
        make = (lambda m: wrap("EagerDDP", m), lambda m: wrap("compile_ddp", m), ApexDDP)[number % 3]
        with warned(int(number > 0)):
            kept.append(make(model))
        x = row_batch(rank, number)
        expected = mean_by_hand(kept[-1], lambda module: loss_of(module, x))  # noqa: B023
        kept[-1].zero_grad()
        loss_of(kept[-1], x).backward()
        assert_gradients(model, expected)
    inner = wrap("EagerDDP", Mlp())
    outer = wrap("EagerDDP", nn.Sequential(inner, nn.Linear(3, 2)))
    with warned():
        again = wrap("EagerDDP", outer.module)
    again(row_batch(rank)).sum().backward()
    with warned():
        assert_trains(wrap("EagerDDP", inner.module), rank)
    with pytest.raises(RuntimeError, match=CLOSED):
        again(row_batch(rank))


@pytest.mark.filterwarnings("ignore:gradients of")
def test_again_and_again_by_wrappers_of_every_class(ranks2: RankPool) -> None:
    ranks2.run(_sweep)


def _is_swapped_later(rank: int) -> None:
    ddp = wrap("EagerDDP", Mlp())
    assert_trains(ddp, rank)
    model = ddp.unwrap()
    del ddp
    gc.collect()
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_trains(wrap("EagerDDP", model), rank)


def test_behind_unwrap_parameters_may_be_swapped(ranks2: RankPool) -> None:
    """torch.utils.swap_tensors takes none that something refers to weakly, as torch.compile does for good."""
    ranks2.run(_is_swapped_later)
