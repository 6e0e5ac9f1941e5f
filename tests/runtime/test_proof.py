"""Proving that gradients were reduced: what is proven, what stays pending, what raises, and that nobody hangs."""

import contextlib
import copy
import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_process import riders_with
from models import Mlp, assert_equal_on_all_ranks, assert_gradients, expected_mean, mean_by_hand, row_batch, wrappers
from torch import Tensor, nn
from torch.fx import Graph

from compiled_ddp import compile_ddp, torch_private
from compiled_ddp.checks import proof
from compiled_ddp.checks.proof import TRIES
from compiled_ddp.checks.sums import as_row, checksum
from compiled_ddp.passes import pipeline
from compiled_ddp.passes.graph_edit import emit, output_values, set_output_values
from compiled_ddp.passes.ops import PACKS
from compiled_ddp.plan import FIRST_USED, VERIFY, BucketPlan, Riders
from compiled_ddp.ranks import launch_observer
from compiled_ddp.step.channel import Flag, ForwardNumbers, Message, RiderReader
from compiled_ddp.step.gradients import Gradients
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class Loss(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).square().sum()


def pending(ddp: Any) -> dict[str, str]:
    """Names of the parameters that are not proven yet -> why."""
    unverified: dict[int, str] = ddp._runtime.reduction.proof.unverified
    names = ddp._runtime.parameters.names
    return {names[index]: reason for index, reason in unverified.items()}


class ExchangesCounted:
    """How many collectives the proof has issued so far."""

    def __init__(self) -> None:
        self.count = 0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "ExchangesCounted":
        original = proof.exchange

        def counted(*arguments: Any) -> proof.Verdict:
            self.count += 1
            return original(*arguments)

        self._patch.setattr(proof, "exchange", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def _step(ddp: nn.Module, x: Tensor) -> None:
    """One step, checked against plain autograd averaged by hand."""
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x))
    ddp.zero_grad()
    ddp(x).backward()
    assert_gradients(ddp.module, expected)


# ---- checksums -------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 64, 513, 1024, 5000])
def test_a_checksum_does_not_depend_on_where_values_lie(dtype: torch.dtype, numel: int) -> None:
    memory = torch.randn(numel + 5, dtype=dtype)
    expected = checksum(memory[:numel].clone())
    for offset in range(5):
        moved = torch.zeros(numel + 5, dtype=dtype)
        moved[offset : offset + numel] = memory[:numel]
        assert checksum(moved[offset : offset + numel]) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 3, 700, 5000])
def test_a_checksum_sees_every_single_change_to_the_sign_of_a_zero(dtype: torch.dtype, numel: int) -> None:
    values = torch.zeros(numel, dtype=dtype)
    sums = {checksum(values).item()}
    places = [*range(min(numel, 600)), numel - 1]
    for place in places:
        changed = values.clone()
        changed[place] = -0.0 if not dtype.is_complex else complex(0.0, -0.0)
        sums.add(checksum(changed).item())
        assert checksum(changed) != checksum(values), place
    assert len(sums) > 1


def test_a_checksum_sees_rows_that_have_changed_places() -> None:
    values = torch.randn(4096)
    assert checksum(values) != checksum(values.roll(1024))


def test_as_row_follows_the_memory_order_of_the_given_stride() -> None:
    values = torch.randn(3, 4)
    across = values.t().contiguous().t()  # the same values, laid out by columns
    assert across.stride() != values.stride()
    assert torch.equal(as_row(across, (4, 1)), values.reshape(-1))
    assert torch.equal(as_row(across, (1, 3)), values.t().reshape(-1))


# ---- riders ----------------------------------------------------------------------------------------------------------


def test_one_rank_that_wishes_to_verify_is_heard() -> None:
    riders = Riders(0, (0,))
    flags = [set(), {Flag.VERIFY}, set()]
    values = [riders_with(riders, Message(ForwardNumbers(3, 3), flags=here)) for here in flags]
    assert values[1][VERIFY] == 1 and values[0][VERIFY] == 0 and VERIFY < FIRST_USED
    assert RiderReader(3).read([torch.stack(values).sum(0)]).ranks_with(Flag.VERIFY) == 1
    assert not RiderReader(3).read([torch.stack([values[0]] * 3).sum(0)]).ranks_with(Flag.VERIFY)


