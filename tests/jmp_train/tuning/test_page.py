"""The page of tuned rules: complete, escaped, without anything from elsewhere, and its pictures."""

import dataclasses
import html.parser
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import jmp_train as jt
from jmp_train.policies.documents import svg
from jmp_train.tuning import Errors, Float32Entry, FrontPoint, Verification
from jmp_train.tuning.charts import front_chart, loss_chart

pytestmark = pytest.mark.quick

LINE = "    y = x * x  # <b>"
FRONT = (FrontPoint(0.99, 0.2, 1), FrontPoint(0.9, 0.01, 2), FrontPoint(0.0, 1e-7, 40))
CHOSEN = FrontPoint(0.95, 0.04, 3)
PASSED = Verification(True, Errors(True, 1e-3, 0.02, 0.1, 1.0), 1, (2.0, 1.5, 1.0), (2.0, 1.6, 1.25))


def tuned_rules(file: Path) -> jt.tuning.TunedRules:
    file.write_text(f"\n{LINE}\n")
    entry = Float32Entry(
        (r"^net/<i>:mul@",), ("mul",), "net/<i>", f"{file}:2", 3, Errors(False, math.nan, math.inf, math.nan, 0.0)
    )
    added = Float32Entry((r"^:exp@.*model\.py:9$",), ("exp",), "", "nowhere.py:9", 1, None, repaired=True)
    return jt.tuning.TunedRules(
        rules=jt.MOSTLY_HALF.replace(operations={x: "float32" for e in (entry, added) for x in e.expressions}),
        dtype="bfloat16", entries=(entry, added), choices=40, complete=True, trials=17, seconds=1.5,
        compile_seconds=20.0, loss_scale=4096.0, tolerance=jt.tuning.Tolerance(), half_flops=(0.5, 0.875),
        half_elements=(0.25, 0.75), front=FRONT, chosen=CHOSEN, verification=PASSED,
    )  # fmt: skip


