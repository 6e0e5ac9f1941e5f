"""Running the scripts of tests/integrations/loops, which report a JSON line per case."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranks import RANK_ENVIRONMENT

LOOPS = Path(__file__).parent / "integrations" / "loops"


def run_loops(
    script: str, folder: Path, *, launcher: Sequence[str] = (), timeout_s: float, **environment: str
) -> list[dict[str, Any]]:
    """What `script` reports while it works in `folder`; `launcher` are arguments of Python before it."""
    ended = subprocess.run(
        [sys.executable, *launcher, str(LOOPS / script), str(folder)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **RANK_ENVIRONMENT, **environment},
    )
    assert ended.returncode == 0, ended.stderr[-8000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"case"')]
