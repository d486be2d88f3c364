"""Trials remember what was tried with each loss scale, and settle where a dynamic one would."""

import numpy as np
import pytest

from jmp_train.tools.tuning.choice_trials import Trials
from jmp_train.tools.tuning.tolerance import Errors, Tolerance

pytestmark = pytest.mark.quick

SCALES = (4096.0, 512.0, 64.0, 8.0)


def trials_below(limit: float, ran: list[float], scale: float = SCALES[0], budget: int = 100) -> Trials:
    """Returns trials of two units that are finite up to a loss scale, or with the first unit in float32."""

    def run(flags: np.ndarray, scale: float, number: int) -> Errors:
        del number
        ran.append(scale)
        return Errors(scale <= limit or not flags[0], 0.0, 0.0, 0.0, 1.0)

    return Trials(run, scale, 1, 2, Tolerance(), budget, None)


def test_the_largest_finite_loss_scale() -> None:
    ran: list[float] = []
    trials = trials_below(100.0, ran)
    trials.settle(SCALES, frozenset())
    assert (trials.scale, ran) == (64.0, [4096.0, 512.0, 64.0])
    assert trials.suffices(frozenset())
    trials.scale = 4096.0
    assert not trials.suffices(frozenset())
    assert len(ran) == trials.count == 3


def test_what_is_float32_needs_no_smaller_one() -> None:
    trials = trials_below(100.0, [])
    trials.settle(SCALES, frozenset({0}))
    assert trials.scale == 4096.0


def test_none_above_the_present_one() -> None:
    trials = trials_below(1e6, [], scale=512.0)
    trials.settle(SCALES, frozenset())
    assert trials.scale == 512.0


@pytest.mark.parametrize(("limit", "budget"), [(1.0, 100), (100.0, 2)])
def test_it_stays_if_none_is_finite_or_the_budget_is_spent(limit: float, budget: int) -> None:
    trials = trials_below(limit, [], budget=budget)
    trials.settle(SCALES, frozenset())
    assert trials.scale == 4096.0
    assert not trials.suffices(frozenset())
