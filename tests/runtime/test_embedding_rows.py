"""Embeddings whose gradients are sent by rows: what comes out is what an all-reduce of all of them makes."""

import gc
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import assert_equal_on_all_ranks, assert_gradients, assert_step, expected_mean, mean_by_hand, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from words import VOCABULARY, WIDTH, Words, words

from compiled_ddp import Calibration, EagerDDP, SavedPlan, comm_hooks, compile_ddp
from compiled_ddp.planning.cost_model import Compute, Link
from compiled_ddp.ranks import row_sums
from ranks import RankError, RankPool

BOTH = ("compile_ddp", "EagerDDP")


def _wrapped(wrapper: str, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return wrappers([wrapper])[wrapper](model or Words(), **{"embedding_rows": True, **options})


def _counted(ddp: Any) -> dict[tuple[int, int], list[int]]:
    return dict(ddp._runtime.communicator.counted_rows)


def _used(x: Tensor) -> int:
    return len(x.unique())


# ---- what comes out --------------------------------------------------------------------------------------------------


def _steps(rank: int, wrapper: str, dtype: torch.dtype, backend: str) -> None:
    graphs = {"backend": backend} if wrapper == "compile_ddp" else {}
    ddp = _wrapped(wrapper, Words(dtype), **graphs)
    for step in range(4):
        x = words(rank, step, batch=1 + (step + rank) % 3)
        expected = mean_by_hand(ddp, lambda module, x=x: module(x))
        ddp.zero_grad()
        ddp(x).backward()
        precision = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {}
        assert_gradients(ddp.module, expected, **precision)
        assert_equal_on_all_ranks([p.grad.tolist() for p in ddp.parameters()])
        if dtype != torch.bfloat16:  # in which a row's gradient may round to zero
            assert _counted(ddp)[VOCABULARY * WIDTH, WIDTH][rank] == _used(x)
            assert _counted(ddp)[40 * 4, 4][rank] == _used(x % 40)
        assert "these were gathered" in "".join(ddp.explain().by_rows)
    launched_by = {row[4]: row[1] for row in ddp.explain().rows}
    assert launched_by["token.weight"] == ("graph" if wrapper == "compile_ddp" else "hooks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrapper", BOTH)
def test_the_mean_is_that_of_whole_gradients(ranks3: RankPool, wrapper: str, dtype: torch.dtype) -> None:
    ranks3.run(_steps, wrapper, dtype, "aot_eager")


def test_inductors_code_sends_rows(ranks2: RankPool) -> None:
    ranks2.run(_steps, "compile_ddp", torch.float32, "inductor")


def _circumstances(rank: int, wrapper: str) -> None:
    """Where a rank's gradient is no batch's alone, or comes another way than the other rank's."""
    ddp = _wrapped(wrapper, Words(padding=3))

    def takes(x: Tensor, unused: tuple[str, ...] = ()) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ranks that go by hooks
            assert_step(ddp, lambda module: module(x), unused=unused)

    takes(words(rank))
    # Accumulated over local backwards, on one rank over more of them.
    local = [words(rank, n) for n in range(2 + rank)]
    expected = mean_by_hand(ddp, lambda module: torch.stack([module(x) for x in [*local, words(rank)]]).sum())
    ddp.zero_grad()
    with ddp.no_sync():
        for x in local:
            ddp(x).backward()
    ddp(words(rank)).backward()
    assert_gradients(ddp.module, expected)
    # More words on one rank than are worth gathering: all is sent, and the next step goes by rows again.
    takes(words(rank, 1, batch=40 if rank else 1, length=8))
    assert "all were sent" in "".join(ddp.explain().by_rows)
    takes(words(rank, 2))
    assert "these were gathered" in "".join(ddp.explain().by_rows)
    # One rank does not use the bag, and then none does.
    ddp.module.uses_bag = rank == 0
    takes(words(rank, 3))
    ddp.module.uses_bag = False
    takes(words(rank, 4), unused=("bag.weight",))
    ddp.module.uses_bag = True
    takes(words(rank, 5))
    # Nothing but the word that is not trained.
    takes(torch.full((2, 3), 3))
    assert max(_counted(ddp)[VOCABULARY * WIDTH, WIDTH]) == 0
    # A gradient that is returned, a rank that skips a step, one that has no more batches.
    if wrapper == "compile_ddp":
        expected = mean_by_hand(ddp, lambda module: module(words(rank, 6)))
        (gradient,) = torch.autograd.grad(ddp(words(rank, 6)), [ddp.module.token.weight])
        torch.testing.assert_close(gradient.double(), expected["token.weight"], rtol=1e-5, atol=1e-7)
    ddp.zero_grad()
    loss = ddp(words(rank, 7))
    if rank:
        ddp.skip_step()
    else:
        loss.backward()
    with ddp.join():
        for n in range(1 + rank):
            ddp(words(rank, 8 + n)).backward()
    takes(words(rank, 9))
    assert_equal_on_all_ranks([p.grad.tolist() for p in ddp.parameters()])


@pytest.mark.parametrize("wrapper", BOTH)
def test_whatever_a_rank_has_accumulated_is_summed(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_circumstances, wrapper)


def _others(rank: int, wrapper: str) -> None:
    """Options that change what is summed or where it lies."""
    x = words(rank)
    for options in (
        {"reduction": "sum"},
        {"gradient_as_bucket_view": False},
        {"keep_buffers": False},
        {"verify": "always"},
    ):
        ddp = _wrapped(wrapper, **options)
        factor = 2 if options == {"reduction": "sum"} else 1
        expected = {name: factor * mean for name, mean in mean_by_hand(ddp, lambda module: module(x)).items()}
        for _ in range(3):
            ddp.zero_grad()
            ddp(x).backward()
            assert_gradients(ddp.module, expected)
        ddp.unwrap()
    ddp = _wrapped(wrapper, reduction="weighted")
    own = expected_mean(ddp.module, lambda module: module(x) * 2 * (3 + rank) / 7)
    ddp.set_weight(3.0 + rank)
    ddp.zero_grad()
    ddp(x).backward()
    assert_gradients(ddp.module, own)
    ddp.unwrap()
    # Another wrapper in turns, whose graphs have the same name; a model that changes; the default device and dtype.
    first, second = _wrapped(wrapper), _wrapped(wrapper)
    for n in range(3):
        assert_step(first, lambda module, n=n: module(words(rank, n)))
        assert_step(second, lambda module, n=n: module(words(rank, n)))
    first.module.token.weight.requires_grad_(False)
    first.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first(x).backward()
        first.module.token.weight.requires_grad_(True)
        assert_step(first, lambda module: module(x))
    with torch.device("meta"):
        second(x).backward()


@pytest.mark.parametrize("wrapper", BOTH)
def test_options_and_other_wrappers_change_nothing(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_others, wrapper)


def _not_finite(rank: int) -> list[float]:
    ddp = _wrapped("EagerDDP")
    loss = ddp(words(rank)) * (float("nan") if rank else 1.0)
    loss.backward()
    return [float(ddp.module.token.weight.grad[words(n)].isnan().float().mean()) for n in range(2)]


def test_what_is_not_finite_reaches_the_other_ranks(ranks2: RankPool) -> None:
    for shares in ranks2.run(_not_finite):
        assert shares[1] == 1.0  # of rank 1's words


# ---- where it is chosen ----------------------------------------------------------------------------------------------


def _by_rows(model: nn.Module, **options: Any) -> tuple[str, ...]:
    ddp = EagerDDP(model, **options)
    names = tuple(sorted(ddp._runtime.parameters.by_rows))
    ddp.unwrap()
    return names


def _chosen(rank: int) -> None:
    def on(megabytes_per_second: float) -> Calibration:
        link, compute = Link(1e-4, megabytes_per_second * 1e6), Compute(5e10, 8e9)
        return Calibration("gloo", 2, 1, "cpu", link, compute)

    def large(**how: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(8192, 64, **how), nn.Linear(64, 2))

    slow = on(120)
    assert _by_rows(large(), calibration=slow) == ("0.weight",)
    assert _by_rows(large(), calibration=on(3000)) == ()  # to look for rows takes as long as to send all
    assert _by_rows(nn.Sequential(nn.Embedding(512, 1024), nn.Linear(1024, 2)), calibration=slow) == ()  # few words
    assert _by_rows(large(), calibration=slow, embedding_rows=False) == ()
    assert _by_rows(large(), bucket_cap_mb=25) == ()  # nothing is planned
    assert _by_rows(large(), bucket_cap_mb=25, embedding_rows=True) == ("0.weight",)
    assert _by_rows(large(), calibration=slow, comm_hook=comm_hooks.bf16_compress) == ()
    assert _by_rows(Words(tied=True), embedding_rows=True) == ("bag.weight",)
    assert _by_rows(large(sparse=True), embedding_rows=True) == ()
    with pytest.raises(ValueError, match="comm_hook reduces whole gradients"):
        EagerDDP(large(), embedding_rows=True, comm_hook=comm_hooks.bf16_compress)
    with pytest.raises(ValueError, match="embedding_rows must be True, False or None, found 'yes'"):
        EagerDDP(large(), embedding_rows="yes")
    alone = dist.new_group([0]), dist.new_group([1])
    assert _by_rows(large(), process_group=alone[rank], embedding_rows=True) == ()


def test_the_link_and_the_vocabulary_decide(ranks2: RankPool) -> None:
    ranks2.run(_chosen)


def _differs(rank: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x, self.weight)

    EagerDDP(
        nn.Sequential(nn.Embedding(VOCABULARY, WIDTH) if rank else Own(), nn.Linear(WIDTH, 2)), embedding_rows=True
    )


def test_ranks_with_other_modules_are_told(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="of an embedding"):
        ranks2.run(_differs)


def _kept(rank: int, folder: str) -> None:
    ddp = _wrapped("compile_ddp")
    ddp(words(rank)).backward()
    path = f"{folder}/plan-{rank}.json"
    ddp.plan.save(path)
    pinned = compile_ddp(Words(), plan=SavedPlan.load(path), embedding_rows=True, backend="aot_eager")
    for n in range(2):
        assert_step(pinned, lambda module, n=n: module(words(rank, n)))
    assert _counted(pinned).keys() == _counted(ddp).keys()
    recorder = ddp.profile(3)
    while recorder.remaining:
        ddp.zero_grad()
        ddp(words(rank)).backward()
    explained = ddp.explain()
    assert explained.measured is not None and all(bucket is not None for bucket in explained.measured.buckets)
    assert explained.as_dict()["by_rows"] and "Summed by rows" in str(explained)


def test_plans_and_times_know_the_buckets(ranks2: RankPool, tmp_path: Any) -> None:
    ranks2.run(_kept, str(tmp_path))


def _pinned_by_default(rank: int, folder: str) -> None:
    """Chosen by the link, and still chosen by the plan that is made of that."""
    slow = Calibration("gloo", 2, 1, "cpu", Link(1e-4, 120e6), Compute(5e10, 8e9))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8192, 64), nn.Linear(64, 2))

    def train(ddp: Any) -> None:
        ddp.zero_grad()
        ddp(words(rank)).square().mean().backward()

    ddp = EagerDDP(model(), calibration=slow)
    recorder = ddp.profile(3)
    while recorder.remaining:
        train(ddp)
    ddp.plan.save(f"{folder}/{rank}.json")
    for plan in (SavedPlan.load(f"{folder}/{rank}.json"), ddp.measured_plan()):
        assert plan.by_rows == ("0.weight",)
        pinned = EagerDDP(model(), plan=plan)
        train(pinned)
        assert max(_counted(pinned)[8192 * 64, 64]) < 10
        pinned.unwrap()
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    train(ddp)
    assert ddp.explain().by_rows == ()


