"""The command: which models it trains by default, for how long, and what torch's DDP is told about them."""

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import compare
from benchmarks.tasks import FORESEEN, LINEARS, SWITCH, WORDS, WORKLOADS
from benchmarks.variants import make_variants
from benchmarks.workload import Workload
from compiled_ddp.tools.comparison.measure import Contender
from compiled_ddp.tools.comparison.ranks import Rank
from ranks import RankPool


def test_every_workload_has_an_extent() -> None:
    assert list(compare.EXTENTS) == [*(WORKLOADS | FORESEEN), WORDS.name]


def test_short_runs_train_few_models_and_full_ones_all() -> None:
    assert compare.parse([]).model == list(compare.QUICK)
    assert compare.parse(["--full"]).model == list(WORKLOADS)
    assert compare.parse(["--full", "--model", "conv", "switch"]).model == ["conv", "switch"]


@pytest.mark.parametrize(
    ("arguments", "warmup", "rounds"),
    [([], 30, 400), (["--full"], 30, 1000), (["--full", "--steps", "7", "--warmup", "2"], 2, 7)],
)
def test_rounds_are_those_of_the_workload_unless_given(arguments: list[str], warmup: int, rounds: int) -> None:
    job = compare._job(compare.parse(arguments), "linears", "loopback")
    assert (job["warmup"], job["rounds"]) == (warmup, rounds)


def _is_told_of_unused_parameters(index: int, workload: Workload) -> bool:
    import torch

    rank = Rank(index, 2, torch.device("cpu"), dist.new_group(backend="gloo"))
    known = make_variants(find_unused_parameters=workload.find_unused_parameters)
    contender = Contender(known["torch DDP"], workload, rank)
    for _ in range(2):  # in the second one DDP says that parameters had no gradient, unless it looks for them
        contender.step(contender.next_batch())
    assert isinstance(contender.module, DistributedDataParallel)
    return contender.module.find_unused_parameters


@pytest.mark.parametrize(("workload", "expected"), [(SWITCH, True), (LINEARS, False)], ids=["switch", "linears"])
def test_torch_ddp_is_told_where_parameters_may_be_unused(ranks2: RankPool, workload: Workload, expected: bool) -> None:
    for flag in ranks2.run(_is_told_of_unused_parameters, workload):
        assert flag is expected
