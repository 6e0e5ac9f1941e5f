"""Bad input: every rank raises an error that says what is wrong and what to do; nothing half-wrapped stays behind."""

import gc
import os
import re
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, expected_mean, local_gradients, wrappers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp import EagerDDP, compile_ddp, torch_private
from compiled_ddp.ranks.communicator import Communicator
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
SECONDS = 10.0  # long before the group's timeout: a refusal waits for no one


def wrap(wrapper: str, model: Any, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


def train_one_step(ddp: Any, rank: int) -> None:
    """Check a synchronised step against plain autograd averaged by hand."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    ddp.zero_grad()
    expected = expected_mean(ddp.module, lambda module: module(x).square().sum())
    ddp(x).square().sum().backward()
    assert_gradients(ddp.module, expected)


def hooks_on(model: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


def open_communicators() -> int:
    return sum(type(thing) is Communicator and not thing.closed for thing in gc.get_objects())


def message_of_refusal(make: Callable[[], object], model: Any) -> str:
    """The error that `make` raises; asserts that it comes soon and leaves neither hooks nor a communicator behind."""
    groups, begun = open_communicators(), time.monotonic()
    try:
        make()
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("it was wrapped")
    assert time.monotonic() - begun < SECONDS
    assert open_communicators() == groups, "a communicator was leaked"
    if isinstance(model, nn.Module):
        assert hooks_on(model) == 0
    return message


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model or an option that must be refused.

    `spoil` gets an Mlp and returns what to wrap instead; `mend` makes the spoiled Mlp good again. On a rank that is not
    among the bad ones, neither is called and no option is passed.
    """

    says: str  # a regular expression that every rank's message matches
    spoil: Callable[[nn.Module], Any] = lambda model: model
    mend: Callable[[nn.Module], None] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    wrappers: tuple[str, ...] = BOTH


def put(name: str, make: Callable[[], Any]) -> Callable[[nn.Module], nn.Module]:
    """Set the attribute `name` of the model."""

    def spoil(model: nn.Module) -> nn.Module:
        *path, last = name.split(".")
        setattr(model.get_submodule(".".join(path)), last, make())
        return model

    return spoil


def put_back(name: str, make: Callable[[], Any]) -> Callable[[nn.Module], None]:
    return lambda model: put(name, make)(model) and None


def take_out(name: str) -> Callable[[nn.Module], None]:
    return lambda model: delattr(model, name)


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def unfrozen(model: nn.Module) -> None:
    model.requires_grad_(True)


class OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, device="meta"))


class WithSparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(3).to_sparse_csr())


def in_torch_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def in_compiled_torch_ddp(model: nn.Module) -> Any:
    return torch.compile(DistributedDataParallel(model), backend="eager")


def head() -> nn.Linear:
    return nn.Linear(8, 3)


def initialise(model: nn.Module) -> None:
    model(torch.zeros(1, 5))


