"""Sums over edges of functions with matrix products, which run for all edges of a chunk at once."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import Chunk, at, joined, rounded_off, upcast_at, walk
from jmp_train.graphs.kernels.edge_programs import EdgeIds, Edges, Ends, Function, into
from jmp_train.graphs.structure import CSR, accumulation_dtype, upcast


def flat_sums(function: Function, edges: Edges, fixed: Ends, inputs: Ends, terms: Ends) -> Ends:
    """Returns the result of `edge_sums` by one pass.

    The terms at the senders are added to rows of blocks, as those at the receivers: no number is a long sum.

    Args:
      function: see `edge_sums`.
      edges: see `edge_sums`.
      fixed: see `edge_sums`.
      inputs: see `edge_sums`.
      terms: the terms of one edge, as variables.
    """
    here, there = into(edges), edges if isinstance(edges, CSR) else edges.by_source
    has_slots = not isinstance(edges, CSR) and there.slots is not None and here.edges is not None

    def update(state: tuple[Ends, Any], chunk: Chunk) -> tuple[Ends, Any]:
        sums, lost = state
        is_edge = (chunk.is_edge & chunk.is_new[:, None]).ravel()
        ids: Any = None if here.edges is None else at(here.edges, chunk.positions).ravel()
        which = EdgeIds(chunk.others.ravel(), jnp.repeat(chunk.nodes, here.width), ids)
        found = _batched(function, is_edge)(_rows_at(fixed, which), _rows_at(inputs, which), which)

        def add_here(sums: jax.Array, x: jax.Array) -> jax.Array:
            x = upcast(x).reshape(*chunk.others.shape, *x.shape[1:])
            return sums.at[chunk.rows].add(chunk.where_edge(x).sum(1), mode="drop")

        def add_there(sums: jax.Array, x: jax.Array) -> jax.Array:
            if has_slots:
                rows = at(there.rows, at(there.edge_slots, ids) // there.width)
                return sums.at[jnp.where(is_edge, rows, len(sums))].add(upcast(x), mode="drop")
            rows = jnp.where(is_edge, which.senders, len(sums))
            return sums + jnp.zeros_like(sums).at[rows].add(upcast(x), mode="drop")  # afresh, to split long sums

        def write(rows: jax.Array, x: jax.Array) -> jax.Array:
            return rows.at[jnp.where(is_edge, ids, len(rows))].set(x.astype(rows.dtype), mode="drop")

        updates = add_there, add_here, write, jnp.add
        shared = jax.tree.map(upcast, found.shared)
        new = Ends(*map(jax.tree.map, updates, sums, found._replace(shared=shared)))
        return new, jax.tree.map(lambda rest, *x: rest + rounded_off(*x), lost, sums.shared, shared, new.shared)

    def zeros(part: Any, *rows: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((*rows, *x.aval.shape), accumulation_dtype(x.aval.dtype)), part)

    start = Ends(
        zeros(terms.senders, there.num_rows if has_slots else there.num_nodes),
        zeros(terms.receivers, here.num_rows),
        jax.tree.map(lambda x: jnp.zeros((here.num_edges, *x.aval.shape), x.aval.dtype), terms.edge),
        zeros(terms.shared),
    )
    shapes = [x.shape[1:] for x in jax.tree.leaves((fixed[:3], inputs[:3]))]
    shapes += [x.aval.shape for x in jax.tree.leaves(terms[:3])]
    elements = max(map(math.prod, shapes), default=1)
    sums, lost = walk(here, update, (start, start.shared), max(1, elements) * here.width, are_few=True)
    return Ends(
        jax.tree.map(lambda x: joined(there, x)[: there.num_nodes], sums.senders) if has_slots else sums.senders,
        jax.tree.map(lambda x: joined(here, x)[: here.num_nodes], sums.receivers),
        sums.edge,
        jax.tree.map(jnp.add, sums.shared, lost),
    )


def _rows_at(ends: Ends, which: EdgeIds) -> Ends:
    """Returns the upcast rows that edges read."""
    own: Any = which
    rows = [jax.tree.map(lambda x, ids=ids: upcast_at(x, ids), part) for part, ids in zip(ends[:3], own, strict=True)]
    return Ends(rows[0], rows[1], rows[2], jax.tree.map(upcast, ends.shared))


def _batched(function: Function, is_edge: jax.Array) -> Function:
    """Returns a function of rows of edges."""
    if batched := getattr(function, "batched", None):
        return batched(lambda inner: _batched(inner, is_edge), is_edge)
    axes: Any = Ends(0, 0, 0, None)
    return jax.vmap(function, (axes, axes, 0))