class Page(html.parser.HTMLParser):
    """What a browser would see: tags, attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    tuned = tuned_rules(tmp_path / "model.py")
    text = tuned.to_html("digits <1>")
    page = Page(text)
    assert not {"script", "iframe", "img", "object", "i", "b"} & set(page.tags)
    assert [value for name, value in page.attributes if name in ("href", "src")] == ["data:,"]
    assert not re.search(r"https?:|url\(|@import", text)
    for said in (
        "digits <1>", "2 entries in float32 of 40 that could be bfloat16; 17 trials in 1.5 s", "87.5%", "25.0%",
        f"{tmp_path / 'model.py'}:2 net/<i>, 3 operations", LINE.strip(), "without it: not finite",
        "nowhere.py:9, 1 operation", "added when autocast itself was run", tuned.code(),
        'jt.get_policy("autocast_bfloat16")', "under autocast itself it holds: loss off by 0.001, gradient by 0.02",
        "on all examples, 1 of them held out", "The loss of step 3 is 1.25, in float32 1",
        "The loss scale of the trials was 4096.", "errors of 0.01 in the loss, 0.05 in the gradient, 0.25 in that of a",
    ):  # fmt: skip
        assert said in page.text, said
    assert page.tags.count("svg") == 2
    assert ("class", "failed") not in page.attributes
    assert ("id", "note") not in page.attributes


def test_what_does_not_hold_and_what_is_not_there_shows(tmp_path: Path) -> None:
    failed = Verification(False, Errors(True, 0.1, 0.3, 0.4, 0.9), 0)
    tuned = dataclasses.replace(
        tuned_rules(tmp_path / "model.py"), rules=jt.MOSTLY_HALF, entries=(), complete=False, front=(), chosen=None,
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
    assert "<table" not in tuned._repr_html_()
    assert tuned.code() == "rules = jt.MOSTLY_HALF"


def test_a_notebook_shows_a_table(tmp_path: Path) -> None:
    text = tuned_rules(tmp_path / "model.py")._repr_html_()
    page = Page(text)
    assert page.tags.count("tr") == 3
    assert LINE.strip() in page.text
    assert "it holds" in page.text


@pytest.mark.parametrize(("steps_taken", "is_said"), [(0, True), (1, False), (None, False)])
def test_an_untrained_state_is_said(tmp_path: Path, steps_taken: int | None, is_said: bool) -> None:
    tuned = dataclasses.replace(tuned_rules(tmp_path / "model.py"), steps_taken=steps_taken)
    assert tuned.to_json()["steps_taken"] == steps_taken
    for text in (str(tuned), Page(tuned.to_html()).text, Page(tuned._repr_html_()).text):
        assert ("before the first step of training: tune again" in text) == is_said


def test_the_rules_can_be_copied(tmp_path: Path) -> None:
    tuned = tuned_rules(tmp_path / "model.py")
    scope: dict[str, object] = {"jt": jt}
    exec(tuned.code(), scope)  # noqa: S102 - what users do with it
    assert scope["rules"] == tuned.rules


def front_picture(front: Sequence[FrontPoint], chosen: FrontPoint | None, tolerance: float) -> str:
    chart = front_chart(front, chosen, tolerance)
    return "" if chart is None else svg(chart)


def loss_picture(float32: Sequence[float], tuned: Sequence[float]) -> str:
    chart = loss_chart(float32, tuned)
    return "" if chart is None else svg(chart)


def places(svg: str, name: str) -> list[tuple[float, float]]:
    """Returns where circles of a class are."""
    found = re.findall(rf'<circle class="{name}" cx="([^"]*)" cy="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in found]


def test_the_front_has_its_points_the_chosen_one_and_the_tolerance() -> None:
    svg = front_picture(FRONT, CHOSEN, 0.05)
    points, (chosen,) = places(svg, "point"), places(svg, "chosen")
    assert len(points) == 2  # what is all in float32 is far to the left of them
    left, right = sorted(points)
    assert left[0] < chosen[0] < right[0]
    assert left[1] > chosen[1] > right[1]  # smaller errors are lower
    height = re.search(r'class="tolerance" stroke-width="2" d="M60 ([\d.]+)H', svg)
    assert height is not None
    assert right[1] < float(height[1]) < chosen[1]  # 0.2 exceeds it, 0.04 does not
    assert "chosen: 95.0% of the flops in half precision, gradient off by 0.04, 3 operations in float32" in svg


def test_a_front_without_tolerance_without_a_choice_or_without_gradients() -> None:
    assert "tolerance" not in front_picture(FRONT, CHOSEN, math.inf)
    assert not places(front_picture(FRONT, None, 0.05), "chosen")
    assert front_picture((FrontPoint(1.0, 0.0, 0),), FrontPoint(1.0, 0.0, 0), 0.05) == ""
    assert front_picture((), None, 0.05) == ""
    ((_, height),) = places(front_picture((FRONT[0], FrontPoint(0.9, 0.0, 2)), None, 0.05), "point")[:1]
    assert height == 255  # an error of 0, at the lower edge
    assert len(places(front_picture((*FRONT, FrontPoint(0.999, math.inf, 0)), None, 0.05), "point")) == 2


def test_losses_are_two_curves_with_gaps_where_they_are_not_finite() -> None:
    svg = loss_picture((3.0, 2.0, 1.5, 1.0, 0.5), (3.0, 2.0, math.nan, 1.0, 0.5))
    curves = re.findall(r'<path class="(float32|tuned)" stroke-width="[52]" d="([^"]*)"', svg)
    assert [(name, path.count("L") + 1) for name, path in curves] == [("float32", 5), ("tuned", 2), ("tuned", 2)]
    assert loss_picture((), ()) == ""
    assert "<svg" in loss_picture((1.0,), (1.0,))


def test_json_has_no_numbers_that_are_not_finite(tmp_path: Path) -> None:
    tuned = tuned_rules(tmp_path / "model.py")
    found = json.loads(json.dumps(tuned.to_json(), allow_nan=False))
    assert found["chosen"] == {"half_flops": 0.95, "gradient_error": 0.04, "float32_operations": 3}
    assert found["entries"][0]["without"]["gradient"] is None
    assert found["code"] == tuned.code()
