"""Environment variables that are not read because they are misspelt."""

import warnings

import pytest

from compiled_ddp.environment import check_environment


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("COMPILED_DDP_MOED", "COMPILED_DDP_MODE"),
        ("COMPILED_DDP_LOGS", "COMPILED_DDP_LOG"),
        ("COMPILE_DDP_MODE", "COMPILED_DDP_MODE"),
        ("TORCH_COMPILED_DDP_LOG", "COMPILED_DDP_LOG"),
    ],
)
def test_a_misspelt_variable_is_warned_of_with_the_one_that_may_be_meant(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "hooks")
    with pytest.warns(UserWarning, match=rf"variable {variable} is not read\. Did you mean {meant}\?"):
        check_environment()


@pytest.mark.parametrize("variable", ["COMPILED_DDP_MODE", "COMPILED_DDP_TESTS", "DDP_MODE", "MODE"])
def test_other_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_environment()


def test_another_value_of_the_log_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_DDP_LOG", "loud")
    with pytest.raises(ValueError, match="COMPILED_DDP_LOG must be 'auto', 'stderr' or 'quiet', found 'loud'"):
        check_environment()
