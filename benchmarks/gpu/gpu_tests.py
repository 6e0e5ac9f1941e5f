"""The tests that are marked `gpu`, by pytest in a process of its own."""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.page import in_a_cell, markdown_table
from benchmarks.gpu.placement import CPU
from benchmarks.gpu.settings import Settings
from benchmarks.launch import REPOSITORY

MARK = "mark.gpu"
NOTHING_FAILED = {0: "all passed", 1: "some failed"}  # pytest's exit status: the report tells which


def files_with_tests(places: Sequence[str]) -> list[str]:
    """The test modules in these files and folders of the repository that mark something `gpu`."""
    found = []
    for place in places:
        path = REPOSITORY / place
        modules = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [str(module) for module in modules if MARK in module.read_text()]
    return found


def read_report(report: Path) -> list[dict[str, Any]]:
    """Name, outcome, seconds and, where it did not pass, the first words of why, of each test in a JUnit report."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        outcome = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
        why = None if outcome == "passed" else kinds[outcome].get("message", "")
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        found.append({"name": name, "outcome": outcome, "seconds": float(case.get("time", 0.0)), "why": why})
    return found


def measure(settings: Settings) -> dict[str, Any]:
    """Every test's outcome. On the CPU all are skipped, which shows that they can be collected."""
    with tempfile.TemporaryDirectory(prefix="cddp-gpu-tests-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-m", "gpu"]
        ended = subprocess.run(
            [*command, f"--junitxml={report}", *files_with_tests(settings.tests)], cwd=REPOSITORY, check=False
        )
        if ended.returncode not in NOTHING_FAILED:
            raise RuntimeError(f"pytest ended with status {ended.returncode}: no tests ran, or it broke; see above")
        tests = read_report(report)
    bad = [test["name"] for test in tests if test["outcome"] in ("failure", "error")]
    ran = any(test["outcome"] == "passed" for test in tests)
    failed = [f"{len(bad)} of {len(tests)} tests"] if bad else []
    failed += ["no test ran"] if settings.device != CPU and not ran and not bad else []
    return {"tests": tests, "failed": failed}


def render(answer: dict[str, Any]) -> str:
    """How many, and each that did not pass."""
    tests = answer["tests"]
    counts = Counter(test["outcome"] for test in tests)
    seconds = sum(test["seconds"] for test in tests)
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failure", "error", "skipped"))
    reasons = Counter(test["why"] for test in tests if test["outcome"] == "skipped")
    parts = [f"{said}, in {seconds:.0f} s."]
    parts += [f"- skipped: {in_a_cell(why)} ({number})" for why, number in reasons.items()]
    bad = [
        SimpleNamespace(name=test["name"], why=in_a_cell(test["why"] or ""))
        for test in tests
        if test["outcome"] in ("failure", "error")
    ]
    if bad:
        parts.append(markdown_table(bad, {"name": ("failed", "s"), "why": ("", "s")}))
    return "\n\n".join(parts)
