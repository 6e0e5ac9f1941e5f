"""One program for each label.

Hypothesis' own runs vary the programs that they have drawn before, so that some kinds are hardly ever drawn, and a
program depends on all before it. So this asks for its data directly; what fails is made small by shrink.py.
"""

import contextlib
import itertools
from random import Random
from typing import Any

from hypothesis.control import BuildContext
from hypothesis.internal.conjecture.data import ConjectureData, StopTest
from hypothesis.strategies import SearchStrategy


def drawn_with(strategy: SearchStrategy[Any], label: str) -> Any:
    """The same program for the same label, and independent of all others: hypothesis' own runs vary one another."""
    for attempt in itertools.count():
        data = ConjectureData(random=Random(f"{label} {attempt}"))
        with contextlib.suppress(StopTest), BuildContext(data, is_final=False, wrapped_test=lambda: None):
            return data.draw(strategy)
    raise AssertionError
