"""Ranks that do different things in one step: the same buckets in the same order on all of them, and the right mean."""

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from models import (
    BrokenBlock,
    Mlp,
    assert_equal_on_all_ranks,
    expected_mean,
    row_batch,
    wrappers,
)
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.plan import ReductionSequence
from compiled_ddp.planning.sequence import SequencePlanner
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}


def rows(rank: int, step: int, count: int = 4) -> Tensor:
    """Rows for the models below, others on every rank and in every step; shape (count, 5)."""
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def assert_averaged(ddp: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """One step, compared with plain autograd averaged by hand. What no rank used must have no gradient."""
    twin = copy.deepcopy(ddp.module)
    expected = expected_mean(twin, loss)
    twin.zero_grad()
    loss(twin).backward()
    ddp.zero_grad()
    loss(ddp).backward()
    for name, parameter in ddp.module.named_parameters():
        used = torch.tensor(float(twin.get_parameter(name).grad is not None))
        dist.all_reduce(used)
        assert (parameter.grad is not None) == bool(used), name
        if used:
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)


def fallback_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if "reduced by hooks" in str(warning.message)]


# ---- other control flow on every rank --------------------------------------------------------------------------------


class Gated(nn.Module):
    """Layers that `gates` switches on and off from step to step, each rank by its own choice."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(layers))
        self.gates = [True] * layers

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            if gate:
                x = x + torch.tanh(layer(x))
        return self.head(x).square().sum()


class GatedBlocks(Gated):
    """The layers are blocks with a graph break inside, so that one code object's graphs serve them all."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers)
        self.layers = nn.ModuleList(BrokenBlock(5) for _ in range(layers))


class RoutedExperts(nn.Module):
    """Each rank sends its rows to the experts that it chooses; an expert may get none of a rank's, or of any rank's."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(experts))
        self.choice = [0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in sorted(set(self.choice)):
            chosen = [place for place in range(len(x)) if self.choice[place % len(self.choice)] == number]
            x = x.index_add(0, torch.tensor(chosen), torch.tanh(self.experts[number](x[chosen])))
        return self.head(x).square().sum()


class RoutedByData(RoutedExperts):
    """The router's argmax decides, inside the model: a graph break for every expert."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__(experts)
        self.router = nn.Linear(5, experts)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        weight, choice = self.router(hidden).softmax(1).max(1)
        out = hidden
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero().flatten()
            if len(chosen):
                out = out.index_add(0, chosen, weight[chosen, None] * torch.tanh(expert(hidden[chosen])))
        return self.head(out).square().sum()


def alternate(model: nn.Module, rank: int, step: int) -> None:
    """Ranks take turns: in each step another one skips every layer."""
    model.gates = [(rank + step) % dist.get_world_size() != 0] * len(model.layers)


def layer_drop(model: nn.Module, rank: int, step: int) -> None:
    """LayerDrop and stochastic depth: every rank draws for itself which layers it runs."""
    draw = random.Random(100 * step + rank)
    model.gates = [draw.random() < 0.5 for _ in model.layers]


def route(model: nn.Module, rank: int, step: int) -> None:
    draw = random.Random(100 * step + rank)
    model.choice = [draw.randrange(len(model.experts)) for _ in range(2)]


def leave_to_data(model: nn.Module, rank: int, step: int) -> None:
    """The model chooses by itself."""


def _train_with_choices(
    rank: int, wrapper: str, model_class: type[nn.Module], choose: Callable[[nn.Module, int, int], None]
) -> None:
    torch.manual_seed(0)
    ddp = wrappers(BOTH)[wrapper](model_class(), **ONE_BUCKET_EACH)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            choose(ddp.module, rank, step)
            assert_averaged(ddp, lambda module: module(rows(rank, step)))  # noqa: B023
            optimizer.step()
    assert_equal_on_all_ranks(ddp.plan.fingerprint)
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])


CHOICES = [
    (Gated, alternate),
    (Gated, layer_drop),
    (GatedBlocks, layer_drop),
    (RoutedExperts, route),
    (RoutedByData, leave_to_data),
]


@pytest.mark.parametrize(("model_class", "choose"), CHOICES)
@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_may_choose_other_parts_of_the_model_in_every_step_on_two_ranks(
    ranks2: RankPool, wrapper: str, model_class: type[nn.Module], choose: Callable[[nn.Module, int, int], None]
) -> None:
    ranks2.run(_train_with_choices, wrapper, model_class, choose)


@pytest.mark.parametrize(
    ("model_class", "choose"),
    [*CHOICES[2:4], *(pytest.param(*choice, marks=pytest.mark.slow) for choice in (*CHOICES[:2], CHOICES[4]))],
)
def test_ranks_may_choose_other_parts_of_the_model_in_every_step_on_three_ranks(
    ranks3: RankPool, model_class: type[nn.Module], choose: Callable[[nn.Module, int, int], None]
) -> None:
    ranks3.run(_train_with_choices, "compile_ddp", model_class, choose)


