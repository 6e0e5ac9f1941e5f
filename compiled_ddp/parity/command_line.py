"""`compiled-ddp verify SCRIPT:FUNCTION`: is what my model trains on the mean over ranks?"""

import argparse
import functools
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp.command_line.own_ranks import run_on_own_ranks
from compiled_ddp.command_line.target import find_function
from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.parity.verify import ParityReport, verify_parity
from compiled_ddp.wrapper import DataParallelWrapper


def run(options: argparse.Namespace) -> int:
    """Verify what the command line names; returns the exit status."""
    if "WORLD_SIZE" in os.environ:
        report = _verify_on_this_rank(options, backend=None)
        is_first = os.environ["RANK"] == "0"
    else:
        report, is_first = _verify_on_own_ranks(options), True
    if is_first:
        sys.stdout.write(f"{report}\n")
    return 0 if report.within(options.tolerance) else 1


def _verify_on_own_ranks(options: argparse.Namespace) -> ParityReport:
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks)))
    settings = {"OMP_NUM_THREADS": threads}
    report = run_on_own_ranks(options.ranks, _verify_on_this_rank, options, "gloo", environment=settings)[0]
    assert isinstance(report, ParityReport)
    return report


def _verify_on_this_rank(options: argparse.Namespace, backend: str | None) -> ParityReport:
    dist.init_process_group(backend)
    try:
        torch.manual_seed(options.seed + dist.get_rank())
        function = find_function(options.target, returns="(model, batch) or these and a loss")
        model, batch, *loss = function()
        return verify_parity(model, batch, options.steps, loss=loss[0] if loss else None, wrap=_wrap(options))
    finally:
        dist.destroy_process_group()


def _wrap(options: argparse.Namespace) -> Callable[[nn.Module], DataParallelWrapper]:
    return EagerDDP if options.wrapper == "EagerDDP" else functools.partial(compile_ddp, backend=options.backend)
