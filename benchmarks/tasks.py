"""The workloads of this project. A comparison of your own model needs one more entry like these."""

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.data import byte_batches, digit_batches, masked_batches, word_batches
from benchmarks.workload import Workload

GPT = Workload(
    name="gpt",
    model_module="benchmarks.models",
    model_factory="GPT",
    batches=partial(byte_batches, batch=4, context=128),
    optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True),
)
CONV = Workload(
    name="conv",
    model_module="benchmarks.models",
    model_factory="DigitsNet",
    batches=partial(digit_batches, batch=64),
    optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
)
LINEARS = Workload(
    name="linears",
    model_module="benchmarks.models",
    model_factory="Linears",
    batches=partial(digit_batches, batch=64),
    optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
)
MANY_PARAMETERS = Workload(
    name="many_parameters",
    model_module="benchmarks.models",
    model_factory="ManyParameters",
    batches=partial(digit_batches, batch=16),
    optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True),
)
SWITCH = Workload(
    name="switch",
    model_module="benchmarks.models",
    model_factory="Switch",
    batches=partial(byte_batches, batch=2, context=32),
    optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
    find_unused_parameters=True,
)
LLAMA = Workload(
    name="llama",
    model_module="benchmarks.models",
    model_factory="Llama",
    batches=partial(byte_batches, batch=4, context=128),
    optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True),
)
BERT = Workload(
    name="bert",
    model_module="benchmarks.models",
    model_factory="Bert",
    batches=partial(masked_batches, batch=4, context=128),
    optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.01, fused=True),
)
MIXER = Workload(  # the planner was not developed on it
    name="mixer",
    model_module="benchmarks.models",
    model_factory="Mixer",
    batches=partial(digit_batches, batch=32),
    optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
)
WORDS = Workload(
    name="words",
    model_module="benchmarks.models",
    model_factory="word_llama",
    batches=partial(word_batches, batch=4, context=128, vocabulary=50_000),
    optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
)
WORKLOADS = {workload.name: workload for workload in (GPT, CONV, LINEARS, MANY_PARAMETERS, SWITCH)}
FORESEEN = {workload.name: workload for workload in (GPT, CONV, LLAMA, BERT, MIXER)}  # by `benchmarks.plan_sizes`


@dataclass(frozen=True)
class Extent:
    """How long a workload is measured: the shorter its step, the more of them a median needs."""

    warmup: int  # steps; in `switch` Dynamo still compiles while the sizes of its batches are new to it
    quick: int  # rounds
    full: int


EXTENTS = {
    "gpt": Extent(warmup=3, quick=15, full=40),
    "conv": Extent(warmup=3, quick=60, full=200),
    "linears": Extent(warmup=30, quick=400, full=1000),
    "many_parameters": Extent(warmup=10, quick=60, full=200),
    "switch": Extent(warmup=40, quick=100, full=300),
    "llama": Extent(warmup=3, quick=12, full=30),
    "bert": Extent(warmup=3, quick=12, full=30),
    "mixer": Extent(warmup=3, quick=12, full=30),
    "words": Extent(warmup=3, quick=8, full=20),
}
