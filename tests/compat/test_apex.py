"""apex's DistributedDataParallel: what each argument and each check of it is here (docs/apex.md)."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_gradients, assert_step, local_gradients, mean_by_hand, mean_over_ranks, row_batch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from compiled_ddp.compat import apex, bert
from ranks import RankPool

APEX_ARGUMENTS = {
    "message_size": 10_000_000,
    "delay_allreduce": False,
    "shared_param": None,
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "allreduce_always_fp32": False,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average": True,
    "gradient_predivide_factor": 1.0,
    "gradient_average_split_factor": None,
    "prof": False,
}


def layers() -> nn.Sequential:
    """Gradients arrive as 2.bias, 2.weight, 1.bias, 1.weight, 0.bias, 0.weight: 4 and 16 elements."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


class TwoDtypes(nn.Module):
    """Gradients arrive from the last layer to the first: bias, then weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4).double()
        self.c = nn.Linear(4, 4)
        self.d = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).double()).float()).double())


def batch(rank: int, step: int = 0) -> Tensor:
    return row_batch(rank, step)[:, :4]


def squares(rank: int, step: int = 0) -> Callable[[nn.Module], Tensor]:
    return lambda module: module(batch(rank, step)).square().sum()


def buckets(ddp: nn.Module) -> list[str]:
    return [
        " ".join(ddp.plan.parameter_names[index] for index in bucket.indices)
        for bucket in ddp.plan.buckets
        if bucket.gradients
    ]


def in_buckets(ddp: nn.Module, gradients: dict[str, Tensor]) -> list[Tensor]:
    """`gradients` as the flat buffers of the plan's buckets."""
    return [torch.cat([gradients[name].flatten() for name in names.split()]) for names in buckets(ddp)]


def sum_of(gradients: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(found[name].double() for found in gradients) for name in gradients[0]}


# ---- the signature ---------------------------------------------------------------------------------------------------


