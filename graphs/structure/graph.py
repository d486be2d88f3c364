"""The graph: features by name, in the caller's order, and the edges with the indices that sums need."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from flax.core import FrozenDict

from jmp_train.graphs.connections import (
    DEFAULT_FORMATS,
    Connections,
    check_formats,
    checked_ends,
    connect,
    connect_checked,
    connect_traced,
    is_traced,
)
from jmp_train.graphs.counts import as_count, as_counts, check_int32
from jmp_train.policies.paths import named_leaves

Features = Mapping[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Graph:
    """A directed graph, or a batch of them, as a pytree that goes through jit.

    Make it with `from_edges` or `from_jraph`, on the host. Without features it holds two edge-long int32
    arrays with `formats=("coo",)`, or `("csr",)`, and eight with both. Edges keep the order in which they
    were given.

    Args:
      nodes: arrays [nodes, ...] by name.
      edges: arrays [edges, ...] by name.
      connections: who sends to whom.
      n_node: int32 [graphs], the nodes of each graph of the batch.
      n_edge: int32 [graphs], the edges of each graph of the batch.
      globals: any pytree of what belongs to the graphs.
      is_padded: whether the last graphs are padding, in jraph's conventions. Padding edges then count
        nowhere: no sum, mean, softmax or degree knows of them, not even that of the padding node.

    Example:
      >>> import jax.numpy as jnp
      >>> graph = from_edges([0, 1, 2], [1, 2, 2], 3, nodes={"h": jnp.ones((3, 4), "float16")})
      >>> graph.in_degrees.tolist(), graph.nodes["h"].dtype.name
      ([0, 1, 2], 'float16')
    """

    nodes: Mapping[str, jax.Array]
    edges: Mapping[str, jax.Array]
    connections: Connections
    n_node: jax.Array
    n_edge: jax.Array
    globals: Any = None
    is_padded: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, padding included."""
        return self.connections.in_degrees.shape[0]

    @property
    def num_edges(self) -> int:
        """How many edges there are, padding included."""
        return self.connections.num_edges

    @property
    def senders(self) -> jax.Array:
        """Int32 [edges], the node that each edge leaves; the number of nodes for padding edges."""
        return self.connections.sources.ids

    @property
    def receivers(self) -> jax.Array:
        """Int32 [edges], the node that each edge enters; the number of nodes for padding edges."""
        return self.connections.targets.ids

    @property
    def in_degrees(self) -> jax.Array:
        """Int32 [nodes], how many edges enter each node."""
        return self.connections.in_degrees

    @property
    def out_degrees(self) -> jax.Array:
        """Int32 [nodes], how many edges leave each node."""
        return self.connections.out_degrees

    def with_nodes(self, /, **features: Any) -> "Graph":
        """Returns the graph with node features [nodes, ...] added or replaced.

        Args:
          **features: arrays by name.
        """
        new = checked_features("nodes", features, self.num_nodes)
        return dataclasses.replace(self, nodes=FrozenDict({**self.nodes, **new}))

    def with_edges(self, /, **features: Any) -> "Graph":
        """Returns the graph with edge features [edges, ...] added or replaced.

        Args:
          **features: arrays by name.
        """
        new = checked_features("edges", features, self.connections.targets.num_edges)
        return dataclasses.replace(self, edges=FrozenDict({**self.edges, **new}))


def from_edges(
    senders: Any,
    receivers: Any,
    n_node: int,
    nodes: Features | None = None,
    edges: Features | None = None,
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
) -> Graph:
    """Returns the graph of these edges; runs on the host.

    Args:
      senders: int [edges], the node that each edge leaves.
      receivers: int [edges], the node that each edge enters.
      n_node: how many nodes there are, at most 2**31 - 1: ids are int32.
      nodes: arrays [n_node, ...] by name.
      edges: arrays [edges, ...] by name, in the order of the edges.
      formats: the indices to make. "coo" has both ends of each edge; "csr" has the edges sorted by
        either end, by which large sums and attention are streamed, fast and without messages in memory;
        "mailbox" groups nodes by in-degree, which reductions by user-defined functions need under jit.
        "csr" alone takes the least memory, and knows no edge apart: no edge features, senders or
        receivers. All others include "coo".

    Returns:
      The graph, its arrays on the default device.

    Raises:
      TypeError: ids are no integers or traced, or `n_node` is no integer.
      ValueError: an id is out of range, or shapes do not fit; the message names the edge or feature. Or
        there are more nodes or edges than int32 can number.

    Example:
      >>> graph = from_edges([0, 0, 2], [1, 2, 1], 3)
      >>> graph.senders.tolist(), graph.receivers.tolist()
      ([0, 0, 2], [1, 2, 1])
    """
    count = as_count("n_node", n_node)
    connections = connect(senders, receivers, count, count, formats=formats)
    num_edges = connections.targets.num_edges if edges else connections.num_edges
    return Graph(
        nodes=checked_features("nodes", {} if nodes is None else nodes, count),
        edges=checked_features("edges", edges or {}, num_edges),
        connections=connections,
        n_node=jnp.array([count], jnp.int32),
        n_edge=jnp.array([num_edges], jnp.int32),
    )


