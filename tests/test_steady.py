"""[Note: steady step]: backwards like those before them, on two ranks in one process, and what turns them general."""

import contextlib
import random
import unittest.mock
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from run_times import (
    ALL,
    EVERY,
    RunTime,
    Two,
    assert_steps_well,
    forget_gradients,
    makes_two_ranks,
    mean,
    refined,
    together,
    uses,
)
from torch import Tensor

from compiled_ddp.checks.values import Reference
from compiled_ddp.options import Options
from compiled_ddp.step import gradients, hooks
from compiled_ddp.step import steady as steady_module
from compiled_ddp.step.channel import ForwardNumbers
from compiled_ddp.step.steady import SteadyGraph, SteadyHooks, SteadyStep
from compiled_ddp.step.synchronised import SynchronisedBackward


@pytest.fixture
def two() -> Iterator[Two]:
    with makes_two_ranks() as make:
        yield make


@pytest.fixture
def made_general(monkeypatch: pytest.MonkeyPatch) -> list[SteadyStep]:
    """The steady steps that have been turned into general backwards."""
    found: list[SteadyStep] = []
    turn = SteadyStep.as_general

    def as_general(steady: SteadyStep) -> SynchronisedBackward:
        found.append(steady)
        return turn(steady)

    monkeypatch.setattr(SteadyStep, "as_general", as_general)
    return found


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[SteadyStep]:
    found: list[SteadyStep] = []
    begin = SteadyStep.begin

    def noted(steady: SteadyStep, forwards: ForwardNumbers) -> None:
        found.append(steady)
        begin(steady, forwards)

    monkeypatch.setattr(SteadyStep, "begin", noted)
    return found


def steady(
    two: Two, step: Callable[[RunTime], None] = ALL, *, used: Collection[int] = EVERY, **options: Any
) -> tuple[RunTime, RunTime]:
    """Two ranks whose next backward is a steady one."""
    ranks = refined(two, step, used=used, **options)
    for _ in range(4):  # the proof looks at the first ones
        assert_steps_well(*ranks, step=step, used=used)
    forget_gradients(*ranks)
    return ranks


IN_GRAPH = uses(graph=(2, 1, 0))


def test_every_option_is_one_that_steady_steps_look_at_or_acts_elsewhere() -> None:
    """Whoever adds an option decides: `_may_be_steady` looks at it, or warm steps on a CPU go on without asking."""
    looked_at = {
        "scaling",
        "piggyback",
        "bucket_rule",
        "gradient_as_bucket_view",
        "static_graph",
        "comm_hook",
        "reduction",
    }
    in_plans = {"bucket_cap_mb", "first_bucket_mb", "bucket_cap_mb_list", "smallest_graph_mb", "calibration", "plan"}
    in_plans |= {"embedding_rows"}
    in_compilers = {"backend", "fullgraph", "dynamic", "mode", "options", "strict", "warmup_chooses", "compile_once"}
    in_forwards = {"broadcast_buffers", "forward_sync_buffers", "init_sync", "keep_buffers", "follows_model"}
    at_the_end = {"check_steps", "verify"}
    assert {field.name for field in fields(Options)} == looked_at | in_plans | in_compilers | in_forwards | at_the_end


