"""Inductor's checks for vector instructions, made once for all processes that share its cache.

Before it writes C++, Inductor builds a library for each kind of instructions and loads it in a process of its own: half
a second of CPU time for each kind (torch 2.13), in every rank, while the others of the host wait for a lock. A check
that has succeeded leaves a file in Inductor's cache, by which other processes know.
"""

import contextlib
import functools
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compiled_ddp.torch_private import compiler_cache


@functools.cache
def remember() -> None:
    """From here on, in this process."""
    from torch._inductor.cpu_vec_isa import VecISA

    VecISA.check_build = _remembering(VecISA.check_build)  # type: ignore[assignment]


def _remembering(check_build: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    @functools.wraps(check_build)
    def check(kind: Any, code: str) -> bool:
        known = compiler_cache.own_folder() / f"vectors_{_identity(kind, code)}"
        if known.exists():
            return True
        loads = check_build(kind, code)
        if loads:
            with contextlib.suppress(OSError):  # of a folder that cannot be written: each process checks by itself
                known.parent.mkdir(parents=True, exist_ok=True)
                known.touch()
        return loads

    return check


def _identity(kind: Any, code: str) -> str:
    """Identifies a check: what is built, by which compiler, and what loads it."""
    compiler = _compiler()
    files = [Path(shutil.which(compiler) or "."), Path(torch.__file__).parent / "lib"]
    dates = [(str(file), file.stat().st_mtime_ns) for file in files]
    of_host = compiler, dates, torch.__version__, compiler_cache.processor(), platform.node()
    return compiler_cache.digest((code, kind.build_arch_flags(), of_host))


def _compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()
