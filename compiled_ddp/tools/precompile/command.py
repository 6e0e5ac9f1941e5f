"""`compiled-ddp precompile SCRIPT:FUNCTION`."""

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compiled_ddp.compiled import CompiledDDP, compile_ddp
from compiled_ddp.graph import precompiled
from compiled_ddp.graph.telling import Compilation
from compiled_ddp.model.managed import is_wrapper
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import Link
from compiled_ddp.ranks import pretended
from compiled_ddp.ranks.calibration import QUICK_SECONDS, compute_here
from compiled_ddp.ranks.kept_calibration import pin
from compiled_ddp.tools.command_line.own_ranks import environment_with
from compiled_ddp.tools.command_line.target import check_target, find_function
from compiled_ddp.tools.comparison.users_task import RETURNS, Training, call_function, training_of
from compiled_ddp.tools.comparison.workload import on_device
from compiled_ddp.users_model import call_model


class _Unusable(Exception):
    """What the function has returned cannot be compiled for a job; the message says why."""


def run(options: argparse.Namespace) -> int:
    """Fill the folder; returns the exit status, 2 where there is nothing to compile, with the reason on stderr."""
    folder = options.into.resolve()
    try:
        check_target(options.target)
        folder.mkdir(parents=True, exist_ok=True)
        precompiled.check_processor(folder)
        compiled = _fill(options, folder)
    except (_Unusable, OSError, ValueError) as error:
        sys.stderr.write(f"precompile: {error}\n")
        return 2
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    sys.stdout.write(
        f"{sum(not each.was_found for each in compiled)} programs compiled, "
        f"{sum(each.was_found for each in compiled)} found there, for {options.ranks} ranks: {len(files)} files, "
        f"{size / 2**20:.1f} MiB. Start the job with TORCHINDUCTOR_CACHE_DIR={folder}\n"
    )
    return 0


def _fill(options: argparse.Namespace, folder: Path) -> list[Compilation]:
    """In a process of its own, which has the folder for its cache.

    Where the model's options leave the buckets open, they are planned for a calibration, and so will be the job's.
    """
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    began = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with environment_with(settings), ProcessPoolExecutor(1, mp_context=spawn) as process:
        compiled, buckets = process.submit(_compile_all, options, folder).result()
    sys.stderr.write(f"{buckets}: {len(compiled)} programs, {time.perf_counter() - began:.0f} s\n")
    return compiled


def _compile_all(options: argparse.Namespace, folder: Path) -> tuple[list[Compilation], str]:
    """What was compiled, or found, and which buckets.

    `folder` is absolute, as the user's script may change the directory.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backend = options.process_group or ("nccl" if device.type == "cuda" else "gloo")
    calibration = _calibration(options.calibration, options.ranks, backend, device)
    with pretended.world(options.ranks, backend=backend, calibration=calibration) as world:
        function = find_function(options.target, returns=RETURNS)
        offered = {"rank": 0, "world_size": options.ranks, "device": device}
        try:
            training = training_of(call_function(function, **offered), may_be_wrapped=True)
        except (TypeError, ValueError) as error:
            raise _Unusable(f"{options.target}: {error}") from error
        wrapper = _wrapped(training.model, device)
        inputs = [_inputs(training, on_device(batch, device)) for batch in _batches(training.batches, options.batches)]
        if not inputs:
            raise _Unusable(f"{options.target} has no batches: return a list with one of each shape that the job has")
        # Before it is filled: what a filling that fails half-way leaves there is for this processor, too.
        precompiled.note_filled(folder, options.ranks, options.target)
        for each in inputs:
            call_model(wrapper.warmup, each)
        if options.evaluation:
            wrapper.eval()
            with torch.no_grad():
                for each in inputs:
                    call_model(wrapper.warmup, each)
        if not world.was_planned_for:
            return wrapper.teller.compilations, "the given buckets"
        pin(calibration, folder)
        return wrapper.teller.compilations, f"buckets for all-reduces of {calibration.link}"


# Where no calibration is given: 10 Gbit/s, and NVLink or InfiniBand with much of it left.
_ASSUMED = {"gloo": Link(1e-4, 1.1e9), "nccl": Link(3e-5, 20e9)}


def _calibration(file: Path | None, ranks: int, backend: str, device: torch.device) -> Calibration:
    """The file's; without one the link is assumed, and this machine computes as the job's will."""
    if file is None:
        compute = compute_here(device, QUICK_SECONDS)
        return Calibration(backend, ranks, 1, device.type, _ASSUMED[backend], compute, measured="assumed by precompile")
    found = Calibration.load(file)
    if found.world_size != ranks:
        raise _Unusable(f"{file} was measured with {found.world_size} ranks, and the job has {ranks}")
    return found


def _wrapped(model: nn.Module, device: torch.device) -> CompiledDDP:
    wrapper = model if is_wrapper(model) else compile_ddp(model.to(device))
    if not isinstance(wrapper, CompiledDDP):
        raise _Unusable(f"the model is wrapped by {type(wrapper).__name__}, which compiles nothing: take compile_ddp")
    return wrapper


def _batches(batches: Iterable[Any] | Callable[[int], Any], number: int | None) -> Iterator[Any]:
    if callable(batches) and not isinstance(batches, Iterable):
        batches = map(batches, itertools.count())
    if number is None and not isinstance(batches, Sized):
        number = 1
    return itertools.islice(iter(batches), number)


def _inputs(training: Training, batch: Any) -> Any:
    """What the model is called with: with a loss function, a batch has the target besides."""
    return batch if training.loss_function is None else batch[0]
