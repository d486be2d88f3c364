"""Edges on the host, and what is drawn of them: uniformly, without replacement or with it."""

import itertools
from typing import Any

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from jmp_train import graphs
from jmp_train.graphs.sampling.host_edge_index import renumbered, sample_in_edges

pytestmark = [pytest.mark.quick, pytest.mark.newest]

RARE = 1e-4  # a right sampler fails less often than this, and with a fixed seed always or never


def star(degree: int) -> graphs.HostEdges:
    """Node 0 is entered by edges from all others, and node 1 by one from node 0."""
    senders = [*range(1, degree + 1), 0]
    return graphs.host_edges(senders, [0] * degree + [1], degree + 1)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (6, 3), (7, 1), (4, 3)])
def test_all_subsets_are_equally_likely(degree: int, fanout: int) -> None:
    nodes = np.zeros(30_000, np.int64)
    owners, drawn = sample_in_edges(star(degree), nodes, fanout, np.random.default_rng(0))
    np.testing.assert_array_equal(owners, np.repeat(np.arange(len(nodes)), fanout))
    rows = np.sort(drawn.reshape(-1, fanout))
    subsets = list(itertools.combinations(range(degree), fanout))
    codes = rows @ degree ** np.arange(fanout)
    counts = [int((codes == np.array(s) @ degree ** np.arange(fanout)).sum()) for s in subsets]
    assert sum(counts) == len(nodes)
    assert scipy.stats.chisquare(counts).pvalue > RARE


def test_nodes_are_drawn_for_independently() -> None:
    nodes = np.zeros(40_000, np.int64)
    _, drawn = sample_in_edges(star(4), nodes, 1, np.random.default_rng(1))
    table = np.zeros((4, 4))
    np.add.at(table, (drawn[::2], drawn[1::2]), 1)
    result: Any = scipy.stats.chi2_contingency(table)
    assert result.pvalue > RARE


def test_with_replacement_each_draw_is_uniform() -> None:
    nodes = np.zeros(20_000, np.int64)
    _, drawn = sample_in_edges(star(3), nodes, 2, np.random.default_rng(2), replace=True)
    counts = np.bincount(drawn.reshape(-1, 2) @ [3, 1], minlength=9)
    assert scipy.stats.chisquare(counts).pvalue > RARE


def test_large_degrees_and_fanouts_are_uniform_too() -> None:
    _, drawn = sample_in_edges(star(1000), np.zeros(600, int), 90, np.random.default_rng(3))
    counts = np.bincount(drawn, minlength=1000)
    # Without replacement, the counts' variance is that of 600 draws with chance 0.09.
    assert scipy.stats.chi2.sf(((counts - 54) ** 2).sum() / (600 * 0.09 * 0.91), 999) > RARE
    rows = np.sort(drawn.reshape(600, 90))
    assert (np.diff(rows) > 0).all()


@st.composite
def drawn_graphs(draw: Any) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Draws how many nodes send, how many receive, and edges between them."""
    num_sources, num_targets = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    pairs = st.tuples(st.integers(0, num_sources - 1), st.integers(0, num_targets - 1))
    edges = np.array(draw(st.lists(pairs, max_size=40)), np.int64).reshape(-1, 2)
    return num_sources, num_targets, edges[:, 0], edges[:, 1]


@given(drawn_graphs(), st.integers(1, 5), st.booleans(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_edges_enter_the_nodes_they_are_drawn_for(graph: Any, fanout: int, replace: bool, seed: int) -> None:
    num_sources, num_targets, senders, receivers = graph
    edges = graphs.host_edges(senders, receivers, num_sources, num_targets, keep_edge_ids=True)
    assert edges.edge_ids is not None
    np.testing.assert_array_equal(edges.sources, senders[edges.edge_ids])
    np.testing.assert_array_equal(edges.in_degrees, np.bincount(receivers, minlength=num_targets))
    nodes = np.random.default_rng(seed).integers(0, num_targets, 6)
    random = np.random.default_rng(seed)
    for number in (fanout, -1):
        owners, drawn = sample_in_edges(edges, nodes, number, random, replace=replace)
        np.testing.assert_array_equal(receivers[edges.edge_ids[drawn]], nodes[owners])
        degrees = edges.in_degrees[nodes]
        wanted = degrees if number == -1 else np.minimum(degrees, fanout)
        if replace and number != -1:
            wanted = np.where(degrees > 0, fanout, 0)
        elif len(owners):
            assert len(set(zip(owners, drawn, strict=True))) == len(owners)
        np.testing.assert_array_equal(np.bincount(owners, minlength=6), wanted)


def test_nodes_are_renumbered_the_first_ones_first() -> None:
    first, others = np.array([7, 3]), [np.array([3, 9, 9, 1]), np.array([1, 7])]
    nodes, places = renumbered(first, others, 10)
    np.testing.assert_array_equal(nodes[:2], first)
    assert sorted(nodes.tolist()) == [1, 3, 7, 9]
    for ids, where in zip(others, places, strict=True):
        np.testing.assert_array_equal(nodes[where], ids)


def test_sorted_edges_are_not_copied() -> None:
    senders, receivers = np.array([2, 0, 1], np.int32), np.array([0, 0, 1], np.int32)
    assert graphs.host_edges(senders, receivers, 3).sources is senders


def test_wrong_edges_and_fanouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"senders\[1\] = 3 is out of range for 3 nodes"):
        graphs.host_edges([0, 3], [0, 0], 3)
    with pytest.raises(ValueError, match=r"receivers\[0\] = 2 is out of range for 2 nodes"):
        graphs.host_edges([0], [2], 3, 2)
    with pytest.raises(TypeError, match=r"n_node=2\.0 must be an integer"):
        graphs.host_edges([0], [0], 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fanout=0 must be positive, or -1"):
        sample_in_edges(star(2), np.zeros(1, int), 0, np.random.default_rng(0))


def test_rows_are_taken_and_padding_is_zero() -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    taken = graphs.take_rows(array, np.array([2, -1, 0]), np.float16)
    assert taken.dtype == np.float16
    assert taken.tolist() == [[4, 5], [0, 0], [0, 1]]
    assert graphs.take_rows(np.empty((0, 2)), np.array([-1])).tolist() == [[0, 0]]
    with pytest.raises(ValueError, match=r"ids\[\d\] = 3 is out of range for 3 rows"):
        graphs.take_rows(array, np.array([0, 3]))
