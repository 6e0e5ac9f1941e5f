"""The networks. All return the loss from forward, so that loss and backward belong to the captured graph."""

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


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class RotaryAttention(nn.Module):
    """Causal, with several queries for a key (grouped-query attention) and rotary positions."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:  # (batch, time, width), (2, time, size)
        batch, time, _ = x.shape
        q = self.query(x).view(batch, time, self.heads, self.size).transpose(1, 2)
        k, v = self.key_value(x).view(batch, time, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (_rotated(k, rotation), v))
        y = F.scaled_dot_product_attention(_rotated(q, rotation), k, v, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(x.shape))


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rotation[0] + torch.cat((-second, first), -1) * rotation[1]


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = RotaryAttention(width, heads, groups)
        self.mlp_norm = RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.expand = nn.Linear(width, hidden, bias=False)
        self.contract = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        normed = self.mlp_norm(x)
        return x + self.contract(F.silu(self.gate(normed)) * self.expand(normed))


class Llama(nn.Module):
    """A Llama on bytes: RMSNorm, rotary positions, grouped queries, SwiGLU. 9.6 M parameters, 37 MiB of gradients."""

    def __init__(
        self,
        *,
        width: int = 384,
        layers: int = 6,
        heads: int = 6,
        groups: int = 2,
        hidden: int = 1024,
        context: int = 128,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        size = width // heads
        angles = torch.arange(context)[:, None] * 10_000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # both (batch, time), int64
        hidden = self.token(x)
        for block in self.blocks:
            hidden = block(hidden, self.rotation)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


class Bert(nn.Module):
    """BERT's encoder on bytes, which finds those that are masked: 9.1 M parameters, 35 MiB of gradients.

    torch's own layers, so with biases, LayerNorm behind the sum, and no dropout.
    """

    def __init__(self, *, width: int = 384, layers: int = 5, heads: int = 6, context: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(257, width)  # the last one is the mask
        self.position = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # both (batch, time), int64; y is -100 where nothing is masked
        hidden = self.norm(self.token(x) + self.position(torch.arange(x.shape[1], device=x.device)))
        logits = self.head(self.transform(self.encoder(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 4 * patches), nn.GELU(), nn.Linear(4 * patches, patches))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (batch, patches, width)
        x = x + self.across(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.channel_norm(x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021) on the 16 patches of a digit: 8.5 M parameters, 32 MiB of gradients."""

    def __init__(self, *, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.blocks = nn.Sequential(*[MixerBlock(16, width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 1, 8, 8), (batch,)
        hidden = self.blocks(self.patch(x).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(self.norm(hidden).mean(1)), y)


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


class Linears(nn.Module):
    """Nine small layers on the 64 pixels of a digit: a step in which the overhead is nearly all there is."""

    def __init__(self, *, width: int = 64, layers: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 1, 8, 8), (batch,)
        x = x.flatten(1)
        for layer in self.layers:
            x = F.silu(layer(x))
        return F.cross_entropy(x, y)


class Mlp(nn.Module):
    """Digits through hidden layers of one width."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.hidden = nn.Sequential(*[nn.Sequential(nn.SiLU(), nn.Linear(width, width)) for _ in range(layers)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 1, 8, 8), (batch,)
        return F.cross_entropy(self.head(F.silu(self.hidden(self.first(x.flatten(1))))), y)


class ManyParameters(nn.Module):
    """802 parameters: 401 residual layers of 16x16 and 16, on digits that are averaged down to 16 pixels."""

    def __init__(self, *, layers: int = 401) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)  # so that the first layers still have a gradient

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 1, 8, 8), (batch,)
        x = F.avg_pool2d(x, 2).flatten(1)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return F.cross_entropy(x, y)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * width, bias=False)
        self.contract = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(x)))


class SwitchLayer(nn.Module):
    """Each token goes to the one expert that its router prefers (Fedus et al., 2021), without a limit on its tokens."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():  # a graph break, as the sizes of what follows are
            places = (chosen == number).nonzero().squeeze(1)
            out = out.index_copy(0, places, share[places, None] * self.experts[number](tokens[places]))
        return out.view_as(x)


class SwitchBlock(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.experts_norm = nn.LayerNorm(width)
        self.switch = SwitchLayer(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.switch(self.experts_norm(x))


class Switch(nn.Module):
    """A byte-level Switch transformer of 77 parameters. Which experts a rank uses differs from step to step."""

    def __init__(
        self, *, width: int = 64, layers: int = 3, heads: int = 4, experts: int = 8, context: int = 32
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(SwitchBlock(width, heads, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # both (batch, time), bytes as int64
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


class Chain(nn.Module):
    """`parameters` parameters of two elements, one product each: little but what a wrapper does for each of them."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:  # (2,)
        for factor in self.factors:
            x = x * factor
        return x.sum()


def large_mlp() -> Mlp:
    """34 M parameters, 129 MiB of float32 gradients, nearly all of them in eight matrices."""
    return Mlp(width=2048, layers=8)


def tiny_mlp() -> Mlp:
    return Mlp(width=32, layers=2)


def large_gpt() -> GPT:
    """86 M parameters, 327 MiB of float32 gradients: the size of GPT-2's smallest, on bytes."""
    return GPT(width=768, layers=12, heads=12, context=512)


def word_llama() -> Llama:
    """28.7 M parameters, 109 MiB of gradients: 49 each of the embedding and of the last layer, of 50,000 words."""
    return Llama(width=256, layers=4, heads=4, groups=2, hidden=768, vocabulary=50_000)


def tiny_gpt() -> GPT:
    return GPT(width=32, layers=1, heads=2, context=16)
