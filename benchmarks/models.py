"""The two networks. Both return the loss from forward, so that loss and backward belong to the captured graph."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class GPT(nn.Module):
    """A byte-level GPT. The defaults have 12.3 M parameters, 47 MiB of float32 gradients."""

    def __init__(self, *, width: int = 448, layers: int = 5, heads: int = 7, context: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # both (batch, time), bytes as int64
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class DigitsNet(nn.Module):
    """Convolutions with BatchNorm for 8x8 digits: many small gradients, and buffers that have to be synchronised.

    SiLU because it is smooth: with ReLU a rounding error turns a unit on or off, and its gradient jumps by 1e-3.
    """

    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        channels = [1, width, width, 2 * width, 2 * width]
        stages: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(channels)):
            stride = 2 if i == 2 else 1
            stages += [
                nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.SiLU(),
            ]
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 1, 8, 8), (batch,)
        return F.cross_entropy(self.classifier(self.features(x).mean((2, 3))), y)
