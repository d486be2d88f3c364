"""Graphs for property tests: small random ones, and odd ones."""

import numpy as np
from hypothesis import strategies as st

from jmp_train import graphs

Ends = tuple[np.ndarray, np.ndarray, int]  # senders, receivers, number of nodes
ODD: dict[str, Ends] = {
    "none": (np.zeros(0, int), np.zeros(0, int), 0),
    "one node": (np.zeros(0, int), np.zeros(0, int), 1),
    "self-loops": (np.array([0, 0, 1]), np.array([0, 0, 1]), 2),
    "multi-edges": (np.array([0, 0, 0, 1, 2]), np.array([1, 1, 1, 0, 1]), 3),
    "isolated": (np.array([1, 3]), np.array([3, 1]), 6),
    "hub": (np.concatenate([np.arange(40), np.full(40, 2)]), np.concatenate([np.full(40, 2), np.arange(40)]), 40),
}


@st.composite
def edges(draw: st.DrawFn, most_nodes: int = 7, most_edges: int = 16) -> Ends:
    """Draws the ends of the edges of a graph, and the number of its nodes."""
    count = draw(st.integers(0, most_nodes))
    ids = st.integers(0, max(count - 1, 0))
    pairs = draw(st.lists(st.tuples(ids, ids), max_size=most_edges if count else 0))
    ends = np.array(pairs, int).reshape(-1, 2)
    return ends[:, 0], ends[:, 1], count


def without_dropped(graph: graphs.Graph, smaller: graphs.Graph) -> graphs.Graph:
    """Returns the graph without the edges that another one dropped."""
    kept = np.flatnonzero(graphs.edge_mask(smaller))
    ends = np.asarray(graph.senders)[kept], np.asarray(graph.receivers)[kept]
    features = {name: np.asarray(rows)[kept] for name, rows in graph.edges.items()}
    return graphs.from_edges(*ends, graph.num_nodes, graph.nodes, features)
