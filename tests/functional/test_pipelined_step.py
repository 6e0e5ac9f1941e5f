"""compile_step(pipeline_updates=True): parameters, or sums of gradients, that are under way when a call returns."""

import copy
import io
import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import test_whole_step as whole
import torch
import torch.distributed as dist
from test_whole_step import OPTIMIZERS, Net, assert_same, batch, both
from torch import Tensor, nn

from compiled_ddp import compile_step, torch_private
from compiled_ddp.functional import in_flight
from compiled_ddp.torch_private import for_tests
from ranks import RankPool

OPTIONS: dict[str, dict[str, bool]] = {
    "shares": {"shard_optimizer": True, "pipeline_updates": True},  # parameters are gathered
    "sums": {"pipeline_updates": True},  # gradients are, and each rank has all of the optimizer's state
}
in_both_ways = pytest.mark.parametrize("way", OPTIONS)


def pipelining(way: str) -> Any:
    return whole.stepping_with(**OPTIONS[way])


def _pipelined(rank: int, way: str, function: Callable[..., Any], *args: Any) -> Any:
    with pipelining(way):
        return function(rank, *args)


def is_under_way(model: nn.Module) -> bool:
    return all(type(each) is not nn.Parameter for each in model.parameters() if each.requires_grad)


# ---- what every step does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["momentum", "AdamW"])
@in_both_ways
def test_a_step_is_what_the_loop_does(ranks2: RankPool, kind: str, way: str) -> None:
    ranks2.run(_pipelined, way, whole._trains, kind, "aot_eager")


@in_both_ways
def test_on_three_ranks(ranks3: RankPool, way: str) -> None:
    ranks3.run(_pipelined, way, whole._trains, "AdamW", "aot_eager")


@pytest.mark.parametrize(
    "function",
    [
        whole._clips,
        whole._clips_what_is_infinite,
        whole._is_profiled,
        whole._between_steps,
        whole._two_steps,
        whole._follows,
    ],
    ids=lambda each: each.__name__,
)
@in_both_ways
def test_the_rest_is_as_without(ranks2: RankPool, function: Callable[..., Any], way: str) -> None:
    ranks2.run(_pipelined, way, function)


@in_both_ways
def test_parameters_of_16_bits(ranks2: RankPool, way: str) -> None:
    ranks2.run(_pipelined, way, whole._in_half, torch.bfloat16)


@in_both_ways
def test_an_update_of_several_batches_is_that_of_their_mean(ranks2: RankPool, way: str) -> None:
    ranks2.run(_pipelined, way, whole._accumulates, "AdamW", "aot_eager")


@pytest.mark.parametrize("accumulate", [1, 2])
@in_both_ways
def test_a_parameter_that_no_rank_uses_is_left_as_it_is(ranks2: RankPool, accumulate: int, way: str) -> None:
    ranks2.run(_pipelined, way, whole._uses, "AdamW", accumulate)


@in_both_ways
def test_a_scaler_leaves_out_what_is_infinite_on_one_rank(ranks2: RankPool, way: str) -> None:
    ranks2.run(_pipelined, way, whole._scales, "AdamW")


# ---- the same bits, and what is under way in between -----------------------------------------------------------------


