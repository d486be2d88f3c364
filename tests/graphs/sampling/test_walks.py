import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_graphs import ODD, Ends, edges

from jmp_train import graphs

pytestmark = pytest.mark.quick

RARE = 1e-5


def counts(ends: Ends) -> np.ndarray:
    """Returns the number of edges from each node to each."""
    found = np.zeros((ends[2], ends[2]))
    np.add.at(found, ends[:2], 1)
    return found


def check_walks(ends: Ends, length: int) -> None:
    """Asserts that walks follow edges, and end only where there is none."""
    number = counts(ends)
    index = graphs.host_edges(*ends)
    nodes = np.concatenate([np.repeat(np.arange(ends[2]), 3), [-1]])
    random = np.random.default_rng(0)
    of_node2vec = graphs.node2vec_walk(index, nodes, length, random, p=0.5, q=4.0)
    for walks in (graphs.random_walk(index, nodes, random, length=length), of_node2vec):
        assert walks.shape == (len(nodes), length + 1)
        np.testing.assert_array_equal(walks[:, 0], nodes)
        for walk in walks.tolist():
            for now, after in itertools.pairwise(walk):
                if after >= 0:
                    assert number[now, after] > 0
                else:
                    assert now < 0 or not number[now].any()


@pytest.mark.parametrize("ends", ODD.values(), ids=ODD)
def test_walks_on_odd_graphs(ends: Ends) -> None:
    check_walks(ends, 3)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(edges(), st.integers(0, 5))
def test_walks_follow_edges(ends: Ends, length: int) -> None:
    check_walks(ends, length)


def small_graph() -> Ends:
    """Returns a directed graph with a self-loop and parallel edges, in which a walk goes on forever."""
    senders, receivers = [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4], [0, 1, 1, 2, 2, 0, 3, 0, 4, 0, 2, 0]
    return np.array(senders), np.array(receivers), 5


def check_distribution(found: np.ndarray, probabilities: np.ndarray) -> None:
    """Asserts that ids are drawn with some probabilities."""
    seen = np.bincount(found, minlength=len(probabilities))
    assert not seen[probabilities == 0].any()
    is_possible = probabilities > 0
    if is_possible.sum() > 1:
        expected = probabilities[is_possible] * len(found)
        assert scipy.stats.chisquare(seen[is_possible], expected).pvalue > RARE


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_uniform_over_edges(seed: int) -> None:
    ends = small_graph()
    steps = counts(ends) / counts(ends).sum(1, keepdims=True)
    walks = graphs.random_walk(graphs.host_edges(*ends), np.zeros(20_000, int), np.random.default_rng(seed), length=3)
    for place in range(1, 4):  # all steps together, by powers of the transition matrix
        check_distribution(walks[:, place], np.linalg.matrix_power(steps, place)[0])
    for node in range(3):
        check_distribution(walks[walks[:, 1] == node, 2], steps[node])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("p", "q"), [(0.25, 4.0), (4.0, 0.25), (0.5, 0.5), (3.0, 3.0)])
def test_node2vec_weighs_edges_by_the_node_before(p: float, q: float, seed: int) -> None:
    ends = small_graph()
    number = counts(ends)
    walks = graphs.node2vec_walk(
        graphs.host_edges(*ends), np.zeros(30_000, int), 3, np.random.default_rng(seed), p=p, q=q
    )
    check_distribution(walks[:, 1], number[0] / number[0].sum())
    for before in range(5):
        for now in range(5):
            found = walks[(walks[:, 1] == before) & (walks[:, 2] == now), 3]
            weights = number[now] * np.where(number[before] > 0, 1, 1 / q)
            weights[before] = number[now, before] / p
            if len(found) > 200:
                check_distribution(found, weights / weights.sum())


def test_walks_with_restarts_end_after_a_geometric_number_of_steps() -> None:
    index = graphs.host_edges(*small_graph())
    walks = graphs.random_walk(index, np.zeros(20_000, int), np.random.default_rng(0), length=4, restart_prob=0.3)
    steps = (walks >= 0).sum(1) - 1
    check_distribution(steps, np.append(0.3 * 0.7 ** np.arange(4), 0.7**4))
    assert ((np.diff((walks >= 0).astype(int), axis=1)) <= 0).all()
    ended = graphs.random_walk(index, [2], np.random.default_rng(0), length=2, restart_prob=1.0)
    assert ended.tolist() == [[2, -1, -1]]


def by_type() -> dict[tuple[str, str, str], graphs.HostEdges]:
    random = np.random.default_rng(1)
    users, items = random.integers(0, 6, 30), random.integers(0, 4, 30)
    return {
        ("user", "buys", "item"): graphs.host_edges(users, items, 6, 4),
        ("item", "bought by", "user"): graphs.host_edges(items, users, 4, 6),
    }


