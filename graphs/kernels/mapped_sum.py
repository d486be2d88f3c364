"""Sums over edges of the senders' rows times a matrix of the edge, in chunks, without storing matrices or messages.

The matrices are linear functions that differ between edges: of relations, or of networks. Each takes arrays that all
edges share, integers and floats of the edges, and rows [blocks, width, in]; it returns the sums [blocks, out] of each
block's products. So matrices that are mixtures of a few bases are multiplied once per block instead of once per edge,
and the matrix of an edge exists only within its chunk.

The gradient of the rows is such a sum over the reversed edges, by the transposed matrices. The gradients of shared and
of edge data iterate over the same chunks again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.chunks import (
    Chunk,
    add_up,
    at,
    differentiated_in_float32,
    of_edges,
    pvary_alike,
    run_chunked,
    sum_of_chunks,
)
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.structure import (
    CSR,
    Adjacency,
    CSRAndCSC,
    accumulation_dtype,
    graph_storage,
    upcast,
)
from jmp_train.policies import autocast_as


class OfEdges(NamedTuple):
    """The data of edges; None for missing ones.

    Attributes:
      types: int32 [...], out of range for edges without a message.
      weight: floating [...], factors of the products.
      features: floating [..., width].
    """

    types: jax.Array | None = None
    weight: jax.Array | None = None
    features: jax.Array | None = None


class EdgeMatrices(Protocol):
    """The interface that `mapped_sum` requires of a kind of matrices; it is hashable."""

    def __call__(self, shared: Any, edges: OfEdges, rows: jax.Array) -> jax.Array:
        """Returns the sums [blocks, out] of products with upcast rows [blocks, width, in]."""
        ...

    def transposed(self) -> "EdgeMatrices":
        """Returns the transposed matrices."""
        ...

    def out_width(self, shared: Any, width: int) -> int:
        """Returns the width of the products with rows of a width."""
        ...

    def elements(self, shared: Any, edges_per_block: int, width: int) -> int:
        """Returns the number of elements of the largest array per block, for rows of a width."""
        ...


@dataclasses.dataclass(frozen=True)
class MixedMatrices:
    """Bases, mixed by coefficients of an edge's type.

    `shared` is (bases [bases, in, out], coefficients [types, bases]); without coefficients, None, each type has its
    own basis.
    """

    is_transposed: bool = False

    def __call__(self, shared: Any, edges: OfEdges, rows: jax.Array) -> jax.Array:  # noqa: D102
        bases, coefficients = jax.tree.map(upcast, shared)
        assert edges.types is not None
        if coefficients is None:
            mixing = jax.nn.one_hot(edges.types, bases.shape[0], dtype=rows.dtype)
        else:
            mixing = _of_types(coefficients, edges.types)
        mixing = _times(mixing, edges.weight)
        mixed = jnp.einsum("nwb,nwi->nbi", mixing, rows, precision="highest")
        form = "nbi,boi->no" if self.is_transposed else "nbi,bio->no"
        return jnp.einsum(form, mixed, bases, precision=_precision(shared[0]))

    def transposed(self) -> "MixedMatrices":  # noqa: D102
        return MixedMatrices(not self.is_transposed)

    def out_width(self, shared: Any, width: int) -> int:  # noqa: D102
        del width
        return shared[0].shape[1 if self.is_transposed else 2]

    def elements(self, shared: Any, edges_per_block: int, width: int) -> int:  # noqa: D102
        return max(width * shared[0].shape[0], width * edges_per_block)


@dataclasses.dataclass(frozen=True)
class DiagonalBlocks:
    """Block-diagonal matrices of an edge's type: `shared` is [types, diagonal blocks, in of each, out of each]."""

    is_transposed: bool = False

    def __call__(self, shared: Any, edges: OfEdges, rows: jax.Array) -> jax.Array:  # noqa: D102
        assert edges.types is not None
        matrices = _of_types(upcast(shared), edges.types)
        count = shared.shape[1]
        parts = _times(rows, edges.weight).reshape(*rows.shape[:2], count, rows.shape[2] // count)
        form = "nwbi,nwboi->nbo" if self.is_transposed else "nwbi,nwbio->nbo"
        return jnp.einsum(form, parts, matrices, precision="highest").reshape(len(rows), self.out_width(shared, 0))

    def transposed(self) -> "DiagonalBlocks":  # noqa: D102
        return DiagonalBlocks(not self.is_transposed)

    def out_width(self, shared: Any, width: int) -> int:  # noqa: D102
        del width
        return shared.shape[1] * shared.shape[2 if self.is_transposed else 3]

    def elements(self, shared: Any, edges_per_block: int, width: int) -> int:  # noqa: D102
        del width
        _, count, into, out = shared.shape
        return edges_per_block * count * into * out


@dataclasses.dataclass(frozen=True)
class NetworkMatrices:
    """Matrices that a network computes from an edge's features; `shared` has its arrays.

    Attributes:
      network: a function of features [edges, width] and of these arrays to [edges, in * out].
      in_width: input width of the matrices.
      width: width of the products.
    """

    network: Callable[..., jax.Array]
    in_width: int
    width: int
    is_transposed: bool = False

    def __call__(self, shared: Any, edges: OfEdges, rows: jax.Array) -> jax.Array:  # noqa: D102
        features = edges.features
        assert features is not None
        matrices = upcast(self.network(features.reshape(-1, features.shape[-1]), *shared)).astype(rows.dtype)
        matrices = matrices.reshape(*rows.shape[:2], self.in_width, self.width)
        form = "nwi,nwoi->no" if self.is_transposed else "nwi,nwio->no"
        return jnp.einsum(form, _times(rows, edges.weight), matrices, precision="highest")

    def transposed(self) -> "NetworkMatrices":  # noqa: D102
        return dataclasses.replace(self, is_transposed=not self.is_transposed)

    def out_width(self, shared: Any, width: int) -> int:  # noqa: D102
        del shared, width
        return self.in_width if self.is_transposed else self.width

    def elements(self, shared: Any, edges_per_block: int, width: int) -> int:  # noqa: D102
        del shared, width
        return edges_per_block * self.in_width * self.width


def _of_types(table: jax.Array, types: jax.Array) -> jax.Array:
    """Returns the rows of a table by types; 0 for types that are out of range."""
    return table.at[jnp.where(types < 0, len(table), types)].get(mode="fill", fill_value=0)


def _times(rows: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Returns rows [blocks, width, ...] times weights [blocks, width]; None for 1."""
    return rows if weight is None else rows * weight[..., None].astype(rows.dtype)


def _precision(stored: jax.Array) -> str:
    """Returns the precision of a product with weights; half precision suffices if they are stored in it."""
    return "highest" if stored.dtype.itemsize >= 4 else "default"


XLA_ELEMENTS = 2**21  # that a chunk of unsorted edges makes


class MappedInputs(NamedTuple):
    """The inputs of the sum.

    Attributes:
      shared: the arrays that determine the matrices of all edges, a tree of floating arrays.
      edges: the data of the edges, arrays [edges, ...].
      rows: floating [senders, in].
    """

    shared: Any
    edges: OfEdges
    rows: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked_mapped_sum(
    matrices: EdgeMatrices, dtype: DTypeLike, edges: CSRAndCSC, types: jax.Array | None, inputs: MappedInputs
) -> jax.Array:
    """Returns the sums [receivers, out] of the senders' rows times matrices, computed in float32.

    Args:
      matrices: the kind of matrices.
      dtype: dtype of the result.
      edges: the edges.
      types: int32 [edges], which are not in `inputs.edges` because they have no gradient.
      inputs: the inputs of the sum.
    """
    neighbors, rows = edges.by_target, inputs.rows

    def compute(chunk: Chunk) -> list[jax.Array]:
        others = chunk.where_edge(chunk.of_others(rows))
        return [matrices(inputs.shared, _of_chunk(neighbors, chunk, types, inputs.edges), others)]

    width = matrices.out_width(inputs.shared, rows.shape[1])
    like = jax.ShapeDtypeStruct((width,), accumulation_dtype(rows.dtype))
    (sums,) = add_up(neighbors, compute, [like], _elements(matrices, neighbors, inputs), (rows, inputs.shared))
    return sums.astype(dtype)


def _of_chunk(neighbors: CSR, chunk: Chunk, types: jax.Array | None, edges: OfEdges) -> OfEdges:
    """Returns the data of a chunk's edges in their stored dtypes; empty places have no meaning."""
    places = at(neighbors.edge_ids, chunk.positions)
    return jax.tree.map(lambda x: at(x, places), edges._replace(types=types))


def _elements(matrices: EdgeMatrices, neighbors: CSR, inputs: MappedInputs) -> int:
    width = inputs.rows.shape[1]
    out = matrices.out_width(inputs.shared, width)
    return max(1, out, neighbors.width * width, matrices.elements(inputs.shared, neighbors.width, width))


_Saved = tuple[CSRAndCSC, jax.Array | None, MappedInputs]


def _forward(
    matrices: EdgeMatrices, dtype: DTypeLike, edges: CSRAndCSC, types: jax.Array | None, inputs: MappedInputs
) -> tuple[jax.Array, _Saved]:
    return chunked_mapped_sum(matrices, dtype, edges, types, inputs), (edges, types, inputs)


def _backward(
    matrices: EdgeMatrices, dtype: DTypeLike, saved: _Saved, gradient: jax.Array
) -> tuple[None, None, MappedInputs]:
    del dtype
    return None, None, differentiated_in_float32(functools.partial(_gradients, matrices))(*saved, gradient)


def _gradients(
    matrices: EdgeMatrices, edges: CSRAndCSC, types: jax.Array | None, inputs: MappedInputs, gradient: jax.Array
) -> MappedInputs:
    neighbors, rows = edges.by_target, inputs.rows
    back = inputs._replace(rows=gradient)
    of_rows: Any = chunked_mapped_sum(matrices.transposed(), rows.dtype, edges.reversed(), types, back)
    elements = _elements(matrices, neighbors, inputs)

    def pullback(chunk: Chunk, is_counted: jax.Array | None = None) -> Any:
        """Returns the gradients of the shared data and of the data of a chunk's edges."""
        own = _of_chunk(neighbors, chunk, None, inputs.edges)
        kinds = _of_chunk(neighbors, chunk, types, OfEdges()).types
        others = chunk.where_edge(chunk.of_others(rows))

        def products(shared: Any, own: OfEdges) -> jax.Array:
            return matrices(shared, own._replace(types=kinds), others)

        here = chunk.of_nodes(gradient)[:, 0]
        if is_counted is not None:
            here = jnp.where(is_counted[:, None], here, jnp.zeros_like(here))
        return jax.vjp(products, jax.tree.map(upcast, inputs.shared), own)[1](here)

    of_shared = inputs.shared
    if jax.tree.leaves(inputs.shared):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, accumulation_dtype(x.dtype)), inputs.shared)
        total = sum_of_chunks(neighbors, lambda chunk, is_new: pullback(chunk, is_new)[0], like, elements, of_rows)
        of_shared = jax.tree.map(lambda x, like: x.astype(like.dtype), total, inputs.shared)
    return MappedInputs(of_shared, _of_edges(neighbors, pullback, inputs.edges, elements), of_rows)