def _is_equal_bit_for_bit(rank: int, way: str, kind: str, backend: str, steps: int) -> None:
    """Of 200 steps in a row, of which nobody looks at parameters."""
    made = []
    for pipelines in (False, True):
        torch.manual_seed(0)
        options = {**OPTIONS[way], "pipeline_updates": pipelines, "backend": backend, "bucket_cap_mb": 0.0001}
        model = Net(dropout=0.2)
        optimizer = OPTIMIZERS[kind](model.parameters())
        step = compile_step(model, optimizer, **options)
        made.append((step, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)))
    losses: list[list[Tensor]] = [[], []]
    for n in range(steps):
        for (step, scheduler), found in zip(made, losses, strict=True):
            torch.manual_seed(n)
            found.append(step(*batch(rank, n)))
            scheduler.step()
        assert is_under_way(made[1][0].model) and not is_under_way(made[0][0].model)
    assert len(made[1][0]._explained[1].reductions[0].plan.buckets) > 2
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    plain, pipelined = (step.model.state_dict() for step, _ in made)
    assert all(torch.equal(plain[name], pipelined[name]) for name in plain)
    plain, pipelined = (step.optimizer.state_dict()["state"] for step, _ in made)
    assert all(torch.equal(plain[number][name], pipelined[number][name]) for number in plain for name in plain[number])


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@in_both_ways
def test_200_steps_give_the_same_bits_as_without(ranks2: RankPool, kind: str, way: str) -> None:
    ranks2.run(_is_equal_bit_for_bit, way, kind, "aot_eager", 200)


@pytest.mark.parametrize("way", [pytest.param("shares", marks=pytest.mark.slow), "sums"])
def test_inductors_code_gives_the_same_bits_as_without(ranks2: RankPool, way: str) -> None:
    ranks2.run(_is_equal_bit_for_bit, way, "AdamW", "inductor", 20)


def _keeps_memory(rank: int, way: str, backend: str) -> None:
    """What is under way comes into one of two pieces of memory in turn, and is sent from this rank's row of it."""
    with pipelining(way):
        step, _ = both("AdamW", backend=backend, bucket_cap_mb=0.0001)
    came = list[list[int]]()
    for n in range(14):  # the first ones are proven
        step(*batch(rank, n))
        in_flight = step._in_flight
        came.append([each.data_ptr() for each in in_flight._gathered])
        for flat, own, bucket in zip(in_flight._gathered, in_flight._sent, in_flight._buckets, strict=True):
            assert n < 4 or own.data_ptr() == flat.view(bucket.ranks, -1)[rank].data_ptr()
    assert len(came[-1]) > 1 and came[-5:-2] == came[-3:] and {*came[-1]}.isdisjoint(came[-2])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@in_both_ways
def test_steps_in_a_row_take_no_new_memory_for_their_buckets(ranks2: RankPool, backend: str, way: str) -> None:
    ranks2.run(_keeps_memory, way, backend)


def _launches(rank: int, way: str) -> None:
    """In the code that Inductor makes: the riders, what is scattered, and what is gathered in the other order."""
    with pipelining(way):
        step, loop = both("AdamW", backend="inductor", bucket_cap_mb=0.0)
    (source, *_) = for_tests.generated_code(lambda: step(*batch(rank, 0)))
    loop.step(*batch(rank, 0))
    launch = r"exchange_of_(sums|all)_into\.default\((\w+), ([\w, ]+), \[(\w+)"
    found = [(kind, sent, *into.split(", "), after) for kind, sent, into, after in re.findall(launch, source)]
    scattered, gathered = ([each for each in found if each[0] == kind] for kind in ("sums", "all"))
    buckets = len(step._explained[1].reductions[0].plan.of_gradients)
    assert len(scattered) == buckets > 3 and found == [*scattered, *gathered]
    assert [each[2] for each in gathered] == [each[2] for each in scattered[::-1]], "in the same memory"
    assert (way == "sums") == ([each[1] for each in gathered] == [each[3] for each in scattered[::-1]]), "as they are"
    copies = "fill_rows" in source, "taken_apart" in source
    assert copies == (way == "shares", False), "gradients are produced where they are sent from"
    assert [after for *_, after in found[1:]] == [into for *_, into, _ in found[:-1]]
    awaited = re.findall(r"wait_tensor\.default\((\w+)\)|(?:sums|all)_into\.default\((\w+)", source)
    first_launch = next(n for n, (_, sent) in enumerate(awaited) if sent)
    assert first_launch == buckets, "what the step before has left is awaited by the forward"
    assert [name for name, _ in awaited if name][-buckets:] == [summed for _, _, _, summed, _ in scattered]
    assert_same(step, loop)


