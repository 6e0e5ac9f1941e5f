"""Where the user's code has called into this package: what warnings and errors point to."""

import inspect
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn

_FOLDERS = tuple(f"{Path(file).parent}/" for file in (__file__, torch.__file__))


def warn_user(message: str) -> None:
    """Warn at the line outside of this package, and of torch, that has led here."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def line_that_raised(error: BaseException) -> str:
    """The innermost line outside of this package, and of torch, through which `error` came: its place and its text.

    And of which class the module is that it came through behind that, as torch.nn's own.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    summaries = traceback.extract_tb(error.__traceback__)
    outside = [place for place, each in enumerate(summaries) if not each.filename.startswith(_FOLDERS)]
    if not outside:
        return "an unknown line"
    line = summaries[outside[-1]]
    modules = [each.f_locals.get("self") for each in frames[outside[-1] + 1 :]]
    behind = [type(each).__name__ for each in modules if isinstance(each, nn.Module)]
    return f"{line.filename}:{line.lineno} (`{line.line}`{f', in {behind[-1]}' if behind else ''})"
