"""Two devices of a kind of their own on a machine without a GPU: `twins:0` and `twins:1`, whose memory is the CPU's.

Autograd runs backwards in a thread for each of them. Each stream is a thread too, which runs kernels in its order and
none of another stream's, late where `delays` says so; what the host has not waited for, it reads too early, and memory
that is freed is overwritten, unless the streams that use it were recorded. A process that has registered them cannot be
rid of them: ranks that do are no other tests' ranks.
"""

import contextlib
import fcntl
import importlib.util
import subprocess
import sysconfig
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import happens_before
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
    names = ["-DTORCH_EXTENSION_NAME=second_device", "-DNDEBUG"]  # as torch is built: some of its types are smaller so
    command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", *names, *include, python]
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
        current_device=torch.accelerator.current_device_index,
        second_device=extension,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device: torch.get_rng_state(),  # its kernels are the CPU's
        set_rng_state=lambda state, device: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(KIND, module)

    def backend(store: dist.Store, rank: int, world_size: int, timeout: object) -> dist.Backend:
        stores = [dist.PrefixStore(f"{KIND}:{number}", store) for number in range(2)]
        return extension.backend([dist.ProcessGroupGloo(store, rank, world_size, timeout) for store in stores])

    dist.Backend.register_backend(KIND, backend, devices=[KIND])


@contextlib.contextmanager
def delays(
    seed: int, *, share: float = 0.1, longest_us: int = 1000, collectives_us: int | None = None
) -> Iterator[None]:
    """In here a `share` of all kernels starts late, by up to `longest_us`; which ones, and by how much, is `seed`'s.

    Collectives by up to `collectives_us`, if that is given.
    """
    print(f"seed of the delays: {seed}")
    _extension().set_delays(seed, share, longest_us, longest_us if collectives_us is None else collectives_us)
    try:
        yield
    finally:
        _extension().set_delays(seed, 0.0, 0, 0)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """In here `stream` runs nothing of what it is given, so that whoever does not wait for it is too early.

    It goes on once all has run that can without it, however long that takes.
    """
    release = _extension().hold(stream.device_index, stream.stream_id)
    try:
        yield
        _extension().settle()
    finally:
        release()


@contextlib.contextmanager
def held_collectives() -> Iterator[None]:
    """The same of the streams of all process groups, whose collectives come late."""
    release = _extension().hold_collectives()
    try:
        yield
        _extension().settle()
    finally:
        release()


@contextlib.contextmanager
def looking_for_races() -> Iterator[list[happens_before.Race]]:
    """Yields a list: of all that is done in here, what no order of streams keeps apart, by order alone."""
    races: list[happens_before.Race] = []
    _extension().begin_order()
    try:
        yield races
    finally:
        races += happens_before.races(happens_before.Step(*step) for step in _extension().end_order())


@contextlib.contextmanager
def collectives_that_keep_nothing() -> Iterator[None]:
    """A fault: in here the memory of a collective's tensors may be used again while it runs."""
    _extension().keep_tensors(False)
    try:
        yield
    finally:
        _extension().keep_tensors(True)


def waited_for() -> set[str]:
    """The operators for which the host has waited, as nothing tells beforehand what they return: no race shows."""
    return set(_extension().waited_for())


def _extension() -> Any:
    return getattr(torch, KIND).second_device


def group() -> dist.ProcessGroup:
    """A process group of all ranks for the CPU and these devices."""
    made = dist.new_group(backend=f"cpu:gloo,{KIND}:{KIND}", timeout=timedelta(seconds=30))
    assert made is not None
    return made
