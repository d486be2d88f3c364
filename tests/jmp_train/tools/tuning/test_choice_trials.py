"""Trials remember what was tried with each loss scale, and settle where a dynamic one would.

The search leaves items of which each is needed, whatever the test of a set.

Of the loss scales that were tried: at which least is lost.

What errors pass, and how far a sensitive function's tolerance is widened.
"""

import math
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jmp_train.tools.tuning.choice_trials import Trials, needed, smallest_list
from jmp_train.tools.tuning.scores import best_scale, no_scores
from jmp_train.tools.tuning.tolerance import Errors, Outcome, Tolerance

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


COUNT = 24
SETS = st.frozensets(st.integers(0, COUNT - 1), max_size=5)


Suffices = Callable[[frozenset[int]], bool]


def any_of(alternatives: list[frozenset[int]]) -> Suffices:
    return lambda items: any(wanted <= items for wanted in alternatives)


def is_minimal(found: list[int], suffices: Suffices) -> bool:
    kept = frozenset(found)
    return suffices(kept) and not any(suffices(kept - {item}) for item in kept)


@hypothesis.given(alternatives=st.lists(SETS, min_size=1, max_size=4), ranking=st.permutations(range(COUNT)))
def test_each_item_is_needed(alternatives: list[frozenset[int]], ranking: list[int]) -> None:
    suffices = any_of(alternatives)
    found = smallest_list(ranking, lambda i: i % 3 == 0, lambda i: i // 4, suffices)
    assert is_minimal(found, suffices)
    assert frozenset(found) in alternatives


@hypothesis.given(alternatives=st.lists(SETS, min_size=1, max_size=4), ranking=st.permutations(range(COUNT)))
def test_costly_items_are_avoided(alternatives: list[frozenset[int]], ranking: list[int]) -> None:
    found = smallest_list(ranking, lambda i: i < 12, lambda i: i, any_of(alternatives))
    if any(all(i >= 12 for i in wanted) for wanted in alternatives):
        assert all(i >= 12 for i in found)


@hypothesis.given(seed=st.integers(0, 2**16), ranking=st.permutations(range(COUNT)))
def test_a_test_that_is_not_monotone_leaves_a_list_that_suffices(seed: int, ranking: list[int]) -> None:
    def suffices(items: frozenset[int]) -> bool:
        return len(items) == COUNT or hash((seed, items)) % 7 == 0

    found = smallest_list(ranking, lambda i: i % 2 == 0, lambda i: i // 4, suffices)
    assert is_minimal(found, suffices)


def test_a_good_ranking_needs_few_trials() -> None:
    tried: set[frozenset[int]] = set()

    def suffices(items: frozenset[int]) -> bool:
        tried.add(items)
        return {0, 1, 3} <= items

    assert sorted(smallest_list(range(1000), lambda i: False, lambda i: i, suffices)) == [0, 1, 3]
    assert len(tried) < 15


def test_nothing_is_needed_where_nothing_fails() -> None:
    assert smallest_list(range(4), lambda i: False, lambda i: i, lambda items: True) == []
    assert needed([1, 2, 3], lambda items: True) == []


@pytest.mark.parametrize(
    ("lost", "wanted"),
    [
        ({1.0: 0.5, 16.0: 0.2, 256.0: 0.2, 4096.0: 0.9}, 256.0),  # the largest of equals
        ({1.0: 0.5, 16.0: 0.2, 256.0: 0.205}, 256.0),  # and of those within a twentieth
        ({1.0: 0.2, 16.0: 0.22}, 1.0),
        ({1.0: 0.0, 16.0: 0.0}, 16.0),
    ],
)
def test_the_largest_scale_at_which_least_is_lost(lost: dict[float, float], wanted: float) -> None:
    scores = {}
    for scale, share in lost.items():
        scores[scale] = no_scores(2)
        scores[scale][:, 0], scores[scale][:, 1] = (8 * share, 0), (8, 1)
    assert best_scale(scores) == wanted


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