THE_SAME_ON_EVERY_RANK = {
    "a function": Case(r"TypeError: \w+ wraps a torch\.nn\.Module, found builtin_function", spoil=lambda _: torch.relu),
    "no parameter": Case("has no parameter that requires a gradient.*Use it unwrapped", spoil=lambda _: nn.ReLU()),
    "only frozen parameters": Case("no parameter that requires a gradient.*unfreeze", spoil=frozen, mend=unfrozen),
    "a meta parameter": Case(
        r"parameter head\.weight is on the meta device: materialise",
        spoil=put("head", lambda: nn.Linear(8, 3, device="meta")),
        mend=put_back("head", head),
    ),
    "a frozen meta parameter": Case(
        r"parameter head\.weight is on the meta device: materialise",
        spoil=put("head", lambda: nn.Linear(8, 3, device="meta").requires_grad_(False)),
        mend=put_back("head", head),
    ),
    "a meta buffer": Case(
        r"buffer extra\.table is on the meta device: materialise", spoil=put("extra", OnMeta), mend=take_out("extra")
    ),
    "a lazy parameter": Case(
        r"parameter head\.weight is uninitialised \(lazy\): run one forward",
        spoil=put("head", lambda: nn.LazyLinear(3)),
        mend=initialise,
    ),
    "a lazy buffer": Case(
        r"buffer extra\.running_mean is uninitialised \(lazy\): run one forward",
        spoil=put("extra", lambda: nn.LazyBatchNorm1d(affine=False)),
        mend=take_out("extra"),
    ),
    "a sparse parameter": Case(
        r"parameter head\.weight has layout torch\.sparse_coo: only strided",
        spoil=put("head.weight", lambda: nn.Parameter(torch.ones(3, 8).to_sparse())),
        mend=put_back("head", head),
    ),
    "a frozen sparse parameter": Case(
        r"parameter adjacency has layout torch\.sparse_coo: only strided.*_ddp_params_and_buffers_to_ignore",
        spoil=put("adjacency", lambda: nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)),
        mend=take_out("adjacency"),
    ),
    "a sparse buffer": Case(
        r"buffer extra\.table has layout torch\.sparse_csr: only strided tensors are broadcast",
        spoil=put("extra", WithSparseBuffer),
        mend=take_out("extra"),
    ),
    "a model in torch's DDP": Case(
        "already wrapped by torch's DistributedDataParallel: pass its .module", in_torch_ddp
    ),
    "a compiled model in torch's DDP": Case("wrapped by torch's DistributedDataParallel", in_compiled_torch_ddp),
    "a bucket cap of 0": Case("bucket_cap_mb must be a positive number of MiB, found 0", options={"bucket_cap_mb": 0}),
    "a negative bucket cap": Case("bucket_cap_mb must be a positive.*found -1.5", options={"bucket_cap_mb": -1.5}),
    "a bucket cap of nan": Case("bucket_cap_mb must be.*found nan", options={"bucket_cap_mb": float("nan")}),
    "a bucket cap that is a switch": Case("bucket_cap_mb must be.*found True", options={"bucket_cap_mb": True}),
    "a switch in words": Case("init_sync must be True or False, found 'no'", options={"init_sync": "no"}),
    "a bucket cap in words": Case("bucket_cap_mb must be.*found '4 MB'", options={"bucket_cap_mb": "4 MB"}),
    "a first bucket of 0": Case("first_bucket_mb must be a positive.*found 0", options={"first_bucket_mb": 0.0}),
    "an unknown backend": Case(
        "backend must be 'inductor' or 'aot_eager', found 'eager'",
        options={"backend": "eager"},
        wrappers=("compile_ddp",),
    ),
    "an unknown mode": Case(
        "mode must be one of default, .* found 'fast'", options={"mode": "fast"}, wrappers=("compile_ddp",)
    ),
    "mode and options": Case(
        "mode and options are alternatives.*pass one of them",
        options={"mode": "max-autotune", "options": {"max_autotune": True}},
        wrappers=("compile_ddp",),
    ),
    "an unknown COMPILED_DDP_MODE": Case(
        "COMPILED_DDP_MODE must be 'graph' or 'hooks', found 'off'", environment={"COMPILED_DDP_MODE": "off"}
    ),
}


def refuse_then_train(rank: int, wrapper: str, case: Case, bad: bool, trained_by: str) -> str:
    model: nn.Module = Mlp()
    before = dict(os.environ)
    if bad:
        os.environ.update(case.environment)
    try:
        spoiled = [case.spoil(model) if bad else model]
        message = message_of_refusal(lambda: wrap(wrapper, spoiled[0], **(case.options if bad else {})), model)
        spoiled.clear()  # torch's DDP takes its hooks with it
    finally:
        os.environ.clear()
        os.environ.update(before)
    if bad:
        case.mend(model)
    ddp = wrap(trained_by, model)
    train_one_step(ddp, rank)
    return message


