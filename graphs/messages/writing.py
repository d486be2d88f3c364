"""Writes results into a graph's features: of all nodes or edges, or of some of them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jmp_train.graphs.messages.frames import nodes_of
from jmp_train.graphs.messages.user_functions import NodeFunction, call_node_function
from jmp_train.graphs.structure import EdgeType, Graph, OurGraph, common_dtype, rows_like

Arrays = Mapping[str, jax.Array]


def with_node_features(
    graph: OurGraph, ntype: str | None, features: Arrays, apply: NodeFunction | None = None
) -> OurGraph:
    """Returns the graph with features of its nodes.

    Args:
      graph: a graph.
      ntype: which nodes; None where there is one type.
      features: arrays [nodes, ...] by name.
      apply: a function of all these nodes, called with the new features, to further ones.
    """
    if isinstance(graph, Graph):
        graph = graph.with_nodes(**features)
    else:
        assert ntype is not None
        graph = graph.with_nodes(ntype, **features)
    if apply is None:
        return graph
    nodes = nodes_of(graph, ntype)
    return with_node_features(graph, ntype, call_node_function(apply, nodes.features, nodes.num_nodes))


def with_edge_features(graph: OurGraph, etype: str | EdgeType | None, features: Arrays) -> OurGraph:
    """Returns the graph with features of its edges.

    Args:
      graph: a graph.
      etype: which edges; None where there is one type.
      features: arrays [edges, ...] by name.
    """
    if isinstance(graph, Graph):
        return graph.with_edges(**features)
    return graph.with_edges(graph.edge_type(etype), **features)


def merged(old: Arrays, new: Arrays, is_written: jax.Array) -> dict[str, jax.Array]:
    """Returns new features in the rows of a mask, and elsewhere the old ones, or 0 where there are none.

    Where the dtypes differ, the result has one that holds both.
    """
    results = {}
    for name, array in new.items():
        start = _start(old, name, array, len(is_written))
        results[name] = jnp.where(rows_like(is_written, array), array.astype(start.dtype), start)
    return results


def placed(old: Arrays, new: Arrays, ids: jax.Array, count: int) -> dict[str, jax.Array]:
    """Returns new features in the rows `ids`, and elsewhere the old ones, or 0 where there are none.

    Where the dtypes differ, the result has one that holds both.
    """
    results = {}
    for name, array in new.items():
        start = _start(old, name, array, count)
        results[name] = start.at[ids].set(array.astype(start.dtype))
    return results


def _start(old: Arrays, name: str, new: jax.Array, count: int) -> jax.Array:
    """Returns the old feature in a dtype that holds it and the new one, or zeros."""
    shape = (count, *new.shape[1:])
    if name not in old:
        return jnp.zeros(shape, new.dtype)
    if old[name].shape != shape:
        raise ValueError(
            f"{name!r} has shape {old[name].shape}, but the new rows have shape {new.shape[1:]}: choose another name"
        )
    return old[name].astype(common_dtype(old[name].dtype, new.dtype))
