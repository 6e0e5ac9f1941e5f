"""The script that measures what checks cost runs in small."""

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("later --parameters 4 --steps 2", r"EagerDDP, 4 parameters: forward \d+ us, backward \d+ us\n"),
        (
            "later --wrapper compile_ddp --parameters 4 --steps 2",
            r"compile_ddp, 4 parameters: forward \d+ us, backward \d+ us\n",
        ),
        ("first --blocks 1 --backend aot_eager", r'verify="first", aot_eager: \d+\.\d\d s, peak grew by \d+ MiB\n'),
    ],
)
def test_it_prints_one_line(arguments: str, printed: str) -> None:
    command = [sys.executable, "-m", "benchmarks.checks_cost", *arguments.split()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert re.fullmatch(printed, ran.stdout), ran.stderr
