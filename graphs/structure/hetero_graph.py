"""Graphs with several types of nodes and edges."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax.core import FrozenDict
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure.adjacency import DEFAULT_FORMATS, Adjacency, make_adjacency
from jmp_train.graphs.structure.counts import as_count
from jmp_train.graphs.structure.graph import HETERO_NAMES, Features, checked_features, look_up

EdgeType = tuple[str, str, str]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeteroGraph:
    """A directed graph with several types of nodes and edges, as a pytree that can be passed through jit.

    An edge type is a triple: the type of the senders, a name, the type of the receivers.

    Args:
      nodes: by node type, arrays [nodes of that type, ...] by name.
      edges: by edge type, arrays [edges of that type, ...] by name.
      connections: by edge type, the adjacency of its nodes.
      n_node: each node type with the number of its nodes.

    Example:
      >>> graph = hetero_from_edges({("user", "plays", "game"): ([0, 1], [0, 0])}, {"user": 2, "game": 1})
      >>> graph.edge_type("plays")
      ('user', 'plays', 'game')
      >>> graph.in_degrees("plays").tolist(), graph.senders("plays").tolist()
      ([2], [0, 1])
    """

    nodes: Mapping[str, Mapping[str, jax.Array]]
    edges: Mapping[EdgeType, Mapping[str, jax.Array]]
    connections: Mapping[EdgeType, Adjacency] = dataclasses.field(repr=False)  # see `Graph`
    n_node: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})

    def edge_type(self, name: str | EdgeType | None) -> EdgeType:
        """Returns the edge type of a name.

        Args:
          name: the triple, or the name in its middle if that is unique; None if there is only one type.

        Raises:
          ValueError: there is no such type, or there are several.
        """
        return find_edge_type(name, self.connections)

    def with_nodes(self, node_type: str, /, **features: ArrayLike) -> "HeteroGraph":
        """Returns the graph with node features added or replaced.

        Args:
          node_type: the type of the nodes.
          **features: arrays [nodes of that type, ...] by name.
        """
        new = checked_features(f"nodes[{node_type!r}]", features, self.num_nodes(node_type))
        nodes = {**self.nodes, node_type: {**self.nodes[node_type], **new}}
        return dataclasses.replace(self, nodes=FrozenDict(nodes))

    def with_edges(self, etype: str | EdgeType, /, **features: ArrayLike) -> "HeteroGraph":
        """Returns the graph with edge features added or replaced.

        Args:
          etype: the type of the edges.
          **features: arrays [edges of that type, ...] by name.
        """
        kind = self.edge_type(etype)
        rows = self.connections[kind].receivers.num_edges
        new = checked_features(f"edges[{kind!r}]", features, rows)
        edges = {**self.edges, kind: {**self.edges[kind], **new}}
        return dataclasses.replace(self, edges=FrozenDict(edges))

    @property
    def node_types(self) -> tuple[str, ...]:
        """The types of nodes, in the given order."""
        return tuple(kind for kind, _ in self.n_node)

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        """The types of edges, sorted, because a dictionary that passes through jit keeps no other order."""
        return tuple(sorted(self.connections))

    def num_edges(self, etype: str | EdgeType | None = None) -> int:
        """Returns the number of edges of a type.

        Args:
          etype: the type of the edges, see `edge_type`.
        """
        return self.connections[self.edge_type(etype)].num_edges

    def senders(self, etype: str | EdgeType | None = None) -> jax.Array:
        """Returns the node that each edge of a type leaves, int32 [edges of that type].

        Args:
          etype: the type of the edges, see `edge_type`.

        Raises:
          ValueError: the graph does not store single edges.
        """
        return self.connections[self.edge_type(etype)].senders.ids

    def receivers(self, etype: str | EdgeType | None = None) -> jax.Array:
        """Returns the node that each edge of a type enters, int32 [edges of that type].

        Args:
          etype: the type of the edges, see `edge_type`.

        Raises:
          ValueError: the graph does not store single edges.
        """
        return self.connections[self.edge_type(etype)].receivers.ids

    def in_degrees(self, etype: str | EdgeType | None = None) -> jax.Array:
        """Returns the number of edges of a type that enter each node, int32 [receiving nodes].

        Args:
          etype: the type of the edges, see `edge_type`.
        """
        return self.connections[self.edge_type(etype)].in_degrees

    def out_degrees(self, etype: str | EdgeType | None = None) -> jax.Array:
        """Returns the number of edges of a type that leave each node, int32 [sending nodes].

        Args:
          etype: the type of the edges, see `edge_type`.
        """
        return self.connections[self.edge_type(etype)].out_degrees

    def num_nodes(self, node_type: str) -> int:
        """Returns the number of nodes of a type.

        Args:
          node_type: the type of the nodes.

        Raises:
          ValueError: there is no such type.
        """
        counts = dict(self.n_node)
        if node_type not in counts:
            raise ValueError(f"node_type={node_type!r} is not one of {', '.join(map(repr, counts))}")
        return counts[node_type]

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            return look_up(self, name, HETERO_NAMES)


def find_edge_type(name: str | EdgeType | None, known: Iterable[EdgeType]) -> EdgeType:
    """Returns the edge type of a name, see `HeteroGraph.edge_type`.

    Args:
      name: the triple, the name in its middle, or None.
      known: the existing edge types.
    """
    known = list(known)
    found = [kind for kind in known if name is None or name in (kind, kind[1])]
    if len(found) != 1:
        fault = "is not an edge type" if not found else "is ambiguous"
        raise ValueError(f"etype={name!r} {fault}; there are: {', '.join(map(str, known))}")
    return found[0]


def hetero_from_edges(
    edges_by_type: Mapping[EdgeType, tuple[Ids, Ids]],
    n_node: Mapping[str, int],
    nodes: Mapping[str, Features] | None = None,
    edges: Mapping[EdgeType, Features] | None = None,
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
) -> HeteroGraph:
    """Returns the graph of these edges; runs on the host.

    Args:
      edges_by_type: for each edge type its senders and its receivers, int [edges].
      n_node: number of nodes of each type.
      nodes: by node type, arrays [nodes, ...] by name.
      edges: by edge type, arrays [edges, ...] by name.
      formats: see `from_edges`.

    Returns:
      The graph.

    Raises:
      TypeError: see `from_edges`.
      ValueError: see `from_edges`; or a type is unknown, or not a triple.

    Example:
      >>> graph = hetero_from_edges({("user", "plays", "game"): ([0, 1], [0, 0])}, {"user": 2, "game": 1})
      >>> graph.num_nodes("user")
      2
    """
    if not isinstance(n_node, Mapping):
        kind = type(n_node).__name__
        raise TypeError(f"n_node must be a mapping from node types to numbers, got {kind}")
    counts = {kind: as_count(f"n_node[{kind!r}]", count) for kind, count in n_node.items()}
    adjacencies = {}
    for kind, (senders, receivers) in edges_by_type.items():
        if not (isinstance(kind, tuple) and len(kind) == 3):
            raise ValueError(f"edge type {kind!r} must be (type of senders, name, type of receivers)")
        for end in (kind[0], kind[2]):
            if end not in counts:
                raise ValueError(f"edge type {kind!r}: n_node lacks {end!r}")
        adjacencies[kind] = make_adjacency(
            senders,
            receivers,
            counts[kind[0]],
            counts[kind[2]],
            formats=formats,
            where=f" of {kind}",
        )
    return hetero_of(adjacencies, counts, nodes or {}, edges or {})


def hetero_of(
    adjacencies: Mapping[EdgeType, Adjacency],
    n_node: Mapping[str, int],
    nodes: Mapping[str, Features],
    edges: Mapping[EdgeType, Features],
) -> HeteroGraph:
    """Returns the graph of existing adjacencies.

    Args:
      adjacencies: by edge type, the adjacency of its nodes.
      n_node: number of nodes of each type.
      nodes: by node type, arrays [nodes, ...] by name.
      edges: by edge type, arrays [edges, ...] by name.
    """
    graph = HeteroGraph(
        FrozenDict({kind: {} for kind in n_node}),
        FrozenDict({kind: {} for kind in adjacencies}),
        FrozenDict(adjacencies),
        tuple(n_node.items()),
    )
    for node_type, features in nodes.items():
        graph = graph.with_nodes(node_type, **features)
    for edge_type, features in edges.items():
        graph = graph.with_edges(edge_type, **features)
    return graph
