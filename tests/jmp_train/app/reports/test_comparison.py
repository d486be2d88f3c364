"""Why a run is behind another, as far as it is known."""

import dataclasses

import pytest
from made_runs import make_run

from jmp_train.app.reports import explain_failure, explanations
from jmp_train.app.reports.tables import watch_table
from jmp_train.app.runs import Failed

pytestmark = pytest.mark.quick


def test_a_failure_is_explained_by_what_the_mode_lacks() -> None:
    text = "the last 20 steps were skipped for non-finite gradients"
    failed = Failed(text, is_nonfinite=True)
    assert explain_failure("apex-O3", failed) == (
        f"{text}. apex-O3 has neither loss scale nor float32 master weights nor float32 BatchNorms: "
        "gradients below 6e-8 vanish, updates below 1/2048 of a parameter are lost, statistics above 65504 "
        "overflow; apex-O2 has all three"
    )
    assert explain_failure("apex-O2", failed) == text
    assert explain_failure("apex-O3", Failed("rates must be finite")) == "rates must be finite"


@pytest.mark.parametrize(("points", "said"), [(-3.0, False), (0.99, False), (1.01, True)])
def test_more_than_a_point_of_accuracy_is_explained(points: float, said: bool) -> None:
    first, run = (
        dataclasses.replace(make_run(name), metrics={"test_accuracy": 0.9 - worse / 100})
        for name, worse in (("float32", 0.0), ("apex-O3-bfloat16", points))
    )
    text = (
        "apex-O3-bfloat16 is 1.01 points of test accuracy below float32. apex-O3-bfloat16 has no float32 "
        "master weights: updates below 1/256 of a parameter are lost; apex-O2-bfloat16 has them"
    )
    assert explanations([first, run]) == [text] * said


def test_the_worst_group_of_what_was_watched_is_named() -> None:
    shares = {"lost_updates": {"Conv_0": 0.25, "Dense_0": 0.5}, "underflow": {"Conv_0": 0.0, "Dense_0": 0.0}}
    runs = [make_run("float32"), dataclasses.replace(make_run("float16"), watch=shares)]
    assert watch_table(runs).plain_rows == [["float16", "50.0% (Dense_0)", "0"]]


def test_what_is_not_known_is_not_explained() -> None:
    worse = dataclasses.replace(make_run("naive"), metrics={"test_accuracy": 0.4})
    assert explanations([make_run("float32"), worse]) == []
    other = dataclasses.replace(make_run("apex-O3"), metrics={"loss": 9.0}, higher_is_better=False)
    assert explanations([dataclasses.replace(other, metrics={"loss": 1.0}), other]) == []


def test_outputs_that_are_not_finite_are_noted() -> None:
    bad = dataclasses.replace(make_run("naive"), metrics={"test_accuracy": 0.5, "nonfinite_outputs": 3})
    text = "naive: for 3 of the test data the model's output is not finite, which counts as wrong"
    assert explanations([make_run(), bad]) == [text]


def test_a_file_of_rules_is_noted() -> None:
    ruled = dataclasses.replace(make_run("torch"), rules="folder/rules.toml")
    assert explanations([make_run(), ruled]) == ["torch: autocast by the rules of folder/rules.toml"]
