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
        "processor": torch_private.compiler_cache.processor(),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "number of threads": torch.get_num_threads(),
        "ranks": world_size,
    }


def note_filled(folder: Path, world_size: int, target: str) -> None:
    """Write into `folder` what it is filled for now, besides what it was filled for before."""
    filled_for = {"target": target, **conditions(world_size)}
    others = [entry for entry in _entries(folder) if not filled_for.items() <= entry.items()]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    noted = json.dumps([*others, {"date": now, **filled_for}], indent=1)
    file = _file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch_private.compiler_cache.write_whole(file, noted.encode())


def check_processor(folder: Path) -> None:
    """Raise ValueError where `folder` was filled on another kind of processor.

    The keys of torch's caches do not have it (2.13): what was compiled for AVX512 is found, and run, where AVX2 is all.
    """
    here = torch_private.compiler_cache.processor()
    others = sorted({entry["processor"] for entry in _entries(folder) if entry.get("processor", here) != here})
    if others:
        raise ValueError(
            f"TORCHINDUCTOR_CACHE_DIR: {folder} was filled by `compiled-ddp precompile` on another kind of processor "
            f"({', '.join(others)}; here {here}), and torch does not tell in its cache for which one code was "
            "compiled: name another folder, or fill one on a machine like this one."
        )


def tell_if_foreign(world_size: int) -> None:
    """A line where the folder in use was filled for something else: what does not fit is compiled as if it were empty.

    That it is not used is torch's doing, whose keys have these conditions, but for the processor.
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
    return torch_private.compiler_cache.own_folder(folder) / "precompiled.json"


def _entries(folder: Path) -> list[dict[str, Any]]:
    """What it was filled for, each time; nothing where it was not, or where that cannot be read."""
    try:
        entries = json.loads(_file(folder).read_text())
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
