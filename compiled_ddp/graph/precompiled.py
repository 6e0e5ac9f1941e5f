"""A folder of Inductor's cache that `compiled-ddp precompile` has filled, known by a file in it."""

import json
import logging
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from compiled_ddp import torch_private
from compiled_ddp.passes import pipeline
from compiled_ddp.telling import log

_log = logging.getLogger(__name__)

Conditions = Mapping[str, str | int]


def conditions(world_size: int) -> Conditions:
    """What must be the same where a folder is filled and where it is used, whatever the graph is."""
    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "compiled_ddp": f"{pipeline.source_hash()[:8]}{torch_private.inductor.source_hash()[:8]}",  # what rewrites
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "number of threads": torch.get_num_threads(),
        "ranks": world_size,
    }


def note_filled(folder: Path, world_size: int, target: str) -> None:
    """Write into `folder` what it is filled for now, besides what it was filled for before."""
    filled_for = {"target": target, **conditions(world_size)}
    others = [entry for entry in _entries(folder) if not filled_for.items() <= entry.items()]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    file = _file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([*others, {"date": now, **filled_for}], indent=1))


def tell_if_foreign(world_size: int) -> None:
    """A line where the folder in use was filled for something else: what does not fit is compiled as if it were empty.

    That it is refused is torch's doing, whose keys have these conditions.
    """
    folder = torch_private.compiler_cache.folder()
    found = [_differences(entry, conditions(world_size)) for entry in _entries(folder)]
    if found and all(found):
        nearest = min(found, key=len)
        log.tell(
            _log,
            f"what `compiled-ddp precompile` has put into {folder} does not fit, and is compiled anew: "
            f"{', '.join(nearest)}.",
        )


def _differences(entry: Mapping[str, Any], here: Conditions) -> list[str]:
    return [
        f"{name} {value} here, {entry.get(name, 'unknown')} there"
        for name, value in here.items()
        if entry.get(name) != value
    ]


def _file(folder: Path) -> Path:
    return folder / "compiled_ddp" / "precompiled.json"


def _entries(folder: Path) -> list[dict[str, Any]]:
    """What it was filled for, each time; nothing where it was not, or where that cannot be read."""
    try:
        entries = json.loads(_file(folder).read_text())
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
