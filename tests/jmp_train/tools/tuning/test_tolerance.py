"""What errors pass, and how far a sensitive function's tolerance is widened."""

import math

import numpy as np
import pytest

from jmp_train.tools.tuning.tolerance import Errors, Outcome, Tolerance

pytestmark = pytest.mark.quick

TOLERANCE = Tolerance(loss=0.01, gradient=0.05, leaf=0.25, cosine=0.8, sensitivity=3.0)


def outcome(loss: float, gradient: float) -> Outcome:
    return Outcome([np.float32(loss)], {"w": np.float32([gradient, 0])})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("loss_off", "gradient_off", "wanted"),
    [
        (0.001, 0.01, (0.01, 0.05)),  # three times these are within the tolerance
        (0.02, 0.1, (0.06, 0.3)),
        (0.5, 0.5, (0.1, 0.7)),  # ten times the loss's own, and 0.7, are the most
    ],
)
def test_a_sensitive_function_has_a_wider_tolerance(
    loss_off: float, gradient_off: float, wanted: tuple[float, float]
) -> None:
    exact = [outcome(2.0, 4.0)] * 2
    found = TOLERANCE.widened([exact[0], outcome(2.0 * (1 + loss_off), 4.0 * (1 - gradient_off))], exact)
    assert (found.loss, found.gradient) == pytest.approx(wanted, rel=1e-5)
    assert (found.leaf, found.cosine, found.sensitivity) == (0.25, 0.8, 3.0)


@pytest.mark.parametrize(
    ("off", "sensitivity", "wanted"), [(0.05, 3.0, 1.0), (0.25, 3.0, 3.0), (0.6, 3.0, math.inf), (0.6, 0.0, 1.0)]
)
def test_a_sensitive_leaf_has_slack(off: float, sensitivity: float, wanted: float) -> None:
    tolerance = Tolerance(leaf=0.25, sensitivity=sensitivity)
    assert tolerance.slack(outcome(1.0, 1.0 - off), outcome(1.0, 1.0))["w"] == pytest.approx(wanted, rel=1e-5)


def test_errors_pass_up_to_the_tolerance() -> None:
    most = Errors(True, 0.01, 0.05, 0.25, 0.8)
    assert TOLERANCE.passes(most)
    worse = {"finite": False, "loss": 0.011, "gradient": 0.051, "leaf": 0.26, "cosine": 0.79, "accepted": False}
    for name, value in worse.items():
        assert not TOLERANCE.passes(most._replace(**{name: value})), name
