"""Models with code objects of their own, and the same data on every machine."""

import torch

from benchmarks.data import byte_batches, digit_batches
from benchmarks.tasks import CONV, GPT
from benchmarks.workload import load_fresh


def test_every_label_has_code_objects_of_its_own() -> None:
    first, second = load_fresh("benchmarks.models", "first"), load_fresh("benchmarks.models", "second")
    assert first.Block.forward.__code__ is not second.Block.forward.__code__


def test_every_label_starts_from_the_same_weights() -> None:
    first, second = (CONV.build_model(label, torch.device("cpu")) for label in ("first", "second"))
    for expected, found in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_the_gpt_has_about_twelve_million_parameters() -> None:
    model = GPT.build_model("counted", torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 12_338_816


def test_byte_targets_are_one_ahead_and_ranks_read_different_text() -> None:
    (x, y), (other, _) = (next(byte_batches(rank, 2, batch=2, context=16, max_bytes=50_000)) for rank in range(2))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert not torch.equal(x, other)


def test_batches_are_the_same_in_every_pass() -> None:
    for batches in (CONV.batches, lambda rank, world: digit_batches(rank, world, batch=4)):
        assert all(torch.equal(a, b) for a, b in zip(next(batches(1, 2)), next(batches(1, 2)), strict=True))