class BreaksWhereTheRankSays(nn.Module):
    """A graph break after the layer that `place` counts, none where there is no such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(5, 5) for _ in range(4))
        self.place = -1

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.place == 0:
            torch._dynamo.graph_break()
        x = torch.tanh(self.b(x))
        if self.place == 1:
            torch._dynamo.graph_break()
        x = torch.tanh(self.c(x))
        if self.place == 2:
            torch._dynamo.graph_break()
        return self.d(x).square().sum()


def _breaks(rank: int, moving: bool) -> list[str]:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](BreaksWhereTheRankSays(), **ONE_BUCKET_EACH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            ddp.module.place = rank + (step if moving else 0)
            assert_averaged(ddp, lambda module: module(rows(rank, step)))  # noqa: B023
    return fallback_warnings(caught)


@pytest.mark.parametrize("moving", [False, True])
def test_ranks_that_break_their_graphs_in_other_places_go_by_hooks(ranks2: RankPool, moving: bool) -> None:
    first, second = ranks2.run(_breaks, moving)
    assert len(second) == 1 and "does not fit the agreed sequence" in second[0]
    assert len(first) == moving


def _freezes_on_one_rank(rank: int) -> list[str]:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    ddp = wrappers(["compile_ddp"])["compile_ddp"](model, **ONE_BUCKET_EACH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if step == 1 and rank == 0:
                model[0].requires_grad_(False)
            ddp(rows(rank, step)).square().sum().backward()
    return fallback_warnings(caught)


def test_where_a_layer_was_frozen_on_one_rank_the_warning_names_it(ranks2: RankPool) -> None:
    (told,), others = ranks2.run(_freezes_on_one_rank)
    assert "does not fit the agreed sequence of this backward: 0.weight, 0.bias frozen on this rank since" in told
    assert others == []


def test_three_ranks_that_break_their_graphs_in_other_places_go_by_hooks(ranks3: RankPool) -> None:
    assert [len(said) for said in ranks3.run(_breaks, False)] == [0, 1, 1]


# ---- other shapes ----------------------------------------------------------------------------------------------------


def graphs_captured() -> int:
    return torch_private.for_tests.compiler_counters().get("stats", {}).get("unique_graphs", 0)


def _row_counts(rank: int, wrapper: str, dynamic: bool | None, counts: list[list[int]]) -> tuple[int, list[str]]:
    """`counts` holds for each step the rows of every rank. Returns the graphs captured, and warnings."""
    options = {"dynamic": dynamic} if wrapper == "compile_ddp" else {}
    ddp = wrappers(BOTH)[wrapper](Gated(), **ONE_BUCKET_EACH, **options)
    before = graphs_captured()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, of_ranks in enumerate(counts):
            count = of_ranks[rank]
            assert_averaged(ddp, lambda module: module(rows(rank, step, count)))  # noqa: B023
    assert_equal_on_all_ranks(ddp.plan.fingerprint)
    return graphs_captured() - before, fallback_warnings(caught)


def test_one_rank_that_compiles_anew_for_every_shape_keeps_the_sequence(ranks3: RankPool) -> None:
    counts = [[4, 4, 4], [4, 3, 4], [4, 2, 4], [4, 4, 4]]
    found = ranks3.run(_row_counts, "compile_ddp", False, counts)
    assert [graphs for graphs, _ in found] == [1, 3, 1]
    assert not any(said for _, said in found), found


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_ranks_of_different_batch_sizes_and_a_short_last_batch(ranks2: RankPool, dynamic: bool | None) -> None:
    found = ranks2.run(_row_counts, "compile_ddp", dynamic, [[4, 6], [4, 6], [4, 6], [3, 1]])
    assert not any(said for _, said in found), found


def test_ranks_of_different_batch_sizes_and_a_short_last_batch_by_hooks(ranks3: RankPool) -> None:
    ranks3.run(_row_counts, "EagerDDP", None, [[4, 6, 5], [4, 6, 5], [3, 1, 2]])


# ---- one rank without graphs -----------------------------------------------------------------------------------------


def _nothing(step: int) -> AbstractContextManager[object]:
    return nullcontext()


def _eager_stance(step: int) -> AbstractContextManager[object]:
    return torch.compiler.set_stance("force_eager") if step >= 2 else nullcontext()


def _recompile_limit(step: int) -> AbstractContextManager[object]:
    return torch._dynamo.config.patch(recompile_limit=1)


def _leaves_its_graphs(rank: int, how: Callable[[int], AbstractContextManager[object]]) -> list[str]:
    """The last rank leaves its graphs in mid-training."""
    last = rank == dist.get_world_size() - 1
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Gated(), dynamic=False, **ONE_BUCKET_EACH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            count = 4 + max(0, step - 2)  # which matters to the recompile limit alone
            with how(step) if last else nullcontext():
                assert_averaged(ddp, lambda module: module(rows(rank, step, count)))  # noqa: B023
    return fallback_warnings(caught)


LEAVES = [_eager_stance, _recompile_limit]


@pytest.mark.parametrize("how", LEAVES)
def test_a_rank_that_leaves_its_graphs_goes_by_hooks_and_says_so_once(
    ranks2: RankPool, how: Callable[[int], AbstractContextManager[object]]
) -> None:
    first, second = ranks2.run(_leaves_its_graphs, how)
    assert first == []
    assert len(second) == 1, second


@pytest.mark.parametrize("how", LEAVES)
def test_a_rank_of_three_that_leaves_its_graphs_goes_by_hooks_and_says_so_once(
    ranks3: RankPool, how: Callable[[int], AbstractContextManager[object]]
) -> None:
    assert [len(said) for said in ranks3.run(_leaves_its_graphs, how)] == [0, 0, 1]


def _never_compiles(rank: int, disabled_on: int) -> list[str]:
    with torch._dynamo.config.patch(disable=rank == disabled_on), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = wrappers(["compile_ddp"])["compile_ddp"](Gated(), **ONE_BUCKET_EACH)
        for step in range(3):
            assert_averaged(ddp, lambda module: module(rows(rank, step)))  # noqa: B023
    return fallback_warnings(caught)


@pytest.mark.parametrize("disabled_on", [0, 1])
def test_a_rank_under_torchdynamo_disable_goes_by_hooks_and_says_so_once(ranks2: RankPool, disabled_on: int) -> None:
    said = ranks2.run(_never_compiles, disabled_on)
    assert len(said[disabled_on]) == 1, said
    if disabled_on == 1:
        assert said[0] == []


def _resets(rank: int) -> list[str]:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Gated(), **ONE_BUCKET_EACH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            if rank == 1 and step == 2:
                torch._dynamo.reset()
            assert_averaged(ddp, lambda module: module(rows(rank, step)))  # noqa: B023
    return fallback_warnings(caught)


def test_a_rank_that_resets_dynamo_compiles_again_and_keeps_its_graphs(ranks2: RankPool) -> None:
    assert ranks2.run(_resets) == [[], []]


# ---- a tensor hook that comes and goes -------------------------------------------------------------------------------


def _hook_on_rank_zero(rank: int) -> list[str]:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Gated(), **ONE_BUCKET_EACH)

    def loss(step: int) -> Callable[[nn.Module], Tensor]:
        return lambda module: module(rows(rank, step))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_averaged(ddp, loss(0))
        seen: list[Tensor] = []
        handle = ddp.module.head.weight.register_hook(seen.append) if rank == 0 else None
        for step in (1, 2):
            assert_averaged(ddp, loss(step))
        if handle is not None:
            handle.remove()
        for step in (3, 4):
            assert_averaged(ddp, loss(step))
    assert len(seen) == (2 if rank == 0 else 0)
    return fallback_warnings(caught)


def test_a_tensor_hook_on_one_rank_alone_may_come_and_go(ranks3: RankPool) -> None:
    first, *others = ranks3.run(_hook_on_rank_zero)
    assert len(first) == 1 and "tensor hook" in first[0]
    assert others == [[], []]


# ---- ranks that do not take part -------------------------------------------------------------------------------------


def _other_sequence(rank: int, wrapper: str, agreed_on: str) -> str:
    """The last rank makes something else of the text that rank 0 wrote."""
    text_of = {"proposal": 0, "sequence": 1 if wrapper == "compile_ddp" else 0}
    decode, decoded = SequencePlanner.decode, []

    def misread(planner: SequencePlanner, text: str) -> ReductionSequence:
        sequence = decode(planner, text)
        decoded.append(sequence)
        return planner.propose([], reason="misread") if len(decoded) - 1 == text_of[agreed_on] else sequence

    with pytest.MonkeyPatch.context() as patch:
        if rank == dist.get_world_size() - 1:
            patch.setattr(SequencePlanner, "decode", misread)
        ddp = wrappers(BOTH)[wrapper](Mlp(), **ONE_BUCKET_EACH)
        with pytest.raises(RuntimeError) as caught:
            ddp(row_batch(rank)).square().sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrapper", "agreed_on"), [("compile_ddp", "proposal"), ("compile_ddp", "sequence"), ("EagerDDP", "sequence")]
)
def test_a_rank_with_another_sequence_is_named_on_every_rank(ranks3: RankPool, wrapper: str, agreed_on: str) -> None:
    for message in ranks3.run(_other_sequence, wrapper, agreed_on):
        assert message.startswith("the sequence of buckets was not adopted, on any rank:"), message
        assert "- rank 2: the sequence of buckets is" in message
        assert "- rank 1" not in message


def _silent_in_backward(rank: int, wrapper: str) -> bool:
    """The last rank runs no second backward; it stays until the others have given up."""
    ddp = wrappers(BOTH)[wrapper](Mlp())
    ddp(row_batch(rank)).square().sum().backward()
    loss = ddp(row_batch(rank, 1)).square().sum()
    store = torch_private.groups.default_store()
    silent = rank == dist.get_world_size() - 1
    if silent:
        store.wait([f"gave up/{other}" for other in range(rank)])
    else:
        with pytest.raises(RuntimeError):
            loss.backward()
        store.set(f"gave up/{rank}", "")
    return silent


@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_that_wait_for_a_silent_one_raise_within_the_timeout(ranks3: RankPool, wrapper: str) -> None:
    found = ranks3.run(_silent_in_backward, wrapper, collective_timeout_seconds=3, timeout_seconds=60)
    assert found == [False, False, True]


# ---- a .grad that is kept --------------------------------------------------------------------------------------------


def _kept_while_unused(rank: int, wrapper: str) -> None:
    """Summed again, it would be twice as large; and one that a rank has changed would become everyone's."""
    ddp = wrappers(BOTH)[wrapper](Gated(2), reduction="sum", **ONE_BUCKET_EACH)
    ddp(rows(rank, 0)).backward()
    ddp.module.gates = [True, False]
    unused = [name for name, _ in ddp.module.named_parameters() if name.startswith("layers.1")]
    assert unused
    if rank == 1:
        for name in unused:
            ddp.module.get_parameter(name).grad.neg_()
    before = {name: ddp.module.get_parameter(name).grad.clone() for name in unused}
    for step in range(1, 4):
        ddp(rows(rank, step)).backward()
        for name, gradient in before.items():
            assert torch.equal(ddp.module.get_parameter(name).grad, gradient), (step, name)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_grad_kept_from_an_earlier_step_stays_as_it_is_while_no_rank_uses_its_parameter(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_kept_while_unused, wrapper)


