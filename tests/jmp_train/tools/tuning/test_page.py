"""The page of tuned rules, and its charts."""

import dataclasses
import json
import math
import pathlib

import pytest
from read_pages import Page

import jmp_train as jt
from jmp_train.tools.documents import Polyline
from jmp_train.tools.tuning import Errors, Float32Entry, Verification
from jmp_train.tools.tuning.tuned_rules import loss_chart

pytestmark = pytest.mark.quick

LINE = "    y = x * x  # <b>"
PASSED = Verification(True, Errors(True, 1e-3, 0.02, 0.1, 1.0), 1, (2.0, 1.5, 1.0), (2.0, 1.6, 1.25))


def tuned_rules(file: pathlib.Path) -> jt.tuning.TunedRules:
    file.write_text(f"\n{LINE}\n")
    entry = Float32Entry(
        (r"^net/<i>:mul@",), ("mul",), "net/<i>", f"{file}:2", 3, Errors(False, math.nan, math.inf, math.nan, 0.0)
    )
    added = Float32Entry((r"^:exp@.*model\.py:9$",), ("exp",), "", "nowhere.py:9", 1, None, repaired=True)
    return jt.tuning.TunedRules(
        rules=jt.MOSTLY_HALF.replace(operations={x: "float32" for e in (entry, added) for x in e.expressions}),
        dtype="bfloat16", entries=(entry, added), choices=40, complete=True, trials=17, seconds=1.5,
        compile_seconds=20.0, loss_scale=4096.0, tolerance=jt.tuning.Tolerance(), half_flops=(0.5, 0.875),
        half_elements=(0.25, 0.75), verification=PASSED,
    )  # fmt: skip


def test_the_page_has_entries_rules_charts_and_what_was_verified(tmp_path: pathlib.Path) -> None:
    tuned = tuned_rules(tmp_path / "model.py")
    text = tuned.to_html("digits <1>")
    page = Page(text)
    assert not {"i", "b"} & set(page.tags)
    for said in (
        "digits <1>", "2 entries in float32 of 40 that could be bfloat16; 17 trials in 1.5 s", "87.5%", "25.0%",
        f"{tmp_path / 'model.py'}:2 net/<i>, 3 operations", LINE.strip(), "without it: not finite",
        "nowhere.py:9, 1 operation", "added when autocast itself was run", tuned.code(),
        'jt.get_policy("autocast_bfloat16")', "under autocast itself it holds: loss off by 0.001, gradient by 0.02",
        "on all examples, 1 of them held out", "The loss of step 3 is 1.25, in float32 1",
        "The loss scale of the trials was 4096.", "errors of 0.01 in the loss, 0.05 in the gradient, 0.25 in that of a",
    ):  # fmt: skip
        assert said in page.text, said
    assert page.tags.count("svg") == 1
    assert ("class", "failed") not in page.attributes
    assert ("id", "note") not in page.attributes


def test_what_does_not_hold_and_what_is_not_there_shows(tmp_path: pathlib.Path) -> None:
    failed = Verification(False, Errors(True, 0.1, 0.3, 0.4, 0.9), 0)
    tuned = dataclasses.replace(
        tuned_rules(tmp_path / "model.py"), rules=jt.MOSTLY_HALF, entries=(), complete=False,
        tolerance=jt.tuning.Tolerance(math.inf, math.inf, math.inf, -1.0), verification=failed,
    )  # fmt: skip
    page = Page(tuned.to_html())
    assert ("class", "failed") in page.attributes
    assert "svg" not in page.tags
    for said in (
        "does not hold", "none of them held out", "No operation has to, beside sums and solvers.",
        "the search was stopped", "rules = jt.MOSTLY_HALF\n", "a function of one's own",
    ):  # fmt: skip
        assert said in page.text, said
    assert tuned.code() == "rules = jt.MOSTLY_HALF"


def test_a_notebook_shows_the_same_without_a_page_around_it(tmp_path: pathlib.Path) -> None:
    tuned = tuned_rules(tmp_path / "model.py")
    fragment = tuned._repr_html_()
    assert "<html" not in fragment
    assert fragment in tuned.to_html()


@pytest.mark.parametrize(("steps_taken", "is_said"), [(0, True), (1, False), (None, False)])
def test_an_untrained_state_is_said(tmp_path: pathlib.Path, steps_taken: int | None, is_said: bool) -> None:
    tuned = dataclasses.replace(tuned_rules(tmp_path / "model.py"), steps_taken=steps_taken)
    assert tuned.to_json()["steps_taken"] == steps_taken
    for text in (str(tuned), Page(tuned.to_html()).text, Page(tuned._repr_html_()).text):
        assert ("before the first step of training: tune again" in text) == is_said


def test_the_rules_can_be_copied(tmp_path: pathlib.Path) -> None:
    tuned = tuned_rules(tmp_path / "model.py")
    scope: dict[str, object] = {"jt": jt}
    exec(tuned.code(), scope)  # noqa: S102 - what users do with it
    assert scope["rules"] == tuned.rules


def test_losses_are_two_curves_with_gaps_where_they_are_not_finite() -> None:
    chart = loss_chart((3.0, 2.0, 1.5, 1.0, 0.5), (3.0, 2.0, math.nan, 1.0, 0.5))
    assert chart is not None
    assert [style.legend for style in chart.legend] == ["loss in float32", "loss by the rules"]
    runs = [mark.runs for mark in chart.marks if isinstance(mark, Polyline)]
    assert [list(map(len, parts)) for parts in runs] == [[5], [2, 2]]
    assert loss_chart((), ()) is None
    assert loss_chart((1.0,), (1.0,)) is not None


def test_json_has_no_numbers_that_are_not_finite(tmp_path: pathlib.Path) -> None:
    tuned = tuned_rules(tmp_path / "model.py")
    found = json.loads(json.dumps(tuned.to_json(), allow_nan=False))
    assert found["entries"][0]["without"]["gradient"] is None
    assert found["code"] == tuned.code()
