"""What a wrapper costs the host: that all variants are measured, and that the package's own calls are told by room."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import host_time, kept
from benchmarks.host_time import PACKAGE, by_room
from compiled_ddp.tools.comparison.ranks import Rank
from ranks import RankPool


def test_own_calls_are_summed_up_by_room_and_others_are_left_out() -> None:
    functions = {
        (f"{PACKAGE}/step/finish.py", 29, "finish"): (10, 10, 0.002, 0.5, {}),
        (f"{PACKAGE}/step/ending.py", 38, "run"): (20, 20, 0.001, 0.5, {}),
        (f"{PACKAGE}/eager.py", 88, "_run_module"): (10, 10, 0.004, 0.5, {}),
        ("/somewhere/torch/nn/modules/module.py", 1, "forward"): (90, 90, 1.0, 1.0, {}),
    }
    rows = [(row.room, row.calls, pytest.approx(row.own)) for row in by_room(functions, steps=10)]
    assert rows == [("eager.py", 1, 400), ("step", 3, 300), ("all", 4, 700)]


def _measured(rank: int) -> list[str]:
    names = ["no communication, eager", "torch DDP", "EagerDDP"]
    options = host_time.parse(["--rounds", "2", "--warmup", "1", "--variants", *names])
    shown: list[str] = []
    host_time.measure(options, Rank(rank, 2, torch.device("cpu"), dist.new_group(backend="gloo")), shown.append)
    return shown


def test_every_variant_has_a_row_and_our_wrapper_its_rooms(ranks2: RankPool) -> None:
    for steps, rooms in ranks2.run(_measured):
        floor, ddp, ours = (line.split()[-3:] for line in steps.splitlines()[2:])
        assert floor[-1] == "0" and all(
            float(forward) > 0 and float(backward) > 0 for forward, backward, _ in (ddp, ours)
        )
        calls = {line.split()[0]: float(line.split()[1]) for line in rooms.splitlines()[3:]}
        assert calls["all"] == pytest.approx(sum(calls.values()) / 2, abs=1) and calls["step"] > calls["eager.py"] > 0


def test_the_check_for_kept_gradients_is_timed() -> None:
    assert kept.microseconds(3, in_place=True) > 0 and kept.microseconds(3, in_place=False) > 0
