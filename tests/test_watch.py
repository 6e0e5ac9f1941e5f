"""What a wrapper sees of its model between forwards, on plain modules."""

import copy

import pytest
import torch
from growth import calls_in
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


def test_a_module_that_came_frozen_is_a_change_once_it_is_unfrozen(model: nn.Sequential, watch: ModelWatch) -> None:
    model.append(nn.Linear(1, 1).requires_grad_(False))
    assert not watch.look().changed and not watch.may_train_more()
    model[2].requires_grad_(True)
    assert watch.may_train_more() and watch.look().changed


def test_what_is_frozen_for_a_while_is_no_change_whatever_comes_meanwhile(
    model: nn.Sequential, watch: ModelWatch
) -> None:
    model[0].requires_grad_(False)
    model.append(nn.ReLU())
    assert not watch.look().changed
    model[0].requires_grad_(True)
    assert not watch.look().changed and not watch.may_train_more()


def test_what_is_unfrozen_or_of_another_dtype_is_a_change(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)
    watch = ModelWatch(ManagedState(model))
    assert not watch.look().changed
    model[0].bias.requires_grad_(True)
    assert watch.look().changed
    watch = ModelWatch(ManagedState(model))
    model.double()
    assert watch.look().changed


def test_a_grad_dtype_is_a_change_where_it_is_another_dtype_than_gradients_had(model: nn.Sequential) -> None:
    watch = ModelWatch(ManagedState(model))
    assert watch.in_what() == ""
    model[1].weight.grad_dtype = torch.float64
    assert watch.look().changed
    assert watch.in_what().endswith("of 1.weight")
    model[1].weight.grad_dtype = None  # which stands for the parameter's own
    assert not watch.look().changed
    calls = calls_in(watch.look)
    assert not watch.look().changed and calls_in(watch.look) == calls < 10


def test_a_replaced_parameter_is_an_error_unless_it_is_followed(model: nn.Sequential) -> None:
    strict, following = ModelWatch(ManagedState(model)), ModelWatch(ManagedState(model), follows=True)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"^1\.weight was replaced or removed after the model was wrapped"):
        strict.look()
    assert following.look().changed


def test_a_parameter_under_another_name_is_a_change_even_in_the_same_order(
    model: nn.Sequential, watch: ModelWatch
) -> None:
    model[0]._parameters["shift"] = model[0]._parameters.pop("bias")
    assert watch.look().changed


def test_a_parameter_that_has_moved_to_another_module_is_a_change(model: nn.Sequential, watch: ModelWatch) -> None:
    model[1]._parameters = {"weight": model[1].weight, "bias": model[1].bias}
    assert not ModelWatch(ManagedState(model)).look().changed
    bias = model[0]._parameters.pop("bias")
    model[1].register_parameter("of_another", bias)
    assert watch.look().changed


def test_what_is_gone_is_named_beside_what_has_moved(model: nn.Sequential, watch: ModelWatch) -> None:
    model[0] = nn.Sequential(model[0])
    assert watch.look().changed
    model[1].bias = None
    with pytest.raises(RuntimeError, match=r"^1\.bias was replaced or removed"):
        watch.look()


def test_autocast_and_inference_mode_are_no_change_and_hide_none(model: nn.Sequential, watch: ModelWatch) -> None:
    for context in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        with context:
            assert not watch.look().changed
            assert not watch.look().changed
        assert not watch.look().changed
    with torch.autocast("cpu", torch.bfloat16):
        assert not watch.look().changed
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        assert watch.look().changed


def test_buffers_are_those_that_the_model_has_now() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    watch = ModelWatch(ManagedState(model))
    before = watch.buffers()
    assert all(map(lambda one, other: one is other, before, model.buffers()))
    assert watch.buffers() is before
    model[1].running_mean = torch.ones(1)
    model[0].register_buffer("mask", torch.ones(1))
    model.append(nn.BatchNorm1d(1, affine=False))
    assert [id(buffer) for buffer in watch.buffers()] == [id(buffer) for buffer in model.buffers()]
    assert not watch.look().changed
    assert len(watch.buffers()) == 7


def test_a_model_as_it_was_costs_as_many_calls_whatever_its_size() -> None:
    small, large = (
        ModelWatch(ManagedState(nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers))))) for layers in (1, 100)
    )
    assert calls_in(large.look) == calls_in(small.look) < 10
    assert calls_in(large.buffers) == calls_in(small.buffers) < 5
