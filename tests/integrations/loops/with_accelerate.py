"""An ordinary loop of Accelerate: accumulation, clipping, a scheduler, BatchNorm, a checkpoint, no_sync by hand."""

import functools
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from both_ways import Outcome, compare, copies, group_at_end
from torch import nn

from compiled_ddp.integrations import accelerate as ours


def loop(precision: str, folder: str, make: Callable[..., Accelerator] = Accelerator) -> Outcome:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = make(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=4), scheduler
    )
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    with accelerator.no_sync(model):
        accelerator.backward(model(x).float().sum())
        late = model(x).float().square().sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(late)
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    assert type(accelerator.unwrap_model(model)) is nn.Sequential
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return Outcome(type(model), losses, copies(accelerator.get_state_dict(model) | gradients))


with group_at_end():
    for precision in ("no", "bf16"):
        run = functools.partial(loop, precision, sys.argv[1])
        compare(precision, run, lambda backend, run=run: run(functools.partial(ours.Accelerator, backend=backend)))
