"""What is said of how far a comparison is: on a terminal, elsewhere, and where nothing is wanted."""

import io
import threading

import pytest

from compiled_ddp.tools.comparison import progress
from compiled_ddp.tools.comparison.expectation import COMPILING_S, Expectation
from compiled_ddp.tools.comparison.progress import Progress, in_words

START_OF_LINE = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _log_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPILED_DDP_LOG", raising=False)


def test_on_a_terminal_one_line_is_rewritten_and_cleared_in_the_end() -> None:
    stream = Terminal()
    shown = Progress(shown=True, stream=stream)
    with shown.under_way(lambda elapsed_s: "first steps of torch DDP"):
        shown.say("peak memory is not known")
    assert stream.getvalue().split(START_OF_LINE) == [
        "",
        "compare: first steps of torch DDP",
        "compare: peak memory is not known\n",
        "",
    ]


def test_a_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    with Progress(shown=True, stream=stream).under_way(lambda elapsed_s: "x" * 100):
        pass
    assert stream.getvalue().split(START_OF_LINE)[1] == "compare: " + "x" * 10


def test_elsewhere_there_are_plain_lines() -> None:
    stream = io.StringIO()
    with Progress(shown=True, stream=stream).under_way(lambda elapsed_s: f"waiting, {elapsed_s:.0f} s"):
        pass
    assert stream.getvalue() == "compare: waiting, 0 s\n"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_it_is_said_again_as_time_goes_by(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    monkeypatch.setattr(progress, "REWRITTEN_EVERY_S", 0.001)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    again, seconds = threading.Event(), []

    def what(elapsed_s: float) -> str:
        seconds.append(elapsed_s)
        if len(seconds) == 3:
            again.set()
        return f"said {len(seconds)} times"

    with Progress(shown=True, stream=stream).under_way(what):
        assert again.wait(60)
    assert seconds[0] == 0.0 and seconds == sorted(seconds)
    assert "said 1 times" in stream.getvalue() and "said 2 times" in stream.getvalue()


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "another rank"])
def test_nothing_is_written_where_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    if quiet:
        monkeypatch.setenv("COMPILED_DDP_LOG", "quiet")
    stream = Terminal()
    silent = Progress(shown=quiet, stream=stream)
    silent.say("a line")
    assert list(silent.each([1, 2], "round")) == [1, 2]
    assert stream.getvalue() == ""


def test_rounds_are_counted_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    shown = Progress(shown=True, stream=io.StringIO())
    monkeypatch.setattr(Progress, "under_way", lambda self, what: said.append(what) or _Nothing())
    for number in shown.each(range(4), "round"):
        said.append(said[0](20.0 * number))
    assert said[1:] == [
        "round 1 of 4",
        "round 2 of 4, about 60 s left",
        "round 3 of 4, about 40 s left",
        "round 4 of 4, about 20 s left",
    ]


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "about 5 s"), (42, "about 40 s"), (100, "about 2 min"), (4000, "about 67 min"), (6000, "about 1.7 h")],
)
def test_durations_are_said_in_round_words(seconds: float, expected: str) -> None:
    assert in_words(seconds) == expected


def expectation(rounds: int = 10) -> Expectation:
    floors = {"floor": "eager", "torch DDP": "eager", "torch.compile(DDP)": "compiled", "compile_ddp": "compiled"}
    return Expectation(floors, rounds=rounds, starts=2, start_s=3.0, step_s=1.0)


def test_before_anything_the_reference_says_how_long_it_may_take() -> None:
    starts = 4 * 2 * 3.0 + 2 * COMPILING_S
    assert expectation().seconds_left() == pytest.approx(starts + 10 * 4 * 1.0)


def test_what_is_measured_takes_the_place_of_what_was_expected() -> None:
    expected = expectation()
    expected.note("floor", 8.0, 0.5)
    assert expected.seconds_left() == pytest.approx(8.0 + 2 * (6.0 + COMPILING_S) + 10 * 4 * 0.5)
    expected.note("torch DDP", 10.0, 0.7)
    expected.note("torch.compile(DDP)", 50.0, 0.6)
    assert expected.seconds_left() == pytest.approx(50.0 + 10 * 4 * 0.6)
    assert expected.seconds_left(20.0) == pytest.approx(30.0 + 10 * 4 * 0.6)
    assert expected.seconds_left(70.0) == pytest.approx(10 * 4 * 0.6)  # it takes longer than the one before
    expected.note("compile_ddp", 70.0, None)  # it has failed, and takes no part in the rounds
    assert expected.seconds_left() == pytest.approx(10 * (0.5 + 0.7 + 0.6))


def test_untimed_steps_of_short_turns_are_expected_too() -> None:
    expected = expectation(rounds=100)
    for name in ("floor", "torch DDP", "torch.compile(DDP)", "compile_ddp"):
        expected.note(name, 1.0, 0.01)
    assert expected.seconds_left() == pytest.approx(100 * 4 * (1 + 5) * 0.01)
