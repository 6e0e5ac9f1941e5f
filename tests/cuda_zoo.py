"""Networks at sizes at which Inductor writes the code of real training: 8,192 rows of 768.

Nothing of them is computed where only their code is wanted (`cuda_code`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, SAMPLES, TOKENS, WORDS = 768, 12, 8, 1024, 2000
ROWS = SAMPLES * TOKENS


class Norms(nn.Module):
    """Every norm behind a layer of its own, over the same rows."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.GroupNorm(12, WIDTH), nn.BatchNorm1d(WIDTH))
        self.norms = nn.ModuleList(norms)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in norms)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(norm(layer(x)))
        return x.square().mean()


class Block(nn.Module):
    """Attention and two linear layers, with norms before or after. The CPU's fused attention is on no other device."""

    def __init__(self, *, norm_first: bool, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        split = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        with sdpa_kernel(SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.project(attended.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        if self.norm_first:
            x = x + self.attend(first(x))
            return x + self.narrow(F.gelu(self.widen(second(x))))
        x = first(x + self.attend(x))
        return second(x + self.narrow(F.gelu(self.widen(x))))


class LanguageModel(nn.Module):
    """Embeddings of words and places, blocks, a norm, and a head that may be tied to the words."""

    def __init__(self, *, norm_first: bool, tied: bool, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.block, self.norm = Block(norm_first=norm_first, norm=norm), norm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), words.flatten())


class Convolutions(nn.Module):
    """With both norms of images; 8,192 pixels and more at each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.pointwise = nn.Conv2d(128, 128, 1, groups=4)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(64), nn.GroupNorm(8, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch_norm(self.first(x)))
        x = F.relu(self.group_norm(self.second(x)))
        return self.head(self.pointwise(x).mean((2, 3))).square().mean()


class Experts(nn.Module):
    """Each expert takes the rows that weigh most for it: stacked weights, and layers of their own."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))
        self.biases = nn.Parameter(torch.zeros(experts, 1, WIDTH))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights, rows = self.gate(normed).softmax(-1).t().topk(ROWS // 2, dim=-1)
        hidden = F.gelu(torch.bmm(normed[rows], self.up) + self.biases)
        for expert, down in enumerate(self.down):
            x = x.index_add(0, rows[expert], down(hidden[expert]) * weights[expert, :, None])
        return x.square().mean()


class Autocast(nn.Module):
    """In 16 bits, with parameters of 32."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.inner(x)


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]

    def model_and_batch(self, dtype: str) -> tuple[nn.Module, Sequence[Tensor]]:
        """In "float32", in "bfloat16" throughout, or under "autocast"."""
        model, batch = self.make(), self.batch()
        if dtype == "bfloat16":
            model = model.to(torch.bfloat16)
            batch = batch.to(torch.bfloat16) if batch.is_floating_point() else batch
        return (Autocast(model) if dtype == "autocast" else model), [batch]


def _words() -> Tensor:
    return torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)


def _rows() -> Tensor:
    return torch.zeros(ROWS, WIDTH)


ZOO = {
    "norms": Network(Norms, _rows),
    "pre-norm, untied": Network(lambda: LanguageModel(norm_first=True, tied=False), _words),
    "post-norm, tied": Network(lambda: LanguageModel(norm_first=False, tied=True), _words),
    "RMSNorm, tied": Network(lambda: LanguageModel(norm_first=True, tied=True, norm=nn.RMSNorm), _words),
    "convolutions": Network(Convolutions, lambda: torch.zeros(8, 3, 64, 64)),
    "experts": Network(Experts, _rows),
}
