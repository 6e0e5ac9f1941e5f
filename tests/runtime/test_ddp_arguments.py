"""Every argument of torch's DistributedDataParallel: taken with its meaning, or refused by name on every rank."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from models import Mlp, assert_step, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.wrapping.ddp_arguments import DDPKeywords
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def ddp_parameters() -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(DistributedDataParallel.__init__).parameters)
    del parameters["self"], parameters["module"]
    return parameters


def step(ddp: nn.Module, rank: int) -> None:
    """One step, right on this rank."""
    x = row_batch(rank)
    assert_step(ddp, lambda module: module(x).square().sum())


# ---- the signature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [compile_ddp, EagerDDP.__init__])
def test_every_argument_of_ddp_has_its_place(function: Any) -> None:
    own = list(inspect.signature(function).parameters.values())
    positional = [parameter.name for parameter in own if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[-3:] == list(ddp_parameters())[:3] == ["device_ids", "output_device", "dim"]
    taken = {parameter.name for parameter in own} | set(DDPKeywords.__annotations__)
    assert not ddp_parameters().keys() - taken


def _with_defaults(rank: int, wrapper: str) -> None:
    defaults = {name: parameter.default for name, parameter in ddp_parameters().items()}
    step(wrappers([wrapper])[wrapper](Mlp(), **defaults), rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_defaults_of_ddp_are_taken(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_with_defaults, wrapper)


def _with_others(rank: int, wrapper: str) -> None:
    """Every argument that only asks for a faster or later launch, and a mesh in place of a group."""
    model = Mlp()
    named = list(model.named_parameters())
    ddp = wrappers([wrapper])[wrapper](
        model,
        device_ids=[],
        dim=1,
        device_mesh=init_device_mesh("cpu", (2,)),
        check_reduction=True,
        batched_grad_copy=True,
        lazy_bucket_allocation=True,
        skip_all_reduce_unused_params=True,
        find_unused_parameters=True,
        static_graph=True,
        delay_all_reduce_named_params=named[:2],
        param_to_hook_all_reduce=named[-1][1],
    )
    for _ in range(2):
        step(ddp, rank)
    assert ddp.lazy_bucket_allocation and not wrappers([wrapper])[wrapper](Mlp()).lazy_bucket_allocation


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_only_orders_launches_changes_no_gradient(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_with_others, wrapper)


# ---- bucket_cap_mb_list ----------------------------------------------------------------------------------------------


class EqualLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))  # 256 bytes each

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


def _sizes(rank: int, wrapper: str, others: dict[str, float]) -> list[int]:
    kibibyte = 1 / 1024
    capacities = [0.1 * kibibyte, 0.5 * kibibyte, 0.75 * kibibyte]
    ddp = wrappers([wrapper])[wrapper](EqualLayers(), bucket_cap_mb_list=capacities, **others)
    for _ in range(2):
        ddp(torch.ones(2, 8)).backward()
    assert f", {capacities[1]:g}, {capacities[2]:g} MiB, in order" in str(ddp.explain())
    return [len(bucket.gradients) for bucket in ddp.plan.buckets]


@pytest.mark.parametrize("wrapper", BOTH)
def test_each_bucket_has_its_own_capacity_and_further_ones_the_last(ranks2: RankPool, wrapper: str) -> None:
    assert ranks2.run(_sizes, wrapper, {}) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_list_of_capacities_takes_the_place_of_bucket_cap_mb_as_under_ddp(ranks2: RankPool, wrapper: str) -> None:
    assert ranks2.run(_sizes, wrapper, {"bucket_cap_mb": 25.0, "first_bucket_mb": 25.0}) == [[1, 2, 3]] * 2


# ---- buffers ---------------------------------------------------------------------------------------------------------


class WithBuffer(Mlp):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((1,), start))

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1.0
        return super().forward(x)


def _ddp_with(
    module: nn.Module, *, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> DistributedDataParallel:
    """torch's DDP with both names, of which it has the older one alone up to torch 2.12."""
    if "forward_sync_buffers" in ddp_parameters():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                module, broadcast_buffers=broadcast_buffers, forward_sync_buffers=forward_sync_buffers
            )
    at_construction = forward_sync_buffers is not None or broadcast_buffers is not False
    ddp = DistributedDataParallel(module, broadcast_buffers=at_construction)
    if forward_sync_buffers is not None:
        ddp.broadcast_buffers = forward_sync_buffers
    return ddp


