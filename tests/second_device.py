"""Two devices of a kind of their own on a machine without a GPU: `twins:0` and `twins:1`, whose memory is the CPU's.

Autograd runs backwards in a thread for each of them. A process that has registered them cannot be rid of them: ranks
that do are no other tests' ranks.
"""

import fcntl
import importlib.util
import subprocess
import sysconfig
import types
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")
KIND = "twins"


def build(directory: Path) -> Path:
    """Compile the extension into `directory`, which takes about 20 s; of several processes one does."""
    library = directory / "second_device.so"
    with (directory / "second_device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    include = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    python = f"-I{sysconfig.get_paths()['include']}"
    link = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=second_device", *include, python]
    subprocess.run(
        [*command, str(SOURCE), *link, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(library)],
        check=True,
    )


def register(library: Path) -> None:
    """Make the devices known to torch and, through gloo, to torch.distributed; once in a process."""
    if hasattr(torch, KIND):
        return
    specification = importlib.util.spec_from_file_location("second_device", library)
    assert specification is not None and specification.loader is not None
    extension = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(KIND)
    module = types.ModuleType(f"torch.{KIND}")
    module.__dict__.update(
        device_count=lambda: 2,
        is_available=lambda: True,
        current_device=lambda: 0,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(KIND, module)

    def backend(store: dist.Store, rank: int, world_size: int, timeout: object) -> dist.Backend:
        return extension.backend(dist.ProcessGroupGloo(store, rank, world_size, timeout))

    dist.Backend.register_backend(KIND, backend, devices=[KIND])


def group() -> dist.ProcessGroup:
    """A process group of all ranks for the CPU and these devices."""
    made = dist.new_group(backend=f"cpu:gloo,{KIND}:{KIND}", timeout=timedelta(seconds=30))
    assert made is not None
    return made
