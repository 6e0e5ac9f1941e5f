"""A world of many ranks in which this process is rank 0 and no other one runs, to compile what rank 0 of them would."""

import contextlib
import json
from collections.abc import Iterator
from typing import Self

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.planning.calibration import Calibration

NOTHING_WRONG = json.dumps([None, [], 0])  # a rank's verdict on what ranks compare: see `agreement`


class World:
    """What is pretended, beside the number of ranks."""

    def __init__(self, calibration: Calibration | None) -> None:
        self._calibration = calibration
        self.was_planned_for = False  # whether buckets were planned for its link, as no size was given

    def calibration(self) -> Calibration:
        """What its ranks would measure."""
        assert self._calibration is not None, "nothing is known of the link of this pretended world"
        self.was_planned_for = True
        return self._calibration


_current: World | None = None
_stores: "list[_Echo]" = []  # kept, as threads may still ask one when its world has ended


def current() -> World | None:
    """The world that this process pretends to be in: collectives communicate nothing, and nothing is to be timed.

    None where ranks are real.
    """
    return _current


@contextlib.contextmanager
def world(size: int, *, backend: str, calibration: Calibration | None = None) -> Iterator[World]:
    """torch.distributed is initialised for `size` ranks of `backend` ("gloo", "nccl"), which is not started.

    `calibration` is needed where sizes of buckets are left open.

    Nothing that depends on what other ranks compute may run in here: no synchronised backward, no optimizer.
    """
    global _current
    _stores.append(_Echo())
    with torch_private.groups.pretended(size, _stores[-1], backend):
        _current = World(calibration)
        try:
            yield _current
        finally:
            _current = None


class _Echo(dist.Store):
    """Every rank has published what rank 0 has, and found nothing wrong with what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def _find(self, key: str) -> bytes | None:
        by_rank, _, rank = key.rpartition("/")
        if key not in self._values and rank.isdecimal():
            return NOTHING_WRONG.encode() if by_rank.endswith("/verdict") else self._values.get(f"{by_rank}/0")
        return self._values.get(key)

    def get(self, key: str) -> bytes:
        found = self._find(key)
        if found is None:
            raise RuntimeError(
                f"no rank of a pretended world publishes {key!r}: nothing that waits for it can run there."
            )
        return found

    def has_extended_api(self) -> bool:
        """That `multi_get` is there: one by one, what 65,536 ranks publish takes a minute and more."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """That all ranks have added theirs."""
        return dist.get_world_size()

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """What the first one has set."""
        if self._find(key) in (None, expected if isinstance(expected, bytes) else expected.encode()):
            self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._find(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        """Nobody is late."""

    def clone(self) -> Self:
        """One connection is as good as another."""
        return self
