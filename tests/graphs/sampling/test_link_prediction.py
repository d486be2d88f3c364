from typing import Any

import jax
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


def test_uniform_negatives_are_uniform_and_do_not_retrace() -> None:
    traces = 0

    @jax.jit
    def draw(key: jax.Array, senders: jax.Array) -> tuple[jax.Array, jax.Array]:
        nonlocal traces
        traces += 1
        return graphs.uniform_negatives(key, senders, 8, 5)

    senders = jnp.arange(400) % 3
    draws = [draw(jax.random.key(seed), senders) for seed in range(4)]
    assert traces == 1
    assert len({tuple(receivers.tolist()) for _, receivers in draws}) == 4
    for found, receivers in draws:
        assert found.tolist() == np.repeat(senders, 5).tolist()
        counts = np.bincount(receivers, minlength=8)
        assert len(counts) == 8
        assert (abs(counts - 250) < 5 * 250**0.5).all()
    with pytest.raises(ValueError, match="num_nodes=0 leaves no nodes to sample"):
        graphs.uniform_negatives(jax.random.key(0), [0], 0)


def test_negatives_in_a_batch_are_receivers_of_k_other_edges() -> None:
    senders, receivers = jnp.arange(7), 100 + jnp.arange(7)
    draw = jax.jit(lambda key: graphs.in_batch_negatives(key, senders, receivers, 6))
    found, others = draw(jax.random.key(0))
    assert found.tolist() == np.repeat(np.arange(7), 6).tolist()
    for edge, row in enumerate(others.reshape(7, 6).tolist()):
        assert sorted(row) == [100 + other for other in range(7) if other != edge]
    few = {tuple(graphs.in_batch_negatives(jax.random.key(seed), senders, receivers)[1].tolist()) for seed in range(20)}
    assert len(few) > 3
    with pytest.raises(ValueError, match="k=7 must be less than the 7 edges of the batch"):
        graphs.in_batch_negatives(jax.random.key(0), senders, receivers, 7)


@pytest.mark.parametrize("count", [10, 300])
def test_global_negatives_are_no_edges_and_uniform(count: int) -> None:
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 30, (2, 400))
    edges = {(u, v) for u, v in zip(senders.tolist(), receivers.tolist(), strict=True)}
    free = [(u, v) for u in range(30) for v in range(30) if (u, v) not in edges and u != v]
    seen, found = np.zeros((30, 30), int), (np.empty(0), np.empty(0))
    for _ in range(200):
        found = graphs.global_negatives(random, senders, receivers, 30, count)
        pairs = set(zip(*(ids.tolist() for ids in found), strict=True))
        assert len(pairs) == count
        assert not pairs & edges
        np.add.at(seen, found, 1)
    assert {(u, v) for u, v in np.argwhere(seen).tolist()} <= set(free)
    expected = 200 * count / len(free)
    assert abs(seen[tuple(np.array(free).T)] - expected).max() < 6 * expected**0.5
    assert found[0].dtype == np.int32


def test_each_pair_comes_sooner_or_later() -> None:
    random, seen = np.random.default_rng(0), set()
    for _ in range(60):
        found = graphs.global_negatives(random, [0], [1], 5, 4)
        seen |= set(zip(*(ids.tolist() for ids in found), strict=True))
    assert len(seen) == 5 * 4 - 1


def test_all_pairs_that_are_no_edges() -> None:
    found = graphs.global_negatives(np.random.default_rng(0), [0, 0, 1], [1, 1, 1], 3, 7, allow_self_loops=True)
    assert sorted(zip(*(ids.tolist() for ids in found), strict=True)) == [
        (0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="count=6 must be at most the 5 pairs without an edge"):
        graphs.global_negatives(np.random.default_rng(0), [0], [1], 3, 6)
    assert len(graphs.global_negatives(np.random.default_rng(0), [], [], 0, 0)[0]) == 0


def test_reverse_edges_are_matched_one_to_one() -> None:
    random = np.random.default_rng(1)
    senders, receivers = random.integers(0, 6, (2, 80))
    reverse = graphs.reverse_edge_ids(senders, receivers, 6)
    there = reverse >= 0
    np.testing.assert_array_equal(senders[reverse[there]], receivers[there])
    np.testing.assert_array_equal(receivers[reverse[there]], senders[there])
    np.testing.assert_array_equal(reverse[reverse[there]], np.flatnonzero(there))
    counts = np.zeros((6, 6), int)
    np.add.at(counts, (senders, receivers), 1)
    assert there.sum() == np.minimum(counts, counts.T).sum()
    loops = senders == receivers
    np.testing.assert_array_equal(reverse[loops], np.flatnonzero(loops))
