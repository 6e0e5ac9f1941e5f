"""A variant's process as its parent sees it: it is asked, and either answers on every rank or fails on every rank."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.ranks.store import Store, part_of_default
from compiled_ddp.tools.comparison.contestant import Instructions

POLL_S = 0.2
GRACE_S = 5.0  # for a process to fail by itself once it failed on another rank


class VariantFailed(Exception):
    """A variant failed, on this rank or another; the message names the rank, and is the same on all of them."""


class Failures:
    """The first failure of each process label, in the launcher's store: ranks learn of it while they wait."""

    def __init__(self, prefix: str) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._store = Store(part_of_default(prefix), torch_private.groups.group_timeout(world))

    def note(self, label: str, problem: str) -> str:
        """Tell the other ranks; returns what all of them say, which another rank may have told before."""
        return self._store.ask(lambda store: store.compare_set(label, "", problem)).decode()

    def noted(self, label: str) -> str | None:
        """What has been told of this label so far."""
        return self._store.ask(lambda store: store.get(label).decode() if store.check([label]) else None)


class RemoteContender:
    """The process of one variant on this rank."""

    def __init__(
        self, instructions: Instructions, folder: Path, failures: Failures, environment: Mapping[str, str]
    ) -> None:
        self._instructions, self._failures = instructions, failures
        self.failure: str | None = None
        self._unread = b""
        path = folder / f"{instructions.label.replace('/', '-')}-{os.environ['RANK']}.json"
        path.write_text(instructions.to_json())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "compiled_ddp.tools.comparison.contestant", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def ask(self, request: str, argument: Any = None) -> Any:
        """The answer to a request that every rank makes. Raises VariantFailed; the process has ended then."""
        if self.failure is None:
            problem = self._send(request, argument)
            answer = None if problem else self._await(request)
            if isinstance(answer, dict) and "answer" in answer:
                return answer["answer"]
            self._fail(problem or str(answer["error"] if isinstance(answer, dict) else answer))
        raise VariantFailed(self.failure)

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # a request was still unread

    def _send(self, request: str, argument: Any) -> str | None:
        """What went wrong, if anything."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps([request, argument]) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._how_it_ended()
        return None

    def _await(self, request: str) -> Any:
        """The message that answers; or a text, where there will be none."""
        deadline, elsewhere = time.monotonic() + self._instructions.timeout_s, False
        while time.monotonic() < deadline:
            line = self._read_line()
            if line is not None:
                return json.loads(line) if line else self._how_it_ended()
            if not elsewhere and self._failures.noted(self._instructions.label) is not None:
                deadline, elsewhere = min(deadline, time.monotonic() + GRACE_S), True
        return f"no answer to '{request}' within {self._instructions.timeout_s:g} s"

    def _read_line(self) -> bytes | None:
        """A line; empty at the end of the process; None if nothing has come for a moment."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            descriptor = self._process.stdout.fileno()
            if not select.select([descriptor], [], [], POLL_S)[0]:
                return b"" if self._process.poll() is not None else None
            received = os.read(descriptor, 1 << 16)
            if not received:
                return b""
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "its process closed its answers"
        return f"its process was ended by signal {-status}" if status < 0 else f"its process ended with status {status}"

    def _fail(self, problem: str) -> None:
        self.failure = self._failures.note(self._instructions.label, f"rank {os.environ['RANK']}: {problem}")
        self.end()


def agreed(value: Any, world_size: int) -> list[Any]:
    """Every rank's `value`, in rank order, on the parents' own group."""
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered
