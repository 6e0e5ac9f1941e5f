"""`compiled-ddp calibrate`."""

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from compiled_ddp.planning.calibration import Calibration, fields_of, predicted_seconds
from compiled_ddp.tools.calibration.calibrate import calibrate
from compiled_ddp.tools.command_line.own_ranks import run_on_own_ranks, threads_for


def run(options: argparse.Namespace) -> int:
    """Calibrate torchrun's ranks, or own ones; returns the exit status, 1 where a rank failed, 2 if nothing began."""
    try:
        if "RANK" in os.environ:
            found = _calibrate_on_this_rank(options)
        else:
            found = _not_writable(options.out) or _calibrate_on_own_ranks(options)
    except ChildFailedError:  # a rank has printed why
        sys.stderr.write("calibrate: a rank failed\n")
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    if isinstance(found, str):
        sys.stderr.write(f"calibrate: {found}\n" if _is_first() else "")
        return 2
    if _is_first():
        if options.out is not None:
            found.save(options.out)
        sys.stdout.write(f"{found.to_json() if options.json else tables_of(found)}\n")
    return 0


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _calibrate_on_own_ranks(options: argparse.Namespace) -> Calibration | str:
    threads = threads_for(options.ranks)
    found = run_on_own_ranks(options.ranks, _calibrate_on_this_rank, options, environment=threads)[0]
    assert isinstance(found, Calibration | str)
    return found


def _calibrate_on_this_rank(options: argparse.Namespace) -> Calibration | str:
    """Or, on every rank, why nothing was measured."""
    ranks_here, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = options.device or ("cuda" if torch.cuda.device_count() >= ranks_here else "cpu")
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(options.process_group or ("nccl" if device == "cuda" else "gloo"))
    try:
        problem = [_not_writable(options.out) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(problem)
        if problem[0] is not None:
            return problem[0]
        if dist.get_rank() == 0:
            sys.stderr.write(f"calibrate: measuring for about {options.seconds:g} s\n")
        return calibrate(device=device, seconds=options.seconds)
    finally:
        dist.destroy_process_group()


def _not_writable(path: Path | None) -> str | None:
    """Why the file cannot be written, before anything is measured; nothing of the attempt is left."""
    if path is None:
        return None
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): name another file by --out"
    if is_new:
        path.unlink()
    return None


def tables_of(calibration: Calibration) -> str:
    """What was found, and beside what was measured what the model says of it."""
    facts = [(name, _format(value)) for name, value in fields_of(calibration).items()]
    of_fields = tabulate(facts, tablefmt="plain", disable_numparse=True)
    at_once = sorted({sample.in_flight for sample in calibration.samples})
    headers = ["size", *(title for k in at_once for title in (f"{k} at once, us" if k > 1 else "alone, us", "model"))]
    rows = dict[int, list[str]]()
    for sample in sorted(calibration.samples, key=lambda sample: (sample.nbytes, sample.in_flight)):
        model = predicted_seconds(calibration.link, sample.nbytes, sample.in_flight)
        row = rows.setdefault(sample.nbytes, [_format_size(sample.nbytes)])
        row += [f"{sample.seconds * 1e6:,.0f}", f"{model * 1e6:,.0f}"]
    align = ["right"] * len(headers)
    of_samples = tabulate([*rows.values()], headers, tablefmt="simple", disable_numparse=True, colalign=align)
    return "\n\n".join([of_fields, *([of_samples] if rows else []), calibration.measured])


def _format_size(nbytes: int) -> str:
    return f"{nbytes / 2**10:g} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:g} MiB"


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
