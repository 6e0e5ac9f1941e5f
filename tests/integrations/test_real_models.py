"""Models of transformers, diffusers, peft and torch_geometric under both wrappers, beside autograd averaged by hand.

`make models` installs the packages in an environment of its own; a model whose package is missing is skipped.
"""

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.real_model_rank import (
    COUNTED_STEPS,
    OURS,
    Captured,
    Reduced,
    Trainer,
    captured_by_torch_compile,
    first_steps_of_ours,
    variants,
)
from benchmarks.zoo import TINY, ZOO
from benchmarks.zoo.by_hand import Difference, Loop, train_beside
from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.tools.comparison.ranks import Rank
from ranks import RankPool

# Of the largest element of a gradient: sums are taken in another order by decomposed and by generated operators.
ROUNDING = {"aot_eager": 2e-5, "inductor": 2e-4}
# Autograd leaves rows of a sparse gradient apart that are one row of the embedding; they are added up by hand.
SPARSE_ROUNDING = 1e-6
BFLOAT16_ROUNDING = 0.1

THREE_STEPS = Loop(steps=3)
ACCUMULATING = Loop(steps=3, micro_batches=2, last_is_larger=True)


@functools.cache
def _onednn_runs_bfloat16() -> bool:
    """Whether an LSTM of autocast runs: torch asks oneDNN for it on CPUs (AVX2 without bfloat16) where it has none."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(1, 1)(torch.ones(1, 1))
    except RuntimeError:  # "could not create a primitive descriptor"
        return False
    return True


def _train(rank: int, name: str, backend: str | None, loop: Loop) -> list[Difference]:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"bucket_cap_mb": 0.05, "first_bucket_mb": 0.01}
    wrap = functools.partial(EagerDDP, **options)
    if backend is not None:
        # Dropout draws what eager code draws; a graph reduces its gradients, however few.
        options |= {"backend": backend, "smallest_graph_mb": 0}
        options |= {"options": {"fallback_random": True}} if backend == "inductor" else {}
        wrap = functools.partial(compile_ddp, **options)
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=not loop.bfloat16 or _onednn_runs_bfloat16()):
        warnings.simplefilter("ignore")  # of parts that hooks reduce
        return list(train_beside(ZOO[name], TINY, wrap, loop, rank=rank))


def _skip_unless_installed(name: str) -> None:
    if not ZOO[name].is_installed:
        pytest.skip(f"`make models` installs {ZOO[name].package}")


def _largest_difference(ranks: RankPool, name: str, backend: str | None, loop: Loop = THREE_STEPS) -> Difference:
    _skip_unless_installed(name)
    found = ranks.run(_train, name, backend, loop, timeout_seconds=600.0)
    for of_rank in found:
        assert len(of_rank) == loop.steps * len(ZOO[name].losses)
        assert not any(difference.missing for difference in of_rank), of_rank
    return max((difference for of_rank in found for difference in of_rank), key=lambda found: found.relative)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("loop", [THREE_STEPS, ACCUMULATING], ids=["plain", "accumulating"])
def test_hooks_reduce_to_the_bit_what_autograd_computes(ranks2: RankPool, name: str, loop: Loop) -> None:
    found = _largest_difference(ranks2, name, None, loop)
    assert found.relative <= (SPARSE_ROUNDING if ZOO[name].sparse else 0.0), found


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("loop", [THREE_STEPS, ACCUMULATING], ids=["plain", "accumulating"])
def test_graphs_reduce_what_autograd_computes(ranks2: RankPool, name: str, loop: Loop) -> None:
    found = _largest_difference(ranks2, name, "aot_eager", loop)
    assert found.relative < ROUNDING["aot_eager"], found


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["hooks", "graphs"])
def test_gradients_of_autocast_are_reduced(ranks2: RankPool, name: str, backend: str | None) -> None:
    found = _largest_difference(ranks2, name, backend, Loop(bfloat16=True))
    assert found.relative <= (BFLOAT16_ROUNDING if backend else SPARSE_ROUNDING if ZOO[name].sparse else 0.0), found


def _capture(index: int, name: str) -> tuple[Captured, Captured, Reduced]:
    rank, model = Rank(index, 2, torch.device("cpu"), dist.new_group(backend="gloo")), ZOO[name]
    plain = captured_by_torch_compile(model, TINY, "aot_eager", rank)
    wrap = variants(model, "aot_eager", smallest_graph_mb=0)[OURS]
    return plain, *first_steps_of_ours(Trainer(model, TINY, wrap, rank), COUNTED_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_nothing_breaks_and_is_captured_again_but_what_torch_compile_breaks(ranks2: RankPool, name: str) -> None:
    _skip_unless_installed(name)
    for plain, ours, reduced in ranks2.run(_capture, name, timeout_seconds=600.0):
        assert ours.breaks <= plain.breaks, ours
        assert set(ours.break_reasons) <= set(plain.break_reasons), (ours, plain)
        assert ours.recompilations <= plain.recompilations, (ours, plain)
        if plain.breaks == 0 and plain.graphs > 0:  # it leaves a forward with an LSTM to eager
            assert reduced.share_run >= 0.9, reduced


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", ZOO)
def test_inductors_graphs_reduce_what_autograd_computes(ranks2: RankPool, name: str) -> None:
    found = _largest_difference(ranks2, name, "inductor")
    assert found.relative < ROUNDING["inductor"], found
