"""The size of a bucket where the user gives none."""

import pytest
import torch
from torch import nn

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.ranks.link_speed import bucket_cap_for
from ranks import RankPool


@pytest.mark.parametrize(
    ("megabytes_per_second", "expected"),
    [(30, 2), (125, 2), (260, 2), (280, 8), (1250, 8), (4000, 8), (5000, 25), (400_000, 25), (float("inf"), 25)],
)
def test_a_faster_link_has_larger_buckets(megabytes_per_second: float, expected: float) -> None:
    assert bucket_cap_for(megabytes_per_second * 1e6) == expected


def _sizes_of_a_default(rank: int) -> list[str]:
    return [str(wrap(nn.Linear(2, 2)).explain()) for wrap in (compile_ddp, EagerDDP)]


def test_every_rank_measures_the_same_link_and_explain_tells_it(ranks3: RankPool) -> None:
    told = ranks3.run(_sizes_of_a_default)
    assert told[0] == told[1] == told[2]
    for text in told[0]:
        size, speed = float(text.split("closes at ")[1].split()[0]), float(text.split("reduces ")[1].split()[0])
        assert bucket_cap_for(speed * 1e6) == size


def _measured_without_need(rank: int) -> list[str]:
    def refuse(*_: object) -> float:
        raise AssertionError("measured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.wrapping.setup.measure_bytes_per_second", refuse)
        alone = torch.distributed.new_group([rank], use_local_synchronization=True)
        wrappers = [EagerDDP(nn.Linear(2, 2), bucket_cap_mb=3), EagerDDP(nn.Linear(2, 2), process_group=alone)]
        return [str(wrapper.explain()) for wrapper in wrappers]


def test_a_given_size_and_a_group_of_one_need_no_measurement(ranks2: RankPool) -> None:
    for given, alone in ranks2.run(_measured_without_need):
        assert "closes at 3 MiB; " in given
        assert "closes at 25 MiB; " in alone