@pytest.mark.parametrize("option", [{"gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
def test_what_hooks_alone_do_otherwise_keeps_no_graph_from_steady_steps(
    two: Two, begun: list[SteadyStep], option: dict[str, bool]
) -> None:
    ranks = steady(two, IN_GRAPH, verify="off", **option)
    begun.clear()
    assert_steps_well(*ranks, step=IN_GRAPH)
    assert [type(one) for one in begun] == 2 * [SteadyGraph]


@pytest.mark.parametrize("step", [ALL, IN_GRAPH], ids=["hooks", "graph"])
@pytest.mark.parametrize("small_buckets", [False, True])
def test_steps_like_those_before_them_are_steady_from_beginning_to_end(
    two: Two,
    step: Callable[[RunTime], None],
    small_buckets: bool,
    begun: list[SteadyStep],
    made_general: list[SteadyStep],
) -> None:
    ranks = steady(two, step, verify="off", **({"bucket_cap_mb": 1e-6} if small_buckets else {}))
    begun.clear()
    made_general.clear()
    for _ in range(3):
        assert_steps_well(*ranks, step=step)
    assert [type(one) for one in begun] == 6 * [SteadyHooks if step is ALL else SteadyGraph]
    assert not made_general
    for rank in ranks:
        assert rank.runtime._steady_graph._of_graph is None, "gradients are still held"
        buckets = rank.runtime._steady_hooks._buckets if step is ALL else []
        assert all(not bucket.left for bucket in buckets), "gradients are still held"


FEW, FEW_IN_GRAPH = uses(0, 1), uses(graph=(1, 0))  # p2 is used on no rank


@pytest.mark.parametrize("step", [FEW, FEW_IN_GRAPH], ids=["hooks", "graph"])
def test_steps_without_what_no_rank_uses_are_steady_until_one_does(
    two: Two, step: Callable[[RunTime], None], begun: list[SteadyStep], made_general: list[SteadyStep]
) -> None:
    ranks = steady(two, step, used=(0, 1), verify="off")
    begun.clear()
    made_general.clear()
    for _ in range(2):
        assert_steps_well(*ranks, step=step, used=(0, 1))
    assert len(begun) == 4 and not made_general
    begun.clear()
    uses_it = ALL if step is FEW else uses(2, graph=(1, 0))
    forget_gradients(*ranks)
    assert together(ranks, uses_it, step) == [None, None]
    assert not begun[1:], "the rank that uses it tells the others, and so begins in the general way"
    for rank in ranks:
        assert torch.equal(rank.tensors[2].grad, ranks[0].values(2) / 2)  # type: ignore[arg-type]
    for _ in range(3):
        assert_steps_well(*ranks, step=uses_it)


@pytest.mark.parametrize("step", [FEW, FEW_IN_GRAPH], ids=["hooks", "graph"])
def test_a_grad_that_somebody_puts_where_no_rank_uses_any_is_what_it_is_in_the_general_way(
    two: Two, step: Callable[[RunTime], None], begun: list[SteadyStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    def assign(rank: RunTime) -> None:
        rank.tensors[2].grad = torch.ones(4)

    def errors() -> list[str]:
        ranks = steady(two, step, used=(0, 1), verify="off")
        begun.clear()
        if step is FEW_IN_GRAPH:
            with _with_hooks_in_the_graphs_way(ranks, assign, graph=(1, 0)) as act:
                return [str(error) for error in together(ranks, act)]
        handles = [_when(rank, 0, assign) for rank in ranks]
        found = [str(error) for error in together(ranks, step)]
        for handle in handles:
            handle.remove()
        return found

    found = errors()
    assert begun and "p2" in found[0]
    for kind in (SteadyHooks, SteadyGraph):
        monkeypatch.setattr(kind, "fits", lambda _: False)
    assert found == errors()


# ---- both ways to the same bits --------------------------------------------------------------------------------------


def _random_step(rank: RunTime, seed: int, *, in_graph: bool, seldom: bool) -> None:
    """The same on both ranks but for what each uses, whether it keeps .grad, and where an exception ends the graph.

    With `seldom` p2 is.
    """
    of_all, own = random.Random(seed), random.Random(2 * seed + rank.rank)
    if of_all.random() < 0.7:
        for tensor in rank.tensors:
            tensor.grad = None
    breaks = ["breaks", "retries"] if in_graph else []
    kind = of_all.choice(["all", "all", "all", "some", "twice", "local", "hook", "tensor hook", *breaks])
    used = [0, 1] if seldom and own.random() < 0.8 else [0, 1, 2]
    of_graph, outside = ((1, 0), used[2:]) if seldom else ((2, 1, 0), used[3:])
    own.shuffle(used)
    if kind == "some":
        used = used[: own.randint(0, 3)]
    if kind == "local":
        sum(((tensor * 3.0).sum() for tensor in rank.tensors), torch.zeros(())).backward()
    handle: Any = None
    if kind == "hook":
        handle = rank.tensors[own.randrange(3)].register_post_accumulate_grad_hook(_halve)
    elif kind == "tensor hook":
        handle = rank.tensors[own.randrange(3)].register_hook(lambda gradient: 3.0 * gradient)
    most = {"breaks": own.choice([0, 1, 2, 3, 99]), "retries": of_all.choice([0, 1, 2])}.get(kind, 99)
    try:
        for _ in range(2 if kind == "twice" else 1):
            if in_graph and kind == "some":
                rank.step(*used[:1], graph=of_graph)  # an error where something comes from outside
            elif in_graph:
                rank.step(*outside, graph=of_graph, most=most, tries=2 if kind == "retries" else 1)
            else:
                rank.step(*used)
    finally:
        if handle is not None:
            handle.remove()


def _halve(tensor: Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.mul_(0.5)


def _gradients(two: Two, seed: int, *, in_graph: bool = False, seldom: bool = False, **options: Any) -> list[list[Any]]:
    step_of_few, step_of_all = (FEW_IN_GRAPH, IN_GRAPH) if in_graph else (FEW, ALL)
    ranks = steady(two, step_of_few, used=(0, 1), **options) if seldom else steady(two, step_of_all, **options)
    found = []
    for step in range(12):

        def run(rank: RunTime, step: int = step) -> None:
            _random_step(rank, 100 * seed + step, in_graph=in_graph, seldom=seldom)

        errors = together(ranks, run)
        found.append([repr(errors), *([_bits(t.grad) for t in rank.tensors] for rank in ranks)])
    return found


def _bits(gradient: Tensor | None) -> Any:
    return None if gradient is None else gradient.tolist()


@pytest.mark.product
@pytest.mark.parametrize("seldom", [False, True], ids=["", "p2 is used seldom"])
@pytest.mark.parametrize("most_together", [None, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_leave_the_same_bits_as_in_the_general_way(
    two: Two,
    seed: int,
    most_together: int | None,
    seldom: bool,
    begun: list[SteadyStep],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gradients that are noted, or of more than `most_together` elements, and so large: of 3, 2 and 4."""
    monkeypatch.setattr(hooks, "_FEWEST_NOTED", 1)
    if most_together is not None:
        for module in (hooks, gradients, steady_module):
            monkeypatch.setattr(module, "MOST_ELEMENTS_TOGETHER", most_together)
            monkeypatch.setattr(module, "MOST_ELEMENTS_GATHERED", most_together + 1)
    found = _gradients(two, seed, seldom=seldom)
    assert begun
    begun.clear()
    monkeypatch.setattr(SteadyHooks, "fits", lambda _: False)
    assert found == _gradients(two, seed, seldom=seldom)
    assert not begun


@pytest.mark.product
@pytest.mark.parametrize("seldom", [False, True], ids=["", "p2 is used seldom"])
@pytest.mark.parametrize("small_buckets", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_steps_in_a_graph_leave_the_same_bits_as_in_the_general_way(
    two: Two,
    seed: int,
    small_buckets: bool,
    seldom: bool,
    begun: list[SteadyStep],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The proof, which has met no compiled graph here, would leave each step to the general way.
    options: dict[str, Any] = {"seldom": seldom, "verify": "off", **({"bucket_cap_mb": 1e-6} if small_buckets else {})}
    found = _gradients(two, seed, in_graph=True, **options)
    assert any(isinstance(one, SteadyGraph) for one in begun)
    begun.clear()
    for kind in (SteadyHooks, SteadyGraph):
        monkeypatch.setattr(kind, "fits", lambda _: False)
    assert found == _gradients(two, seed, in_graph=True, **options)
    assert not begun


# ---- what makes one general, at any moment ---------------------------------------------------------------------------


def _when(rank: RunTime, index: int, act: Callable[[RunTime], object]) -> Any:
    return rank.tensors[index].register_hook(lambda _: (act(rank), None)[1])


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("small_buckets", [False, True])
def test_one_that_is_asked_for_goes_on_where_it_stands(
    two: Two, index: int, many: int, small_buckets: bool, made_general: list[SteadyStep]
) -> None:
    ranks = steady(two, **({"bucket_cap_mb": 1e-6} if small_buckets else {}))
    made_general.clear()
    handles = [_when(rank, index, lambda rank: rank.runtime.under_way.backward) for rank in ranks[:many]]
    assert_steps_well(*ranks)
    assert len(made_general) == many
    for handle in handles:
        handle.remove()
    assert_steps_well(*ranks)
    assert len(made_general) == many


@contextlib.contextmanager
def _with_hooks_in_the_graphs_way(
    ranks: Sequence[RunTime], act: Callable[[RunTime], object], graph: Sequence[int] = (2, 1, 0)
) -> Iterator[Callable[[RunTime], None]]:
    """Yields a step. A hook runs when the graph's gradients have come, and autograd has accumulated the first of them.

    All are registered ahead of all forwards, which look for hooks by a number that ranks in one process share.
    """
    firsts = [rank.tensors[graph[0]] for rank in ranks]
    nodes = [first.view_as(first).grad_fn.next_functions[0][0] for first in firsts]  # type: ignore[union-attr]
    handles = [
        node.register_hook(lambda *_, rank=rank: (act(rank), None)[1]) for node, rank in zip(nodes, ranks, strict=True)
    ]
    yield lambda rank: rank.forward(graph=graph).backward()
    for handle in handles:
        handle.remove()


def test_one_in_a_graph_that_is_asked_for_behind_it_goes_on_there(two: Two, made_general: list[SteadyStep]) -> None:
    ranks = steady(two, IN_GRAPH, verify="off")
    made_general.clear()

    with _with_hooks_in_the_graphs_way(ranks, lambda rank: rank.runtime.under_way.backward) as ask:
        assert together(ranks, ask) == [None, None]
    assert len(made_general) == 2
    for rank in ranks:
        assert all(torch.equal(tensor.grad, mean(index)) for index, tensor in enumerate(rank.tensors))  # type: ignore[arg-type]
    assert_steps_well(*ranks, step=IN_GRAPH)
    assert len(made_general) == 2


def test_a_graph_that_is_new_to_the_proof_is_run_in_the_general_way(two: Two, made_general: list[SteadyStep]) -> None:
    ranks = steady(two, IN_GRAPH)
    made_general.clear()
    looked: list[float] = []

    def run(rank: RunTime) -> None:
        loss, reserve, proof = rank.forward(graph=(2, 1, 0)), rank.runtime.reserve, rank.reduction.proof

        def reserved(call: Any) -> Any:
            section = reserve(call)
            assert isinstance(section, SteadyGraph)
            assert section.inputs((), made_general.append, "a plan") is None
            section = section.in_general()
            section.note_graph(made_general.append, "a plan", lambda share: _reference(looked, share))
            proof.forget_reference()  # a compiled graph is compared with it
            return section

        with unittest.mock.patch.object(rank.runtime, "reserve", reserved):
            loss.backward()

    assert together(ranks, run) == [None, None]
    assert looked == [0.5, 0.5]
    assert len(made_general) == 2


def _reference(looked: list[float], share: float) -> Reference:
    looked.append(share)
    return Reference({}, "nothing is known")


@pytest.mark.parametrize("used", [(0,), (1, 2), ()])
def test_one_without_a_gradient_of_each_sends_zeros_for_the_others(
    two: Two, used: tuple[int, ...], made_general: list[SteadyStep]
) -> None:
    one, other = ranks = steady(two)
    made_general.clear()  # where the proof has looked
    assert together(ranks, lambda rank: rank.step(*used), ALL) == [None, None]
    assert made_general == ([one.runtime._steady_hooks] if used else [])  # without any it begins as another one
    for index in range(3):
        expected = ((one.values(index) if index in used else 0.0) + other.values(index)) / 2
        for rank in ranks:
            assert torch.equal(rank.tensors[index].grad, expected)  # type: ignore[arg-type]
    assert_steps_well(*ranks)


@pytest.mark.parametrize("breaks", ["breaks_before", "breaks_after"])
def test_an_exception_on_one_rank_is_an_error_on_the_other(two: Two, breaks: str) -> None:
    ranks = steady(two)
    errors = together(ranks, lambda rank: rank.step(0, 1, 2, **{breaks: True}), ALL)
    assert "an exception of the user's" in str(errors[0])
    if breaks == "breaks_after":  # when all had been sent
        assert errors[1] is None
        errors = together(ranks, ALL)
        assert all("finds that an exception ended the one before it" in str(error) for error in errors), errors
    else:
        assert "broke off on 1 other rank" in str(errors[1])
    assert_steps_well(*ranks)


def test_a_launch_that_fails_says_of_which_bucket(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    (rank, _) = steady(two)

    def refuse(*_: Any) -> Any:
        raise ValueError("no memory for it")

    monkeypatch.setattr(rank.communicator, "all_reduce", refuse)
    loss = rank.submit(lambda rank: rank.forward(0, 1, 2)).result()
    error = rank.submit(lambda _: loss.backward()).exception()  # type: ignore[attr-defined]
    assert "no memory for it" in str(error)
    backward = rank.runtime.under_way.backward
    assert backward is not None
    assert backward._broke_in_launch


def test_what_is_written_to_grad_behind_the_launch_is_an_error(two: Two, made_general: list[SteadyStep]) -> None:
    """In the hook of the gradient that comes last, when the first one is in a bucket of its own that is launched."""
    ranks = steady(two, bucket_cap_mb=1e-6)
    made_general.clear()

    def write(rank: RunTime) -> None:
        rank.tensors[2].grad.add_(1.0)  # type: ignore[union-attr]

    handles = [_when(rank, 0, write) for rank in ranks]
    errors = together(ranks, ALL)
    assert all("p2 was written to, or replaced" in str(error) for error in errors), errors
    assert len(made_general) == 2
    for handle in handles:
        handle.remove()


def test_kept_gradients_are_added_to_in_the_general_way(two: Two, begun: list[SteadyStep]) -> None:
    ranks = steady(two)
    assert together(ranks, ALL) == [None, None]
    begun.clear()
    assert together(ranks, ALL) == [None, None]
    assert not begun
    for rank in ranks:
        assert all(torch.equal(tensor.grad, 2 * mean(index)) for index, tensor in enumerate(rank.tensors))  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [ALL, IN_GRAPH], ids=["hooks", "graph"])
def test_after_a_users_hook_was_removed_steps_are_steady_again(
    two: Two, step: Callable[[RunTime], None], begun: list[SteadyStep]
) -> None:
    ranks = steady(two, step, verify="off")
    handles = [rank.tensors[1].register_post_accumulate_grad_hook(lambda _: None) for rank in ranks]
    begun.clear()
    assert_steps_well(*ranks, step=step)
    assert not begun
    for handle in handles:
        handle.remove()
    for _ in range(3):
        assert_steps_well(*ranks, step=step)
    assert len(begun) >= 2
    assert not any(rank.reduction.hooks.deferred for rank in ranks)


def test_nothing_of_an_earlier_sequence_is_held(two: Two, begun: list[SteadyStep]) -> None:
    ranks = steady(two)
    before = [weakref.ref(rank.agreed.buffers) for rank in ranks]
    for rank in ranks:
        rank.reduction.forget_sequence()
    begun.clear()
    assert_steps_well(*ranks)
    assert not begun
    assert [buffers() for buffers in before] == [None, None]


def test_other_options_bind_it_anew(two: Two, begun: list[SteadyStep]) -> None:
    ranks = steady(two)
    for rank in ranks:
        rank.reduction.expect_static_graph()
    begun.clear()
    assert_steps_well(*ranks)
    assert not begun
