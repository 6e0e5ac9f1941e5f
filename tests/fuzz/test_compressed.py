"""Random programs under lossy communication hooks: nothing of a gradient is lost, and nothing counted twice.

The short run: the same programs every time. `make fuzz WHAT=hooks` runs as many others as one likes.
"""

from hypothesis import given, settings

from fuzz.compressed import Compressed, compressed_programs, conserve
from fuzz.test_random_models import SHORT
from ranks import RankPool


@settings(SHORT, max_examples=12)
@given(compressed_programs())
def test_what_is_sent_and_owed_is_what_two_ranks_compute(ranks2: RankPool, compressed: Compressed) -> None:
    conserve(ranks2, compressed)


@settings(SHORT, max_examples=4)
@given(compressed_programs())
def test_what_is_sent_and_owed_is_what_three_ranks_compute(ranks3: RankPool, compressed: Compressed) -> None:
    conserve(ranks3, compressed)
