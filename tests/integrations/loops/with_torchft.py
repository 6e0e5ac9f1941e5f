"""Two replicas under TorchFT, one rank each: torchft's class, and ours with a hook that asks the manager.

Started as an ordinary script, which is the first replica, keeps the lighthouses and starts the second one. After two
steps the second replica is lost: its manager ends, and it comes back with another model and a manager that heals it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn
from torchft.coordination import LighthouseServer

import compiled_ddp
from compiled_ddp.integrations.torch import DistributedDataParallel

PATIENCE = timedelta(seconds=40)
LOST_BEFORE, STEPS = 2, 5


class Model(nn.Module):
    """Its gradients do not arrive in the reverse order of registration."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.last, self.first, self.middle = nn.Linear(16, 4), nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def ask(manager: torchft.Manager, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What torchft's class does with a bucket, except that a failed all-reduce is left to `should_commit()`."""
    manager.allreduce(bucket.buffer()).wait()
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def asking(ddp: nn.Module, manager: torchft.Manager) -> nn.Module:
    ddp.register_comm_hook(manager, ask)
    return ddp


def torchs_in_its_place(manager: torchft.Manager, model: nn.Module) -> nn.Module:
    with compiled_ddp.replace_ddp(backend="aot_eager"):
        return torchft.DistributedDataParallel(manager, model)


SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0005}  # several buckets
WRAPPERS: dict[str, Callable[[torchft.Manager, nn.Module], nn.Module]] = {
    "torchft": torchft.DistributedDataParallel,
    "torchft within replace_ddp": torchs_in_its_place,
    "EagerDDP": lambda manager, model: asking(compiled_ddp.EagerDDP(model, **SMALL), manager),
    "compile_ddp": lambda m, model: asking(compiled_ddp.compile_ddp(model, backend="aot_eager", **SMALL), m),
    "class": lambda m, model: asking(DistributedDataParallel(model, backend="aot_eager", **SMALL), m),
}


def loss_of(model: nn.Module, replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * replica + step)
    inputs, targets = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
    return nn.functional.mse_loss(model(inputs), targets)


def by_hand() -> list[Tensor]:
    """Mean gradients, but those of the first replica alone in the step in which the second one heals."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        replicas = (0,) if step == LOST_BEFORE else (0, 1)
        losses = [loss_of(model, replica, step) for replica in replicas]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class Life:
    """A replica from its start to its end, or to where it is lost."""

    def __init__(self, wrapper: str, replica: int, lighthouse: str, store: dist.TCPStore, *, seed: int) -> None:
        self.model = Model(seed)
        self._replica, self._inner = replica, torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{replica}",
            init_sync=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            state_dict=lambda: {"model": self.model.state_dict(), "optimizer": self._inner.state_dict()},
            load_state_dict=self._heal,
        )
        self.ddp = WRAPPERS[wrapper](self.manager, self.model)
        self._optimizer = torchft.Optimizer(self.manager, self._inner)

    def _heal(self, state: dict[str, dict[str, object]]) -> None:
        self.model.load_state_dict(state["model"])
        self._inner.load_state_dict(state["optimizer"])

    def train(self, until: int) -> None:
        while (step := self.manager.current_step()) < until:
            self._optimizer.zero_grad()
            loss_of(self.ddp, self._replica, step).backward()
            if error := self.manager.errored():
                raise RuntimeError(f"replica {self._replica}, step {step}") from error.original_exception
            self._optimizer.step()


def live(replica: int, folder: Path, lighthouses: dict[str, str]) -> dict[str, nn.Module]:
    """The wrappers when all is over, their parameters in a file."""
    wrappers = {}
    for number, (wrapper, lighthouse) in enumerate(lighthouses.items()):
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=0, world_size=1, timeout=PATIENCE)
        life = Life(wrapper, replica, lighthouse, store, seed=0)
        life.train(until=LOST_BEFORE)
        if replica == 1:
            life.manager.shutdown(wait=False)
            life = Life(wrapper, replica, lighthouse, store, seed=9)
        life.train(until=STEPS)
        torch.save([parameter.detach() for parameter in life.model.parameters()], folder / f"replica{replica}.{number}")
        life.manager.shutdown(wait=False)
        dist.destroy_process_group()
        wrappers[wrapper] = life.ddp
    return wrappers


def report(folder: Path, wrappers: dict[str, nn.Module]) -> None:
    expected, torchfts = by_hand(), torch.load(folder / "replica0.0")
    for number, (wrapper, ddp) in enumerate(wrappers.items()):
        here, there = (torch.load(folder / f"replica{replica}.{number}") for replica in (0, 1))
        line = {
            "case": wrapper,
            "type": f"{type(ddp).__module__}.{type(ddp).__name__}",
            "replicas agree": all(map(torch.equal, here, there)),
            "as torchft": all(map(torch.equal, here, torchfts)),
            "apart": max((one - other).abs().max().item() for one, other in zip(here, expected, strict=True)),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        live(1, folder, json.loads(sys.argv[2]))
        sys.exit()
    # Both replicas are in every quorum; one that is lost is not waited for.
    servers = {wrapper: LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200) for wrapper in WRAPPERS}
    lighthouses = {wrapper: server.address() for wrapper, server in servers.items()}
    with subprocess.Popen([sys.executable, __file__, str(folder), json.dumps(lighthouses)]) as other:
        try:
            wrappers = live(0, folder, lighthouses)
            assert other.wait(PATIENCE.total_seconds()) == 0
        finally:
            other.kill()
    report(folder, wrappers)
