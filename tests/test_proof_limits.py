"""What the proof cannot tell, and says so: without ranks, on tensors, graphs and launches made by hand."""

import contextlib
import math
import operator
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from in_process import plan_of
from torch import Tensor
from torch.fx import Graph, GraphModule

from compiled_ddp.checks import proof
from compiled_ddp.checks.proof import TRIES, Account, Proof, Verdict, exchange
from compiled_ddp.checks.sums import signed_sum
from compiled_ddp.checks.values import DIFFERENT, UNWRITTEN, Expected, Reference, compare, fill_with_pattern
from compiled_ddp.functional.reference import ReferenceStep
from compiled_ddp.graph.reference import ReferenceGraph
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.plan import GradientSpec

aten = torch.ops.aten
NAN = float("nan")


class Together:
    """A communicator of ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self._slots: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(world_size, timeout=60)
        self.world_size = world_size

    def of(self, rank: int) -> Any:
        def combine(tensor: Tensor, how: Callable[[Tensor], Tensor]) -> Any:
            self._slots[rank] = tensor.clone()
            self._barrier.wait()
            combined = how(torch.stack([self._slots[each] for each in range(self.world_size)]))
            self._barrier.wait()
            tensor.copy_(combined)
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(
            global_rank=rank,
            world_size=self.world_size,
            all_reduce=lambda tensor: combine(tensor, lambda rows: rows.sum(0)),
            maximum=lambda tensor: combine(tensor, lambda rows: rows.amax(0)),
        )

    def run(self, function: Callable[[int], str]) -> list[str]:
        """What `function` returns on each rank."""
        found = [""] * self.world_size

        def run(rank: int) -> None:
            found[rank] = function(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def reduced_of(gradient: Tensor) -> Any:
    return SimpleNamespace(names=["p0"], gradients=[GradientSpec.of(0, gradient)])


def concluded(brought: Sequence[Tensor], results: Sequence[Tensor]) -> list[str]:
    """What a backward whose sums are `results` on the ranks raises on each, or what is pending then."""
    ranks = Together(len(brought))

    def conclude(rank: int) -> str:
        proven = Proof(reduced_of(brought[0]), ranks.of(rank))
        proven.begin_backward()
        assert proven.recording is not None
        proven.recording.seen.add(0)
        proven.recording.put([0], [brought[rank]], 1.0, is_all=True)
        try:
            proven.conclude(lambda _: results[rank], by_hooks={0}, factor=1.0)
        except RuntimeError as error:
            return str(error)
        return proven.unverified.get(0, "")

    return ranks.run(conclude)


# ---- what is not finite ----------------------------------------------------------------------------------------------


def test_a_result_that_is_finite_on_some_ranks_alone_differs() -> None:
    brought = [torch.randn(100) for _ in range(2)]
    right = brought[0] + brought[1]
    wrong = right.clone()
    wrong[3] = NAN
    assert concluded(brought, [right, right]) == ["", ""]
    assert all("differs between the ranks" in found for found in concluded(brought, [right, wrong]))
    assert concluded(brought, [wrong, wrong]) == ["gradients that are not finite"] * 2


def test_a_finite_result_of_what_is_not_finite_is_not_the_sum() -> None:
    brought = [torch.randn(100) for _ in range(2)]
    stale = brought[0] + brought[1]
    brought[1][5] = NAN
    assert all("not what their own gradients add up to" in found for found in concluded(brought, [stale, stale]))


# ---- sums in 64 bits, as those that they are checked by --------------------------------------------------------------


@pytest.mark.parametrize("numel", [360, 5000])
def test_signed_sums_round_as_gradients_in_float64_do(numel: int) -> None:
    """Of 300 sums of rows that have few values, some two in a hundred were taken for wrong ones."""
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        brought = [torch.zeros(numel, dtype=torch.float64) for _ in range(3)]
        for gradient in brought:
            some = torch.randint(0, numel, (numel // 6,), generator=generator)
            gradient[some] = 0.01 * torch.randn(1, dtype=torch.float64, generator=generator)
        total = brought[0] + brought[1] + brought[2]
        assert concluded(brought, [total] * 3) == [""] * 3, seed
    off = total.clone()
    off[some[0]] += 1e-9
    assert all("not what their own gradients add up to" in found for found in concluded(brought, [off] * 3))


# ---- sums in 16 bits -------------------------------------------------------------------------------------------------


def along_a_ring(gradients: Sequence[Tensor]) -> Tensor:
    """Every chunk begins at another rank, and each addition rounds."""
    count = len(gradients)
    parts = []
    for begin in range(count):
        chunks = [gradient.tensor_split(count)[begin] for gradient in gradients]
        added = chunks[begin]
        for chunk in (*chunks[begin + 1 :], *chunks[:begin]):
            added = added + chunk
        parts.append(added)
    return torch.cat(parts)


def along_a_tree(gradients: Sequence[Tensor]) -> Tensor:
    rows = list(gradients)
    while len(rows) > 1:
        rows = [torch.stack(rows[place : place + 2]).sum(0) for place in range(0, len(rows), 2)]
    return rows[0]


def drawn(kind: str, world_size: int, numel: int, generator: torch.Generator) -> list[Tensor]:
    """Every rank's gradient."""
    common = torch.randn(numel, generator=generator)
    own = [torch.randn(numel, generator=generator) for _ in range(world_size)]
    if kind == "opposite":
        return [(common if rank % 2 else -common) + 0.3 * each for rank, each in enumerate(own)]
    weights = {"equal": (1.0, 0.0), "alike": (1.0, 0.3), "independent": (0.0, 1.0)}[kind]
    return [weights[0] * common + weights[1] * each for each in own]


