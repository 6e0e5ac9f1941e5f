"""Faults planted between a backward and its result: each is found by name, on every rank, in the first backward.

What a compiler might do is planted in the graph that it is given, behind all passes: a part of a bucket that is bound
instead of written, a copy left out, one element short, two gradients swapped, a mean applied twice, and a kernel that
reads a bucket in flight, here at the worst moment, when other ranks' sums are in it. That one is found by what it makes
of them; which order a compiler's code has, the readers of CUDA code look at (test_cuda_code.py).
"""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from models import assert_equal_on_all_ranks
from torch import Tensor, nn
from torch.fx import Graph, Node

from compiled_ddp import EagerDDP, compile_ddp, torch_private
from compiled_ddp import functional as ddp
from compiled_ddp.passes.ops import LAUNCHES, PACKS
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.plan import Bucket
from compiled_ddp.step.buffers import FlatBuffer
from ranks import RankPool

_wait = torch.ops._c10d_functional.wait_tensor.default
UNWRITTEN, DIFFERENT = "was never written into its bucket", "is not what the same backward without"


class Model(nn.Module):
    """Two weights of one shape, next to each other in their bucket."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x))))).square().sum()


def rows(rank: int, width: int) -> Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(rank))


# ---- faults ----------------------------------------------------------------------------------------------------------


def _pack(parts: list[Tensor], into: Tensor | None, write: Callable[[int, Tensor, Tensor], None]) -> Tensor:
    """What the operator does, with `write(number, place, part)` for each part."""
    flat = parts[0].new_empty(sum(part.numel() for part in parts)) if into is None else into
    end = 0
    for number, part in enumerate(parts):
        write(number, flat[end : end + part.numel()], part.reshape(-1))
        end += part.numel()
    return flat


def _write_nothing(wrong: int, number: int, place: Tensor, part: Tensor) -> None:
    if number != wrong:
        place.copy_(part)


def _write_all_but_one(wrong: int, number: int, place: Tensor, part: Tensor) -> None:
    end = len(part) - (number == wrong)
    place[:end].copy_(part[:end])


def _write_another_place(wrong: int, number: int, place: Tensor, part: Tensor) -> None:
    """Bound to memory of its own, which nobody looks at."""
    (place.clone() if number == wrong else place).copy_(part)


def _by(write: Callable[[int, int, Tensor, Tensor], None]) -> Callable[[Graph, Node, int], None]:
    def plant(graph: Graph, pack: Node, wrong: int) -> None:
        def wrongly(parts: list[Tensor], into: Tensor | None = None) -> Tensor:
            return _pack(parts, into, functools.partial(write, wrong))

        pack.target = wrongly

    return plant


def _swap(graph: Graph, pack: Node, wrong: int) -> None:
    parts = list(pack.args[0])
    parts[wrong], parts[wrong + 1] = parts[wrong + 1], parts[wrong]
    pack.args = (parts, *pack.args[1:])


def _divide_twice(graph: Graph, pack: Node, wrong: int) -> None:
    parts = list(pack.args[0])
    with graph.inserting_before(pack):
        parts[wrong] = graph.call_function(torch.ops.aten.mul.Tensor, (parts[wrong], 0.5))
    pack.args = (parts, *pack.args[1:])


def _read_in_flight(graph: Graph, pack: Node, wrong: int) -> None:
    """A part of a later bucket is made from this one's, where it lies, and other ranks' sums are there already."""
    (launch,) = (user for user in pack.users if user.target in LAUNCHES)
    later = [node for node in graph.nodes if node.target in PACKS][-1]
    part = pack.args[0][wrong]

    def from_bucket(flat: Tensor, before: int, part: Tensor, own: Tensor) -> Tensor:
        return own * (_wait(flat)[before : before + part.numel()].norm() / part.norm())

    before = 0
    with graph.inserting_before(later):
        read = graph.call_function(from_bucket, (launch, before, part, later.args[0][0]))
    later.args = ([read, *later.args[0][1:]], *later.args[1:])


FAULTS: dict[str, tuple[Callable[[Graph, Node, int], None], str]] = {
    "bound instead of written": (_by(_write_another_place), UNWRITTEN),
    "a copy left out": (_by(_write_nothing), UNWRITTEN),
    "one element short": (_by(_write_all_but_one), "element LAST was never written"),
    "swapped": (_swap, DIFFERENT),
    "the mean twice": (_divide_twice, DIFFERENT),
}


def _bucket_of_two_weights(graph: Graph) -> tuple[Node, int]:
    """The pack that has two parts of one shape in a row, and the place of the first."""
    for pack in (node for node in graph.nodes if node.target in PACKS):
        values = [part.meta.get("val") for part in pack.args[0]]
        sizes = [() if value is None else tuple(value.shape) for value in values]
        for place in range(len(sizes) - 1):
            if sizes[place] == sizes[place + 1] and len(sizes[place]) == 2:
                return pack, place
    raise AssertionError("no two gradients of one shape are next to each other")


def _first_bucket(graph: Graph) -> tuple[Node, int]:
    return next(node for node in graph.nodes if node.target in PACKS), 0


class Planted:
    """Within this context graphs of wrappers and of functional steps are compiled with a fault."""

    def __init__(
        self,
        plant: Callable[[Graph, Node, int], None],
        find: Callable[[Graph], tuple[Node, int]] = _bucket_of_two_weights,
    ) -> None:
        self._plant, self._find, self._patch = plant, find, pytest.MonkeyPatch()

    def __enter__(self) -> None:
        for pipeline in (Pipeline, StepPipeline):
            self._patch.setattr(pipeline, "run", functools.partialmethod(Planted._run, pipeline.run, self))

    @staticmethod
    def _run(pipeline: Any, run: Callable[..., None], planted: "Planted", graph: Graph, **options: Any) -> None:
        run(pipeline, graph, **options)
        planted._plant(graph, *planted._find(graph))

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


# ---- compile_ddp -----------------------------------------------------------------------------------------------------


def _first_step(rank: int, width: int, **options: Any) -> str:
    torch.manual_seed(0)
    wrapped = compile_ddp(Model(width), smallest_graph_mb=0, **options)
    loss = wrapped(rows(rank, width))
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    message = str(caught.value).removeprefix(f"rank {rank}")
    assert_equal_on_all_ranks(message)
    assert "(wrong in its bucket)" in str(wrapped.explain())
    return message


def _faults_of_graphs(rank: int) -> dict[str, tuple[int, str]]:
    """A width for each: a graph of an equal model would be shared."""
    found = {}
    for width, (name, (plant, _)) in enumerate(FAULTS.items(), start=6):
        with Planted(plant):
            found[name] = width, _first_step(rank, width, backend="aot_eager")
    with Planted(_read_in_flight, _first_bucket):
        found["read in flight"] = 20, _first_step(rank, 20, backend="aot_eager", bucket_cap_mb=0.0001)
    return found


def test_what_is_planted_in_a_graph_is_named_on_every_rank_in_the_first_backward(ranks2: RankPool) -> None:
    for found in ranks2.run(_faults_of_graphs):
        width, message = found.pop("read in flight")
        assert DIFFERENT in message and "head.weight" not in message and "Take no step" in message, message
        for name, (width, message) in found.items():
            told = FAULTS[name][1].replace("LAST", str(width * width - 1))
            assert f"second.weight: {'it ' if told == DIFFERENT else ''}" in message and told in message, message
            assert ("first.weight" in message) == (name == "swapped"), message


def _fault_of_a_new_graph(rank: int) -> list[str]:
    """On rank 0 alone, in the third step, by a batch of another size."""
    wrapped = compile_ddp(Model(14), backend="aot_eager", smallest_graph_mb=0, dynamic=False)
    messages = []
    for step in range(4):
        wrapped.zero_grad()
        batch = rows(rank, 14)[: 16 - step // 2]
        with Planted(_swap) if step == 2 and rank == 0 else Planted(lambda *_: None):
            loss = wrapped(batch)
            try:
                loss.backward()
                messages.append("")
            except RuntimeError as error:
                messages.append(str(error))
    return messages


def test_a_graph_that_is_new_later_is_compared_when_it_first_runs(ranks2: RankPool) -> None:
    for first, second, third, _ in ranks2.run(_fault_of_a_new_graph):
        assert (first, second) == ("", "")
        assert "first.weight, second.weight was reduced from a bucket" in third and DIFFERENT in third


def _bind(code: str) -> str:
    """Leave a product in memory of its own that was to be written into a bucket."""
    alias = re.search(r"(buf\d+) = reinterpret_tensor\(\w+, \(24, 24\), .*# alias", code)
    if alias is None:  # a forward, or a kernel
        return code
    return re.sub(rf"extern_kernels\.mm\((.*), out={alias[1]}\)", r"bound = torch.mm(\1)", code, count=1)


def _faults_of_generated_code(rank: int) -> list[str]:
    with torch_private.for_tests.generated_code_changed(_bind):
        bound = _first_step(rank, 24)
    # As on a GPU, where the code allocates its buckets by itself.
    with mock.patch.object(Bucket, "kept", False), torch_private.for_tests.generated_code_changed(_bind):
        not_lent = _first_step(rank, 24, bucket_cap_mb=0.004, first_bucket_mb=0.004)
    with Planted(_swap), torch_private.for_tests.generated_code_changed(lambda code: code):
        swapped = _first_step(rank, 25)
    return [bound, not_lent, swapped]


@pytest.mark.inductor
def test_what_is_planted_in_generated_code_is_named_on_every_rank(ranks2: RankPool) -> None:
    for bound, not_lent, swapped in ranks2.run(_faults_of_generated_code, timeout_seconds=600.0):
        assert UNWRITTEN in bound and ".weight: element 0 " in bound, bound
        assert UNWRITTEN in not_lent and ".weight: element 0 " in not_lent, not_lent
        assert DIFFERENT in swapped and "first.weight" in swapped and "second.weight" in swapped, swapped


# ---- EagerDDP --------------------------------------------------------------------------------------------------------


def _swapped(views: list[Tensor], gradients: list[Tensor], share: float) -> None:
    second, first = (n for n, gradient in enumerate(gradients) if gradient.shape == (6, 6))
    for view, gradient in ((views[first], gradients[second]), (views[second], gradients[first])):
        torch.mul(gradient, share, out=view)


def _left_out(views: list[Tensor], gradients: list[Tensor], share: float) -> None:
    views[-1].zero_()


def _short(views: list[Tensor], gradients: list[Tensor], share: float) -> None:
    views[-1].view(-1)[-1] = 0.0


def _twice(views: list[Tensor], gradients: list[Tensor], share: float) -> None:
    views[-1].mul_(share)


HOOKS = {"swapped": _swapped, "left out": _left_out, "one element short": _short, "the mean twice": _twice}


def _faults_of_hooks(rank: int) -> dict[str, str]:
    put_all, found = FlatBuffer.put_all, {}
    for name, fault in HOOKS.items():

        def put_wrongly(
            buffer: FlatBuffer,
            indices: list[int],
            gradients: list[Tensor],
            share: float,
            *,
            in_place: bool,
            fault: Callable[[list[Tensor], list[Tensor], float], None] = fault,
        ) -> None:
            put_all(buffer, indices, gradients, share, in_place=in_place)
            fault([buffer.views[index] for index in indices], gradients, share)

        torch.manual_seed(0)
        wrapped = EagerDDP(Model(6))
        loss = wrapped(rows(0, 6))  # equal on all ranks
        with mock.patch.object(FlatBuffer, "put_all", put_wrongly), pytest.raises(RuntimeError) as caught:
            loss.backward()
        found[name] = str(caught.value)
    return found


def test_what_is_planted_in_a_bucket_of_hooks_is_named_on_every_rank(ranks2: RankPool) -> None:
    for found in ranks2.run(_faults_of_hooks):
        for name, message in found.items():
            assert "not what their own gradients add up to" in message, message
            assert ("second.weight" in message) == (name == "swapped") and "first.weight" in message, (name, message)


# ---- functional ------------------------------------------------------------------------------------------------------


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (torch.tanh(torch.tanh(x @ params["first"]) @ params["second"]) @ params["head"]).square().sum()


def _faults_of_steps(rank: int) -> dict[str, str]:
    generator, found = torch.Generator().manual_seed(0), {}
    shapes = {"first": (6, 6), "head": (6, 3), "second": (6, 6)}
    params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, (plant, _) in FAULTS.items():
        step = ddp.compile(ddp.grad(_loss, process_group=ddp.Communicator()), backend="aot_eager")
        with Planted(plant), pytest.raises(RuntimeError) as caught:
            step(params, rows(rank, 6))
        found[name] = str(caught.value)
    return found


def test_what_is_planted_in_a_functional_step_is_named_on_every_rank(ranks2: RankPool) -> None:
    for found in ranks2.run(_faults_of_steps):
        for name, message in found.items():
            assert f"['second']: {'it ' if FAULTS[name][1] == DIFFERENT else ''}" in message, message
            assert FAULTS[name][1].replace("LAST", "35") in message and "grad(_loss)" in message, message