# ---- what is proven --------------------------------------------------------------------------------------------------


def _prove_in_the_first_backward(rank: int, name: str, verify: str) -> tuple[list[int], str]:
    ddp = wrappers(BOTH)[name](Loss(), verify=verify)
    exchanges = []
    with ExchangesCounted() as counted:
        for step in range(5):
            _step(ddp, row_batch(rank, step))
            exchanges.append(counted.count)
    assert bool(pending(ddp)) == (verify == "off")
    return exchanges, str(ddp.explain()).splitlines()[-1]


@pytest.mark.parametrize("name", BOTH)
def test_the_first_backward_proves_what_differs_and_then_nothing_is_exchanged(ranks2: RankPool, name: str) -> None:
    sentence = "Proven to be reduced: 6 of 6 parameters."
    assert ranks2.run(_prove_in_the_first_backward, name, "first") == [([1, 1, 1, 1, 1], sentence)] * 2


@pytest.mark.parametrize("name", BOTH)
def test_three_ranks_agree_bit_for_bit_after_the_reduction(ranks3: RankPool, name: str) -> None:
    sentence = "Proven to be reduced: 6 of 6 parameters."
    assert ranks3.run(_prove_in_the_first_backward, name, "always") == [([1, 2, 3, 4, 5], sentence)] * 3


@pytest.mark.parametrize("name", BOTH)
def test_off_looks_at_nothing(ranks2: RankPool, name: str) -> None:
    sentence = 'Whether gradients were reduced is not looked at: verify="off".'
    assert ranks2.run(_prove_in_the_first_backward, name, "off") == [([0, 0, 0, 0, 0], sentence)] * 2


@pytest.mark.parametrize("name", BOTH)
def test_one_rank_has_nothing_to_prove(name: str) -> None:
    with RankPool(1) as pool:
        ((exchanges, sentence),) = pool.run(_one_rank, name)
    assert exchanges == 0
    assert "Proven" not in sentence


def _one_rank(rank: int, name: str) -> tuple[int, str]:
    ddp = wrappers(BOTH)[name](Loss())
    with ExchangesCounted() as counted:
        _step(ddp, row_batch(rank))
    return counted.count, str(ddp.explain())


def _zeros_at_first(rank: int, name: str) -> None:
    ddp = wrappers(BOTH)[name](Loss())
    with ExchangesCounted() as counted:
        for step in range(3):
            (0.0 * ddp(row_batch(0, step))).backward()
            ddp.zero_grad()
        assert counted.count == 2, "backwards 1 and 2"
        assert set(pending(ddp).values()) == {"zero gradients so far"}
        assert "0 of 6 parameters; pending: " in str(ddp.explain())
        _step(ddp, row_batch(0, 3))
        assert counted.count == 3 and not pending(ddp), "equal on all ranks, and not zero"
        ddp.zero_grad()
        (0.0 * ddp(row_batch(0, 4))).backward()
        assert counted.count == 3 and not pending(ddp), "what is proven stays proven"


@pytest.mark.parametrize("name", BOTH)
def test_zero_gradients_stay_pending_and_equal_ones_are_proven(ranks2: RankPool, name: str) -> None:
    ranks2.run(_zeros_at_first, name)


def _always_zero(rank: int, name: str) -> int:
    ddp = wrappers(BOTH)[name](nn.Linear(2, 2))
    with ExchangesCounted() as counted:
        for _ in range(TRIES[-1] + 20):
            ddp.zero_grad()
            (0.0 * ddp(torch.ones(1, 2))).sum().backward()
    assert len(pending(ddp)) == 2
    return counted.count


@pytest.mark.parametrize("name", BOTH)
def test_looking_at_zeros_ends_after_the_last_try(ranks2: RankPool, name: str) -> None:
    assert ranks2.run(_always_zero, name) == [len(TRIES)] * 2


