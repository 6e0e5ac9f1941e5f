"""SCRIPT:FUNCTION on a command line: the function in a file, or in a module, of the user's."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


class NoSuchTarget(ValueError):
    """A command line names what is not there."""


def check_target(target: str) -> None:
    """Raise NoSuchTarget where there is no such file or module, before anything is started. Runs none of it."""
    source, _, _ = target.rpartition(":")
    if source.endswith(".py"):
        _existing_file(Path(source))
        return
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(source.partition(".")[0])
    except ValueError:  # of an empty name
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise _no_module(source)


def find_function(target: str, *, returns: str) -> Callable[..., Any]:
    """The function that `target` names: "folder/script.py:function" or "package.module:function".

    The folder of the script, or the current one, can be imported from then. `returns` says what it is to return. The
    script sees no arguments of the command line. Raises NoSuchTarget where there is no such file, module or function,
    or the script ends itself; what the script raises, it raises.
    """
    source, _, name = target.rpartition(":")
    module = _run_file(Path(source)) if source.endswith(".py") else _import(source)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise NoSuchTarget(f"{source} has no function {name!r}: name one that returns {returns}.")
    return function


def _run_file(source: Path) -> ModuleType:
    path = _existing_file(source)
    sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    with _without_our_arguments(source):
        specification.loader.exec_module(module)
    return module


@contextmanager
def _without_our_arguments(source: str | Path) -> Iterator[None]:
    """A script that reads `sys.argv` as it is run, or ends itself, is not taken for the command."""
    ours, sys.argv = sys.argv, [str(source)]
    try:
        yield
    except SystemExit as ended:
        raise NoSuchTarget(
            f"{source}: the script ended itself: put what it runs behind if __name__ == '__main__'."
        ) from ended
    finally:
        sys.argv = ours


def _import(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _without_our_arguments(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise _no_module(name) from error


def _existing_file(source: Path) -> Path:
    path = source.resolve()
    if not path.is_file():
        raise NoSuchTarget(
            f"there is no file {source} (seen from {Path.cwd()}): name a Python file, as in train.py:make."
        )
    return path


def _no_module(name: str) -> NoSuchTarget:
    return NoSuchTarget(
        f"there is no module {name!r} (looked for from {Path.cwd()}): name a Python file, as in train.py:make, or a "
        "module that can be imported from here."
    )
