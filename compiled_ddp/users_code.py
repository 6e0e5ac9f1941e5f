"""Where the user's code has called into this package: what warnings point to."""

import inspect
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
