"""The command line besides its two commands with ranks: versions, what a report needs, and slips."""

import pytest

import compiled_ddp
from compiled_ddp.__main__ import main


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"compiled-ddp {compiled_ddp.__version__}\n"


def test_env_prints_what_a_report_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_DDP_MODE", "hooks")
    monkeypatch.setenv("A_SECRET", "not to be told")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in printed.splitlines())
    assert {"date", "compiled-ddp", "torch", "python", "CPU", "GPUs", "system", "triton"} <= lines.keys()
    assert lines["torch and compiled-ddp"] == "tested together" and "gloo" in lines["backends of torch.distributed"]
    assert lines["C++ compiler"] == "no-such-compiler is not there"
    assert "COMPILED_DDP_MODE=hooks" in lines["environment"] and "not to be told" not in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compare", "x.py:make", "--rond", "3"], "unrecognized arguments: --rond 3. Did you mean '--rounds'?"),
        (["verify", "x.py:make", "--tolerence=2"], "--tolerence=2. Did you mean '--tolerance'?"),
        (["env", "x.py"], "unrecognized arguments: x.py."),
        (["verify", "make"], "'make' has no colon: write SCRIPT:FUNCTION"),
    ],
)
def test_what_is_misspelt_is_told_with_what_may_have_been_meant(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err
