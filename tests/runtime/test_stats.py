"""`stats()`: what torch's DDP tells in its logging data."""

import copy

import pytest
import torch
from models import Mlp, row_batch, wrappers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp import EagerDDP, comm_hooks
from ranks import RankPool


class OneUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.never = Mlp(), nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x).sum()


def _stats(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](OneUnused(), bucket_cap_mb=25.0)
    theirs = DistributedDataParallel(copy.deepcopy(ddp.module), gradient_as_bucket_view=True)
    before = ddp.stats()
    assert (before["iteration"], before["has_rebuilt_buckets"]) == (0, False)
    for step in range(2):
        ddp(row_batch(rank, step)).backward()
    stats, data = ddp.stats(), theirs._get_ddp_logging_data()
    same = ("world_size", "rank", "module_name", "backend_name", "num_parameter_tensors", "total_parameter_size_bytes")
    for name in (*same, "bucket_cap_bytes", "broadcast_buffers", "gradient_as_bucket_view", "has_sync_bn"):
        assert stats[name] == data[name], name
    assert stats["device"] == "cpu" and stats["dtypes"] == ("float32", "float64")
    assert stats["comm_hook"] == ""
    assert (stats["iteration"], stats["has_rebuilt_buckets"]) == (2, True)
    assert stats["unused_parameters"] == ("never.weight", "never.bias")
    assert stats["unused_parameter_size"] == 9 * 8
    assert stats["bucket_sizes"] == tuple(bucket.nbytes for bucket in ddp.plan.buckets)
    assert sorted(i for indices in stats["per_bucket_param_indices"] for i in indices) == list(range(6))
    assert stats["num_buckets_reduced"] == len(ddp.plan.buckets)
    assert stats["num_buckets_in_graphs"] == (stats["num_buckets_reduced"] if wrapper == "compile_ddp" else 0)

    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    theirs.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp(row_batch(rank)).backward()
    assert ddp.stats()["comm_hook"] == theirs._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"
    assert ddp.stats()["unused_parameters"] == () and ddp.stats()["num_buckets_in_graphs"] == 0


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_stats_tell_what_ddps_logging_data_does(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_stats, wrapper)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(1000, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(ids)).sum()


def _sparse_hooked_and_unfrozen(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Recommender())._get_ddp_logging_data(), EagerDDP(Recommender()).stats()
    for name in ("num_parameter_tensors", "total_parameter_size_bytes"):
        assert ours[name] == theirs[name], name
    assert EagerDDP(Mlp(), comm_hook=comm_hooks.fp16_compress).stats()["comm_hook"] == "fp16_compress"

    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 7))
    model[0].requires_grad_(False)
    ddp = EagerDDP(model)
    ddp(row_batch(rank)).sum().backward()
    model[0].requires_grad_(True)
    for step in range(3):
        ddp(row_batch(rank, step)).sum().backward()
    trained = [name for name, _ in model.named_parameters()]
    indices = [index for bucket in ddp.stats()["per_bucket_param_indices"] for index in bucket]
    planned = [ddp.plan.parameter_names[index] for bucket in ddp.plan.buckets for index in bucket.indices]
    assert [trained[index] for index in indices] == planned and sorted(indices) == [0, 1, 2, 3]


def test_stats_count_sparse_parameters_name_the_hook_and_number_as_registered(ranks2: RankPool) -> None:
    ranks2.run(_sparse_hooked_and_unfrozen)
