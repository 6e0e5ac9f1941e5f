"""Names of parameters, buffers and submodules: the bare model's, also where a wrapper is a part of another module."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Deceptive, Mlp, assert_gradients, assert_step, expected_mean, row_batch, wrappers
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from compiled_ddp.compat.apex import DistributedDataParallel as ApexDDP
from compiled_ddp.integrations.torch import EagerDistributedDataParallel
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module) -> Any:
    return ApexDDP(model) if wrapper == "apex" else wrappers([wrapper])[wrapper](model)


class Embedded(nn.Module):
    """Parameters and a buffer at its root, as vision transformers have them; a tied weight; batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("shift", torch.zeros(5))
        self.register_buffer("steps", torch.zeros(1), persistent=False)
        self.mlp = Mlp()
        self.norm = nn.BatchNorm1d(5)
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(self.other(self.one(x * self.scale + self.shift))))


MODELS: dict[str, Callable[[], nn.Module]] = {"Embedded": Embedded, "Deceptive": Deceptive}


def names(named: Any) -> list[str]:
    return [name for name, _ in named]


def assert_named_alike(module: nn.Module, bare: nn.Module) -> None:
    """Check that `module` has the names of `bare`, in its order."""
    for remove_duplicate in (True, False):
        for of_tensors in ("named_parameters", "named_buffers"):
            found = list(getattr(module, of_tensors)(remove_duplicate=remove_duplicate))
            assert names(found) == names(getattr(bare, of_tensors)(remove_duplicate=remove_duplicate))
        found = names(module.named_modules(remove_duplicate=remove_duplicate))
        assert list(dict.fromkeys(found)) == names(bare.named_modules(remove_duplicate=remove_duplicate))
    assert set(names(module.named_parameters())) <= set(module.state_dict())
    by_module = {
        f"{module_name}.{name}".removeprefix(".")
        for module_name, part in module.named_modules()
        for name, _ in part.named_parameters(recurse=False)
    }
    assert by_module == set(names(module.named_parameters(remove_duplicate=False)))


def assert_names_lead_back(module: nn.Module) -> None:
    """Check that each name leads to what it names."""
    for name, parameter in module.named_parameters():
        assert module.get_parameter(name) is parameter
    for name, buffer in module.named_buffers():
        assert module.get_buffer(name) is buffer
    for name, part in dict(module.named_modules()).items():
        assert module.get_submodule(name) is (part if name else module)


def _named(rank: int, wrapper: str, name: str) -> None:
    model = MODELS[name]()
    bare = copy.deepcopy(model)
    ddp = wrap(wrapper, model)
    assert_named_alike(ddp, bare)
    assert_names_lead_back(ddp)
    assert [id(p) for p in ddp.parameters()] == [id(p) for p in model.parameters()]
    assert names(ddp.named_parameters(prefix="net")) == names(bare.named_parameters(prefix="net"))
    assert next(ddp.modules()) is ddp and list(ddp.children()) == [model]
    assert names(ddp.named_children()) == ["module"]
    ddp.extra = nn.Linear(2, 2)  # the user's own
    assert names(ddp.named_parameters()) == [*names(bare.named_parameters()), "extra.weight", "extra.bias"]
    del ddp.extra
    assert_step(ddp, lambda module: module(row_batch(rank)).square().sum())
    assert_named_alike(copy.deepcopy(ddp), bare)
    averaged = AveragedModel(ddp)
    averaged.update_parameters(ddp)
    assert names(averaged.named_parameters()) == [f"module.{name}" for name, _ in bare.named_parameters()]
    assert set(names(averaged.named_parameters())) <= set(averaged.state_dict())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrapper", [*BOTH, "apex"])
def test_names_are_the_bare_models_and_lead_to_what_they_name(ranks2: RankPool, wrapper: str, name: str) -> None:
    ranks2.run(_named, wrapper, name)


class Larger(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.embed, self.net = nn.Linear(5, 5), net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.embed(x))


