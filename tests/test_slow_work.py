"""Work that takes long is told of while it goes on and when it has ended, in time that no part of it has had."""

import contextlib
import errno
import io
import logging
import sys
import threading
from collections.abc import Iterator

import pytest
from told import Clock, Lines, told_lines

from compiled_ddp.telling import log, slow_work
from compiled_ddp.telling.slow_work import SlowWork, part_of_slow_work

LOGGER = logging.getLogger("compiled_ddp.tests")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slow_work, "clock", clock)
    return clock


@pytest.fixture
def lines() -> Iterator[Lines]:
    with told_lines() as lines:
        yield lines


def compiling(what: str = "backward", **more: object) -> SlowWork:
    return SlowWork(LOGGER, ("compiling", "compiled"), what=what, of="Net", **more)  # type: ignore[arg-type]


def test_quick_work_is_not_told_of(clock: Clock, lines: Lines) -> None:
    with compiling():
        clock.now += 4.9
    assert lines.found == []


def test_slow_work_is_told_of_with_what_it_is_why_and_how_long_it_took(clock: Clock, lines: Lines) -> None:
    with compiling(why=lambda: "first used in step 2") as work:
        clock.now += 5.0
        work.note_result("a result")
    assert lines.found == [
        "compiling backward of Net, first used in step 2",
        "compiled backward of Net, 5.0 s: a result",
    ]


def test_slow_work_that_raises_is_told_to_have_been_given_up(clock: Clock, lines: Lines) -> None:
    def fail() -> None:
        clock.now += 6.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), compiling():
        fail()
    assert lines.found == ["compiling backward of Net", "gave up compiling backward of Net, 6.0 s"]


def test_another_rank_says_nothing(clock: Clock, lines: Lines) -> None:
    with compiling(is_told=lambda: False):
        clock.now += 7.0
    assert lines.found == []


def test_a_part_has_its_own_time_which_is_not_that_of_the_whole(clock: Clock, lines: Lines) -> None:
    with compiling("forward"):
        clock.now += 3.0
        with part_of_slow_work("backward"):
            clock.now += 7.0
        clock.now += 1.9
        with part_of_slow_work("backward"):
            clock.now += 2.0
    assert lines.found == ["compiling backward of Net", "compiled backward of Net, 7.0 s"]


def test_the_whole_goes_on_behind_a_part(clock: Clock, lines: Lines) -> None:
    with compiling("forward"):
        clock.now += 3.0
        with part_of_slow_work("backward"):
            clock.now += 1.0
        clock.now += 2.5
    assert lines.found == ["compiling forward of Net", "compiled forward of Net, 5.5 s"]


def test_a_part_that_is_the_whole_is_told_of_once(clock: Clock, lines: Lines) -> None:
    with compiling("backward"), part_of_slow_work("backward"):
        clock.now += 7.0
    assert lines.found == ["compiling backward of Net", "compiled backward of Net, 7.0 s"]


def test_there_is_no_part_of_nothing(clock: Clock, lines: Lines) -> None:
    with part_of_slow_work("backward"):
        clock.now += 7.0
    assert lines.found == []


def test_it_is_told_while_it_goes_on(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_work, "SECONDS", 0.05)
    with compiling(why=lambda: threading.current_thread().name):
        lines.wait_for("compiling")
        (line,) = lines.found
    assert line.startswith("compiling backward of Net, Thread-")
    assert len(lines.found) == 2


def test_it_is_told_again_and_again_while_it_goes_on(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_work, "SECONDS", 0.05)
    monkeypatch.setattr(slow_work, "HEARTBEAT_SECONDS", 0.05)
    with compiling(why=lambda: "first used in step 2"):
        while len(lines.found) < 3:
            lines.wait_for("still compiling backward of Net, 0 s")
    first, *between, last = lines.found
    assert first == "compiling backward of Net, first used in step 2"
    assert set(between) == {"still compiling backward of Net, 0 s"}
    assert last.startswith("compiled backward of Net, ")


def test_a_part_is_no_time_of_the_wholes_heartbeat(clock: Clock, lines: Lines) -> None:
    with compiling("forward") as work:
        clock.now += 3.0
        with part_of_slow_work("backward"):
            clock.now += 100.0
            work._tell_that_it_goes_on()  # as a timer that has run out just before
            assert lines.found == []


def test_no_timer_is_left_behind(lines: Lines) -> None:
    with compiling("forward"), part_of_slow_work("backward"):
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert timers
    for timer in timers:
        timer.join(30.0)
        assert not timer.is_alive()
    assert lines.found == []


# ---- who sees a line -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_logging(package: int = logging.NOTSET, root: int = logging.WARNING) -> Iterator[logging.Logger]:
    """As where nothing has set up logging, but for these levels; pytest has done so when a test begins."""
    loggers = {logging.root: root, logging.getLogger("compiled_ddp"): package}
    before = {logger: (logger.handlers, logger.level) for logger in loggers}
    for logger, level in loggers.items():
        logger.handlers = []
        logger.setLevel(level)
    try:
        yield logging.root
    finally:
        for logger, (handlers, level) in before.items():
            logger.handlers = handlers
            logger.setLevel(level)


def on_stderr() -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        log.tell(LOGGER, "a 100 % line")
    return stderr.getvalue()


LINE = "compiled_ddp: a 100 % line\n"


def test_a_line_goes_to_stderr_where_logging_is_not_set_up() -> None:
    with no_logging():
        assert on_stderr() == LINE


class NoReader(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, NoReader(), closed()], ids=["none", "no reader", "closed"])
def test_work_does_not_fail_where_a_line_cannot_be_told(
    stderr: io.StringIO | None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with no_logging(), compiling():
        clock.now += 7.0


@pytest.mark.parametrize(("level", "expected"), [(logging.NOTSET, []), (logging.INFO, ["a 100 % line"])])
def test_handlers_of_the_application_get_what_its_levels_let_through(level: int, expected: list[str]) -> None:
    handler = Lines()
    with no_logging(package=level) as root:
        root.addHandler(handler)
        assert on_stderr() == ""
    assert handler.found == expected


@pytest.mark.parametrize("levels", [{"package": logging.ERROR}, {"root": logging.ERROR}], ids=str)
def test_a_level_of_the_application_silences_the_line(levels: dict[str, int]) -> None:
    with no_logging(**levels):
        assert on_stderr() == ""


@pytest.mark.parametrize(("switch", "expected"), [("auto", LINE), ("stderr", LINE), ("quiet", ""), ("off", "")])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, switch: str, expected: str) -> None:
    monkeypatch.setenv("COMPILED_DDP_LOG", switch)
    log.check_switch()
    with no_logging():
        assert on_stderr() == expected


@pytest.mark.parametrize(("switch", "expected", "logged"), [("auto", "", 1), ("stderr", LINE, 0), ("quiet", "", 0)])
def test_the_switch_where_logging_is_set_up(
    monkeypatch: pytest.MonkeyPatch, switch: str, expected: str, logged: int
) -> None:
    monkeypatch.setenv("COMPILED_DDP_LOG", switch)
    handler = Lines()
    with no_logging(package=logging.INFO) as root:
        root.addHandler(handler)
        assert on_stderr() == expected
    assert len(handler.found) == logged


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_DDP_LOG", "loud")
    with pytest.raises(ValueError, match="COMPILED_DDP_LOG must be 'auto', 'stderr' or 'quiet', found 'loud'"):
        log.check_switch()
