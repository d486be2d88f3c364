"""Documents as HTML and as text: all of a document is there, escaped, and empty blocks leave nothing behind."""

import pathlib
import re

import pytest
from browsing import open_browser, show
from read_pages import Page

from jmp_train.tools.documents import (
    Axis,
    Cell,
    Chart,
    Code,
    Panels,
    Polyline,
    Section,
    Style,
    Table,
    Text,
    fragment,
    page,
    text,
)

pytestmark = pytest.mark.quick

ODD = "<&\">'"
LINE = Chart(
    f"line {ODD}", Axis(0, 1), Axis(0, 1), [Polyline(Style("first", f"up {ODD}"), [[(0, 0), (1, 1)]], f"tip {ODD}")],
    note=f"below {ODD}",
)  # fmt: skip
BLOCKS = [
    Text(f"text {ODD}", "said", "soft"),
    Code(f"code {ODD}", "rules"),
    Table(
        (f"head {ODD}", "n"), [(Cell(f"cell {ODD}", "misfit", "#rules", ("#4477aa", "#4477aa")), f"1 {ODD}")], "table",
        note=f"note {ODD}",
    ),
    Section(f"title {ODD}", [Section(f"inner {ODD}", [LINE])], "first", "problem"),
    Section(f"fold {ODD}", [Text(f"folded {ODD}")], "second", is_folded=True),
]  # fmt: skip


def test_a_page_has_all_of_its_document_escaped_and_nothing_from_elsewhere() -> None:
    made = page(f"page {ODD}", BLOCKS, [f"footer {ODD}"])
    found = Page(made)
    assert made.startswith("<!DOCTYPE html>")
    names = ("page", "text", "code", "head", "cell", "1", "note", "title", "inner", "fold", "folded", "footer")
    for name in (*names, "line", "up", "tip", "below"):
        assert f"{name} {ODD}" in found.text, name
    assert f"line {ODD}" in found.values("aria-label")
    assert found.values("id") == ["said", "rules", "table", "first", "second"]
    assert found.values("href") == ["data:,", "#rules"]
    assert not {"script", "img", "iframe", "object"} & set(found.tags)
    assert not re.search(r"https?:|url\(|@import", made)


def test_titles_are_as_deep_as_their_sections() -> None:
    tags = Page(page("page", BLOCKS)).tags
    assert [tag for tag in tags if re.fullmatch("h[1-6]|summary", tag)] == ["h1", "h2", "h3", "h4", "summary"]
    folded = Section("fold", [Section("inside", [Text("a")])], is_folded=True)
    assert "<h3>inside</h3>" in fragment([folded])


def test_blocks_without_content_leave_nothing_behind() -> None:
    empty = [None, Text(""), Code("", "rules"), Table(("head",), [], "table")]
    assert fragment([*empty, Section("title", empty), Section("fold", empty, is_folded=True)]) == ""
    assert text([*empty, Section("title", empty)]) == ""


def test_panels_are_charts_with_their_legends_inside() -> None:
    panels = Page(fragment([Panels([LINE, LINE])]))
    assert panels.tags.count("svg") == 2
    assert "p" not in panels.tags
    assert panels.text.count(f"up {ODD}") == panels.text.count(f"line {ODD}") == 2


def test_colors_follow_the_surroundings() -> None:
    made = page("page", [LINE])
    assert "stroke: light-dark(#1a73e8, #8ab4f8)" in made
    assert "background: light-dark(#ffffff, #18191b)" in made
    assert 'style="background: #4477aa"' in page("page", BLOCKS)


def test_text_is_wrapped_indented_and_aligned_and_code_is_cut() -> None:
    table = Table(("head", "n"), [(Cell("a cell", link="#there"), "1"), ("b", "12")])
    inner = Section("inner", [LINE, Code("x = 1\ny = 234567"), Text("four five six")])
    assert text([Text("one two three"), table, Section("title", [inner])], width=12).splitlines() == [
        "one two", "  three",
        "head    n", "a cell  1", "b       12",
        "title", "  inner", "      x = 1", "      y = 23", "    four", "      five", "      six",
    ]  # fmt: skip


@pytest.mark.full  # of a report it is a quick test
def test_a_wide_document_fits_a_phone(tmp_path: pathlib.Path) -> None:
    wide = "a_name_that_is_long_" * 20
    table = Table((wide, "n"), [(wide, "1")])
    blocks = [Text(wide), Code(wide), table, Section(wide, [LINE]), Panels([LINE])]
    file = tmp_path / "page.html"
    file.write_text(page("page", [*blocks, Section(wide, blocks, is_folded=True)], [wide]))
    with open_browser() as browser:
        for width in (360, 1200):
            show(browser, file, width, "dark")
            browser.execute_script("document.querySelector('details').open = true")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []
