"""The arguments of `compiled-ddp precompile`, without torch."""

import argparse
from pathlib import Path

_DESCRIPTION = """\
Compile what a job of RANKS ranks will need, on one machine and without the others, into a folder. The job finds it
where TORCHINDUCTOR_CACHE_DIR names the folder: its first step loads instead of compiling.

FUNCTION may take any of rank, world_size and device by these names. It returns (model, batches), where the model is
called as model(*batch), or (model, loss_function, batches) with batches of (inputs, target). The model is compile_ddp's
with the job's options, or bare. For each batch, in order, the forward and every backward is compiled; put in it one
batch of each shape. Run it with the torch, the kind of processor and GPU, and the OMP_NUM_THREADS that the job has."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Give the command line a `precompile`."""
    precompile = commands.add_parser(
        "precompile",
        help="compile for a job before it starts",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    precompile.add_argument(
        "target", metavar="SCRIPT:FUNCTION", help="a Python file, or a module, and a function in it"
    )
    precompile.add_argument("--ranks", type=int, required=True, help="of the job: WORLD_SIZE")
    precompile.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="the folder to fill")
    precompile.add_argument("--evaluation", action="store_true", help="the forward in eval mode without gradients, too")
    precompile.add_argument("--device", choices=("cpu", "cuda"), help="default cuda where there is one")
    precompile.add_argument("--process-group", choices=("gloo", "nccl"), help="the job's; default nccl on cuda")
    precompile.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="of the job's link, from `compiled-ddp calibrate` there: buckets are planned for it, by the job too; "
        "default 10 Gbit/s with gloo, 20 GB/s with nccl",
    )
    precompile.add_argument(
        "--batches", type=int, help="how many to take of what has no length, such as a generator (default 1)"
    )


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the values of these arguments, if anything."""
    if options.ranks < 2:
        return f"--ranks must be at least 2, found {options.ranks}: one rank reduces nothing"
    if options.batches is not None and options.batches < 1:
        return f"--batches must be at least 1, found {options.batches}"
    return None
