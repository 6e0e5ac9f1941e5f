"""Compilers run with room for their frames and without full collections, and nothing else does."""

import gc
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import pytest
import torch
from models import wrappers
from torch import nn
from torch.fx import Graph, GraphModule

from compiled_ddp.graph.telling import compiling
from compiled_ddp.torch_private.captures import Capture
from ranks import RankPool


def _codes_below() -> Iterator[CodeType]:
    frame = sys._getframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _is_set_up() -> bool:
    has_room = any(code.co_stacksize > 2**15 for code in _codes_below())
    return has_room and (gc.get_threshold()[2] > 2**30 or sys.version_info >= (3, 14))


@pytest.mark.parametrize("module", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))], ids=["torch's", "a whole one"])
def test_a_capture_is_set_up_wherever_dynamo_has_no_code_yet(module: nn.Module) -> None:
    torch.compiler.reset()
    captures, in_backend = [], []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        set_up = compiling(function)

        def call(frame: Any, *args: Any) -> Any:
            captures.append(frame.f_code.co_name)
            return set_up(frame, *args)

        call.__dict__.update(set_up.__dict__)
        return call

    def backend(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        in_backend.append(_is_set_up())
        return graph_module.forward

    run = Capture(backend, fullgraph=False, dynamic=False, recurrent=False, compiling=noted).of(module)
    x = torch.ones(4, 3)
    assert torch.equal(run(x), module(x))
    once = len(captures)
    run(x)
    assert (len(captures), in_backend) == (once, [True]) and once > 0, "a compiled call is none of a compiler"
    run(x[:2])
    assert len(captures) > once and in_backend == [True, True]
    assert not _is_set_up()


def _backward_is_set_up(_: int) -> tuple[list[bool], bool]:
    module = wrappers(["compile_ddp"])["compile_ddp"](nn.Linear(3, 2))
    loss, found = module(torch.ones(4, 3)).sum(), []
    lint = Graph.lint
    with unittest.mock.patch.object(Graph, "lint", lambda graph: (found.append(_is_set_up()), lint(graph))):
        loss.backward()  # whose last pass lints the graph
    return found, _is_set_up()


def test_a_backward_is_compiled_in_the_same_way(ranks2: RankPool) -> None:
    for in_passes, afterwards in ranks2.run(_backward_is_set_up):
        assert in_passes == [True] and not afterwards
