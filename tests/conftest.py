"""Fixtures that every test may use: the pools of rank processes and the session's own compile cache."""

import contextlib
import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import second_device
import torch
import torch.distributed as dist
from covering import mark_the_rest_of_products

from ranks import RankPool

# Ranks have the other processors. Threads that wait for theirs turn in circles, in the processes of tests too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# An operator that returns its argument is an error where torch finds the variable CI, and only a warning elsewhere.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"
# Else Inductor compiles and loads a library, to see that the compiler has this CPU's vectors: 5 s in each empty folder
# of caches, and 0.6 s in each process where it is there.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory of Inductor's and AOTAutograd's caches: the session's own, shared by all tests, ranks and workers."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory = directory / "inductor"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
        _link_by_gold(directory.parent / "linker", patch)
        yield directory


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A test that leaves one fails itself, instead of whichever run behind it in the same process."""
    was_there = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_there:
        dist.destroy_process_group()
        pytest.fail("this test has left a process group: let it call torch.distributed.destroy_process_group()")


def _link_by_gold(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Kernels are linked to all of libtorch: its symbols take ld a third of a second, and gold a tenth."""
    gold = shutil.which("ld.gold")
    if gold is not None:
        directory.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # of another worker
            (directory / "ld").symlink_to(gold)
        patch.setenv("COMPILER_PATH", str(directory), prepend=os.pathsep)


@pytest.fixture(scope="session")
def ranks2(inductor_cache: Path) -> Iterator[RankPool]:
    """Two rank processes, shared by the session's tests: `ranks2.run(function, *args)`."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks3(inductor_cache: Path) -> Iterator[RankPool]:
    """Three rank processes, shared by the session's tests: `ranks3.run(function, *args)`."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def twins_library(inductor_cache: Path) -> Path:
    """What `second_device.register` loads."""
    return second_device.build(inductor_cache.parent)


@pytest.fixture(scope="module")
def twin_ranks2(inductor_cache: Path) -> Iterator[RankPool]:
    """Two ranks of a module's tests alone, which no other test's ranks are like once they know the second device."""
    with RankPool(2) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest_of_products(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Spare the collector the tests and all that they have imported, which each full collection would walk through."""
    gc.collect()
    gc.freeze()
