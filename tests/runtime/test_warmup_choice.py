"""ddp.warmup chooses between the compiled model and the model as it is, by what the ranks have timed."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from models import Mlp, assert_gradients, expected_mean, row_batch
from torch import Tensor, nn

from compiled_ddp import compile_ddp, torch_private
from compiled_ddp.graph.warmup import Choice, Pass, PassTimes, time_both
from compiled_ddp.wrapping import warm_ups
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler
COMPILED_LOSES, COMPILED_WINS = PassTimes(compiled=0.080, eager=0.020), PassTimes(compiled=0.010, eager=0.020)


# ---- deciding --------------------------------------------------------------------------------------------------------


def test_the_slowest_ranks_decide() -> None:
    choice = Choice()
    assert (str(choice), choice.why_not_graph) == ("", None)
    choice.note([PassTimes(0.030, 0.001), PassTimes(0.001, 0.0295)], steps=0)
    assert not choice.runs_eagerly, "0.0300 is within the margin of 0.0295"
    assert str(choice) == (
        "warmup() chose the compiled model, before the first step: on the slowest rank a forward and backward of "
        "a batch took 30.0 ms compiled and 29.5 ms as it is, without communication."
    )


def test_every_batch_counts_and_the_decision_is_taken_anew() -> None:
    choice = Choice()
    choice.note([COMPILED_WINS] * 2, steps=0)
    assert not choice.runs_eagerly
    choice.note([COMPILED_LOSES] * 2, steps=12)
    assert choice.runs_eagerly, "0.090 against 0.040"
    assert "chose the model as it is, reduced by hooks, after 12 synchronised backwards: on the" in str(choice)
    assert "of 2 batches took 45.0 ms compiled and 20.0 ms as it is" in str(choice)
    choice.note([PassTimes(0.010, 0.060)] * 2, steps=0)
    assert not choice.runs_eagerly, "0.100 within the margin of 0.100"


def test_where_a_rank_has_measured_nothing_nothing_is_decided() -> None:
    choice = Choice()
    choice.note([COMPILED_LOSES, None], steps=0)
    assert not choice.runs_eagerly
    assert str(choice) == ""


# ---- timing ----------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout, two outputs of which one has no gradient, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(5, 3), nn.Parameter(torch.ones(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        dropped = nn.functional.dropout(self.linear(x), 0.5)
        self.seen.append(dropped.detach())
        return {"loss": dropped.sum(), "shown": [dropped.detach()]}


def test_both_are_timed_in_turn_on_the_same_random_numbers_and_no_gradient_is_left() -> None:
    model, order = Noisy(), list[str]()
    model.linear.weight.grad = torch.ones(3, 5)
    model.linear.weight.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))

    def named(name: str) -> Any:
        def run(x: Tensor) -> dict[str, Any]:
            order.append(name)
            return model(x)

        return run

    one_pass = Pass((torch.ones(4, 5),), {}, list(model.parameters()))
    times = time_both(one_pass, compiled=named("compiled"), eager=named("eager"))
    assert order == ["compiled", "eager"] * 6
    assert all(torch.equal(*model.seen[turn : turn + 2]) for turn in range(0, 12, 2))
    assert not torch.equal(model.seen[0], model.seen[2])
    assert min(times) > 0
    assert model.linear.weight.grad.equal(torch.ones(3, 5))
    assert model.linear.bias.grad is None


def test_weights_are_cast_in_every_pass_under_autocast() -> None:
    """A step finds no cast of an earlier one's weights, so neither may what is timed."""
    model, casts = nn.Linear(5, 3), list[torch.Size]()

    class CountCasts(torch_private.autograd.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and kwargs["dtype"] is torch.bfloat16:
                casts.append(args[0].shape)
            return func(*args, **kwargs)

    with torch.autocast("cpu", torch.bfloat16), CountCasts():
        time_both(Pass((torch.ones(4, 5),), {}, list(model.parameters())), compiled=model, eager=model)
    assert casts.count(model.weight.shape) == 12


# ---- what the ranks then do ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def timed_as(*of_warmups: PassTimes) -> Any:
    """Let the next warm-ups measure this, after both have been run."""
    coming = iter(of_warmups)

    def measured(*args: Any, **kwargs: Any) -> PassTimes:
        time_both(*args, **kwargs)
        return next(coming)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        patch.setattr(warm_ups, "time_both", measured)
        yield


def _assert_steps(ddp: Any, rank: int, origin: str) -> None:
    """Accumulated and plain steps are right; all is reduced by `origin`."""
    before = torch_private.for_tests.compilations()
    for step in range(3):
        ddp.zero_grad()
        first, second = row_batch(rank, 2 * step), row_batch(rank, 2 * step + 1)
        expected = expected_mean(ddp.module, lambda m: m(first).sum() + m(second).square().sum())  # noqa: B023
        with ddp.no_sync():
            ddp(first).sum().backward()
        ddp(second).square().sum().backward()
        assert_gradients(ddp.module, expected, atol=1e-6)
    ddp.zero_grad()
    assert {section.origin for section in ddp.plan.sections} == {origin}
    assert torch_private.for_tests.compilations() == before


def _chooses_and_changes_its_mind(rank: int) -> str:
    ddp = compile_ddp(Mlp())
    slower_here = PassTimes(0.080, 0.020) if rank == 1 else PassTimes(0.010, 0.020)  # the ranks differ
    much_faster = PassTimes(0.001, 0.900)
    with timed_as(slower_here, much_faster, PassTimes(2.0, 0.1)):
        ddp.warmup(row_batch(rank))
        shown = str(ddp.explain())
        assert "warmup() chose the model as it is, reduced by hooks" in shown
        _assert_steps(ddp, rank, "hooks")
        assert "warmup() measured that the model is faster without being compiled" in str(ddp.explain())
        ddp.warmup(row_batch(rank))
        _assert_steps(ddp, rank, "graph")
        assert "warmup() chose the compiled model, after 3 synchronised backwards" in str(ddp.explain())
        ddp.warmup(row_batch(rank))  # while a sequence with graphs is agreed
        _assert_steps(ddp, rank, "hooks")
        for parameter in ddp.module.norm.parameters():
            parameter.requires_grad_(False)  # a changed model keeps the choice
        ddp(row_batch(rank)).sum().backward()
        assert {section.origin for section in ddp.plan.sections} == {"hooks"}
    # Who has compiled differs between ranks.
    return "\n".join(line for line in shown.splitlines() if not line.startswith(("Compiled here", "Loaded from")))


@pytest.mark.inductor
def test_a_wrapper_follows_what_all_ranks_have_measured(ranks2: RankPool) -> None:
    here, there = ranks2.run(_chooses_and_changes_its_mind, **LIMITS)
    assert here == there


def _compiles_for_all_shapes(rank: int) -> None:
    ddp = compile_ddp(Mlp(), dynamic=False)
    batch = torch.cat([row_batch(rank), row_batch(rank, 1)])
    expected = expected_mean(ddp.module, lambda module: module(batch).sum())
    with timed_as(COMPILED_LOSES, PassTimes(0.001, 0.900)):
        ddp.warmup(row_batch(rank))
        assert "chose the model as it is" in str(ddp.explain())
        ddp.warmup(batch)
    compilations = torch_private.for_tests.compilations()
    ddp(batch).sum().backward()
    assert torch_private.for_tests.compilations() == compilations
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    assert_gradients(ddp.module, expected, atol=1e-6)


@pytest.mark.inductor
def test_a_warm_up_compiles_what_it_may_choose_also_while_the_model_runs_as_it_is(ranks2: RankPool) -> None:
    ranks2.run(_compiles_for_all_shapes, **LIMITS)


def _changes_its_mind_while_gradients_accumulate(rank: int) -> None:
    ddp = compile_ddp(Mlp())
    first, second = row_batch(rank), row_batch(rank, 1)
    expected = expected_mean(ddp.module, lambda module: module(first).sum() + module(second).square().sum())
    with timed_as(COMPILED_LOSES, PassTimes(0.001, 0.900)):
        for origin in ("hooks", "graph"):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(first).sum().backward()
            local = [parameter.grad.clone() for parameter in ddp.parameters()]
            ddp.warmup(first)
            assert all(map(torch.equal, local, (parameter.grad for parameter in ddp.parameters())))
            ddp(second).square().sum().backward()
            assert {section.origin for section in ddp.plan.sections} == {origin}
            assert_gradients(ddp.module, expected, atol=1e-6)


@pytest.mark.inductor
def test_local_gradients_outlast_another_choice(ranks2: RankPool) -> None:
    ranks2.run(_changes_its_mind_while_gradients_accumulate, **LIMITS)


def _does_not_choose(rank: int) -> None:
    with timed_as():  # nothing is timed
        for options in ({"warmup_chooses": False}, {"strict": True}, {"backend": "aot_eager"}):
            ddp = compile_ddp(Mlp(), **options)
            ddp.warmup(row_batch(rank))
            _assert_steps(ddp, rank, "graph")
            assert "chose" not in str(ddp.explain())
            ddp.unwrap()
        ddp = compile_ddp(Mlp())
        ddp.eval().warmup(row_batch(rank))
        with torch.no_grad():
            ddp.train().warmup(row_batch(rank))
        loss = ddp(row_batch(rank)).sum()
        ddp.warmup(row_batch(rank))  # a backward is awaited
        loss.backward()
        assert {section.origin for section in ddp.plan.sections} == {"graph"}


@pytest.mark.inductor
def test_graphs_stay_where_they_are_wanted_or_no_step_is_timed(ranks2: RankPool) -> None:
    ranks2.run(_does_not_choose, **LIMITS)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


def _leaves_all_as_it_was(rank: int) -> None:
    ddp = compile_ddp(Normed(), smallest_graph_mb=0)
    called = list[Tensor]()
    ddp.module[0].weight.register_hook(called.append)
    ddp.module[3].weight.grad = torch.full((2, 6), 1.0 + rank)
    before = {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()}
    random = torch.get_rng_state()
    ddp.warmup(row_batch(rank))
    assert "warmup() chose" in str(ddp.explain())
    torch.testing.assert_close(dict(ddp.module.state_dict()), before, rtol=0, atol=0)
    assert torch.get_rng_state().equal(random)
    assert ddp.module[3].weight.grad.equal(torch.full((2, 6), 1.0 + rank))
    assert ddp.module[0].weight.grad is None
    assert not called


@pytest.mark.inductor
def test_what_is_timed_leaves_no_trace(ranks2: RankPool) -> None:
    ranks2.run(_leaves_all_as_it_was, **LIMITS)


class Checkpointed(nn.Module):
    """torch refuses to run the backward of a reentrant checkpoint for given tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._run, self.into(x), use_reentrant=True)

    def _run(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x))


def _cannot_time(rank: int) -> None:
    ddp = compile_ddp(Checkpointed())
    with pytest.warns(UserWarning, match=r"could not time a forward and backward by themselves.*stays compiled"):
        ddp.warmup(row_batch(rank))
    expected = expected_mean(ddp.module, lambda module: module(row_batch(rank)).sum())
    ddp(row_batch(rank)).sum().backward()
    assert_gradients(ddp.module, expected)


@pytest.mark.inductor
def test_a_model_that_cannot_be_timed_stays_compiled_and_says_so(ranks2: RankPool) -> None:
    ranks2.run(_cannot_time, **LIMITS)
