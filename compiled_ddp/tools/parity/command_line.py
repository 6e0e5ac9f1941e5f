"""`compiled-ddp verify SCRIPT:FUNCTION`: is what my model trains on the mean over ranks?"""

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.tools.command_line.own_ranks import run_on_own_ranks, threads_for
from compiled_ddp.tools.command_line.seeds import seed_all
from compiled_ddp.tools.command_line.target import NoSuchTarget, check_target, find_function
from compiled_ddp.tools.parity.verify import ParityReport, verify_parity
from compiled_ddp.wrapper import DataParallelWrapper

NOT_VERIFIED = 2  # the exit status; 1 is a difference


def run(options: argparse.Namespace) -> int:
    """Verify what the command line names; returns the exit status."""
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        found = _verify_on_this_rank(options, None) if "RANK" in os.environ else _verify_on_own_ranks(options)
    except NoSuchTarget as error:
        found = str(error)
    except ChildFailedError:  # a rank has printed why
        found = "a rank failed"
    except Exception:
        traceback.print_exc()
        return NOT_VERIFIED
    if isinstance(found, str):
        if is_first:
            sys.stderr.write(f"verify: {found}\n")
        return NOT_VERIFIED
    if is_first:
        sys.stdout.write(f"{found}\n")
    if not found.within(options.tolerance):
        return 1
    return 0 if found.saw_averaging else NOT_VERIFIED


def _verify_on_own_ranks(options: argparse.Namespace) -> ParityReport | str:
    check_target(options.target)
    threads = threads_for(options.ranks)
    found = run_on_own_ranks(options.ranks, _verify_on_this_rank, options, "gloo", environment=threads)[0]
    assert isinstance(found, ParityReport | str)
    return found


def _verify_on_this_rank(options: argparse.Namespace, backend: str | None) -> ParityReport | str:
    """The report; on every rank why there is none, where some rank does not find the function."""
    dist.init_process_group(backend)
    try:
        seed = options.seed + dist.get_rank()
        seed_all(seed)
        function, problem = None, None
        try:
            function = find_function(options.target, returns="(model, batch) or these and a loss")
        except NoSuchTarget as error:
            problem = f"rank {dist.get_rank()}: {error}"
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if function is None or any(problems):
            return next(filter(None, problems))
        seed_all(seed)
        model, batch, *loss = function()
        return verify_parity(model, batch, options.steps, loss=loss[0] if loss else None, wrap=_wrap(options))
    finally:
        dist.destroy_process_group()


def _wrap(options: argparse.Namespace) -> Callable[[nn.Module], DataParallelWrapper]:
    if options.wrapper == "EagerDDP":
        return EagerDDP
    # Inductor's random numbers are others than eager code's: dropout would look like a wrong gradient.
    as_eager = {"fallback_random": True} if options.backend == "inductor" else None
    return functools.partial(compile_ddp, backend=options.backend, options=as_eager)
