"""`submodules=` of the strategies for Lightning, on what Lightning's DDPStrategy calls: it need not be installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

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

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def teardown(self) -> None:
        self.model = self.lightning_module


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
                strategy.optimizer_step(optimizer)
        else:
            strategy.optimizer_step(optimizer)
        assert torch.equal(before, model.net.weight) == unfrozen
    strategy.teardown()
    assert type(model.net) is nn.Linear
    strategy.optimizer_step(optimizer)


def test_what_no_part_holds_begins_as_rank_0s_and_may_not_be_trained_later(ranks2: RankPool) -> None:
    ranks2.run(_outside)


@pytest.mark.parametrize("hook", [None, default_hooks.fp16_compress_hook])
def test_on_cuda_lightnings_communication_hook_is_registered_on_each_part(hook: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    strategy = Strategy("cuda", comm_hook=hook, backend="hooks", submodules=["0", "1"])
    registered: list[Any] = []
    wrapper = SimpleNamespace(register_comm_hook=lambda state, hook: registered.append((state, hook)))
    strategy.model, strategy._parts = model, [(model, name, wrapper) for name in ("0", "1")]  # type: ignore[misc]
    strategy._register_ddp_hooks()
    assert registered == ([] if hook is None else [(None, hook)] * 2)


def test_one_state_of_a_communication_hook_is_not_given_to_several_parts(ranks2: RankPool) -> None:
    ranks2.run(_one_state)


def _one_state(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    hook = {"comm_state": powerSGD_hook.PowerSGDState(None), "comm_hook": powerSGD_hook.powerSGD_hook}
    with pytest.raises(ValueError, match=r"ddp_comm_state is a PowerSGDState, which keeps .*: name one part"):
        Strategy("cuda", **hook, backend="hooks", submodules=["0", "1"]).configure_ddp(model)
