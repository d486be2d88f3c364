"""`Graph`: features by name, in the caller's order, and edges with the indices that sums need.

Names from DGL and PyTorch Geometric raise errors that name their counterpart here.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax.core import FrozenDict
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure.adjacency import (
    DEFAULT_FORMATS,
    Adjacency,
    make_adjacency,
)
from jmp_train.graphs.structure.counts import as_count
from jmp_train.graphs.structure.feature_arrays import check_rows, on_device
from jmp_train.policies.dtype_policies import check_narrowed
from jmp_train.policies.pytrees import has_tracers

Features = Mapping[str, ArrayLike]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Graph:
    """A directed graph, or a batch of graphs, as a pytree that can be passed through jit.

    Create it with `from_edges` or `from_jraph`, on the host. Without features it holds two edge-long int32
    arrays with `formats=("coo",)`, or `("csr",)`, and eight with both. Edges keep the order in which they
    were given.

    Args:
      nodes: arrays [nodes, ...] by name.
      edges: arrays [edges, ...] by name.
      connections: the adjacency of the nodes.
      n_node: int32 [graphs], number of nodes in each graph of the batch.
      n_edge: int32 [graphs], number of edges in each graph of the batch.
      globals: any pytree of values of the graphs.
      is_padded: whether the last graphs are padding, in jraph's conventions. Padding edges then do not
        count: sums, means, softmax and degrees ignore them, even those of the padding node.
      kept_nodes: bool [nodes], the nodes that `drop_nodes` left; None if all count.

    Example:
      >>> import jax.numpy as jnp
      >>> graph = from_edges([0, 1, 2], [1, 2, 2], 3, nodes={"h": jnp.ones((3, 4), "float16")})
      >>> graph.in_degrees.tolist(), graph.nodes["h"].dtype.name
      ([0, 1, 2], 'float16')
    """

    nodes: Mapping[str, jax.Array]
    edges: Mapping[str, jax.Array]
    connections: Adjacency = dataclasses.field(repr=False)  # the ids of all edges would fill the screen
    n_node: jax.Array
    n_edge: jax.Array
    globals: Any = None
    is_padded: bool = dataclasses.field(default=False, metadata={"static": True})
    kept_nodes: jax.Array | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes, padding included."""
        return self.connections.in_degrees.shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges, padding included."""
        return self.connections.num_edges

    @property
    def senders(self) -> jax.Array:
        """Int32 [edges], the node that each edge leaves; the number of nodes for padding edges."""
        return self.connections.senders.ids

    @property
    def receivers(self) -> jax.Array:
        """Int32 [edges], the node that each edge enters; the number of nodes for padding edges."""
        return self.connections.receivers.ids

    @property
    def in_degrees(self) -> jax.Array:
        """Int32 [nodes], number of edges that enter each node."""
        return self.connections.in_degrees

    @property
    def out_degrees(self) -> jax.Array:
        """Int32 [nodes], number of edges that leave each node."""
        return self.connections.out_degrees

    def with_nodes(self, /, **features: ArrayLike) -> "Graph":
        """Returns the graph with node features [nodes, ...] added or replaced.

        Args:
          **features: arrays by name.
        """
        new = checked_features("nodes", features, self.num_nodes)
        return dataclasses.replace(self, nodes=FrozenDict({**self.nodes, **new}))

    def with_edges(self, /, **features: ArrayLike) -> "Graph":
        """Returns the graph with edge features [edges, ...] added or replaced.

        Args:
          **features: arrays by name.
        """
        new = checked_features("edges", features, self.connections.receivers.num_edges)
        return dataclasses.replace(self, edges=FrozenDict({**self.edges, **new}))

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            return look_up(self, name, GRAPH_NAMES)


def from_edges(
    senders: Ids,
    receivers: Ids,
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
      n_node: number of nodes, at most 2**31 - 1, because ids are int32.
      nodes: arrays [n_node, ...] by name.
      edges: arrays [edges, ...] by name, in the order of the edges.
      formats: the indices to create. "coo" has both ends of each edge. "csr" has the edges sorted by
        either end, so that large sums and attention run in chunks, fast and without messages in memory.
        "mailbox" groups nodes by in-degree, which reductions by user-defined functions need under jit.
        "csr" alone takes the least memory, but does not store single edges: no edge features, senders or
        receivers. All others include "coo".

    Returns:
      The graph, its arrays on the default device.

    Raises:
      TypeError: ids are not integers or traced, or `n_node` is not an integer.
      ValueError: an id is out of range, shapes do not fit, or integers of a feature do not fit into 32 bits; the
        message names the edge or feature. Or there are more nodes or edges than int32 can number.

    Warns:
      CollapsedValuesWarning: different float64 values of a feature become equal in float32.

    Example:
      >>> graph = from_edges([0, 0, 2], [1, 2, 1], 3)
      >>> graph.senders.tolist(), graph.receivers.tolist()
      ([0, 0, 2], [1, 2, 1])
    """
    count = as_count("n_node", n_node)
    adjacency = make_adjacency(senders, receivers, count, count, formats=formats)
    num_edges = adjacency.receivers.num_edges if edges else adjacency.num_edges
    return Graph(
        nodes=checked_features("nodes", {} if nodes is None else nodes, count),
        edges=checked_features("edges", edges or {}, num_edges),
        connections=adjacency,
        n_node=on_device(np.array([count], np.int32)),
        n_edge=on_device(np.array([num_edges], np.int32)),
    )


