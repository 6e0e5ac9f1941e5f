"""A loop under torch's DistributedDataParallel, ours in its place, and an adapter: a JSON line each, of rank 0."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import compiled_ddp

BACKENDS = ("aot_eager", "hooks")


@dataclass
class Outcome:
    """What a loop has done. `numbers` are losses and metrics, `tensors` the model and whatever else must be equal."""

    wrapper: type
    numbers: list[float]
    tensors: dict[str, Tensor]


def compare(case: str, loop: Callable[[], Outcome], adapted: Callable[[str], Outcome]) -> None:
    """Run `loop` once under torch's class, and for each backend under ours and as `adapted(backend)`."""
    expected = loop()
    for backend in BACKENDS:
        with compiled_ddp.replace_ddp(backend=backend):
            found = loop()
        report(case, "replaced", backend, expected, found)
        report(case, "adapter", backend, expected, adapted(backend))


def report(case: str, way: str, backend: str, expected: Outcome, found: Outcome) -> None:
    assert expected.tensors.keys() == found.tensors.keys(), (expected.tensors.keys(), found.tensors.keys())
    pairs = [(expected.tensors[name].double(), found.tensors[name].double()) for name in expected.tensors]
    line = {
        "case": case,
        "way": way,
        "backend": backend,
        "torchs": expected.wrapper.__name__,
        "ours": f"{found.wrapper.__module__}.{found.wrapper.__name__}",
        "same": expected.numbers == found.numbers and all(torch.equal(*pair) for pair in pairs),
        "apart": max(float((one - other).abs().max()) for one, other in pairs),
    }
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(line), flush=True)


def copies(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


@contextlib.contextmanager
def group_at_end() -> Any:
    """Takes down the process group that the trainer has made."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
