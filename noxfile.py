"""The tests on each torch and each Python that the metadata admits, in environments of their own: `make versions`.

Environments are kept from run to run: with CUDA, which every torch but the pinned one brings, each takes 5 GB and two
minutes.
"""

import os
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


@nox.session(name="torch")
@nox.parametrize("version", TORCH, ids=TORCH)
def on_torch(session: nox.Session, version: str) -> None:
    """The suite on one torch; arguments are pytest's, "quick" stands for the quick round."""
    _run(session, version, SUITE)


@nox.session(name="python", python=PYTHON)
def on_python(session: nox.Session) -> None:
    """The quick round on one Python; arguments are pytest's."""
    _run(session, TORCH_OF_PYTHON, QUICK)


def _run(session: nox.Session, torch: str, default: tuple[str, ...]) -> None:
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(_constraints(torch))
    session.install("-c", str(constraints), f"torch=={torch}", "-e", ".[test,bench]")
    wanted = QUICK if session.posargs == ["quick"] else session.posargs or default
    workers = os.environ.get("WORKERS", "2")
    session.run("python", "-m", "pytest", "-n", workers, "--dist", "worksteal", "-p", "no:cacheprovider", *wanted)


def _constraints(torch: str) -> str:
    """Those of constraints.txt, but for torch and what another torch may not take."""
    others = ("setuptools==", "torch==", "triton==")
    lines = Path("constraints.txt").read_text().splitlines()
    return "\n".join([*(line for line in lines if not line.startswith(others)), f"torch=={torch}", ""])
