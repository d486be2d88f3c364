"""Screens of any width: no number is cut off, and NO_COLOR means no style at all."""

import contextlib
import fcntl
import os
import re
import struct
import termios
from collections.abc import Iterator

import pytest
from made_runs import make_run

from jmp_train.app.reports.display import (
    LineDisplay,
    LiveDisplay,
    display_on,
    epoch_line,
    print_tables,
)
from jmp_train.app.reports.terminal import wrapped
from jmp_train.app.runs.events import Compiled, Planned, Progress

pytestmark = pytest.mark.quick

RUNS = [
    make_run(name, scale=2.0**24, skips=(3,))
    for name in ("autocast_bfloat16", "params=float32,compute=bfloat16", "f32")
]
NAMES = [run.policy for run in RUNS]
STYLE = re.compile(r"\x1b\[[0-9;]*m")
NUMBER = re.compile(r"(?<![\w.^/])\d[\w.^+/-]*%?")


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


@pytest.fixture(name="screen", params=[100, 40, 20])
def fixture_screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(request.param)
    yield screen
    screen.close()


def check_fits(text: str, columns: int, unlimited: str) -> None:
    """Raises unless all numbers of the unlimited text are whole in the other, and no line is wider than the screen."""
    assert "…" not in text
    long = [line for line in text.splitlines() if len(line.rstrip()) > columns]
    assert all(" " not in line.strip() for line in long), long  # a name is what cannot be broken
    assert set(NUMBER.findall(unlimited)) <= set(NUMBER.findall(text))


def text_at(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", columns)
    print_tables(RUNS, has_speeds=True)
    return capsys.readouterr().out


def test_tables_fit(screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    unlimited = text_at("200", monkeypatch, capsys)
    monkeypatch.delenv("COLUMNS")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen.file)
        print_tables(RUNS, has_speeds=True)
    check_fits(screen.read(), screen.columns, unlimited)


def test_columns_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    unlimited = text_at("200", monkeypatch, capsys)
    fitted = text_at("40", monkeypatch, capsys)
    check_fits(fitted, 40, unlimited)
    assert max(map(len, fitted.splitlines())) <= 40
    monkeypatch.delenv("COLUMNS")
    print_tables(RUNS)
    assert capsys.readouterr().out.splitlines()[3:6] == unlimited.splitlines()[3:6]  # not cut off at 80


def test_the_live_display_fits(screen: Screen) -> None:
    with display_on(screen.file, NAMES) as display:
        assert isinstance(display, LiveDisplay)
        for run in RUNS:
            display.start(run.policy)
            display.show(run.policy, Planned(2, 100))
            display.show(run.policy, Compiled(7.5, run.memory_of, run.costs))
            display.show(run.policy, Progress(100, 1, run.steps[:40]))
            display.show(run.policy, run.epochs[0])
        display._live.refresh()
        text = screen.read()
        display.show("f32", RUNS[2])
        display.fail("autocast_bfloat16", "the model's output is not finite")
    unlimited = "\n".join(epoch_line(run.policy, run.epochs[0], 2, run.memory_of) for run in RUNS)
    check_fits(text, screen.columns, f"{unlimited} 40/100 7.5 2.00")
    assert ("━" in text) == (screen.columns == 100)


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


def test_lines_break_between_fields() -> None:
    assert wrapped("a  b", 4) == "a  b"
    assert wrapped("abc       loss 0.5  rate 1", 12) == "abc\n  loss 0.5\n  rate 1"
    assert wrapped("long words alone", 6) == "long\n  words\n  alone"
    assert wrapped("toolongbyfar 1", 5) == "toolongbyfar\n  1"
