"""What users import from `compiled_ddp`, by name."""

import compiled_ddp.passes.ops  # noqa: F401  (defines compiled_ddp::pack and others, which cached graphs call)
from compiled_ddp import functional
from compiled_ddp.compiled import CompiledDDP, compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.integrations.replacement import replace_ddp
from compiled_ddp.parity.verify import ParameterDifference, ParityReport, verify_parity
from compiled_ddp.plan import Bucket, BucketPlan, ReductionSequence, Riders
from compiled_ddp.report.explain import Explanation

__all__ = [
    "Bucket",
    "BucketPlan",
    "CompiledDDP",
    "EagerDDP",
    "Explanation",
    "ParameterDifference",
    "ParityReport",
    "ReductionSequence",
    "Riders",
    "compile_ddp",
    "functional",
    "replace_ddp",
    "verify_parity",
]
