"""What users import from `compiled_ddp`, by name."""

import compiled_ddp.passes.ops  # noqa: F401  (defines compiled_ddp::pack and others, which cached graphs call)
from compiled_ddp import functional
from compiled_ddp.compiled import CompiledDDP, compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.functional.whole_step import TrainingStep, compile_step
from compiled_ddp.integrations.replacement import replace_ddp
from compiled_ddp.plan import Bucket, BucketPlan, ReductionSequence, Riders
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import Compute, Link
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.report.explain import Explanation
from compiled_ddp.tools.calibration.calibrate import calibrate
from compiled_ddp.tools.parity.verify import ParameterDifference, ParityReport, verify_parity

__all__ = [
    "Bucket",
    "BucketPlan",
    "Calibration",
    "CompiledDDP",
    "Compute",
    "EagerDDP",
    "Explanation",
    "Link",
    "ParameterDifference",
    "ParityReport",
    "ReductionSequence",
    "Riders",
    "SavedPlan",
    "TrainingStep",
    "calibrate",
    "compile_ddp",
    "compile_step",
    "functional",
    "replace_ddp",
    "verify_parity",
]
