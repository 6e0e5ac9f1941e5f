"""compile_step(shard_optimizer=True): the same training, with a share of the optimizer's state on each rank."""

import copy
import functools
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_whole_step as whole
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_whole_step import OPTIMIZERS, Loop, Net, assert_same, batch, both
from torch import Tensor, nn
from torch.fx import Graph, Node

from compiled_ddp import compile_step
from compiled_ddp.functional import unit
from compiled_ddp.passes import scatter_buckets
from compiled_ddp.passes.ops import exchange_of_sums_into, wait_tensor
from ranks import RankError, RankPool

sharding = functools.partial(whole.stepping_with, shard_optimizer=True)


def _sharded(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    with sharding():
        return function(rank, *args)


# ---- what every step does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "momentum", "nesterov", "Adam", "AdamW"])
def test_a_step_is_what_the_loop_does(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_sharded, whole._trains, kind, "aot_eager")


def test_on_three_ranks_shares_are_filled_up(ranks3: RankPool) -> None:
    ranks3.run(_sharded, whole._trains, "AdamW", "aot_eager")


def test_inductors_code_is_what_the_loop_does(ranks2: RankPool) -> None:
    ranks2.run(_sharded, whole._trains, "AdamW", "inductor")


@pytest.mark.parametrize(
    "function",
    [whole._clips, pytest.param(whole._between_steps, marks=pytest.mark.slow), whole._two_steps, whole._follows],
    ids=lambda each: each.__name__,
)
def test_the_rest_is_as_without(ranks2: RankPool, function: Callable[..., Any]) -> None:
    ranks2.run(_sharded, function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_dtypes(ranks2: RankPool, dtype: torch.dtype) -> None:
    ranks2.run(_sharded, whole._in_half, dtype)


@pytest.mark.parametrize("kind", ["SGD", "momentum"])
def test_sgd_in_half_precision(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_sharded, whole._in_half_by_sgd, kind, torch.bfloat16)


def test_an_update_of_several_batches_is_that_of_their_mean(ranks2: RankPool) -> None:
    ranks2.run(_sharded, whole._accumulates, "AdamW", "aot_eager")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_that_no_rank_uses_is_left_as_it_is(ranks2: RankPool, accumulate: int) -> None:
    ranks2.run(_sharded, whole._uses, "AdamW", accumulate)


def test_a_scaler_leaves_out_what_is_infinite_on_one_rank(ranks2: RankPool) -> None:
    ranks2.run(_sharded, whole._scales, "AdamW")


# ---- what is its own -------------------------------------------------------------------------------------------------


def _is_equal_bit_for_bit(rank: int) -> None:
    steps = []
    for shard in (False, True):
        torch.manual_seed(0)
        # Of which no share ends within a vector: torch's kernels round what is left over otherwise.
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        step = compile_step(
            model,
            OPTIMIZERS["AdamW"](model.parameters()),
            lambda model, x: model(x).square().mean(),
            backend="aot_eager",
            shard_optimizer=shard,
        )
        steps.append(step)
    for n in range(20):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * n + rank))
        plain, sharded = (step(x) for step in steps)
        assert torch.equal(plain, sharded), n
    one, other = (step.model.state_dict() for step in steps)
    assert all(torch.equal(one[name], other[name]) for name in one)
    one, other = (step.optimizer.state_dict()["state"] for step in steps)
    assert all(torch.equal(one[number][name], other[number][name]) for number in one for name in one[number])


def test_two_ranks_add_up_to_the_same_bits(ranks2: RankPool) -> None:
    ranks2.run(_is_equal_bit_for_bit)


def _bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    kept = [each for own in optimizer.state.values() for name, each in own.items() if name != "step"]
    return sum(each.untyped_storage().nbytes() for each in kept)