def _bad_everywhere(rank: int, wrapper: str, name: str) -> str:
    return refuse_then_train(rank, wrapper, THE_SAME_ON_EVERY_RANK[name], bad=True, trained_by=wrapper)


@pytest.mark.parametrize("name", THE_SAME_ON_EVERY_RANK)
@pytest.mark.parametrize("wrapper", BOTH)
def test_bad_input_is_refused_and_the_corrected_model_trains(ranks2: RankPool, wrapper: str, name: str) -> None:
    case = THE_SAME_ON_EVERY_RANK[name]
    if wrapper not in case.wrappers:
        pytest.skip(f"{wrapper} has no such option")
    for message in ranks2.run(_bad_everywhere, wrapper, name):
        assert re.search(case.says, message)


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def other_order(model: nn.Module) -> nn.Module:
    first = model._modules.pop("first")
    model._modules["first"] = first
    return model


def original_order(model: nn.Module) -> None:
    model._modules["norm"] = model._modules.pop("norm")


def half_precision_head() -> nn.Linear:
    return nn.Linear(8, 3, dtype=torch.bfloat16)


def one_frozen_layer(model: nn.Module) -> nn.Module:
    model.get_submodule("norm").requires_grad_(False)
    return model


DIFFERENT_ON_ONE_RANK = {
    "a missing parameter": Case(
        r"(parameter head\.bias is|parameter head\.bias) (missing|found) here, (found|missing) on rank 0.*same model",
        spoil=put("head", lambda: nn.Linear(8, 3, bias=False)),
        mend=put_back("head", head),
    ),
    "an extra parameter": Case(
        r"parameter scale is (found|missing) here, (missing|found) on rank 0",
        spoil=put("scale", lambda: nn.Parameter(torch.ones(1))),
        mend=take_out("scale"),
    ),
    "an extra buffer": Case(
        r"buffer extra\.running_mean, .* are (found|missing) here, (missing|found) on rank 0",
        spoil=put("extra", lambda: nn.BatchNorm1d(4, affine=False)),
        mend=take_out("extra"),
    ),
    "another shape": Case(
        r"parameter head\.weight is shape \(\d, 8\).* here, shape \(\d, 8\).* on rank 0\. Make them equal",
        spoil=put("head", lambda: nn.Linear(8, 4)),
        mend=put_back("head", head),
    ),
    "another stride": Case(
        r"parameter head\.weight is shape \(3, 8\), stride \(\d, \d\).* here, .*stride \(\d, \d\).* on rank 0",
        spoil=put("head.weight", lambda: nn.Parameter(torch.zeros(8, 3).t())),
        mend=put_back("head", head),
    ),
    "another dtype": Case(
        r"parameter head\.weight is .*dtype torch\.(bfloat16|float32).* here, .*(float32|bfloat16).* on rank 0",
        spoil=put("head", half_precision_head),
        mend=put_back("head", head),
    ),
    "a frozen layer": Case(
        r"parameter norm\.weight is .*(frozen|trained) here, .*(trained|frozen) on rank 0",
        spoil=one_frozen_layer,
        mend=unfrozen,
    ),
    "another order": Case(
        r"stands on rank 0 where parameter \w+\.weight stands here.*another order.*in the same order",
        spoil=other_order,
        mend=original_order,
    ),
    "another bucket size": Case(
        "option bucket_cap_mb is (0.002|3) here, (3|0.002) on rank 0. Make them equal", options={"bucket_cap_mb": 3}
    ),
    "other Inductor options": Case(
        r"option options is .* here, .* on rank 0",
        options={"options": {"max_autotune": True}},
        wrappers=("compile_ddp",),
    ),
    "strict": Case(r"option strict is .* here", options={"strict": True}, wrappers=("compile_ddp",)),
    "another COMPILED_DDP_MODE": Case(
        "COMPILED_DDP_MODE is (hooks|graph) here, (graph|hooks) on rank 0. Make them equal",
        environment={"COMPILED_DDP_MODE": "hooks"},
    ),
    "no module": Case(r"TypeError: \w+ wraps a torch\.nn\.Module, found NoneType", spoil=lambda _: None),
    "an unknown COMPILED_DDP_MODE": Case(
        "COMPILED_DDP_MODE must be 'graph' or 'hooks', found ''", environment={"COMPILED_DDP_MODE": ""}
    ),
    "a lazy parameter": Case(
        r"parameter head\.weight is uninitialised",
        spoil=put("head", lambda: nn.LazyLinear(3)),
        mend=initialise,
    ),
    "a negative bucket": Case("bucket_cap_mb must be a positive.*found -1", options={"bucket_cap_mb": -1}),
}


