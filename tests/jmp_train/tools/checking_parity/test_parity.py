"""What is compared, what is refused, and what the numbers of the differences are."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_train as jt
from jmp_train.tools import documents
from jmp_train.tools.checking_parity.parity_report import distribution_chart

pytestmark = pytest.mark.quick

TRAIN = -np.arange(1.0, 9.0).reshape(2, 4)


def report_of(infer: Any, train: Any = TRAIN, **options: Any) -> jt.tools.ParityReport:
    """Returns the report of log-probabilities that are there."""
    train, infer = (jax.tree.map(lambda x: np.asarray(x, np.float32), tree) for tree in (train, infer))
    return jt.parity(lambda t, _: t, lambda _, i: i, train, infer, operations=False, **options)


def test_the_numbers_are_those_of_the_definitions() -> None:
    apart = np.array([0, 0.0005, -0.0015, 0.004, -0.008, 0.03, -0.2, 1.0]).reshape(2, 4)
    train, infer = TRAIN.astype(np.float32), (TRAIN - apart).astype(np.float32)
    exact = train.astype(np.float64) - infer
    report = report_of(infer)
    size, ratio = np.abs(exact).ravel(), np.exp(exact).ravel()
    assert report.n_tokens == 8
    assert report.mean == pytest.approx(size.mean())
    assert report.median == pytest.approx(np.median(size))
    assert report.maximum == pytest.approx(size.max())
    assert report.quantiles[0.9] == pytest.approx(np.quantile(size, 0.9))
    assert report.kl == pytest.approx((ratio - 1 - np.log(ratio)).mean())
    assert report.bands == {(0.999, 1.002): 2 / 8, (0.99, 1.01): 5 / 8, (0.95, 1.05): 6 / 8}
    places = [0 if x == 0 else 1 + math.floor(2 * (math.log10(x) + 8)) for x in size]  # half powers of ten from 1e-8
    assert report.histogram == tuple(np.bincount(places, minlength=20))
    boxes = [mark for mark in distribution_chart(report).marks if isinstance(mark, documents.Box)]
    assert [(round(box.left), box.bottom, box.top) for box in boxes] == [
        (place, 0, places.count(place)) for place in sorted(set(places))
    ]
    assert [(token.index, token.path) for token in report.worst[:2]] == [((1, 3), ""), ((1, 2), "")]
    assert (report.worst[0].train, report.worst[0].infer) == pytest.approx((-8, -9))
    assert len(report.worst) == 7
    assert report.first_difference is None


def test_bands_are_of_the_ratio_of_training_to_inference() -> None:
    report = report_of(TRAIN + np.log(1.0015))  # so the ratio is below 1
    assert report.bands[0.999, 1.002] == 0
    assert report_of(TRAIN - np.log(1.0015)).bands[0.999, 1.002] == 1


def test_what_is_not_finite_is_counted_and_no_part_of_a_mean() -> None:
    train, infer = TRAIN.copy(), TRAIN.copy()
    train[0, 0] = infer[0, 0] = -np.inf
    train[0, 1] = np.nan
    infer[0, 2] = -np.inf
    infer[1, 0] -= 0.5
    report = report_of(infer, train)
    assert (report.n_tokens, report.n_nan, report.n_infinite) == (8, 1, 1)
    assert (report.mean, report.maximum) == pytest.approx((0.5 / 6, 0.5))
    assert report.bands[0.95, 1.05] == 5 / 8
    assert {token.index for token in report.worst} == {(0, 1), (0, 2), (1, 0)}
    assert report.worst[-1].index == (1, 0)
    text = str(report)
    assert "1 of the tokens are NaN" in text
    assert "1 of the tokens are impossible (-inf) in one function alone" in text
    found = json.loads(report.to_json())
    assert found["worst"][0]["train"] is None
    assert found["operations"] is None


def test_no_finite_token_has_no_mean() -> None:
    report = report_of(np.full((2, 4), np.nan))
    assert math.isnan(report.mean)
    assert math.isnan(report.quantiles[0.99])
    assert report.n_nan == 8
    assert json.loads(report.to_json())["mean"] is None


def test_only_tokens_that_count_are_looked_at() -> None:
    padded = TRAIN.copy()
    padded[:, 3] = [7.0, np.nan]
    seen = np.array([True, True, True, False])
    report = report_of(padded, where=seen)
    assert (report.n_tokens, report.n_nan, report.maximum) == (6, 0, 0)
    both = report_of({"a": TRAIN, "b": padded}, {"a": TRAIN - 1, "b": TRAIN}, where={"a": np.bool_(True), "b": seen})
    assert (both.n_tokens, both.maximum) == (14, 1)
    assert both.worst[0].path == "a"


@pytest.mark.parametrize(
    ("train", "infer", "where", "error", "message"),
    [
        (TRAIN, TRAIN[:1], None, ValueError, r"the result: train_fn returns shape \(2, 4\), infer_fn \(1, 4\)"),
        ({"a": TRAIN}, {"a": TRAIN[0]}, None, ValueError, r"'a': train_fn returns shape \(2, 4\), infer_fn \(4,\)"),
        ({"a": TRAIN, "b": TRAIN}, {"a": TRAIN}, None, ValueError, "same structure: only train_fn returns 'b'"),
        ((TRAIN,), [TRAIN], None, ValueError, "same structure"),
        (TRAIN, -TRAIN, None, ValueError, r"infer_fn: the result at \(0, 0\) is 1, and 8 of 8 tokens are above 0"),
        (
            TRAIN,
            TRAIN,
            np.ones(3, bool),
            ValueError,
            r"where of shape \(3,\) does not broadcast to the result \(2, 4\)",
        ),
        (TRAIN, TRAIN, np.ones(4), TypeError, "where must be boolean.*the result has float64"),
        (TRAIN, TRAIN, np.zeros(4, bool), ValueError, "no token is left"),
        (
            TRAIN,
            TRAIN,
            {"a": np.ones(4, bool)},
            ValueError,
            "where must be an array, or a tree as the functions return",
        ),
        ((), (), None, ValueError, "no token is left"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    train: Any, infer: Any, where: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        report_of(infer, train, where=where)


def test_results_that_are_no_floats_and_arguments_without_values_are_refused() -> None:
    def same(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises(TypeError, match=r"train_fn must return log-probabilities.*the result is int32 \(3,\)"):
        jt.parity(same, same, jnp.arange(3))
    with pytest.raises(TypeError, match=r"infer_fn must return log-probabilities.*the result is float"):
        jt.parity(same, lambda x: -1.0, -jnp.ones(3))
    with pytest.raises(TypeError, match="'0/a' is a ShapeDtypeStruct"):
        jt.parity(same, same, {"a": jax.ShapeDtypeStruct((), jnp.float32)})
    with pytest.raises(TypeError, match=r"needs concrete values; call it outside of transforms such as jax\.jit"):
        jax.jit(lambda x: jt.parity(same, same, x).mean)(jnp.ones(3))


@pytest.fixture(name="report", scope="module")
def fixture_report() -> jt.tools.ParityReport:
    """Of a softmax in half precision."""

    def infer(logits: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(logits.astype(jnp.float16)).astype(jnp.float32)

    logits = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    return jt.parity(jax.jit(jax.nn.log_softmax), jax.jit(infer), logits)


def test_the_report_is_read_in_a_terminal_as_json_and_as_a_page(report: jt.tools.ParityReport, tmp_path: Path) -> None:
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("48 tokens: |log p_train - log p_infer| is ")
    assert "first difference: rounding, while float32 agrees" in text
    assert "infer: convert_element_type float16[6,8]" in text
    assert "logits.astype(jnp.float16)" in text
    found = json.loads(report.to_json())
    assert found["mean"] == report.mean
    assert found["bands"][0] == {"low": 0.999, "high": 1.002, "share": report.bands[0.999, 1.002]}
    assert found["operations"]["first"]["infer"]["primitive"] == "convert_element_type"
    page = report.to_html("softmax <half>")
    assert "<h1>softmax &lt;half&gt;</h1>" in page
    assert page.count("<svg") == 2
    assert "convert_element_type" in page
    report.plot(tmp_path / "parity.svg")
    picture = (tmp_path / "parity.svg").read_text()
    assert picture.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "first difference: convert_element_type" in picture
    assert "$" not in picture


@pytest.mark.parametrize(
    ("unknown", "difference", "contribution", "evidence"),
    [
        (
            0.25,
            0.0,
            0.4,
            "25% of its rows are not among those of train; with the values of train, 40% of the difference",
        ),
        (0.0, 0.0, 0.4, "its rows are those of train, at other places or for other tokens; with the values of train"),
        (0.0, 0.5, 0.4, "off by 0.5 from train, by 0.25 from float32; with the values of train, 40% of the difference"),
        (0.0, 0.0, math.nan, "off by 0 from train, by 0.25 from float32"),
    ],
)
def test_an_operation_says_how_its_rows_differ(
    report: jt.tools.ParityReport, unknown: float, difference: float, contribution: float, evidence: str
) -> None:
    assert report.operations is not None and report.operations.first is not None
    numbers = {"unknown": unknown, "difference": difference, "error": 0.25, "contribution": contribution}
    assert report.operations.first.infer is not None
    infer = dataclasses.replace(report.operations.first.infer, **numbers)
    first = dataclasses.replace(report.operations.first, infer=infer)
    changed = dataclasses.replace(report, operations=dataclasses.replace(report.operations, first=first))
    text = " ".join(str(changed).split())
    assert evidence in text
    assert ("goes away" in text) != math.isnan(contribution)


def test_what_no_operation_explains_is_the_compilers(report: jt.tools.ParityReport) -> None:
    assert report.operations is not None
    assert report.operations.mean == pytest.approx(report.mean, rel=0.01)
    assert "compiler" not in str(report)
    same = dataclasses.replace(report.operations, first=None, mean=1e-8)
    text = " ".join(str(dataclasses.replace(report, operations=same)).split())
    assert (
        "beyond float32's rounding; the operations run one by one differ by 1e-08 on average: the rest is the" in text
    )
