"""What a wrapper sees of its model between forwards, on plain modules."""

import copy

import pytest
from torch import nn

from compiled_ddp.model.managed import ManagedState
from compiled_ddp.model.watch import ModelWatch


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


@pytest.fixture
def watch(model: nn.Sequential) -> ModelWatch:
    return ModelWatch(ManagedState(model))


def test_a_model_as_it_was_has_not_changed(watch: ModelWatch) -> None:
    before = copy.copy(vars(watch))
    assert not watch.look().changed
    assert all(vars(watch)[name] is value for name, value in before.items())


def test_a_module_with_parameters_to_train_is_a_change_until_another_watch_is_made(
    model: nn.Sequential, watch: ModelWatch
) -> None:
    model.append(nn.Linear(1, 1))
    assert watch.look().changed
    assert watch.look().changed
    assert not ModelWatch(ManagedState(model)).look().changed


def test_a_module_without_any_is_no_change_and_what_is_added_to_it_later_is_one(
    model: nn.Sequential, watch: ModelWatch
) -> None:
    inside = nn.Sequential(nn.ReLU())
    model.append(inside)
    assert not watch.look().changed
    inside.append(nn.Linear(1, 1))
    assert watch.look().changed


def test_what_is_unfrozen_or_of_another_dtype_is_a_change(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)
    watch = ModelWatch(ManagedState(model))
    assert not watch.look().changed
    model[0].bias.requires_grad_(True)
    assert watch.look().changed
    watch = ModelWatch(ManagedState(model))
    model.double()
    assert watch.look().changed


def test_a_replaced_parameter_is_an_error_unless_it_is_followed(model: nn.Sequential) -> None:
    strict, following = ModelWatch(ManagedState(model)), ModelWatch(ManagedState(model), follows=True)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"^1\.weight was replaced or removed after the model was wrapped"):
        strict.look()
    assert following.look().changed
