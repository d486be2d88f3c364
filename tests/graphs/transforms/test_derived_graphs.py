from typing import Any

import jax
import jax.numpy as jnp
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


FOLLOWS, PLAYS = ("user", "follows", "user"), ("user", "plays", "game")


def hetero() -> graphs.HeteroGraph:
    edges: Any = {PLAYS: ([0, 2, 2], [1, 0, 1]), FOLLOWS: ([0, 1], [1, 2])}
    nodes = {kind: {"h": np.full((count, 2), place, np.float16)} for place, (kind, count) in enumerate(COUNTS.items())}
    of_edges = {PLAYS: {"w": np.arange(3.0, dtype=np.float32)}, FOLLOWS: {"w": np.arange(7.0, 9.0, dtype=np.float32)}}
    return graphs.hetero_from_edges(edges, COUNTS, nodes, of_edges)


COUNTS = {"user": 3, "game": 2}


def test_degrees_and_ends_by_type() -> None:
    graph = hetero()
    assert (graph.node_types, graph.edge_types) == (("user", "game"), (FOLLOWS, PLAYS))
    assert (graph.senders("plays").tolist(), graph.receivers(PLAYS).tolist()) == ([0, 2, 2], [1, 0, 1])
    assert (graph.in_degrees("plays").tolist(), graph.out_degrees("plays").tolist()) == ([1, 2], [1, 0, 2])
    assert (graph.in_degrees("follows").tolist(), graph.num_edges("follows")) == ([0, 1, 1], 2)
    with pytest.raises(ValueError, match="etype=None is ambiguous"):
        graph.in_degrees()
    assert jax.jit(lambda graph: graph.in_degrees("plays"))(graph).tolist() == [1, 2]
    assert jax.jit(lambda graph: graph)(graph).edge_types == graph.edge_types


def test_several_types_become_one() -> None:
    """As dgl.to_homogeneous does: nodes and edges type after type, each with its type and its id within it."""
    graph = graphs.to_homogeneous(hetero(), ["h"], ["w"])
    assert (graph.senders.tolist(), graph.receivers.tolist()) == ([0, 1, 0, 2, 2], [1, 2, 4, 3, 4])
    assert (graph.nodes["_TYPE"].tolist(), graph.nodes["_ID"].tolist()) == ([0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    assert (graph.edges["_TYPE"].tolist(), graph.edges["_ID"].tolist()) == ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    assert (graph.nodes["h"][:, 0].tolist(), graph.nodes["h"].dtype) == ([0, 0, 0, 1, 1], jnp.float16)
    assert graph.edges["w"].tolist() == [7, 8, 0, 1, 2]


def test_one_type_becomes_several_again() -> None:
    kinds = hetero().edge_types
    for names in (kinds, [name for _, name, _ in kinds]):
        graph = graphs.to_heterogeneous(graphs.to_homogeneous(hetero(), ["h"], ["w"]), ["user", "game"], names)
        for kind in kinds:
            np.testing.assert_array_equal(graph.senders(kind), hetero().senders(kind))
            np.testing.assert_array_equal(graph.receivers(kind), hetero().receivers(kind))
            np.testing.assert_array_equal(graph.edges[kind]["w"], hetero().edges[kind]["w"])
        assert graph.edges[PLAYS]["_ID"].tolist() == [2, 3, 4]
        assert graph.nodes["game"]["_ID"].tolist() == [3, 4]
        np.testing.assert_array_equal(graph.nodes["game"]["h"], hetero().nodes["game"]["h"])
        assert "_TYPE" not in graph.nodes["game"]


def test_a_name_stands_for_all_triples_that_occur() -> None:
    kinds = np.array([0, 1, 1])
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3, {"kind": kinds}, {"_TYPE": np.zeros(3, np.int32)})
    several = graphs.to_heterogeneous(graph, ["a", "b"], ["to"], node_field="kind")
    assert several.edge_types == (("a", "to", "b"), ("b", "to", "a"), ("b", "to", "b"))
    assert [several.edges[kind]["_ID"].tolist() for kind in several.edge_types] == [[0], [2], [1]]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes: type 0 has no feature 'x'"):
        graphs.to_homogeneous(hetero(), ["x"])
    mixed = hetero().with_nodes("game", h=np.ones((2, 3), np.float16))
    with pytest.raises(ValueError, match=r"nodes\['h'\] has rows \('float16', \(3,\)\) in type 1, but"):
        graphs.to_homogeneous(mixed, ["h"])
    with pytest.raises(TypeError, match="graph must be a HeteroGraph, got Graph"):
        graphs.to_homogeneous(graphs.rand_graph(2, 2))  # pyright: ignore[reportArgumentType]
    graph = graphs.from_edges([0], [1], 2, {"_TYPE": np.array([0, 1])}, {"_TYPE": np.array([0])})
    cases: list[tuple[type[Exception], graphs.Graph, list[Any], str]] = [
        (ValueError, graph, [("a", "to", "a")], "edge 0 is of type .*, but connects 'a' with 'b'"),
        (ValueError, graph.with_nodes(_TYPE=jnp.array([0, 2])), ["to"], r"nodes\['_TYPE'\]\[1\] = 2 is out of range"),
        (TypeError, graph.with_edges(_TYPE=jnp.ones(1)), ["to"], r"edges\['_TYPE'\] must be integers, got float32"),
        (ValueError, graphs.rand_graph(2, 1), ["to"], "nodes must have a feature '_TYPE' with their types"),
    ]
    for kind, one, names, message in cases:
        with pytest.raises(kind, match=message):
            graphs.to_heterogeneous(one, ["a", "b"], names)
