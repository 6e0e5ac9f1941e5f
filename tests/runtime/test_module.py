"""The wrapper as a module: attributes, state, no_sync, outputs of every kind, plan and explain()."""

import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import re
import warnings
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    Deceptive,
    Mlp,
    TokenModel,
    assert_equal_on_all_ranks,
    assert_gradients,
    expected_mean,
    local_gradients,
    mean_over_ranks,
    row_batch,
    token_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp import CompiledDDP, EagerDDP
from compiled_ddp.compat.apex import DistributedDataParallel as ApexDDP
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def assert_trains(ddp: Any, rank: int, loss: Callable[[nn.Module, Tensor], Tensor] = loss_of) -> None:
    """Check a synchronised step against plain autograd averaged by hand."""
    x = batch(rank)
    ddp.zero_grad()
    expected = expected_mean(ddp.module, lambda module: loss(module, x))
    loss(ddp, x).backward()
    assert_gradients(ddp.module, expected)


# ---- attributes ------------------------------------------------------------------------------------------------------


class WithAttributes(Mlp):
    vocabulary = 32

    def __init__(self) -> None:
        super().__init__()
        self.depth = 2
        self.drop = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(3.0))

    def describe(self, prefix: str) -> str:
        return f"{prefix} {self.depth}"

    @property
    def width(self) -> int:
        return self.first.out_features


def _attributes(rank: int, wrapper: str) -> None:
    model = WithAttributes()
    torch_ddp = DistributedDataParallel(copy.deepcopy(model))
    ddp = wrap(wrapper, model)
    assert ddp.module is model
    assert isinstance(ddp, {"compile_ddp": CompiledDDP, "EagerDDP": EagerDDP}[wrapper])
    assert (ddp.vocabulary, ddp.depth, ddp.width) == (32, 2, 8)
    assert ddp.describe("depth") == "depth 2"
    assert ddp.head is model.head
    assert ddp.table is model.table
    assert not hasattr(ddp, "nothing_of_that_name")
    assert ddp.process_group is torch_ddp.process_group
    assert ddp.device == torch_ddp.device
    ddp._set_static_graph()
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = ddp.nothing_of_that_name
    assert all(one is other for one, other in zip(ddp.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("wrapper", BOTH)
def test_attributes_are_those_that_a_user_of_ddp_expects(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_attributes, wrapper)


def _train_and_eval(rank: int, wrapper: str) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.9), nn.Linear(4, 2))
    ddp = wrap(wrapper, model)
    x = batch(0)
    for training in (True, False, True):
        ddp.train(training)
        assert all(part.training == training for part in model.modules())
        with torch.no_grad():
            assert torch.equal(ddp(x), ddp(x)) != training, "dropout tells the two modes apart"


@pytest.mark.parametrize("wrapper", BOTH)
def test_train_and_eval_reach_the_module(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_train_and_eval, wrapper)


