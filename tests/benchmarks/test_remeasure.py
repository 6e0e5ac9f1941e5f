"""`make results`: what it runs, what it takes as measured, and what it refuses to publish."""

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import compare, remeasure
from benchmarks.publish import ROOT, SECTIONS
from benchmarks.remeasure import RUNS, parse
from compiled_ddp.tools.comparison.record import recipe


def _options(folder: Path, *further: str) -> Namespace:
    return parse(["--into", str(folder), *further])


def _write(folder: Path, name: str, command: str, commit: str, link: str = "loopback") -> None:
    recipe = {"commit": commit, "command": command}
    (folder / f"{name}.json").write_text(json.dumps({"recipe": recipe, "comparisons": [{"link": link}]}))


def test_every_run_that_a_document_shows_can_be_measured_anew() -> None:
    assert set(RUNS) == {name for section in SECTIONS for name in section.of}
    (runs,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("RUNS ?= ")]
    assert runs.removeprefix("RUNS ?= ").split() == list(RUNS)


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if "benchmarks.compare" in run.arguments])
@pytest.mark.parametrize("short", [(), ("--short",)], ids=["whole", "short"])
def test_its_arguments_are_those_of_the_benchmark(
    name: str, short: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "why_not", lambda *_, **__: "")  # some rows are measured on another torch
    options = compare.parse(remeasure.command(name, _options(tmp_path, *short))[3:])
    assert options.link == RUNS[name].link
    assert options.json == tmp_path / f"{name}.json"
    assert (options.steps == 2) == bool(short)


def test_what_is_measured_at_this_commit_by_this_command_is_not_measured_again(tmp_path: Path) -> None:
    options = _options(tmp_path)
    _write(tmp_path, "train", remeasure.stated("train", options), "1234567")
    assert remeasure.is_measured("train", options, "1234567")
    assert not remeasure.is_measured("train", options, "7654321")
    assert not remeasure.is_measured("train", _options(tmp_path, "--short"), "1234567")
    assert not remeasure.is_measured("loopback", options, "1234567")
    _write(tmp_path, "train", remeasure.stated("train", options), "1234567-dirty")
    assert not remeasure.is_measured("train", options, "1234567-dirty")


@pytest.mark.parametrize("name", ["train", "compare-mlp"])
def test_a_command_is_stated_as_recipes_state_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = _options(tmp_path, "--models-python", "elsewhere/bin/python")
    called = remeasure.command(name, options)
    monkeypatch.setattr(sys, "orig_argv", called)
    own = (
        shlex.join(["compiled-ddp", *called[3:]]) if name == "compare-mlp" else None
    )  # as the command tells its recipe
    assert remeasure.stated(name, options) == recipe(ROOT, command=own)["command"]


def test_the_plan_tells_how_long_it_takes(tmp_path: Path) -> None:
    told = remeasure.plan(["train", "compare-mlp"], ["loopback"], _options(tmp_path))
    assert told.startswith(f"2 runs, about {RUNS['train'].minutes + RUNS['compare-mlp'].minutes} minutes")
    assert f"loopback: measured at this commit, {tmp_path}/loopback.json" in told


def test_changes_that_are_not_committed_are_not_published(tmp_path: Path) -> None:
    assert "commit the changes" in remeasure.hindrance(["train"], parse([]), "1234567-dirty")
    assert not remeasure.hindrance(["train"], parse([]), "1234567")
    assert not remeasure.hindrance(["train"], _options(tmp_path), "1234567-dirty")


def test_where_no_link_can_be_made_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remeasure, "unavailable_reason", lambda: "not root")
    assert remeasure.hindrance(["1gbit", "train"], parse([]), "1234567").endswith("not root; or measure RUNS='train'")
    assert not remeasure.hindrance(["train"], parse([]), "1234567")


def test_a_run_that_fell_back_on_loopback_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_back(command: list[str], **_: object) -> None:
        _write(tmp_path, "1gbit", shlex.join(command), "1234567", link="loopback")

    monkeypatch.setattr(subprocess, "run", fall_back)
    with pytest.raises(RuntimeError, match="was to be measured on 1gbit, and was on loopback"):
        remeasure.measure("1gbit", _options(tmp_path))
    assert not (tmp_path / "1gbit.json").exists()


def test_a_short_run_cannot_be_published(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--short"])
    assert "name a folder, --into FOLDER" in capsys.readouterr().err
