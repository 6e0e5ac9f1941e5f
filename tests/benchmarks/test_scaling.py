"""What size costs: the cases that are measured, what is derived from them, and that the passes are those of a step."""

import json
from pathlib import Path

import pytest

from benchmarks import growth_chart, passes_by_size, scaling, steps_by_size
from benchmarks.passes_by_size import SizedPasses, backward_of_chain
from benchmarks.steps_by_size import SizedSteps
from benchmarks.variants import make_variants
from compiled_ddp.passes.pipeline import PASSES
from compiled_ddp.passes.prove_linearity import prove_linearity
from compiled_ddp.tools.comparison.ranks import Rank
from ranks import RankPool

DDP = SizedSteps("torch DDP", 100, None, 0.1, [0.2, 0.3, 0.4, 0.5, 0.9], [1.0, 2.0, 0.003, 0.004, 0.005], 0.5)
EAGER = SizedSteps("EagerDDP", 100, None, 0.2, [0.2, 0.3, 0.4, 0.5, 0.9], [2.8, 2.0, 0.006, 0.008, 0.010], 0.6)


def test_later_steps_are_those_after_the_second() -> None:
    assert (DDP.first_backward_s, DDP.second_backward_s, DDP.later_backward_s) == (1.0, 2.0, 0.004)
    assert (DDP.first_step_s, DDP.later_forward_s) == (1.2, 0.5)


def test_a_constructor_alone_has_no_steps() -> None:
    alone = SizedSteps("EagerDDP", 100_000, None, 4.0, [], [])
    assert alone.first_step_s is alone.second_backward_s is alone.later_backward_s is None
    assert scaling.table_of_steps([alone]).split()[-1] == "-"


def test_a_wrapper_is_compared_with_torch_s_at_the_same_size() -> None:
    line = scaling.table_of_steps([DDP, EAGER]).splitlines()[-1]
    assert line.split()[-5:] == ["2.00", "2.50", "0.600", "1.20", "2.00"]
    other_size = SizedSteps("EagerDDP", 300, None, 0.2, [0.2] * 3, [2.8] * 3)
    assert scaling.table_of_steps([DDP, other_size]).splitlines()[-1].split()[-5:] == ["-"] * 5


def test_what_is_measured_several_times_is_told_by_its_medians() -> None:
    found = [
        SizedSteps("compile_ddp", 100, "aot_eager", None, [4.0, 1.0], [0.3, 0.1], 4.3),
        SizedSteps("compile_ddp", 100, "aot_eager", 0.2, [5.0, 3.0], [0.1, 0.2], 5.3),
        SizedSteps("compile_ddp", 100, "aot_eager", 0.4, [9.0, 2.0], [0.2, 0.3], None),
        SizedSteps("compile_ddp", 100, "inductor", 0.9, [], []),
    ]
    of_steps, alone = scaling.medians(found)
    assert of_steps == SizedSteps("compile_ddp", 100, "aot_eager", pytest.approx(0.3), [5.0, 2.0], [0.2, 0.2], 4.8)
    assert alone == found[-1]


def test_what_is_compared_is_measured_side_by_side() -> None:
    options = scaling.parse(["--sizes", "10", "20", "--constructor-sizes", "50", "--compiled-sizes", "30"])
    found = [(case.variant, case.parameters, case.steps, case.depth) for case in scaling.cases(options)]
    assert found == [
        *[(variant, size, 12, 0) for size in (10, 20) for variant in scaling.EAGER],
        *[(variant, 50, 0, 0) for variant in scaling.CONSTRUCTED],
        *[(variant, 30, 12, depth) for depth in scaling.DEPTHS for variant in scaling.COMPILED],
    ]


def _measure_on_rank(index: int, variant: str) -> dict:
    import torch
    import torch.distributed as dist

    rank = Rank(index, 2, torch.device("cpu"), dist.new_group(backend="gloo"))
    backend = "aot_eager"
    wrapped = make_variants(backend=backend)[variant]
    return steps_by_size.measure(wrapped, parameters=5, steps=3, backend=backend, rank=rank, depth=7)


@pytest.mark.parametrize("variant", ["torch DDP", "EagerDDP", "compile_ddp"])
def test_ranks_agree_on_what_a_size_costs(ranks2: RankPool, variant: str) -> None:
    first, second = (SizedSteps(**answer) for answer in ranks2.run(_measure_on_rank, variant))
    assert first == second
    assert (first.parameters, len(first.forward_s), len(first.backward_s)) == (5, 3, 3)
    assert first.first_step_cpu_s > 0
    assert first.backend == ("aot_eager" if variant == "compile_ddp" else None)


def test_every_pass_that_runs_before_inductor_is_timed() -> None:
    found = SizedPasses(**passes_by_size.measure(7, repetitions=2))
    not_run = ("reduce_in_place", "fold_into_products")  # those of a graph for no compiler, and of one that folds
    assert list(found.seconds) == [pass_.name for pass_ in PASSES if pass_.name not in not_run]
    assert all(seconds > 0 for seconds in found.seconds.values())


def test_graph_of_the_chain_grows_by_four_nodes_a_parameter() -> None:
    few, more = (len(backward_of_chain(parameters).nodes) for parameters in (3, 5))
    assert more - few == 2 * 4


def test_mean_is_placed_at_the_tangents_of_the_chain() -> None:
    graph = backward_of_chain(3)
    (tangent,) = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]
    graph.lint()
    gradients = [node for node in graph.output_node().args[0] if node is not None]
    assert prove_linearity(graph, [tangent], gradients).proven


def test_curves_rise_with_the_size_and_leave_out_what_was_not_measured() -> None:
    alone = SizedSteps("EagerDDP", 1000, None, 4.0, [], [])
    found = growth_chart.curves([alone, EAGER])
    assert found["EagerDDP", "constructor"] == [(100, 0.2), (1000, 4.0)]
    assert found["EagerDDP", "later backward"] == [(100, 0.008)]


def test_command_writes_its_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_but_passes = ["--sizes", "--constructor-sizes", "--compiled-sizes", "--pass-sizes", "4", "8"]
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    scaling.main([*nothing_but_passes, *files])
    assert "verify_" in capsys.readouterr().out
    assert [passes["parameters"] for passes in json.loads((tmp_path / "out.json").read_text())["passes"]] == [4, 8]
    assert (tmp_path / "out.png").stat().st_size > 0
