from typing import Any

import jax.numpy as jnp
import jraph
import numpy as np
import pytest

from jmp_train import graphs

pytestmark = pytest.mark.quick


def weighted() -> graphs.Graph:
    return graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 1], 4, edges={"w": jnp.array([1, 2, 3, 4], jnp.float16)})


def test_added_edges_come_last_with_their_features() -> None:
    graph = graphs.add_edges(weighted(), [3, 3], [3, 0], {"w": [0.1, 70.0], "new": np.ones((2, 2), np.int8)})
    assert graph.senders.tolist() == [0, 1, 2, 0, 3, 3]
    assert graph.receivers.tolist() == [1, 2, 0, 1, 3, 0]
    assert graph.edges["w"].dtype == jnp.float16
    np.testing.assert_array_equal(graph.edges["w"], np.array([1, 2, 3, 4, 0.1, 70], np.float16))
    assert graph.edges["new"].tolist() == [[0, 0]] * 4 + [[1, 1]] * 2
    assert (graph.in_degrees.tolist(), graph.n_edge.tolist()) == ([2, 2, 1, 1], [6])


def test_what_added_edges_do_not_have_is_0() -> None:
    assert graphs.add_edges(weighted(), [3], [3]).edges["w"].tolist() == [1, 2, 3, 4, 0]


def test_edges_added_to_a_batch_stand_in_their_graph() -> None:
    batch = graphs.batch([graphs.from_edges([0], [1], 2), graphs.from_edges([0], [0], 1)])
    more = graphs.add_edges(batch, [2, 1], [2, 0])
    assert (more.senders.tolist(), more.n_edge.tolist(), more.n_node.tolist()) == ([0, 1, 2, 2], [2, 2], [2, 1])
    with pytest.raises(ValueError, match="an edge connects two graphs of the batch, 0 and 1"):
        graphs.add_edges(batch, [0], [2])


def test_features_of_added_edges_that_do_not_fit() -> None:
    cases: list[tuple[Any, str]] = [
        ([1.0], r"edges\['w'\] must have 2 rows, one for each of the new edges, got shape \(1,\)"),
        ([[1.0], [2.0]], r"edges\['w'\] must have rows of shape \(\), got \(1,\)"),
        ([1.0, 1e6], r"edges\['w'\] is 1000000.0, which does not fit into float16"),
    ]
    for rows, message in cases:
        with pytest.raises(ValueError, match=message):
            graphs.add_edges(weighted(), [0, 1], [1, 0], {"w": rows})
    counts = graphs.from_edges([0], [0], 1, edges={"n": np.ones(1, np.int8)})
    with pytest.raises(ValueError, match=r"edges\['n'\] is 300, which does not fit into int8"):
        graphs.add_edges(counts, [0], [0], {"n": [300]})
    with pytest.raises(ValueError, match=r"receivers\[0\] = 4 is out of range for 4 nodes"):
        graphs.add_edges(weighted(), [0], [4])
    infinite = graphs.add_edges(weighted(), [0], [1], {"w": [np.inf]})
    assert np.isinf(infinite.edges["w"][4])


@pytest.mark.parametrize("edges", [[2, 0, 0], np.array([True, False, True, False])])
def test_removed_edges(edges: list[int]) -> None:
    graph = graphs.remove_edges(weighted(), edges, store_ids=True)
    assert (graph.senders.tolist(), graph.receivers.tolist(), graph.num_nodes) == ([1, 0], [2, 1], 4)
    assert graph.edges["w"].tolist() == [2, 4]
    assert (graph.edges["_ID"].tolist(), graph.edges["_ID"].dtype) == ([1, 3], jnp.int32)
    assert "_ID" not in graphs.remove_edges(weighted(), edges).edges


def test_edges_that_cannot_be_removed() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        ([4], ValueError, r"edges\[0\] = 4 is out of range for 4"),
        ([-1], ValueError, r"edges\[0\] = -1 is out of range for 4"),
        ([[0]], ValueError, r"edges must have one axis, got shape \(1, 1\)"),
        ([0.0], TypeError, "edges must be integers, got float64"),
        ([True], ValueError, r"edges must be a mask of shape \(4,\), got shape \(1,\)"),
    ]
    for edges, kind, message in cases:
        with pytest.raises(kind, match=message):
            graphs.remove_edges(weighted(), edges)
    with pytest.raises(ValueError, match=r'graph was made with formats=\("csr",\), which does'):
        graphs.remove_edges(graphs.from_edges([0], [0], 1, formats=("csr",)), [0])


def test_of_jraphs_graphs() -> None:
    theirs = graphs.to_jraph(weighted())
    more = graphs.add_edges(theirs, [3], [3])
    assert isinstance(more, jraph.GraphsTuple)
    fewer = graphs.from_jraph(graphs.remove_edges(more, [0, 1, 2]))
    assert fewer.edges["w"].tolist() == [4, 0]


def test_the_formats_stay() -> None:
    graph = graphs.add_edges(graphs.from_edges([0], [1], 2, formats=("csr",)), [1], [0])
    assert graph.connections.ends is None
    assert graph.in_degrees.tolist() == [1, 1]
    assert graphs.add_edges(graph, [1], [0], formats=("coo",)).senders.tolist() == [1, 0, 1]
