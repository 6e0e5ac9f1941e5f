"""The arguments of `compiled-ddp compare`, without torch."""

import argparse
from pathlib import Path

# As make_variants has them; those of DEFAULT are compared unless others are asked for.
FLOORS = ("no communication, eager", "no communication, compiled")
WARMED_UP = "compile_ddp after warmup()"  # which may choose the model as it is
DEFAULT = (*FLOORS, "torch DDP", "torch.compile(DDP)", "EagerDDP", "compile_ddp", WARMED_UP)
VARIANTS = (*FLOORS, "torch DDP", "torch.compile(DDP)", "DDP(torch.compile)", "EagerDDP", "compile_ddp", WARMED_UP)

_DESCRIPTION = """\
Train your own model, on your own batches, under torch DDP, torch.compile(DDP), EagerDDP and compile_ddp, one step of
each in turn, and print what a step takes, how much of the communication is exposed, the memory, the first step, the
difference of the gradients, and which to choose.

FUNCTION may take any of rank, world_size and device by these names. It returns (model, batches), where model(*batch)
returns the loss, or (model, loss_function, batches), where a batch is (inputs, target) and the loss is
loss_function(model(inputs), target); docs/compare.md has the rest. Under torchrun its ranks are used, on any number of
machines; otherwise ranks are started on this machine."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Give the command line a `compare`."""
    compare = commands.add_parser(
        "compare",
        help="compare data-parallel wrappers on your own model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("target", metavar="SCRIPT:FUNCTION", help="a Python file, or a module, and a function in it")
    compare.add_argument("--ranks", type=int, default=2, help="ranks to start without torchrun (default 2)")
    compare.add_argument("--rounds", type=int, default=30, help="each one timed step of every variant (default 30)")
    compare.add_argument("--warmup", type=int, default=5, help="steps of each before the first round (default 5)")
    names = ", ".join(map(repr, VARIANTS))
    compare.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=[*DEFAULT], metavar="NAME", help=f"some of: {names}"
    )
    compare.add_argument("--device", choices=("cpu", "cuda"), help="default cuda where there is one for every rank")
    compare.add_argument("--process-group", choices=("gloo", "nccl"), help="default nccl on cuda, gloo on cpu")
    compare.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor", help="of what is compiled")
    compare.add_argument("--bucket-cap-mb", type=float, help="for every wrapper, torch's too; default each one's own")
    compare.add_argument(
        "--find-unused-parameters", action="store_true", help="what torch's DDP is told; the others find them"
    )
    compare.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure first step and peak memory in fresh processes before (default yes)",
    )
    compare.add_argument("--seed", type=int, default=0, help="FUNCTION runs with seed SEED + rank (default 0)")
    compare.add_argument(
        "--timeout", type=float, default=900.0, help="seconds that a variant may take to answer (default 900)"
    )
    compare.add_argument("--json", type=Path, help="recipe and raw samples; default compare-FUNCTION.json")
    compare.add_argument("--png", type=Path, help="the picture; default compare-FUNCTION.png")


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the values of these arguments, if anything."""
    for name in ("ranks", "rounds", "warmup"):
        if getattr(options, name) < 1:
            return f"--{name} must be at least 1, found {getattr(options, name)}"
    if not options.timeout > 0:
        return f"--timeout must be positive, found {options.timeout:g}"
    if options.bucket_cap_mb is not None and not options.bucket_cap_mb > 0:
        return f"--bucket-cap-mb must be positive, found {options.bucket_cap_mb:g}"
    if all(name in FLOORS for name in options.variants):
        return f"--variants needs one that communicates, found {options.variants}"
    return None
