"""The script that measures what checks cost runs in small, once as a process of its own."""

import re

import forked
import pytest
import torch

from benchmarks import checks_cost


def test_a_process_prints_one_line() -> None:
    source = "import runpy; runpy.run_module('benchmarks.checks_cost', run_name='__main__')"
    ran = forked.run(source, *["first", "--blocks", "1", "--backend", "aot_eager"])
    printed = r'verify="first", aot_eager: \d+\.\d\d s, peak grew by \d+ MiB\n'
    assert re.fullmatch(printed, ran.stdout), ran.stderr


@pytest.mark.parametrize("wrapper", ["EagerDDP", "compile_ddp"])
def test_later_steps_print_one_line(
    wrapper: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the script's process has one; this is not its own
    options = [] if wrapper == "EagerDDP" else ["--wrapper", wrapper]
    checks_cost.main(["later", *options, "--parameters", "4", "--steps", "2"])
    printed = rf"{wrapper}, 4 parameters: forward \d+ us, backward \d+ us\n"
    assert re.fullmatch(printed, capsys.readouterr().out)
