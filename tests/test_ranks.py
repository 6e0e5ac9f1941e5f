"""The harness of the distributed tests itself: results, failures and hangs of spawned ranks."""

import gc
import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from compiled_ddp.functional import agreements
from compiled_ddp.ranks import hang_report
from ranks import IMPORTED_BEFORE_FORK, LOOK_SECONDS, START_METHOD, RankError, RankPool


def describe_rank(rank: int, word: str) -> tuple[int, int, int, str]:
    return rank, dist.get_rank(), dist.get_world_size(), word


def reduce_own_rank(rank: int) -> torch.Tensor:
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    return total


def process_id(rank: int) -> int:
    return os.getpid()


def hash_of_a_string(rank: int) -> int:
    return hash("a string")


def variable_of_tests(rank: int) -> str:
    return os.environ["COMPILED_DDP_TESTS"]


def objects_frozen_before_fork(rank: int) -> int:
    return gc.get_freeze_count() if IMPORTED_BEFORE_FORK in sys.modules else 0


def seconds_of_looks(rank: int) -> tuple[float, float]:
    return hang_report._LOOK_SECONDS, agreements._PATIENCE_SECONDS


def has_process_group(rank: int) -> bool:
    return dist.is_initialized()


def raise_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError(f"wrong on rank {rank}")


def raise_while_others_wait(rank: int) -> None:
    raise_on_rank_1(rank)
    dist.barrier()


def fail_an_assertion(rank: int) -> None:
    expected = rank + 40
    assert expected == 42


def return_a_lock(rank: int) -> object:
    return threading.Lock()


def end_the_process(rank: int) -> None:
    if rank == 0:
        os._exit(7)


def wait_on_rank_0(rank: int) -> None:
    if rank == 0:
        threading.Event().wait(600)
    reduce_own_rank(rank)


def test_results_come_in_rank_order(ranks2: RankPool, ranks3: RankPool) -> None:
    assert ranks2.run(describe_rank, "a") == [(0, 0, 2, "a"), (1, 1, 2, "a")]
    assert ranks3.run(describe_rank, "b") == [(0, 0, 3, "b"), (1, 1, 3, "b"), (2, 2, 3, "b")]


def test_ranks_reduce_together(ranks3: RankPool) -> None:
    for total in ranks3.run(reduce_own_rank):
        torch.testing.assert_close(total, torch.full((3,), 6.0))


def test_ranks_are_reused_after_success(ranks2: RankPool) -> None:
    assert ranks2.run(process_id) == ranks2.run(process_id)


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="strings hash alike everywhere")
def test_what_strings_hash_to_differs_between_ranks(ranks2: RankPool, ranks3: RankPool) -> None:
    assert len(set(ranks3.run(hash_of_a_string))) == 3
    assert ranks2.run(hash_of_a_string) == ranks3.run(hash_of_a_string)[:2] or START_METHOD == "spawn"


def test_new_ranks_have_the_environment_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "other"):
        monkeypatch.setenv("COMPILED_DDP_TESTS", value)
        with RankPool(1) as pool:
            assert pool.run(variable_of_tests) == [value]


@pytest.mark.skipif(START_METHOD != "forkserver", reason="ranks are not forked")
def test_new_ranks_have_what_is_imported_before_they_are_forked_frozen() -> None:
    with RankPool(1) as pool:
        (frozen,) = pool.run(objects_frozen_before_fork)
    assert frozen > 100_000


def test_ranks_look_for_each_other_more_often_than_a_second_which_is_what_users_have(ranks2: RankPool) -> None:
    assert ranks2.run(seconds_of_looks) == [(LOOK_SECONDS, LOOK_SECONDS)] * 2
    assert seconds_of_looks(0) == (1.0, 1.0)


def test_a_run_may_go_without_process_group(ranks2: RankPool) -> None:
    assert ranks2.run(has_process_group, process_group=False) == [False, False]
    assert ranks2.run(has_process_group) == [True, True]


def test_exception_is_reported_with_its_traceback(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="wrong on rank 1") as failure:
        ranks2.run(raise_on_rank_1)
    message = str(failure.value)
    assert "rank 1 failed" in message
    assert "in raise_on_rank_1" in message
    assert "rank 0" not in message
    assert ranks2.run(process_id), "the run after a failure works"


def test_ranks_left_waiting_by_a_failure_are_reported_with_stacks(ranks2: RankPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="wrong on rank 1") as failure:
        ranks2.run(raise_while_others_wait)
    assert "rank 0 had not returned" in str(failure.value)
    assert "in barrier" in str(failure.value)
    assert time.monotonic() - begin < 30, "the collective's own timeout was not waited for"


def test_failed_assertion_shows_local_values(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="assert expected == 42") as failure:
        ranks2.run(fail_an_assertion)
    assert "expected = 41" in str(failure.value)


def test_result_that_cannot_travel_is_reported(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        ranks2.run(return_a_lock)


def test_rank_that_dies_is_reported(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="exit code 7"):
        ranks2.run(end_the_process)


def test_hang_fails_with_stacks_of_all_ranks(ranks2: RankPool) -> None:
    ranks2.run(process_id)  # the ranks are up: what follows measures the watchdog
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0, 1\] had not returned after 2 s") as failure:
        ranks2.run(wait_on_rank_0, timeout_seconds=2.0)
    assert time.monotonic() - begin < 20
    rank_0, rank_1 = str(failure.value).split("---- rank 1")
    assert "in wait_on_rank_0" in rank_0
    assert "in reduce_own_rank" in rank_1
    assert ranks2.run(describe_rank, "again")[1] == (1, 1, 2, "again")


def test_function_that_ranks_cannot_import_is_refused(ranks2: RankPool) -> None:
    with pytest.raises(ValueError, match="module-level"):
        ranks2.run(lambda rank: rank)
