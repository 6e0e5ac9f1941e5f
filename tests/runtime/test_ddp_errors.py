"""Where torch's DDP raises, our error is of the class that it raises: scripts may catch that."""

import os
import pickle
import unittest.mock
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, wrappers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
Wrap = Callable[..., Any]


def with_part(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), part)


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    model = Mlp()
    model.extra = parameter
    return model


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = Mlp()
    model.register_buffer("extra", buffer)
    return model


def all_ignored() -> nn.Module:
    model = Mlp()
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters()]
    return model


def typed_hook(state: object, bucket: int) -> None: ...


def returning_hook(state, bucket) -> int: ...


def hook(state, bucket):
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def registered(ddp: Any) -> Any:
    ddp.register_comm_hook(None, hook)
    return ddp


@dataclass(frozen=True)
class Case:
    """`attempt` gets a wrapper's constructor; `error` is what torch's DDP raises."""

    error: type[Exception]
    attempt: Callable[[Wrap], object]


CASES = {
    # ---- the constructor ---------------------------------------------------------------------------------------------
    "a delay without its hook": Case(ValueError, lambda wrap: wrap(Mlp(), delay_all_reduce_named_params=[])),
    "a hook without its delay": Case(
        ValueError, lambda wrap: wrap(model := Mlp(), param_to_hook_all_reduce=model.head.weight)
    ),
    "a group and a mesh": Case(
        RuntimeError,
        lambda wrap: wrap(Mlp(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))),
    ),
    "a mesh of two dimensions": Case(
        RuntimeError, lambda wrap: wrap(Mlp(), device_mesh=init_device_mesh("cpu", (2, 1)))
    ),
    "no member of the group": Case(
        TypeError, lambda wrap: wrap(Mlp(), process_group=dist.GroupMember.NON_GROUP_MEMBER)
    ),
    "no group": Case(TypeError, lambda wrap: wrap(Mlp(), process_group="gloo")),
    "only frozen parameters": Case(RuntimeError, lambda wrap: wrap(Mlp().requires_grad_(False))),
    "no parameter": Case(RuntimeError, lambda wrap: wrap(nn.ReLU())),
    "only parameters to ignore": Case(RuntimeError, lambda wrap: wrap(all_ignored())),
    "several devices": Case(ValueError, lambda wrap: wrap(Mlp(), device_ids=[0, 1])),
    "a device that is no list": Case(TypeError, lambda wrap: wrap(Mlp(), device_ids=1)),
    "a GPU for a model on the CPU": Case(ValueError, lambda wrap: wrap(Mlp(), device_ids=[0])),
    "an output device for one": Case(ValueError, lambda wrap: wrap(Mlp(), output_device="cuda:0")),
    "parameters on the meta device": Case(ValueError, lambda wrap: wrap(with_part(nn.Linear(3, 3, device="meta")))),
    "all parameters there": Case(RuntimeError, lambda wrap: wrap(nn.Linear(3, 3, device="meta"))),
    "a lazy parameter": Case(RuntimeError, lambda wrap: wrap(with_part(nn.LazyLinear(2)))),
    "a lazy buffer": Case(ValueError, lambda wrap: wrap(with_part(nn.LazyBatchNorm1d(affine=False)))),
    "a sparse parameter": Case(RuntimeError, lambda wrap: wrap(with_parameter(nn.Parameter(torch.eye(3).to_sparse())))),
    "a frozen sparse parameter": Case(
        RuntimeError,
        lambda wrap: wrap(with_parameter(nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False))),
    ),
    "a sparse buffer": Case(RuntimeError, lambda wrap: wrap(with_buffer(torch.eye(3).to_sparse()))),
    "an expanded parameter": Case(
        RuntimeError, lambda wrap: wrap(with_parameter(nn.Parameter(torch.ones(1).expand(3))))
    ),
    "a bucket cap of nan": Case(ValueError, lambda wrap: wrap(Mlp(), bucket_cap_mb=float("nan"))),
    "bucket caps that are no list": Case(TypeError, lambda wrap: wrap(Mlp(), bucket_cap_mb_list=5)),
    "bucket caps in words": Case(ValueError, lambda wrap: wrap(Mlp(), bucket_cap_mb_list=["a"])),
    "an unknown argument": Case(TypeError, lambda wrap: wrap(Mlp(), bucket_cap=3)),
    "ranks of other shapes": Case(RuntimeError, lambda wrap: wrap(Mlp(width=8 + dist.get_rank()))),
    # ---- methods -----------------------------------------------------------------------------------------------------
    "pickling with a group": Case(
        RuntimeError, lambda wrap: pickle.dumps(wrap(Mlp(), process_group=dist.new_group([0, 1])))
    ),
    "a hook that is no function": Case(TypeError, lambda wrap: wrap(Mlp()).register_comm_hook(None, 3)),
    "a hook of another bucket": Case(ValueError, lambda wrap: wrap(Mlp()).register_comm_hook(None, typed_hook)),
    "a hook that returns another": Case(ValueError, lambda wrap: wrap(Mlp()).register_comm_hook(None, returning_hook)),
    "a second hook": Case(RuntimeError, lambda wrap: registered(wrap(Mlp())).register_comm_hook(None, hook)),
    "an unknown built-in hook": Case(TypeError, lambda wrap: wrap(Mlp())._register_builtin_comm_hook("sum")),
    "a second, built-in hook": Case(
        RuntimeError,
        lambda wrap: registered(wrap(Mlp()))._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ),
    "a state with other keys": Case(RuntimeError, lambda wrap: wrap(Mlp()).load_state_dict({"weight": torch.ones(1)})),
    "a state that is none": Case(TypeError, lambda wrap: wrap(Mlp()).load_state_dict(None)),
    "an attribute that nobody has": Case(AttributeError, lambda wrap: wrap(Mlp()).nothing_of_that_name),
}


def _both_raise(rank: int, wrapper: str, name: str) -> None:
    case = CASES[name]
    ours = wrappers([wrapper])[wrapper]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(case.error):
            case.attempt(DistributedDataParallel)
        with pytest.raises(case.error):
            case.attempt(lambda model, **arguments: ours(model, **arguments))


@pytest.mark.parametrize("name", CASES)
def test_our_error_is_of_the_class_that_ddps_is(ranks2: RankPool, name: str) -> None:
    # Where shapes differ, DDP itself waits for this timeout.
    ranks2.run(_both_raise, "EagerDDP", name, collective_timeout_seconds=2)  # which torch's own waits for twice


def _compiled_too(rank: int) -> None:
    for name in ("only frozen parameters", "a lazy parameter", "pickling with a group", "a device that is no list"):
        _both_raise(rank, "compile_ddp", name)


def test_under_compile_ddp_too(ranks2: RankPool) -> None:
    ranks2.run(_compiled_too)


def _without_process_group(rank: int) -> None:
    launched = {"RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun leaves it: no process that trains alone
    with unittest.mock.patch.dict(os.environ, launched):
        for wrap in (DistributedDataParallel, *wrappers(BOTH).values()):
            with pytest.raises(ValueError, match=r"initiali[sz]ed"):
                wrap(Mlp())


def test_without_a_process_group_too(ranks2: RankPool) -> None:
    ranks2.run(_without_process_group, process_group=False)
