"""Random dropping of edges, nodes and features, as masks: also under jit, without a retrace for another key."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from jmp_train.graphs.kernels import edge_dropout
from jmp_train.graphs.readout import Part, rows_of
from jmp_train.graphs.structure import CSR, Adjacency, Block, CSRAndCSC, Graph, HeteroGraph

# Of the ids of edges, None if they have no places of their own, and of their senders and receivers.
IsKept = Callable[[jax.Array | None, jax.Array, jax.Array], jax.Array]
Dropped = TypeVar("Dropped", Graph, HeteroGraph, Block)


def drop_edges(graph: Dropped, rate: float, key: jax.Array) -> Dropped:
    """Returns the graph in which random edges do not count, as if they were removed; also under jit.

    Like padding edges, dropped edges keep their places and features, and no message, degree, mean, softmax, layer or
    readout sees them.

    Args:
      graph: a Graph, a HeteroGraph or a Block, padded or not.
      rate: the fraction of edges to drop, from 0 to 1, a Python number. Each edge is dropped independently; without
        the format "coo", parallel edges are dropped together.
      key: a random key; a fresh one drops other edges, without a retrace.

    Returns:
      The graph. It has no mailboxes, and `edge_mask` is False for dropped edges.

    Raises:
      TypeError: the graph is of another kind, or the rate is not a number.
      ValueError: the rate is not between 0 and 1.

    Example:
      >>> from jmp_train.graphs import edge_mask, from_edges
      >>> graph = drop_edges(from_edges([0, 1, 2, 3], [1, 2, 3, 0], 4), 0.5, jax.random.key(0))
      >>> graph.num_edges, graph.in_degrees.sum().item() == edge_mask(graph).sum().item()
      (4, True)

    Reference: Rong et al., DropEdge, https://arxiv.org/abs/1907.10903; DropEdge of Deep Graph Library,
    https://www.dgl.ai.
    """
    _check_rate(rate)
    if isinstance(graph, HeteroGraph):
        keys = dict(zip(graph.edge_types, jax.random.split(key, max(1, len(graph.edge_types))), strict=False))
        connections = {kind: _dropped(graph.connections[kind], rate, keys[kind]) for kind in graph.edge_types}
        return dataclasses.replace(graph, connections=FrozenDict(connections))
    if not isinstance(graph, Graph | Block):
        raise TypeError(_wrong_kind("a Graph, a HeteroGraph or a Block", graph))
    return dataclasses.replace(graph, connections=_dropped(graph.connections, rate, key))


def drop_nodes(graph: Graph, rate: float, key: jax.Array) -> Graph:
    """Returns the graph in which random nodes, and the edges at them, do not count; also under jit.

    Like padding nodes, dropped nodes keep their places and features, and no other node, readout or norm sees them.
    Their own results have no meaning: leave them out of losses and batch norms by `node_mask`.

    Args:
      graph: a Graph, padded or not.
      rate: the fraction of nodes to drop, from 0 to 1, a Python number. Each node is dropped independently.
      key: a random key; a fresh one drops other nodes, without a retrace.

    Returns:
      The graph. It has no mailboxes, and `node_mask` and `edge_mask` are False for dropped nodes and edges.

    Raises:
      TypeError: the graph is of another kind, or the rate is not a number.
      ValueError: the rate is not between 0 and 1.

    Example:
      >>> from jmp_train.graphs import from_edges, node_mask
      >>> graph = drop_nodes(from_edges([0, 1, 2, 3], [1, 2, 3, 0], 4), 0.5, jax.random.key(1))
      >>> mask = node_mask(graph)
      >>> (graph.in_degrees[~mask] == 0).all().item(), graph.num_nodes
      (True, 4)

    Reference: You et al., Graph Contrastive Learning with Augmentations, https://arxiv.org/abs/2010.13902; DropNode of
    Deep Graph Library, https://www.dgl.ai.
    """
    _check_rate(rate)
    if not isinstance(graph, Graph):
        raise TypeError(_wrong_kind("a Graph", graph))
    is_kept = _is_kept(rate, key, jnp.arange(graph.num_nodes, dtype=jnp.int32))

    def has_both_ends(_: jax.Array | None, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        of_senders, of_receivers = (is_kept.at[x].get(mode="fill", fill_value=False) for x in (senders, receivers))
        return of_senders & of_receivers

    kept = is_kept if graph.kept_nodes is None else graph.kept_nodes & is_kept
    return dataclasses.replace(graph, connections=where_edges(graph.connections, has_both_ends), kept_nodes=kept)


def drop_features(
    graph: Graph, rate: float, key: jax.Array, nodes: Sequence[str] | None = None, edges: Sequence[str] = ()
) -> Graph:
    """Returns the graph with random columns of features set to 0, the same for all nodes; also under jit.

    Args:
      graph: a Graph, padded or not.
      rate: the fraction of columns to set to 0, from 0 to 1, a Python number. Others are not scaled.
      key: a random key; a fresh one drops other columns, without a retrace.
      nodes: names of node features; None for all floating ones.
      edges: names of edge features.

    Returns:
      The graph; features keep their dtypes.

    Raises:
      TypeError: the graph is of another kind, or the rate is not a number.
      ValueError: the rate is not between 0 and 1, or there is no such feature.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0], [1], 2, nodes={"h": jnp.ones((2, 8))})
      >>> h = drop_features(graph, 0.5, jax.random.key(0)).nodes["h"]
      >>> (h[0] == h[1]).all().item(), 0 < h[0].sum().item() < 8
      (True, True)

    Reference: FeatMask of Deep Graph Library, https://www.dgl.ai.
    """
    _check_rate(rate)
    if not isinstance(graph, Graph):
        raise TypeError(_wrong_kind("a Graph", graph))
    if nodes is None:
        nodes = [name for name, rows in graph.nodes.items() if jnp.issubdtype(rows.dtype, jnp.floating)]
    of_nodes, of_edges = jax.random.split(key)
    return dataclasses.replace(
        graph,
        nodes=FrozenDict({**graph.nodes, **_masked(graph, "nodes", nodes, rate, of_nodes)}),
        edges=FrozenDict({**graph.edges, **_masked(graph, "edges", edges, rate, of_edges)}),
    )


def _dropped(adjacency: Adjacency, rate: float, key: jax.Array) -> Adjacency:
    def is_kept(ids: jax.Array | None, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return _is_kept(rate, key, senders, receivers) if ids is None else _is_kept(rate, key, ids)

    return where_edges(adjacency, is_kept)


def _is_kept(rate: float, key: jax.Array, first: jax.Array, second: jax.Array | None = None) -> jax.Array:
    """Returns a random boolean for each of different integers, or pairs of them, int [...]."""
    if rate in (0, 1):
        return jnp.full(first.shape, rate == 0)
    dropout = edge_dropout(float(rate), key, 1)
    assert dropout is not None  # the rate is not 0
    return dropout.of_edges(first, second)[..., 0] > 0


def _masked(graph: Graph, part: Part, names: Sequence[str], rate: float, key: jax.Array) -> dict[str, jax.Array]:
    masked = {}
    for name, one in zip(names, jax.random.split(key, max(1, len(names))), strict=False):
        rows = rows_of(graph, part, name)
        columns = jnp.arange(rows[:1].size, dtype=jnp.int32).reshape(1, *rows.shape[1:])
        masked[name] = jnp.where(_is_kept(rate, one, columns), rows, jnp.zeros_like(rows))
    return masked


def _check_rate(rate: object) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"rate must be a Python number, got {type(rate).__name__}")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate} must be between 0 and 1")


def _wrong_kind(wanted: str, graph: object) -> str:
    return f"graph must be {wanted}, got {type(graph).__name__}; convert a GraphsTuple with from_jraph"


def where_edges(adjacency: Adjacency, is_kept: IsKept) -> Adjacency:
    """Returns the adjacency in which only the edges for which a function is True count.

    Others are like padding edges. There are no mailboxes, whose shapes depend on the degrees.

    Args:
      adjacency: the edges.
      is_kept: `is_kept(ids, senders, receivers)` returns a mask, bool [edges]. All three are int [edges]; the ids are
        None if edges have no places of their own. Ends out of range belong to edges that do not count anyway.
    """
    ends, mask = adjacency.ends, None
    if ends is not None:
        senders, receivers = ends
        mask = is_kept(jnp.arange(receivers.num_edges, dtype=jnp.int32), senders.ids, receivers.ids)
        ends = senders.where(mask), receivers.where(mask)
    neighbors = adjacency.neighbors
    if neighbors is not None:
        sorted_ = neighbors.by_source, neighbors.by_target
        of_source, of_target = (_mask_of(each, mask, is_kept, i == 0) for i, each in enumerate(sorted_))
        neighbors = CSRAndCSC(_where(sorted_[0], of_source), _where(sorted_[1], of_target))
    return Adjacency(ends, neighbors)


def _mask_of(edges: CSR, mask: jax.Array | None, is_kept: IsKept, nodes_are_senders: bool) -> jax.Array:
    """Returns whether each of the sorted edges is kept, bool [counted edges]."""
    if mask is not None:
        return mask.at[edges.edge_ids].get(mode="promise_in_bounds")
    nodes = jnp.arange(edges.num_nodes, dtype=jnp.int32)
    nodes = jnp.repeat(nodes, edges.degrees, total_repeat_length=edges.others.shape[0])
    return is_kept(None, *((nodes, edges.others) if nodes_are_senders else (edges.others, nodes)))


def _where(edges: CSR, mask: jax.Array) -> CSR:
    """Returns sorted edges where only those of a mask count: they move up, and their blocks stay."""
    count = edges.others.shape[0]
    ends = jnp.cumsum(edges.degrees)
    is_kept = mask & (jnp.arange(count, dtype=jnp.int32) < edges.degrees.sum(dtype=jnp.int32))
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_kept, dtype=jnp.int32)])
    places = jnp.where(is_kept, before[:-1], count)

    def moved(values: jax.Array | None) -> jax.Array | None:
        return None if values is None else jnp.zeros_like(values).at[places].set(values, mode="drop")

    others, starts = moved(edges.others), before[edges.starts]
    assert others is not None
    slots = edges.slots
    if slots is not None:
        blocks, place = jnp.divmod(jnp.maximum(slots, 0), edges.width)
        position = edges.starts.at[blocks].get(mode="fill", fill_value=0) + place
        is_left = (slots >= 0) & is_kept.at[position].get(mode="fill", fill_value=False)
        place = before[position] - starts.at[blocks].get(mode="fill", fill_value=0)
        slots = jnp.where(is_left, blocks * edges.width + place, -1)
    return dataclasses.replace(
        edges,
        others=others,
        edges=moved(edges.edges),
        slots=slots,
        starts=starts,
        counts=before[edges.starts + edges.counts] - starts,
        degrees=before[ends] - before[ends - edges.degrees],
    )
