"""Conversion from and to jraph's graphs, and functions that accept either."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from jmp_train.graphs.structure.adjacency import (
    check_formats,
    checked_ends,
    make_adjacency_checked,
    make_adjacency_traced,
)
from jmp_train.graphs.structure.block import Block
from jmp_train.graphs.structure.counts import as_counts, check_int32
from jmp_train.graphs.structure.edge_order import as_int32_ids
from jmp_train.graphs.structure.feature_arrays import on_device
from jmp_train.graphs.structure.graph import Graph, checked_features
from jmp_train.graphs.structure.hetero_graph import HeteroGraph
from jmp_train.policies.dtype_policies import check_narrowed
from jmp_train.policies.pytrees import has_tracers, named_leaves, path_name

Params = ParamSpec("Params")
AnyGraph = TypeVar("AnyGraph", Graph, HeteroGraph, jraph.GraphsTuple)
OurGraph = TypeVar("OurGraph", Graph, HeteroGraph)
AnyBatch = Graph | jraph.GraphsTuple


def from_jraph(graphs: jraph.GraphsTuple, *, padded: bool = False, formats: Sequence[str] = ("coo",)) -> Graph:
    """Converts jraph's graphs to a graph. Under jit, nothing is checked, and the device computes the indices.

    Args:
      graphs: `nodes` and `edges` are dictionaries of arrays, any other trees of them, or None. A single array
        becomes the feature "x", and an array in a tree gets its path as name, such as "a/b".
      padded: whether `jraph.pad_with_graphs` padded it.
      formats: see `from_edges`; under jit only "coo".

    Returns:
      The graph.

    Raises:
      TypeError: ids are not integers, or a feature is not an array; or formats are requested that jit cannot create.
      ValueError: see `from_edges`, also for globals; or senders or receivers are missing, or counts do not add up.

    Example:
      >>> import jraph, numpy as np
      >>> graphs = jraph.GraphsTuple(
      ...     nodes={"h": np.ones((3, 2))}, edges=None, senders=np.array([0, 1]),
      ...     receivers=np.array([1, 2]), n_node=np.array([3]), n_edge=np.array([2]), globals=None)
      >>> from_jraph(graphs).num_nodes
      3
    """
    if graphs.senders is None or graphs.receivers is None:
        raise ValueError("senders and receivers must be arrays, got None")
    ends: tuple[Any, Any] = _as_ids(graphs.senders), _as_ids(graphs.receivers)
    nodes, edges = _as_features("nodes", graphs.nodes), _as_features("edges", graphs.edges)
    check_narrowed(graphs.globals, "globals")
    traced = has_tracers((*ends, graphs.n_node, graphs.n_edge))
    totals = {} if traced else _totals(graphs)
    n_node, n_edge = on_device(graphs.n_node, np.int32), on_device(graphs.n_edge, np.int32)
    check_formats(formats)
    if traced and {*formats} - {"coo"}:
        raise TypeError(f"formats={tuple(formats)} can only be made outside of jit; under jit only 'coo' is supported")
    if nodes:
        count = next(iter(nodes.values())).shape[0]
    elif has_tracers(n_node):
        raise TypeError("n_node is traced: under jit the graph needs a node feature, which gives the number of nodes")
    else:
        count = int(np.sum(graphs.n_node)) if traced else totals["n_node"]
        check_int32("n_node adds up to", count)
    num_edges = np.shape(ends[1])[0]
    if traced:
        senders, receivers = (as_int32_ids(*end) for end in zip(("senders", "receivers"), ends, strict=True))
        if padded:
            is_kept = is_real(n_node, n_edge, num_edges)
            senders, receivers = (jnp.where(is_kept, ids, count) for ids in (senders, receivers))
        adjacency = make_adjacency_traced(senders, receivers, count, count)
    else:
        ends = checked_ends(*ends, count, count)
        for name, total in (("n_node", count), ("n_edge", num_edges)):
            if totals[name] != total:
                raise ValueError(f"{name} adds up to {totals[name]}, but there are {total}")
        if padded:
            is_kept = is_real(np.asarray(n_node), np.asarray(n_edge), num_edges, np)
            senders, receivers = (np.where(is_kept, ids.astype(np.int64), count) for ids in ends)
            ends = senders, receivers
        adjacency = make_adjacency_checked(*ends, count, count, formats=formats, is_fixed=padded)
    return Graph(
        nodes=checked_features("nodes", nodes, count),
        edges=checked_features("edges", edges, num_edges),
        connections=adjacency,
        n_node=n_node,
        n_edge=n_edge,
        globals=graphs.globals,
        is_padded=padded,
    )


def batch_of(graph: AnyBatch) -> Graph:
    """Returns a graph of ours or jraph's as ours; raises TypeError for other arguments."""
    if isinstance(graph, jraph.GraphsTuple):
        return from_jraph(graph)
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a Graph or a jraph.GraphsTuple, got {type(graph).__name__}")
    return graph


