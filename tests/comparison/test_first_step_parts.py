"""Where a first step's seconds went, and for which rows that is said."""

from dataclasses import replace

import pytest
import torch

from compiled_ddp.tools.comparison import table
from compiled_ddp.tools.comparison.first_step import why_slow
from compiled_ddp.tools.comparison.probe import of_all_ranks
from compiled_ddp.tools.comparison.result import Comparison, FirstStep, VariantResult
from compiled_ddp.torch_private.compile_times import compile_times

PARTS = FirstStep(
    seconds=32.0,
    wrapping_s=0.5,
    capture_s=1.5,
    forward_s=20.0,
    backward_s=8.0,
    inductor_s=24.0,
    compiled=2,
    loaded=0,
)


def variant(name: str, parts: FirstStep, floor: str = "eager") -> VariantResult:
    seconds = parts.seconds
    return VariantResult(name, floor, True, [[[1, 1, 1]]], first_step_cold_s=seconds, first_step_parts=parts)


def comparison(*variants: VariantResult) -> Comparison:
    return Comparison("toy", "cpu", "loopback", 1, 10, [40], [[0.01]], [*variants])


def eager(seconds: float) -> VariantResult:
    return variant("torch DDP", FirstStep(seconds, 0.1, 0, 0, 0, 0, 0, 0))


def test_a_slow_first_step_is_explained_under_the_table() -> None:
    found = comparison(eager(0.5), variant("compile_ddp", PARTS, "compiled"))
    said = (
        "first step of compile_ddp, 32.0 s: 1.5 s capture by Dynamo, 20.0 s compiling forwards, 8.0 s compiling "
        "backwards (Inductor: 2 graphs in 24.0 s, 0 from its cache), 0.5 s building and wrapping, 2.0 s running, "
        "agreement and checks"
    )
    assert why_slow(found) == [said]
    assert table.render(found).splitlines()[-1] == said


@pytest.mark.parametrize(("shortest", "other"), [(0.1, 1.0), (20.0, 32.0)], ids=["short", "alike"])
def test_what_is_hardly_slower_is_not_explained(shortest: float, other: float) -> None:
    assert why_slow(comparison(eager(shortest), variant("compile_ddp", replace(PARTS, seconds=other)))) == []


def test_what_no_inductor_has_compiled_says_nothing_of_it() -> None:
    (said,) = why_slow(comparison(eager(0.5), variant("compile_ddp", replace(PARTS, compiled=0, inductor_s=0.0))))
    assert "Inductor" not in said and "8.0 s compiling backwards, 0.5 s building" in said


def test_results_from_before_have_no_explanation_and_new_ones_survive_json() -> None:
    found = comparison(eager(0.5), variant("compile_ddp", PARTS))
    assert Comparison.from_json(found.to_json()) == found
    data = found.to_json()
    for each in data["variants"]:
        del each["first_step_parts"]
    assert why_slow(Comparison.from_json(data)) == []


def test_the_parts_are_those_of_the_rank_that_compiled_and_the_seconds_those_of_the_slowest() -> None:
    waited = FirstStep(33.0, 0.5, 1.5, 30.0, 0.1, 0.1, 0, 2)
    assert of_all_ranks([waited, PARTS]) == replace(PARTS, seconds=33.0)
    assert of_all_ranks([waited, PARTS]).rest_s == pytest.approx(3.0)


def test_a_backward_that_is_compiled_within_a_forward_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = {
        "_compile.compile_inner": [3.0, 10.0],
        "OutputGraph.call_user_compiler": [2.5, 9.0],
        "compiled_ddp.backward_within_forward": [4.0],
        "backward._backward_impl": [4.0, 1.0],
        "compiled_ddp.another_backward": [0.5],
        "compile_fx_inner": [2.0, 4.0, 4.5],
    }
    monkeypatch.setattr("torch._dynamo.utils.compilation_time_metrics", phases)
    times = compile_times()
    assert (times.capture_s, times.forward_s, times.backward_s, times.inductor_s) == (1.5, 7.5, 5.5, 10.5)


def test_what_torch_compiles_is_noted() -> None:
    before = compile_times()
    compiled = torch.compile(lambda x: (x * 3).sin(), backend="aot_eager")
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    after = compile_times()
    assert after.capture_s > before.capture_s and after.forward_s > before.forward_s
    assert after.backward_s > before.backward_s
    assert (after.compiled, after.loaded) == (before.compiled, before.loaded)  # Inductor had nothing to do
