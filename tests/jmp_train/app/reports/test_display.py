"""Screens of any width: no number is cut off, and NO_COLOR means no style at all."""

import contextlib
import fcntl
import io
import os
import re
import select
import struct
import sys
import termios

import pytest
from made_runs import make_run

from jmp_train.app.launch.output import Output
from jmp_train.app.reports import compilations_shown, trials_shown
from jmp_train.app.reports.display import (
    LineDisplay,
    LiveDisplay,
    display_on,
    epoch_line,
    print_tables,
)
from jmp_train.app.runs.events import Compiled, Phase, Planned, Progress

pytestmark = pytest.mark.quick

RUN = make_run("mixed_float16", scale=8.0, skips=(3,))
EVENTS = (
    Planned(2, 100),
    Compiled(7.5, "process", RUN.costs),
    Progress(100, 1, RUN.steps[:40]),
    Progress(100, 1, RUN.steps[40:50]),
    RUN.epochs[0],
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def show_all(display: LineDisplay | LiveDisplay, name: str) -> None:
    display.start(name)
    for event in EVENTS:
        display.show(name, event)


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with display_on(stream, ["mixed_float16"]) as display:
        assert isinstance(display, LineDisplay)
        show_all(display, "mixed_float16")
        display.fail("mixed_float16", "why")
    line = epoch_line("mixed_float16", RUN.epochs[0], 2, "process")
    assert line.startswith("mixed_float16   epoch 1/2  loss")
    assert stream.getvalue() == f"{line}\n"


def test_a_phase_that_begins_is_a_line() -> None:
    phase = Phase("float32", 40, 100, RUN.costs)
    lines, terminal = io.StringIO(), Terminal()
    for stream in (lines, terminal):
        with display_on(stream, ["a"]) as display:
            for event in (Planned(2, 100), Compiled(7.5, "process", RUN.costs), phase, RUN.epochs[0]):
                display.show("a", event)
            if isinstance(display, LiveDisplay):
                display._bars.refresh()
    first, second = lines.getvalue().splitlines()
    assert first == "a               from step 41 to 100 in float32"
    assert second.startswith("a               epoch 1/2")
    assert first in plain(terminal.getvalue())


@pytest.mark.parametrize("memory_of", ["device", "process"])
def test_the_memory_of_a_device_is_in_the_lines(memory_of: str) -> None:
    for stream in (io.StringIO(), Terminal()):
        with display_on(stream, ["a"]) as display:
            display.show("a", Compiled(7.5, memory_of, RUN.costs))
            display.show("a", RUN.epochs[0])
        assert ("peak memory 300 MB" in stream.getvalue()) == (memory_of == "device")


def test_a_terminal_gets_bars_and_the_lines_above_them() -> None:
    stream = Terminal()
    with display_on(stream, ["mixed_float16", "float32"]) as display:
        assert isinstance(display, LiveDisplay)
        show_all(display, "mixed_float16")
        display._bars.refresh()
        display.start("float32")
        display._bars.refresh()
        display.show("mixed_float16", RUN)
        display.fail("float32", "no memory")
    text = plain(stream.getvalue())
    assert "mixed_float16   epoch 1/2  loss" in text
    assert re.search(r"mixed_float16 [━╺╸ ]+50/100", text)
    assert re.search(r"mixed_float16 .* loss 0\.0200  scale 4  skipped 1", text)
    assert re.search(r"float32 .* waiting", text)
    assert re.search(r"float32 .* loading", text)
    assert "test accuracy 98.70%" in text
    assert "float32: no memory" in text
    assert re.search(r"float32 .* failed", text)


def test_the_last_epoch_is_followed_by_the_test() -> None:
    stream = Terminal()
    with LiveDisplay(stream, ["a"]) as display:
        display.show("a", Planned(2, 100))
        display._bars.refresh()
        display.show("a", RUN.epochs[1])
        display._bars.refresh()
    text = plain(stream.getvalue())
    assert re.search(r"a [━╺╸ ]+0/100", text)  # before the first step, too
    assert re.search(r"a .* compiling", text)
    assert re.search(r"a .* evaluating", text)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_terminal_that_lacks_the_characters_and_then_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    user, terminal = os.openpty()
    with open(terminal, "w", encoding="ascii") as file:
        stream = Output(file)
        with display_on(stream, ["mixed_float16"]) as display:  # pyright: ignore[reportArgumentType]
            assert isinstance(display, LiveDisplay)
            show_all(display, "mixed_float16")
            display._bars.refresh()
            text = ""
            while "/100" not in text and select.select([user], [], [], 5)[0]:
                text += plain(os.read(user, 65536).decode("ascii"))
            os.close(user)
            display.show("mixed_float16", RUN.epochs[1])
            display.fail("mixed_float16", "why")
        assert isinstance(stream.lost, OSError)
    assert "mixed_float16   epoch 1/2  loss" in text
    assert re.search(r"mixed_float16 -+ +0/100|mixed_float16 [- ]+50/100", text)


def test_a_terminal_shows_the_progress_of_a_search_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for shown, said in (
        (compilations_shown, "3 compiled, next V100-16GB, [bold]float32"),
        (trials_shown, "trial 3: V100-16GB, [bold]float32 (Ctrl-C takes it)"),
    ):
        stream = Terminal()
        with shown(stream) as progress:
            assert progress is not None
            progress(0, "nothing yet")
            progress(3, "V100-16GB, [bold]float32")
        assert said in plain(stream.getvalue())
        assert stream.getvalue().endswith("\x1b[2K")  # the line is cleared


def test_what_is_no_terminal_gets_no_progress() -> None:
    stream = io.StringIO()
    with trials_shown(stream) as progress:
        assert progress is None
    assert stream.getvalue() == ""


RUNS = [
    make_run(name, scale=2.0**24, skips=(3,))
    for name in ("autocast_bfloat16", "params=float32,compute=bfloat16", "f32")
]
NAMES = [run.policy for run in RUNS]
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Screen:
    """A terminal of so many columns: `file` is a command's side."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._user, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.file = os.fdopen(terminal, "w", encoding="utf-8")
        self.codes = ""

    def read(self) -> str:
        """Returns what was written since, without control codes, which are kept in `codes`."""
        self.file.flush()
        os.write(self.file.fileno(), b"\0")
        content = b""
        while not content.endswith(b"\0"):
            content += os.read(self._user, 65536)
        self.codes += content.decode()
        text = STYLE.sub("", content.decode())
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\0]", "\n", text)  # after the cursor moved comes another line

    def close(self) -> None:
        self.file.close()
        os.close(self._user)


def test_tables_are_as_wide_as_the_screen_and_no_number_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_tables(RUNS, has_speeds=True)
    unlimited = capsys.readouterr().out  # not cut off at 80
    for columns in (100, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_tables(RUNS, has_speeds=True)
        fitted = capsys.readouterr().out
        assert "…" not in fitted
        assert max(map(len, fitted.splitlines())) <= columns
        digits = [sorted(re.findall(r"\d", text)) for text in (fitted, unlimited)]
        assert digits[0] == digits[1]


@pytest.mark.parametrize("setting", ["NO_COLOR", "TERM"])
def test_no_style_where_none_is_wanted(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    shown = []
    for value in (None, "dumb"):
        if value is not None:
            monkeypatch.setenv(setting, value)
        with contextlib.closing(Screen(100)) as screen:
            with display_on(screen.file, NAMES) as display:
                display.start("f32")
                display.show("f32", RUNS[2].epochs[0])
            with monkeypatch.context() as patch:
                patch.setattr("sys.stdout", screen.file)
                print_tables(RUNS)
            screen.read()
            shown.append(screen.codes)
    assert STYLE.search(shown[0])
    assert not STYLE.search(shown[1])
    if setting == "TERM":
        assert "\x1b" not in shown[1]
        assert isinstance(display, LineDisplay)