def test_the_signature_is_that_of_apex() -> None:
    parameters = inspect.signature(apex.DistributedDataParallel).parameters.values()
    positional = [p for p in parameters if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == ["module", *APEX_ARGUMENTS]
    assert {p.name: p.default for p in positional[1:]} == APEX_ARGUMENTS


def _is_refused(rank: int) -> list[str]:
    model = layers()
    found = []
    for arguments in (
        {"shared_param": True},
        {"gradient_average_split_factor": 2.0},
        {"num_allreduce_streams": 2},
        {"allreduce_communicators": ([None], [None])},
        {"allreduce_trigger_params": [model[0].weight], "delay_allreduce": True},
        {"allreduce_trigger_params": [torch.zeros(1)]},
        {"allreduce_trigger_params": 3},
        {"gradient_predivide_factor": 0.0},
        {"message_size": "large"},
        {"message_size": 10 + rank},
        {"retain_allreduce_buffers": rank == 1},
        {"shared_param": True if rank == 1 else None},
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            apex.DistributedDataParallel(model, **arguments)
        found.append(str(caught.value))
    assert_step(apex.DistributedDataParallel(model), squares(rank))
    return found


def test_what_cannot_be_taken_is_refused_by_name_on_every_rank(ranks2: RankPool) -> None:
    for messages in ranks2.run(_is_refused):
        named = [
            "shared_param is no longer supported",
            "renamed to gradient_predivide_factor",
            "num_allreduce_streams and allreduce_communicators name CUDA streams",
            "num_allreduce_streams and allreduce_communicators name CUDA streams",
            "only valid if delay_allreduce=False",
            "allreduce_trigger_params[0] is not a parameter",
            "must be a list of parameters, found 3",
            "gradient_predivide_factor must be a positive number, found 0.0",
            "message_size must be a number of elements, found 'large'",
            "option bucket_rule",
            "option retain_allreduce_buffers",
            "shared_param is no longer supported",
        ]
        for name, message in zip(named, messages, strict=True):
            assert name in message


# ---- buckets ---------------------------------------------------------------------------------------------------------


def _structures(rank: int) -> list[list[str]]:
    found = []
    for make, arguments in (
        (layers, lambda model: {"message_size": 20}),
        (layers, lambda model: {"message_size": 21}),
        (layers, lambda model: {}),
        (layers, lambda model: {"message_size": 1, "allreduce_trigger_params": [model[1].weight]}),
        (layers, lambda model: {"message_size": 1, "delay_allreduce": True}),
        (TwoDtypes, lambda model: {"message_size": 20}),
        (TwoDtypes, lambda model: {"allreduce_trigger_params": (p for p in [model.c.weight, model.b.bias])}),
        (TwoDtypes, lambda model: {"delay_allreduce": True}),
    ):
        model = make()
        ddp = apex.DistributedDataParallel(model, **arguments(model))
        for step in range(2):
            assert_step(ddp, squares(rank, step))
        found.append(buckets(ddp))
        assert " closes " in str(ddp.explain()) or "when backward has ended" in str(ddp.explain())
        ddp.unwrap()
    return found


def test_buckets_are_filled_in_the_order_of_the_first_backward_as_asked_for(ranks2: RankPool) -> None:
    assert ranks2.run(_structures)[1] == [
        ["2.bias 2.weight", "1.bias 1.weight", "0.bias 0.weight"],
        ["2.bias 2.weight 1.bias", "1.weight 0.bias 0.weight"],
        ["2.bias 2.weight 1.bias 1.weight 0.bias 0.weight"],
        ["2.bias 2.weight 1.bias 1.weight", "0.bias 0.weight"],
        ["0.weight 0.bias 1.weight 1.bias 2.weight 2.bias"],
        ["d.bias d.weight", "c.bias c.weight", "b.bias b.weight", "a.bias a.weight"],
        ["c.bias c.weight", "d.bias d.weight b.bias", "a.bias a.weight", "b.weight"],
        ["a.weight a.bias c.weight c.bias", "b.weight b.bias d.weight d.bias"],
    ]


class Shared(nn.Module):
    """One layer in two reentrant checkpoints, whose parameters so get two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self._part, self.into(x), use_reentrant=True)
        return x

    def _part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def _delayed(rank: int) -> None:
    launched: list[int] = []
    seen: list[int] = []
    model = layers()
    ddp = apex.DistributedDataParallel(model, delay_allreduce=True)
    communicator = ddp._runtime.communicator
    all_reduce = communicator.all_reduce

    def counted(flat: Tensor, *row: Any) -> Any:
        if flat.dtype == torch.float32:  # but for the sums of the proof
            launched.append(flat.numel())
        return all_reduce(flat, *row)

    communicator.all_reduce = counted
    for step in range(2):
        x = batch(rank, step).requires_grad_()  # its gradient comes last of all
        x.register_hook(lambda _: seen.append(len(launched)))
        ddp(x).square().sum().backward()
    assert seen == [0, 1]
    assert len(launched) == 2

    shared = apex.DistributedDataParallel(Shared(), delay_allreduce=True)
    for step in range(2):
        assert_step(shared, squares(rank, step))
    at_once = apex.DistributedDataParallel(Shared(), message_size=1)
    with pytest.raises(RuntimeError, match=r"parameter layer.* got a second gradient in one backward"):
        at_once(batch(rank)).square().sum().backward()


def test_delayed_buckets_are_launched_when_backward_has_ended_and_take_several_gradients(ranks2: RankPool) -> None:
    ranks2.run(_delayed)


# ---- what is done to a bucket ----------------------------------------------------------------------------------------


def _scaled(rank: int) -> None:
    world = dist.get_world_size()
    for make in (layers, TwoDtypes):
        for arguments, factor in (
            ({}, 1.0),
            ({"gradient_average": False}, world),
            ({"gradient_predivide_factor": 4.0}, 1.0),
            ({"gradient_predivide_factor": 4.0, "gradient_average": False, "delay_allreduce": True}, world / 4),
            ({"gradient_predivide_factor": 0.7, "allreduce_always_fp32": True, "message_size": 1}, 1.0),
        ):
            ddp = apex.DistributedDataParallel(make(), **arguments)
            for step in range(3):
                mean = mean_by_hand(ddp, squares(rank, step))
                ddp.zero_grad(set_to_none=step == 1)
                ddp(batch(rank, step)).square().sum().backward()
                assert_gradients(
                    ddp.module, {name: factor * value for name, value in mean.items()}, rtol=1e-4, atol=1e-5
                )
            assert "Proven to be reduced: " in str(ddp.explain())
            assert "pending" not in str(ddp.explain())
            ddp.unwrap()


def test_mean_sum_and_division_before_the_sum_on_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_scaled)


def _in_a_group(rank: int) -> None:
    torch.manual_seed(0)
    model = layers()
    everyones: list[Any] = [None] * 3
    dist.all_gather_object(everyones, local_gradients(model, squares(rank)))
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    ddp = apex.DistributedDataParallel(model, gradient_predivide_factor=4.0, process_group=group)
    squares(rank)(ddp).backward()
    assert_gradients(model, {n: total / 2 for n, total in sum_of([everyones[0], everyones[2]]).items()}, rtol=1e-4)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    apex.Reducer(model, process_group=group).reduce()
    assert_gradients(model, sum_of([before]))


def test_some_of_the_ranks_may_average_among_themselves(ranks3: RankPool) -> None:
    ranks3.run(_in_a_group)


class Weight(nn.Module):
    """Its gradient is the input."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def _low_precision(rank: int) -> None:
    # 256 on one rank and 1 on the other two: their sum, 258, is lost where it is added up in bfloat16.
    x = torch.ones(6, dtype=torch.bfloat16)
    x[rank::3] = 256
    sums = {}
    for in_float32 in (False, True):
        ddp = apex.DistributedDataParallel(
            Weight(6, torch.bfloat16), gradient_average=False, allreduce_always_fp32=in_float32
        )
        for _ in range(2):
            ddp.zero_grad()
            ddp(x).backward()
        gradient = ddp.module.weight.grad
        assert gradient.dtype == torch.bfloat16
        sums[in_float32] = gradient.tolist()
    assert sums[True] == [258.0] * 6
    assert sums[False] != sums[True]

    large = torch.full((4,), 60000.0, dtype=torch.float16)
    for arguments, expected in (
        ({"gradient_average": False}, float("inf")),
        ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 45000.0),
        ({"gradient_predivide_factor": 4.0}, 60000.0),
        ({"allreduce_always_fp32": True, "gradient_predivide_factor": 0.5}, 60000.0),
    ):
        ddp = apex.DistributedDataParallel(Weight(4, torch.float16), **arguments)
        ddp(large).backward()
        torch.testing.assert_close(
            ddp.module.weight.grad, torch.full_like(large, expected), rtol=1e-3, atol=0.0, msg=str(arguments)
        )


def test_low_precision_is_summed_in_float32_if_asked_for_and_divided_before_it_overflows(ranks3: RankPool) -> None:
    ranks3.run(_low_precision)


def _retained(rank: int) -> None:
    ddp = apex.DistributedDataParallel(layers(), message_size=21, retain_allreduce_buffers=True)
    assert ddp.allreduce_buffers == []
    for step in range(3):
        mean = mean_by_hand(ddp, squares(rank, step))
        ddp.zero_grad(set_to_none=step != 2)
        ddp(batch(rank, step)).square().sum().backward()
        assert sum(buffer.numel() for buffer in ddp.allreduce_buffers) == 60
        if step:  # the first backward had buckets in reverse registration order
            for found, expected in zip(ddp.allreduce_buffers, in_buckets(ddp, mean), strict=True):
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
            assert ddp.module[2].weight.grad.untyped_storage().data_ptr() == (
                ddp.allreduce_buffers[0].untyped_storage().data_ptr()
            )
    two = apex.DistributedDataParallel(TwoDtypes(), delay_allreduce=True, retain_allreduce_buffers=True)
    for step in range(2):
        mean = mean_by_hand(two, squares(rank, step))
        two(batch(rank, step)).square().sum().backward()
        two.zero_grad()
        for found, expected in zip(two.allreduce_buffers, in_buckets(two, mean), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    without = apex.DistributedDataParallel(layers())
    without(batch(rank)).square().sum().backward()
    assert without.allreduce_buffers == []


def test_retained_buffers_hold_the_reduced_gradients_in_bucket_order(ranks2: RankPool) -> None:
    ranks2.run(_retained)


# ---- the switch ------------------------------------------------------------------------------------------------------


def _toggled(rank: int) -> None:
    ddp = apex.DistributedDataParallel(layers(), message_size=20)
    number = 0

    def backward(*, at_forward: bool, at_backward: bool) -> dict[str, Any]:
        """One backward, with the switch in these positions; returns its local gradients."""
        nonlocal number
        number += 1
        local = local_gradients(copy.deepcopy(ddp.module), squares(rank, number))
        (ddp.enable_allreduce if at_forward else ddp.disable_allreduce)()
        loss = squares(rank, number)(ddp)
        (ddp.enable_allreduce if at_backward else ddp.disable_allreduce)()
        loss.backward()
        return local

    for at_forward in (True, False):
        for local_forward in (True, False):
            ddp.zero_grad()
            # Ranks may accumulate different numbers of backwards.
            kept = [backward(at_forward=local_forward, at_backward=False) for _ in range(1 + rank)]
            assert_gradients(ddp.module, sum_of(kept))
            kept.append(backward(at_forward=at_forward, at_backward=True))
            assert_gradients(ddp.module, mean_over_ranks(sum_of(kept), ddp.module))
    # What was used in a local backward alone is part of the next reduction.
    ddp.zero_grad()
    ddp.disable_allreduce()
    ddp.skip_step()  # nothing: no rank waits for one
    local = local_gradients(copy.deepcopy(ddp.module), squares(rank))
    squares(rank)(ddp).backward()
    ddp.enable_allreduce()
    ddp.skip_step()
    assert_gradients(ddp.module, mean_over_ranks(local, ddp.module))


def test_the_switch_is_read_in_backward_and_local_gradients_are_part_of_the_next_reduction(ranks2: RankPool) -> None:
    ranks2.run(_toggled)


def _assigned(rank: int) -> None:
    ddp = apex.DistributedDataParallel(layers())
    local = local_gradients(copy.deepcopy(ddp.module), squares(rank))
    assert ddp._disable_allreduce is False
    ddp._disable_allreduce = True
    assert ddp._disable_allreduce is True
    squares(rank)(ddp).backward()
    assert_gradients(ddp.module, sum_of([local]))
    ddp._disable_allreduce = False
    squares(rank)(ddp).backward()
    assert_gradients(ddp.module, mean_over_ranks(sum_of([local, local]), ddp.module))
    ddp.disable_allreduce()
    assert ddp._disable_allreduce is True


def test_the_switch_may_be_assigned(ranks2: RankPool) -> None:
    ranks2.run(_assigned)


def _attributes(rank: int) -> None:
    passed = {
        "message_size": 20,
        "delay_allreduce": True,
        "retain_allreduce_buffers": True,
        "allreduce_always_fp32": True,
        "gradient_average": False,
        "gradient_predivide_factor": 2.0,
    }
    of_apex = {"num_allreduce_streams": 1, "allreduce_communicators": None}
    for wrapper, expected in (
        (apex.DistributedDataParallel, passed | of_apex),
        (bert.DistributedDataParallel, passed),
    ):
        ddp = wrapper(layers(), **passed)
        for found in (ddp, copy.deepcopy(ddp)):
            assert {name: getattr(found, name) for name in expected} == expected
            for name in expected:
                message = rf"DistributedDataParallel.{name} is fixed when a model is wrapped, and cannot become 7: pass"
                with pytest.raises(AttributeError, match=message):
                    setattr(found, name, 7)
        ddp.unwrap()


def test_attributes_have_what_was_passed_and_cannot_be_assigned(ranks2: RankPool) -> None:
    ranks2.run(_attributes)


# ---- the model -------------------------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("mark", torch.full((2,), value))
        nn.init.constant_(self.layer.weight, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _broadcast(rank: int) -> None:
    ddp = apex.DistributedDataParallel(WithBuffer(1.0 + rank))
    for step in range(2):
        assert_step(ddp, squares(rank, step), unused=["frozen"])
    assert ddp.module.layer.weight.eq(1.0).all()
    assert ddp.module.frozen.eq(1.0).all()
    assert ddp.module.mark.eq(1.0 + rank).all()


def test_parameters_are_those_of_rank_0_and_buffers_are_not(ranks2: RankPool) -> None:
    ranks2.run(_broadcast)


def _refreshed(rank: int) -> None:
    ddp = apex.DistributedDataParallel(layers(), message_size=20)
    for step in range(2):
        assert_step(ddp, squares(rank, step))
    found = [buckets(ddp)]

    def steps_are_right() -> None:
        ddp(batch(rank))  # thrown away; it takes the change in, and rank 0's values of what is new
        for step in range(2):
            assert_step(
                ddp, squares(rank, step), unused=[n for n, p in ddp.module.named_parameters() if not p.requires_grad]
            )
        found.append(buckets(ddp))

    torch.manual_seed(rank)
    ddp.module[1].weight = nn.Parameter(torch.randn(4, 4))
    steps_are_right()
    ddp.module[2].requires_grad_(False)
    steps_are_right()
    ddp.module[2].requires_grad_(True)
    steps_are_right()
    ddp.module[2] = nn.Linear(4, 8)
    steps_are_right()
    ddp.module[1] = nn.Tanh()
    steps_are_right()
    assert found == [
        ["2.bias 2.weight", "1.bias 1.weight", "0.bias 0.weight"],
        ["2.bias 2.weight", "1.bias 1.weight", "0.bias 0.weight"],
        ["1.bias 1.weight", "0.bias 0.weight"],
        ["2.bias 2.weight", "1.bias 1.weight", "0.bias 0.weight"],
        ["2.bias 2.weight", "1.bias 1.weight", "0.bias 0.weight"],
        ["2.bias 2.weight", "0.bias 0.weight"],
    ]
    # What was accumulated before a change is part of the next reduction, of what is frozen since too.
    ddp.module[1] = nn.Linear(4, 4)
    steps_are_right()
    ddp.zero_grad()
    ddp.disable_allreduce()
    first = local_gradients(copy.deepcopy(ddp.module), squares(rank))
    squares(rank)(ddp).backward()
    ddp.module[2].requires_grad_(False)
    ddp.module[0] = nn.Identity()  # the others come at other places in the list of parameters
    ddp.enable_allreduce()
    second = local_gradients(copy.deepcopy(ddp.module), squares(rank, 1))
    squares(rank, 1)(ddp).backward()
    total = {name: first[name] if second[name] is None else first[name] + second[name] for name in second}
    assert_gradients(ddp.module, mean_over_ranks(total, ddp.module))

    model = layers()
    ddp = apex.DistributedDataParallel(model, allreduce_trigger_params=[model[1].weight])
    assert_step(ddp, squares(rank))
    model[1].weight = nn.Parameter(torch.ones(4, 4))  # a trigger again
    steps_are_right()
    assert found[-1] == ["2.bias 2.weight 1.bias 1.weight", "0.bias 0.weight"]


def test_a_parameter_that_was_replaced_removed_or_frozen_is_taken_as_it_is_and_buckets_are_found_anew(
    ranks2: RankPool,
) -> None:
    ranks2.run(_refreshed)


def _frozen_on_one(rank: int) -> str:
    ddp = apex.DistributedDataParallel(layers())
    assert_step(ddp, squares(rank))
    if rank == 1:
        ddp.module[0].requires_grad_(False)
    with pytest.raises(RuntimeError) as caught:
        squares(rank)(ddp).backward()
    return str(caught.value)


def test_a_part_that_one_rank_alone_freezes_is_an_error_after_the_timeout(ranks2: RankPool) -> None:
    messages = ranks2.run(_frozen_on_one, collective_timeout_seconds=2.0)
    assert "rank 1 waited 2 s for rank 0" in messages[1]
    assert "as this rank's has changed" in messages[1]


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.extra, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.with_extra = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        return self.out(self.extra(x) if self.with_extra else x)


def _partly_used(rank: int) -> None:
    ddp = apex.DistributedDataParallel(Optional(), message_size=20, retain_allreduce_buffers=True)
    for with_extra, unused in (
        (True, []),
        (rank == 0, []),
        (False, ["extra.weight", "extra.bias"]),
        (True, []),
    ):
        ddp.module.with_extra = with_extra
        assert_step(ddp, squares(rank), unused=unused)
        assert len(ddp.allreduce_buffers) == len(buckets(ddp)) == 3

    # Used by no rank at first, and by rank 1 alone then: reduced in that very backward, and retained too.
    late = apex.DistributedDataParallel(
        Optional(), message_size=20, retain_allreduce_buffers=True, gradient_predivide_factor=4.0
    )
    late.module.with_extra = False
    assert_step(late, squares(rank), unused=["extra.weight", "extra.bias"])
    assert buckets(late) == ["out.bias out.weight", "into.bias into.weight"]
    late.module.with_extra = rank == 1
    for _ in range(2):
        assert_step(late, squares(rank))
        assert len(late.allreduce_buffers) == len(buckets(late)) == 3


def test_every_bucket_is_kicked_off_also_where_a_rank_does_not_produce_its_gradients(ranks2: RankPool) -> None:
    """In apex either check of the epilogue raises, on this rank alone: "Some param buckets were not allreduced."."""
    ranks2.run(_partly_used)


def _with_extras(rank: int) -> list[str]:
    compiled = torch.compile(layers(), backend="aot_eager")
    ddp = apex.DistributedDataParallel(compiled, message_size=20, prof=True)
    for step in range(2):
        assert_step(ddp, squares(rank, step))
    local = local_gradients(copy.deepcopy(ddp.module), squares(rank))
    ddp.zero_grad()
    with ddp.no_sync():
        squares(rank)(ddp).backward()
    assert_gradients(ddp.module, sum_of([local]))

    eager = apex.DistributedDataParallel(layers(), message_size=20)
    local = local_gradients(copy.deepcopy(eager.module), squares(rank))
    loss = squares(rank)(eager)
    for _ in range(2):  # several backward passes of one forward, which apex left open
        loss.backward(retain_graph=True)
    assert_gradients(eager.module, mean_over_ranks(sum_of([local, local]), eager.module))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        squares(rank)(ddp).backward()
    return sorted({event.key for event in recorded.key_averages() if event.key.startswith("compiled_ddp: launch")})


def test_a_compiled_module_no_sync_and_names_in_the_profiler(ranks2: RankPool) -> None:
    names = ranks2.run(_with_extras)[0]
    assert len(names) == 3


def _order_of_events(rank: int) -> str:
    """One letter for each event of a backward, in time: m(atrix product), L(aunch), W(ait)."""
    ddp = apex.DistributedDataParallel(layers(), message_size=20)
    for step in range(2):
        assert_step(ddp, squares(rank, step))
    loss = squares(rank)(ddp)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss.backward()
    letters = {"aten::mm": "m", "compiled_ddp: launch": "L", "compiled_ddp: wait": "W"}
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return "".join(
        letter for event in events for name, letter in letters.items() if event.name.startswith(name) and event.name
    )


def test_launches_return_while_backward_goes_on_and_its_end_waits(ranks2: RankPool) -> None:
    for order in ranks2.run(_order_of_events):
        launches = order.count("L")
        assert launches == order.count("W") >= 3, order
        assert "m" in order[order.index("L") :], "no launch before the last matrix product"
        assert order.endswith("W" * launches), order


def _return_value(rank: int) -> list[str]:
    """What happens in a forward after the model has changed, and what it returns."""
    ddp = apex.DistributedDataParallel(layers(), message_size=20)
    assert_step(ddp, squares(rank))
    seen = []
    torch.manual_seed(rank)  # what is new differs between ranks, until rank 0's values come
    ddp.module[1] = nn.Linear(4, 4)
    own = ddp.module[1].weight.detach().clone()
    ddp.module[1].register_forward_hook(lambda module, *_: seen.append(torch.equal(module.weight, own)))
    outputs = []
    ddp.module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    returned = ddp(batch(rank))
    assert returned is outputs[0]
    return seen


def test_a_forward_looks_first_and_returns_what_the_module_returns(ranks2: RankPool) -> None:
    assert ranks2.run(_return_value) == [[True], [False]]
