"""The recipe a result ships with: command, date, versions, hardware."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "compiled-ddp", "numpy", "scikit-learn", "tabulate", "matplotlib")


def recipe(sources: Path, packages: Sequence[str] = PACKAGES, command: str | None = None) -> dict[str, Any]:
    """Everything needed to run the same thing again, as a JSON value.

    `sources` is the folder whose commit says what was run, `packages` those whose versions do; `command` is this
    process's unless it is given.
    """
    return {
        "command": command or shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(sources),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "system": platform.platform(),
        },
    }


def machine(recipe: Mapping[str, Any], device: str) -> str:
    """What a comparison ran on: "AMD EPYC, 2 cores", and before it the GPUs where `device` is not "cpu"."""
    hardware = recipe["hardware"]
    gpus = [] if device == "cpu" else [f"{number} x {name}" for name, number in Counter(hardware["gpus"]).items()]
    return ", ".join([*gpus, hardware["cpu"], f"{hardware['cores']} cores"])


def ran_on(recipe: Mapping[str, Any], machine: str) -> str:
    """ "`machine`; torch 2.13.0+cpu, Python 3.11.7; 2026-11-21"."""
    versions = recipe["versions"]
    return f"{machine}; torch {versions['torch']}, Python {versions['python']}; {recipe['date'][:10]}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit_of(folder: Path) -> str | None:
    if shutil.which("git") is None:
        return None
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
