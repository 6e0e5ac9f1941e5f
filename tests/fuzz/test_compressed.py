"""Random programs under lossy communication hooks: nothing of a gradient is lost, and nothing counted twice.

The short run: the same programs every time, in `make long` more of them. `make fuzz WHAT=hooks` runs as many others as
one likes.
"""

import pytest
from hypothesis import given, settings

from fuzz.compressed import Compressed, compressed_programs, conserve
from fuzz.test_random_models import SHORT
from ranks import RankPool


@settings(SHORT, max_examples=6)
@given(compressed_programs())
def test_what_is_sent_and_owed_is_what_two_ranks_compute(ranks2: RankPool, compressed: Compressed) -> None:
    conserve(ranks2, compressed)


@settings(SHORT, max_examples=2)
@given(compressed_programs())
def test_what_is_sent_and_owed_is_what_three_ranks_compute(ranks3: RankPool, compressed: Compressed) -> None:
    conserve(ranks3, compressed)


@pytest.mark.slow
@settings(SHORT, max_examples=30)
@given(compressed_programs())
def test_the_same_of_more_programs_on_two_ranks(ranks2: RankPool, compressed: Compressed) -> None:
    conserve(ranks2, compressed)


@pytest.mark.slow
@settings(SHORT, max_examples=12)
@given(compressed_programs())
def test_the_same_of_more_programs_on_three_ranks(ranks3: RankPool, compressed: Compressed) -> None:
    conserve(ranks3, compressed)