def test_a_saved_plan_knows_what_is_sent_by_rows(ranks2: RankPool, tmp_path: Any) -> None:
    ranks2.run(_pinned_by_default, str(tmp_path))


# ---- ends ------------------------------------------------------------------------------------------------------------


def _silent(rank: int) -> str:
    ddp = _wrapped("EagerDDP")
    ddp(words(rank)).backward()
    if rank:
        return ""
    try:
        ddp(words(rank)).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_told_of(ranks2: RankPool) -> None:
    message, _ = ranks2.run(_silent, collective_timeout_seconds=2.0)
    assert "rank 1" in message and "bucket" in message


def _fails_between(rank: int, wrapper: str) -> tuple[str, bool]:
    """Rank 0 has no memory for what is gathered, when the ranks have told each other how much that is."""
    ddp = _wrapped(wrapper)
    ddp(words(rank)).backward()
    ddp.zero_grad()
    sum_up = row_sums._sum_up
    if rank == 0:

        def fails(*args: Any) -> None:
            raise RuntimeError("not enough memory")

        row_sums._sum_up = fails
    try:
        ddp(words(rank, 1)).backward()
    except RuntimeError as error:
        return str(error), ddp._runtime.communicator.has_failed
    finally:
        row_sums._sum_up = sum_up
    return "no error", False


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_sum_that_fails_on_one_rank_fails_on_all_and_nothing_is_sent_after_it(ranks2: RankPool, wrapper: str) -> None:
    (first, first_failed), (second, second_failed) = ranks2.run(
        _fails_between, wrapper, collective_timeout_seconds=20.0
    )
    assert "not enough memory" in first and first_failed, first
    assert "rank" in second and second_failed, second


def _gone(rank: int) -> None:
    def threads() -> int:
        return sum(thread.name == "compiled_ddp rows" for thread in threading.enumerate())

    ddp = _wrapped("EagerDDP")
    ddp(words(rank)).backward()
    assert threads() == 1
    ddp.unwrap()
    dropped = _wrapped("compile_ddp")
    dropped(words(rank)).backward()
    del dropped
    gc.collect()
    _wrapped("EagerDDP").unwrap()
    for thread in threading.enumerate():
        if thread.name == "compiled_ddp rows":
            thread.join(5.0)
    assert threads() == 0


def test_threads_end_with_their_wrappers(ranks2: RankPool) -> None:
    ranks2.run(_gone)
