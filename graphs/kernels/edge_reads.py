"""Reads of a chunk's edges, whose gradients are added to the arrays that were read, in place.

A scan over the chunks carries a sink of each array: it is never looked at, but the gradient of a row that was read is
added to the sink's. The gradient of a scan's constant would be an array as long as the constant for each chunk, which
is what edges' features cannot afford.
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
    """Int32 [edges]: the ends of edges, and which edges they are, None where edges have no places of their own."""

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
    """Returns the blocks as arrays [chunks, blocks], filled up with blocks without edges of no node and no row.

    Args:
      neighbors: the edges.
      elements: of how many what an edge reads or makes is at most.
    """
    in_cache = CPU_ELEMENTS // max(1, elements * neighbors.width)
    size = max(1, in_cache, -(-neighbors.num_blocks // MOST_CHUNKS))
    size = min(size, neighbors.num_blocks)

    def parts(array: jax.Array, fill: int = 0) -> jax.Array:
        return jnp.pad(array, (0, -len(array) % size), constant_values=fill).reshape(-1, size)

    nodes, rows = parts(neighbors.nodes, neighbors.num_nodes), parts(neighbors.rows, neighbors.num_rows)
    return EdgeBlocks(parts(neighbors.starts), parts(neighbors.counts), nodes, rows)


def is_edge_of(neighbors: CSR, chunk: EdgeBlocks) -> jax.Array:
    """Returns bool [blocks, width], which places are not empty."""
    return jnp.arange(neighbors.width, dtype=jnp.int32) < chunk.counts[:, None]


def sinks_of(edges: CSRAndCSC, inputs: Inputs) -> Inputs:
    """Returns the sinks of what has gradients: of nodes in float32, a row for 1,024 edges, so that few add in turn."""

    def of(table: Mapping[str, jax.Array], make: Callable[[jax.Array], jax.Array]) -> dict[str, jax.Array]:
        return {name: make(x) for name, x in table.items() if jnp.issubdtype(x.dtype, jnp.inexact)}

    return Inputs(
        of(inputs.edge, lambda x: x),
        of(inputs.senders, lambda x: _of_rows(edges.by_source, upcast(x)) if _has_slots(edges) else upcast(x)),
        of(inputs.receivers, lambda x: _of_rows(edges.by_target, upcast(x))),
    )


def _has_slots(edges: CSRAndCSC) -> bool:
    """Whether it is known to which row of the senders' sums an edge belongs."""
    return edges.by_source.slots is not None and edges.by_target.edges is not None


def read_all(
    edges: CSRAndCSC, chunk: EdgeBlocks, tables: Inputs, sinks: Inputs
) -> tuple[tuple[Inputs, EdgeIds], Inputs]:
    """Returns the rows [edges, ...] that a chunk's edges read, which edges these are, and the sinks.

    Empty places have the last edge of their block, or of the first block with edges, once more: no function has to be
    defined for what is no edge, and none of its gradients to be finite there.

    Args:
      edges: who sends to whom.
      chunk: some blocks of them.
      tables: what is read, arrays by name, whose gradients these reads are not.
      sinks: of `sinks_of`; what is read without one has no gradient.
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
    """Returns rows of an array and its sink, to whose gradient that of the rows is added.

    Args:
      afresh: whether they are added up on their own first, so that few numbers are added in turn.
      table: whose gradient this is not.
      sink: [rows, ...].
      places: int32 [edges], of the rows of the table.
      into: int32 [edges], the rows of the sink; beyond the last one for edges that add nothing.
    """
    del afresh, into
    return at(table, places), sink


def _read_forward(afresh: bool, *arguments: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    return _read(afresh, *arguments), arguments[3]


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
    """Returns an array and its sink, to whose gradient the array's is added in at least float32."""
    return array, sink


pass_on.defvjp(
    lambda array, sink: ((array, sink), None),
    lambda _, gradients: (None, gradients[1] + gradients[0].astype(gradients[1].dtype)),
)


@jax.custom_vjp
def _of_rows(neighbors: CSR, nodes: jax.Array) -> jax.Array:
    """Returns a sink [rows, ...] of an array [nodes, ...]: sums are added in rows, of which each node has some."""
    rows = jnp.zeros((neighbors.num_rows, *nodes.shape[1:]), nodes.dtype)
    return pvary_alike((rows, nodes))[0]


_of_rows.defvjp(
    lambda neighbors, nodes: (_of_rows(neighbors, nodes), neighbors),
    lambda neighbors, gradient: (None, joined(neighbors, gradient)[: neighbors.num_nodes]),
)
