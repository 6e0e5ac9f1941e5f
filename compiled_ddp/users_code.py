"""Where the user's code has called into this package: what warnings and errors point to."""

import inspect
import traceback
import warnings
from pathlib import Path

import torch

_FOLDERS = tuple(f"{Path(file).parent}/" for file in (__file__, torch.__file__))


def warn_user(message: str) -> None:
    """Warn at the line outside of this package, and of torch, that has led here."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def line_that_raised(error: BaseException) -> str:
    """The innermost line outside of this package, and of torch, through which `error` came: its place and its text."""
    outside = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_FOLDERS)]
    if not outside:
        return "an unknown line"
    return f"{outside[-1].filename}:{outside[-1].lineno} (`{outside[-1].line}`)"
