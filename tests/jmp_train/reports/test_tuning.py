"""The trials of a tuning as they are shown."""

import io
import re

import pytest

from jmp_train.reports import trials_shown

pytestmark = pytest.mark.quick


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_trials_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with trials_shown(stream) as progress:
        assert progress is not None
        progress(1, "none yet")
        progress(12, "3 of 40 in float32")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "trial 12: 3 of 40 in float32 (Ctrl-C takes it)" in text
    assert stream.getvalue().endswith("\x1b[2K")  # the line is cleared


def test_what_is_no_terminal_gets_nothing() -> None:
    stream = io.StringIO()
    with trials_shown(stream) as progress:
        assert progress is None
    assert stream.getvalue() == ""
