"""Ray Train with two workers: torch's class of `prepare_model`, ours in its place, and ours around what it only moves.

Started as an ordinary script: Ray starts the workers, and what it started ends with the script.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from both_ways import Outcome, compare, copies
from torch import nn

from compiled_ddp import EagerDDP, compile_ddp


def wrapped(model: nn.Module, backend: str | None) -> nn.Module:
    """As Ray wraps it (None), or only moved to the device by Ray and wrapped by us."""
    if backend is None:
        return ray.train.torch.prepare_model(model)
    model = ray.train.torch.prepare_model(model, parallel_strategy=None)
    return EagerDDP(model) if backend == "hooks" else compile_ddp(model, backend=backend)


def loop(backend: str | None = None) -> Outcome:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)  # rank 0's parameters are the ones that count
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    ddp = wrapped(model, backend)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(10 + rank)
    losses = []
    for _ in range(3):
        inputs, targets = torch.randn(4, 8, generator=batches), torch.randn(4, 4, generator=batches)
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Outcome(type(ddp), losses, copies(model.state_dict()))


def training(config: dict[str, str]) -> None:
    """What each worker runs. What it prints would reach the script with Ray's prefix: rank 0's lines go to a file."""
    rank = ray.train.get_context().get_world_rank()
    with Path(config["folder"], f"lines{rank}").open("w") as lines, contextlib.redirect_stdout(lines):
        compare("fp32", loop, loop)


def train_with(function: Callable[[dict[str, str]], None], folder: str) -> None:
    trainer = ray.train.torch.TorchTrainer(
        function,
        train_loop_config={"folder": folder},
        torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=60),
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=ray.train.RunConfig(storage_path=folder),
    )
    trainer.fit()


if __name__ == "__main__":
    folder = sys.argv[1]
    # Ray's sockets are in its folder, and a socket's path is short: not pytest's folder.
    with tempfile.TemporaryDirectory(prefix="ray-") as sockets:
        ray.init(
            address="local",  # never a cluster that is there already
            num_cpus=3,  # the two workers, and one to spare for the trainer itself
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            _temp_dir=sockets,
        )
        try:
            train_with(training, folder)
        finally:
            ray.shutdown()
    print(Path(folder, "lines0").read_text(), end="")