def _evaluate_alone(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    x = batch(rank)
    if rank == 0:  # alone: a collective would fail after the group's timeout
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                output = ddp(x)
            assert not output.requires_grad
            torch.testing.assert_close(output, ddp.module(x).detach())
    assert all(parameter.grad is None for parameter in ddp.parameters())
    assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_forward_without_gradients_does_not_synchronise(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_evaluate_alone, wrapper, collective_timeout_seconds=10)


# ---- state_dict ------------------------------------------------------------------------------------------------------


class OnlyModule(nn.Module):
    """Looks like a wrapper, by its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class CompiledPart(nn.Module):
    """A part of it is compiled, so that its keys have `_orig_mod.` inside."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(nn.Linear(5, 4), backend="eager")
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.part(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    model.__name__: model for model in (WithAttributes, Deceptive, OnlyModule, CompiledPart)
}


def assert_equal_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return OrderedDict((prefix + key, value) for key, value in state.items())


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same keys with other values, each value another."""
    return OrderedDict((key, torch.full_like(value, n + 1)) for n, (key, value) in enumerate(state.items()))


def _save_and_load(rank: int, wrapper: str, name: str) -> None:
    model = MODELS[name]()
    bare = MODELS[name]()
    keys, versions = list(model.state_dict()), dict(model.state_dict()._metadata)
    ddp = wrap(wrapper, model)
    saved = ddp.state_dict()
    assert list(saved) == keys
    assert dict(saved._metadata) == versions
    assert_equal_state(saved, model.state_dict())

    file = io.BytesIO()
    torch.save(ddp.state_dict(), file)
    file.seek(0)
    bare.load_state_dict(torch.load(file))
    assert_equal_state(bare.state_dict(), ddp.state_dict())

    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."):
        new = changed(bare.state_dict())
        given = prefixed(new, prefix)
        before = list(given)
        result = ddp.load_state_dict(given)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert list(given) == before, "the caller's state was changed"
        assert_equal_state(ddp.state_dict(), new)
        bare = MODELS[name]()  # so that the next values differ
    torch_ddp = DistributedDataParallel(MODELS[name]())
    ddp.load_state_dict(torch_ddp.state_dict())
    assert_equal_state(ddp.state_dict(), torch_ddp.module.state_dict())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_state_has_the_bare_modules_keys_and_loads_from_any_wrapper(ranks2: RankPool, wrapper: str, name: str) -> None:
    ranks2.run(_save_and_load, wrapper, name)


class Larger(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 5)
        self.net = net
        self.tail = nn.BatchNorm1d(5)


def _inside_a_larger_module(rank: int, wrapper: str) -> None:
    bare = Larger(Deceptive())
    larger = Larger(wrap(wrapper, Deceptive()))
    assert sorted(larger.state_dict()) == sorted(bare.state_dict())
    assert dict(larger.state_dict()._metadata) == dict(bare.state_dict()._metadata)
    bare.load_state_dict(larger.state_dict())
    larger.load_state_dict(changed(bare.state_dict()))
    expected = changed(bare.state_dict())
    for key, value in larger.state_dict().items():
        assert torch.equal(value, expected[key]), key
    behind_ddp = Larger(nn.ModuleDict({"module": Deceptive()}))  # keys as of a torch DDP in this place
    larger.load_state_dict(behind_ddp.state_dict())
    assert_equal_state(larger.net.state_dict(), behind_ddp.net["module"].state_dict())


@pytest.mark.parametrize("wrapper", BOTH)
def test_state_keys_are_the_bare_ones_inside_a_larger_module_too(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_inside_a_larger_module, wrapper)


def _wrong_keys(rank: int, wrapper: str, prefix: str) -> str:
    ddp = wrap(wrapper, Mlp())
    state = ddp.state_dict()
    state["decoder.weight"] = state.pop("head.weight")
    given = prefixed(state, prefix)
    result = ddp.load_state_dict(given, strict=False)
    assert result.missing_keys == ["head.weight"]
    assert result.unexpected_keys == ["decoder.weight"]
    with pytest.raises(ValueError, match="assign=True would replace the parameters"):
        ddp.load_state_dict(ddp.state_dict(), assign=True)
    with pytest.raises(RuntimeError) as caught:
        ddp.load_state_dict(given)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_missing_and_unexpected_keys_are_reported_under_their_bare_names(ranks2: RankPool, prefix: str) -> None:
    for message in ranks2.run(_wrong_keys, "EagerDDP", prefix):
        assert 'Missing key(s) in state_dict: "head.weight"' in message
        assert 'Unexpected key(s) in state_dict: "decoder.weight"' in message
        assert "Mlp" in message


def _wrong_shape(rank: int, wrapper: str) -> str:
    ddp = wrap(wrapper, Mlp())
    with pytest.raises(RuntimeError) as caught:
        ddp.load_state_dict(prefixed(Mlp(width=9).state_dict(), "module."))
    return str(caught.value)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrong_shape_is_reported_under_its_bare_name(ranks2: RankPool, wrapper: str) -> None:
    for message in ranks2.run(_wrong_shape, wrapper):
        assert "size mismatch for head.weight" in message


def _train_load_train(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    assert_trains(ddp, rank)
    torch.manual_seed(3)
    ddp.load_state_dict(Mlp().state_dict())
    assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_training_goes_on_after_loading(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_train_load_train, wrapper)


def _wrap_a_copy(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    assert_trains(ddp, rank)
    copied = copy.deepcopy(ddp.module)
    file = io.BytesIO()
    torch.save(ddp.module, file)
    file.seek(0)
    for model in (copied, torch.load(file, weights_only=False)):
        assert_trains(wrap(wrapper, model), rank)
    assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_copy_of_the_wrapped_module_can_be_wrapped(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_wrap_a_copy, wrapper)


def reloaded(what: object, saved_by: str) -> Any:
    if saved_by == "pickle":
        return pickle.loads(pickle.dumps(what))
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Trainer:
    """Both hold each other."""

    def __init__(self, ddp: Any) -> None:
        self.ddp, self.step = ddp, 3
        ddp.module.trainer = self


def _reload_a_wrapper(rank: int, wrapper: str, saved_by: str) -> None:
    ddp = wrap(wrapper, WithAttributes(), piggyback=("tokens",), reduction="weighted")
    ddp.module.head.eval()
    ddp.module.first.bias.requires_grad_(False)
    ddp.set_weight(rank + 1.0)
    ddp(batch(rank)).sum().backward()
    ddp.eval().module.norm.train()
    trainer = reloaded(Trainer(ddp), saved_by)
    loaded = trainer.ddp
    assert trainer.step == 3 and loaded.module.trainer is trainer
    assert type(loaded) is type(ddp) and loaded.module is not ddp.module
    for one, other in zip(loaded.modules(), ddp.modules(), strict=True):
        assert (type(one), one.training) == (type(other), other.training)
    assert_equal_state(loaded.state_dict(), ddp.state_dict())
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in ddp.parameters()]
    assert loaded.reduction == "weighted"
    assert loaded._settings.given == ddp._settings.given
    loaded.train()
    loaded.module.trainer = ddp.module.trainer = None  # not into the copies that are compared with
    loaded.module.first.bias.requires_grad_(True)
    for _ in range(2):
        assert_trains(loaded, rank)  # with the weight of a new wrapper, 1
    assert loaded.piggybacked.keys() == {"tokens"}
    larger = reloaded(Larger(loaded), saved_by)  # as a part, too
    assert_trains(larger.net, rank)
    assert_equal_on_all_ranks([p.sum().item() for p in larger.net.parameters()])
    ddp.unwrap()
    with pytest.raises(RuntimeError, match="has been unwrapped"):
        pickle.dumps(ddp)


@pytest.mark.parametrize("saved_by", ["pickle", "torch.save"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrapper_that_is_pickled_and_loaded_wraps_its_module_again(
    ranks2: RankPool, wrapper: str, saved_by: str
) -> None:
    ranks2.run(_reload_a_wrapper, wrapper, saved_by)


def _not_pickled(rank: int, wrapper: str) -> None:
    for options in (
        {"process_group": dist.new_group([0, 1])},
        {"device_mesh": init_device_mesh("cpu", (2,))},
    ):
        ddp = wrap(wrapper, Mlp(), **options)
        with pytest.raises(TypeError, match=r"process_group or device_mesh of its own.*save its \.module"):
            pickle.dumps(ddp)
    with pytest.raises(TypeError, match=r"apex's DistributedDataParallel cannot be pickled: save its \.module"):
        pickle.dumps(ApexDDP(Mlp()))


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrapper_of_a_group_of_its_own_is_not_pickled(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_not_pickled, wrapper)


def _loads_alone(rank: int, wrapper: str) -> str:
    saved = pickle.dumps(wrap(wrapper, Mlp()))
    if rank == 1:
        return ""
    with pytest.raises(RuntimeError) as caught:
        pickle.loads(saved)
    return str(caught.value)


def test_a_rank_that_does_not_load_is_named(ranks2: RankPool) -> None:
    message, _ = ranks2.run(_loads_alone, "EagerDDP", collective_timeout_seconds=3)
    assert re.search(r"waited 3 s for rank 1 .*stayed silent", message), message


# ---- no_sync ---------------------------------------------------------------------------------------------------------


def _nested_no_sync(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    assert_trains(ddp, rank)
    ddp.zero_grad()
    total = {name: torch.zeros_like(parameter) for name, parameter in ddp.module.named_parameters()}

    def backward(step: int) -> None:
        x = batch(rank, step)
        for name, gradient in local_gradients(ddp.module, lambda module: loss_of(module, x)).items():
            total[name] += gradient
        loss_of(ddp, x).backward()

    def assert_local() -> None:
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(parameter.grad, total[name])

    with ddp.no_sync():
        backward(1)
        with ddp.no_sync():
            backward(2)
        backward(3)  # leaving the inner one does not turn synchronisation on
        assert_local()
    with contextlib.suppress(KeyError), ddp.no_sync():
        backward(4)
        raise KeyError
    assert_local()
    backward(5)
    assert_gradients(ddp.module, mean_over_ranks(total, ddp.module))


@pytest.mark.parametrize("wrapper", BOTH)
def test_no_sync_nests_and_ends_with_an_exception(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_nested_no_sync, wrapper)


def _switched_off(rank: int, wrapper: str) -> None:
    """As some training loops do it; torch's DDP beside it."""
    model = Mlp()
    for ddp in (DistributedDataParallel(copy.deepcopy(model)), wrap(wrapper, model)):
        x = batch(rank)
        bare = copy.deepcopy(ddp.module)
        local = local_gradients(bare, lambda module: loss_of(module, x))  # noqa: B023
        mean = mean_over_ranks(local, bare)
        ddp.require_backward_grad_sync = False
        with ddp.no_sync():
            pass
        loss_of(ddp, x).backward()
        for name, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(parameter.grad, local[name])
        ddp.require_backward_grad_sync = True
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
        loss_of(ddp, x).backward()
        assert_gradients(ddp.module, {name: 2 * gradient for name, gradient in mean.items()})


@pytest.mark.parametrize("wrapper", BOTH)
def test_synchronisation_may_be_switched_by_ddps_attribute(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_switched_off, wrapper)


def _switched_off_too_late(rank: int, wrapper: str) -> None:
    """Between a forward and its backward the flag does nothing, as under torch's DDP; ours says so, once."""
    model = Mlp()
    for ddp in (DistributedDataParallel(copy.deepcopy(model)), wrap(wrapper, model)):
        told = []
        for _ in range(3):
            x = batch(rank)
            bare = copy.deepcopy(ddp.module)
            bare.zero_grad()
            expected = mean_over_ranks(local_gradients(bare, lambda module: loss_of(module, x)), bare)  # noqa: B023
            ddp.zero_grad()
            ddp.require_backward_grad_sync = False  # in time: nothing is said
            ddp.require_backward_grad_sync = True
            loss = loss_of(ddp, x)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ddp.require_backward_grad_sync = False
            told += [each for each in caught if "comes behind a forward" in str(each.message)]
            loss.backward()
            assert_gradients(ddp.module, expected)
        if isinstance(ddp, DistributedDataParallel):
            assert not told
        else:
            assert [each.filename for each in told] == [__file__]
            ddp.require_backward_grad_sync = True


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_flag_behind_a_forward_changes_nothing_about_its_backward_and_says_so_once(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_switched_off_too_late, wrapper)


def _forward_decides(rank: int, wrapper: str) -> None:
    """Backward's own place, inside of no_sync or not, makes no difference."""
    ddp = wrap(wrapper, Mlp())
    x = batch(rank)
    local = local_gradients(ddp.module, lambda module: loss_of(module, x))
    expected = mean_over_ranks(local, ddp.module)
    loss = loss_of(ddp, x)
    with ddp.no_sync():
        loss.backward()
    assert_gradients(ddp.module, expected)
    ddp.zero_grad()
    with ddp.no_sync():
        loss = loss_of(ddp, x)
    loss.backward()
    for name, parameter in ddp.module.named_parameters():
        torch.testing.assert_close(parameter.grad, local[name])


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_place_of_the_forward_decides_whether_a_backward_synchronises(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_forward_decides, wrapper)


# ---- outputs ---------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["logits", "aux"])


@dataclasses.dataclass
class Output:
    logits: Tensor
    name: str = "output"


@dataclasses.dataclass(slots=True)
class SlottedOutput:
    logits: Tensor
    parts: list[Tensor]


class CustomOutput:
    def __init__(self, logits: Tensor) -> None:
        self.parts = {"logits": [logits]}
        self.itself = self  # a cycle


class OutputMapping(OrderedDict[str, Tensor]):
    """As Hugging Face's ModelOutput: a mapping with attributes."""


# How a model gives its logits away, and how a user takes them out.
OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda logits: (logits, 3), lambda output: output[0]),
    "list": (lambda logits: [None, [logits]], lambda output: output[1][0]),
    "dict": (lambda logits: {"step": 1, "logits": logits}, lambda output: output["logits"]),
    "namedtuple": (lambda logits: Pair(logits, None), lambda output: output.logits),
    "dataclass": (Output, lambda output: output.logits),
    "dataclass with slots": (lambda logits: SlottedOutput(logits, []), lambda output: output.logits),
    "custom object": (CustomOutput, lambda output: output.parts["logits"][0]),
    "mapping": (lambda logits: OutputMapping(logits=logits), lambda output: output["logits"]),
    "distribution": (lambda logits: torch.distributions.Categorical(logits=logits), lambda output: output.logits),
}


