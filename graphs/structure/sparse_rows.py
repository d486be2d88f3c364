"""Sparse node features, such as bags of words, as the edges of a graph from columns to rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_train.graphs.structure.adjacency import Adjacency, make_adjacency
from jmp_train.graphs.structure.counts import check_known
from jmp_train.graphs.structure.feature_arrays import on_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseFeatures:
    """A matrix of features [nodes, width] that stores only nonzero entries, as a pytree.

    Create it with `sparse_features`, on the host. `GraphConv`, `SAGEConv`, `GATConv` and `GATv2Conv`, and their
    functions, take it in place of an array. Its product with a weight, which comes first, reads
    only these entries, sums them in float32 and stores the result in the weight's dtype.

    Attributes:
      connections: an edge for each entry, from its column to its row.
      values: floating [entries].

    Example:
      >>> words = sparse_features(np.array([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]], np.float32))
      >>> words.shape, words.values.tolist(), words.astype("float16").dtype.name
      ((2, 3), [2.0, 1.0], 'float16')
    """

    connections: Adjacency
    values: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of nodes and of features."""
        return self.connections.num_receivers, self.connections.num_senders

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def num_entries(self) -> int:
        """Number of stored entries."""
        return self.values.shape[0]

    def map_values(self, function: Callable[[jax.Array], jax.Array]) -> "SparseFeatures":
        """Returns the features with other values; zeros stay 0.

        Args:
          function: a function of the values [entries], such as dropout.
        """
        return dataclasses.replace(self, values=function(self.values))

    def astype(self, dtype: DTypeLike) -> "SparseFeatures":
        """Returns the features in another dtype.

        Args:
          dtype: the dtype.
        """
        return self.map_values(lambda values: values.astype(dtype))

    def toarray(self) -> jax.Array:
        """Returns the features [nodes, width] with all zeros."""
        connections = jax.tree.map(on_device, self.connections)  # may be in the host's memory
        ends = connections.receivers.ids, connections.senders.ids
        return jnp.zeros(self.shape, self.dtype).at[ends].add(self.values)


def sparse_features(matrix: Any) -> SparseFeatures:
    """Returns the nonzero entries of a matrix; runs on the host.

    Args:
      matrix: floating [nodes, width], an array or a sparse matrix of scipy's, whose duplicate entries are summed.

    Returns:
      The features in the matrix's dtype, by row and then column, on the default device.

    Raises:
      TypeError: the matrix is not floating, or traced.
      ValueError: the rank of the matrix is not 2.

    Example:
      >>> sparse_features(np.eye(3, dtype=np.float32)).num_entries
      3
    """
    import scipy.sparse

    check_known("matrix", matrix, "sparse features are made outside of jit")
    array: Any = matrix if scipy.sparse.issparse(matrix) or isinstance(matrix, jax.Array) else np.asarray(matrix)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"matrix must be floating, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"matrix must have shape [nodes, width], got shape {array.shape}")
    if scipy.sparse.issparse(array):
        entries = array.tocsr().tocoo()  # sums duplicates of other formats
        entries.sum_duplicates()
        is_entry = entries.data != 0
        order = np.lexsort((entries.col[is_entry], entries.row[is_entry]))
        rows, columns, values = (ids[is_entry][order] for ids in (entries.row, entries.col, entries.data))
    else:
        array = np.asarray(array)
        rows, columns = np.nonzero(array)
        values = array[rows, columns]
    num_nodes, width = array.shape
    return SparseFeatures(make_adjacency(columns, rows, width, num_nodes), on_device(values))
