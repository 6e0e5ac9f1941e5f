"""torchtitan's Trainer on CPU: parallelize_fn wraps, with accumulation, a loss in chunks, validation, and checkpoints.

Its smallest Llama, cut to two layers. The package brings no tokenizer and no data, so both are made here. Attention is
not the default, FlexAttention, which has no backward on CPU.
"""

import functools
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import titan_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from both_ways import BACKENDS, Outcome, copies, group_at_end, report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from compiled_ddp import EagerDDP, compile_ddp

STEPS, VOCABULARY, SEQUENCE = 4, 2048, 16


def batch(rank: int, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Ranks and batches have different numbers of tokens that count."""
    source = torch.Generator().manual_seed(1000 * rank + number)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=source)
    labels = tokens[:, 1:].clone()
    labels[0, : 3 * rank + number % 2] = -100
    return {"input": tokens[:, :-1].contiguous(), "positions": torch.arange(SEQUENCE).repeat(2, 1)}, labels


class Batches(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True  # which the Validator asks for

    def __init__(self, config: Config, *, dp_rank: int, **others: Any) -> None:
        self.rank, self.number = dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            self.number += 1
            yield batch(self.rank, self.number)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Metrics(MetricsProcessor):
    """Keeps what it logs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__(config, **others)
        self.steps = list[dict[str, float]]()
        self.validated = list[float]()

    def log(self, step: int, mean: float, largest: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        super().log(step, mean, largest, norm, extra_metrics)
        self.steps.append({"mean": mean, "largest": largest, "norm": norm, **extra_metrics})

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        super().log_validation(loss, step, extra_metrics)
        self.validated.append(loss)


class OfAMean(Trainer):
    """For gradients that are averaged: backward is of the loss times the number of ranks, what is logged is not."""

    def forward_backward_step(self, *, global_valid_tokens: Tensor, **others: Any) -> Tensor:
        ranks = self.parallel_dims.dp_replicate
        return super().forward_backward_step(global_valid_tokens=global_valid_tokens / ranks, **others) / ranks


class TorchsDDP(DistributedDataParallel):
    """With the method that the Trainer calls on what parallelize_fn returns."""

    def init_weights(self, **others: Any) -> None:
        self.module.init_weights(**others)


Wrap = Callable[[nn.Module], nn.Module]


def averaged(backend: str) -> Wrap:
    return EagerDDP if backend == "hooks" else functools.partial(compile_ddp, backend=backend)


def summed(backend: str) -> Wrap:
    return functools.partial(averaged(backend), reduction="sum")


@dataclass(frozen=True)
class Case:
    """What the trainers of a case have in common."""

    batches: int = 1  # of a rank, for a step
    # The debug model's own loss, which applies lm_head itself, to a part of the sequence at a time.
    chunks: bool = False
    tied: bool = False  # one tensor for tok_embeddings and lm_head


def configured(case: Case, wrap: Wrap | None, *, folder: str, steps: int, checkpoints: bool) -> Trainer.Config:
    """`wrap` None leaves torchtitan's own data parallelism, which is fully_shard with shards of one rank."""
    config = llama3_debugmodel()
    spec = config.model_spec
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if case.tied:
        spec.model.enable_weight_tying, spec.model.tok_embeddings.param_init = True, {"weight": skip_param_init}

    def parallelize(model: nn.Module, *, ac_config: Any, dump_folder: str, **others: Any) -> nn.Module:
        ac_config.build(dump_folder=dump_folder).apply(model)
        model.to_empty(device="cpu")
        if case.tied:
            model.init_weights()  # ties what to_empty has untied; the Trainer calls both again
        model._skip_lm_head = case.chunks  # the Trainer says so to what is returned here
        return wrap(model)

    if wrap is not None:
        spec.parallelize_fn = parallelize
    if not case.chunks:
        config.loss = CrossEntropyLoss.Config()
    config.dump_folder, config.tokenizer, config.dataloader = folder, NoTokenizer.Config(), Batches.Config()
    config.metrics = Metrics.Config(log_freq=1)
    config.validator = Validator.Config(enable=True, freq=STEPS, steps=2, dataloader=Batches.Config())
    config.optimizer.implementation = "foreach"
    config.lr_scheduler.warmup_steps, config.lr_scheduler.total_steps = 1, 2 * STEPS
    config.training.local_batch_size, config.training.global_batch_size = 2, 4 * case.batches
    config.training.seq_len, config.training.steps = SEQUENCE, steps
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree = 2, 1
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable, config.checkpoint.interval = checkpoints, STEPS // 2
    config.debug.seed = 5
    return config


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """By the bare model's names, and whole where fully_shard has made them DTensors."""
    state = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
    return copies(
        {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    )


def loop(
    case: Case,
    wrap: Wrap | None,
    make: type[Trainer] = Trainer,
    *,
    folder: str = sys.argv[1],
    steps: int = STEPS,
    checkpoints: bool = False,
) -> Outcome:
    trainer = make(configured(case, wrap, folder=folder, steps=steps, checkpoints=checkpoints))
    without_sleep = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    try:
        (model,) = trainer.model_parts
        start = parameters(model)
        with mock.patch("torchtitan.trainer.time", without_sleep):  # rank 0 waits two seconds at the end for no one
            trainer.train()
        found = parameters(model)
    finally:
        trainer.close()
    metrics = trainer.metrics_processor
    if len(metrics.steps) == STEPS:  # from the first on
        compare_by_hand(trainer, case, start, found)
    return Outcome(type(model), [*metrics.steps[-1].values(), metrics.validated[-1]], found)


def compare_by_hand(trainer: Trainer, case: Case, start: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """With plain autograd of the losses of all ranks, in one process."""
    model = trainer.model_config.build()
    model.init_weights()
    model.load_state_dict(start)
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # of torchtitan's default_adamw
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for step, logged in enumerate(trainer.metrics_processor.steps):
        numbers = range(step * case.batches + 1, (step + 1) * case.batches + 1)
        of_all = [batch(rank, number) for rank in range(dist.get_world_size()) for number in numbers]
        tokens = sum(int((labels != -100).sum()) for _, labels in of_all)
        losses = []
        for inputs, labels in of_all:
            outputs = model(inputs["input"], inputs["positions"]).flatten(0, 1)
            losses.append(nn.functional.cross_entropy(outputs, labels.flatten(), reduction="sum") / tokens)
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), trainer.config.training.max_norm)
        torch.testing.assert_close(torch.stack([loss, norm]), torch.tensor([logged["mean"], logged["norm"]]))
        for group in optimizer.param_groups:
            group["lr"] = logged["lr/AdamW"]
        optimizer.step()
    for name, expected in parameters(model).items():
        moved = float((expected - start[name]).abs().max())
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0.01 * moved)


def resumed(wrap: Wrap, before: Wrap | None, name: str) -> Outcome:
    """The first half of the steps wrapped by `before`, and the second by `wrap`, from the checkpoint."""
    folder = f"{sys.argv[1]}/{name}"
    loop(Case(), before, folder=folder, steps=STEPS // 2, checkpoints=True)
    return loop(Case(), wrap, folder=folder, checkpoints=True)


with group_at_end():
    expected = loop(Case(), TorchsDDP, OfAMean)
    report("one batch", "its own", "fully_shard", expected, loop(Case(), None))
    for backend in BACKENDS:
        report("one batch", "adapter", backend, expected, loop(Case(), summed(backend)))
        report("resumed", "adapter", backend, expected, resumed(summed(backend), summed(backend), backend))
    report("resumed from its own", "adapter", "hooks", expected, resumed(summed("hooks"), None, "own"))

    for name, case in {"two batches": Case(batches=2), "tied": Case(tied=True)}.items():
        expected = loop(case, TorchsDDP, OfAMean)
        for backend in BACKENDS:
            report(name, "adapter", backend, expected, loop(case, averaged(backend), OfAMean))

    in_chunks = Case(chunks=True)  # torch's class has no lm_head for the Trainer
    expected = loop(in_chunks, None)
    for backend in BACKENDS:
        report("chunks", "adapter", backend, expected, loop(in_chunks, averaged(backend), OfAMean))