class WithOutput(Mlp):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.give(super().forward(x))

    @torch.compiler.disable
    def give(self, logits: Tensor) -> Any:
        return OUTPUTS[self.kind][0](logits)


def _outputs(rank: int, wrapper: str, kind: str) -> None:
    ddp = wrap(wrapper, WithOutput(kind))
    take = OUTPUTS[kind][1]
    for _ in range(2):
        assert_trains(ddp, rank, lambda module, x: take(module(x)).square().sum())
    assert type(ddp(batch(rank))) is type(ddp.module(batch(rank)))


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_outputs_of_every_kind_are_synchronised(ranks2: RankPool, wrapper: str, kind: str) -> None:
    ranks2.run(_outputs, wrapper, kind)


class KeepsItsLoss(Mlp):
    """Gives its loss away by an attribute, so that nothing in its output leads to the graph."""

    def forward(self, x: Tensor) -> None:
        self.loss = super().forward(x).square().sum()


def _kept_loss(rank: int, wrapper: str) -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        module(x)
        return module.loss

    ddp = wrap(wrapper, KeepsItsLoss())
    for _ in range(2):
        assert_trains(ddp, rank, loss)


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_loss_that_is_not_among_the_outputs_is_synchronised(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_kept_loss, wrapper)


class KeepsItsOutput(Mlp):
    def forward(self, x: Tensor) -> None:
        self.output = super().forward(x)


