"""Random programs under both wrappers, on two and three ranks, against autograd averaged by hand.

The short run: the same programs every time. `make fuzz` runs as many others as one likes.
"""

from hypothesis import HealthCheck, Phase, given, settings

from fuzz.description import Program
from fuzz.strategy import programs
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


@settings(SHORT, max_examples=12)
@given(programs())
def test_random_programs_are_averaged_right_on_two_ranks(ranks2: RankPool, program: Program) -> None:
    compare(ranks2, program, BOTH)


@settings(SHORT, max_examples=6)
@given(programs())
def test_random_programs_are_averaged_right_on_three_ranks(ranks3: RankPool, program: Program) -> None:
    compare(ranks3, program, BOTH)
