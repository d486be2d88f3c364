from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import networkx as nx
import numpy as np
import pytest

from jmp_train import graphs

pytestmark = pytest.mark.quick

NODES, EDGES = 30, 120


def drawn(seed: int = 0) -> graphs.Graph:
    random = np.random.default_rng(seed)
    ends = random.integers(0, NODES, (2, EDGES))
    features = {"h": random.normal(size=(NODES, 2)).astype(np.float16)}
    return graphs.from_edges(
        ends[0], ends[1], NODES, features, {"w": np.arange(EDGES, dtype=np.float32)}, formats=("coo",)
    )


def of(graph: graphs.Graph) -> set[tuple[int, int, int]]:
    """Returns the edges as the whole graph calls them: sender, receiver, edge."""
    names = np.asarray(graph.nodes["_ID"])
    ends = names[np.asarray(graph.senders)], names[np.asarray(graph.receivers)]
    return set(zip(*(ids.tolist() for ids in ends), graph.edges["_ID"].tolist(), strict=True))


def check_features(part: graphs.Graph, whole: graphs.Graph) -> None:
    nodes, edges = np.asarray(part.nodes["_ID"]), np.asarray(part.edges["_ID"])
    np.testing.assert_array_equal(part.nodes["h"], np.asarray(whole.nodes["h"])[nodes])
    np.testing.assert_array_equal(part.edges["w"], np.asarray(whole.edges["w"])[edges])
    assert part.nodes["h"].dtype == jnp.float16
    assert part.nodes["_ID"].dtype == part.edges["_ID"].dtype == jnp.int32
    assert (part.n_node.tolist(), part.n_edge.tolist()) == ([part.num_nodes], [part.num_edges])


def networkx_of(graph: graphs.Graph) -> Any:
    peer: Any = nx.MultiDiGraph()
    peer.add_nodes_from(range(NODES))
    ends = zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True)
    peer.add_edges_from((u, v, edge) for edge, (u, v) in enumerate(ends))
    return peer


def test_the_graph_of_some_nodes_is_networkx() -> None:
    graph, nodes = drawn(), np.random.default_rng(1).permutation(NODES)[:12]
    part = graphs.node_subgraph(graph, nodes)
    assert part.nodes["_ID"].tolist() == nodes.tolist()  # as the caller orders them
    assert of(part) == set(networkx_of(graph).subgraph(nodes.tolist()).edges(keys=True))
    assert sorted(part.edges["_ID"].tolist()) == part.edges["_ID"].tolist()
    check_features(part, graph)
    mask = np.isin(np.arange(NODES), nodes)
    assert of(graphs.node_subgraph(graph, mask)) == of(part)


def test_the_graph_of_some_edges_is_networkx() -> None:
    graph, edges = drawn(), np.random.default_rng(1).permutation(EDGES)[:9]
    part = graphs.edge_subgraph(graph, edges)
    assert part.edges["_ID"].tolist() == edges.tolist()
    ends = np.asarray(graph.senders)[edges], np.asarray(graph.receivers)[edges]
    wanted = [(int(u), int(v), int(e)) for u, v, e in zip(*ends, edges, strict=True)]
    peer = networkx_of(graph).edge_subgraph(wanted)
    assert of(part) == set(peer.edges(keys=True)) == set(wanted)
    assert set(part.nodes["_ID"].tolist()) == set(peer.nodes)
    check_features(part, graph)


def test_nodes_come_as_dgl_numbers_them() -> None:
    """The examples of DGL's documentation: a cycle of five."""
    cycle = graphs.from_edges([0, 1, 2, 3, 4], [1, 2, 3, 4, 0], 5)
    part = graphs.edge_subgraph(cycle, [0, 4])
    assert (part.senders.tolist(), part.receivers.tolist()) == ([0, 1], [2, 0])
    assert (part.nodes["_ID"].tolist(), part.edges["_ID"].tolist()) == ([0, 4, 1], [0, 4])
    part = graphs.node_subgraph(cycle, [0, 1, 4])
    assert (part.senders.tolist(), part.receivers.tolist()) == ([0, 2], [1, 0])
    assert part.edges["_ID"].tolist() == [0, 4]
    for relabel, nodes in ((False, [0, 1, 2, 3, 4]), (True, [0, 4, 1])):
        part = graphs.in_subgraph(cycle, [1, 0], relabel_nodes=relabel)
        assert part.nodes["_ID"].tolist() == nodes
        assert of(part) == {(0, 1, 0), (4, 0, 4)}


