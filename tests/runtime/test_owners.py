"""A parameter belongs to one wrapper at a time, from its construction until its unwrap() or its end."""

import gc
import weakref
from typing import Any

import pytest
import torch
from models import Mlp, assert_gradients, assert_step, mean_by_hand, row_batch, wrappers
from torch import Tensor, nn

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


class Host(nn.Module):
    """Takes another layer later."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        return self.added(x) if hasattr(self, "added") else x


def heads_of(shared: nn.Module) -> list[nn.Module]:
    return [nn.Sequential(shared, nn.Linear(5, width)) for width in (3, 2, 4)]


def assert_trains(ddp: Any, rank: int) -> None:
    x = row_batch(rank)
    frozen = [name for name, parameter in ddp.module.named_parameters() if not parameter.requires_grad]
    assert_step(ddp, lambda module: module(x).square().sum(), unused=frozen)


# ---- two wrappers ----------------------------------------------------------------------------------------------------

REFUSED = r"parameter {} belongs to a Sequential that \w+ wraps.*would both scale its gradient.*unwrap\(\) the other"


def _refused_at_construction(rank: int, wrapper: str) -> None:
    one, other, third = heads_of(shared := nn.Linear(5, 5))
    first = wrap(wrapper, one)
    with pytest.raises(ValueError, match=REFUSED.format(r"0\.weight")):
        wrap(wrapper, other)
    # Not forgotten for a wrapper in which it is frozen, neither while that one lives nor afterwards.
    shared.requires_grad_(False)
    second = wrap(wrapper, other)
    assert_trains(second, rank)
    shared.requires_grad_(True)
    with pytest.raises(ValueError, match=REFUSED.format(r"0\.weight")):
        wrap(wrapper, third)
    second.unwrap()
    with pytest.raises(ValueError, match=REFUSED.format(r"0\.weight")):
        wrap(wrapper, third)
    assert_trains(first, rank)
    first.unwrap()
    assert_trains(wrap(wrapper, third), rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_of_another_wrapper_is_refused_at_construction(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_refused_at_construction, wrapper)


def _unfrozen_in_both(rank: int, wrapper: str, frozen_in_first: bool) -> None:
    one, other, _ = heads_of(shared := nn.Linear(5, 5))
    shared.requires_grad_(not frozen_in_first)
    first = wrap(wrapper, one)
    shared.requires_grad_(False)
    second = wrap(wrapper, other)
    assert_trains(second, rank)
    shared.requires_grad_(True)
    for _ in range(2):
        assert_trains(first, rank)
        with pytest.raises(ValueError, match=REFUSED.format(r"0\.weight")):
            second(row_batch(rank))
    first.unwrap()
    assert_trains(second, rank)


@pytest.mark.parametrize("frozen_in_first", [False, True])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_of_two_wrappers_that_is_unfrozen_is_refused_in_the_later_ones_forward(
    ranks2: RankPool, wrapper: str, frozen_in_first: bool
) -> None:
    ranks2.run(_unfrozen_in_both, wrapper, frozen_in_first)


def _added(rank: int, wrapper: str, bad_ranks: tuple[int, ...]) -> str:
    one, _, _ = heads_of(nn.Linear(5, 5))
    first, second = wrap(wrapper, one), wrap(wrapper, Host())
    for ddp in (first, second):
        assert_trains(ddp, rank)
    second.module.added = first.module[0] if rank in bad_ranks else nn.Linear(5, 5)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        second(row_batch(rank))
    del second.module.added
    for ddp in (first, second):
        assert_trains(ddp, rank)
    return str(caught.value)


@pytest.mark.parametrize("bad_ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_of_another_wrapper_that_is_added_is_refused_on_every_rank(
    ranks2: RankPool, wrapper: str, bad_ranks: tuple[int, ...]
) -> None:
    for message in ranks2.run(_added, wrapper, bad_ranks):
        assert "parameter added.weight belongs to a Sequential" in message


def _frozen_in_both(rank: int, wrapper: str) -> None:
    one, other, _ = heads_of(nn.Linear(5, 5).requires_grad_(False))
    first, second = wrap(wrapper, one), wrap(wrapper, other)
    for ddp in (first, second, first):
        assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_that_stays_frozen_may_be_in_two_wrappers(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_frozen_in_both, wrapper)


# ---- a wrapper that was dropped --------------------------------------------------------------------------------------


def hooks_on(model: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


def _dropped(rank: int, first: str, second: str, collected: str) -> None:
    model, steps = Mlp(), []
    model.head.bias.register_post_accumulate_grad_hook(lambda bias: steps.append(bias.grad.clone()))
    ddp = wrap(first, model)
    assert_trains(ddp, rank)
    assert len(steps) == 1
    loss = ddp(row_batch(rank)).square().sum()
    loss.backward()  # still there afterwards, as in a training loop
    runtime, group = weakref.ref(ddp._runtime), weakref.ref(ddp._runtime.communicator.group)
    del ddp
    if collected == "here" or (collected == "on one rank" and rank == 0):
        gc.collect()
        assert runtime() is None
        assert hooks_on(model) == 1
    again = wrap(second, model)
    assert runtime() is None
    assert group() is None, "its threads live on"
    for _ in range(2):
        steps.clear()
        assert_trains(again, rank)
        assert len(steps) == 1 and torch.equal(steps[0], model.head.bias.grad), "a hook of the user's saw another"
    again.unwrap()
    assert hooks_on(model) == 1
    del loss


@pytest.mark.parametrize("collected", ["here", "on one rank", "later"])
@pytest.mark.parametrize(("first", "second"), [("EagerDDP", "compile_ddp"), ("compile_ddp", "EagerDDP")])
def test_a_model_whose_wrapper_was_dropped_can_be_wrapped_again(
    ranks2: RankPool, first: str, second: str, collected: str
) -> None:
    ranks2.run(_dropped, first, second, collected)


def _dropped_before_backward(rank: int, wrapper: str) -> None:
    model = Mlp()
    ddp = wrap(wrapper, model)
    assert_trains(ddp, rank)
    x = row_batch(rank, 1)
    expected = mean_by_hand(ddp, lambda module: module(x).square().sum())
    ddp.zero_grad()
    loss = ddp(x).square().sum()
    runtime = weakref.ref(ddp._runtime)
    del ddp
    if rank == 0:
        gc.collect()
    with pytest.raises(ValueError, match=r"belongs to a Mlp that \w+ wraps"):
        wrap(wrapper, nn.Sequential(model))
    loss.backward()
    assert_gradients(model, expected)
    gc.collect()
    assert runtime() is None
    assert_trains(wrap(wrapper, model), rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrapper_that_was_dropped_lives_until_the_backward_of_its_forward(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_dropped_before_backward, wrapper)


def _parameter_of_a_dropped_one(rank: int, wrapper: str) -> None:
    one, other, _ = heads_of(nn.Linear(5, 5))
    first = wrap(wrapper, one)
    assert_trains(first, rank)
    del first
    assert_trains(wrap(wrapper, other), rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_of_a_wrapper_that_was_dropped_is_taken(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_parameter_of_a_dropped_one, wrapper)
