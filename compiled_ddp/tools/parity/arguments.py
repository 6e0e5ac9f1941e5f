"""The arguments of `compiled-ddp verify`, without torch."""

import argparse
import math

_DESCRIPTION = """\
Train a few steps with a wrapper beside plain autograd averaged by hand, and print the largest difference of every
parameter's gradient. FUNCTION takes nothing and returns (model, batch) or (model, batch, loss), as verify_parity takes
them (docs/verification.md). It is called on every rank, with torch.distributed initialised and another seed on each.
Exit status 1 if a relative difference is larger than the tolerance; 2 if nothing was verified, or if all ranks had the
same gradients, which does not show whether they are averaged. Under torchrun its ranks are used; otherwise gloo ranks
are started on this machine."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Give the command line a `verify`."""
    verify = commands.add_parser("verify", help="compare gradients with plain autograd", description=_DESCRIPTION)
    verify.add_argument("target", metavar="SCRIPT:FUNCTION", help="a Python file, or a module, and a function in it")
    verify.add_argument("--ranks", type=int, default=2, help="gloo ranks to start without torchrun (default 2)")
    verify.add_argument("--steps", type=int, default=3, help="how many steps to compare (default 3)")
    default = "default 1e-4, or 4 times the precision of gradients in 16 bits"
    verify.add_argument("--tolerance", type=float, help=f"largest relative difference ({default})")
    verify.add_argument("--wrapper", choices=("compile_ddp", "EagerDDP"), default="compile_ddp")
    verify.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor", help="of compile_ddp")
    verify.add_argument("--seed", type=int, default=0, help="rank r has the seed SEED + r (default 0)")


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the values of these arguments, if anything."""
    if options.ranks < 1 or options.steps < 1:
        return f"--ranks and --steps must be at least 1, found {options.ranks} and {options.steps}"
    if options.tolerance is not None and math.isnan(options.tolerance):
        return "--tolerance must be a number, found nan"
    return None