def verdict_on(result: Tensor, brought: Sequence[Tensor]) -> Verdict:
    sums = [torch.cat((signed_sum(each), torch.zeros(1, dtype=torch.float64))).view(3, 1) for each in brought]
    nothing = torch.zeros(2, 1, dtype=torch.int64)
    account = Account(sums[0], signed_sum(result).view(2, 1), *nothing, [(result.dtype, result.numel())], 1.0)
    whole = torch.stack(sums).sum(0)
    communicator = SimpleNamespace(
        world_size=len(brought),
        all_reduce=lambda tensor: SimpleNamespace(wait=lambda: tensor.copy_(whole)),
        maximum=lambda tensor: None,
    )
    return exchange(cast(Any, communicator), account)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["equal", "alike", "independent", "opposite"])
def test_rounding_of_rings_and_trees_is_never_held_for_wrong(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(16)
    for world_size in (2, 3, 8, 17, 64):
        for numel in (1, 7, 300):
            brought = [each.to(dtype) for each in drawn(kind, world_size, numel, generator)]
            for reduced in (along_a_ring(brought), along_a_tree(brought)):
                assert not verdict_on(reduced, brought).are_off, (world_size, numel)


@pytest.mark.parametrize("world_size", [16, 32])
@pytest.mark.parametrize("kind", ["equal", "independent"])
def test_sums_in_bfloat16_that_are_lost_or_halved_are_found_on_many_ranks(kind: str, world_size: int) -> None:
    generator = torch.Generator().manual_seed(16)
    found = []
    for _ in range(10):
        brought = [each.bfloat16() for each in drawn(kind, world_size, 300, generator)]
        right = along_a_tree(brought)
        for wrong in (torch.zeros_like(right), right / 2):
            verdict = verdict_on(wrong, brought)
            assert verdict.are_off or verdict_on(right, brought).are_vague, "what is right would be held for proven"
            found.append(bool(verdict.are_off))
    assert sum(found) >= 10, "the others have signed sums that are small by chance"


def test_a_sum_that_rounding_may_change_by_a_quarter_stays_pending() -> None:
    gradient = torch.randn(300).bfloat16()
    nearly_opposite = -gradient + 0.01 * torch.randn(300).bfloat16()
    reduced = gradient + nearly_opposite
    found = concluded([gradient, nearly_opposite], [reduced, reduced])
    assert found == ["so far a fault could be taken for rounding"] * 2


def test_signs_of_blocks_of_a_power_of_two_are_not_the_same() -> None:
    values = torch.randn(2**21)
    halves_exchanged = values.roll(2**20)
    assert abs(float(signed_sum(values)[0] - signed_sum(halves_exchanged)[0])) > 1.0


# ---- comparisons that tell nothing -----------------------------------------------------------------------------------


class Launches:
    """Stands in for the observer of what graphs launch."""

    latest: "Launches"

    def __init__(self, _: str, *, launch: Callable[[int, Tensor], contextlib.AbstractContextManager[None]]) -> None:
        self._launch, self.launched = launch, 0
        Launches.latest = self

    def __enter__(self) -> "Launches":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, flat_buffer: Tensor) -> None:
        with self._launch(self.launched, flat_buffer):
            self.launched += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "LaunchObserver", Launches)


