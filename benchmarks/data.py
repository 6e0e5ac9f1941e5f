"""Real data that every Python installation with scikit-learn has: no download, the same bytes on every rank."""

import functools
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


def stdlib_source(max_bytes: int = 4_000_000) -> Tensor:
    """The standard library's own *.py files, sorted by path and concatenated: up to `max_bytes` bytes as uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
            if len(text) >= max_bytes:
                break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def byte_batches(
    rank: int, world_size: int, *, batch: int, context: int, seed: int = 0, max_bytes: int = 4_000_000
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (x, y), int64 of shape (batch, context), y one byte ahead of x, from this rank's share of the text."""
    share = stdlib_source(max_bytes).chunk(world_size)[rank]
    generator = torch.Generator().manual_seed(seed * world_size + rank)
    while True:
        starts = torch.randint(len(share) - context - 1, (batch, 1), generator=generator)
        window = share[starts + torch.arange(context + 1)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def masked_batches(
    rank: int, world_size: int, *, batch: int, context: int, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """As `byte_batches`, each seventh byte of x masked (256): y is that byte, and -100 everywhere else."""
    for x, _ in byte_batches(rank, world_size, batch=batch, context=context, seed=seed):
        y = torch.full_like(x, -100)
        y[:, ::7], x[:, ::7] = x[:, ::7].clone(), 256
        yield x, y


@functools.cache
def _words(max_bytes: int) -> Tensor:
    """The standard library's sources as numbers of words, the most frequent ones first; blanks are words too."""
    text = bytes(stdlib_source(max_bytes).numpy()).decode("utf-8", "replace")
    found = re.findall(r"\w+|\s+|[^\w\s]", text)
    number = {word: place for place, (word, _) in enumerate(Counter(found).most_common())}
    return torch.tensor([number[word] for word in found])


def word_batches(
    rank: int,
    world_size: int,
    *,
    batch: int,
    context: int,
    vocabulary: int,
    seed: int = 0,
    max_bytes: int = 8_000_000,
) -> Iterator[tuple[Tensor, Tensor]]:
    """As `byte_batches`, of words: those beyond the `vocabulary` are its last one."""
    words = _words(max_bytes)
    share = words.clamp(max=vocabulary - 1).chunk(world_size)[rank]
    generator = torch.Generator().manual_seed(seed * world_size + rank)
    while True:
        starts = torch.randint(len(share) - context - 1, (batch, 1), generator=generator)
        window = share[starts + torch.arange(context + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def digit_batches(rank: int, world_size: int, *, batch: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (images in [0, 1] of shape (batch, 1, 8, 8), labels of shape (batch,)) from every world_size-th digit."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[rank::world_size].unsqueeze(1) / 16
    labels = torch.tensor(digits.target)[rank::world_size]
    generator = torch.Generator().manual_seed(seed * world_size + rank)
    while True:
        chosen = torch.randint(len(labels), (batch,), generator=generator)
        yield images[chosen], labels[chosen]
