"""Transforms of a graph's edges: self-loops, both directions, parallel edges; on the host, as pure functions.

Features of parallel edges are reduced in float64, and rounded once.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.structure import Graph, accepts_jraph, checked_word
from jmp_train.graphs.transforms.edge_lists import EdgeList, edges_on_host, with_edge_list

REDUCTIONS = ("sum", "mean", "max", "min")
_UFUNCS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
CHUNK = 2**18  # elements upcast at a time, which fit into caches


@dataclasses.dataclass(frozen=True)
class Groups:
    """Edges in nonempty groups.

    Attributes:
      rows: int [members], the row of each edge's features, group after group.
      bounds: int [groups + 1], the start of each group in `rows`, and the end of the last one.
    """

    rows: np.ndarray
    bounds: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """Int [groups], the row of each group's first edge."""
        return self.rows[self.bounds[:-1]]

    @property
    def sizes(self) -> np.ndarray:
        """Int [groups], number of edges of each group."""
        return np.diff(self.bounds)

    def reduce(self, name: str, features: np.ndarray, reduction: str) -> np.ndarray:
        """Returns one row for each group [groups, ...], in the dtype of the features.

        Args:
          name: name of the features, for messages.
          features: [edges, ...].
          reduction: "first", or one of `REDUCTIONS`.

        Raises:
          TypeError: sums of booleans, or means of values that are not floating.
          ValueError: a sum of integers goes beyond their dtype.
        """
        if reduction == "first":
            return features[self.firsts]
        _check_can_reduce(name, features.dtype, reduction)
        table = features.reshape(len(features), math.prod(features.shape[1:]))
        reduced = table[self.firsts]
        several = np.flatnonzero(self.sizes > 1)
        groups = self._some(several)
        for first, last in groups._chunks(table.shape[1]):
            results = groups._reduce_chunk(table, reduction, groups.bounds[first : last + 1])
            what = f"the {reduction} of edges[{name!r}]"
            reduced[several[first:last]] = rounded(what, results, features.dtype)
        return reduced.reshape(len(reduced), *features.shape[1:])

    def _reduce_chunk(self, table: np.ndarray, reduction: str, bounds: np.ndarray) -> np.ndarray:
        """Returns one row for each of some groups [some groups, width], upcast."""
        values = table[self.rows[bounds[0] : bounds[-1]]].astype(_upcast(table.dtype))
        with np.errstate(all="ignore"):  # inf - inf
            results = _UFUNCS[reduction].reduceat(values, bounds[:-1] - bounds[0], axis=0)
            return results / np.diff(bounds)[:, None] if reduction == "mean" else results

    def _chunks(self, width: int) -> Iterable[tuple[int, int]]:
        """Yields the first group of each chunk, and the end of the chunk, so that chunks fit into caches."""
        places = np.arange(0, len(self.rows), max(1, CHUNK // max(1, width)))
        boundaries = np.searchsorted(self.bounds, places)
        return itertools.pairwise(np.unique([*boundaries, len(self.bounds) - 1]))

    def _some(self, groups: np.ndarray) -> "Groups":
        """Returns some of the groups, int [some groups], ascending."""
        sizes = np.zeros_like(self.bounds[1:])
        sizes[groups] = self.sizes[groups]
        rows = self.rows[np.repeat(sizes > 0, self.sizes)]
        return Groups(rows, np.append(0, np.cumsum(sizes[groups])))


def groups_of(ids: np.ndarray) -> Groups:
    """Returns edges grouped by an id, in the order of the ids; edges of a group keep their order.

    Args:
      ids: int [edges].
    """
    rows = np.argsort(ids, kind="stable")
    ids = ids[rows]
    is_bound = np.ones(len(ids) + 1, bool)
    is_bound[1:-1] = ids[1:] != ids[:-1]
    return Groups(rows, np.flatnonzero(is_bound))


def rounded(what: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns upcast values in a dtype: floats are rounded once, possibly to infinity; integers are checked.

    Args:
      what: description of the values, for the message.
      values: float64, complex128, or 64-bit integers.
      dtype: dtype of the result.

    Raises:
      ValueError: the dtype is an integer one, and cannot represent the values.
    """
    with np.errstate(all="ignore"):
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            return _to_odd(np.asarray(values, np.float64)).astype(dtype)
        results = np.asarray(values).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) and (results != values).any():
        wrong = np.extract(results != values, values)[0]
        raise ValueError(f"{what} is {wrong}, which does not fit into {dtype}")
    return results


def _to_odd(values: np.ndarray) -> np.ndarray:
    """Returns float64 as the float32 below it in magnitude, with its last bit set if the two differ.

    Rounding that to half precision equals rounding float64 once. NumPy's bfloat16 is rounded by way of float32, and
    so rounds 1 + 2**-8 + 2**-30 down.

    Reference: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008.
    """
    near = values.astype(np.float32)
    bits = near.view(np.int32)
    bits = bits - (np.abs(near.astype(np.float64)) > np.abs(values))
    return (bits | (near != values)).astype(np.int32).view(np.float32)


def _upcast(dtype: Any) -> Any:
    """Returns the dtype of the same kind with the highest precision."""
    kinds = (
        (jnp.floating, np.float64),
        (jnp.complexfloating, np.complex128),
        (jnp.unsignedinteger, np.uint64),
        (jnp.signedinteger, np.int64),
    )
    return next((upcast for kind, upcast in kinds if jnp.issubdtype(dtype, kind)), dtype)


def _check_can_reduce(name: str, dtype: np.dtype, reduction: str) -> None:
    if reduction == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"edges[{name!r}] must be floating to have a mean, got {dtype}")
    if reduction == "sum" and dtype == np.bool_:
        raise TypeError(f"edges[{name!r}] must be numbers to have a sum, got {dtype}")


@accepts_jraph
def add_self_loop(
    graph: Graph,
    fill_value: float | str = 1.0,
    allow_duplicate: bool = False,
    *,
    only_missing: bool = False,
    formats: Sequence[str] | None = None,
) -> Graph:
    """Returns the graph with a self-loop on each node, after its other edges; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      fill_value: the features of the new self-loops: a number, or "sum", "mean", "max" or "min" of the features of
        the edges that enter the node, 0 if there are none.
      allow_duplicate: True to keep existing self-loops; otherwise they are removed first, and ignored
        by `fill_value`.
      only_missing: True to keep existing self-loops, with their features, and add one only to the other nodes.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with features in their old dtypes.

    Raises:
      TypeError: the graph is traced, or has several types; or the mean of integers is requested.
      ValueError: the graph is padded; `fill_value` is unknown, or does not fit a feature's dtype; or `allow_duplicate`
        and `only_missing` are both True.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = add_self_loop(from_edges([0, 1], [1, 1], 2, edges={"w": [0.5, 3.0]}))
      >>> graph.senders.tolist(), graph.receivers.tolist(), graph.edges["w"].tolist()
      ([0, 0, 1], [1, 0, 1], [0.5, 1.0, 1.0])

    Reference: AddSelfLoop of Deep Graph Library, https://www.dgl.ai; with `only_missing`, add_remaining_self_loops of
    PyTorch Geometric, https://pyg.org.
    """
    _check_fill_value(fill_value)
    if allow_duplicate and only_missing:
        raise ValueError("allow_duplicate=True adds a self-loop to each node, only_missing=True not: pass one of them")
    edges = edges_on_host(graph)
    is_new = np.ones(graph.num_nodes, bool)
    if only_missing:
        is_new[edges.senders[edges.is_self_loop]] = False
    elif not allow_duplicate:
        edges = edges.take(~edges.is_self_loop)
    nodes = np.flatnonzero(is_new).astype(edges.senders.dtype)
    features = {}
    for name, rows in edges.features.items():
        self_loops = _self_loop_features(name, rows, edges.receivers, len(is_new), fill_value)
        features[name] = np.concatenate([rows, self_loops[nodes]])
    senders, receivers = (np.append(ids, nodes) for ids in (edges.senders, edges.receivers))
    return with_edge_list(graph, EdgeList(senders, receivers, features), formats)


@accepts_jraph
def remove_self_loop(graph: Graph, *, formats: Sequence[str] | None = None) -> Graph:
    """Returns the graph without self-loops; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with its other edges in their order.

    Raises:
      TypeError: the graph is traced, or has several types.
      ValueError: the graph is padded.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> remove_self_loop(from_edges([0, 1, 1], [1, 1, 0], 2)).senders.tolist()
      [0, 1]
    """
    edges = edges_on_host(graph)
    return with_edge_list(graph, edges.take(~edges.is_self_loop), formats)


@accepts_jraph
def reverse(graph: Graph, *, formats: Sequence[str] | None = None) -> Graph:
    """Returns the graph with every edge reversed; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with its edges in their order, with their features.

    Raises:
      TypeError: the graph is traced, or has several types.
      ValueError: the graph is padded.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = reverse(from_edges([0, 1], [1, 2], 3))
      >>> graph.senders.tolist(), graph.receivers.tolist()
      ([1, 2], [0, 1])
    """
    edges = edges_on_host(graph)
    reversed_ = EdgeList(edges.receivers, edges.senders, edges.features)
    return with_edge_list(graph, reversed_, formats)


@accepts_jraph
def to_simple(
    graph: Graph,
    reduce: str = "first",
    count: str | None = None,
    *,
    formats: Sequence[str] | None = None,
) -> Graph:
    """Returns the graph with parallel edges merged; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      reduce: reduction of their features: "first", "sum", "mean", "max" or "min". Sums and means are
        computed in float64 and rounded once.
      count: the name of a new edge feature, int32 [edges], the number of merged edges; None for none.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with each edge in the place of the first one merged into it.

    Raises:
      TypeError: the graph is traced, or has several types; the mean of integers is requested; or `count` is not a name.
      ValueError: the graph is padded; `reduce` is unknown, or `count` exists already; or a sum of
        integers goes beyond their dtype.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 0], [1, 0, 1], 2, edges={"w": [1.0, 2.0, 3.0]})
      >>> simple = to_simple(graph, "mean", "times")
      >>> simple.senders.tolist(), simple.edges["w"].tolist(), simple.edges["times"].tolist()
      ([0, 1], [2.0, 2.0], [2, 1])
    """
    checked_word("reduce", reduce, ("first", *REDUCTIONS))
    edges = edges_on_host(graph)
    if count is not None and not isinstance(count, str):
        raise TypeError(f"count must be the name of an edge feature or None, got {count!r}")
    if count in edges.features:
        raise ValueError(f"count={count!r} is already an edge feature")
    groups = groups_of(edges.keys)
    features = {name: groups.reduce(name, rows, reduce) for name, rows in edges.features.items()}
    if count is not None:
        features[count] = groups.sizes.astype(np.int32)
    return with_edge_list(graph, _firsts(edges, groups, features), formats)


@accepts_jraph
def to_bidirected(graph: Graph, reduce: str = "first", *, formats: Sequence[str] | None = None) -> Graph:
    """Returns the graph with each edge once in either direction; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      reduce: reduction of the features of an edge together with its parallel and opposite
        edges: "first", "sum", "mean", "max" or "min". With "first", existing edges
        keep their features; otherwise both directions get the same. Sums and means are computed in float64 and
        rounded once.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph with its edges, each in the place of its first one, then the missing ones. Self-loops stay single.

    Raises:
      TypeError: the graph is traced, or has several types; or the mean of integers is requested.
      ValueError: the graph is padded; `reduce` is unknown; or a sum of integers goes beyond their dtype.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 1], [1, 0, 2], 3, edges={"w": [1.0, 2.0, 4.0]})
      >>> both = to_bidirected(graph, "sum")
      >>> both.senders.tolist(), both.receivers.tolist(), both.edges["w"].tolist()
      ([0, 1, 1, 2], [1, 0, 2, 1], [3.0, 3.0, 4.0, 4.0])
    """
    checked_word("reduce", reduce, ("first", *REDUCTIONS))
    edges = edges_on_host(graph)
    places = np.arange(len(edges.senders))
    reversed_ = places[~edges.is_self_loop]
    places = np.concatenate([places, reversed_])  # the edge whose features each edge of `both` carries
    both = EdgeList(
        np.concatenate([edges.senders, edges.receivers[reversed_]]),
        np.concatenate([edges.receivers, edges.senders[reversed_]]),
        {},
    )
    groups = groups_of(both.keys)
    carried = Groups(places[groups.rows], groups.bounds)
    features = {name: carried.reduce(name, rows, reduce) for name, rows in edges.features.items()}
    return with_edge_list(graph, _firsts(both, groups, features), formats)


def _firsts(edges: EdgeList, groups: Groups, features: Mapping[str, np.ndarray]) -> EdgeList:
    """Returns the first edge of each group, in the order of the edges, with the features of the groups."""
    coalesced = EdgeList(edges.senders[groups.firsts], edges.receivers[groups.firsts], features)
    group_at = np.full(len(edges.senders), -1)
    group_at[groups.firsts] = np.arange(len(groups.firsts))
    return coalesced.take(group_at[group_at >= 0])


def _self_loop_features(
    name: str, rows: np.ndarray, receivers: np.ndarray, num_nodes: int, fill_value: float | str
) -> np.ndarray:
    """Returns the features of the self-loops [nodes, ...], in the dtype of the other edges' rows."""
    shape = (num_nodes, *rows.shape[1:])
    if isinstance(fill_value, str):
        groups, self_loops = groups_of(receivers), np.zeros(shape, rows.dtype)
        self_loops[receivers[groups.firsts]] = groups.reduce(name, rows, fill_value)
        return self_loops
    filled = rounded(f"fill_value for edges[{name!r}]", np.asarray(fill_value), rows.dtype)
    if np.isfinite(fill_value) and not np.isfinite(filled):
        raise ValueError(f"fill_value for edges[{name!r}] is {fill_value}, which does not fit into {rows.dtype}")
    return np.full(shape, filled, rows.dtype)


def _check_fill_value(fill_value: float | str) -> None:
    known = ", ".join(REDUCTIONS)
    if isinstance(fill_value, str):
        if fill_value not in REDUCTIONS:
            raise ValueError(f"fill_value={fill_value!r} must be a number or one of {known}")
        return
    kinds = (jnp.floating, jnp.integer, np.bool_)
    dtype = np.asarray(fill_value).dtype
    if np.ndim(fill_value) or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        kind = type(fill_value).__name__
        raise TypeError(f"fill_value must be a number or one of {known}, got {kind}")
