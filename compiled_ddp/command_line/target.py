"""SCRIPT:FUNCTION on a command line: the function in a file, or in a module, of the user's."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def find_function(target: str, *, returns: str) -> Callable[..., Any]:
    """The function that `target` names: "folder/script.py:function" or "package.module:function".

    The folder of the script, or the current one, can be imported from then. `returns` says what it is to return.
    Raises ValueError where there is no such file, module or function; what the script raises, it raises.
    """
    source, _, name = target.rpartition(":")
    module = _run_file(Path(source)) if source.endswith(".py") else _import(source)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{source} has no function {name!r}: name one that returns {returns}.")
    return function


def _run_file(source: Path) -> ModuleType:
    path = source.resolve()
    if not path.is_file():
        raise ValueError(
            f"there is no file {source} (seen from {Path.cwd()}): name a Python file, as in train.py:make."
        )
    sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ValueError(
            f"there is no module {name} (looked for from {Path.cwd()}): name a Python file, as in train.py:make, or a "
            "module that can be imported from here."
        ) from error
