"""Ignite's supervised trainer: auto_model wraps, gradients are accumulated without no_sync, a checkpoint goes back."""

import sys

import ignite.distributed as idist
import torch
from both_ways import Outcome, compare, copies
from ignite.engine import create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp.integrations import torch as ours


def loop(folder: str, backend: str | None = None) -> Outcome:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    ddp = idist.auto_model(model) if backend is None else ours.DistributedDataParallel(model, backend=backend)
    optimizer = idist.auto_optim(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    trainer = create_supervised_trainer(ddp, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=2)
    torch.manual_seed(1 + idist.get_rank())
    trainer.run([(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(6)], max_epochs=2)
    saver = DiskSaver(folder, create_dir=True, require_empty=False)
    Checkpoint({"model": ddp}, saver, filename_pattern="{name}.pt")(trainer)
    idist.barrier()
    saved = torch.load(f"{folder}/model.pt")
    assert saved.keys() == model.state_dict().keys(), "Ignite unwraps a DistributedDataParallel"
    Checkpoint.load_objects({"model": ddp}, {"model": saved})
    assert isinstance(ddp, DistributedDataParallel)
    return Outcome(type(ddp), [trainer.state.output], copies(ddp.module.state_dict()))


def training(_: int) -> None:
    compare("fp32", lambda: loop(sys.argv[1]), lambda backend: loop(sys.argv[1], backend))


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training)
