"""Rows of arrays that stay in the host's memory or on disk, and of sparse matrices."""

from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jmp_train.graphs.structure import SparseFeatures, as_count, known_ids, most_in_as_many_levels, padded_block


def take_rows(array: np.ndarray, ids: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
    """Returns rows of an array of the host, such as those of a mini-batch's `inputs`.

    Args:
      array: [nodes, ...], a NumPy array; only the requested rows of a `numpy.memmap` are read.
      ids: int [rows], such as a mini-batch's `inputs` or a block's `edge_ids`; -1 for padding, which gets 0.
      dtype: dtype of the result; None for the array's own. A half type halves the transfer to the device.

    Returns:
      [rows, ...].

    Raises:
      ValueError: an id is out of range.
      TypeError: ids are not integers, or `ids` is None, as for `edge_ids` that were not stored.

    Example:
      >>> take_rows(np.array([[1.0], [2.0]]), np.array([1, -1, 0])).tolist()
      [[2.0], [0.0], [1.0]]
    """
    if ids is None:
        raise TypeError("ids is None: edge ids are stored only by host_edges(..., keep_edge_ids=True)")
    known_ids("ids", ids.ravel(), len(array), "rows", least=-1)
    is_padding = ids < 0
    if len(array) == 0:
        return np.zeros((len(ids), *array.shape[1:]), dtype or array.dtype)
    rows = array[np.where(is_padding, 0, ids)]
    rows = rows if dtype is None else rows.astype(dtype, copy=False)
    rows[is_padding] = 0
    return rows


def take_sparse_rows(
    matrix: Any, ids: np.ndarray, dtype: DTypeLike | None = None, *, num_entries: int | None = None
) -> SparseFeatures:
    """Returns rows of a sparse matrix of the host, such as those of a mini-batch's `inputs`, for its first layer.

    Entries are padded, so that all batches with the same number of ids share one program.

    Args:
      matrix: floating [nodes, width], of scipy in the format "csr".
      ids: int [rows]; -1 for padding, which gets 0.
      dtype: dtype of the result; None for the matrix's own.
      num_entries: number of entries of the result; None for the largest of any such number of different rows.

    Returns:
      [rows, width], its arrays in the host's memory.

    Raises:
      TypeError: the matrix is of another kind.
      ValueError: an id is out of range, or the rows have more entries.

    Example:
      >>> import scipy.sparse
      >>> words = scipy.sparse.csr_matrix(np.array([[0.0, 2.0], [0.0, 0.0], [3.0, 4.0]], np.float32))
      >>> take_sparse_rows(words, np.array([2, -1])).toarray().tolist()
      [[3.0, 4.0], [0.0, 0.0]]
    """
    import scipy.sparse

    if not scipy.sparse.issparse(matrix) or matrix.format != "csr" or matrix.dtype.kind != "f":
        raise TypeError(f"matrix must be a floating csr matrix of scipy, got {type(matrix).__name__}")
    num_rows, width = matrix.shape
    known_ids("ids", ids, num_rows, "rows", least=-1)
    counts = np.diff(matrix.indptr)
    if num_entries is None:
        num_entries = int(np.partition(counts, max(num_rows - len(ids), 0))[-len(ids) :].sum()) if ids.size else 0
    rows = matrix[ids[ids >= 0]]
    if rows.nnz > as_count("num_entries", num_entries):
        raise ValueError(f"num_entries={num_entries} is less than the {rows.nnz} entries of the rows")
    owners = np.repeat(np.flatnonzero(ids >= 0), np.diff(rows.indptr))
    most_in = most_in_as_many_levels(int(counts.max(initial=0)))
    block = padded_block(rows.indices, owners, width, len(ids), num_edges=num_entries, most_in=most_in)
    values: Any = np.zeros(num_entries, dtype or matrix.dtype)
    values[: rows.nnz] = rows.data
    return SparseFeatures(block.connections, values)