def _bad_on_one_rank(rank: int, wrapper: str, name: str, bad_rank: int) -> str:
    case = DIFFERENT_ON_ONE_RANK[name]
    return refuse_then_train(rank, wrapper, case, bad=rank == bad_rank, trained_by="EagerDDP")


@pytest.mark.parametrize("name", DIFFERENT_ON_ONE_RANK)
@pytest.mark.parametrize(("wrapper", "bad_rank"), [("compile_ddp", 2), ("EagerDDP", 2), ("compile_ddp", 0)])
def test_one_rank_that_differs_is_refused_on_every_rank(
    ranks3: RankPool, wrapper: str, name: str, bad_rank: int
) -> None:
    case = DIFFERENT_ON_ONE_RANK[name]
    if wrapper not in case.wrappers:
        pytest.skip(f"{wrapper} has no such option")
    messages = ranks3.run(_bad_on_one_rank, wrapper, name, bad_rank)
    for rank, message in enumerate(messages):
        assert re.search(case.says, message), message
        if not (rank == bad_rank and "RuntimeError" not in message):  # the bad rank may raise its own error
            assert "the model was not wrapped, on any rank" in message
            assert ("- rank 2: " in message) == (bad_rank == 2 or "here" in message)


def _one_rank_wraps_eagerly(rank: int) -> str:
    model = Mlp()
    message = message_of_refusal(lambda: wrap(BOTH[rank], model), model)
    train_one_step(EagerDDP(model), rank)
    return message


def _other_shape_without_init_sync(rank: int, wrapper: str) -> None:
    """torch's DDP compares nothing then."""
    with pytest.raises(
        RuntimeError, match=r"parameter weight is .*shape \([34], 5\).* here, .*shape \(3, 5\).* on rank 0"
    ):
        wrap(wrapper, nn.Linear(5, 3 + rank), init_sync=False)


@pytest.mark.parametrize("wrapper", BOTH)
def test_another_shape_is_refused_without_init_sync_too(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_other_shape_without_init_sync, wrapper)


def test_different_wrappers_are_refused_on_every_rank(ranks2: RankPool) -> None:
    for message in ranks2.run(_one_rank_wraps_eagerly):
        assert "wrapper is EagerDDP here, CompiledDDP on rank 0" in message


def _one_rank_has_another_torch(rank: int, unsupported: bool) -> str:
    model = Mlp()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and unsupported:
            check = torch_private.versions.check_torch_version
            patch.setattr(torch_private.versions, "check_torch_version", lambda: check("2.10.1"))
        elif rank == 1:
            patch.setattr(torch, "__version__", "2.12.0")
        message = message_of_refusal(lambda: compile_ddp(model, backend="aot_eager", smallest_graph_mb=0), model)
    train_one_step(EagerDDP(model), rank)
    return message


def test_different_torch_versions_are_refused_on_every_rank(ranks2: RankPool) -> None:
    for message in ranks2.run(_one_rank_has_another_torch, False):
        assert re.search(r"torch version is 2\.12\.0 here, .* on rank 0\. Make them equal", message)


