"""A model of words, whose embeddings' gradients are zero in most rows."""

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 60, 6


class Words(nn.Module):
    """A large embedding, a bag of another width, and a small body. `padding` is a word that is not trained."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, padding: int | None = None, tied: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding, dtype=dtype)
        self.bag = nn.EmbeddingBag(40, 4, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(WIDTH + 4, 8, dtype=dtype), nn.Tanh())
        self.head = nn.Linear(8 if not tied else WIDTH, 8 if not tied else VOCABULARY, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.token.weight
        self.is_tied, self.uses_bag = tied, True

    def forward(self, x: Tensor) -> Tensor:  # (batch, length), int64
        words = self.token(x).mean(1)
        if self.is_tied:
            return self.head(words).square().mean()
        bag = self.bag(x % 40) if self.uses_bag else torch.zeros(len(x), 4, dtype=words.dtype)
        return self.head(self.body(torch.cat((words, bag), 1))).square().mean()


def words(rank: int, step: int = 0, batch: int = 2, length: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)