def a_graph() -> None:
    pass


class Backwards:
    """Backwards of one graph of one parameter with 8 elements, on the only rank or on one of two."""

    def __init__(self, world_size: int = 1, verify: str = "first") -> None:
        self.plan, self.runs = plan_of((0, 8)), 0
        self.proof = Proof(
            reduced_of(torch.empty(8)), cast(Any, SimpleNamespace(global_rank=0, world_size=world_size)), verify
        )

    def begin(self, value: Tensor) -> None:
        """One begins, in which the graph is to leave `value`."""

        def run_without_passes() -> Reference:
            self.runs += 1
            return Reference({0: Expected(value, 0.0, 0.0, 2.0**-23)})

        self.proof.begin_backward()
        self.proof.meet_graph(a_graph, "plan", [0], run_without_passes)

    def run(self, value: Tensor, found: Tensor | None = None) -> None:
        self.begin(value)
        with self.proof.watching(self.plan, "group"):
            Launches.latest.note(torch.cat((value if found is None else found, torch.zeros(64))))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("value", "why"), [(0.0, "zero gradients so far"), (NAN, "gradients that are not finite")])
def test_a_gradient_whose_reference_tells_nothing_is_compared_in_a_later_backward(value: float, why: str) -> None:
    backwards = Backwards()
    backwards.run(torch.full((8,), value))
    assert f"0 of 1 parameters of graphs; not compared: p0 ({why})" in str(backwards.proof)
    assert backwards.proof.has_met(a_graph, "plan"), "once in a backward"
    backwards.run(torch.ones(8))
    assert "1 of 1 parameters of graphs." in str(backwards.proof)
    for _ in range(70):
        backwards.run(torch.zeros(8))
    assert backwards.runs == 2 and "1 of 1" in str(backwards.proof)


@pytest.mark.usefixtures("launches")
def test_a_fault_after_a_vacuous_comparison_is_found_and_told() -> None:
    backwards = Backwards()
    backwards.run(torch.zeros(8))
    backwards.run(torch.ones(8), found=torch.full((8,), 0.5))
    assert backwards.proof.verifies, "whose end raises"


@pytest.mark.usefixtures("launches")
def test_comparing_zeros_ends_after_the_last_try() -> None:
    backwards = Backwards()
    for _ in range(TRIES[-1] + 30):
        backwards.run(torch.zeros(8))
    assert backwards.runs == len(TRIES)


@pytest.mark.usefixtures("launches")
def test_a_later_comparison_asks_the_other_ranks_to_verify() -> None:
    backwards = Backwards(world_size=2)
    backwards.run(torch.zeros(8))
    backwards.proof.renewed.clear()
    backwards.proof.unverified.clear()  # proven, by what the other rank has brought
    backwards.run(torch.ones(8))
    assert backwards.proof.recording is None and backwards.proof.renewed == {0}


