"""Grad mode, which is off in a backward unless it was asked for with create_graph."""

import contextlib

import torch


def grad_mode_off() -> contextlib.AbstractContextManager[object]:
    """`torch.no_grad()`, where that would change anything: it costs as much as what stands in it."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()
