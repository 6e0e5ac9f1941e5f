"""The garbage collector is paused while a wrapper is made, and looks at young objects alone while a compiler runs."""

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
from models import wrappers
from torch import nn

from compiled_ddp.collector import collector_paused, full_collections_put_off
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


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there old objects are collected bit by bit")
@pytest.mark.parametrize(("objects", "full_collections"), [(100_000, 1), (1000, 0)])
def test_the_full_collection_that_is_due_comes_at_the_end(objects: int, full_collections: int) -> None:
    found: list[int] = []
    gc.collect()  # so that none is due but for what comes
    gc.callbacks.append(note := lambda phase, about: found.append(about["generation"]) if phase == "start" else None)
    try:
        with collector_paused(then_collect=True):
            kept = [[number] for number in range(objects)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == objects
    assert found.count(2) == full_collections


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


# ---- full collections ------------------------------------------------------------------------------------------------


by_generations = pytest.mark.skipif(sys.version_info >= (3, 14), reason="there old objects are collected bit by bit")


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(500, 7, 3)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def _collections_of(cycles: int) -> set[int]:
    """The generations that are collected while as many cycles are made and kept."""
    found: set[int] = set()
    gc.callbacks.append(note := lambda _, information: found.add(information["generation"]))
    try:
        kept = [_Cycle() for _ in range(cycles)]
    finally:
        gc.callbacks.remove(note)
    assert kept
    return found


@by_generations
def test_young_objects_are_collected_while_full_collections_are_put_off(thresholds: tuple[int, int, int]) -> None:
    gc.freeze()  # what there is already: else full collections wait until there is a quarter more
    try:
        gc.collect()  # and counts what is left
        assert _collections_of(30_000) == {0, 1, 2}
        with full_collections_put_off():
            assert _collections_of(30_000) == {0, 1}
        assert gc.get_threshold() == thresholds
    finally:
        gc.unfreeze()


@by_generations
def test_full_collections_are_put_off_until_the_last_context_has_ended(thresholds: tuple[int, int, int]) -> None:
    """As in two threads."""
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(full_collections_put_off())
        put_off = gc.get_threshold()
        second.enter_context(full_collections_put_off())
        first.close()
        assert gc.get_threshold() == put_off != thresholds
    assert gc.get_threshold() == thresholds


@by_generations
def test_a_threshold_that_somebody_sets_meanwhile_stays(thresholds: tuple[int, int, int]) -> None:
    with full_collections_put_off():
        gc.set_threshold(400, 8, 9)
    assert gc.get_threshold() == (400, 8, 9) != thresholds