class GivesAFunction(Mlp):
    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        output = super().forward(x)
        return lambda: output


class Generates(Mlp):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield super().forward(x)


HIDDEN: dict[type[Mlp], Callable[[nn.Module, Any], Tensor]] = {
    KeepsItsOutput: lambda module, _: module.output,
    GivesAFunction: lambda _, function: function(),
    Generates: lambda _, generator: next(generator),
}


def _local_forward_between(rank: int, wrapper: str, model: type[Mlp]) -> None:
    """Between forward and backward, as of a target that has no gradient of its own."""
    ddp = wrap(wrapper, model()) if wrapper != "torch" else DistributedDataParallel(model())
    take = HIDDEN.get(model, lambda _, output: output)
    for step in range(4):
        x, other = batch(rank, step), batch(rank, step + 10)
        with torch.no_grad():
            target = take(ddp.module, ddp.module(other)).clone()
        loss = lambda module: (take(module, module(x)) - target).square().sum()  # noqa: B023, E731
        if model is KeepsItsOutput:
            del ddp.module.output  # which cannot be copied
        expected = expected_mean(copy.deepcopy(ddp.module), loss)
        ddp.zero_grad()
        output = take(ddp.module, ddp(x))
        with ddp.no_sync():
            between = take(ddp.module, ddp(other))
        (output - between.detach()).square().sum().backward()
        assert_gradients(ddp.module, expected)
        ddp.module.output = None
        with ddp.no_sync():  # nothing waits any more
            ddp.zero_grad()
            take(ddp.module, ddp(x)).square().sum().backward()
        local = local_gradients(ddp.module, lambda module: take(module, module(x)).square().sum())  # noqa: B023
        assert_gradients(ddp.module, {name: gradient.double() for name, gradient in local.items()}, atol=1e-6)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("model", [*HIDDEN, Mlp])
