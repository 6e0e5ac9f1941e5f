"""Scripts in processes of their own that cost no `import torch`: forked from the one that ranks are forked from.

Such a process ends as `python -c` does, with the functions of atexit, but does not tear the interpreter down. What is
about that, or about what is imported first, needs `sys.executable`.
"""

import atexit
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

import ranks


class Script:
    """A script that runs, and what it has written so far."""

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self._process, self._folder = process, folder
        assert process.pid is not None
        self.pid = process.pid

    @property
    def stdout(self) -> str:
        return (self._folder / "1").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "2").read_text()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"it had not ended after {timeout_s:g} s\n{self.stderr}"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait_until_it_says(self, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.stdout:
            assert self.poll() is None and time.monotonic() < deadline, self.stderr
            time.sleep(0.01)


@contextlib.contextmanager
def script(source: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> Iterator[Script]:
    """Run `source` as `python -c` would; at the end of the context it is killed."""
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        for number in (1, 2):
            Path(folder, str(number)).touch()
        context = multiprocessing.get_context(ranks.START_METHOD)
        with ranks.environment_of_new_processes(ranks.RANK_ENVIRONMENT):
            ranks.import_before_fork(1)
            process = context.Process(target=_run, args=(source, arguments, dict(environment), folder))
            with ranks.started_by_server_of(0):
                process.start()
        try:
            yield Script(process, Path(folder))
        finally:
            process.kill()
            process.join()


def run(source: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> "CompletedProcess[str]":
    """What `subprocess.run` of `python -c` would return, text captured."""
    with script(source, *arguments, environment=environment) as ran:
        status = ran.wait(300.0)
        return CompletedProcess([source, *arguments], status, ran.stdout, ran.stderr)


def _run(source: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        file = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(source, "<string>", "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()
