"""The graph of a batch to which each node or edge belongs, without padding."""

from typing import Literal

import jax
import jax.numpy as jnp
import jraph

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.structure import Graph, Incidence, first_padding, from_jraph, incidence_of

Part = Literal["nodes", "edges"]
AnyBatch = Graph | jraph.GraphsTuple


def batch_of(graph: AnyBatch) -> Graph:
    """Returns a graph of ours or jraph's as ours.

    Raises:
      TypeError: it is neither.
    """
    if isinstance(graph, jraph.GraphsTuple):
        return from_jraph(graph)
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a Graph or a jraph.GraphsTuple, got {type(graph).__name__}")
    return graph


def graph_segments(graph: Graph, part: Part) -> Incidence:
    """Returns the graph of the batch to which each node, or edge, belongs; padding does not count.

    Args:
      graph: a graph or a batch, padded or not, also under jit.
      part: "nodes" or "edges".
    """
    counts, total = (graph.n_node, graph.num_nodes) if part == "nodes" else (graph.n_edge, graph.num_edges)
    count = counts.shape[0]
    ids = jnp.repeat(jnp.arange(count, dtype=jnp.int32), counts, total_repeat_length=total)
    if graph.is_padded:
        is_real = jnp.arange(total, dtype=jnp.int32) < total - counts[first_padding(graph.n_node)]
        ids = jnp.where(is_real, ids, count)
    segments, ends = incidence_of(ids, count, is_sorted=True), graph.connections.ends
    if part == "nodes":
        return segments if graph.kept_nodes is None else segments.where(graph.kept_nodes)
    return segments if ends is None or ends[1].all_count else segments.where(ends[1].is_counted)


def rows_of(graph: Graph, part: Part, feature: str | Floats) -> jax.Array:
    """Returns a feature's rows, [nodes, ...] or [edges, ...].

    Args:
      graph: a graph or a batch.
      part: "nodes" or "edges".
      feature: the name of a feature of the graph, or the rows themselves.

    Raises:
      ValueError: there is no such feature, or another number of rows.
    """
    if isinstance(feature, str):
        features = graph.nodes if part == "nodes" else graph.edges
        if feature not in features:
            known = ", ".join(map(repr, features)) or "none"
            raise ValueError(f"no feature {feature!r} of the {part}; there are: {known}")
        return features[feature]
    count = graph.num_nodes if part == "nodes" else graph.num_edges
    return checked_rows("feature", feature, count, part)


def checked_rows(name: str, rows: Floats, count: int, kind: str) -> jax.Array:
    """Returns rows as a checked array.

    Args:
      name: the argument's name, for messages.
      rows: an array [count, ...].
      count: the expected number of rows.
      kind: what the rows belong to, for messages.

    Raises:
      ValueError: there is another number of rows.
    """
    array = jnp.asarray(rows)
    if array.ndim == 0 or array.shape[0] != count:
        raise ValueError(f"{name} must have {count} rows, one for each of the {kind}, got shape {array.shape}")
    return array
