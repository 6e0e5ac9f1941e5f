"""transformers' Trainer: accumulation, clipping, a scheduler, checkpoints, a resume from torch's, evaluation."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from both_ways import BACKENDS, Outcome, compare, copies, group_at_end, report
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import compiled_ddp
from compiled_ddp.integrations import transformers as ours


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def loop(
    folder: str, *, resume: str | None = None, make: Callable[..., Trainer] = Trainer, **arguments: Any
) -> Outcome:
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    trainer = make(
        model,
        TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            save_strategy="steps",
            save_steps=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Texts(),
        eval_dataset=Texts(),
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    return Outcome(type(trainer.model_wrapped), losses, copies(model.state_dict()))


def adapter(backend: str) -> Callable[..., Trainer]:
    return functools.partial(ours.Trainer, ddp_options={"backend": backend})


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "smoothed": {"label_smoothing_factor": 0.1},
    "checkpointed": {"gradient_checkpointing": True},
}

with group_at_end():
    folder = sys.argv[1]
    for case, arguments in CASES.items():
        run = functools.partial(loop, f"{folder}/{case}", **arguments)
        compare(case, run, lambda backend, run=run: run(make=adapter(backend)))
    uninterrupted = loop(f"{folder}/torchs")
    for backend in BACKENDS:
        resume = functools.partial(loop, f"{folder}/{backend}", resume=f"{folder}/torchs/checkpoint-4")
        with compiled_ddp.replace_ddp(backend=backend):
            resumed = resume()
        report("resumed from torch's checkpoint", "replaced", backend, uninterrupted, resumed)
        report("resumed from torch's checkpoint", "adapter", backend, uninterrupted, resume(make=adapter(backend)))
        made = loop(f"{folder}/ours/{backend}", make=adapter(backend))
        torchs = loop(f"{folder}/back/{backend}", resume=f"{folder}/ours/{backend}/checkpoint-4")
        report("torch's resumed from ours", "adapter", backend, torchs, made)
