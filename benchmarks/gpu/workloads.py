"""What is trained where the workloads of benchmarks/tasks.py are too small to fill a GPU, and in small in CI."""

from functools import partial

import torch

from benchmarks.data import byte_batches, digit_batches
from benchmarks.tasks import FORESEEN, WORDS, WORKLOADS
from benchmarks.workload import Workload


def _mlp(size: str, batch: int) -> Workload:
    return Workload(
        name=f"{size} mlp",
        model_module="benchmarks.models",
        model_factory=f"{size}_mlp",
        batches=partial(digit_batches, batch=batch),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True),
    )


def _gpt(size: str, batch: int, context: int) -> Workload:
    return Workload(
        name=f"{size} gpt",
        model_module="benchmarks.models",
        model_factory=f"{size}_gpt",
        batches=partial(byte_batches, batch=batch, context=context),
        optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=True),
    )


SIZES = ("large", "tiny")
SIZED = (_mlp("large", 8192), _gpt("large", 16, 512), _mlp("tiny", 8), _gpt("tiny", 2, 16))
ALL = {**WORKLOADS, **FORESEEN, WORDS.name: WORDS, **{workload.name: workload for workload in SIZED}}


def of_size(size: str) -> list[str]:
    """The names of the models of this size: an MLP and a stack of GPT blocks."""
    return [f"{size} mlp", f"{size} gpt"]


def of_table(size: str) -> list[str]:
    """The names of those in the benchmark's table: two of benchmarks/compare.py's, or the tiny ones in their place."""
    return ["gpt", "linears"] if size == "large" else of_size(size)
