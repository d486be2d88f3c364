"""Names that users choose, of metrics, parameters, tasks, policies and files, are text in every output."""

import ast
import dataclasses
import html
import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_runs import make_run

from jmp_train.app.reports import print_tables, showing, trials_shown, write_report
from jmp_train.app.reports.display import LiveDisplay, _warn_once, display_on
from jmp_train.app.reports.page import page
from jmp_train.app.reports.tables import panels
from jmp_train.app.runs import RunLog
from jmp_train.app.runs.events import Note, Phase, Planned, Progress, Run
from jmp_train.policies.files import escaped
from jmp_train.tools import documents as doc

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[4]
NAMES = (
    "f1[micro]", "f1[macro]", "ap[/50]", "[bold]b[/]", "[link=http://x]l[/link]", ":smile:", "3.5 'a' http://x",
    "a\nb", "a\tb", "\x1b[31mred", "\x1b]0;title\x07", "nul\x00", "\r0", "\x9b31m", "\u202eabc", "\u2028x",
    "half\udce9", "日本", "😀", "<b>&\"'", "</title><script>", "{{x}}{%y%}", "$x^2$", "$\\frac$", r"C:\x", "|a|`b`",
    "{0}%s{name}", "a_b",
)  # fmt: skip


def shown(name: str) -> str:
    return escaped(name).replace("_", " ")


def named_run(name: str = NAMES[0]) -> Run:
    """Returns a run in which all that users name has such names."""
    metrics = dict.fromkeys(NAMES, 0.5)
    watch = {"lost_updates": dict.fromkeys((name,), 0.5), "underflow": {name: 0.25}}
    phases = (Phase(name, 0, 50, make_run().costs), Phase(name, 50, 100, make_run().costs))
    return dataclasses.replace(make_run(name), metrics=metrics, device=name, watch=watch, rules=name, phases=phases)


def check_text(text: str, names: tuple[str, ...] = NAMES) -> None:
    """Raises if a name is missing, or what is written has control characters other than line ends."""
    assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Cf")} - {"\n"}
    joined = re.sub(r"\s+", "", text)
    assert [name for name in names if re.sub(r"\s+", "", shown(name)) not in joined] == []


@pytest.mark.parametrize("columns", ["", "200", "1", "0", "-5", "abc", "²", "9" * 5000])
def test_tables_have_all_names_at_any_width(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    print_tables([named_run()], has_speeds=True)
    output = capsys.readouterr()
    check_text(output.out, () if columns in ("200", "1") else NAMES)
    assert output.err == ""


def test_names_in_every_place_of_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        run = named_run(name)
        print_tables([run, dataclasses.replace(run, policy="float32")])
        check_text(capsys.readouterr().out, (name,))
    runs = [named_run(name) for name in NAMES]
    text = page("".join(NAMES), runs, [(name, name) for name in NAMES])
    check_text(html.unescape(text).replace("_", " ").replace("\t", r"\t"))
    assert "<script" not in text
    for chart in panels(runs):
        drawn = "".join(ElementTree.fromstring(doc.svg_file([chart])).itertext())
        check_text(drawn.replace("_", " "), () if "x" not in drawn else NAMES[:3])
    table = doc.Table(NAMES, [NAMES], note=NAMES[7])
    text = doc.text([doc.Section(NAMES[9], [table, *map(doc.Text, NAMES), *map(doc.Code, NAMES)])])
    check_text(text.replace("_", " ").replace("\t", r"\t"))
    check_text(html.unescape(doc.fragment([table, doc.Code(NAMES[11])])).replace("_", " "))
    written, unwritten = write_report(tmp_path, "\n".join(NAMES), runs, [(name, name) for name in NAMES])
    assert (len(written), unwritten) == (3, [])
    found = json.loads((tmp_path / "report.json").read_text("ascii"))["runs"]
    assert [found[0]["metrics"], found[3]["policy"]] == [runs[0].metrics, NAMES[3]]
    with RunLog(tmp_path / "log") as log:
        log.write(runs[0])
    assert [*json.loads((tmp_path / "log/metrics.jsonl").read_text())] == [*NAMES]


def test_metrics_with_equal_titles_keep_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables([dataclasses.replace(make_run(), metrics={"f1_micro": 1, "f1 micro": 2})])
    assert re.search(r"f1_micro +f1 micro ", capsys.readouterr().out)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.full
@pytest.mark.parametrize("columns", ["3000", "-5"])
def test_a_live_display_has_all_names(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with display_on(stream, NAMES) as display:
        assert isinstance(display, LiveDisplay)
        for name in NAMES:
            display.start(name)
            for event in (Planned(2, 100), Progress(100, 1, make_run().steps[:4]), Note(name), named_run(name)):
                display.show(name, event)
            display.fail(name, name)
        display._bars.refresh()
    with trials_shown(stream) as progress:
        assert progress is not None
        for name in NAMES:
            progress(1, name)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", stream.getvalue())
    check_text(text.replace("_", " "))


def test_only_one_console_is_made_and_only_text_is_printed() -> None:
    makers = {"Console", "TextColumn", "render", "from_markup"}
    found = [
        (path.name, call.func.id if isinstance(call.func, ast.Name) else call.func.attr)
        for folder in ("jmp_train", "policies", "graphs")
        for path in (ROOT / folder).rglob("*.py")
        if "rich" in (source := path.read_text())
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute)
        and getattr(call.func, "id", getattr(call.func, "attr", "")) in makers
    ]  # fmt: skip
    assert found == [("display.py", "Console"), ("display.py", "TextColumn")]


@pytest.mark.parametrize("is_live", [False, True])
def test_an_error_in_showing_is_one_warning(
    is_live: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Terminal() if is_live else io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    _warn_once.cache_clear()
    broken: Any = object()
    with display_on(stream, ["a"]) as display:
        for _ in range(3):
            display.start("a")
            display.show("a", dataclasses.replace(make_run().epochs[0], loss=broken))
            display.fail("a", broken)
    print_tables([broken])
    print_tables([], has_speeds=True)
    with trials_shown(stream) as progress:
        if progress is not None:
            progress(1, broken)
    with showing():
        raise RecursionError("deep")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert len({*lines}) == len(lines)
    assert all(line.startswith("jmp-train: warning: not all is shown: ") for line in lines)