def from_jraph(
    graphs: jraph.GraphsTuple, *, padded: bool = False, formats: Sequence[str] = ("coo",)
) -> Graph:
    """Returns jraph's graphs as a graph. Under jit nothing is checked, and indices are made on the device.

    Args:
      graphs: `nodes` and `edges` are dictionaries of arrays, any other trees of them, or None. A single array
        becomes the feature "x", and one in a tree is named by its path, such as "a/b".
      padded: whether `jraph.pad_with_graphs` padded it.
      formats: see `from_edges`; outside of jit only.

    Returns:
      The graph.

    Raises:
      TypeError: ids are no integers, or a feature is no array.
      ValueError: see `from_edges`; or senders or receivers are missing, or counts do not add up.

    Example:
      >>> import jraph, numpy as np
      >>> graphs = jraph.GraphsTuple(
      ...     nodes={"h": np.ones((3, 2))}, edges=None, senders=np.array([0, 1]),
      ...     receivers=np.array([1, 2]), n_node=np.array([3]), n_edge=np.array([2]), globals=None)
      >>> from_jraph(graphs).num_nodes
      3
    """
    if graphs.senders is None or graphs.receivers is None:
        raise ValueError("senders and receivers must be arrays, got None: a graph has edges")
    nodes, edges = _as_features("nodes", graphs.nodes), _as_features("edges", graphs.edges)
    traced = is_traced(graphs.senders, graphs.receivers, graphs.n_node, graphs.n_edge)
    totals = {} if traced else _totals(graphs)
    n_node, n_edge = jnp.asarray(graphs.n_node), jnp.asarray(graphs.n_edge)
    if traced and "mailbox" in formats:
        raise TypeError('formats=("mailbox",) needs a graph that is made outside of jit')
    if nodes:
        count = next(iter(nodes.values())).shape[0]
    elif is_traced(n_node):
        raise TypeError(
            "n_node is traced: under jit the graph needs a node feature to count nodes by"
        )
    else:
        count = int(np.sum(graphs.n_node)) if traced else totals["n_node"]
        check_int32("n_node adds up to", count)
    num_edges = np.shape(graphs.receivers)[0]
    if traced:
        senders, receivers = jnp.asarray(graphs.senders), jnp.asarray(graphs.receivers)
        if padded:
            is_real = jnp.arange(num_edges) < n_edge.sum() - n_edge[first_padding(n_node)]
            senders, receivers = (jnp.where(is_real, ids, count) for ids in (senders, receivers))
        connections = connect_traced(senders, receivers, count, count)
    else:
        check_formats(formats)
        ends = checked_ends(graphs.senders, graphs.receivers, count, count)
        for name, total in (("n_node", count), ("n_edge", num_edges)):
            if totals[name] != total:
                raise ValueError(f"{name} adds up to {totals[name]}, but there are {total}")
        if padded:
            ends = _without_padding(n_node, n_edge, ends, count)
        connections = connect_checked(*ends, count, count, formats=formats, is_fixed=padded)
    return Graph(
        nodes=checked_features("nodes", nodes, count),
        edges=checked_features("edges", edges, num_edges),
        connections=connections,
        n_node=n_node,
        n_edge=n_edge,
        globals=graphs.globals,
        is_padded=padded,
    )


