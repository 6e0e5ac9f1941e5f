"""What the picture says of the run that it shows."""

from dataclasses import replace
from pathlib import Path

import pytest

from compiled_ddp.tools.comparison import chart
from compiled_ddp.tools.comparison.derived import derive
from compiled_ddp.tools.comparison.record import machine, ran_on
from compiled_ddp.tools.comparison.result import Comparison, VariantResult

ALONE = VariantResult("torch DDP", "eager", True, [[[0.001, 0.002, 0.001]]] * 3)
FOUND = Comparison("toy", "cpu", "gloo within one machine", 2, 3_000_000, [40], [[0.01]] * 3, [ALONE], batch_size=4096)
RECIPE = {
    "hardware": {"cpu": "AMD EPYC", "cores": 2, "gpus": ["NVIDIA H100"] * 4},
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "date": "2026-11-21T20:00:15+00:00",
}


def test_machine_versions_and_date_stand_over_the_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: None)
    chart.draw([FOUND], tmp_path / "picture.png", RECIPE)
    figure = plt.gcf()
    said = "AMD EPYC, 2 cores; torch 2.13.0, Python 3.11.7; 2026-11-21"
    assert figure.get_suptitle() == said
    assert figure.axes[0].get_title("left") == chart.title_of(FOUND, derive(FOUND))
    assert f"Description\0{said}".encode() in (tmp_path / "picture.png").read_bytes()
    monkeypatch.undo()
    plt.close(figure)


def test_a_picture_is_of_the_kind_that_its_suffix_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("picture.svg", "picture"):
        assert chart.problem_of(tmp_path / name) is None
        chart.draw([FOUND], tmp_path / name, RECIPE)
    assert (tmp_path / "picture.svg").read_bytes().startswith(b"<?xml") and not (tmp_path / "picture.png").exists()
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    told = chart.problem_of(Path("picture.xyz"))
    assert told is not None and told.startswith("picture.xyz is no picture (.xyz is none of ")


def test_the_title_says_what_was_run_on_how_many_ranks_in_how_many_rounds() -> None:
    assert chart.title_of(FOUND, derive(FOUND)).splitlines() == [
        "toy: 3.00 M parameters, 4,096 samples a step",
        "2 ranks, gloo within one machine, 3 rounds; communication alone 10 ms",
    ]


def test_long_names_are_wrapped() -> None:
    long = replace(FOUND, workload="a model " * 40, link="nccl between 1,024 machines of a large cluster " * 3)
    lines = chart.title_of(long, derive(long)).splitlines()
    assert len(lines) > 4 and max(map(len, lines)) <= chart.OF_A_TITLE


def test_gpus_are_part_of_the_machine_where_they_were_used() -> None:
    assert machine(RECIPE, "cpu") == "AMD EPYC, 2 cores"
    assert machine(RECIPE, "NVIDIA H100") == "4 x NVIDIA H100, AMD EPYC, 2 cores"
    assert ran_on(RECIPE, "a machine") == "a machine; torch 2.13.0, Python 3.11.7; 2026-11-21"
