"""What trainers ask for that is no adapter's: docs/trainers/others.md."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loop_scripts import run_loops
from models import row_batch
from torch import Tensor, nn
from torchrun import free_port

import compiled_ddp
from ranks import RankPool

WRAPPERS = {
    ("replaced", "aot_eager"): "compiled_ddp.integrations.torch.DistributedDataParallel",
    ("replaced", "hooks"): "compiled_ddp.integrations.torch.EagerDistributedDataParallel",
    ("adapter", "aot_eager"): "compiled_ddp.compiled.CompiledDDP",
    ("adapter", "hooks"): "compiled_ddp.eager.EagerDDP",
}
TITANS_CASES = {"one batch", "two batches", "tied", "resumed", "resumed from its own", "chunks"}

TORCHFTS_WRAPPERS = {
    "torchft": "torchft.ddp.DistributedDataParallel",
    "torchft within replace_ddp": "torchft.ddp.DistributedDataParallel",
    "EagerDDP": "compiled_ddp.eager.EagerDDP",
    "compile_ddp": "compiled_ddp.compiled.CompiledDDP",
    "class": "compiled_ddp.integrations.torch.DistributedDataParallel",
}


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(row_batch(rank, step)).square().sum()


def _over_tokens(rank: int, kind: str) -> None:
    """torchtitan's loop: each rank's loss is divided by the tokens of all, and no backward is under no_sync."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    tokens, ranks = 24, dist.get_world_size()
    losses = [_loss(model, other, step) / tokens for other in range(ranks) for step in range(3)]
    expected = torch.autograd.grad(torch.stack(losses).sum(), [*model.parameters()])
    ddp = compiled_ddp.EagerDDP(model) if kind == "hooks" else compiled_ddp.compile_ddp(model, backend="aot_eager")
    for step in range(3):
        (_loss(ddp, rank, step) / tokens * ranks).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("kind", ["hooks", "compiled"])
def test_a_sum_over_tokens_by_a_mean_is_not_multiplied_by_accumulation(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_over_tokens, kind)


@pytest.mark.slow
def test_ray_train_gets_what_torchs_ddp_gives(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("`make trainers` installs it")
    home = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}  # Ray writes a token of its cluster into the home
    found = run_loops("with_ray.py", tmp_path, timeout_s=240, **home)
    assert {(line["way"], line["backend"]): line["ours"] for line in found} == WRAPPERS
    for line in found:
        assert line["torchs"] == "DistributedDataParallel"
        assert line["same"], line


@pytest.mark.slow
def test_a_torchft_replica_that_comes_back_gets_what_torchfts_class_gives(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("`make trainers` installs it")
    found = run_loops("with_torchft.py", tmp_path, timeout_s=120, OMP_NUM_THREADS="1")
    assert {line["case"]: line["type"] for line in found} == TORCHFTS_WRAPPERS
    for line in found:
        assert line["replicas agree"], line
        assert line["as torchft"], line
        assert line["apart"] < 1e-6, line  # from mean gradients by hand


@pytest.mark.slow
def test_torchtitan_gets_what_torchs_ddp_and_its_own_parallelism_give(tmp_path: Path) -> None:
    """The script itself compares with plain autograd of all ranks' losses."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip(
            "torchtitan 0.3 wants other versions than the extra `trainers`: docs/trainers/others.md installs it"
        )
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    found = run_loops("with_torchtitan.py", tmp_path, launcher=torchrun, timeout_s=300)
    wrapped = {(line["case"], line["backend"]): line for line in found if line["way"] == "adapter"}
    both = {(case, backend) for case in TITANS_CASES for backend in ("aot_eager", "hooks")}
    assert wrapped.keys() == both - {("resumed from its own", "aot_eager")}
    for (case, backend), line in wrapped.items():
        assert line["ours"] == WRAPPERS["adapter", backend]
        if case == "chunks":  # summed and reduced in another order than by fully_shard
            assert line["torchs"] == "FSDPLlama3Model" and line["apart"] < 1e-4, line
        else:
            assert line["torchs"] == "TorchsDDP" and line["same"], line
    (own,) = [line for line in found if line["way"] == "its own"]
    assert own["ours"].endswith("FSDPLlama3Model") and own["apart"] < 1e-4, own
