"""The calibration that a wrapper plans for where it was given none: measured once, and the same again in the next run.

A plan stands in the keys of compiled graphs, and other buckets round other sums. So what was measured is kept in
Inductor's cache folder, beside what was compiled for it, and taken again as long as a new measurement is near it.
`compiled-ddp precompile` pins what it has compiled for: it is taken without a measurement.

Rank 0's knowledge counts, and goes to all ranks as numbers.
"""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from compiled_ddp import torch_private
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import Compute, Link
from compiled_ddp.ranks import pretended
from compiled_ddp.ranks.calibration import QUICK_SECONDS, backend_of, measure
from compiled_ddp.ranks.communicator import Communicator

_log = logging.getLogger(__name__)

_NOTED_BYTES = 256 * 1024, 4 * 2**20  # all-reduces by which links are compared
_NEAR = 2.0  # so much larger or smaller is the same machine on another day
_MOST_KEPT = 32  # links and devices in one folder

_Key = tuple[object, ...]

_of_this_process: dict[_Key, Calibration] = {}


def calibration_for(communicator: Communicator, device: torch.device) -> Calibration:
    """What the communicator's ranks plan for, with gradients on `device`: the same on every rank. A collective."""
    if (world := pretended.current()) is not None:
        return world.calibration()
    if communicator.world_size == 1:  # nothing is sent; and work on several threads would hang in forked processes
        return Calibration("", 1, 1, device.type, Link(0.0, math.inf), Compute(math.inf, math.inf))
    is_first = communicator.rank == 0
    key = (tuple(communicator.ranks.ranks), str(device), torch.get_num_threads())
    known = (_of_this_process.get(key) or _pinned(communicator.world_size)) if is_first else None
    calibration = _of_first(communicator, device, known)
    if calibration is None:
        measured = measure(communicator, device, seconds=QUICK_SECONDS)
        calibration = _of_first(communicator, device, _kept_or_new(measured) if is_first else None)
        assert calibration is not None, "rank 0 has measured"
    _of_this_process[key] = calibration
    return calibration


def pin(calibration: Calibration, folder: Path) -> None:
    """Let jobs of so many ranks that use `folder` as their cache plan for this one. Raises OSError."""
    others = [entry for entry in _entries(folder) if not (entry.pinned and _is_of(entry.calibration, calibration))]
    _write(folder, [*others, _Entry(calibration, pinned=True)])


# ---- the file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    calibration: Calibration
    pinned: bool


def _file(folder: Path) -> Path:
    return torch_private.compiler_cache.own_folder(folder) / "calibrations.json"


def _entries(folder: Path) -> list[_Entry]:
    """Those that can be read: whatever else is there is written over."""
    return [*_readable(_file(folder))]


def _readable(file: Path) -> Iterator[_Entry]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for each in found if isinstance(found, list) else ():
        try:
            yield _Entry(Calibration.from_json(json.dumps(each["calibration"])), bool(each["pinned"]))
        except (ValueError, TypeError, KeyError) as error:
            _log.debug("%s: an entry is not read: %s", file, error)


def _write(folder: Path, entries: list[_Entry]) -> None:
    file = _file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    found = [{"pinned": each.pinned, "calibration": json.loads(each.calibration.to_json())} for each in entries]
    torch_private.compiler_cache.write_whole(file, json.dumps(found[-_MOST_KEPT:], indent=1).encode())


def _pinned(world_size: int) -> Calibration | None:
    entries = reversed(_entries(torch_private.compiler_cache.folder()))
    return next((e.calibration for e in entries if e.pinned and e.calibration.world_size == world_size), None)


def _kept_or_new(measured: Calibration) -> Calibration:
    """The one that was kept for these ranks and this device if it is near, else this one, which is kept then."""
    folder = torch_private.compiler_cache.folder()
    entries = _entries(folder)
    of_this = [e for e in entries if not e.pinned and _is_of(e.calibration, measured)]
    for entry in of_this:
        if _is_near(entry.calibration, measured):
            return entry.calibration
    try:
        _write(folder, [*(entry for entry in entries if entry not in of_this), _Entry(measured, pinned=False)])
    except OSError as error:
        _log.debug("the calibration is not kept: %s", error)
    return measured


def _is_of(one: Calibration, other: Calibration) -> bool:
    def what(each: Calibration) -> _Key:
        return each.backend, each.world_size, each.hosts, each.device

    return what(one) == what(other)


def _is_near(one: Calibration, other: Calibration) -> bool:
    """By what small and large all-reduces take, and by how fast ranks compute.

    Not by the start-up alone: on a slow link it is measured as anything between nothing and a tenth of a small one, and
    on a fast one it varies by three, as waking up a processor is part of it.
    """

    def times(each: Calibration) -> list[float]:
        return [*map(each.link.seconds, _NOTED_BYTES), each.compute.flops_per_second, each.compute.bytes_per_second]

    return all(max(a, b) <= _NEAR * min(a, b) for a, b in zip(times(one), times(other), strict=True))


# ---- from rank 0 to all ----------------------------------------------------------------------------------------------


_OF_LINK = len(fields(Link))
_SENT = 2 + _OF_LINK + len(fields(Compute))


def _of_first(communicator: Communicator, device: torch.device, known: Calibration | None) -> Calibration | None:
    """Rank 0's; None if it has none. Everybody else's is ignored."""
    numbers = [0.0] * _SENT
    if known is not None:
        numbers = [1.0, float(known.hosts), *astuple(known.link), *astuple(known.compute)]
    shared = torch.tensor(numbers, dtype=torch.float64, device=device)
    communicator.broadcast([shared])
    is_known, hosts, *numbers = shared.tolist()
    if not is_known:
        return None
    link, compute = Link(*numbers[:_OF_LINK]), Compute(*numbers[_OF_LINK:])
    backend = backend_of(communicator.group, device)
    return Calibration(backend, communicator.world_size, int(hosts), device.type, link, compute)