def to_jraph(graph: Graph) -> jraph.GraphsTuple:
    """Converts a graph to jraph's, with padding edges as self-loops on the first padding node.

    Args:
      graph: a graph.

    Returns:
      A GraphsTuple with dictionaries of features.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> to_jraph(from_edges([0, 1], [1, 0], 2)).senders.tolist()
      [0, 1]
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a Graph, got {type(graph).__name__}")
    senders, receivers = graph.senders, graph.receivers
    if graph.is_padded:
        first = graph.num_nodes - graph.n_node[first_padding(graph.n_node)]
        senders, receivers = (jnp.where(ids < graph.num_nodes, ids, first) for ids in (senders, receivers))
    return jraph.GraphsTuple(
        nodes=dict(graph.nodes),
        edges=dict(graph.edges),
        senders=senders,
        receivers=receivers,
        n_node=graph.n_node,
        n_edge=graph.n_edge,
        globals=graph.globals,
    )


def accepts_jraph(
    function: Callable[Concatenate[Any, Params], Any],
) -> Callable[Concatenate[AnyGraph, Params], AnyGraph]:
    """Returns a function that also takes a GraphsTuple, and then returns one."""

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


def first_padding(n_node: Any) -> Any:
    """Returns the index of the graph with all padding, the last one that has nodes, of an array of jax or NumPy."""
    graphs = n_node.shape[0]
    return graphs - 1 - (n_node[::-1] > 0).argmax()


def is_real(n_node: Any, counts: Any, total: int, xp: Any = jnp) -> Any:
    """Returns which of `total` nodes or edges of padded graphs are real, as an array of jax or NumPy.

    Args:
      n_node: numbers of nodes.
      counts: numbers of nodes, or of edges.
      total: their sum.
      xp: the library.
    """
    return xp.arange(total, dtype=xp.int32) < total - counts[first_padding(n_node)]


def _nested_like(old: Any, features: Any) -> Any:
    """Returns features nested like old ones, with new ones at the top; by path if the old ones are not a mapping."""
    paths = {path for path, _ in named_leaves(old)}
    if not isinstance(old, Mapping) or not paths <= features.keys():
        return features
    nested = jax.tree_util.tree_map_with_path(lambda path, _: features[path_name(path)], old)
    return {**nested, **{name: x for name, x in features.items() if name not in paths}}


def _totals(graphs: jraph.GraphsTuple) -> dict[str, int]:
    """Returns the total numbers of nodes and edges of a batch, which may be beyond int32."""
    counts = {"n_node": graphs.n_node, "n_edge": graphs.n_edge}
    return {name: int(as_counts(name, each).sum()) for name, each in counts.items()}


def _as_ids(ids: Any) -> Any:
    """Returns ids; those of no edges, which are floats in `jnp.array([])`, as integers."""
    return np.zeros(0, np.int32) if np.shape(ids) == (0,) else ids


def _as_features(name: str, features: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a tree by their paths, "x" for a single array."""
    arrays = {}
    for path, feature in named_leaves(features):
        key = path or "x"
        if not isinstance(feature, np.ndarray | jax.Array):
            kind = type(feature).__name__
            raise TypeError(f"{name}[{key!r}] must be an array, got {kind}")
        if key in arrays:
            raise ValueError(f"{name} has two features with the path {key!r}")
        arrays[key] = feature
    check_narrowed(arrays, name)
    return {key: on_device(feature) for key, feature in arrays.items()}