class PartlyUsed(nn.Module):
    """One parameter that nobody uses, one whose gradients are zero, and one that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.zero, self.unused = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.used(x) + 0.0 * self.zero(x)).square().sum()


def _partly_used(rank: int, name: str) -> dict[str, str]:
    ddp = wrappers(BOTH)[name](PartlyUsed())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the unused ones go by hooks
        for step in range(3):
            ddp.zero_grad()
            ddp(row_batch(rank, step)).backward()
    assert ddp.module.unused.weight.grad is None
    return pending(ddp)


@pytest.mark.parametrize("name", BOTH)
def test_what_cannot_be_told_stays_pending_with_the_reason(ranks2: RankPool, name: str) -> None:
    for found in ranks2.run(_partly_used, name):
        assert found == {
            "zero.weight": "zero gradients so far",
            "zero.bias": "zero gradients so far",
            "unused.weight": "no gradient so far",
            "unused.bias": "no gradient so far",
        }


def _not_finite(rank: int, name: str) -> None:
    ddp = wrappers(BOTH)[name](Loss())
    x = row_batch(rank)
    x[0, 0] = torch.nan if rank == 0 else 1.0
    ddp(x).backward()
    assert set(pending(ddp).values()) == {"gradients that are not finite"}
    _step(ddp, row_batch(rank, 1))
    assert not pending(ddp)


@pytest.mark.parametrize("name", BOTH)
def test_gradients_that_are_not_finite_postpone(ranks2: RankPool, name: str) -> None:
    ranks2.run(_not_finite, name)


class Mixed(nn.Module):
    """Parameters of four dtypes, one of them laid out by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.by_columns = nn.Parameter(torch.randn(4, 5).t())
        self.of_float64 = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.of_bfloat16 = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.of_complex64 = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x * self.of_float64.float() * self.of_bfloat16.float()) @ self.by_columns
        return scaled.square().sum() + (x * self.of_complex64).abs().square().sum()


def _mixed_dtypes(rank: int, name: str) -> dict[str, str]:
    ddp = wrappers(BOTH)[name](Mixed())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):  # the folding variant of the second step is another graph, proven in the third
            ddp.zero_grad(set_to_none=step == 0)
            ddp(row_batch(rank, step)).backward()
    return pending(ddp)


@pytest.mark.parametrize("name", BOTH)
def test_every_dtype_and_layout_is_proven(ranks2: RankPool, name: str) -> None:
    assert ranks2.run(_mixed_dtypes, name) == [{}, {}]


# ---- what raises -----------------------------------------------------------------------------------------------------


def _return_a_local_gradient(graph: Graph, plan: BucketPlan, *, output_positions: dict[int, int], **_: object) -> None:
    """In place of the last pass: hand out the first gradient as it goes into its bucket."""
    flat = next(node for node in graph.nodes if node.target in (*PACKS, torch.ops.aten.cat.default))
    outputs = output_values(graph)
    with graph.inserting_before(flat):
        local = emit(graph, torch.ops.aten.clone.default, flat.args[0][0])
    outputs[output_positions[plan.buckets[0].indices[0]]] = local
    set_output_values(graph, outputs)


def _break_graphs(patch: pytest.MonkeyPatch) -> None:
    *others, last = pipeline.PASSES
    patch.setattr(pipeline, "PASSES", (*others, replace(last, function=_return_a_local_gradient)))


def _break_hooks(patch: pytest.MonkeyPatch) -> None:
    def write_back_but_keep(gradients: Gradients) -> set[int]:
        reduced = write_back(gradients)
        parameter = gradients._parameters.tensors[gradients._parameters.names.index("mlp.head.bias")]
        parameter.grad = torch.full_like(parameter, dist.get_rank())
        return reduced

    write_back = Gradients.write_back
    patch.setattr(Gradients, "write_back", write_back_but_keep)


def _broken(rank: int, name: str, on_rank: int | None, width: int = 8, **options: Any) -> list[str]:
    """The errors of two steps, where all ranks or one of them leave a gradient local."""
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        if on_rank is None or rank == on_rank:
            (_break_hooks if name == "EagerDDP" else _break_graphs)(patch)
        ddp = wrappers(BOTH)[name](Loss(width), **options)
        for step in range(2):
            ddp.zero_grad()
            with pytest.raises(RuntimeError) as caught:
                ddp(row_batch(rank, step)).backward()
            messages.append(str(caught.value))
    assert set(pending(ddp)) == {"mlp.head.bias"}
    assert "mlp.head.bias (different on the ranks after the reduction)" in str(ddp.explain())
    assert_equal_on_all_ranks([message.removeprefix(f"rank {rank}") for message in messages])
    return messages


