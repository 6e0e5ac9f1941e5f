"""Memory that generated code allocates is filled for the thread that asks for it, and for as long as it does."""

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_ddp.torch_private.for_tests import generated_modules_are
from compiled_ddp.torch_private.inductor import allocations_filled

SEVEN = {(7, torch.float32)}


@pytest.fixture
def module() -> Iterator[Any]:
    """Stands for a generated module, whose memory is zeros."""
    module = types.ModuleType("generated")
    module.empty_strided_cpu = _zeros  # type: ignore[attr-defined]
    with generated_modules_are([module]):
        yield module
    assert module.empty_strided_cpu is _zeros


def _zeros(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def _fill(memory: Tensor) -> None:
    memory.fill_(2.0)


def _allocated(module: Any, size: tuple[int, ...] = (7,), dtype: torch.dtype = torch.float32) -> float:
    return float(module.empty_strided_cpu(size, (1,), dtype).sum())


def test_what_is_meant_is_filled(module: Any) -> None:
    with allocations_filled(SEVEN, _fill):
        assert _allocated(module) == 14.0
        assert not any((_allocated(module, (8,)), _allocated(module, (7, 1)), _allocated(module, dtype=torch.float64)))
    assert _allocated(module) == 0.0


def test_an_inner_graph_leaves_the_outer_one_what_it_asked_for(module: Any) -> None:
    with allocations_filled(SEVEN, _fill):
        with allocations_filled({(3, torch.float32)}, _fill):
            assert (_allocated(module), _allocated(module, (3,))) == (0.0, 6.0)
        assert (_allocated(module), _allocated(module, (3,))) == (14.0, 0.0)


def test_threads_that_overlap_fill_their_own_and_leave_nothing_behind(module: Any) -> None:
    """The first to enter is the first to leave."""
    inside, may_leave = threading.Event(), threading.Event()
    found = []

    def first() -> None:
        with allocations_filled({(3, torch.float32)}, _fill):
            inside.set()
            assert may_leave.wait(30)
            found.append((_allocated(module), _allocated(module, (3,))))

    thread = threading.Thread(target=first)
    with contextlib.ExitStack() as stack:
        thread.start()
        assert inside.wait(30)
        stack.enter_context(allocations_filled(SEVEN, _fill))
        may_leave.set()
        thread.join(30)
        assert found == [(0.0, 6.0)]
        assert (_allocated(module), _allocated(module, (3,))) == (14.0, 0.0)
    assert (_allocated(module), _allocated(module, (3,))) == (0.0, 0.0)