def _of_edges(neighbors: CSR, pullback: Any, edges: OfEdges, elements: int) -> OfEdges:
    """Returns the gradients of the edge data, by one pass."""
    leaves, structure = jax.tree.flatten(edges)
    if not leaves:
        return edges
    widths = [math.prod(x.shape[1:]) for x in leaves]
    dtype = jnp.result_type(*(accumulation_dtype(x.dtype) for x in leaves))

    def compute(chunk: Chunk) -> jax.Array:
        parts = [x.reshape(*chunk.others.shape, -1).astype(dtype) for x in jax.tree.leaves(pullback(chunk)[1])]
        return jnp.concatenate(parts, -1)

    found = of_edges(neighbors, compute, jax.ShapeDtypeStruct((sum(widths),), dtype), elements)
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    parts = jnp.split(found, ends, axis=-1)
    return jax.tree.unflatten(
        structure, [x.reshape(y.shape).astype(y.dtype) for x, y in zip(parts, leaves, strict=True)]
    )


chunked_mapped_sum.defvjp(_forward, _backward)


def _by_chunks(
    adjacency: Adjacency, matrices: EdgeMatrices, inputs: MappedInputs, scale: jax.Array | None = None
) -> jax.Array:
    def kernel(edges: CSRAndCSC, types: jax.Array | None, inputs: MappedInputs) -> jax.Array:
        dtype = inputs.rows.dtype if scale is None else accumulation_dtype(inputs.rows.dtype)
        return chunked_mapped_sum(matrices, dtype, edges, types, inputs)

    stored = _stored(inputs)
    types, rest = stored.edges.types, stored._replace(edges=stored.edges._replace(types=None))
    return _scaled(run_chunked(kernel, adjacency.neighbors, types, rest), scale, inputs.rows.dtype)


