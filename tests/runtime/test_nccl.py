"""NCCL: with one rank, and with a rank on every GPU where there are several.

What these ranks do does not depend on the device: two ranks of gloo do it on the CPU first, so that it is known to be
right where there is a GPU at last.
"""

import copy
import gc
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import TokenModel, expected_mean, token_batch
from test_gpu import WRAPPERS, check, delayed
from torch import Tensor, nn

from ranks import RankPool

GPUS = torch.cuda.device_count()
EVERYWHERE: list[tuple[str, dict[str, Any]]] = [  # wrappers and options, with one rank and with several
    ("EagerDDP", {}),
    ("EagerDDP", {"bound": True}),
    ("aot_eager", {}),
    ("inductor", {}),
    ("inductor", {"mode": "reduce-overhead"}),
]


def _joined(rank: int, world_size: int, backend: str, store: str, *, bound: bool) -> torch.device:
    """Make the default group anew, as the pool's own is gloo's; returns this rank's device."""
    device = torch.device("cpu")
    if backend == "nccl":
        torch.accelerator.set_device_index(rank)
        device = torch.device("cuda", rank)
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        device_id=device if bound else None,
    )
    return device


def _loss_of(batches: list[tuple[Tensor, ...]], module: nn.Module) -> Tensor:
    return torch.stack([module(*batch) for batch in batches]).sum()


def _train(rank: int, world_size: int, backend: str, store: str, wrapper: str, options: dict[str, Any]) -> list[Tensor]:
    """Steps, every second of them of two accumulated batches; the weights after them."""
    device = _joined(rank, world_size, backend, store, bound=options.pop("bound", False))
    torch.manual_seed(rank)  # rank 0's weights win
    ddp = WRAPPERS[wrapper](TokenModel(width=64).to(device), **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for step in range(8):
        seeds = [100 * rank + 2 * step + n for n in range(1 + step % 2)]
        batches = [tuple(part.to(device) for part in token_batch(seed)) for seed in seeds]
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: _loss_of(batches, module))  # noqa: B023
        optimizer.zero_grad()
        with ddp.no_sync():
            for batch in batches[:-1]:
                ddp(*batch).backward()
        delayed(ddp(*batches[-1])).backward()
        check(ddp, expected)
        optimizer.step()
    weights = [parameter.detach().cpu() for parameter in ddp.module.parameters()]
    ddp.unwrap()
    del ddp, optimizer
    gc.collect()
    return weights


def _assert_same(results: list[list[Tensor]]) -> None:
    first, *others = results
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.fixture(scope="module")
def ranks1() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def rank_on_every_gpu() -> Iterator[RankPool]:
    if GPUS < 2:
        pytest.skip(f"needs two GPUs or more, and finds {GPUS}")
    with RankPool(GPUS) as pool:
        yield pool


@pytest.mark.parametrize("wrapper", ["EagerDDP", "aot_eager"])
def test_what_every_gpu_does_is_right_on_two_ranks_of_the_cpu(ranks2: RankPool, wrapper: str, tmp_path: Path) -> None:
    _assert_same(ranks2.run(_train, 2, "gloo", str(tmp_path / "store"), wrapper, {}))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("wrapper", "options"), [*EVERYWHERE, ("inductor", {"mode": "max-autotune-no-cudagraphs"})], ids=str
)
def test_nccl(ranks1: RankPool, wrapper: str, options: dict[str, Any], tmp_path: Path) -> None:
    ranks1.run(_train, 1, "nccl", str(tmp_path / "store"), wrapper, options, timeout_seconds=400)


@pytest.mark.gpu
@pytest.mark.parametrize(("wrapper", "options"), [*EVERYWHERE, ("aot_eager", {"bound": True})], ids=str)
def test_nccl_over_all_gpus(rank_on_every_gpu: RankPool, wrapper: str, options: dict[str, Any], tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    _assert_same(rank_on_every_gpu.run(_train, GPUS, "nccl", store, wrapper, options, timeout_seconds=400))