def _nested(rank: int, wrapper: str, name: str) -> None:
    bare = Larger(MODELS[name]())
    larger = Larger(wrap(wrapper, copy.deepcopy(bare.net)))
    assert_named_alike(larger, bare)
    outer = wrap(wrapper, larger)
    assert_named_alike(outer, bare)
    if name == "Embedded":  # get_submodule goes by attributes: in the other one .module is the inner wrapper's
        assert all(larger.get_parameter(name) is parameter for name, parameter in larger.named_parameters())
        assert all(outer.get_parameter(name) is parameter for name, parameter in outer.named_parameters())
    for _ in range(2):
        bare.load_state_dict(outer.state_dict())
        expected = expected_mean(bare, lambda module: module(row_batch(rank)).square().sum())
        outer.zero_grad()
        outer(row_batch(rank)).square().sum().backward()
        assert_gradients(outer, expected, rtol=1e-4, atol=1e-5)
    assert set(outer.plan.parameter_names) == {"embed.weight", "embed.bias"}, "the inner wrapper's are left to it"
    assert set(larger.net.plan.parameter_names) == set(names(bare.net.named_parameters()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrapper_inside_of_another_module_leaves_no_trace_in_names(ranks2: RankPool, wrapper: str, name: str) -> None:
    ranks2.run(_nested, wrapper, name)


def _compiled(rank: int, wrapper: str) -> None:
    bare = Embedded()
    ddp = wrap(wrapper, torch.compile(copy.deepcopy(bare), backend="eager"))
    assert_named_alike(ddp, bare)
    assert_names_lead_back(ddp)
    assert dict(ddp.state_dict()._metadata) == dict(bare.state_dict()._metadata)
    larger = Larger(ddp)
    assert_named_alike(larger, Larger(bare))
    assert dict(larger.state_dict()._metadata) == dict(Larger(bare).state_dict()._metadata)
    bare.load_state_dict(ddp.state_dict())
    ddp.load_state_dict(bare.state_dict())
    ddp.eval()
    assert not any(part.training for part in ddp.modules())


@pytest.mark.parametrize("wrapper", BOTH)
def test_torch_compile_leaves_no_trace_in_names(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_compiled, wrapper)


def _torchs(rank: int) -> None:
    """The class that is torch's has its names too."""
    theirs, ours = DistributedDataParallel(Embedded()), EagerDistributedDataParallel(Embedded())
    for of_it in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert names(getattr(ours, of_it)()) == names(getattr(theirs, of_it)())
    assert names(Larger(ours).named_parameters()) == names(Larger(theirs).named_parameters())
    assert ours.get_submodule("module.mlp") is ours.module.mlp


def test_the_subclass_of_torchs_class_keeps_its_names(ranks2: RankPool) -> None:
    ranks2.run(_torchs)


# ---- DDP's names -----------------------------------------------------------------------------------------------------


def _with_module(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Embedded())
    assert ddp.get_submodule("") is ddp
    assert ddp.get_submodule("module") is ddp.module
    assert ddp.get_submodule("module.mlp.head") is ddp.module.mlp.head
    assert ddp.get_parameter("module.scale") is ddp.module.scale
    assert ddp.get_buffer("module.norm.running_mean") is ddp.module.norm.running_mean
    with pytest.raises(AttributeError, match="nothing"):
        ddp.get_submodule("mlp.nothing")
    deceptive = wrap(wrapper, Deceptive())
    assert deceptive.module is not deceptive.get_submodule("module"), "the bare model's comes first"
    assert deceptive.get_parameter("module.module.module.weight") is deceptive.module.module["module"].weight


@pytest.mark.parametrize("wrapper", BOTH)
def test_names_with_module_lead_to_the_same(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_with_module, wrapper)


# ---- what is put in their place --------------------------------------------------------------------------------------


def _assigned(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Embedded())
    model, x = ddp.module, row_batch(rank)
    shift = torch.ones(5)
    ddp.shift = shift
    assert model.shift is shift and "shift" not in vars(ddp)
    ddp(x).sum().backward()
    with pytest.raises(TypeError, match="cannot assign"):
        ddp.scale = torch.ones(5)
    ddp.depth = 3  # no parameter, buffer or submodule: the wrapper's own
    assert not hasattr(model, "depth")
    head = model.mlp
    ddp.set_submodule("mlp", Mlp())
    assert model.mlp is not head
    with pytest.raises(RuntimeError, match=r"mlp\.\S+ was replaced or removed|mlp was replaced or removed"):
        ddp(x)


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_assigned_by_the_name_of_a_part_of_the_model_goes_there(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_assigned, wrapper)


def _functional(rank: int, wrapper: str) -> None:
    model, x = Embedded(), row_batch(rank)
    bare, ddp = copy.deepcopy(model).eval(), wrap(wrapper, model).eval()
    for larger, its_bare, prefix in ((ddp, bare, ""), (Larger(ddp), Larger(bare), "net.")):
        larger.load_state_dict(its_bare.state_dict())
        given = {name: p.detach() + 0.5 for name, p in its_bare.named_parameters()}
        given |= {name: b.detach() + 1 for name, b in its_bare.named_buffers()}
        expected = functional_call(its_bare, given, (x,))
        before = {name: id(t) for name, t in [*larger.named_parameters(), *larger.named_buffers()]}
        torch.testing.assert_close(functional_call(larger, dict(given), (x,)), expected)
        ddps = {name.replace(prefix, f"{prefix}module.", 1) if name.startswith(prefix) else name: t
                for name, t in given.items()}  # fmt: skip
        torch.testing.assert_close(functional_call(larger, ddps, (x,)), expected)
        tied = {f"{prefix}one.weight", f"{prefix}other.weight"}
        for all_given in (given, ddps):
            all_names = dict(all_given)
            for name in list(all_given):
                if name.removeprefix("module.").replace("net.module.", "net.") in tied:
                    all_names[name.replace("one.", "other.")] = all_given[name]
            torch.testing.assert_close(functional_call(larger, all_names, (x,), strict=True), expected)
        assert before == {name: id(t) for name, t in [*larger.named_parameters(), *larger.named_buffers()]}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        functional_call(ddp, {"nothing": torch.ones(1)}, (x,), strict=True)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_functional_call_takes_bare_names_and_ddps(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_functional, wrapper)


def _ambiguous(rank: int, wrapper: str) -> None:
    ddp, x = wrap(wrapper, Deceptive()), row_batch(rank)
    bare = copy.deepcopy(ddp.module)
    given = {name: p.detach() + 0.5 for name, p in bare.named_parameters()}
    with pytest.raises(ValueError, match=r"a submodule called 'module'.*put 'module\.' before all names"):
        functional_call(ddp, given, (x,))
    found = functional_call(ddp, {f"module.{name}": value for name, value in given.items()}, (x,))
    torch.testing.assert_close(found, functional_call(bare, given, (x,)))


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_functional_call_that_would_take_a_name_for_another_is_refused(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_ambiguous, wrapper)
