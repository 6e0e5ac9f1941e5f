"""Make a failing program small: whatever can be left out, or be as by default, while it still fails."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar

from fuzz.readable import default_of

T = TypeVar("T")


def shrink(program: T, fails: Callable[[T], bool], *, tries: int) -> T:
    """The smallest program found that fails, after so many tries at most."""
    found = True
    while found and tries > 0:
        found = False
        for smaller in simpler(program):
            tries -= 1
            if fails(smaller):
                program, found = smaller, True
                break
            if tries <= 0:
                break
    return program


def simpler(value: Any) -> Iterator[Any]:
    """Values like this one with one thing less, the largest steps first."""
    if isinstance(value, tuple):
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
        for index, part in enumerate(value):
            for smaller in simpler(part):
                yield (*value[:index], smaller, *value[index + 1 :])
            inner = getattr(part, "inner", ())
            if inner:
                yield value[:index] + inner + value[index + 1 :]
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            default, now = default_of(field), getattr(value, field.name)
            if default is not MISSING and now != default:
                yield replace(value, **{field.name: default})
        for field in fields(value):
            if getattr(value, field.name) == default_of(field):
                continue  # nothing is simpler than that
            for smaller in simpler(getattr(value, field.name)):
                if smaller != () or default_of(field) == ():  # a value for each rank is never left out
                    yield replace(value, **{field.name: smaller})
