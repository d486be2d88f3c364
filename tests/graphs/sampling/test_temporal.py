import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_graphs import ODD, Ends, edges
from refusals import assert_refused

from jmp_train import graphs

pytestmark = pytest.mark.quick

RARE = 1e-5


def check(ends: Ends, times: np.ndarray, seeds: np.ndarray, before: np.ndarray, k: int) -> None:
    """Asserts that neighbors are those of loops over the edges."""
    index = graphs.host_edges(*ends, times=times, keep_edge_ids=True)
    last = graphs.temporal_neighbors(index, seeds, before, k)
    some = graphs.temporal_neighbors(index, seeds, before, k, np.random.default_rng(0), strategy="uniform")
    assert last.nodes.shape == some.edges.shape == (len(seeds), k)
    for place, (node, time) in enumerate(zip(seeds.tolist(), before.tolist(), strict=True)):
        past = [edge for edge in range(len(times)) if ends[1][edge] == node and times[edge] < time]
        past.sort(key=lambda edge: (times[edge], edge), reverse=True)
        wanted = past[:k] + [-1] * (k - len(past))
        assert last.edges[place].tolist() == wanted
        drawn = [edge for edge in some.edges[place].tolist() if edge >= 0]
        assert len(set(drawn)) == len(drawn) == min(k, len(past))
        assert set(drawn) <= set(past)
        for found in (last, some):
            ids = found.edges[place]
            np.testing.assert_array_equal(found.nodes[place], np.where(ids >= 0, np.append(ends[0], -1)[ids], -1))
            np.testing.assert_array_equal(found.times[place], np.where(ids >= 0, np.append(times, 0)[ids], 0))


@pytest.mark.parametrize("ends", ODD.values(), ids=ODD)
def test_neighbors_before_a_time_on_odd_graphs(ends: Ends) -> None:
    random = np.random.default_rng(0)
    seeds = np.append(np.repeat(np.arange(ends[2]), 2), -1)
    check(ends, random.integers(0, 5, len(ends[0])), seeds, random.integers(0, 7, len(seeds)), 3)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(edges(), st.integers(0, 4), st.integers(0, 99))
def test_neighbors_before_a_time_are_those_of_loops(ends: Ends, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    seeds = random.integers(-1, ends[2], 8)
    check(ends, random.integers(0, 6, len(ends[0])) / 4, seeds, random.integers(0, 7, 8) / 4, k)


@pytest.mark.parametrize("seed", range(3))
def test_uniform_neighbors_are_uniform_over_the_past(seed: int) -> None:
    index = graphs.host_edges(np.arange(10), np.zeros(10, int), 10, times=np.arange(10), keep_edge_ids=True)
    random, nodes = np.random.default_rng(seed), np.zeros(12_000, int)
    found = graphs.temporal_neighbors(index, nodes, np.full(12_000, 6), 1, random, strategy="uniform")
    counts = np.bincount(found.edges[:, 0], minlength=10)
    assert not counts[6:].any()
    assert scipy.stats.chisquare(counts[:6]).pvalue > RARE
    pairs = graphs.temporal_neighbors(index, nodes, np.full(12_000, 4), 2, random, strategy="uniform").edges
    counts = np.bincount(np.sort(pairs, axis=1) @ [4, 1], minlength=16)
    assert scipy.stats.chisquare(counts[counts > 0]).pvalue > RARE
    assert (counts > 0).sum() == 6


def test_what_temporal_neighbors_refuse() -> None:
    index, without = graphs.host_edges([0], [1], 2, times=[0.5]), graphs.host_edges([0], [1], 2)
    assert graphs.temporal_neighbors(index, [1], [1], 1).edges.tolist() == [[-1]]  # ids are not stored
    refusals = {
        "edges have no times: pass times= to": lambda: graphs.temporal_neighbors(without, [0], [1], 1),
        "nodes[0] = 2 is out of range for 2 nodes": lambda: graphs.temporal_neighbors(index, [2], [1], 1),
        "TypeError: nodes must be integers, got": lambda: graphs.temporal_neighbors(index, np.array([0.5]), [1], 1),
        "times must have shape (1,), got": [
            lambda: graphs.temporal_neighbors(index, [0], [1, 2], 1),
            lambda: graphs.host_edges([0], [1], 2, times=[1, 2]),
        ],
        "times[0] is NaN": lambda: graphs.temporal_neighbors(index, [0], [np.nan], 1),
        "k=-1 must be at least 0": lambda: graphs.temporal_neighbors(index, [0], [1], -1),
        "strategy='x' must be one of": lambda: graphs.temporal_neighbors(index, [0], [1], 1, strategy="x"),
        "needs random": lambda: graphs.temporal_neighbors(index, [0], [1], 1, strategy="uniform"),
        "TypeError: times must be real numbers, got <U1": lambda: graphs.host_edges([0], [1], 2, times=np.array(["a"])),
    }
    assert_refused(refusals)
