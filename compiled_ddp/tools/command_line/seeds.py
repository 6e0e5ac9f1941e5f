"""The random numbers of a user's script and function begin from one seed, whatever draws them."""

import importlib
import importlib.util
import random

import torch


def seed_all(seed: int) -> None:
    """Seed torch, Python's `random`, and numpy where it is installed: a script may import it later."""
    torch.manual_seed(seed)
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(seed % 2**32)