def _by_xla(
    adjacency: Adjacency, matrices: EdgeMatrices, inputs: MappedInputs, scale: jax.Array | None = None
) -> jax.Array:
    """Computes the sums over edges in their order, in chunks, because one array of all matrices is too large."""
    compute = autocast_as("float32")(functools.partial(_unsorted_sum, matrices))
    return _scaled(compute(adjacency, _stored(inputs)), scale, inputs.rows.dtype)


def _scaled(sums: jax.Array, scale: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Returns the sums times the receivers' scales, in the stored dtype."""
    if scale is not None:
        sums = autocast_as("float32")(lambda sums, scale: sums * scale.astype(sums.dtype)[:, None])(sums, scale)
    return graph_storage(sums.astype(dtype))


def _stored(inputs: MappedInputs) -> MappedInputs:
    return inputs._replace(rows=graph_storage(inputs.rows), shared=jax.tree.map(graph_storage, inputs.shared))


def _unsorted_sum(matrices: EdgeMatrices, adjacency: Adjacency, inputs: MappedInputs) -> jax.Array:
    senders, receivers = adjacency.senders, adjacency.receivers
    shared, edges, rows = jax.tree.map(upcast, inputs.shared), inputs.edges, upcast(inputs.rows)
    out = matrices.out_width(shared, rows.shape[1])
    if not senders.num_edges:
        return jnp.zeros((receivers.num_segments, out), rows.dtype)
    table = rows if senders.blocks is None else senders.blocks.read(rows)

    @jax.checkpoint
    def messages(shared: Any, table: jax.Array, of_edges: OfEdges, places: jax.Array) -> jax.Array:
        sent = table.at[places].get(mode="fill", fill_value=0)[:, None]
        return matrices(shared, jax.tree.map(lambda x: x[:, None], of_edges), sent)

    def add(sums: jax.Array, part: Any) -> tuple[jax.Array, None]:
        of_edges, sent_from, sent_to = part
        return sums.at[sent_to].add(messages(shared, table, of_edges, sent_from), mode="drop"), None

    elements = max(1, out, rows.shape[1], matrices.elements(shared, 1, rows.shape[1]))
    size = max(1, min(XLA_ELEMENTS // elements, senders.num_edges))
    count = -(-senders.num_edges // size)

    def in_chunks(x: jax.Array, fill: int = 0) -> jax.Array:
        missing = count * size - len(x)
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if missing else x
        return x.reshape(count, size, *x.shape[1:])

    parts = (
        jax.tree.map(in_chunks, edges),
        in_chunks(senders.rows, len(table)),
        in_chunks(receivers.rows, receivers.num_rows),
    )
    start = jnp.zeros((receivers.num_rows, out), rows.dtype)
    start = pvary_alike((start, table, shared, parts))[0]
    if count == 1:
        sums, _ = add(start, jax.tree.map(lambda x: x[0], parts))
    else:
        sums, _ = jax.lax.scan(add, start, parts)
    return sums if receivers.blocks is None else receivers.blocks.sum(sums)


def _elements_per_edge(matrices: EdgeMatrices, inputs: MappedInputs, scale: jax.Array | None = None) -> int:
    del scale
    return max(inputs.rows.shape[1], matrices.out_width(inputs.shared, inputs.rows.shape[1]))


MAPPED_SUM = EdgeOperation({"xla": _by_xla, "chunked": _by_chunks}, _elements_per_edge)
