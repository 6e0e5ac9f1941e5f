"""Default dtypes and devices that the user has changed: everything that a wrapper makes names its own."""

import contextlib
from collections.abc import Iterator

import torch

from fuzz.description import Setting


@contextlib.contextmanager
def changed_defaults(setting: Setting) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, setting.default_dtype))
    if setting.default_device:
        torch.set_default_device(setting.default_device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
