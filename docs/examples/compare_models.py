"""Two models for `compiled-ddp compare`: docs/compare.md shows what it printed for them.

compiled-ddp compare compare_models.py:mlp
compiled-ddp compare compare_models.py:gpt2    # needs transformers
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of these widths, GELU between them.

    A class of its own: around DDP(nn.Sequential(...)) torch.compile of torch 2.13 captures nothing.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:  # (batch, widths[0]) -> (batch, widths[-1])
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


def mlp() -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    """2.4 M parameters, 9 MiB of gradients."""
    batches = [(torch.randn(64, 256), torch.randint(10, (64,))) for _ in range(8)]
    return MLP((256, 1024, 1024, 1024, 10)), nn.CrossEntropyLoss(), batches


def gpt2() -> dict[str, Any]:
    """A GPT-2 of 3.1 M parameters from transformers, whose forward returns the loss where it is given labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 256, "n_head": 8, "n_positions": 128, "vocab_size": 6000}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # so that gradients can be compared
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    tokens = [torch.randint(6000, (4, 128)) for _ in range(8)]
    return {
        "model": GPT2LMHeadModel(config),
        "batches": [{"input_ids": each, "labels": each} for each in tokens],
        "optimizer": partial(torch.optim.AdamW, lr=3e-4, fused=True),
    }