@in_both_ways
def test_generated_code_launches_in_one_order(ranks2: RankPool, way: str) -> None:
    ranks2.run(_launches, way)


def _goes_on(rank: int, way: str) -> None:
    """A checkpoint between steps is that of a step which has been taken to its end."""
    with pipelining(way):
        step, _ = both("AdamW")
        for n in range(3):
            step(*batch(rank, n))
        saved = io.BytesIO()
        torch.save({"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}, saved)
        for n in range(3, 6):
            step(*batch(rank, n))
        other, _ = both("AdamW")
        checkpoint = torch.load(io.BytesIO(saved.getvalue()))
        other.model.load_state_dict(checkpoint["model"])
        other.optimizer.load_state_dict(checkpoint["optimizer"])
        for n in range(3, 6):
            other(*batch(rank, n))
    one, two = step.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@in_both_ways
def test_a_run_from_a_checkpoint_gives_the_same_bits(ranks2: RankPool, way: str) -> None:
    ranks2.run(_goes_on, way)


# ---- whoever reads a parameter has it --------------------------------------------------------------------------------

READINGS: dict[str, Callable[[Any], Any]] = {
    "flush": lambda step: step.flush(),
    "state_dict": lambda step: step.model.state_dict(),
    "a value": lambda step: step.model.scale.item(),
    "data": lambda step: step.model.scale.data,
    "detach": lambda step: next(iter(step.model.parameters())).detach(),
    "numpy": lambda step: step.model.scale.detach().numpy(),
    "a norm of all": lambda step: torch.nn.utils.parameters_to_vector(step.model.parameters()),
    "stack": lambda step: torch.cat([each.flatten() for each in step.model.parameters()]),
    "deepcopy": lambda step: copy.deepcopy(step.model),
    "pickle": lambda step: pickle.dumps(step.model),
    "save": lambda step: torch.save(step.model, io.BytesIO()),
    "evaluation": lambda step: step.model.eval()(*batch(0, 0)),
    "a compiled evaluation": lambda step: torch.compile(step.model.eval(), backend="eager")(*batch(0, 0)),
    "an average of weights": lambda step: torch.optim.swa_utils.AveragedModel(step.model),
    "load_state_dict": lambda step: step.model.load_state_dict(Net().state_dict()),
    "printing": lambda step: repr(step.model.scale),
    "all_reduce": lambda step: dist.all_reduce(step.model.scale),
    "freezing": lambda step: step.model.scale.requires_grad_(False),
}
TELLING: dict[str, Callable[[Any], Any]] = {
    "zero_grad": lambda step: step.optimizer.zero_grad(),
    "shapes": lambda step: [(each.shape, each.numel(), each.dtype, each.device) for each in step.model.parameters()],
    "isinstance": lambda step: all(isinstance(each, nn.Parameter) for each in step.model.parameters()),
    "grad": lambda step: [each.grad for each in step.model.parameters() if each.requires_grad],
    "printing the model": lambda step: repr(step.model),
    "a scheduler": lambda step: torch.optim.lr_scheduler.StepLR(step.optimizer, 1),
    "parameters": lambda step: list(step.model.parameters()),
}


def _lands(rank: int, way: str) -> None:
    with pipelining(way):
        step, loop = both("AdamW", lambda: Net().requires_grad_(True))
    for name, read in READINGS.items():
        step(*batch(rank, 0)), loop.step(*batch(rank, 0))
        assert is_under_way(step.model), name
        for telling, tell in TELLING.items():
            tell(step)
            assert is_under_way(step.model), telling
        read(step)
        assert all(type(each) is nn.Parameter for each in step.model.parameters()), name
        step.model.train().load_state_dict(loop.model.state_dict())
        step.model.scale.requires_grad_(True)
        step.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


@in_both_ways
def test_whatever_reads_a_parameter_awaits_all(ranks2: RankPool, way: str) -> None:
    ranks2.run(_lands, way)


def _takes_turns(rank: int, way: str) -> None:
    """Two steps of one model, each with its loss."""
    losses = [lambda net, x, y: net(x, y), lambda net, x, y: net(x, -y) * 0.5]
    with pipelining(way):
        step, loop = both("AdamW", loss_fn=losses[0])
        other = compile_step(step.model, step.optimizer, losses[1], **whole.DEFAULTS)
    for n in range(6):
        (step, other)[n % 2](*batch(rank, n))
        losses[n % 2](loop.model, *batch(rank, n)).backward()
        loop.update()
    assert_same(step, loop)


@in_both_ways
def test_two_steps_of_one_model_take_turns(ranks2: RankPool, way: str) -> None:
    ranks2.run(_takes_turns, way)


def _returns_parameters(rank: int, way: str, backend: str) -> None:
    """What a loss returns beside itself stays what it was when the next call writes into parameters."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return net(x, y), net.scale.view(1)

    with pipelining(way):
        step, loop = both("AdamW", loss_fn=loss, has_aux=True, backend=backend)
    found, expected = [], []
    for n in range(4):
        expected.append(loop.model.scale.detach().clone())
        loop.step(*batch(rank, n))
        found.append(step(*batch(rank, n))[1])
    torch.testing.assert_close(torch.cat(found), torch.stack(expected))


@in_both_ways
def test_what_a_loss_returns_is_not_written_into(ranks2: RankPool, way: str) -> None:
    ranks2.run(_returns_parameters, way, "aot_eager")


def test_what_a_loss_returns_of_inductors_code_is_not_written_into(ranks2: RankPool) -> None:
    ranks2.run(_returns_parameters, "sums", "inductor")


def _is_right_where_read(rank: int, way: str) -> None:
    """One rank alone may read: that is no collective."""
    with pipelining(way):
        step, loop = both("AdamW")
    for n in range(4):
        step(*batch(rank, n)), loop.step(*batch(rank, n))
        if rank == n % 2:
            for name, value in copy.deepcopy(step.model).state_dict().items():
                torch.testing.assert_close(value, loop.model.state_dict()[name])
    assert_same(step, loop)


@in_both_ways
def test_one_rank_alone_may_read(ranks2: RankPool, way: str) -> None:
    ranks2.run(_is_right_where_read, way)


def _keeps_other_names(rank: int, way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    for check_stale in (False, True):
        step = compile_step(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, x, y: model(x).square().mean(),
            backend="aot_eager",
            check_stale=check_stale,
            **OPTIONS[way],
        )
        alias = model[0].weight.data
        for n in range(3):
            before = alias.clone()
            step(*batch(rank, n))
            assert alias.isnan().all() if check_stale else torch.equal(alias, before)
            step(*batch(rank, n))
            step.flush()
            assert torch.equal(alias, model[0].weight) and alias.isfinite().all() and not torch.equal(alias, before)


@in_both_ways
def test_another_name_for_its_memory_has_old_values_or_none(ranks2: RankPool, way: str) -> None:
    ranks2.run(_keeps_other_names, way)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "fails_at"), [(1, 0), (2, 0), (2, 1)])
@in_both_ways
def test_a_step_that_raises_changes_nothing_on_any_rank(
    ranks2: RankPool, accumulate: int, fails_at: int, way: str
) -> None:
    ranks2.run(_pipelined, way, whole._raises, "AdamW", accumulate, fails_at)


@in_both_ways
def test_what_a_graph_raises_is_raised_on_every_rank(ranks2: RankPool, way: str) -> None:
    ranks2.run(_pipelined, way, whole._raises_in_graph, 1)


def _fails_while_under_way(rank: int, way: str, kinds: list[str], fails_at: int, steps: int, check_stale: bool) -> str:
    """Rank 1 fails before its call has launched anything, with parameters of one or of several models on their way."""
    fails, message = {"now": False}, ""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if fails["now"]:
            raise ValueError("no labels")
        result: Tensor = net(x, y)
        return result

    with pipelining(way):
        pairs = [both(kind, loss_fn=loss, check_stale=check_stale) for kind in kinds]
    for n in range(steps):
        step, loop = pairs[n % len(pairs)]
        fails["now"] = n == fails_at and rank == 1
        try:
            step(*batch(rank, n))
        except (RuntimeError, ValueError) as error:
            message = str(error)
            step.model.norm.load_state_dict(loop.model.norm.state_dict())  # as buffers may have been written
            continue
        loop.step(*batch(rank, n))
    for step, loop in pairs:
        assert_same(step, loop)
    return message


@pytest.mark.parametrize("check_stale", [False, True])
@in_both_ways
def test_a_rank_that_fails_while_parameters_are_under_way_loses_none(
    ranks2: RankPool, check_stale: bool, way: str
) -> None:
    other, own = ranks2.run(_fails_while_under_way, way, ["AdamW"], 3, 6, check_stale)
    assert own == "no labels" and "no labels" in other, (own, other)


@in_both_ways
def test_what_other_steps_have_under_way_is_awaited_before_groups_are_closed(ranks2: RankPool, way: str) -> None:
    """Each model is on a group of its own, of which an error closes both."""
    other, own = ranks2.run(_fails_while_under_way, way, ["SGD", "momentum"], 4, 8, False)
    assert own == "no labels" and "no labels" in other, (own, other)


def _forks(rank: int, way: str) -> None:
    with pipelining(way):
        step, _ = both("AdamW")
    step(*batch(rank, 0))
    assert is_under_way(step.model)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not is_under_way(step.model)


@in_both_ways
def test_a_fork_has_nothing_under_way(ranks2: RankPool, way: str) -> None:
    ranks2.run(_forks, way)


def _with_second_step_under_way(rank: int, way: str, kind: str) -> tuple[Any, Any]:
    """And the loop, of which there was one step."""
    with pipelining(way):
        step, loop = both(kind)
    step(*batch(rank, 0)), loop.step(*batch(rank, 0))
    step.flush()
    step(*batch(rank, 1))
    return step, loop


def _does_not_come(rank: int, way: str) -> str:
    """What is gathered fails on the way, and somebody has waited for it before, as where groups are closed."""
    step, loop = _with_second_step_under_way(rank, way, "SGD")
    step._in_flight._failure = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError) as raised:
        step.model.state_dict()
    for name, value in loop.model.named_parameters():  # of the step before, none of them in part
        torch.testing.assert_close(step.model.get_parameter(name), value)
    return str(raised.value)


@in_both_ways
def test_what_does_not_come_is_an_error_with_what_to_do(ranks2: RankPool, way: str) -> None:
    for told in ranks2.run(_does_not_come, way):
        assert "load a checkpoint (Connection closed by peer)" in told, told


def _raises_in_a_graph(rank: int, way: str) -> None:
    """A wait, of what the graph has not read yet, which torch tells once; and something else, behind which it comes."""
    step, loop = _with_second_step_under_way(rank, way, "AdamW")
    with pytest.warns(UserWarning, match=r"load a checkpoint \(Connection closed by peer\)"):
        _raise_within(step, dist.DistBackendError("Connection closed by peer"))
    for name, value in loop.model.named_parameters():  # of the step before, none of them in part
        torch.testing.assert_close(step.model.get_parameter(name), value)

    with pipelining(way):
        step, loop = both("AdamW")
    step(*batch(rank, 0)), loop.step(*batch(rank, 0))
    _raise_within(step, ValueError("out of memory"))
    assert_same(step, loop)


def _raise_within(step: Any, error: Exception) -> None:
    own = step._in_flight
    with own.within_step(), pytest.raises(type(error)), own.awaited_by_graph():
        raise error


@in_both_ways
def test_what_a_graph_has_waited_for_in_vain_is_not_used(ranks2: RankPool, way: str) -> None:
    ranks2.run(_raises_in_a_graph, way)


def _ends(rank: int, way: str) -> None:
    with pipelining(way):
        step, loop = both("AdamW")
    for n in range(2):
        step(*batch(rank, n)), loop.step(*batch(rank, n))
    dist.destroy_process_group()
    for name, value in step.model.state_dict().items():
        torch.testing.assert_close(value, loop.model.state_dict()[name])


@in_both_ways
def test_behind_destroy_process_group_parameters_are_there(ranks2: RankPool, way: str) -> None:
    ranks2.run(_ends, way)


def _is_dropped(rank: int, way: str) -> None:
    """With its model and what it has under way: the next step to be made awaits that, and its groups end."""
    open_files = []
    for _ in range(5):
        with pipelining(way):
            step, _ = both("AdamW")
        step(*batch(rank, 0))
        assert is_under_way(step.model)
        del step
        open_files.append(whole.open_files())
    assert open_files[4] <= open_files[2], "the connections of groups that nobody has any more"


@in_both_ways
def test_nothing_stays_of_a_step_that_is_dropped(ranks2: RankPool, way: str) -> None:
    ranks2.run(_is_dropped, way)


def _is_left(rank: int, way: str) -> None:
    with pipelining(way):
        step, loop = both("AdamW")
    step(*batch(rank, 0)), loop.step(*batch(rank, 0))
    model, optimizer = step.model, step.optimizer
    del step
    loss: Tensor = model(*batch(rank, 1))
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
    loop.step(*batch(rank, 1))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, loop.model.state_dict()[name])


@in_both_ways
def test_an_ordinary_loop_goes_on_where_the_step_is_gone(ranks2: RankPool, way: str) -> None:
    ranks2.run(_is_left, way)


class Own(nn.Parameter):
    pass


def _is_refused(rank: int) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"with pipeline_updates the update .* Leave out pipeline_updates\."):
        compile_step(model, torch.optim.Adagrad(model.parameters()), pipeline_updates=True)
    with pytest.raises(ValueError, match="give pipeline_updates=True too"):
        compile_step(model, optimizer, check_stale=True)
    with pytest.raises(TypeError, match="pipeline_updates"):
        compile_step(model, optimizer, pipeline_updates=1)  # type: ignore[arg-type]
    model.scale = Own(torch.ones(()))
    with pytest.raises(TypeError, match="scale is of a class of its own, Own"):
        compile_step(model, torch.optim.Adam(model.parameters()), shard_optimizer=True, pipeline_updates=True)


def test_what_cannot_be_under_way_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_is_refused)


def _would_be_replayed(rank: int) -> None:
    """As on a GPU with mode="reduce-overhead": refused before anything is launched, and nothing is lost."""
    with pipelining("shares"):
        step, loop = both("AdamW")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private.compiler_options, "uses_cuda_graphs", lambda *_: True)
        with pytest.raises((ValueError, RuntimeError), match="where a CUDA graph writes those of the next one"):
            step(*batch(rank, 0))
    for n in range(2):
        step(*batch(rank, n)), loop.step(*batch(rank, n))
    assert_same(step, loop)


def test_cuda_graphs_are_refused(ranks2: RankPool) -> None:
    ranks2.run(_would_be_replayed)


def test_what_is_told_of_a_parameter_is_what_torch_asks() -> None:
    """The names by which `__torch_function__` is told are torch's own, another time."""
    asked = []

    class Asking(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = Asking(torch.ones(3))
    parameter.shape, parameter.dtype, parameter.device, parameter.grad, parameter.numel()
    parameter.grad = None
    assert asked and in_flight._TELLING.issuperset(asked)