def test_an_unsupported_torch_on_one_rank_is_refused_on_every_rank(ranks2: RankPool) -> None:
    for message in ranks2.run(_one_rank_has_another_torch, True):
        assert "compiled_ddp needs torch >= 2.11, found 2.10.1" in message


def _differ_in_a_subgroup(rank: int) -> str | None:
    subgroup = dist.new_group([0, 2])
    assert subgroup is not None
    if rank == 1:
        return None
    model = Mlp()
    if rank == 2:
        one_frozen_layer(model)
    return message_of_refusal(lambda: EagerDDP(model, process_group=subgroup), model)


def test_errors_call_ranks_of_a_subgroup_by_their_global_numbers(ranks3: RankPool) -> None:
    first, outside, last = ranks3.run(_differ_in_a_subgroup)
    assert outside is None
    assert first == last
    assert "- rank 2: parameter norm.weight" in last


class _Pass:
    """An object among Inductor's options: its repr shows an address."""


def _equal_options(rank: int) -> None:
    names = ["max_autotune", "post_grad_custom_pre_pass"]
    values = {"max_autotune": False, "post_grad_custom_pre_pass": _Pass()}
    options = {name: values[name] for name in (names if rank else reversed(names))}
    compile_ddp(Mlp(), backend="aot_eager", options=options, smallest_graph_mb=0).unwrap()


def test_objects_and_order_among_the_options_make_no_difference(ranks2: RankPool) -> None:
    ranks2.run(_equal_options)


# ---- no process group, no rank, no torch -----------------------------------------------------------------------------


def _without_process_group(rank: int, wrapper: str) -> str:
    model = Mlp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")  # or it would train alone
        with pytest.raises(RuntimeError) as caught:
            wrap(wrapper, model)
    assert hooks_on(model) == 0
    return str(caught.value)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_process_group_that_is_not_initialised_is_named_with_the_call_to_make(ranks2: RankPool, wrapper: str) -> None:
    for message in ranks2.run(_without_process_group, wrapper, process_group=False):
        assert "torch.distributed is not initialised: call torch.distributed.init_process_group()" in message
        assert "torchrun" in message


def _outside_of_the_group(rank: int) -> str:
    subgroup = dist.new_group([0])
    model = Mlp()
    assert "process_group must be a ProcessGroup" in message_of_refusal(lambda: EagerDDP(model, process_group=2), model)
    if rank == 0:
        train_alone = EagerDDP(model, process_group=subgroup)
        train_alone(torch.ones(2, 5)).sum().backward()
        message = ""
    else:
        message = message_of_refusal(lambda: EagerDDP(model, process_group=subgroup), model)
    train_one_step(EagerDDP(Mlp()), rank)
    return message


def test_a_rank_outside_of_the_group_is_told_so(ranks2: RankPool) -> None:
    member, outside = ranks2.run(_outside_of_the_group)
    assert member == ""
    assert "global rank 1 is not a member of process_group" in outside


class OfAnotherLibrary(dist.ProcessGroup):
    """As TorchFT's are: torch.distributed does not know it."""

    def __init__(self) -> None:
        super().__init__(0, 1)


def _a_group_that_torch_does_not_know(rank: int, wrapper: str) -> None:
    destroyed = dist.new_group([0, 1])
    dist.destroy_process_group(destroyed)
    for group in (OfAnotherLibrary(), destroyed):
        model = Mlp()
        with pytest.raises((TypeError, ValueError), match=r"one that torch\.distributed knows, of init_process_group"):
            wrappers([wrapper])[wrapper](model, process_group=group)
        assert hooks_on(model) == 0
    train_one_step(EagerDDP(Mlp()), rank)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_group_that_torch_does_not_know_is_told_so(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_a_group_that_torch_does_not_know, wrapper)


def _silent_rank(rank: int, wrapper: str, silent: int) -> str | None:
    if rank == silent:
        return None  # its process lives on until the others have returned
    model = Mlp()
    with pytest.raises(RuntimeError) as caught:
        wrap(wrapper, model)
    assert hooks_on(model) == 0
    return str(caught.value)


