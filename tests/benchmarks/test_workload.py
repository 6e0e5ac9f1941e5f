"""Models with code objects of their own, and the same data on every machine."""

import pytest
import torch

from benchmarks.data import byte_batches, digit_batches
from benchmarks.tasks import CONV, GPT, LINEARS, MANY_PARAMETERS, SWITCH
from benchmarks.workload import Workload, load_fresh


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


@pytest.mark.parametrize(("workload", "expected"), [(LINEARS, 18), (MANY_PARAMETERS, 802), (SWITCH, 77)])
def test_small_models_have_as_many_parameters_as_they_say(workload: Workload, expected: int) -> None:
    assert len(list(workload.build_model("counted", torch.device("cpu")).parameters())) == expected


@pytest.mark.parametrize("workload", [LINEARS, MANY_PARAMETERS], ids=["linears", "many_parameters"])
def test_first_layers_have_gradients_that_float32_can_tell_from_zero(workload: Workload) -> None:
    model = workload.build_model("gradients", torch.device("cpu"))
    model(*next(workload.batches(0, 2))).backward()
    assert all(float(parameter.grad.abs().max()) > 1e-8 for parameter in model.parameters())


def test_ranks_of_the_switch_transformer_use_different_experts() -> None:
    model = SWITCH.build_model("experts", torch.device("cpu"))
    optimizer = SWITCH.optimizer(model.parameters())
    used: list[set[str]] = [set(), set()]
    ranks = [SWITCH.batches(rank, 2) for rank in (0, 1)]
    for _ in range(10):
        for names, batches in zip(used, ranks, strict=True):
            optimizer.zero_grad()
            model(*next(batches)).backward()
            names.clear()
            names |= {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        optimizer.step()
    assert used[0] != used[1]
    assert len(used[0]) < 77
