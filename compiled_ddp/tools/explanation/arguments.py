"""The arguments of `compiled-ddp explain`, without torch."""

import argparse
from pathlib import Path

_DESCRIPTION = """\
Train some steps of your model and print what `ddp.explain()` says then: each bucket, by whom it is reduced and why, and
when it is ready, on the link and there, as predicted and as measured. docs/guides/explain.md reads it with you.

  compiled-ddp explain train.py:make --timeline step.png
  torchrun --nnodes 4 --nproc-per-node 8 ... -m compiled_ddp explain train.py:make --save-plan plan.json

FUNCTION may take any of rank, world_size and device by these names. It returns (model, batches), where the model
returns the loss, or (model, loss_function, batches) with batches of (inputs, target), as for `compare`. Under torchrun
its ranks are used; otherwise gloo ranks are started on this machine. Exit status 1 if a rank failed, 2 if nothing was
trained."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Give the command line an `explain`."""
    explain = commands.add_parser(
        "explain",
        help="show your model's buckets, and when each is ready, sent and awaited",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("target", metavar="SCRIPT:FUNCTION", help="a Python file, or a module, and a function in it")
    explain.add_argument("--ranks", type=int, default=2, help="gloo ranks to start without torchrun (default 2)")
    explain.add_argument("--steps", type=int, default=10, help="how many to measure, behind three (default 10)")
    explain.add_argument("--wrapper", choices=("compile_ddp", "EagerDDP"), default="compile_ddp")
    explain.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor", help="of compile_ddp")
    explain.add_argument("--device", choices=("cpu", "cuda"), help="default cuda where there is one for every rank")
    explain.add_argument("--bucket-cap-mb", type=float, help="size of a bucket; without one they are planned")
    explain.add_argument(
        "--calibration", type=Path, metavar="FILE", help="plan for this one, of `compiled-ddp calibrate`"
    )
    explain.add_argument("--plan", type=Path, metavar="FILE", help="take the buckets of a saved plan")
    explain.add_argument("--save-plan", type=Path, metavar="FILE", help="write the buckets there, for plan=")
    explain.add_argument("--timeline", type=Path, metavar="FILE", help="draw the backward: .png, or .json for Perfetto")
    explain.add_argument("--json", action="store_true", help="print everything as JSON, in place of the table")
    explain.add_argument("--seed", type=int, default=0, help="rank r has the seed SEED + r (default 0)")


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the values of these arguments, if anything."""
    if options.ranks < 1:
        return f"--ranks must be at least 1, found {options.ranks}"
    if options.steps < 2:
        return f"--steps must be at least 2, as the first one that is measured is left out, found {options.steps}"
    if options.bucket_cap_mb is not None and not options.bucket_cap_mb > 0:
        return f"--bucket-cap-mb must be positive, found {options.bucket_cap_mb:g}"
    if options.timeline is not None and options.timeline.suffix not in (".png", ".json"):
        return f"--timeline writes a picture, .png, or a trace, .json: found {options.timeline}"
    return None
