"""`submodules=` of the strategies for Lightning, on what Lightning's DDPStrategy calls: it need not be installed."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F

from compiled_ddp.integrations.lightning_strategies import TrainsWithOurs
from ranks import RankPool


class _Lightnings:
    """What of DDPStrategy is called here (lightning 2.6.6)."""

    def __init__(self, device: str = "cpu", comm_state: Any = None, comm_hook: Any = None, **ddp_kwargs: Any) -> None:
        self._ddp_kwargs, self.root_device = ddp_kwargs, torch.device(device)
        self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper = comm_state, comm_hook, None
        self.model: Any = None
        self.lightning_module: Any = None

    def determine_ddp_device_ids(self) -> None:
        """Its answer for a CPU."""

    def _register_ddp_hooks(self) -> None:
        assert self.root_device.type != "cuda" or isinstance(self.model, nn.parallel.DistributedDataParallel)

    def configure_ddp(self, module: Any) -> None:
        strategy: Any = self
        self.lightning_module = module
        self.model = strategy._setup_model(module)
        self._register_ddp_hooks()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
        optimizer.step(closure)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        yield

    def teardown(self) -> None:
        self.model = self.lightning_module


def do_nothing() -> None:
    """The closure of a step under manual optimisation."""


class Strategy(TrainsWithOurs, _Lightnings):
    """As `CompiledDDPStrategy`."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head, self.tied = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 4)
        self.tied.weight = self.net.weight
        self.tied.bias.requires_grad_(False)
        self.head.requires_grad_(False)
        self.register_buffer("noise", torch.randn(4))
        self.register_buffer("own", torch.randn(4))
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own"])


