"""Keyword arguments that are none: the error names the one that may have been meant."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about `name`, which is none of those known; empty where none is like it."""
    return "".join(f" Did you mean {meant!r}?" for meant in difflib.get_close_matches(name, known, n=1))


def check_switches(**switches: object) -> None:
    """Raise TypeError for one that is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, found {value!r}.")


def suggests_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, whose TypeError for an unknown keyword suggests one; for what is called once, as a constructor is."""
    parameters = inspect.signature(function).parameters.values()
    known = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for keyword in kwargs:
            if keyword not in known:
                raise TypeError(
                    f"{name} got an unexpected keyword argument {keyword!r}.{suggestion(keyword, sorted(known))}"
                )
        return function(*args, **kwargs)

    return call