def test_metapaths_go_from_type_to_type() -> None:
    typed = by_type()
    forward, backward = (np.zeros((each.num_sources, each.num_targets)) for each in typed.values())
    for matrix, each in zip((forward, backward), typed.values(), strict=True):
        np.add.at(matrix, (each.sources, np.repeat(np.arange(each.num_targets), each.in_degrees)), 1)
    walks = graphs.random_walk(
        typed, np.zeros(20_000, int), np.random.default_rng(0), metapath=["buys", "bought by", ("user", "buys", "item")]
    )
    assert walks.shape == (20_000, 4)
    there, back = forward / forward.sum(1, keepdims=True), backward / backward.sum(1, keepdims=True)
    check_distribution(walks[:, 1], there[0])
    check_distribution(walks[:, 2], (there @ back)[0])
    check_distribution(walks[:, 3], (there @ back @ there)[0])


def check_pairs(walks: np.ndarray, window: int) -> None:
    wanted = []
    for walk in walks.tolist():
        for i, center in enumerate(walk):
            for j, context in enumerate(walk):
                if i != j and abs(i - j) <= window:
                    wanted.append((center, context) if min(center, context) >= 0 else (-1, -1))
    found = graphs.skip_gram_pairs(walks, window)
    assert list(zip(*(ids.tolist() for ids in found), strict=True)) == wanted


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.integers(1, 6), st.integers(0, 7), st.integers(0, 99))
def test_pairs_are_those_of_loops(walks: int, nodes: int, window: int, seed: int) -> None:
    check_pairs(np.random.default_rng(seed).integers(-1, 9, (walks, nodes)), window)


def test_batches_of_pairs_have_one_shape() -> None:
    sampler = graphs.skip_gram_sampler(graphs.host_edges(*ODD["hub"]), batch_size=8, length=5, window=2, p=2.0)
    full = sampler.sample(np.arange(8), np.random.default_rng(0))
    part, again = sampler.sample_several([[3], np.arange(8)], np.random.default_rng(0))
    assert full.centers.shape == part.centers.shape == again.contexts.shape == (8 * 18,)
    assert (part.centers >= 0).sum() == 18
    np.testing.assert_array_equal(part.centers >= 0, part.contexts >= 0)
    with pytest.raises(ValueError, match="seeds must be at most 8 nodes, the batch size, got 9"):
        sampler.sample(np.arange(9), np.random.default_rng(0))


def test_what_walks_refuse() -> None:
    index, random = graphs.host_edges(*ODD["hub"]), np.random.default_rng(0)
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (graphs.random_walk, (index, [40], random), {"length": 1}, ValueError, r"nodes\[0\] = 40 is out of range for"),
        (graphs.random_walk, (index, [0.5], random), {"length": 1}, TypeError, "nodes must be integers, got float64"),
        (graphs.random_walk, (index, [0], random), {}, ValueError, "either length or metapath is needed"),
        (graphs.random_walk, (index, [0], random), {"length": -1}, ValueError, "length=-1 must be at least 0"),
        (graphs.random_walk, (by_type(), [0], random), {"length": 1}, TypeError, "a metapath takes several"),
        (graphs.random_walk, (index, [0], random), {"metapath": ["x"]}, TypeError, "edges must be a mapping"),
        (graphs.random_walk, (by_type(), [0], random), {"metapath": ["x"]}, ValueError, "'x' is not an edge type"),
        (graphs.random_walk, (by_type(), [0], random), {"metapath": ["buys"] * 2}, ValueError, "does not leave 'item'"),
        (graphs.random_walk, (index, [0], random), {"length": 1, "restart_prob": 2}, ValueError, "restart_prob=2 must"),
        (graphs.random_walk, (next(iter(by_type().values())), [0], random), {"length": 1}, ValueError, "6 to 4 nodes"),
        (graphs.node2vec_walk, (index, [0], 1, random), {"p": 0}, ValueError, "p=0 must be positive and finite"),
        (graphs.node2vec_walk, (index, [0], 1, random), {"q": np.inf}, ValueError, "q=inf must be positive and finite"),
        (graphs.skip_gram_pairs, (np.zeros(3), 1), {}, ValueError, r"walks must have shape \[walks, nodes\]"),
        (graphs.skip_gram_sampler, (index,), {"batch_size": 1, "length": 0, "window": 1}, ValueError, "length=0 must"),
    ]  # fmt: skip
    for function, arguments, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            function(*arguments, **options)
