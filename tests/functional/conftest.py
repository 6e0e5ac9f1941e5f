"""What several files of tests of functional and whole steps use."""

import warnings
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[None]:
    """Each whole step here makes a group of one rank, and says that there are no others, and that it is one of many."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(returns this process's own gradients|has been made 16 times)")
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
