"""What one rank computes in a step, from sizes and times that are given."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiled_ddp.planning.cost_model import Readiness
from compiled_ddp.planning.step_model import Job


def ready_by_sizes(nbytes: Sequence[int], backward_seconds: float) -> Readiness:
    """Where no times are known: each gradient takes the share of the backward that it has of the bytes."""
    total = sum(nbytes)
    ends = tuple(backward_seconds * end / total for end in itertools.accumulate(nbytes))
    return Readiness(ends, backward_seconds, "by the sizes of gradients")


def transformer(parameters: float, layers: int, element_bytes: int, embedding: float = 0.0) -> tuple[int, ...]:
    """The gradients of so many equal layers, in the order of a backward, and of an embedding, which is ready last.

    A layer has four matrices: those of the feed-forward, of 4 d times d elements each, and of attention's output, d
    times d, and input, 3 d times d.
    """
    of_layer = (parameters - embedding) / layers / 12
    matrices = [round(share * of_layer) * element_bytes for share in (4, 4, 1, 3)]
    return (*(matrices * layers), *([round(embedding) * element_bytes] if embedding else []))


def load(path: Path, forward_seconds: float, backward_seconds: float, optimizer_seconds: float) -> Job:
    """The job of a JSON file: a list of bytes in the order of the backward, or an object with that as `nbytes`.

    An object may have `ready_ms` besides, of each gradient, from the beginning of the backward. Raises ValueError,
    naming the file, for anything else; OSError as open does.
    """
    try:
        nbytes, ready = _gradients(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must have a list of each gradient's bytes, in the order of the backward, or an object with that "
            f'as "nbytes", and as "ready_ms" when each is ready: {error}'
        ) from error
    readiness = ready_by_sizes(nbytes, backward_seconds)
    if ready is not None:
        if ready[-1] > backward_seconds:
            raise ValueError(f"{path} has a gradient at {ready[-1] * 1e3:g} ms, behind the end of the backward")
        readiness = Readiness(ready, backward_seconds, f"from {path.name}")
    return Job(nbytes, readiness, forward_seconds, optimizer_seconds)


def _gradients(data: Any) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """In the order in which they are ready, and when."""
    nbytes = [int(size) for size in (data["nbytes"] if isinstance(data, dict) else data)]
    if not nbytes or min(nbytes) < 0 or not any(nbytes):
        raise ValueError(f"found {nbytes}")
    times = data.get("ready_ms") if isinstance(data, dict) else None
    if times is None:
        return tuple(nbytes), None
    pairs = sorted(zip((float(at) / 1e3 for at in times), nbytes, strict=True), key=lambda pair: pair[0])
    return tuple(size for _, size in pairs), tuple(at for at, _ in pairs)