@pytest.mark.parametrize(("wrapper", "silent"), [("compile_ddp", 0), ("EagerDDP", 2)])
def test_a_rank_that_does_not_wrap_is_named_after_the_timeout(ranks3: RankPool, wrapper: str, silent: int) -> None:
    messages = ranks3.run(_silent_rank, wrapper, silent, collective_timeout_seconds=3)
    assert messages[silent] is None
    for message in messages:
        if message is not None:
            assert re.search(rf"waited 3 s for rank {silent} .*stayed silent", message), message
            assert "Every rank of the group must wrap the same models in the same order" in message


@pytest.mark.parametrize("version", ["2.10.1", "1.13.1"])
def test_a_torch_that_is_too_old_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch_private.versions.check_torch_version(version)
    message = str(caught.value)
    assert f"compiled_ddp needs torch >= 2.11, found {version}" in message
    assert "Install a torch that was tested, pip install 'torch>=2.11,<2.16'" in message


@pytest.mark.parametrize("version", ["2.16.0.dev20261101+cpu", "3.0.0"])
def test_a_newer_torch_that_has_all_private_names_is_warned_of(version: str) -> None:
    warning = torch_private.versions.check_torch_version(version)
    assert f"was tested on torch 2.11 to 2.15, found {version}" in warning and "it goes on" in warning


def test_a_newer_torch_is_refused_with_the_private_names_that_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a planted use": ("torch._C.nothing_of_this_name", "torch._no_module.of_this_name", "torch.Tensor")}
    monkeypatch.setattr(torch_private.names, "NAMES", {**torch_private.names.NAMES, **names})
    with pytest.raises(RuntimeError) as caught:
        torch_private.versions.check_torch_version("2.16.0")
    assert (
        "found 2.16.0, where private parts of torch that it uses have moved: torch._C.nothing_of_this_name (a planted "
        "use), torch._no_module.of_this_name (a planted use). Look for a newer compiled_ddp, or pip install"
    ) in str(caught.value)


def test_the_metadata_asks_for_the_oldest_torch_that_runs_and_refuses_no_newer_one() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, torch_private.versions.OLDEST))}" in project["dependencies"]


@pytest.mark.parametrize("version", ["2.11.0a0+git", "2.13.0+cpu", "2.14.1", "2.15.0+cu132"])
def test_tested_versions_of_torch_are_accepted(version: str) -> None:
    assert torch_private.versions.check_torch_version(version) == ""


# ---- wrapped already, and unwrap -------------------------------------------------------------------------------------


def _wrap_twice(rank: int, first: str, second: str) -> list[str]:
    groups = open_communicators()
    model = Mlp()
    ddp = wrap(first, model)
    train_one_step(ddp, rank)
    hooks = hooks_on(model)
    messages = []
    for what in (ddp, torch.compile(ddp, backend="eager")):
        with pytest.raises(ValueError, match="already") as caught:
            wrap(second, what)
        messages.append(str(caught.value))
    assert hooks_on(model) == hooks
    assert open_communicators() == groups + 1
    train_one_step(ddp, rank)  # the refusals have not harmed it

    assert ddp.unwrap() is model
    assert hooks_on(model) == 0
    assert open_communicators() == groups
    with pytest.raises(RuntimeError, match="has been unwrapped"):
        ddp(torch.ones(1, 5))

    again = wrap(second, model)
    assert ddp.unwrap() is model  # a second time: changes nothing, the module is another wrapper's now
    train_one_step(again, rank)
    train_one_step(again, rank)
    again.unwrap()
    assert open_communicators() == groups
    return messages


