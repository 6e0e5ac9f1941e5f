"""`compiled-ddp explain SCRIPT:FUNCTION`."""

import argparse
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.tools.command_line.own_ranks import run_on_own_ranks, threads_for
from compiled_ddp.tools.command_line.target import NoSuchTarget, check_target, find_function
from compiled_ddp.tools.comparison.users_task import RETURNS, UsersWorkload
from compiled_ddp.tools.comparison.workload import on_device
from compiled_ddp.wrapper import DataParallelWrapper

_BEFORE = 3  # steps: what is compiled, and the sequence that all later ones keep


def run(options: argparse.Namespace) -> int:
    """Explain on torchrun's ranks, or on own ones; returns the exit status."""
    try:
        if "RANK" in os.environ:
            problem, explained = _explain_on_this_rank(options)
        else:
            check_target(options.target)
            threads = threads_for(options.ranks)
            found = run_on_own_ranks(options.ranks, _explain_on_this_rank, options, environment=threads)
            problem, explained = found[0]
    except NoSuchTarget as error:
        sys.stderr.write(f"explain: {error}\n")
        return 2
    except ChildFailedError:  # a rank has printed why
        sys.stderr.write("explain: a rank failed\n")
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    if os.environ.get("RANK", "0") == "0":
        (sys.stderr if problem else sys.stdout).write(f"explain: {problem}\n" if problem else f"{explained}\n")
    return 2 if problem else 0


def _explain_on_this_rank(options: argparse.Namespace) -> tuple[str, str]:
    """Why nothing was trained, on any rank, or what rank 0 has to say."""
    ranks_here, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    kind = options.device or ("cuda" if torch.cuda.device_count() >= ranks_here else "cpu")
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        workload, keywords, problem = None, dict[str, Any](), None
        try:
            workload, keywords = _workload(options, device), _keywords(options)
        except (NoSuchTarget, TypeError, ValueError, OSError) as error:
            problem = f"rank {dist.get_rank()}: {error}"
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if workload is None or any(problems):
            return next(filter(None, problems)), ""
        return "", _explained(options, _trained(options, workload, keywords, device))
    finally:
        dist.destroy_process_group()


def _workload(options: argparse.Namespace, device: torch.device) -> UsersWorkload:
    function = find_function(options.target, returns=RETURNS)
    rank = dist.get_rank()
    offered = {"rank": rank, "world_size": dist.get_world_size(), "device": device}
    return UsersWorkload(options.target, function, seed=options.seed + rank, **offered)


def _keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Of the wrapper."""
    found: dict[str, Any] = {"bucket_cap_mb": options.bucket_cap_mb}
    if options.calibration is not None:
        found["calibration"] = Calibration.load(options.calibration)
    if options.plan is not None:
        found["plan"] = SavedPlan.load(options.plan)
    return found if options.wrapper == "EagerDDP" else {**found, "backend": options.backend}


def _trained(
    options: argparse.Namespace, workload: UsersWorkload, keywords: dict[str, Any], device: torch.device
) -> DataParallelWrapper:
    wrap = EagerDDP if options.wrapper == "EagerDDP" else compile_ddp
    wrapper: DataParallelWrapper = wrap(workload.build_model(options.wrapper, device), **keywords)
    optimizer = workload.optimizer(wrapper.parameters())
    batches = workload.batches(dist.get_rank(), dist.get_world_size())
    for step in range(_BEFORE + options.steps):
        if step == _BEFORE:
            wrapper.profile(options.steps)
        workload.loss(wrapper, on_device(next(batches), device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapper


def _explained(options: argparse.Namespace, wrapper: DataParallelWrapper) -> str:
    if dist.get_rank() != 0:
        return ""
    if options.save_plan is not None and wrapper.plan is not None:
        wrapper.plan.save(options.save_plan)
    if options.timeline is not None:
        wrapper.timeline(options.timeline)
    explanation = wrapper.explain()
    return explanation.to_json() if options.json else str(explanation)