def to_jraph(graph: Graph) -> jraph.GraphsTuple:
    """Returns the graph as jraph's, padding edges as loops on the first padding node.

    Args:
      graph: a graph.

    Returns:
      A GraphsTuple with dictionaries of features.

    Example:
      >>> to_jraph(from_edges([0, 1], [1, 0], 2)).senders.tolist()
      [0, 1]
    """
    senders, receivers = graph.senders, graph.receivers
    if graph.is_padded:
        first = graph.num_nodes - graph.n_node[first_padding(graph.n_node)]
        senders, receivers = (
            jnp.where(ids < graph.num_nodes, ids, first) for ids in (senders, receivers)
        )
    return jraph.GraphsTuple(
        nodes=dict(graph.nodes),
        edges=dict(graph.edges),
        senders=senders,
        receivers=receivers,
        n_node=graph.n_node,
        n_edge=graph.n_edge,
        globals=graph.globals,
    )


def rand_graph(
    num_nodes: int, num_edges: int, *, seed: int = 0, formats: Sequence[str] = ("coo",)
) -> Graph:
    """Returns a graph with edges between nodes drawn uniformly, with replacement.

    Args:
      num_nodes: how many nodes.
      num_edges: how many edges.
      seed: of numpy's generator: the same seed gives the same graph.
      formats: see `from_edges`.

    Returns:
      The graph, without features.

    Raises:
      TypeError: a number is no integer.
      ValueError: a number is negative or beyond int32, or there are edges but no nodes.

    Example:
      >>> rand_graph(30, 100).num_edges
      100
    """
    num_nodes, num_edges = as_count("num_nodes", num_nodes), as_count("num_edges", num_edges)
    if num_edges and not num_nodes:
        raise ValueError(f"num_nodes=0 leaves nothing to join by num_edges={num_edges}")
    ends = np.random.default_rng(seed).integers(0, max(num_nodes, 1), (2, num_edges), np.int32)
    return from_edges(ends[0], ends[1], num_nodes, formats=formats)


def checked_features(name: str, features: Features, rows: int) -> Mapping[str, jax.Array]:
    """Returns features as arrays, immutable.

    Args:
      name: "nodes" or "edges", for messages.
      features: arrays by name.
      rows: how many rows each must have.

    Raises:
      TypeError: a feature is no array.
      ValueError: a feature has another number of rows.
    """
    if not isinstance(features, Mapping):
        kind = type(features).__name__
        raise TypeError(f"{name} must be a dictionary of arrays, got {kind}")
    arrays = {}
    for key, feature in features.items():
        try:
            array = jnp.asarray(feature)
        except (TypeError, ValueError):
            kind = type(feature).__name__
            raise TypeError(f"{name}[{key!r}] must be an array, got {kind}") from None
        if array.ndim == 0 or array.shape[0] != rows:
            raise ValueError(
                f"{name}[{key!r}] must have {rows} rows, one for each of the {name}, "
                f"got shape {array.shape}"
            )
        arrays[key] = array
    return FrozenDict(arrays)


def _totals(graphs: jraph.GraphsTuple) -> dict[str, int]:
    """Returns how many nodes and edges the graphs of a batch have together, which may be beyond int32."""
    counts = {"n_node": graphs.n_node, "n_edge": graphs.n_edge}
    return {name: int(as_counts(name, each).sum()) for name, each in counts.items()}


def _as_features(name: str, features: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a tree by their paths, "x" for the tree that is one."""
    arrays = {}
    for path, feature in named_leaves(features):
        key = path or "x"
        if not isinstance(feature, np.ndarray | jax.Array):
            kind = type(feature).__name__
            raise TypeError(f"{name}[{key!r}] must be an array, got {kind}")
        if key in arrays:
            raise ValueError(f"{name} has two features whose path is {key!r}")
        arrays[key] = jnp.asarray(feature)
    return arrays


def first_padding(n_node: jax.Array) -> jax.Array:
    """Returns the index of the graph that holds all padding: the last one that has nodes."""
    graphs = n_node.shape[0]
    return graphs - 1 - jnp.argmax(n_node[::-1] > 0)


def _without_padding(
    n_node: jax.Array, n_edge: jax.Array, ends: tuple[np.ndarray, np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends, with those of padding edges out of range."""
    padding = int(first_padding(n_node))
    is_real = np.arange(len(ends[0])) < int(n_edge[:padding].sum())
    senders, receivers = (np.where(is_real, ids.astype(np.int64), count) for ids in ends)
    return senders, receivers