def _keeps_its_share(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 30), nn.Linear(30, 7), nn.Flatten(0))
    step = compile_step(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, x: model(x).square().mean(),
        backend="aot_eager",
        shard_optimizer=True,
    )
    step(torch.randn(4, 64))
    ranks = dist.get_world_size()
    of_share = sum(-(-parameter.numel() // ranks) for parameter in model.parameters())
    assert _bytes_of_state(step.optimizer) == 2 * 4 * of_share
    assert f"Each of {ranks} ranks updates its share" in step.explain(), step.explain()


@pytest.mark.parametrize("pool", ["ranks2", "ranks3"])
def test_each_rank_keeps_its_share_of_the_state(request: pytest.FixtureRequest, pool: str) -> None:
    request.getfixturevalue(pool).run(_keeps_its_share)


def _leaves_and_comes_back(rank: int) -> None:
    with sharding():
        step, loop = both("AdamW")
    for n in range(2):
        step(*batch(rank, n)), loop.step(*batch(rank, n))
    ordinary = Loop(step.model, OPTIMIZERS["AdamW"])
    ordinary.model, ordinary.optimizer = step.model, step.optimizer
    for n in range(2, 4):  # by the optimizer's own step
        ordinary.step(*batch(rank, n)), loop.step(*batch(rank, n))
        assert_same(step, loop)
    for n in range(4, 6):
        step(*batch(rank, n)), loop.step(*batch(rank, n))
        assert_same(step, loop)


def test_an_ordinary_loop_in_between_finds_the_whole_state(ranks2: RankPool) -> None:
    ranks2.run(_leaves_and_comes_back)


def _saves(rank: int) -> tuple[bytes, list[Tensor]]:
    with sharding():
        step, _ = both("AdamW")
    for n in range(3):
        step(*batch(0, n))
    into = io.BytesIO()
    torch.save({"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}, into)
    for n in range(3, 5):
        step(*batch(0, n))
    return into.getvalue(), [each.detach().clone() for each in step.model.parameters()]


def _loads(rank: int, saved: bytes, shard: bool) -> list[Tensor]:
    with whole.stepping_with(shard_optimizer=shard):
        step, _ = both("AdamW")
    checkpoint = torch.load(io.BytesIO(saved))
    step.model.load_state_dict(checkpoint["model"])
    step.optimizer.load_state_dict(checkpoint["optimizer"])
    for n in range(3, 5):
        step(*batch(0, n))
    return [each.detach().clone() for each in step.model.parameters()]


@pytest.mark.parametrize("shard", [True, False])
def test_a_state_dict_is_loaded_by_any_number_of_ranks(ranks2: RankPool, ranks3: RankPool, shard: bool) -> None:
    (saved, expected), _ = ranks2.run(_saves)
    for pool in (ranks2, ranks3):
        for found in pool.run(_loads, saved, shard):
            torch.testing.assert_close(found, expected)


def _by_dcp(rank: int, folder: str, first: bool) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with sharding():
        step, _ = both("AdamW")
    if first:
        for n in range(3):
            step(*batch(0, n))
    model, optimizer = get_state_dict(step.model, step.optimizer)
    state = {"model": model, "optimizer": optimizer}
    if first:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(step.model, step.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for n in range(3, 5):
        step(*batch(0, n))
    return [each.detach().clone() for each in step.model.parameters()]


def test_a_distributed_checkpoint_is_loaded_by_any_number_of_ranks(
    ranks2: RankPool, ranks3: RankPool, tmp_path: Any
) -> None:
    expected, _ = ranks2.run(_by_dcp, str(tmp_path), True)
    for pool in (ranks2, ranks3):
        for found in pool.run(_by_dcp, str(tmp_path), False):
            torch.testing.assert_close(found, expected)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def _saves_on_one_rank(rank: int) -> str:
    with sharding():
        step, loop = both("AdamW")
    step(*batch(rank, 0)), loop.step(*batch(rank, 0))
    ask = step.optimizer.state_dict if rank == 0 else lambda: step(*batch(rank, 1))  # as many do
    with pytest.raises(RuntimeError) as raised:
        ask()
    assert_same(step, loop)
    step(*batch(rank, 2)), loop.step(*batch(rank, 2))
    assert_same(step, loop)
    return str(raised.value)


def test_a_state_dict_that_one_rank_alone_asks_for_is_an_error_on_all(ranks2: RankPool) -> None:
    for told in ranks2.run(_saves_on_one_rank):
        assert "optimizer.state_dict()" in told and "a sum of gradients" in told, told


@pytest.mark.parametrize(("accumulate", "fails_at"), [(1, 0), (2, 0), (2, 1)])
def test_a_step_that_raises_changes_nothing_on_any_rank(ranks2: RankPool, accumulate: int, fails_at: int) -> None:
    ranks2.run(_sharded, whole._raises, "AdamW", accumulate, fails_at)


def test_what_a_graph_raises_is_raised_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_sharded, whole._raises_in_graph, 1)


torch.library.define("compiled_ddp_tests::raising", "(Tensor x, Tensor fails) -> Tensor")


@torch.library.impl("compiled_ddp_tests::raising", "CompositeExplicitAutograd")
def _raising(x: Tensor, fails: Tensor) -> Tensor:
    """`x`, unless it fails: when the graph runs."""
    if bool(fails):
        raise ValueError("a kernel has raised")
    return x.clone()


torch.library.register_fake("compiled_ddp_tests::raising", lambda x, fails: torch.empty_like(x))


class _RaisingBehind(torch.autograd.Function):
    """Its argument, whose gradient raises where `fails`."""

    @staticmethod
    def forward(x: Tensor, fails: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.ops.compiled_ddp_tests.raising(*gradients, *ctx.saved_tensors), None


class Breaking(nn.Module):
    """Raises in its backward, between the gradients of its two layers, where it `fails`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor, fails: Tensor) -> Tensor:
        hidden = _RaisingBehind.apply(torch.tanh(self.first(x)), fails)
        return F.mse_loss(self.second(hidden).squeeze(1), y)


def _breaks_off(rank: int, kind: str, pipelined: bool, fails_at: int) -> None:
    options = {"shard_optimizer": True, "pipeline_updates": pipelined, "bucket_cap_mb": 0.0}
    step, loop = both(kind, Breaking, **options)
    good, bad = torch.tensor(False), torch.tensor(rank == 1)
    for n in range(3):
        if n == fails_at:
            saved = copy.deepcopy({"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()})
            with pytest.raises((RuntimeError, ValueError), match="a kernel has raised"):
                step(*batch(rank, n), bad)
            if fails_at and kind != "SGD":
                _is_told_of_a_torn_state(step, rank)
                step.model.load_state_dict(saved["model"])
                step.optimizer.load_state_dict(saved["optimizer"])
        step(*batch(rank, n), good)
        loop.step(*batch(rank, n), good)
    assert_same(step, loop)


def _is_told_of_a_torn_state(step: Any, rank: int) -> None:
    for call in (step.optimizer.state_dict, lambda: step(*batch(rank, 0), torch.tensor(False))):
        with pytest.raises(RuntimeError, match="rank 0: an update has raised an error when"):
            call()


@pytest.mark.parametrize(
    ("kind", "pipelined", "fails_at"), [("AdamW", False, 2), ("AdamW", True, 2), ("AdamW", False, 0), ("SGD", False, 2)]
)
def test_state_that_was_updated_in_part_is_no_state(
    ranks2: RankPool, kind: str, pipelined: bool, fails_at: int
) -> None:
    """Rank 0 has updated its share of the last layer when rank 1 raises. Of a first update nothing is left."""
    ranks2.run(_breaks_off, kind, pipelined, fails_at)


def _saves_and_waits(rank: int) -> str:
    with sharding():
        step, _ = both("AdamW")
    step(*batch(rank, 0))
    with pytest.raises(RuntimeError) as raised:
        (step.optimizer.state_dict if rank == 0 else dist.barrier)()
    return str(raised.value)


def test_where_the_others_wait_elsewhere_the_error_says_what_was_asked(ranks2: RankPool) -> None:
    told, _ = ranks2.run(_saves_and_waits, collective_timeout_seconds=5.0)
    assert "rank 0: optimizer.state_dict() is a collective" in told and "not behind `if rank == 0:`" in told, told


def _saves_behind_the_end(rank: int) -> None:
    group = dist.new_group([0, 1])
    with sharding():
        step, _ = both("AdamW", process_group=group)
    step(*batch(rank, 0))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"call it on every rank before destroy_process_group\(\)"):
        step.optimizer.state_dict()


def test_behind_destroy_process_group_there_is_nothing_to_gather_by(ranks2: RankPool) -> None:
    ranks2.run(_saves_behind_the_end)


def _told(rank: int, patched: object, name: str, value: object) -> str:
    """What a first step raises, where this has been put in the place of what is called so."""
    with sharding(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, name, value)
        step, _ = both("AdamW")
        with pytest.raises(RuntimeError) as raised:
            step(*batch(rank, 0))
    return str(raised.value)


def _leaves_out_a_gradient(rank: int) -> str:
    """Rank 1's graph sends zeros for the first gradient of each bucket."""
    rows_of = scatter_buckets._rows

    def rows(graph: Graph, gradient: Node, numel: int, ranks: int) -> Node:
        found = rows_of(graph, gradient, numel, ranks)
        return graph.call_function(torch.ops.aten.mul.Scalar, (found, 0.0)) if rank == 1 else found

    return _told(rank, scatter_buckets, "_rows", rows)


def test_a_graph_that_scatters_something_else_is_an_error_on_every_rank(ranks2: RankPool) -> None:
    for told in ranks2.run(_leaves_out_a_gradient):
        assert "first.weight" in told and "left something else" in told, told


def _sums_up_wrongly(rank: int) -> str:
    """The half of what comes of rank 0's sums is nothing."""
    start = unit._Watched.start

    def half(self: Any, number: int, operator: Any, args: Any) -> Tensor:
        result = start(self, number, operator, args)
        if operator is exchange_of_sums_into and rank == 0:
            wait_tensor(result).view(-1)[::2].zero_()
        return result

    return _told(rank, unit._Watched, "start", half)


def test_shares_that_are_not_the_sum_are_an_error_on_every_rank(ranks2: RankPool) -> None:
    for told in ranks2.run(_sums_up_wrongly):
        assert "first.weight" in told and "are not the sum over ranks" in told, told


def _of_one_optimizer(rank: int) -> None:
    """Several in a row: state is whole, also before a step's first call, and what the dropped ones had is freed."""
    good, open_files = torch.tensor(False), []
    step, loop = both("AdamW", Breaking)
    model, optimizer = step.model, step.optimizer
    for n in range(4):
        with sharding():
            step, _ = both("AdamW", lambda: model, optimizer=optimizer)
        assert_same(step, loop)
        step(*batch(rank, n), good), loop.step(*batch(rank, n), good)
        assert_same(step, loop)
        del step
        open_files.append(whole.open_files())
    assert open_files[3] <= open_files[1], "the connections of groups that nobody has any more"
    in_a_loop = Loop.of(model, optimizer)
    in_a_loop.step(*batch(rank, 4), good), loop.step(*batch(rank, 4), good)
    assert_same(in_a_loop, loop)


def test_several_steps_of_one_optimizer_take_turns(ranks2: RankPool) -> None:
    ranks2.run(_of_one_optimizer)


def _is_torn_for_all(rank: int) -> None:
    """A state that one step has torn is torn for another one, and what is loaded is there for both."""
    with sharding():
        step, loop = both("AdamW", Breaking, bucket_cap_mb=0.0)
        other, _ = both("AdamW", lambda: step.model, optimizer=step.optimizer, bucket_cap_mb=0.0)
    good, bad = torch.tensor(False), torch.tensor(rank == 1)
    for n, each in enumerate((step, other)):
        each(*batch(rank, n), good), loop.step(*batch(rank, n), good)
    saved = copy.deepcopy({"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()})
    with pytest.raises((RuntimeError, ValueError), match="a kernel has raised"):
        step(*batch(rank, 2), bad)
    _is_told_of_a_torn_state(other, rank)
    step.model.load_state_dict(saved["model"])
    step.optimizer.load_state_dict(saved["optimizer"])
    for n, each in enumerate((other, step)):
        each(*batch(rank, n), good), loop.step(*batch(rank, n), good)
    assert_same(step, loop)


def test_a_state_is_torn_for_all_steps_of_an_optimizer(ranks2: RankPool) -> None:
    ranks2.run(_is_torn_for_all)


def _in_another_world(rank: int, store: Path) -> None:
    """The state is gathered by the step that has it now, and not by one that has ended with its world."""
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for world in range(2):
        dist.init_process_group("gloo", store=dist.FileStore(f"{store}{world}", 2), rank=rank, world_size=2)
        step = compile_step(model, optimizer, shard_optimizer=True, backend="aot_eager")
        step(*batch(rank, world))
        whole_state = optimizer.state_dict()["state"]
        if world == 0:
            dist.destroy_process_group()
    model(*batch(rank, 2)).backward()
    optimizer.step()  # which finds the whole
    parameters = [*model.parameters()]
    for number, own in whole_state.items():
        parameter = parameters[number]
        assert own["exp_avg"].shape == parameter.shape == optimizer.state[parameter]["exp_avg"].shape


def test_a_step_in_another_world_takes_over_the_state(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_in_another_world, tmp_path / "store", process_group=False)


def _groups_of(rank: int, options: dict[str, bool]) -> int:
    """How many process groups a step has, which end when it is dropped and another one is made."""
    step, _ = both("AdamW", **options)
    step(*batch(rank, 0))
    communicator = step._graph.reduction.communicator.made
    groups = [*communicator._groups]
    assert all(group() is not None for group in groups)
    del step, communicator
    gc.collect()
    another, _ = both("AdamW", **options)
    another(*batch(rank, 0))
    assert not any(group() for group in groups), "their threads live on"
    return len(groups)


def test_shares_go_up_and_down_by_groups_of_their_own(ranks2: RankPool) -> None:
    assert ranks2.run(_groups_of, {}) == [1, 1]
    for way in ("shard_optimizer", "pipeline_updates"):
        assert ranks2.run(_groups_of, {way: True}) == [2, 2]


def _is_refused(rank: int) -> None:
    model = Net()
    for optimizer in (torch.optim.Adagrad(model.parameters()), torch.optim.SGD(model.parameters(), 0.1, 0.9, 0.5)):
        with pytest.raises(ValueError, match=r"shard_optimizer .* Leave out shard_optimizer"):
            compile_step(model, optimizer, shard_optimizer=True)
    with pytest.raises(TypeError, match="shard_optimizer"):
        compile_step(model, torch.optim.SGD(model.parameters()), shard_optimizer=2)  # type: ignore[arg-type]
    step = compile_step(model, torch.optim.Adam(model.parameters()), backend="aot_eager", shard_optimizer=True)
    step(*batch(rank, 0))
    copied = copy.deepcopy(step.optimizer)  # of which nobody knows that it has shares
    other = Net()
    adam = torch.optim.Adam(other.parameters())
    adam.load_state_dict(copied.state_dict())
    plain = compile_step(other, adam, backend="aot_eager")
    with pytest.raises(ValueError, match="a share of it"):
        plain(*batch(rank, 0))


def _rescales_rows(rank: int, pipelined: bool) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 1))
    step = compile_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, rows: model(rows).mean(),
        backend="aot_eager",
        shard_optimizer=True,
        pipeline_updates=pipelined,
    )
    with pytest.raises(RuntimeError, match=r"max_norm rescales .*: leave out max_norm, or shard_optimizer"):
        step(torch.tensor([rank, 2]))


@pytest.mark.parametrize("pipelined", [False, True])
def test_rows_that_each_rank_rescales_by_itself_are_refused(ranks2: RankPool, pipelined: bool) -> None:
    ranks2.run(_rescales_rows, pipelined)


def test_what_cannot_be_shared_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_is_refused)


def _differ(rank: int) -> None:
    model = Net()
    compile_step(model, torch.optim.Adam(model.parameters()), shard_optimizer=rank == 0)


def test_ranks_that_differ_are_told(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="shard_optimizer"):
        ranks2.run(_differ)
