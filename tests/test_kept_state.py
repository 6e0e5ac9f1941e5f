"""What a warm-up's forward changes is put back: buffers of every layout, frozen parameters, every random state."""

import random
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import pytest
import torch
from calibrations import calibration
from torch import Tensor, nn

from compiled_ddp import compile_ddp
from compiled_ddp.graph.kept_state import random_state_kept, state_kept
from compiled_ddp.ranks import pretended


class Codebook(nn.Module):
    """As usual for vector quantisation: a frozen parameter and a count that the forward moves."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.code = nn.Parameter(torch.zeros(width, 4), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.code.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.count += 1
        return y + self.code[0]


def _warmed_up(model: nn.Module) -> nn.Module:
    with pretended.world(2, backend="gloo", calibration=calibration()):
        compile_ddp(model, backend="aot_eager").warmup(torch.ones(2, 4))
    return model


def test_a_frozen_parameter_that_the_forward_writes_is_put_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = _warmed_up(Codebook())
    assert isinstance(model, Codebook)
    assert model.code.abs().sum() == 0.0 and model.count.item() == 0.0


def test_a_frozen_parameter_that_takes_too_much_memory_is_warned_of_and_not_copied() -> None:
    with pytest.warns(UserWarning, match="which writes parameter 'code'.* make it a buffer, or load it again"):
        model = _warmed_up(Codebook(width=1000))
    assert isinstance(model, Codebook)
    assert model.code.abs().sum() > 0.0 and model.count.item() == 0.0


def test_a_large_frozen_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of a frozen backbone: a copy of it would double what the model takes."""
    model = nn.Sequential(nn.Linear(100, 100).requires_grad_(False), nn.Linear(100, 1))
    cloned, clone = list[int](), Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda this, **kwargs: (cloned.append(this.numel()), clone(this, **kwargs))[1])
    with state_kept(model):
        pass
    assert cloned == [100], "the bias, which is as large as the trained weight"


@pytest.mark.parametrize(
    "make",
    [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_sparse_csr(), lambda: torch.ones(3, device="meta")],
)
def test_buffers_that_cannot_be_compared_are_kept(make: Callable[[], Tensor]) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("held", make(), persistent=False)
    with state_kept(module):
        module.held.mul_(2)
    if not module.held.is_meta:
        torch.testing.assert_close(module.held.to_dense(), torch.eye(3))


def test_a_warm_up_of_a_model_with_a_sparse_buffer_runs() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.eye(4).to_sparse(), persistent=False)
    model._ddp_params_and_buffers_to_ignore = ["mask"]
    _warmed_up(model)


def test_what_the_forward_raises_is_raised_with_a_sparse_buffer_too() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("held", torch.eye(3).to_sparse(), persistent=False)
    with pytest.raises(ZeroDivisionError), state_kept(module):
        raise ZeroDivisionError


def test_pythons_and_numpys_random_numbers_go_on_where_they_were() -> None:
    numpy = pytest.importorskip("numpy")

    def drawn() -> tuple[float, float, float]:
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    with random_state_kept():
        first = drawn()
    assert drawn() == first


def test_a_process_without_numpy_draws_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    with random_state_kept():
        first = random.random()
    assert random.random() == first and "numpy.random" not in sys.modules


def test_numpys_state_is_put_back_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    numpys = ModuleType("numpy.random")
    numpys.get_state, numpys.set_state = mock.Mock(return_value="before"), mock.Mock()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numpy.random", numpys)
    with random_state_kept():
        pass
    numpys.set_state.assert_called_once_with("before")
