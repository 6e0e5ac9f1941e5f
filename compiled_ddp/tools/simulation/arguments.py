"""The arguments of `compiled-ddp simulate`, without torch."""

import argparse
from pathlib import Path

_DESCRIPTION = """\
Predict a training step on numbers of ranks that you do not have: 2 to 65,536, or those given. For each, the buckets are
planned for the link that so many ranks have, and beside the step stand its exposed communication, what DDP's buckets
would take, and the limit that no plan passes.

What one rank computes is measured here of your own model (--model, what `compiled-ddp compare` takes), or given by
sizes and milliseconds. What a message between two ranks takes comes from `compiled-ddp calibrate` (--calibration), or
is given (--startup-us, --gbit). Nothing is communicated, and what comes out is a model's: docs/simulate.md has its
formulas, what it leaves out, and how it does on published figures.

  compiled-ddp simulate --parameters 124e6 --embedding 38.6e6 --layers 12 --forward-ms 16 --backward-ms 33 \\
      --algorithm hierarchical --ranks-per-host 8 --within-startup-us 3 --within-gbit 1200 --startup-us 12 --gbit 200"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Give the command line a `simulate`."""
    simulate = commands.add_parser(
        "simulate",
        help="predict a step on more ranks than you have",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_job(simulate.add_argument_group("what one rank computes"))
    _add_network(simulate.add_argument_group("the links"))
    simulate.add_argument("--ranks", type=int, nargs="+", help="default 2 to 65,536, in powers of two")
    simulate.add_argument(
        "--no-overlap", action="store_true", help="communication begins when the backward has ended, whatever the plan"
    )
    simulate.add_argument(
        "--mode",
        choices=("all-reduced", "sharded", "pipelined", "deferred"),
        default="all-reduced",
        help="of compile_step: with shard_optimizer, with pipeline_updates besides, and with that alone (default "
        "all-reduced)",
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="recipe and all figures")
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="the picture; needs compiled-ddp[compare]")


def _add_job(group: "argparse._ArgumentGroup") -> None:
    what = group.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="SCRIPT:FUNCTION", help="a Python file, or a module, and a function in it")
    what.add_argument("--parameters", type=float, metavar="N", help="a transformer of so many: 124e6")
    what.add_argument("--sizes", type=Path, metavar="FILE", help="JSON: each gradient's bytes, in the backward's order")
    group.add_argument("--layers", type=int, default=12, help="of --parameters (default 12)")
    group.add_argument("--embedding", type=float, default=0.0, metavar="N", help="how many of --parameters it has")
    group.add_argument("--element-bytes", type=int, default=4, help="of a gradient of --parameters (default 4)")
    group.add_argument("--steps", type=int, default=5, help="of --model to measure, behind two others (default 5)")
    for name, default in ("forward", "needed"), ("backward", "needed"), ("optimizer", "0"):
        group.add_argument(f"--{name}-ms", type=float, help=f"default as measured with --model, otherwise {default}")


def _add_network(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--calibration", type=Path, metavar="FILE", help="of `compiled-ddp calibrate`")
    group.add_argument("--startup-us", type=float, help="of one message from a rank to the next (of another host)")
    group.add_argument("--gbit", type=float, help="Gbit/s of that link, in each direction")
    group.add_argument(
        "--algorithm", choices=("ring", "tree", "halving", "hierarchical"), default="ring", help="default ring"
    )
    group.add_argument("--ranks-per-host", type=int, metavar="N", help="of hierarchical")
    group.add_argument("--links-per-host", type=int, metavar="N", help="of hierarchical, to other hosts (default 1)")
    group.add_argument(
        "--between", choices=("ring", "tree", "halving"), help="what hierarchical does between hosts (default ring)"
    )
    group.add_argument("--within-calibration", type=Path, metavar="FILE", help="of hierarchical: of ranks of one host")
    group.add_argument("--within-startup-us", type=float, help="of hierarchical: of one message inside of a host")
    group.add_argument("--within-gbit", type=float, help="of hierarchical: Gbit/s of a rank inside of a host")


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the values of these arguments, if anything."""
    if options.no_overlap and options.mode != "all-reduced":
        return f"--no-overlap and --mode {options.mode} are alternatives"
    return _problem_of_values(options) or _problem_of_job(options) or _problem_of_network(options)


def _problem_of_values(options: argparse.Namespace) -> str | None:
    for name in ("forward_ms", "optimizer_ms", "startup_us", "within_startup_us", "embedding"):
        value = getattr(options, name)
        if value is not None and not value >= 0:
            return f"{_flag(name)} must not be negative, found {value:g}"
    counts = ("layers", "element_bytes", "steps", "ranks_per_host", "links_per_host")
    for name in ("backward_ms", "parameters", "gbit", "within_gbit", *counts):
        value = getattr(options, name)
        if value is not None and not value > 0:
            return f"{_flag(name)} must be positive, found {value:g}"
    if options.ranks and min(options.ranks) < 2:
        return f"--ranks must be at least 2, found {min(options.ranks)}: one rank reduces nothing"
    return None


def _problem_of_job(options: argparse.Namespace) -> str | None:
    if options.model is not None:
        if ":" not in options.model:
            return f"{options.model!r} has no colon: write SCRIPT:FUNCTION, for example train.py:make"
        return None
    for name in ("forward_ms", "backward_ms"):
        if getattr(options, name) is None:
            return f"{_flag(name)} is needed without --model, which would be measured"
    if options.parameters is not None and options.embedding >= options.parameters:
        return f"--embedding must be less than --parameters, found {options.embedding:g} of {options.parameters:g}"
    return None


def _problem_of_network(options: argparse.Namespace) -> str | None:
    given = [options.startup_us is not None, options.gbit is not None]
    if (options.calibration is not None) == any(given) or any(given) != all(given):
        return "the link is needed once: --calibration FILE, or --startup-us and --gbit"
    within = [options.within_startup_us is not None, options.within_gbit is not None]
    names = ("ranks_per_host", "links_per_host", "between", "within_calibration", "within_startup_us", "within_gbit")
    if options.algorithm != "hierarchical":
        extra = [_flag(name) for name in names if getattr(options, name) is not None]
        return f"{', '.join(extra)}: for --algorithm hierarchical alone" if extra else None
    if options.ranks_per_host is None:
        return "--algorithm hierarchical needs --ranks-per-host"
    if (options.within_calibration is not None) == any(within) or any(within) != all(within):
        options_of_it = "--within-calibration FILE, or --within-startup-us and --within-gbit"
        return f"the link inside of a host is needed once: {options_of_it}"
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