def rand_graph(num_nodes: int, num_edges: int, *, seed: int = 0, formats: Sequence[str] = ("coo",)) -> Graph:
    """Returns a graph with edges between nodes drawn uniformly, with replacement.

    Args:
      num_nodes: number of nodes.
      num_edges: number of edges.
      seed: seed of NumPy's generator: the same seed gives the same graph.
      formats: see `from_edges`.

    Returns:
      The graph, without features.

    Raises:
      TypeError: a number is not an integer.
      ValueError: a number is negative or beyond int32, or there are edges but no nodes.

    Example:
      >>> rand_graph(30, 100).num_edges
      100
    """
    num_nodes, num_edges = as_count("num_nodes", num_nodes), as_count("num_edges", num_edges)
    if num_edges and not num_nodes:
        raise ValueError(f"num_nodes=0 must be positive for num_edges={num_edges}")
    seed = as_count("seed", seed, sys.maxsize)
    ends = np.random.default_rng(seed).integers(0, max(num_nodes, 1), (2, num_edges), np.int32)
    return from_edges(ends[0], ends[1], num_nodes, formats=formats)


def checked_features(name: str, features: Features, rows: int) -> Mapping[str, jax.Array]:
    """Returns features as arrays in an immutable mapping.

    Args:
      name: "nodes" or "edges", for messages.
      features: arrays by name.
      rows: number of rows of each.

    Raises:
      TypeError: a feature is not an array.
      ValueError: a feature has another number of rows, or 64-bit integers that do not fit into 32 bits.

    Warns:
      CollapsedValuesWarning: different float64 values of a feature become equal in float32.
    """
    if not isinstance(features, Mapping):
        kind = type(features).__name__
        raise TypeError(f"{name} must be a dictionary of arrays, got {kind}")
    arrays = {}
    for key, feature in features.items():
        check_narrowed({key: _listed(feature)}, name)
        try:
            array = on_device(feature)
        except (TypeError, ValueError, OverflowError):
            kind = type(feature).__name__
            raise TypeError(f"{name}[{key!r}] must be an array, got {kind}") from None
        check_rows(f"{name}[{key!r}]", array.shape, rows, name)
        arrays[key] = array
    return FrozenDict(arrays)


def _listed(feature: Any) -> Any:
    """Returns a list of numbers as a NumPy array, and other values unchanged."""
    if not isinstance(feature, list | tuple) or has_tracers(feature):
        return feature
    try:
        return np.asarray(feature)
    except (TypeError, ValueError):
        return feature


_FUNCTIONS = (
    *("update_all", "multi_update_all", "apply_edges", "apply_nodes", "send_and_recv", "pull", "push"),
    *("prop_nodes", "prop_edges", "add_edges", "remove_edges", "in_subgraph", "out_subgraph", "edge_subgraph"),
)
_CAST = "jmp_train.cast_to_half(graph), cast_to_full(graph)"
_WHOLE = "nothing: a function returns a new graph, and the old one is still there"

# name there -> counterpart here, for a `Graph`
GRAPH_NAMES: Mapping[str, str] = MappingProxyType(
    {name: f"jmp_train.graphs.{name}(graph, ...)" for name in _FUNCTIONS}
    | {
        "ndata": 'graph.nodes["h"] to read, graph = graph.with_nodes(h=h) to write',
        "edata": 'graph.edges["w"] to read, graph = graph.with_edges(w=w) to write',
        "x": 'the name that the features were given, such as graph.nodes["x"]',
        "y": "labels, which are kept beside the graph",
        "edge_index": "graph.senders and graph.receivers",
        "edge_attr": 'the name that the features were given, such as graph.edges["w"]',
        "number_of_nodes": "graph.num_nodes",
        "number_of_edges": "graph.num_edges",
        "batch_size": "len(graph.n_node)",
        "num_graphs": "len(graph.n_node)",
        "batch_num_nodes": "graph.n_node",
        "batch_num_edges": "graph.n_edge",
        "subgraph": "jmp_train.graphs.node_subgraph(graph, ...)",
        "to": "jax.device_put(graph, device)",
        "to_half": _CAST,
        "half": _CAST,
        "to_float": _CAST,
        "float": _CAST,
        "to_bfloat16": 'jmp_train.get_policy("mixed_bfloat16").cast_to_compute(graph)',
        "local_scope": _WHOLE,
        "local_var": _WHOLE,
        "clone": _WHOLE,
    }
)

# the same for a `HeteroGraph`
HETERO_NAMES: Mapping[str, str] = MappingProxyType(
    {name: here for name, here in GRAPH_NAMES.items() if here.startswith("jmp_train") or here == _WHOLE}
    | {
        "ndata": 'graph.nodes["user"]["h"] to read, graph = graph.with_nodes("user", h=h) to write',
        "edata": 'graph.edges[graph.edge_type("plays")]["w"] to read, graph = graph.with_edges("plays", w=w) to write',
        "x_dict": 'graph.nodes["user"]["x"]',
        "edge_index_dict": 'graph.senders("plays") and graph.receivers("plays")',
        "ntypes": "graph.node_types",
        "etypes": "graph.edge_types",
        "canonical_etypes": "graph.edge_types",
        "to": "jax.device_put(graph, device)",
    }
)


def look_up(graph: object, name: str, names: Mapping[str, str]) -> Any:
    """Raises AttributeError for a missing attribute of a graph; for another library's name with the counterpart here.

    Args:
      graph: the graph.
      name: the name.
      names: `GRAPH_NAMES` or `HETERO_NAMES`.
    """
    if name in names:
        kind = type(graph).__name__
        raise AttributeError(f"a {kind} has no {name!r}, which is DGL's or PyTorch Geometric's name; use {names[name]}")
    return object.__getattribute__(graph, name)  # raises again if a property raised the AttributeError
