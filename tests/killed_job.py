"""A training job for torchrun that goes on from its last checkpoint: `killed_job.py FOLDER KIND [STEP]`.

In its first start rank 1 kills itself within the backward of STEP, where rank 0 waits for it.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointed import batch, made, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEPS = 6


def main(folder: Path, kind: str, killed_in: int | None) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, optimizer = made(kind, seed=restarts)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=20)
    torch.manual_seed(rank)

    def state(step: int) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        random = {f"rank {rank}": torch.get_rng_state()}
        parts = {"model": of_model, "optimizer": of_optimizer, "schedule": schedule.state_dict(), "random": random}
        return parts | {"step": torch.tensor(step)}

    latest = folder / "latest"
    first = 0
    if latest.exists():
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=folder / latest.read_text())
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        schedule.load_state_dict(loaded["schedule"])
        torch.set_rng_state(loaded["random"][f"rank {rank}"])
        first = int(loaded["step"])
    for step in range(first, STEPS):
        tokens = batch(rank, step)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        if (rank, step, restarts) == (1, killed_in, 0):
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        name = f"step {step + 1}"
        dcp.save(
            state(step + 1),
            checkpoint_id=folder / name,
            planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        )
        if rank == 0:  # dcp.save has returned: every rank has written its part
            (folder / "new").write_text(name)
            (folder / "new").replace(latest)
    ended = {"first": first, "restarts": restarts, "values": values(model, optimizer), "random": torch.get_rng_state()}
    torch.save(ended, folder / f"ended {rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
