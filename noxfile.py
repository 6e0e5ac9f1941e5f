"""Rounds of tests: `make near`, and on each torch and Python that the metadata admits, in environments of their own.

The environments of `make versions` and `make pythons` are kept from run to run: with CUDA, which every torch but the
pinned one brings, each takes 5 GB and two minutes.
"""

import os
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["torch"]

TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")  # one of each minor version
PYTHON = ("3.12", "3.13", "3.14")  # further ones than that which runs the rounds of torch
TORCH_OF_PYTHON = "2.14.1"  # which has wheels for all of them

SUITE = ("-m", "not slow")
# What meets torch's private parts, in two or three minutes on two cores: all passes, and the operators of this torch;
# both wrappers beside torch's DDP; capture, warm-up and every variant of a backward; hooks; what Inductor generates.
QUICK = (
    "tests/passes",
    "tests/runtime/test_communicator.py",
    "tests/runtime/test_parity.py",
    "tests/runtime/test_variants.py",
    "tests/runtime/test_several_backwards.py",
    "tests/runtime/test_warmup.py",
    "tests/runtime/test_inductor.py",
    "tests/test_launch_observer.py",
    "tests/test_architecture.py",
)
ON_OTHERS = (*QUICK, "tests/functional/test_whole_step.py")  # on other torches and Pythons, in a minute more

# What a change needs, in two minutes or so: the quick round, and all that is short of the tests of one module, most of
# which need no ranks, and of those that read the sources.
LONG = ("test_compile_once", "test_many_parameters", "test_ranks", "test_second_device", "test_startup")
NEAR = (
    *QUICK,
    *sorted(str(path) for path in Path("tests").glob("test_*.py") if path.stem not in LONG),
    *("-m", "not slow"),
    *("--deselect", "tests/test_documentation.py::test_snippets_of_page_run"),
)


@nox.session(venv_backend="none")
def near(session: nox.Session) -> None:
    """What a change needs, by the Python that runs nox; arguments are pytest's, and add to it."""
    _test(session, sys.executable, *NEAR, *session.posargs)


@nox.session(name="torch")
@nox.parametrize("version", TORCH, ids=TORCH)
def on_torch(session: nox.Session, version: str) -> None:
    """The suite on one torch; arguments are pytest's, "quick" stands for the quick round."""
    _run(session, version, SUITE)


@nox.session(name="python", python=PYTHON)
def on_python(session: nox.Session) -> None:
    """The quick round on one Python; arguments are pytest's."""
    _run(session, TORCH_OF_PYTHON, ON_OTHERS)


def _run(session: nox.Session, torch: str, default: tuple[str, ...]) -> None:
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(_constraints(torch))
    session.install("-c", str(constraints), f"torch=={torch}", "-e", ".[test,bench]")
    wanted = ON_OTHERS if session.posargs == ["quick"] else session.posargs or default
    _test(session, "python", *wanted)


def _test(session: nox.Session, python: str, *arguments: str) -> None:
    workers = os.environ.get("WORKERS", "2")
    session.run(python, "-m", "pytest", "-n", workers, "--dist", "worksteal", "-p", "no:cacheprovider", *arguments)


def _constraints(torch: str) -> str:
    """Those of constraints.txt, but for torch and what another torch may not take."""
    others = ("setuptools==", "torch==", "triton==")
    lines = Path("constraints.txt").read_text().splitlines()
    return "\n".join([*(line for line in lines if not line.startswith(others)), f"torch=={torch}", ""])
