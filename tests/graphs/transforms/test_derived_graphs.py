from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from odd_graphs import ODD, Ends, edges

from jmp_train import graphs

pytestmark = pytest.mark.quick


def make(ends: Ends) -> graphs.Graph:
    features = {"w": np.arange(len(ends[0])).astype(np.float16)}
    nodes = {"h": np.arange(1, 2 * ends[2] + 1).reshape(-1, 2).astype(np.float32)}
    return graphs.from_edges(*ends, nodes, features)


def check(ends: Ends) -> None:
    graph, pairs = make(ends), list(zip(ends[0].tolist(), ends[1].tolist(), strict=True))
    for backtracking in (True, False):
        line = graphs.line_graph(graph, backtracking)
        wanted = [
            (i, j)
            for i, (u, v) in enumerate(pairs)
            for j, (w, x) in enumerate(pairs)
            if v == w and (backtracking or u != x)
        ]
        assert list(zip(line.senders.tolist(), line.receivers.tolist(), strict=True)) == wanted
        assert line.num_nodes == len(pairs)
        assert line.nodes["w"].tolist() == [*range(len(pairs))]
    found = graphs.add_virtual_node(graph)
    every, count = list(range(ends[2])), ends[2]
    assert found.senders.tolist() == [*ends[0], *every, *[count] * count]
    assert found.receivers.tolist() == [*ends[1], *[count] * count, *every]
    np.testing.assert_array_equal(found.nodes["h"], np.pad(graph.nodes["h"], ((0, 1), (0, 0))))
    np.testing.assert_array_equal(found.edges["w"], np.pad(graph.edges["w"], (0, 2 * count)))


@pytest.mark.parametrize("ends", ODD.values(), ids=ODD)
def test_derived_graphs_of_odd_graphs(ends: Ends) -> None:
    check(ends)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(edges())
def test_derived_graphs_equal_loops(ends: Ends) -> None:
    check(ends)


@pytest.mark.parametrize("derive", [graphs.line_graph, graphs.add_virtual_node])
def test_graphs_of_a_batch_are_derived_apart(derive: Any) -> None:
    parts = [make(ODD[name]) for name in ("multi-edges", "none", "self-loops", "one node", "isolated")]
    found = graphs.unbatch(derive(graphs.batch(parts)))
    for part, mine in zip(parts, found, strict=True):
        wanted = derive(part)
        assert mine.senders.tolist() == wanted.senders.tolist()
        assert mine.receivers.tolist() == wanted.receivers.tolist()
        for name, features in wanted.nodes.items():
            np.testing.assert_array_equal(mine.nodes[name], features)
    again = derive(graphs.to_jraph(graphs.batch(parts)))
    assert again.senders.tolist() == derive(graphs.batch(parts)).senders.tolist()
    with pytest.raises(ValueError, match="graph is padded: unpad it first"):
        derive(graphs.pad(parts[0], 9, 9))


def test_line_graphs_need_single_edges() -> None:
    with pytest.raises(ValueError, match=r"^graph was made with .* does not store single edges"):
        graphs.line_graph(graphs.from_edges([0], [1], 2, formats=("csr",)))
