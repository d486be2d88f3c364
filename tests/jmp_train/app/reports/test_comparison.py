"""Notes about runs."""

import dataclasses

import pytest
from made_runs import make_run

from jmp_train.app.reports import explanations
from jmp_train.app.reports.tables import watch_table

pytestmark = pytest.mark.quick


def test_the_worst_group_of_what_was_watched_is_named() -> None:
    shares = {"lost_updates": {"Conv_0": 0.25, "Dense_0": 0.5}, "underflow": {"Conv_0": 0.0, "Dense_0": 0.0}}
    runs = [make_run("float32"), dataclasses.replace(make_run("float16"), watch=shares)]
    assert watch_table(runs).plain_rows == [["float16", "50.0% (Dense_0)", "0"]]


def test_outputs_that_are_not_finite_are_noted() -> None:
    bad = dataclasses.replace(make_run("naive"), metrics={"test_accuracy": 0.5, "nonfinite_outputs": 3})
    text = "naive: for 3 of the test data the model's output is not finite, which counts as wrong"
    assert explanations([make_run(), bad]) == [text]


def test_a_file_of_rules_is_noted() -> None:
    ruled = dataclasses.replace(make_run("torch"), rules="folder/rules.toml")
    assert explanations([make_run(), ruled]) == ["torch: autocast by the rules of folder/rules.toml"]
