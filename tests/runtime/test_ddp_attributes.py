"""Every public attribute of torch's DDP: it has its meaning here, or an error that says what to use instead."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from models import Mlp, assert_step, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp.compat.apex import DistributedDataParallel as ApexDDP
from compiled_ddp.wrapping.ddp_attributes import INSTEAD
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
CLASSES = {"compile_ddp": "CompiledDDP", "EagerDDP": "EagerDDP"}


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


class UsersModel(Mlp):
    """Has attributes under some of DDP's names, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.reducer, self.logger = 512, "the model's reducer", "the model's logger"
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("table", torch.arange(3.0))
        self._ddp_params_and_buffers_to_ignore = ["table", "norm.bias"]

    def gather(self) -> str:
        return "the model's gather"

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1.0
        return super().forward(x)


def public_names(ddp: nn.Module) -> list[str]:
    """What an instance of torch's class has besides what every module has."""
    return sorted(name for name in set(dir(ddp)) - set(dir(nn.Module())) - {"module"} if not name.startswith("_"))


def plain(value: Any) -> Any:
    """In a form that can be compared between two wrappers of equal models."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


# Arguments that both take, if torch has them in this version; the last ones are the defaults, but for those that differ
# on purpose.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "others": {
        "dim": 1,
        "broadcast_buffers": False,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "batched_grad_copy": True,
        "lazy_bucket_allocation": True,
        "skip_all_reduce_unused_params": True,
        "bucket_cap_mb": 3,
    },
    "a list of sizes": {"bucket_cap_mb_list": [1, 2], "gradient_as_bucket_view": False, "forward_sync_buffers": False},
    "defaults": {"gradient_as_bucket_view": False, "bucket_cap_mb": None},
}
BY_THE_LINK = {"bucket_bytes_cap"}  # where none is given


def _attributes(rank: int, wrapper: str, arguments: str) -> None:
    known = inspect.signature(DistributedDataParallel).parameters
    given = {name: value for name, value in ARGUMENTS[arguments].items() if name in known}
    if arguments == "others":
        given["device_mesh"] = init_device_mesh("cpu", (2,))
    model = UsersModel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = DistributedDataParallel(copy.deepcopy(model), **given)
    ours = wrap(wrapper, model, **given)
    names = public_names(theirs)
    assert len(names) >= 35, names
    for step in range(3):
        for name in names:
            if not hasattr(ours, name):
                with pytest.raises(AttributeError) as caught:
                    getattr(ours, name)
                message = str(caught.value)
                assert message.startswith(f"{CLASSES[wrapper]} has no {name!r}, as torch's DistributedDataParallel has")
                assert INSTEAD[name] in message
                assert "UsersModel" not in message
                assert getattr(ours, name, "a default") == "a default"
                assert name in dir(theirs) and (hasattr(model, name) == ("is at .module" in message))
            elif callable(getattr(theirs, name)):
                assert callable(getattr(ours, name)), name
                assert getattr(ours, name).__self__ is ours, name
            elif name not in BY_THE_LINK or arguments != "defaults":
                assert plain(getattr(ours, name)) == plain(getattr(theirs, name)), name
        assert ours.will_sync_module_buffers() == theirs.will_sync_module_buffers()
        for ddp in (theirs, ours):
            with ddp.no_sync() if step == 1 else warnings.catch_warnings():
                ddp(row_batch(rank)).sum().backward()
    for name in ("dim", "reducer", "logger", "gather"):
        assert getattr(ours.module, name) == getattr(model, name)
    copied = copy.deepcopy(ours)
    for name in ("dim", "broadcast_buffers", "static_graph", "find_unused_parameters", "bucket_bytes_cap", "device"):
        assert getattr(copied, name) == getattr(ours, name), name
    with pytest.raises(AttributeError, match=f"^{CLASSES[wrapper]} has no 'reducer'"):
        _ = copied.reducer


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_each_public_attribute_of_ddp_has_its_meaning_or_says_what_to_use(
    ranks2: RankPool, wrapper: str, arguments: str
) -> None:
    ranks2.run(_attributes, wrapper, arguments)


def _private(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, UsersModel())
    for name in sorted(INSTEAD):
        with pytest.raises(AttributeError, match=f"^{CLASSES[wrapper]} has no '{name}', as torch's Dist") as caught:
            getattr(ddp, name)
        assert caught.value.name == name and caught.value.obj is ddp
        assert not hasattr(ddp, name)
    with pytest.raises(AttributeError, match=r"has no '_log_and_throw', as torch's \w+ has: it is internal to torch's"):
        _ = ddp._log_and_throw
    with pytest.raises(AttributeError) as caught:
        _ = ddp.nothing_of_that_name
    assert str(caught.value).startswith(
        f"neither {CLASSES[wrapper]} nor the UsersModel that it wraps has an attribute 'nothing_of_that_name': "
    )
    assert not hasattr(ddp, "nothing_of_that_name")
    ApexDDP(Mlp()).stats()
    assert ApexDDP(Mlp()).bucket_bytes_cap == float("inf")


@pytest.mark.parametrize("wrapper", BOTH)
def test_errors_name_the_wrapper_and_are_attribute_errors(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_private, wrapper)


def _assigned(rank: int, wrapper: str) -> None:
    """As scripts assign them to DDP."""
    model = UsersModel()
    model._ddp_params_and_buffers_to_ignore = []
    theirs, ours = DistributedDataParallel(copy.deepcopy(model)), wrap(wrapper, model)
    for ddp in (theirs, ours):
        ddp(row_batch(rank)).sum().backward()
        ddp.module.total += float(rank)
        ddp.broadcast_buffers = False
        assert not ddp.forward_sync_buffers
        ddp(row_batch(rank)).sum().backward()  # keeps this rank's own
    assert torch.equal(ours.module.total, theirs.module.total) and ours.module.total == 2.0 + rank
    for ddp in (theirs, ours):
        ddp.forward_sync_buffers = True
        ddp.require_forward_param_sync = False
        ddp(row_batch(rank)).sum().backward()
        assert ddp.module.total == 3.0 + rank
        ddp(row_batch(rank)).sum().backward()
        assert ddp.module.total == 4.0
        ddp.find_unused_parameters = True
        assert ddp.find_unused_parameters and ddp.broadcast_buffers
    ours.static_graph = True
    assert ours.static_graph and ours._runtime.reduction.options.static_graph
    with pytest.raises(AttributeError, match=rf"^{CLASSES[wrapper]}\.static_graph cannot become false: unwrap\(\)"):
        ours.static_graph = False
    for name, value in (("device_ids", [0]), ("dim", 1), ("gradient_as_bucket_view", False), ("bucket_bytes_cap", 1)):
        message = (
            rf"^{CLASSES[wrapper]}\.{name} is fixed when a model is wrapped, and cannot become .*to the constructor"
        )
        with pytest.raises(AttributeError, match=message):
            setattr(ours, name, value)
    assert_step(ours, lambda module: module(row_batch(rank)).square().sum())


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's DDP has no forward_sync_buffers")
@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_scripts_assign_has_ddps_meaning_or_is_refused(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_assigned, wrapper)
