"""The page of a diagnosis, its chart and its JSON."""

import dataclasses
import json
import math

import pytest
from read_pages import Page

import jmp_train as jt
from jmp_train.policies.autocasting import rules_code
from jmp_train.tools.diagnosing.numerics_report import errors_chart, row_of_problem
from jmp_train.tools.documents import Box, Dot, Label, Polyline, placed

pytestmark = pytest.mark.quick

ROW = jt.tools.OperationNumerics(
    primitive="mul", direction="forward", path="net/<script>alert(1)</script>", file="net&co.py", line=7,
    dtypes_in=("float16", "float16"), dtype="float16", shape=(4, 3), runs=2, overflowed=0.25, flushed=0.0,
    subnormal=0.0, nan=0.0, infinite=0.25, absorbed=0.0, whole_rounded=0.0, merged=0.0, largest=9e4, smallest=2.0,
    local_error=1e-3, worst_error=1e-3, inherited_error=0.1, lost_terms=0.0, decided=0.0,
)  # fmt: skip
ROWS = (
    ROW,
    dataclasses.replace(ROW, primitive="exp", line=8, local_error=0.5, infinite=0.0, direction="backward"),
    dataclasses.replace(ROW, primitive="add", line=9, local_error=0.0, inherited_error=math.inf, direction="update"),
)
RULES = jt.AutocastRules(
    primitives=(("mul", "float32"),), paths=(('a"\\.b$', "float32"),), operations=((r"^net:exp@", "float32"),)
)
PROBLEM = jt.tools.Problem(
    "problem", "overflow", "forward", ROW.path, ROW.file, ROW.line, "mul", "25% > all & <b>",
    jt.tools.Remedy("rules", "float32 <here>", RULES),
)  # fmt: skip
NOTE = dataclasses.replace(
    PROBLEM, severity="note", line=8, primitive="exp", remedy=jt.tools.Remedy("mathematics", "mend")
)
REPORT = jt.tools.NumericsReport((PROBLEM, NOTE), ROWS, {"0/<x>": "collapses"}, steps=2)


def test_the_page_has_problems_rules_and_operations() -> None:
    text = REPORT.to_html("digits <1>")
    page = Page(text)
    assert sorted(page.values("href") + page.values("src")) == ["#problem-1", "#problem-2", "data:,"]
    for said in (
        "digits <1>", "1 problem in 3 operations, 3 of them in half precision", "Argument 0/<x>: collapses.",
        f"1. problem: overflow, forward pass, net&co.py:7 ({ROW.path})", "25% > all & <b>", "float32 <here>",
        'primitives={"mul": "float32"}', "over 2 runs",
    ):  # fmt: skip
        assert said in page.text
    assert len(page.rows) == 1 + len(ROWS)
    assert {len(row) for row in page.rows} == {len(page.rows[0])}
    assert [row[:2] for row in page.rows[1:]] == [["2", "exp"], ["1", "mul"], ["3", "add"]]  # largest error first
    first = dict(zip(page.rows[0], page.rows[2], strict=True))
    assert (first["module"], first["code"], first["dtypes"]) == (ROW.path, "net&co.py:7", "float16 → float16")
    assert (first["shape"], first["runs"], first["overflow"], first["NaN"]) == ("4,3", "2", "25.00%", "")
    assert (first["local error"], first["inherited error"], first["largest"]) == ("0.001", "0.1", "9e+04")


def test_the_rules_can_be_copied() -> None:
    scope: dict[str, object] = {"jt": jt}
    exec(rules_code(RULES), scope)  # noqa: S102 - what users do with it
    assert scope["rules"] == REPORT.rules
    assert REPORT.rules == jt.TORCH_CUDA.replace(
        primitives=dict(RULES.primitives), paths=dict(RULES.paths), operations=dict(RULES.operations)
    )
    assert rules_code(jt.AutocastRules()) == ""
    assert "TORCH_CUDA" not in jt.tools.NumericsReport((NOTE,), ROWS, {}, 1).to_html()


def test_the_chart_has_both_errors_the_passes_and_the_problems() -> None:
    chart = errors_chart(ROWS, (PROBLEM, NOTE))
    assert chart is not None
    dashes = {mark.style.legend: mark.runs for mark in chart.marks if isinstance(mark, Polyline)}
    assert dashes == {
        "inherited error": [[(0, 0.1), (1, 0.1)], [(1, 0.1), (2, 0.1)], [(2, math.inf), (3, math.inf)]],
        "local error": [[(0, 1e-3), (1, 1e-3)], [(1, 0.5), (2, 0.5)]],  # an error of 0 is not drawn
        "NaN or infinite": [[(0, 10), (1, 10)], [(2, 10), (3, 10)]],
    }
    shades = [(mark.style.color, mark.left, mark.right) for mark in chart.marks if isinstance(mark, Box)]
    assert shades == [("shade", 1, 2), ("tint", 2, 3)]
    assert [mark.text for mark in chart.marks if isinstance(mark, Label)] == ["forward", "backward", "update"]
    dots = [(mark.style.color, mark.x, mark.y, mark.link) for mark in chart.marks if isinstance(mark, Dot)]
    assert dots == [("bad", 0.5, 10, "#problem-1"), ("soft", 1.5, 0.5, "#problem-2")]
    assert errors_chart((), ()) is None


def test_marks_do_not_cover_each_other() -> None:
    chart = errors_chart(ROWS, (PROBLEM,) * 20)
    assert chart is not None
    places = [(mark.x, mark.y) for mark in placed(chart, is_whole=False)[0] if isinstance(mark, Dot)]
    assert len(set(places[:15])) == 15
    assert all(y < 310 for _, y in places)  # in the chart; below it all are at one place


def test_a_notebook_shows_the_chart_and_the_problems() -> None:
    page = Page(REPORT._repr_html_())
    assert page.tags.count("svg") == 1
    assert "html" not in page.tags
    assert not page.rows
    assert {("id", "problem-1"), ("id", "problem-2")} <= set(page.attributes)
    assert "-> float32 <here>" in page.text


def test_a_problem_is_marked_at_the_likeliest_row_of_its_line() -> None:
    rows = (dataclasses.replace(ROW, primitive="add"), dataclasses.replace(ROW, path=""), ROW, ROW)
    assert row_of_problem(rows, PROBLEM) == 2
    assert row_of_problem(rows, dataclasses.replace(PROBLEM, primitive="add", path="")) == 0
    assert row_of_problem(rows, dataclasses.replace(PROBLEM, line=99)) is None


@pytest.mark.full
def test_a_page_of_five_thousand_operations_is_small() -> None:
    report = dataclasses.replace(REPORT, rows=(ROWS * 1667)[:5000])
    assert len(report.to_html().encode()) < 3e6


def test_a_function_without_operations_has_a_page() -> None:
    text = jt.tools.NumericsReport((), (), {}, 1).to_html()
    assert "no problems in 0 operations" in text
    assert "<svg" not in text


def test_json_has_no_numbers_that_are_not_finite() -> None:
    found = json.loads(REPORT.to_json(), parse_constant=pytest.fail)
    assert found == REPORT.as_dict()
    assert found["rows"][2]["inherited_error"] is None
    assert found["rows"][0]["shape"] == [4, 3]
    assert found["problems"][0]["remedy"]["rules"] == {
        "primitives": {"mul": "float32"}, "functions": {}, "paths": {'a"\\.b$': "float32"}, "banned": {},
        "operations": {"^net:exp@": "float32"},
    }  # fmt: skip
