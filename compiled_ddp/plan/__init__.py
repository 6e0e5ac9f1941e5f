"""The nouns of compiled_ddp, each defined once, as plain immutable data.

gradient
    One parameter's gradient and its place in a flat buffer.
bucket
    Gradients of one dtype and device that are reduced by one all-reduce.
flat buffer
    The one-dimensional tensor a bucket's gradients live in, back to back.
launch
    The asynchronous all-reduce of a bucket's flat buffer. It returns at once.
wait
    The point after which a launched bucket may be read.
riders
    A few float32 elements at the end of a plan's last bucket that carry what ranks must share; of a plan whose sums are
    scattered in a first bucket of their own.
plan
    All buckets of one captured segment (or of the hooks), in launch order: `BucketPlan`.
sequence
    The plans of a whole backward, in launch order, the same on every rank: `ReductionSequence`.

Sizes are in elements where a name ends in `_elements`, in bytes where it ends in `_bytes`.
"""

from compiled_ddp.plan.buckets import (
    Bucket,
    BucketPlan,
    Gradient,
    GradientSpec,
    ReductionKind,
    contiguous_stride,
    gradient_dtype,
    is_called,
    name_for_rows,
    rows_of,
    share_elements,
    whole_of,
)
from compiled_ddp.plan.riders import (
    ABORTED,
    COUNT_MODULUS,
    FIRST_USED,
    FORWARD_COUNT,
    FORWARD_COUNT_SQUARED,
    GRAPH_MISMATCH,
    HOOK_FAILED,
    LOST,
    NEWLY_USED,
    RETURNED_COUNT,
    RETURNED_COUNT_SQUARED,
    STATE_LOST,
    VERIFY,
    WEIGHT,
    Riders,
)
from compiled_ddp.plan.sequence import (
    ADMITTED,
    AMONG_COLLECTIVES,
    BESIDE_TENSOR_HOOK,
    MIXED,
    NOT_CALLED,
    NOT_CAPTURED,
    TENSOR_HOOK,
    TOO_SMALL,
    Origin,
    ReductionSequence,
    Section,
)

__all__ = ["Bucket", "BucketPlan", "Gradient", "GradientSpec", "ReductionKind", "Riders"]
__all__ += [
    "contiguous_stride",
    "gradient_dtype",
    "is_called",
    "name_for_rows",
    "rows_of",
    "share_elements",
    "whole_of",
]
__all__ += ["ADMITTED", "AMONG_COLLECTIVES", "MIXED", "NOT_CALLED", "NOT_CAPTURED", "TOO_SMALL"]
__all__ += ["BESIDE_TENSOR_HOOK", "TENSOR_HOOK"]
__all__ += ["Origin", "ReductionSequence", "Section"]
__all__ += ["ABORTED", "COUNT_MODULUS", "FIRST_USED", "FORWARD_COUNT", "FORWARD_COUNT_SQUARED", "NEWLY_USED"]
__all__ += ["GRAPH_MISMATCH", "HOOK_FAILED", "LOST", "RETURNED_COUNT"]
__all__ += ["RETURNED_COUNT_SQUARED", "STATE_LOST", "VERIFY", "WEIGHT"]