def _assert_found(results: list[list[str]]) -> None:
    for rank, messages in enumerate(results):
        for message in messages:
            assert message.startswith(f"rank {rank}: the gradient of mlp.head.bias differs between the ranks after")
            assert "unwrap()" in message and "COMPILED_DDP_MODE=hooks" in message and "explain()" in message


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("on_rank", [None, 1])
def test_a_gradient_that_stayed_local_is_an_error_on_every_rank(
    ranks2: RankPool, name: str, on_rank: int | None
) -> None:
    _assert_found(ranks2.run(_broken, name, on_rank))


@pytest.mark.parametrize("name", BOTH)
def test_a_gradient_that_stayed_local_on_one_of_three_ranks_is_an_error_on_all(ranks3: RankPool, name: str) -> None:
    _assert_found(ranks3.run(_broken, name, 2))


def _broken_generated_code(rank: int) -> list[str]:
    # A width of its own: the caches' keys do not tell that a pass was replaced.
    return _broken(rank, "compile_ddp", None, width=24, backend="inductor")


@pytest.mark.inductor
def test_a_gradient_that_stayed_local_in_generated_code_is_an_error(ranks2: RankPool) -> None:
    _assert_found(ranks2.run(_broken_generated_code, timeout_seconds=400.0))


class SharedByGraphs(nn.Module):
    """One layer in two captured graphs, and, if wanted, in eager code too."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 5)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        x = self.head(self.layer(torch.tanh(x)))
        return self._eager(x).square().sum()

    @torch.compiler.disable
    def _eager(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.outside else x


def _gradient_from_outside(rank: int) -> None:
    ddp = wrappers(BOTH)["compile_ddp"](SharedByGraphs(outside=True))
    for step in range(3):
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(row_batch(rank, step)))  # noqa: B023
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp(row_batch(rank, step)).backward()
        assert_gradients(ddp.module, expected)
        ddp.zero_grad()
    assert [section.origin for section in ddp.plan.sections].count("graph") == 2


def test_a_gradient_from_outside_of_several_graphs_is_reduced_too(ranks2: RankPool, ranks3: RankPool) -> None:
    ranks2.run(_gradient_from_outside)
    ranks3.run(_gradient_from_outside)


def _gradient_from_outside_later(rank: int) -> list[str]:
    """The errors of four steps; from the third on, eager code uses the layer too."""
    ddp = wrappers(BOTH)["compile_ddp"](SharedByGraphs(outside=False), verify="off")
    messages = []
    for step in range(4):
        ddp.zero_grad()
        ddp.module.outside = step >= 2
        loss = ddp(row_batch(rank, step))
        try:
            loss.backward()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_a_gradient_from_outside_that_comes_later_is_an_error_without_a_proof_too(ranks2: RankPool) -> None:
    for messages in ranks2.run(_gradient_from_outside_later):
        assert messages[:2] == ["", ""]
        assert all("layer.weight, layer.bias got a gradient from outside" in message for message in messages[2:])


def _noise(rank: int, verify: str) -> None:
    """The hook sees the mean, when all has been compared, and what it adds stays."""
    ddp = wrappers(BOTH)["compile_ddp"](Loss(), verify=verify)
    seen: dict[str, Tensor] = {}

    def add_noise(name: str, parameter: Tensor) -> None:
        seen[name] = parameter.grad.clone()  # type: ignore[union-attr]
        parameter.grad += rank + 1.0  # type: ignore[operator]

    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(add_noise, name))
    for step in range(3):
        expected = mean_by_hand(ddp, lambda module: module(row_batch(rank, step)))  # noqa: B023
        ddp.zero_grad()
        ddp(row_batch(rank, step)).backward()
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(seen[name].double(), expected[name], rtol=1e-5, atol=1e-7)
            assert torch.equal(parameter.grad, seen[name] + (rank + 1.0))  # type: ignore[arg-type]


def test_noise_of_a_users_hook_is_the_users(ranks2: RankPool) -> None:
    for verify in ("first", "always", "off"):
        ranks2.run(_noise, verify)


class ThriceShared(nn.Module):
    """One layer in three captured graphs, so that the order of adding up their parts shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
            torch._dynamo.graph_break()
        return x.square().sum()