def _outside(rank: int) -> None:
    torch.manual_seed(rank)
    model = Model()
    own, noise = model.own.clone(), model.noise.clone()
    strategy = Strategy(backend="hooks", submodules=["net"])
    strategy.configure_ddp(model)
    for tensor in (*model.net.parameters(), *model.head.parameters(), model.tied.bias, model.noise):
        ranks = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(ranks, tensor.detach())
        assert torch.equal(*ranks)
    assert torch.equal(model.own, own) and torch.equal(model.noise, noise) == (rank == 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for unfrozen in (False, True):
        model.head.requires_grad_(unfrozen)
        model.head(model.net(torch.randn(2, 3))).sum().backward()
        before = model.net.weight.detach().clone()
        if unfrozen:
            with pytest.raises(RuntimeError, match=r"\['head.weight', 'head.bias'\] require gradients by now"):
                strategy.optimizer_step(optimizer, do_nothing)
        else:
            strategy.optimizer_step(optimizer, do_nothing)
        assert torch.equal(before, model.net.weight) == unfrozen
    strategy.teardown()
    assert type(model.net) is nn.Linear
    strategy.optimizer_step(optimizer, do_nothing)


def test_what_no_part_holds_begins_as_rank_0s_and_may_not_be_trained_later(ranks2: RankPool) -> None:
    ranks2.run(_outside)


@pytest.mark.parametrize("hook", [None, default_hooks.fp16_compress_hook])
def test_on_cuda_lightnings_communication_hook_is_registered_on_each_part(hook: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    strategy = Strategy("cuda", comm_hook=hook, backend="hooks", submodules=["0", "1"])
    registered: list[Any] = []
    wrapper = SimpleNamespace(register_comm_hook=lambda state, hook: registered.append((state, hook)))
    strategy.model, strategy._parts = model, [SimpleNamespace(wrapper=wrapper)] * 2  # type: ignore[list-item]
    strategy._register_ddp_hooks()
    assert registered == ([] if hook is None else [(None, hook)] * 2)


def test_one_state_of_a_communication_hook_is_not_given_to_several_parts(ranks2: RankPool) -> None:
    ranks2.run(_one_state)


def _one_state(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    hook = {"comm_state": powerSGD_hook.PowerSGDState(None), "comm_hook": powerSGD_hook.powerSGD_hook}
    with pytest.raises(ValueError, match=r"ddp_comm_state is a PowerSGDState, which keeps .*: name one part"):
        Strategy("cuda", **hook, backend="hooks", submodules=["0", "1"]).configure_ddp(model)


# ---- parts that are used otherwise than by a call --------------------------------------------------------------------

X = torch.arange(6.0).view(2, 3) / 6


class Net(nn.Module):
    """`head` has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.again = nn.ModuleList([self.head])


USES = {
    "its weight": lambda net: F.linear(net.body(X), net.head.weight, net.head.bias),
    "its module": lambda net: net.head.module(net.body(X)),
    "a method": lambda net: net.head.module.forward(net.body(X)),
}


def _steps(rank: int, backend: str, use: str | None, called_steps: int) -> None:
    """Steps that call the head, and one that uses it in another way."""
    net = Net()
    strategy = Strategy(backend=backend, submodules=["body", "head"])
    strategy.configure_ddp(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(called_steps + 1):

        def closure(step: int = step) -> None:
            optimizer.zero_grad()
            called = use is None or step < called_steps
            outputs = net.head(net.body(X)) if called else USES[use](net)
            strategy.backward(outputs.square().mean() * (rank + 1))

        before = net.head.weight.detach().clone()
        if use is None or step < called_steps:
            strategy.optimizer_step(optimizer, closure)
            continue
        with pytest.raises(RuntimeError, match=r"\['weight', 'bias'\] of the part 'head' .* no backward has averaged"):
            strategy.optimizer_step(optimizer, closure)
        assert torch.equal(net.head.weight, before), "it has not stepped"
    strategy.teardown()


@pytest.mark.parametrize("called_steps", [0, 4])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", ["hooks", "aot_eager"])
def test_a_part_that_is_used_without_a_call_is_named_before_it_steps(
    ranks2: RankPool, backend: str, use: str, called_steps: int
) -> None:
    ranks2.run(_steps, backend, use, called_steps)


def _other_name(rank: int, backend: str) -> None:
    net = Net()
    head = net.head
    strategy = Strategy(backend=backend, submodules=["again.0", "body", "head"])
    strategy.configure_ddp(net)
    assert len(strategy._parts) == 2
    assert net.head is net.again[0] is not head
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        strategy.backward((net.again[0] if step % 2 else net.head)(net.body(X) * (rank + 1)).sum())
        ranks = [torch.empty(2, 4) for _ in range(2)]
        dist.all_gather(ranks, net.head.weight.grad)
        assert torch.equal(*ranks)
        strategy.optimizer_step(optimizer, do_nothing)
    strategy.teardown()
    assert net.head is net.again[0] is head


@pytest.mark.parametrize("backend", ["hooks", "aot_eager"])
def test_a_part_with_several_names_is_reduced_under_each(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_other_name, backend)


def _adversaries(rank: int, backend: str) -> None:
    """Two optimizers, one part frozen at a time or not, accumulation, gradients that stay, a step that was skipped."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    strategy = Strategy(backend=backend, submodules=["g", "d"])
    strategy.configure_ddp(net)
    optimizers = {name: torch.optim.SGD(net[name].parameters(), lr=0.1, momentum=0.9) for name in "gd"}
    for step in range(6):
        for name, optimizer in optimizers.items():
            for other in "gd":
                net[other].requires_grad_(step % 2 == 0 or other == name)
            for local in (True, False):
                with strategy.block_backward_sync() if local else contextlib.nullcontext():
                    fake = net["g"](X + rank)
                    strategy.backward(net["d"](fake if name == "g" else fake.detach()).sum())
            strategy.optimizer_step(optimizer, do_nothing)
            optimizer.zero_grad(set_to_none=step < 3)
        if step == 4:  # a part of a step that this module leaves out, and one that it takes twice
            strategy.optimizer_step(optimizers["g"], do_nothing)
            net["g"].requires_grad_(True)
            strategy.backward(net["g"](X).sum())
            strategy.optimizer_step(optimizers["g"], do_nothing)
            strategy.optimizer_step(optimizers["g"], do_nothing)
    strategy.teardown()


@pytest.mark.parametrize("backend", ["hooks", "aot_eager"])
def test_loops_that_call_their_parts_raise_nothing(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_adversaries, backend)
    ranks2.run(_steps, backend, None, 4)


def _only_in_a_local_batch(rank: int, backend: str) -> None:
    net = Net()
    strategy = Strategy(backend=backend, submodules=["body", "head"])
    strategy.configure_ddp(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with strategy.block_backward_sync():
        strategy.backward(net.head(net.body(X)).sum() * (rank + 1))
    strategy.backward(net.body(X).sum())
    with pytest.raises(RuntimeError, match=r"the part 'head' .* or not in the last batch of an accumulation"):
        strategy.optimizer_step(optimizer, do_nothing)
    net.zero_grad()
    strategy.optimizer_step(optimizer, do_nothing)
    strategy.teardown()


@pytest.mark.parametrize("backend", ["hooks", "aot_eager"])
def test_a_part_that_the_last_batch_of_an_accumulation_leaves_out_is_named(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_only_in_a_local_batch, backend)


# ---- what no part holds ----------------------------------------------------------------------------------------------


def _buffers_outside(rank: int) -> None:
    for options, rank_0s in (
        ({}, True),
        ({"broadcast_buffers": None}, True),
        ({"broadcast_buffers": False}, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": False}, True),
        ({"forward_sync_buffers": False}, True),
        ({"init_sync": False}, False),
    ):
        net = Net()
        net.register_buffer("own", torch.tensor(float(rank)))
        strategy = Strategy(backend="hooks", submodules=["body", "head"], **options)
        strategy.configure_ddp(net)
        assert net.own.item() == (0 if rank_0s else rank), options
        strategy.teardown()


def test_buffers_that_no_part_holds_begin_as_ddps_options_say(ranks2: RankPool) -> None:
    ranks2.run(_buffers_outside)
