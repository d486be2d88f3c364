"""Screens of any width: no number is cut off, and NO_COLOR means no style at all."""

import contextlib
import fcntl
import os
import re
import struct
import termios

import pytest
from made_runs import make_run

from jmp_train.app.reports.display import (
    LineDisplay,
    display_on,
    print_tables,
)

pytestmark = pytest.mark.quick

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