@pytest.mark.parametrize("cut", [graphs.in_subgraph, graphs.out_subgraph])
def test_edges_that_touch_some_nodes(cut: Callable[..., graphs.Graph]) -> None:
    graph, nodes = drawn(), [7, 3, 21]
    part = cut(graph, nodes)
    ends = np.asarray(graph.receivers if cut is graphs.in_subgraph else graph.senders)
    assert part.edges["_ID"].tolist() == np.flatnonzero(np.isin(ends, nodes)).tolist()
    assert part.num_nodes == NODES
    check_features(part, graph)
    small = cut(graph, nodes, relabel_nodes=True)
    assert of(small) == of(part)
    assert set(small.nodes["_ID"].tolist()) == {node for edge in of(part) for node in edge[:2]}


@pytest.mark.parametrize("k", [0, 1, 2, 9])
@pytest.mark.parametrize("is_in", [True, False])
def test_hops_are_networkx(k: int, is_in: bool) -> None:
    graph, seeds = drawn(2), [4, 17]
    cut = graphs.khop_in_subgraph if is_in else graphs.khop_out_subgraph
    part, places = cut(graph, seeds, k)
    peer = networkx_of(graph)
    along = peer.reverse() if is_in else peer
    found = set().union(*(nx.single_source_shortest_path_length(along, seed, k) for seed in seeds))
    assert part.nodes["_ID"].tolist() == sorted(found)
    assert np.asarray(part.nodes["_ID"])[places].tolist() == seeds
    assert of(part) == set(peer.subgraph(found).edges(keys=True))
    check_features(part, graph)
    whole, same = cut(graph, seeds, k, relabel_nodes=False)
    assert (whole.num_nodes, same.tolist()) == (NODES, seeds)
    assert of(whole) == of(part)


def test_a_batch_stays_one() -> None:
    graph = graphs.batch([graphs.from_edges([0, 1], [1, 2], 3), graphs.from_edges([0, 1], [0, 0], 2)])
    part = graphs.node_subgraph(graph, [4, 2, 3, 1])
    assert part.nodes["_ID"].tolist() == [2, 1, 4, 3]
    assert (part.n_node.tolist(), part.n_edge.tolist()) == ([2, 2], [1, 2])
    assert of(part) == {(1, 2, 1), (3, 3, 2), (4, 3, 3)}


def test_of_jraphs_graphs() -> None:
    theirs = graphs.to_jraph(drawn())
    part, places = graphs.khop_in_subgraph(theirs, [5], 1)
    ours, same = graphs.khop_in_subgraph(drawn(), [5], 1)
    assert isinstance(part, jraph.GraphsTuple)
    assert places.tolist() == same.tolist()
    np.testing.assert_array_equal(graphs.from_jraph(part).nodes["_ID"], ours.nodes["_ID"])


def test_ids_are_not_kept_where_they_are_not_asked_for_or_have_no_place() -> None:
    assert set(graphs.node_subgraph(drawn(), [1], store_ids=False).nodes) == {"h"}
    sorted_only = graphs.from_edges([0, 1], [1, 2], 3, formats=("csr",))
    part = graphs.node_subgraph(sorted_only, [1, 2])
    assert (part.nodes["_ID"].tolist(), dict(part.edges), part.num_edges) == ([1, 2], {}, 1)
    with pytest.raises(ValueError, match=r'graph was made with formats=\("csr",\), which does'):
        graphs.edge_subgraph(sorted_only, [0])


def test_the_graph_of_nothing() -> None:
    part = graphs.node_subgraph(drawn(), [])
    assert (part.num_nodes, part.num_edges, part.nodes["h"].shape) == (0, 0, (0, 2))


def test_what_is_refused() -> None:
    graph = drawn()
    for nodes, message in (
        ([3, 1, 3], r"nodes\[2\] = 3 occurs twice"),
        ([NODES], r"nodes\[0\] = 30 is out of range for 30"),
    ):
        with pytest.raises(ValueError, match=message):
            graphs.node_subgraph(graph, nodes)
    with pytest.raises(ValueError, match="k=-1 must be at least 0"):
        graphs.khop_in_subgraph(graph, [0], -1)
    with pytest.raises(ValueError, match="graph is padded: unpad it first"):
        graphs.in_subgraph(graphs.pad(graph, 64, 256), [0])
    with pytest.raises(TypeError, match="nodes is traced"):
        jax.jit(lambda nodes: graphs.node_subgraph(graph, nodes).num_nodes)(jnp.arange(3))
