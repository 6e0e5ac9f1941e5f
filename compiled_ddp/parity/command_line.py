"""`python -m compiled_ddp verify SCRIPT:FUNCTION`: is what my model trains on the mean over ranks?"""

import argparse
import functools
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.parity.verify import ParityReport, verify_parity
from compiled_ddp.wrapper import DataParallelWrapper

_DESCRIPTION = """\
Train a few steps with a wrapper beside plain autograd averaged by hand, and print the largest difference of every
parameter's gradient. FUNCTION takes nothing and returns (model, batch) or (model, batch, loss), as verify_parity takes
them (docs/verification.md). It is called on every rank, with torch.distributed initialised and another seed on each.
Exit status 1 if a relative difference is larger than the tolerance. Under torchrun its ranks are used; otherwise gloo
ranks are started on this machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parse(arguments)
    if "WORLD_SIZE" in os.environ:
        report = _verify_on_this_rank(options, backend=None)
        is_first = os.environ["RANK"] == "0"
    else:
        report, is_first = _verify_on_own_ranks(options), True
    if is_first:
        sys.stdout.write(f"{report}\n")
    return 0 if report.within(options.tolerance) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m compiled_ddp")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="compare gradients with plain autograd", description=_DESCRIPTION)
    verify.add_argument("target", metavar="SCRIPT:FUNCTION", help="a Python file, or a module, and a function in it")
    verify.add_argument("--ranks", type=int, default=2, help="gloo ranks to start without torchrun (default 2)")
    verify.add_argument("--steps", type=int, default=3, help="how many steps to compare (default 3)")
    verify.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference (default 1e-4)")
    verify.add_argument("--wrapper", choices=("compile_ddp", "EagerDDP"), default="compile_ddp")
    verify.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor", help="of compile_ddp")
    verify.add_argument("--seed", type=int, default=0, help="rank r has the seed SEED + r (default 0)")
    options = parser.parse_args(arguments)
    if options.ranks < 1 or options.steps < 1:
        parser.error(f"--ranks and --steps must be at least 1, found {options.ranks} and {options.steps}")
    if math.isnan(options.tolerance):
        parser.error("--tolerance must be a number, found nan")
    if ":" not in options.target:
        parser.error(f"{options.target!r} has no colon: write SCRIPT:FUNCTION, for example train.py:make")
    return options


def _verify_on_own_ranks(options: argparse.Namespace) -> ParityReport:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        run_id="compiled_ddp",
    )
    reports = elastic_launch(config, _verify_on_this_rank)(options, "gloo")
    report = reports[0]
    assert isinstance(report, ParityReport)
    return report


def _verify_on_this_rank(options: argparse.Namespace, backend: str | None) -> ParityReport:
    dist.init_process_group(backend)
    try:
        torch.manual_seed(options.seed + dist.get_rank())
        model, batch, *loss = _function(options.target)()
        return verify_parity(model, batch, options.steps, loss=loss[0] if loss else None, wrap=_wrap(options))
    finally:
        dist.destroy_process_group()


def _wrap(options: argparse.Namespace) -> Callable[[nn.Module], DataParallelWrapper]:
    return EagerDDP if options.wrapper == "EagerDDP" else functools.partial(compile_ddp, backend=options.backend)


def _function(target: str) -> Callable[[], Any]:
    """The function that `target` names: "folder/script.py:function" or "package.module:function".

    Raises ValueError where `target` has no such function.
    """
    source, _, name = target.rpartition(":")
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(source)
    else:
        path = Path(source).resolve()
        sys.path.insert(0, str(path.parent))
        specification = importlib.util.spec_from_file_location(path.stem, path)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = module
        specification.loader.exec_module(module)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"{source} has no function {name!r}: name one that returns (model, batch) or these and a loss."
        )
    return function
