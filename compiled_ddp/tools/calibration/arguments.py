"""The arguments of `compiled-ddp calibrate`, without torch."""

import argparse
import math
from pathlib import Path

_DESCRIPTION = """\
Measure what an all-reduce takes by its size, and how fast ranks compute, and print it; docs/calibration.md says what
each number means. Under torchrun its ranks are used, on any number of machines; otherwise ranks are started on this
machine. Nothing else should run meanwhile.

  compiled-ddp calibrate --ranks 2
  torchrun --nnodes 4 --nproc-per-node 8 ... -m compiled_ddp calibrate --out link.json

Exit status 1 if a rank failed, 2 if nothing was begun."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Give the command line a `calibrate`."""
    calibrate = commands.add_parser(
        "calibrate",
        help="measure the link between ranks, and how fast they compute",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    calibrate.add_argument("--ranks", type=int, default=2, help="ranks to start without torchrun (default 2)")
    calibrate.add_argument("--seconds", type=float, default=3.0, help="how long to measure, about (default 3)")
    calibrate.add_argument("--device", choices=("cpu", "cuda"), help="default cuda where there is one for every rank")
    calibrate.add_argument("--process-group", choices=("gloo", "nccl"), help="default nccl on cuda, gloo on cpu")
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="write the calibration there, as JSON")
    calibrate.add_argument("--json", action="store_true", help="print it as JSON, in place of the tables")


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the values of these arguments, if anything."""
    if options.ranks < 1:
        return f"--ranks must be at least 1, found {options.ranks}"
    if not 0 < options.seconds < math.inf:
        return f"--seconds must be positive and finite, found {options.seconds:g}"
    if options.device == "cpu" and options.process_group == "nccl":
        return "--process-group nccl reduces no tensors of the cpu: leave it out, or pass --device cuda"
    return None