@pytest.mark.parametrize("second", BOTH)
@pytest.mark.parametrize("first", BOTH)
def test_a_wrapper_is_not_wrapped_and_its_model_is_once_it_is_unwrapped(
    ranks2: RankPool, first: str, second: str
) -> None:
    name = {"compile_ddp": "CompiledDDP", "EagerDDP": "EagerDDP"}[first]
    for messages in ranks2.run(_wrap_twice, first, second):
        assert messages == [f"the model is a {name} already: use it as it is, or wrap its .unwrap()."] * 2


def _unwrapped_model_is_local(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, Mlp())
    train_one_step(ddp, rank)
    model = ddp.unwrap()
    x = torch.full((2, 5), float(rank))
    model.zero_grad()
    local = local_gradients(model, lambda module: module(x).square().sum())
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, local[name])


@pytest.mark.parametrize("wrapper", BOTH)
def test_an_unwrapped_model_trains_alone(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_unwrapped_model_is_local, wrapper)


# ---- COMPILED_DDP_MODE and strict ------------------------------------------------------------------------------------


def _mode_hooks(rank: int) -> tuple[set[str], set[str], int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_DDP_MODE", "hooks")
        ddp = wrap("compile_ddp", Mlp())
    before = torch_private.for_tests.compiler_counters().get("stats", {}).get("unique_graphs", 0)
    for _ in range(3):
        train_one_step(ddp, rank)
    captured = torch_private.for_tests.compiler_counters().get("stats", {}).get("unique_graphs", 0) - before
    sections = ddp.plan.sections
    return {section.origin for section in sections}, {section.reason for section in sections}, captured


def test_compiled_ddp_mode_hooks_compiles_without_passes(ranks2: RankPool) -> None:
    for origins, reasons, captured in ranks2.run(_mode_hooks):
        assert origins == {"hooks"}
        assert reasons == {"COMPILED_DDP_MODE=hooks"}
        assert captured >= 1  # the model is compiled all the same


class PartlyEager(nn.Module):
    """Its head runs where Dynamo captures nothing, and nothing at all uses `idle`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.head = nn.Linear(4, 2)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.eager(torch.tanh(self.first(x)))

    @torch.compiler.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def _strict(rank: int) -> str:
    model = PartlyEager()
    ddp = wrap("compile_ddp", model, strict=True)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    with pytest.raises(RuntimeError) as caught:
        ddp(x).square().sum().backward()
    ddp.unwrap()
    assert hooks_on(model) == 0
    lenient = wrap("compile_ddp", model)
    lenient.zero_grad()
    expected = expected_mean(model, lambda module: module(x).square().sum())
    loss = lenient(x).square().sum()
    with pytest.warns(UserWarning, match="are reduced by hooks") as told:
        loss.backward()
    assert {each.filename for each in told} == {__file__}, "the user's line, not ours"
    for name, parameter in model.named_parameters():
        if name.startswith("idle"):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad.double(), expected[name])
    return str(caught.value)


def test_strict_raises_on_every_rank_where_hooks_would_reduce(ranks2: RankPool) -> None:
    for message in ranks2.run(_strict):
        assert "head.weight" in message
        assert "compile_ddp(strict=True) does not fall back" in message


def _strict_with_unused_parameters(rank: int) -> None:
    ddp = wrap("compile_ddp", Idle(), strict=True)
    for _ in range(2):
        ddp(torch.ones(4, 5)).square().sum().backward()
    assert {section.origin for section in ddp.plan.sections} == {"graph", "unused"}


def test_strict_takes_parameters_that_nothing_uses(ranks2: RankPool) -> None:
    ranks2.run(_strict_with_unused_parameters)


def _sparse_buffer_that_stays(rank: int, ignored: bool) -> None:
    model = Mlp()
    model.extra = WithSparseBuffer()
    if ignored:
        model._ddp_params_and_buffers_to_ignore = ["extra.table"]
    train_one_step(EagerDDP(model, broadcast_buffers=ignored), rank)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_sparse_buffer_that_no_one_broadcasts_is_taken(ranks2: RankPool, ignored: bool) -> None:
    ranks2.run(_sparse_buffer_that_stays, ignored)