@pytest.mark.usefixtures("launches")
def test_a_graph_that_did_not_run_is_compared_when_it_does() -> None:
    backwards = Backwards()
    backwards.begin(torch.ones(8))
    backwards.proof.forget_reference()
    backwards.run(torch.ones(8))
    assert backwards.runs == 2 and "1 of 1" in str(backwards.proof)


@pytest.mark.usefixtures("launches")
def test_a_fault_counts_in_a_graph_that_launches_more_than_planned() -> None:
    backwards = Backwards()
    backwards.begin(torch.ones(8))
    with backwards.proof.watching(backwards.plan, "group"):
        Launches.latest.note(torch.zeros(8 + 64))
        Launches.latest.note(torch.zeros(3))
    assert backwards.proof.verifies
    assert "p0 (the graph launched other collectives than planned)" in str(backwards.proof)


def test_what_is_wrong_where_a_backward_breaks_off_is_raised_by_the_next() -> None:
    ranks = Together(2)

    def two_backwards(rank: int) -> str:
        proven = Proof(reduced_of(torch.empty(4)), ranks.of(rank))
        proven.begin_backward()
        proven.note_wrong({0: 1 << 56} if rank else {})
        proven.postpone()
        proven.begin_backward()
        assert proven.verifies
        with pytest.raises(RuntimeError) as error:
            proven.conclude(lambda _: torch.ones(4), by_hooks={0}, factor=1.0)
        return str(error.value)

    assert all("was reduced from a bucket in which some rank's" in found for found in ranks.run(two_backwards))


def test_a_tolerance_that_lets_half_of_a_gradient_through_tells_nothing() -> None:
    value = torch.ones(100)
    assert Expected(value, 0.0, 0.0, 2.0**-23).why_vacuous == ""
    assert Expected(value, 1.0, 1.0, 2.0**-7).why_vacuous == "nothing but rounding"
    assert Expected(torch.ones(0), 0.0, 0.0, 2.0**-23).why_vacuous == ""


def test_what_cancels_in_float32_beside_products_in_16_bits_is_given_the_tolerance_of_float32() -> None:
    bucket = plan_of((0, 64)).buckets[0]
    reference = Reference({0: Expected(torch.full((64,), 1e-8), 1e-8, 1e-8, 2.0**-7)})
    flat_buffer = torch.full((bucket.numel,), 5e-7)
    assert compare(bucket, flat_buffer, reference) == {}
    assert compare(bucket, torch.ones_like(flat_buffer), reference)[0] >> 56 == DIFFERENT


# ---- the run without passes ------------------------------------------------------------------------------------------


def shares_of_the_largest() -> GraphModule:
    """The derivative of a maximum: those that equal it share the tangent."""
    graph = Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    y = graph.call_function(aten.mul.Tensor, (x, 1.1))
    largest = graph.call_function(aten.amax.default, (y, [-1], True))
    mask = graph.call_function(aten.eq.Tensor, (y, largest))
    count = graph.call_function(aten.sum.dim_IntList, (mask, [-1], True))
    part = graph.call_function(aten.div.Tensor, (tangent, count))
    graph.output((graph.call_function(aten.mul.Tensor, (part, mask)),))
    return GraphModule(torch.nn.Module(), graph)


def test_what_random_rounding_makes_infinite_is_not_compared() -> None:
    inputs = [torch.randn(400, 8), torch.randn(400, 1)]
    (found,), epsilon = ReferenceGraph(shares_of_the_largest()).gradients(inputs)
    assert found is not None and found.gradient.isfinite().all() and math.isinf(found.noise_norm)
    expected = Expected(found.gradient.flatten(), found.noise_norm, found.noise_most, epsilon)
    assert "its tolerance is unknown" in expected.why_vacuous
    bucket = plan_of((0, 3200)).buckets[0]
    flat_buffer = torch.zeros(bucket.numel)
    flat_buffer[:3200] = found.gradient.flatten() * 1.01
    assert compare(bucket, flat_buffer, Reference({0: expected})) == {}
    fill_with_pattern(flat_buffer[5:6])
    assert compare(bucket, flat_buffer, Reference({0: expected}))[0] >> 56 == UNWRITTEN