def _thrice_shared(rank: int) -> None:
    ddp = wrappers(BOTH)["compile_ddp"](ThriceShared(), verify="always")
    for step in range(10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a rank runs eagerly, and so by hooks
            if step and rank == 0:
                with torch.compiler.set_stance("force_eager"):
                    _step(ddp, row_batch(rank, step))
            else:
                _step(ddp, row_batch(rank, step))
    assert not pending(ddp)


def test_a_rank_that_adds_up_parts_by_hooks_rounds_as_the_graphs_do(ranks2: RankPool) -> None:
    ranks2.run(_thrice_shared)


# ---- graphs that are met later ---------------------------------------------------------------------------------------


def _rows(rank: int, step: int, rows: int) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _new_graph_on_last_rank(rank: int) -> list[int]:
    ddp = wrappers(BOTH)["compile_ddp"](Loss(), dynamic=False)
    exchanges = []
    last = rank == dist.get_world_size() - 1
    with ExchangesCounted() as counted:
        for step in range(7):
            _step(ddp, _rows(rank, step, rows=6 if last and step == 3 else 4))
            exchanges.append(counted.count)
            assert bool(pending(ddp)) == (step == 3), step
    return exchanges


def test_a_graph_that_is_new_on_one_rank_is_verified_by_all(ranks2: RankPool, ranks3: RankPool) -> None:
    # The backward that runs it shows that ranks agree after the reduction, the next one that they did not before.
    assert ranks2.run(_new_graph_on_last_rank) == [[1, 1, 1, 2, 3, 3, 3]] * 2
    assert ranks3.run(_new_graph_on_last_rank) == [[1, 1, 1, 2, 3, 3, 3]] * 3


def _broken_new_graph(rank: int) -> str:
    ddp = wrappers(BOTH)["compile_ddp"](Loss(), dynamic=False)
    for step in range(3):
        _step(ddp, _rows(rank, step, rows=4))
    with pytest.MonkeyPatch.context() as patch:
        _break_graphs(patch)
        with pytest.raises(RuntimeError) as caught:
            ddp(_rows(rank, 3, rows=6 if rank == 1 else 4)).backward()
    return str(caught.value)


def test_a_new_graph_that_leaves_a_gradient_local_is_found_in_its_first_backward(ranks2: RankPool) -> None:
    for message in ranks2.run(_broken_new_graph):
        assert "mlp.head.bias differs" in message


def _launches_not_seen(rank: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_observer, "LAUNCHES", ())
        ddp = wrappers(BOTH)["compile_ddp"](Loss(), verify="always")
        _step(ddp, row_batch(rank))
        assert not pending(ddp), "by what it should launch, and what comes out"
        _break_graphs(patch)
        with pytest.raises(RuntimeError) as caught:
            ddp(_rows(rank, 1, rows=6)).backward()
    return str(caught.value)


def test_launches_that_are_not_seen_are_proven_by_what_comes_out(ranks2: RankPool) -> None:
    assert all("mlp.head.bias differs" in message for message in ranks2.run(_launches_not_seen))


def _folding_is_another_graph(rank: int) -> list[int]:
    ddp = wrappers(BOTH)["compile_ddp"](Loss())
    exchanges = []
    with ExchangesCounted() as counted:
        for step in range(5):
            ddp.zero_grad()
            if rank == 0 and step >= 2:
                with ddp.no_sync():
                    ddp(row_batch(rank, 50 + step)).backward()
            ddp(row_batch(rank, step)).backward()
            exchanges.append(counted.count)
    return exchanges


def test_the_folding_variant_is_verified_when_it_first_runs(ranks2: RankPool) -> None:
    assert ranks2.run(_folding_is_another_graph) == [[1, 1, 2, 3, 3]] * 2


class LowRank(nn.Module):
    """A product of two matrices, of which the second begins as zeros, so that the first gets a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.zeros(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + x @ self.down.t() @ self.up.t()).square().sum()


def _compared(ddp: Any) -> str:
    (line,) = [line for line in str(ddp.explain()).splitlines() if line.startswith("Compared with")]
    return line.partition(": ")[2]


def _zeros_in_the_first_step(rank: int) -> tuple[list[str], int]:
    ddp = wrappers(BOTH)["compile_ddp"](LowRank())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    lines = []
    with ExchangesCounted() as counted:
        for step in range(4):
            _step(ddp, row_batch(rank, step))
            optimizer.step()
            lines.append(_compared(ddp))
    assert not pending(ddp)
    return lines, counted.count


def test_what_is_zero_in_a_graphs_first_backward_is_compared_in_the_second(ranks2: RankPool) -> None:
    all_compared = "2 of 2 parameters of graphs."
    zero_at_first = "1 of 2 parameters of graphs; not compared: down (zero gradients so far)."
    assert ranks2.run(_zeros_in_the_first_step) == [([zero_at_first, *[all_compared] * 3], 2)] * 2


def _zeros_on_one_rank_at_first(rank: int) -> tuple[list[str], list[int]]:
    ddp = wrappers(BOTH)["compile_ddp"](Loss())
    lines, exchanges = [], []
    with ExchangesCounted() as counted:
        for step in range(5):
            ddp.zero_grad()
            (ddp(row_batch(rank, step)) * (0.0 if rank == 1 and step == 0 else 1.0)).backward()
            lines.append(_compared(ddp).partition(" parameters")[0])
            exchanges.append(counted.count)
    assert not pending(ddp)
    return lines, exchanges


def test_what_is_zero_on_one_rank_alone_is_compared_there_in_a_backward_that_verifies(ranks2: RankPool) -> None:
    # The second backward is verified because that rank asks for it, and so is the third, as after a new graph.
    exchanges = [1, 2, 3, 3, 3]
    expected = [(["6 of 6"] * 5, exchanges), (["0 of 6", *["6 of 6"] * 4], exchanges)]
    assert ranks2.run(_zeros_on_one_rank_at_first) == expected


def test_verifying_adds_no_graph_and_compiles_nothing_anew(ranks2: RankPool) -> None:
    # Two widths, so that neither finds the other's graphs in a cache.
    widths = {"off": 17, "always": 19}
    without, with_proof = (ranks2.run(_compilations, verify, width) for verify, width in widths.items())
    assert without == with_proof
    assert all(captured and compiled for captured, compiled in without), "nothing was counted"


def _compilations(rank: int, verify: str, width: int) -> tuple[int, int]:
    """How many graphs Dynamo captures and how many AOTAutograd compiles, in steps of two shapes."""
    ddp = compile_ddp(Loss(width), verify=verify, backend="aot_eager", smallest_graph_mb=0)
    before = torch_private.for_tests.compiler_counters()
    for step, rows in enumerate((4, 6, 8, 4, 6)):
        ddp.zero_grad()
        ddp(_rows(rank, step, rows)).backward()
    after = torch_private.for_tests.compiler_counters()
    assert bool(pending(ddp)) == (verify == "off"), "launches of the graph are seen"
    return tuple(
        after.get(group, {}).get(name, 0) - before.get(group, {}).get(name, 0)
        for group, name in (("stats", "unique_graphs"), ("aot_autograd", "total"))
    )


# ---- nobody hangs ----------------------------------------------------------------------------------------------------


def _skip_first(rank: int, name: str) -> None:
    ddp = wrappers(BOTH)[name](Loss(), verify="always")
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(row_batch(rank, step))
        if rank == 1 and step != 1:
            ddp.skip_step()
        else:
            loss.backward()
        assert not pending(ddp), "zeros on one rank are a difference"


@pytest.mark.parametrize("name", BOTH)
def test_a_rank_that_skips_a_step_takes_part(ranks2: RankPool, name: str) -> None:
    ranks2.run(_skip_first, name)


def _autograd_grad(rank: int, name: str, existing: bool) -> None:
    ddp = wrappers(BOTH)[name](Loss(), verify="always")
    if existing:
        for parameter in ddp.parameters():
            parameter.grad = torch.full_like(parameter, float(rank))
    for step in range(2):
        refused = pytest.raises(RuntimeError, match="would return this rank's own gradient")
        with contextlib.nullcontext() if name == "compile_ddp" else refused:
            torch.autograd.grad(ddp(row_batch(rank, step)), list(ddp.module.parameters()))
    for step in range(2):
        _step(ddp, row_batch(rank, step))
    assert not pending(ddp)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_torch_autograd_grad_takes_part_whatever_grad_holds(ranks2: RankPool, name: str, existing: bool) -> None:
    ranks2.run(_autograd_grad, name, existing)


def _accumulate(rank: int, name: str) -> None:
    ddp = wrappers(BOTH)[name](Loss(), verify="always")
    for step in range(3):
        ddp.zero_grad(set_to_none=step != 1)
        with ddp.no_sync():
            ddp(row_batch(rank, 10 + step)).backward()
        ddp(row_batch(0, step)).backward()  # equal: what differs is what was there before
        assert not pending(ddp)


@pytest.mark.parametrize("name", BOTH)
def test_gradients_that_no_sync_left_are_part_of_what_is_proven(ranks2: RankPool, name: str) -> None:
    ranks2.run(_accumulate, name)


def _optimizer_in_backward(rank: int) -> None:
    ddp = wrappers(BOTH)["compile_ddp"](Loss(), verify="always")

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        ddp(row_batch(rank, step)).backward()
        assert not pending(ddp)
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])


def test_a_gradient_that_a_hook_has_taken_away_is_proven_by_what_the_graph_returned(ranks2: RankPool) -> None:
    ranks2.run(_optimizer_in_backward)


class Breaking(nn.Module):
    """Raises in backward while `armed`: at once, or after every parameter has got its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.armed = ""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        first = x * 1.0
        if self.armed == "late":
            x.register_hook(self._raise)
        y = self.mlp(first)
        if self.armed == "early":
            y.register_hook(self._raise)
        return y.square().sum()

    def _raise(self, _: Tensor) -> None:
        raise ValueError("planted")


def _break_off(rank: int, when: str, at: int) -> list[str]:
    """What rank 0 sees of a backward that breaks off on the last rank, every backward being verified."""
    ddp = wrappers(BOTH)["EagerDDP"](Breaking(), verify="always")
    seen = []
    last = rank == dist.get_world_size() - 1
    for step in range(4):
        ddp.zero_grad()
        ddp.module.armed = when if last and step == at else ""
        loss = ddp(row_batch(rank, step))
        try:
            loss.backward()
            seen.append("")
        except (ValueError, RuntimeError) as error:
            seen.append(str(error))
    assert not pending(ddp)
    return seen


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_backward_that_breaks_off_leaves_no_rank_waiting(ranks2: RankPool, when: str, at: int) -> None:
    others, own = ranks2.run(_break_off, when, at)
    told = at if when == "early" else at + 1
    assert own[at] == "planted"
    assert [bool(message) for message in own] == [step in (at, told) for step in range(4)]
    assert [bool(message) for message in others] == [step == told for step in range(4)]


def _dropped_step(rank: int, name: str) -> None:
    ddp = wrappers(BOTH)[name](Loss(), verify="always")
    kept = ddp(row_batch(rank)) if rank == 1 else None
    for step in range(2):
        with pytest.raises(RuntimeError, match="gradients of different steps"):
            ddp(row_batch(rank, step)).backward()
    del kept


@pytest.mark.parametrize("name", BOTH)
def test_a_dropped_step_is_still_an_error_of_its_own(ranks2: RankPool, name: str) -> None:
    ranks2.run(_dropped_step, name)


# ---- the option ------------------------------------------------------------------------------------------------------


def _other_options(rank: int) -> None:
    with pytest.raises(RuntimeError, match="verify"):
        compile_ddp(nn.Linear(2, 2), verify="always" if rank else "first", smallest_graph_mb=0)
    with pytest.raises((ValueError, RuntimeError), match="verify must be 'first', 'always' or 'off', found 'never'"):
        compile_ddp(nn.Linear(2, 2), verify="never", smallest_graph_mb=0)


def test_the_option_is_checked_and_must_be_equal_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_other_options)
