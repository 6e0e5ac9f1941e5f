"""`compiled-ddp simulate`: its table, its files, and what it says of arguments that it cannot use."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from compiled_ddp.__main__ import main
from compiled_ddp.planning.calibration import Calibration, Compute
from compiled_ddp.planning.cost_model import Link

JOB = ["simulate", "--parameters", "124e6", "--forward-ms", "16", "--backward-ms", "33"]
HOP = ["--startup-us", "12", "--gbit", "200"]
HOSTS = ["--algorithm", "hierarchical", "--ranks-per-host", "8", "--within-startup-us", "3", "--within-gbit", "1200"]


def calibration(path: Path, ranks: int, link: Link) -> str:
    Calibration("gloo", ranks, 1, "cpu", link, Compute(1e12, 1e10)).save(path)
    return str(path)


def test_the_table_has_a_row_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *HOP, *HOSTS, "--between", "tree"]) == 0
    printed = capsys.readouterr().out
    assert "473.0 MiB in 48 gradients, ready by the sizes of gradients" in printed
    rows = [line.split()[0] for line in printed.splitlines() if line[:1].isdigit()]
    assert (len(rows), rows[0], rows[-1]) == (16, "2", "65,536")
    assert "no plan hides all of it" in printed


def test_hosts_without_a_power_of_two_are_filled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *HOP, "--algorithm", "hierarchical", "--ranks-per-host", "6", *HOSTS[-4:]]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert rows[:3] == ["6", "12", "24"] and rows[-1] == "49,152"


def test_json_has_the_recipe_and_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "simulated.json"
    assert main([*JOB, *HOP, "--ranks", "2", "8", "--no-overlap", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["recipe"]["versions"]["torch"] and data["overlap"] is False
    assert [step["ranks"] for step in data["steps"]] == [2, 8]
    assert data["steps"][0]["exposed_seconds"] == pytest.approx(2 * 12e-6 + 496e6 / 25e9, rel=1e-3)


def test_a_mode_of_whole_steps_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {}
    for mode in ("all-reduced", "pipelined"):
        path = tmp_path / f"{mode}.json"
        assert (
            main([*JOB, "--startup-us", "12", "--gbit", "50", "--ranks", "8", "--mode", mode, "--json", str(path)]) == 0
        )
        steps[mode] = json.loads(path.read_text())["steps"][0]["seconds"]
        assert json.loads(path.read_text())["mode"] == mode
    assert steps["pipelined"] < steps["all-reduced"]
    assert "gathered in the next step" in capsys.readouterr().out


def test_a_calibration_of_two_ranks_is_the_link_of_two(tmp_path: Path) -> None:
    file = calibration(tmp_path / "link.json", 2, Link(300e-6, 1e9, 20e-6))
    assert main([*JOB, "--calibration", file, "--ranks", "2", "4", "--json", str(tmp_path / "s.json")]) == 0
    two, four = (step["link"] for step in json.loads((tmp_path / "s.json").read_text())["steps"])
    assert two == pytest.approx(asdict(Link(300e-6, 1e9, 20e-6)))
    assert four["startup_seconds"] == pytest.approx(900e-6) and four["bytes_per_second"] == pytest.approx(1e9 / 1.5)


def test_two_calibrations_are_the_links_inside_and_between_hosts(tmp_path: Path) -> None:
    inside = calibration(tmp_path / "inside.json", 8, Link(50e-6, 1e11))
    all_of_them = calibration(tmp_path / "all.json", 16, Link(90e-6, 1e10))
    hosts = ["--algorithm", "hierarchical", "--ranks-per-host", "8", "--within-calibration", inside]
    json_file = str(tmp_path / "s.json")
    assert main([*JOB, *hosts, "--calibration", all_of_them, "--ranks", "8", "16", "--json", json_file]) == 0
    one, two = (step["link"] for step in json.loads(Path(json_file).read_text())["steps"])
    assert one["startup_seconds"] == pytest.approx(50e-6) and two["startup_seconds"] == pytest.approx(90e-6)
    assert two["bytes_per_second"] == pytest.approx(1e10)
    assert main([*JOB, *hosts, "--calibration", inside]) == 2
    assert main([*JOB, *hosts[:-1], all_of_them, "--calibration", all_of_them]) == 2


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*JOB, *HOP, *HOSTS, "--plot", str(tmp_path / "simulated.png")]) == 0
    assert (tmp_path / "simulated.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*JOB, *HOP, "--plot", str(tmp_path / "simulated.png")]) == 2
    assert capsys.readouterr().err == "simulate: --plot needs matplotlib: pip install 'compiled-ddp[compare]'\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*JOB, *HOP, *HOSTS, "--ranks", "12"], "12 ranks do not fill hosts of 8"),
        ([*JOB, "--calibration", "missing.json"], "missing.json"),
        (["simulate", "--sizes", "missing.json", *JOB[3:], *HOP], "missing.json"),
        (["simulate", "--model", "missing.py:make", *HOP], "missing.py"),
        ([*JOB, *HOP, "--plot", "simulated.xyz"], "--plot must be one of .png, .svg, .pdf, found simulated.xyz"),
    ],
)
def test_what_cannot_be_simulated_is_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("simulate: ") and told in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["simulate", *HOP], "one of the arguments --model --parameters --sizes is required"),
        ([*JOB[:3], *HOP], "--forward-ms is needed without --model"),
        ([*JOB[:-1], "0", *HOP], "--backward-ms must be positive, found 0"),
        (["simulate", "--model", "make", *HOP], "'make' has no colon: write SCRIPT:FUNCTION"),
        ([*JOB, "--embedding", "124e6", *HOP], "--embedding must be less than --parameters"),
        (JOB, "the link is needed once: --calibration FILE, or --startup-us and --gbit"),
        ([*JOB, *HOP, "--calibration", "x.json"], "the link is needed once"),
        ([*JOB, "--gbit", "1"], "the link is needed once"),
        ([*JOB, *HOP, "--ranks", "1"], "--ranks must be at least 2, found 1"),
        ([*JOB, *HOP, "--ranks-per-host", "8"], "--ranks-per-host: for --algorithm hierarchical alone"),
        ([*JOB, *HOP, "--algorithm", "hierarchical"], "--algorithm hierarchical needs --ranks-per-host"),
        ([*JOB, *HOP, *HOSTS[:4]], "the link inside of a host is needed once"),
        ([*JOB, "--startup-us", "-1", "--gbit", "1"], "--startup-us must not be negative, found -1"),
    ],
)
def test_arguments_are_checked(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err