def product() -> GraphModule:
    graph = Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    graph.output((graph.call_function(aten.mm.default, (x, tangent)),))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("operation", ["matmul", "conv"])
@pytest.mark.parametrize(("precision", "epsilon"), [("bf16", 2.0**-7), ("tf32", 2.0**-10), ("ieee", 2.0**-23)])
def test_the_precision_of_each_backend_and_operator_counts(operation: str, precision: str, epsilon: float) -> None:
    setting = getattr(torch.backends.mkldnn, operation)
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        _, found = ReferenceGraph(product()).gradients([torch.randn(4, 4), torch.randn(4, 4)])
    finally:
        setting.fp32_precision = before
    assert found == epsilon


def adds_through_a_view() -> GraphModule:
    """Of an input [count, total] it adds one to the count, and halves all, each through a view."""
    graph = Graph()
    flat, other = graph.placeholder("flat"), graph.placeholder("other")
    count = graph.call_function(aten.select.int, (flat, 0, 0))
    graph.call_function(aten.add_.Tensor, (count, 1.0))
    graph.call_function(aten.mul_.Tensor, (graph.call_function(aten.view.default, (flat, [2, 1])), 0.5))
    part = graph.call_function(operator.getitem, (graph.call_function(aten.split.Tensor, (flat, 1)), 0))
    graph.output((graph.call_function(aten.mul.Tensor, (part, other)),))
    return GraphModule(torch.nn.Module(), graph)


def test_inputs_that_are_written_to_through_views_stay_as_they_are() -> None:
    flat = torch.tensor([1.0, 4.0])
    (found,), _ = ReferenceGraph(adds_through_a_view()).gradients([flat, torch.ones(1)])
    assert flat.tolist() == [1.0, 4.0]
    assert found is not None and found.gradient.item() == 1.0


def test_inputs_that_share_the_memory_that_is_written_to_see_it() -> None:
    memory = torch.tensor([1.0, 4.0])
    (found,), _ = ReferenceGraph(adds_through_a_view()).gradients([memory, memory[:1]])
    assert memory.tolist() == [1.0, 4.0]
    assert found is not None and found.gradient.item() == 1.0  # ((1 + 1) / 2) squared


@pytest.mark.parametrize("through", ["view", "foreach"])
def test_a_step_knows_nothing_of_what_the_ranks_have_written_to(through: str) -> None:
    graph = Graph()
    parameter, gradient, other = (graph.placeholder(name) for name in ("parameter", "gradient", "other"))
    first = _reduced(graph, (gradient,))
    if through == "view":
        view = graph.call_function(aten.view.default, (parameter, [-1]))
        graph.call_function(aten.sub_.Tensor, (view, first))
    else:
        graph.call_function(aten._foreach_add_.List, ([parameter], [first]))
    second = _reduced(graph, (graph.call_function(aten.mul.Tensor, (parameter, 2.0)),))
    third = _reduced(graph, (graph.call_function(aten.mul.Tensor, (other, 2.0)),))
    graph.output((first, second, third))
    inputs = [torch.ones(4), torch.ones(4), torch.ones(4)]
    reference_of = ReferenceStep(GraphModule(torch.nn.Module(), graph)).run(inputs)
    assert [bool(reference_of(number).expected) for number in range(3)] == [True, False, True]
    assert inputs[0].tolist() == [1.0] * 4


def _reduced(graph: Graph, gradients: Sequence[Any]) -> Any:
    sums = graph.call_function(sum_over_ranks, (list(gradients), [], None, [0], [], 1, "g"))
    return graph.call_function(operator.getitem, (sums, 0))