# ---- a first backward in which no rank runs its graphs ---------------------------------------------------------------


class TiedToEagerCode(nn.Module):
    """One layer runs in a graph and in eager code, which only a backward in which the graph reduces can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.eager(x)))).square().sum()


def _no_rank_runs_the_graph_at_first(rank: int, why: str, steps: int, until: int) -> list[tuple[bool, int]]:
    """Rank 0 has no weight, or a tensor hook, `until` a step, and rank 1 runs everything eagerly."""
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TiedToEagerCode(), reduction="weighted")
    twin, sequences = copy.deepcopy(ddp.module), []
    handle = ddp.module.layer.weight.register_hook(torch.clone) if why == "hook" and rank == 0 else None
    for step in range(steps):
        weights = (0.0, 2.0) if why == "weight" and step < until else (2.0, 3.0)
        if handle is not None and step == until:
            handle.remove()
        ddp.set_weight(weights[rank])
        for module in (ddp, twin):
            module.zero_grad()
            stance = torch.compiler.set_stance("force_eager") if rank == 1 else nullcontext()
            with stance, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module(rows(rank, step)).backward()
        for parameter, by_hand in zip(ddp.parameters(), twin.parameters(), strict=True):
            dist.all_reduce(by_hand.grad.mul_(weights[rank] / sum(weights)))
            torch.testing.assert_close(parameter.grad, by_hand.grad)
        sequences.append((ddp._runtime.reduction.agreed.refined, ddp._runtime.reduction.agreed.beginnings))
    return sequences


def test_a_first_backward_in_which_no_rank_ran_the_graph_does_not_fix_the_sequence(ranks2: RankPool) -> None:
    """Rank 0's graph reduced what it had in the third step, and the gradient of the eager code stayed local."""
    anew = [(False, 1), (False, 2)]
    expected = [[*anew, *[(True, 2)] * 3]] * 2
    assert ranks2.run(_no_rank_runs_the_graph_at_first, "weight", 5, 2) == expected


def test_a_sequence_made_without_the_graph_is_right_when_its_tensor_hook_has_gone(ranks2: RankPool) -> None:
    assert ranks2.run(_no_rank_runs_the_graph_at_first, "hook", 5, 2) == [[(True, 0)] * 5] * 2


def test_sequences_are_not_begun_again_for_ever_where_no_graph_runs(ranks2: RankPool) -> None:
    """Three times, as no rank's graph has shown anything; then after two more backwards, then after four."""
    found = ranks2.run(_no_rank_runs_the_graph_at_first, "weight", 8, 8)
    assert [beginnings for _, beginnings in found[0]] == [1, 2, 3, 3, 4, 4, 4, 4] and found[1] == found[0]
