"""`ddp.measured_plan()`: what all ranks have measured of one sequence, and the plan for that."""

from collections.abc import Callable

import torch

from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, ReductionSequence
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.planning.measured_plan import plan_from_launches
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.report.times import measured_backward
from compiled_ddp.step.runtime import Runtime

_REMEDY = "Call profile() on every rank, take its steps, and ask again."


def measured_plan(
    runtime: Runtime, options: Options, work_of: Callable[[BucketPlan], BackwardWork | None]
) -> SavedPlan:
    """See `DataParallelWrapper.measured_plan`."""
    sequence, calibration = runtime.reduction.agreed.sequence, options.calibration
    if calibration is None:
        raise RuntimeError("measured_plan() needs to know the link: pass calibration=, from compiled_ddp.calibrate().")
    if sequence is not None and any(section.plan.reduction == "hook" for section in sequence.launched):
        raise RuntimeError("measured_plan() plans all-reduces, and a communication hook reduces these buckets.")
    times = _latest_of_all(runtime, sequence)
    if sequence is None or times is None:
        raise RuntimeError(f"a rank has not measured the buckets that are launched now. {_REMEDY}")
    *launches, computed = times
    gradients = runtime.parameters.gradients
    return plan_from_launches(sequence, gradients, launches, computed, calibration.link, work_of)


def _latest_of_all(runtime: Runtime, sequence: ReductionSequence | None) -> list[float] | None:
    """When each bucket was launched, and when nothing but waiting was left, on the rank that was last in each.

    None where a rank has not measured that: all ranks ask, whatever they have.
    """
    measured = None
    if sequence is not None and runtime.recorded is not None:
        measured = measured_backward(runtime.recorded, sequence)
    buckets = 0 if sequence is None else len(sequence.buckets)
    times = [0.0] * (buckets + 1)
    lacks = measured is None or any(bucket is None for bucket in measured.buckets)
    if measured is not None and not lacks:
        computed = measured.local_seconds or measured.seconds - measured.waiting_seconds
        times = [*(bucket.launch for bucket in measured.buckets if bucket is not None), computed]
    shared = torch.tensor([float(lacks), *times], dtype=torch.float64, device=runtime.parameters.tensors[0].device)
    runtime.communicator.maximum(shared)
    any_lacks, *latest = shared.tolist()
    return None if any_lacks else latest
