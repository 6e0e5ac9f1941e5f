"""A section's process: `python -m benchmarks.gpu.child MODULE SETTINGS ANSWER`, the last being the file to write."""

import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu import deadline
from benchmarks.gpu.settings import Settings


def main() -> None:
    module, settings, answer = sys.argv[1:]
    deadline.write_stacks_before_it()
    found = importlib.import_module(module).measure(Settings.from_json(json.loads(settings)))
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
