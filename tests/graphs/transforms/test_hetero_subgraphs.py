from typing import Any

import jax
import numpy as np
import pytest
from refusals import assert_refused

from jmp_train import graphs

pytestmark = pytest.mark.quick

PLAYS, FOLLOWS, LIKED = ("user", "plays", "game"), ("user", "follows", "user"), ("game", "liked by", "user")
COUNTS = {"user": 12, "game": 7, "shop": 3}
RANDOM = np.random.default_rng(0)
ENDS = {
    kind: (RANDOM.integers(0, COUNTS[kind[0]], count), RANDOM.integers(0, COUNTS[kind[2]], count))
    for kind, count in ((PLAYS, 30), (FOLLOWS, 25), (LIKED, 20))
}
NODES = {kind: {"x": np.arange(count, dtype=np.float16) * 2} for kind, count in COUNTS.items()}
EDGES: Any = {kind: {"w": np.arange(len(ends[0]), dtype=np.int32)} for kind, ends in ENDS.items()}


def make(formats: tuple[str, ...] = ("coo", "csr"), edges: Any = EDGES) -> graphs.HeteroGraph:
    return graphs.hetero_from_edges(ENDS, COUNTS, NODES, edges, formats=formats)


@pytest.mark.parametrize("relabel", [True, False])
def test_nodes_of_each_type_and_the_edges_between_them(relabel: bool) -> None:
    chosen: Any = {"user": [5, 0, 9, 3, 7], "game": np.arange(7) % 2 == 0}
    part = graphs.node_subgraph(make(), chosen, relabel)
    ids = {"user": [5, 0, 9, 3, 7], "game": [0, 2, 4, 6], "shop": []}
    all_ids = {kind: list(range(count)) for kind, count in COUNTS.items()}
    for kind, wanted in (ids if relabel else all_ids).items():
        assert part.num_nodes(kind) == len(wanted)
        assert part.nodes[kind]["_ID"].tolist() == wanted
        assert part.nodes[kind]["x"].tolist() == [2 * place for place in wanted]
        assert part.nodes[kind]["x"].dtype == np.float16
    for kind, (senders, receivers) in ENDS.items():
        kept = np.flatnonzero(np.isin(senders, ids[kind[0]]) & np.isin(receivers, ids[kind[2]]))
        assert len(kept) > 0
        assert part.edges[kind]["_ID"].tolist() == part.edges[kind]["w"].tolist() == kept.tolist()
        named = part.nodes[kind[0]]["_ID"][part.senders(kind)], part.nodes[kind[2]]["_ID"][part.receivers(kind)]
        assert [end.tolist() for end in named] == [senders[kept].tolist(), receivers[kept].tolist()]


def test_edges_of_each_type_and_the_nodes_at_their_ends() -> None:
    part = graphs.edge_subgraph(make(), {"plays": [7, 2, 11], FOLLOWS: [4]})
    assert (part.num_edges(PLAYS), part.num_edges(FOLLOWS), part.num_edges(LIKED)) == (3, 1, 0)
    assert part.edges[PLAYS]["w"].tolist() == [7, 2, 11]
    for kind, places in ((PLAYS, [7, 2, 11]), (FOLLOWS, [4])):
        named = part.nodes[kind[0]]["_ID"][part.senders(kind)], part.nodes[kind[2]]["_ID"][part.receivers(kind)]
        assert [end.tolist() for end in named] == [end[places].tolist() for end in ENDS[kind]]
    users = {*ENDS[PLAYS][0][[7, 2, 11]].tolist(), ENDS[FOLLOWS][0][4], ENDS[FOLLOWS][1][4]}
    assert set(part.nodes["user"]["_ID"].tolist()) == users
    assert (part.num_nodes("user"), part.num_nodes("shop")) == (len(users), 0)
    whole = graphs.edge_subgraph(make(), {"plays": [7]}, relabel_nodes=False, store_ids=False)
    assert (whole.num_nodes("user"), set(whole.nodes["user"]), set(whole.edges[PLAYS])) == (12, {"x"}, {"w"})


def test_formats_stay_as_they_are() -> None:
    plain = graphs.node_subgraph(make(("csr",), {}), {"user": [1, 2, 3], "game": [0, 1]})
    assert plain.connections[PLAYS].ends is None
    assert "_ID" not in plain.edges[PLAYS]
    other = graphs.node_subgraph(make(), {"user": [1]}, formats=("coo",))
    assert other.connections[PLAYS].neighbors is None


def test_what_is_refused() -> None:
    graph = make()
    refusals = {
        "TypeError: nodes of a graph with several types must be a mapping from types, got": lambda: (
            graphs.node_subgraph(graph, [0])
        ),
        "TypeError: edges of a graph with several types must be a mapping from types, got": lambda: (
            graphs.edge_subgraph(graph, [0])
        ),
        "node_type='film' is not one of 'user', 'game'": lambda: graphs.node_subgraph(graph, {"film": [0]}),
        "nodes['game'][0] = 7 is out of range": lambda: graphs.node_subgraph(graph, {"game": [7]}),
        "nodes['game'][1] = 1 occurs twice": lambda: graphs.node_subgraph(graph, {"game": [1, 1]}),
        "etype='eats' is not an edge type": lambda: graphs.edge_subgraph(graph, {"eats": [0]}),
        "edges has a type twice": lambda: graphs.edge_subgraph(graph, {"plays": [0], PLAYS: [1]}),
        "'plays', 'game')][0] = 30 is out of": lambda: graphs.edge_subgraph(graph, {"plays": [30]}),
        "which does not store single edges": lambda: graphs.edge_subgraph(make(("csr",), {}), {"plays": [0]}),
        "TypeError: graph is traced: transforms run": lambda: jax.jit(lambda g: graphs.node_subgraph(g, {}))(graph),
    }
    assert_refused(refusals)
