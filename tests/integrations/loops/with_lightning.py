"""Lightning's Trainer with strategy="ddp": automatic and manual optimisation, BatchNorm, clipping, validation."""

import functools
import sys
from typing import Any

import lightning
import torch
from both_ways import Outcome, compare, copies, group_at_end
from torch import Tensor, nn

from compiled_ddp.integrations.lightning import CompiledDDPStrategy


class Classifier(lightning.LightningModule):
    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loop(folder: str, precision: Any, *, manual: bool, strategy: Any = "ddp") -> Outcome:
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
    model = Classifier(manual=manual)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **({} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    )
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(model, batches, batches)
    wrapper = WRAPPERS.pop()
    return Outcome(wrapper, [trainer.callback_metrics["validation"].item()], copies(model.state_dict()))


WRAPPERS: list[type] = []  # what the strategy has made: it takes it down at the end of `fit`
_setup_model = lightning.pytorch.strategies.DDPStrategy._setup_model


def _noting(strategy: Any, model: nn.Module) -> nn.Module:
    wrapped = _setup_model(strategy, model)
    WRAPPERS.append(type(wrapped))
    return wrapped


lightning.pytorch.strategies.DDPStrategy._setup_model = _noting

with group_at_end():
    for manual in (False, True):
        for precision in ("32-true", "bf16-mixed"):
            run = functools.partial(loop, sys.argv[1], precision, manual=manual)
            compare(
                f"{'manual' if manual else 'automatic'}, {precision}",
                run,
                lambda backend, run=run: run(strategy=CompiledDDPStrategy(backend=backend)),
            )
