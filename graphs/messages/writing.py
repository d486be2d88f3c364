"""What message passing functions have in common: graphs of either make, places, and results written back."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from jmp_train.graphs.accumulation import rows_like
from jmp_train.graphs.block import Block
from jmp_train.graphs.connections import Connections, is_traced
from jmp_train.graphs.frames import nodes_of
from jmp_train.graphs.graph import Graph, from_jraph, to_jraph
from jmp_train.graphs.hetero_graph import EdgeType, HeteroGraph
from jmp_train.graphs.storage import common_dtype
from jmp_train.graphs.user_functions import NodeFunction, apply_to_nodes
from jmp_train.policies.paths import named_leaves, path_name

Params = ParamSpec("Params")
AnyGraph = TypeVar("AnyGraph", Graph, HeteroGraph, jraph.GraphsTuple)
OurGraph = TypeVar("OurGraph", Graph, HeteroGraph)
Arrays = dict[str, jax.Array]


def accepts_jraph(
    function: Callable[Concatenate[Any, Params], Any],
) -> Callable[Concatenate[AnyGraph, Params], AnyGraph]:
    """Returns the function that takes a GraphsTuple too, and then returns one."""

    @functools.wraps(function)
    def on_any_graph(graph: Any, /, *args: Params.args, **kwargs: Params.kwargs) -> Any:
        if isinstance(graph, jraph.GraphsTuple):
            found = to_jraph(function(from_jraph(graph), *args, **kwargs))
            return found._replace(
                nodes=_nested_like(graph.nodes, found.nodes),
                edges=_nested_like(graph.edges, found.edges),
            )
        if not isinstance(graph, Graph | HeteroGraph):
            kind = type(graph).__name__
            raise TypeError(
                f"graph must be a Graph, a HeteroGraph or a jraph.GraphsTuple, got {kind}"
                + ("; block.graph(...) makes one of it" if isinstance(graph, Block) else "")
            )
        return function(graph, *args, **kwargs)

    return on_any_graph


def _nested_like(old: Any, features: Any) -> Any:
    """Returns features nested as in old ones, those that are new on top; by path where those are no mapping."""
    paths = {path for path, _ in named_leaves(old)}
    if not isinstance(old, Mapping) or not paths <= features.keys():
        return features
    nested = jax.tree_util.tree_map_with_path(lambda path, _: features[path_name(path)], old)
    return {**nested, **{name: x for name, x in features.items() if name not in paths}}


def with_node_features(graph: OurGraph, ntype: str | None, features: Arrays) -> OurGraph:
    """Returns the graph with these features of its nodes."""
    if isinstance(graph, Graph):
        return graph.with_nodes(**features)
    assert ntype is not None
    return graph.with_nodes(ntype, **features)


def with_edge_features(graph: OurGraph, etype: str | EdgeType | None, features: Arrays) -> OurGraph:
    """Returns the graph with these features of its edges."""
    if isinstance(graph, Graph):
        return graph.with_edges(**features)
    return graph.with_edges(graph.edge_type(etype), **features)


def applied(graph: OurGraph, function: NodeFunction | None, ntype: str | None) -> OurGraph:
    """Returns the graph after a function of all its nodes, if there is one."""
    if function is None:
        return graph
    return with_node_features(graph, ntype, apply_to_nodes(function, *nodes_of(graph, ntype)))


def merged(old: Mapping[str, jax.Array], new: Arrays, is_written: jax.Array) -> Arrays:
    """Returns new features in the rows of a mask, and elsewhere the old ones, or 0 where there are none.

    Where the dtypes differ, the result has one that holds both.
    """
    results = {}
    for name, array in new.items():
        start = _start(old, name, array, len(is_written))
        results[name] = jnp.where(rows_like(is_written, array), array.astype(start.dtype), start)
    return results


def placed(old: Mapping[str, jax.Array], new: Arrays, ids: jax.Array, count: int) -> Arrays:
    """Returns new features in the rows `ids`, and elsewhere the old ones, or 0 where there are none.

    Where the dtypes differ, the result has one that holds both.
    """
    results = {}
    for name, array in new.items():
        start = _start(old, name, array, count)
        results[name] = start.at[ids].set(array.astype(start.dtype))
    return results


def checked_ids(name: str, ids: Any, count: int) -> jax.Array:
    """Returns the places of nodes or edges, checked where they are known.

    Args:
      name: "nodes" or "edges", for messages.
      ids: int [places], or one place.
      count: how many there are.

    Raises:
      TypeError: they are no integers.
      ValueError: one does not exist.
    """
    array = jnp.atleast_1d(jnp.asarray(ids))
    if array.size and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    if not is_traced(array) and array.size:
        known = np.atleast_1d(np.asarray(ids))
        wrong = (known < 0) | (known >= count)
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(f"{name}[{place}] = {known[place]} is none of the {count} {name}")
    return array.astype(jnp.int32)


def edge_ids(connections: Connections, edges: Any) -> jax.Array:
    """Returns the places of edges, given as such or by their ends.

    Args:
      connections: who sends to whom.
      edges: int [some edges], or a pair of senders and receivers; between these, all edges are meant.

    Raises:
      TypeError: they are no integers, or ends are looked up under jit.
      ValueError: an edge does not exist.
    """
    if not isinstance(edges, tuple):
        return checked_ids("edges", edges, connections.targets.num_edges)
    if len(edges) != 2:
        raise ValueError(f"edges must be places or (senders, receivers), got {len(edges)} arrays")
    sources, targets = connections.sources, connections.targets
    senders, receivers = edges
    ends = [
        checked_ids("edges", senders, sources.num_segments),
        checked_ids("edges", receivers, targets.num_segments),
    ]
    if is_traced(*ends, sources.ids):
        raise TypeError("edges are looked up by their ends outside of jit only: pass their places")
    wanted, all_edges = (
        np.asarray(end[0], np.int64) * targets.num_segments + np.asarray(end[1])
        for end in (ends, (sources.ids, targets.ids))
    )
    missing = ~np.isin(wanted, all_edges)
    if missing.any():
        sender, receiver = (int(end[missing.argmax()]) for end in ends)
        raise ValueError(f"edges: there is none from {sender} to {receiver}")
    return jnp.asarray(np.flatnonzero(np.isin(all_edges, wanted)), jnp.int32)


def _start(old: Mapping[str, jax.Array], name: str, new: jax.Array, count: int) -> jax.Array:
    """Returns the old feature in a dtype that holds it and the new one, or zeros."""
    shape = (count, *new.shape[1:])
    if name not in old:
        return jnp.zeros(shape, new.dtype)
    if old[name].shape != shape:
        raise ValueError(
            f"{name!r} has shape {old[name].shape}, and some of its rows would become {new.shape[1:]}: "
            "choose another name"
        )
    return old[name].astype(common_dtype(old[name].dtype, new.dtype))
