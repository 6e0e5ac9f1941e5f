"""The garbage collector is paused while a wrapper is made, and runs again behind it."""

import gc
import weakref

import pytest
from models import wrappers
from torch import nn

from compiled_ddp.collector import collector_paused
from ranks import RankPool


def _raise_if_paused() -> None:
    with collector_paused():
        with collector_paused():
            pass
        if not gc.isenabled():
            raise ValueError("paused")


def test_it_runs_again_behind_an_error_too() -> None:
    with pytest.raises(ValueError, match="paused"):
        _raise_if_paused()
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def _collections_in_a_constructor(_: int, wrapper: str) -> tuple[int, bool, bool]:
    wrap = wrappers([wrapper])[wrapper]
    wrap(nn.Linear(2, 2))  # the first one imports, and Python collects meanwhile
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(200)))
    cycle = _Cycle()
    collected = weakref.ref(cycle)
    del cycle
    found: list[str] = []
    gc.callbacks.append(note := lambda phase, _: found.append(phase))
    try:
        wrapped = wrap(model)
    finally:
        gc.callbacks.remove(note)
    runs_again = gc.isenabled()
    del wrapped
    gc.collect()
    return found.count("start"), runs_again, collected() is None


@pytest.mark.parametrize("wrapper", ["EagerDDP", "compile_ddp"])
def test_a_constructor_collects_nothing(ranks2: RankPool, wrapper: str) -> None:
    """Of 400 parameters it makes some 6,000 objects, with which Python would collect eight times."""
    for collections, runs_again, collected in ranks2.run(_collections_in_a_constructor, wrapper):
        assert collections <= 3, "before it, behind it, and in what compile_ddp does besides"
        assert runs_again and collected
