"""The edges of a layer by type: those of a graph of several types, or the blocks of a mini-batch's layer."""

from collections.abc import Iterable, Mapping
from typing import Any

from jmp_train.graphs.structure import Block, EdgeType, HeteroGraph, find_edge_type

Blocks = Mapping[EdgeType, Block]


def checked_typed_edges(graph: Any) -> None:
    """Raises an error unless a layer of several types can take a graph.

    Args:
      graph: a graph of several types, or a block by edge type.

    Raises:
      TypeError: it is neither.
    """
    if isinstance(graph, HeteroGraph):
        return
    if not isinstance(graph, Mapping):
        raise TypeError(f"graph must be a HeteroGraph, or a Block by edge type, got {type(graph).__name__}")
    for kind, block in graph.items():
        if not isinstance(block, Block):
            raise TypeError(f"graph[{kind}] must be a Block, got {type(block).__name__}")


def of_edge_types(graph: HeteroGraph | Blocks, values: Mapping[Any, Any]) -> dict[EdgeType, Any]:
    """Returns values by edge type, as triples.

    Args:
      graph: a graph with these edge types.
      values: by the triple, or by the name in its middle if that is unique.
    """
    known = graph.edge_types if isinstance(graph, HeteroGraph) else tuple(graph)
    return {find_edge_type(kind, known): value for kind, value in values.items()}


def block_of(graph: HeteroGraph | Blocks, kind: EdgeType) -> Block:
    """Returns the edges of a type, also for a graph.

    Args:
      graph: see `checked_typed_edges`.
      kind: the type of the edges.
    """
    return Block(graph.connections[kind]) if isinstance(graph, HeteroGraph) else graph[kind]


def num_rows(graph: HeteroGraph | Blocks, node_type: str, kinds: Iterable[EdgeType]) -> int | str:
    """Returns the number of rows of the features of a node type; "nodes", any number, if blocks do not tell.

    Args:
      graph: see `checked_typed_edges`.
      node_type: the type of the nodes.
      kinds: the types of the edges that are used.

    Raises:
      ValueError: blocks differ in it.
    """
    if isinstance(graph, HeteroGraph):
        return graph.num_nodes(node_type)
    counts = {graph[kind].num_sources for kind in kinds if kind[0] == node_type}
    if len(counts) > 1:
        raise ValueError(f"the blocks of one layer differ in their sources of type {node_type!r}: {sorted(counts)}")
    return counts.pop() if counts else "nodes"