def _buffers(rank: int, wrapper: str, options: dict[str, bool | None]) -> None:
    """The buffer after construction and after each of two steps, beside torch's DDP."""
    theirs = _ddp_with(WithBuffer(10.0 * rank), **options)
    ours = wrappers([wrapper])[wrapper](WithBuffer(10.0 * rank), **options)
    assert torch.equal(ours.module.total, theirs.module.total)
    for number in range(2):
        for ddp in (theirs, ours):
            ddp(row_batch(rank)).sum().backward()
            ddp.module.total += float(rank)
        assert torch.equal(ours.module.total, theirs.module.total), number


@pytest.mark.parametrize("forward_sync_buffers", [None, True, False])
@pytest.mark.parametrize("broadcast_buffers", [None, True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_buffers_are_synchronised_by_both_names_as_torch_ddp_does(
    ranks2: RankPool, wrapper: str, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> None:
    options = {"broadcast_buffers": broadcast_buffers, "forward_sync_buffers": forward_sync_buffers}
    ranks2.run(_buffers, wrapper, options)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _wrap_with(rank: int, wrapper: str, name: str, on_ranks: tuple[int, ...]) -> str:
    model = Mlp()
    weight, foreign = model.head.weight, nn.Parameter(torch.ones(1))
    bad: dict[str, Any] = {
        "mixed_precision": {"mixed_precision": torch.bfloat16},
        "a GPU": {"device_ids": [0]},
        "an output device": {"output_device": "cuda:0"},
        "two devices": {"device_ids": [0, 1]},
        "a delay without its hook": {"delay_all_reduce_named_params": [("head.weight", weight)]},
        "a foreign parameter": {
            "delay_all_reduce_named_params": [("foreign", foreign)],
            "param_to_hook_all_reduce": weight,
        },
        "an unknown name": {"bucket_cap": 3},
        "no size": {"bucket_cap_mb_list": [1.0, 0.0]},
    }[name]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        wrappers([wrapper])[wrapper](model, **(bad if rank in on_ranks else {}))
    step(wrappers([wrapper])[wrapper](model), rank)
    return str(caught.value)


MESSAGES = {
    "mixed_precision": "mixed_precision is not supported: run the forward under torch.autocast",
    "a GPU": "device_ids and output_device must name the model's GPU, found device_ids=[0]",
    "an output device": "output_device=cuda:0 for a model on cpu",
    "two devices": "device_ids may name one device, found [0, 1]",
    "a delay without its hook": "delay_all_reduce_named_params and param_to_hook_all_reduce belong together",
    "a foreign parameter": "foreign is not a parameter of the model",
    "an unknown name": "unexpected keyword argument 'bucket_cap'",
    "no size": "each of bucket_cap_mb_list must be a positive number of MiB, found 0.0",
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_cannot_be_taken_is_refused_on_every_rank_and_the_model_can_be_wrapped_without_it(
    ranks2: RankPool, wrapper: str, name: str
) -> None:
    for message in [*ranks2.run(_wrap_with, wrapper, name, (0, 1)), *ranks2.run(_wrap_with, wrapper, name, (1,))]:
        assert MESSAGES[name] in message


def _two_ways_to_name_ranks(rank: int, wrapper: str) -> None:
    wrap = wrappers([wrapper])[wrapper]
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(RuntimeError, match="process_group and device_mesh both name the ranks"):
        wrap(Mlp(), process_group=mesh.get_group(), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="device_mesh must have one dimension"):
        wrap(Mlp(), device_mesh=init_device_mesh("cpu", (2, 1)))


@pytest.mark.parametrize("wrapper", BOTH)
def test_one_way_to_name_the_ranks_is_enough(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_two_ways_to_name_ranks, wrapper)
