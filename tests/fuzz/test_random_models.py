"""Random programs under both wrappers, on two and three ranks, against autograd averaged by hand.

The short run: the same programs every time, in `make long` more of them. `make fuzz` runs as many others as one likes.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fuzz import description
from fuzz.description import Change, Failure, Model, Op, Program, Step
from fuzz.drawing import drawn_with
from fuzz.shrink import shrink
from fuzz.strategy import disturbed_programs, kinds_of, programs
from fuzz.watch import compare
from ranks import RankPool

BOTH = ("EagerDDP", "compile_ddp")

# No deadline: a program is compiled on every rank, and one that fails may cost new ranks. Ranks are reused on purpose.
SHORT = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


@settings(SHORT, max_examples=8)
@given(programs())
def test_random_programs_are_averaged_right_on_two_ranks(ranks2: RankPool, program: Program) -> None:
    compare(ranks2, program, BOTH)


@settings(SHORT, max_examples=3)
@given(programs())
def test_random_programs_are_averaged_right_on_three_ranks(ranks3: RankPool, program: Program) -> None:
    compare(ranks3, program, BOTH)


@pytest.mark.slow
@settings(SHORT, max_examples=40)
@given(programs())
def test_more_random_programs_are_averaged_right_on_two_ranks(ranks2: RankPool, program: Program) -> None:
    compare(ranks2, program, BOTH)


@pytest.mark.slow
@settings(SHORT, max_examples=20)
@given(programs())
def test_more_random_programs_are_averaged_right_on_three_ranks(ranks3: RankPool, program: Program) -> None:
    compare(ranks3, program, BOTH)


def _labels(numbers: range) -> list[str]:
    return [f"0.{number}" for number in numbers]


@pytest.mark.parametrize(
    "label", [*_labels(range(6)), *(pytest.param(label, marks=pytest.mark.slow) for label in _labels(range(6, 24)))]
)
def test_random_programs_that_users_disturb_are_averaged_right(ranks2: RankPool, label: str) -> None:
    compare(ranks2, drawn_with(disturbed_programs(), label), BOTH)


# ---- the programs themselves, without ranks --------------------------------------------------------------------------


def test_a_label_stands_for_one_program_and_its_repr_makes_it() -> None:
    for label in ("1.2", "1.3"):
        program = drawn_with(disturbed_programs(), label)
        assert program == drawn_with(disturbed_programs(), label)
        assert eval(repr(program), vars(description)) == program


def test_what_does_not_make_it_fail_is_left_out() -> None:
    ops = (Op("branch", inner=(Op("linear", 1), Op("break"))), Op("linear", 2))
    steps = (Step(zero="keep", rows=(1, 3)), Step(failure=Failure("backward"), before=(Change("double"),)))
    program = Program(Model(ops, unused=1), steps)
    fails = lambda smaller: "failure" in repr(smaller) and "linear" in repr(smaller.model)  # noqa: E731
    assert repr(shrink(program, fails, tries=200)) == (
        "Program(Model((Op('linear'),)), steps=(Step(failure=Failure('backward')),))"
    )
    assert kinds_of(program) == ["conversions", "exceptions"]
