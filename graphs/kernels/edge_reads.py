"""Reads of a chunk's edges; their gradients are added in place.

A scan over the chunks carries a sink per array. A sink is never read; the gradients of the rows that were read are
added to its gradient. The gradient of a scan's constant would be an array as long as the constant for each chunk, which
is too large for edge features.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import CPU_ELEMENTS, at, joined, pvary_alike
from jmp_train.graphs.kernels.edge_terms import Inputs
from jmp_train.graphs.structure import CSR, CSRAndCSC, upcast

NONE = jnp.iinfo(jnp.int32).max
NO_SINKS = Inputs({}, {}, {})
MOST_CHUNKS = 256  # where they do not fit into the caches anyway


class EdgeIds(NamedTuple):
    """Int32 [edges]: the ends of edges and their ids; None if edges have no own places."""

    senders: jax.Array
    receivers: jax.Array
    edges: jax.Array | None


class EdgeBlocks(NamedTuple):
    """Int32 [blocks], as in `CSR`."""

    starts: jax.Array
    counts: jax.Array
    nodes: jax.Array
    rows: jax.Array


def in_chunks(neighbors: CSR, elements: int) -> EdgeBlocks:
    """Returns the blocks as arrays [chunks, blocks], padded by blocks without edges, node and row.

    Args:
      neighbors: the edges.
      elements: largest number of elements that an edge reads or computes.
    """
    in_cache = CPU_ELEMENTS // max(1, elements * neighbors.width)
    size = max(1, in_cache, -(-neighbors.num_blocks // MOST_CHUNKS))
    size = min(size, neighbors.num_blocks)

    def parts(array: jax.Array, fill: int = 0) -> jax.Array:
        return jnp.pad(array, (0, -len(array) % size), constant_values=fill).reshape(-1, size)

    nodes, rows = parts(neighbors.nodes, neighbors.num_nodes), parts(neighbors.rows, neighbors.num_rows)
    return EdgeBlocks(parts(neighbors.starts), parts(neighbors.counts), nodes, rows)


def is_edge_of(neighbors: CSR, chunk: EdgeBlocks) -> jax.Array:
    """Returns bool [blocks, width], False in empty places."""
    return jnp.arange(neighbors.width, dtype=jnp.int32) < chunk.counts[:, None]


def sinks_of(edges: CSRAndCSC, inputs: Inputs) -> Inputs:
    """Returns the sinks of arrays with gradients; those of nodes have one float32 row per 1,024 edges."""

    def of(table: Mapping[str, jax.Array], make: Callable[[jax.Array], jax.Array]) -> dict[str, jax.Array]:
        return {name: make(x) for name, x in table.items() if jnp.issubdtype(x.dtype, jnp.inexact)}

    return Inputs(
        of(inputs.edge, lambda x: x),
        of(inputs.senders, lambda x: _of_rows(edges.by_source, upcast(x)) if _has_slots(edges) else upcast(x)),
        of(inputs.receivers, lambda x: _of_rows(edges.by_target, upcast(x))),
    )


def _has_slots(edges: CSRAndCSC) -> bool:
    """Returns whether each edge's row of the senders' sums is known."""
    return edges.by_source.slots is not None and edges.by_target.edges is not None


def read_all(
    edges: CSRAndCSC, chunk: EdgeBlocks, tables: Inputs, sinks: Inputs
) -> tuple[tuple[Inputs, EdgeIds], Inputs]:
    """Returns the rows [edges, ...] that a chunk's edges read, their ids, and the sinks.

    Empty places repeat the last edge of their block, or of the first block with edges. So functions and their gradients
    need not be finite for missing edges.

    Args:
      edges: the edges.
      chunk: some of their blocks.
      tables: the arrays to read, by name; the reads give them no gradients.
      sinks: from `sinks_of`; arrays without a sink have no gradient.
    """
    neighbors, source = edges.by_target, edges.by_source
    is_empty, first = chunk.counts == 0, jnp.argmax(neighbors.counts > 0)
    starts, counts, nodes = (
        jnp.where(is_empty, whole[first], of_chunk)
        for whole, of_chunk in (
            (neighbors.starts, chunk.starts),
            (neighbors.counts, chunk.counts),
            (neighbors.nodes, chunk.nodes),
        )
    )
    last = jnp.maximum(counts - 1, 0)[:, None]
    positions = (starts[:, None] + jnp.minimum(jnp.arange(neighbors.width, dtype=jnp.int32), last)).ravel()
    is_edge = is_edge_of(neighbors, chunk).ravel()
    senders = sending = at(neighbors.others, positions)
    ids = None if neighbors.edges is None else at(neighbors.edges, positions)
    if _has_slots(edges):
        assert source.slots is not None and ids is not None
        sending = at(source.rows, at(source.slots, ids) // source.width)

    def where_edge(places: jax.Array | None) -> jax.Array | None:
        return None if places is None else jnp.where(is_edge, places, NONE)

    of_edges, of_edge_sinks = _read_rows(False, tables.edge, sinks.edge, ids, where_edge(ids))
    sent, sent_sinks = _read_rows(not _has_slots(edges), tables.senders, sinks.senders, senders, where_edge(sending))
    here, here_sinks = _read_rows(False, tables.receivers, sinks.receivers, nodes, chunk.rows)
    here = {name: jnp.repeat(x, neighbors.width, axis=0) for name, x in here.items()}
    which = EdgeIds(senders, jnp.repeat(nodes, neighbors.width), ids)
    return (Inputs(of_edges, sent, here), which), Inputs(of_edge_sinks, sent_sinks, here_sinks)


def _read_rows(
    afresh: bool, tables: Mapping[str, jax.Array], sinks: Mapping[str, jax.Array], places: Any, into: Any
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns the rows of arrays at some places, and the sinks; see `_read`."""
    found: dict[str, Any] = {name: _read(afresh, tables[name], sink, places, into) for name, sink in sinks.items()}
    rows = {name: found[name][0] if name in found else at(table, places) for name, table in tables.items()}
    return rows, {name: sink for name, (_, sink) in found.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(
    afresh: bool, table: jax.Array, sink: jax.Array, places: jax.Array, into: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns rows of an array and its sink, which collects the gradient of the rows.

    Args:
      afresh: True to add them separately first, so that long sums are split.
      table: the array, which gets no gradient.
      sink: [rows, ...].
      places: int32 [edges], the rows of the table.
      into: int32 [edges], the rows of the sink; beyond the last one for edges that add nothing.
    """
    del afresh, into
    return at(table, places), sink


def _read_forward(afresh: bool, *arguments: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    # An argument itself would be mistaken for another one by jax, in second derivatives within shard_map.
    return _read(afresh, *arguments), arguments[3] + 0


def _read_backward(
    afresh: bool, into: jax.Array, gradients: tuple[jax.Array, jax.Array]
) -> tuple[None, jax.Array, None, None]:
    rows, sink = gradients
    start = jnp.zeros_like(sink) if afresh else sink
    total = start.at[into].add(rows.astype(sink.dtype), mode="drop")
    return None, sink + total if afresh else total, None, None


_read.defvjp(_read_forward, _read_backward)


@jax.custom_vjp
def pass_on(array: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an array and its sink, which collects the array's gradient in at least float32."""
    return array, sink


pass_on.defvjp(
    lambda array, sink: (pass_on(array, sink), None),  # or second derivatives were 0
    lambda _, gradients: (None, gradients[1] + gradients[0].astype(gradients[1].dtype)),
)


@jax.custom_vjp
def _of_rows(neighbors: CSR, nodes: jax.Array) -> jax.Array:
    """Returns a sink [rows, ...] of an array [nodes, ...]: each node has some rows, which are added last."""
    rows = jnp.zeros((neighbors.num_rows, *nodes.shape[1:]), nodes.dtype)
    return pvary_alike((rows, nodes))[0]


_of_rows.defvjp(
    lambda neighbors, nodes: (_of_rows(neighbors, nodes), neighbors),
    lambda neighbors, gradient: (None, joined(neighbors, gradient)[: neighbors.num_nodes]),
)
