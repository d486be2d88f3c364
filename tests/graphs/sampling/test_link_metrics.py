from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from jmp_train import graphs

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16])
def test_the_auc_and_the_average_precision_are_scikit_learns(dtype: Any) -> None:
    random = np.random.default_rng(0)
    labels = random.random(5000) < 0.3
    scores = (random.normal(size=5000) + labels).astype(dtype)  # of bfloat16 many are equal
    wanted = sklearn.metrics.average_precision_score(labels, scores.astype(np.float64))
    assert graphs.average_precision(labels, scores) == pytest.approx(wanted, abs=1e-12)
    wanted = sklearn.metrics.roc_auc_score(labels, scores.astype(np.float64))
    assert graphs.roc_auc(labels, scores) == pytest.approx(wanted, abs=1e-12)
    assert graphs.roc_auc(labels.astype(int), jnp.asarray(scores)) == pytest.approx(wanted, abs=1e-6)


def test_the_mean_reciprocal_rank_is_that_of_sorted_scores() -> None:
    random = np.random.default_rng(0)
    positives, negatives = random.normal(size=200), random.normal(size=(200, 20))
    rows = np.concatenate([positives[:, None], negatives], axis=1)
    wanted = sklearn.metrics.label_ranking_average_precision_score(np.eye(1, 21).repeat(200, axis=0), rows)
    assert graphs.mean_reciprocal_rank(positives, negatives) == pytest.approx(wanted, abs=1e-12)
    assert graphs.mean_reciprocal_rank(np.zeros(3), np.zeros((3, 4))) == pytest.approx(1 / 3)  # of ranks 1 to 5
    ranks = (rows > positives[:, None]).sum(axis=1)
    assert graphs.mean_reciprocal_rank(positives, negatives[:, :0]) == 1
    assert ranks.max() > 1


def test_hits_are_those_above_the_kth_negative() -> None:
    positives, negatives = np.arange(10.0), np.array([[8.5, 3.0], [5.5, 0.0]])
    assert [graphs.hits_at(k, positives, negatives) for k in (1, 2, 3, 4, 5)] == [0.1, 0.4, 0.6, 0.9, 1.0]


def test_what_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: graphs.roc_auc([1, 0], [0.5]), r"labels and scores must have one shape, got \(2,\) and \(1,\)"),
        (lambda: graphs.roc_auc([1, 2], [0.5, 0.1]), "labels must be 0 or 1"),
        (lambda: graphs.roc_auc([1, 1], [0.5, 0.1]), "labels must have both 0 and 1, got 0 zeros and 2 ones"),
        (lambda: graphs.roc_auc([1, 0], [0.5, np.nan]), "scores has NaN"),
        (lambda: graphs.roc_auc([1, 0], [1, 2]), "scores must be floating, got int64"),
        (lambda: graphs.mean_reciprocal_rank([0.5], [[0.1], [0.2]]), r"negatives must be \[1, k\], got shape \(2, 1\)"),
        (lambda: graphs.hits_at(0, [0.5], [0.1]), "k=0 must be positive"),
        (lambda: graphs.hits_at(1, np.zeros(0), [0.1]), "positives is empty"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