@pytest.mark.parametrize("wrapper", [*BOTH, "torch"])
def test_a_local_forward_in_between_leaves_a_backward_synchronised_whose_graph_is_hidden(
    ranks2: RankPool, wrapper: str, model: type[Mlp]
) -> None:
    ranks2.run(_local_forward_between, wrapper, model)


def _local_instead(rank: int, wrapper: str) -> None:
    """A forward whose output was seen, and which is given up for one under no_sync."""
    ddp = wrap(wrapper, Mlp())
    for step in range(3):
        assert_trains(ddp, rank)
        x = batch(rank, step)
        local = local_gradients(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))  # noqa: B023
        ddp.zero_grad()
        ddp(x)
        with ddp.no_sync():
            loss_of(ddp, x).backward()
        assert_gradients(ddp.module, {name: gradient.double() for name, gradient in local.items()}, atol=1e-6)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_local_forward_takes_the_place_of_one_whose_output_was_thrown_away(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_local_instead, wrapper)


def _module_called_directly(rank: int, wrapper: str) -> None:
    model = Mlp()
    torch_ddp = DistributedDataParallel(copy.deepcopy(model))
    ddp = wrap(wrapper, model)
    for wrapped in (torch_ddp, ddp):
        for _ in range(2):
            wrapped.zero_grad()
            x = batch(rank)
            local = local_gradients(wrapped.module, lambda module: loss_of(module, x))  # noqa: B023
            loss_of(wrapped.module, x).backward()
            for name, parameter in wrapped.module.named_parameters():
                torch.testing.assert_close(parameter.grad, local[name])
            wrapped.zero_grad()
            assert_trains(wrapped, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_module_called_directly_stays_local_as_under_ddp(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_module_called_directly, wrapper)


# ---- models that were compiled before --------------------------------------------------------------------------------


def _compiled_before(rank: int, wrapper: str, in_place: bool) -> None:
    model: Any = Mlp()
    if in_place:
        model.compile(backend="eager")
    bare_keys = list(model.state_dict())
    ddp = wrap(wrapper, model if in_place else torch.compile(model, backend="eager"))
    for _ in range(2):
        assert_trains(ddp, rank)
    if wrapper == "compile_ddp":
        assert ddp.module is model
        assert list(ddp.state_dict()) == bare_keys
    ddp.load_state_dict(model.state_dict())
    model.load_state_dict(prefixed(model.state_dict(), ""))
    ddp.unwrap()
    assert_trains(wrap(wrapper, model), rank)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_models_that_were_compiled_before_are_wrapped_too(ranks2: RankPool, wrapper: str, in_place: bool) -> None:
    ranks2.run(_compiled_before, wrapper, in_place)


def _torchscript(rank: int, wrapper: str, make: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        model = torch.jit.script(Mlp()) if make == "script" else torch.jit.trace(Mlp(), row_batch(rank))
        ddp, twin = wrap(wrapper, model), Mlp()
        twin.load_state_dict(model.state_dict())  # a copy of one of TorchScript's does not use its own parameters
        for step in range(3):
            expected = expected_mean(twin, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023
            ddp.zero_grad()
            ddp(row_batch(rank, step)).square().sum().backward()
            assert_gradients(model, expected)


@pytest.mark.parametrize("make", ["script", "trace"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_models_of_torchscript_are_wrapped_too(ranks2: RankPool, wrapper: str, make: str) -> None:
    ranks2.run(_torchscript, wrapper, make)


def _another_in_its_place(rank: int, wrapper: str) -> None:
    model = Mlp()
    ddp = wrap(wrapper, model)
    assert_trains(ddp, rank)
    ddp.module = Mlp()
    with pytest.raises(RuntimeError, match=r"\.module is another than the one it was made for"):
        ddp(row_batch(rank))
    ddp.module = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"\.module was compiled after it was wrapped"):
        ddp(row_batch(rank))
    ddp.module = model
    assert_trains(ddp, rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_another_model_in_its_place_is_refused(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_another_in_its_place, wrapper)


def _gives_its_group_back(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    assert_trains(ddp, rank)
    group = weakref.ref(ddp._runtime.communicator.group)
    ddp.unwrap()
    gc.collect()
    assert group() is None, "its threads live on"


@pytest.mark.parametrize("wrapper", BOTH)
def test_unwrap_ends_the_groups_threads_while_the_wrapper_is_held(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_gives_its_group_back, wrapper)


# ---- plan and explain ------------------------------------------------------------------------------------------------


def _plan_and_explain(rank: int, wrapper: str) -> str:
    model = TokenModel()
    ddp = wrap(wrapper, model)
    if wrapper == "compile_ddp":
        assert ddp.plan is None
        assert ddp.explain().rows == ()
        assert str(ddp.explain()).startswith("No plan yet: it is made in the first synchronised backward.")
    with ddp.no_sync():
        ddp(*token_batch(rank)).backward()
    assert (ddp.plan is None) == (wrapper == "compile_ddp"), "a local backward agrees on nothing"
    ddp(*token_batch(rank)).backward()
    plan, explanation = ddp.plan, ddp.explain()
    assert_equal_on_all_ranks((plan.fingerprint, str(explanation)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.sections = ()
    assert hash(plan) == hash(copy.deepcopy(plan))

    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert plan.parameter_names == tuple(names)
    by = "graph" if wrapper == "compile_ddp" else "hooks"
    assert [row[0] for row in explanation.rows] == list(range(len(plan.buckets)))
    assert {row[1] for row in explanation.rows} == {by}
    assert sum(row[2] for row in explanation.rows) == len(names)
    assert [row[3] for row in explanation.rows] == [bucket.nbytes for bucket in plan.buckets]
    gradients = sum(parameter.numel() for parameter in model.parameters())
    riders = sum(section.plan.riders.numel for section in plan.sections)
    assert sum(row[3] for row in explanation.rows) == plan.nbytes == 4 * (gradients + riders)
    reason = "" if wrapper == "compile_ddp" else "the model runs eagerly"
    assert {row[5] for row in explanation.rows} == {reason}
    assert "head.bias" in explanation.rows[0][4], "the head's gradients are the first"
    assert "token.weight" in explanation.rows[-1][4], "the embedding's gradient is the last"
    text = str(explanation)
    assert all(word in text for word in ("order", "launched by", "bytes", by, "head.bias", reason))

    for _ in range(2):
        ddp(*token_batch(rank)).backward()
    with torch.no_grad():
        ddp(*token_batch(rank, batch=1))
    assert ddp.plan is plan
    assert str(ddp.explain()) == text
    return text


@pytest.mark.parametrize("wrapper", BOTH)
def test_plan_and_explain_tell_who_launches_which_bytes_in_which_order_also_in_a_second_run(
    ranks2: RankPool, wrapper: str
) -> None:
    first, second = (ranks2.run(_plan_and_explain, wrapper) for _ in range(2))
    assert first == second


class PartlyEager(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.apply_head(self.norm(torch.tanh(self.first(x))))

    @torch.compiler.disable
    def apply_head(self, x: Tensor) -> Tensor:
        return self.head(x)


def _explain_hooks(rank: int) -> list[tuple[str, str]]:
    ddp = wrap("compile_ddp", PartlyEager())
    x = batch(rank)
    loss = loss_of(ddp, x)
    with pytest.warns(
        UserWarning, match=r"head\.(weight|bias), head\.(weight|bias) are reduced by hooks: not in a cap"
    ):
        loss.backward()
    for _ in range(2):
        assert_trains(ddp, rank)
    assert "not in a captured graph" in str(ddp.explain())
    return [(row[1], row[4]) for row in ddp.explain().rows]


def test_explain_names_the_parameters_that_hooks_reduce_and_why(ranks2: RankPool) -> None:
    for rows in ranks2.run(_explain_hooks):
        assert {by for by, _ in rows} == {"graph", "hooks"}
        assert all(("head" in names) == (by == "hooks") for by, names in rows)
