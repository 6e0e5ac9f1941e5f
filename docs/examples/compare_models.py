"""Two models for `compiled-ddp compare`: docs/compare.md shows what it printed for them.

compiled-ddp compare compare_models.py:mlp
compiled-ddp compare compare_models.py:gpt2    # needs transformers
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def mlp() -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    """2.4 M parameters, and a step of which the communication is a large part."""
    model = nn.Sequential(
        nn.Linear(256, 1024),
        nn.GELU(),
        nn.Linear(1024, 1024),
        nn.GELU(),
        nn.Linear(1024, 1024),
        nn.GELU(),
        nn.Linear(1024, 10),
    )
    batches = [(torch.randn(64, 256), torch.randint(10, (64,))) for _ in range(8)]
    return model, nn.CrossEntropyLoss(), batches


def gpt2() -> dict[str, Any]:
    """A GPT-2 of 6.3 M parameters from transformers, whose forward returns the loss where it is given labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_embd=256, n_head=8, n_positions=128, vocab_size=6000)
    tokens = [torch.randint(6000, (4, 128)) for _ in range(8)]
    return {
        "model": GPT2LMHeadModel(config),
        "batches": [{"input_ids": each, "labels": each} for each in tokens],
        "optimizer": partial(torch.optim.AdamW, lr=3e-4, fused=True),
    }
