"""Linear functions of senders' rows that differ between edges: matrices of relations and of networks.

Each takes arrays that all edges share, integers and floats of the edges, and rows [blocks, width, in]; it returns the
sums [blocks, out] of each block's products. So matrices that are mixtures of a few bases are multiplied once per block
instead of once per edge, and the matrix of an edge exists only within its chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jmp_train.graphs.structure import upcast


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
