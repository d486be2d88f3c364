"""Layer-wise inference: all nodes' results from blocks of all neighbors, in fixed memory.

Features may stay in the host's memory, on disk, or be rows of sparse matrices.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict
from jax.typing import DTypeLike

from jmp_train.graphs.sampling.host_edge_index import ALL, HostEdges
from jmp_train.graphs.sampling.sampled_layer import (
    EDGE,
    Edges,
    LayerSizes,
    blocks_of,
    edges_by_type,
    inputs_of,
    node_counts,
    sample_layer,
    sizes_needed,
)
from jmp_train.graphs.structure import (
    LARGEST_COUNT,
    Block,
    EdgeType,
    SparseFeatures,
    as_count,
    known_ids,
    most_in_as_many_levels,
    padded_block,
)


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


Ranges = dict[str, np.ndarray]


def layerwise_inference(
    layers: Sequence[Callable[..., Any]],
    edges: HostEdges | Mapping[EdgeType, HostEdges],
    features: Any,
    *,
    batch_size: int = 1024,
    max_edges: int = 2**18,
) -> Any:
    """Returns the results of layers for all nodes, with all of their neighbors, in the host's memory.

    Each layer is computed for all nodes before the next one, some nodes at a time. So no node is
    computed twice, and the device holds only a block and its rows. Each layer is compiled once.

    Args:
      layers: functions `layer(block, rows)` from rows [sources, ...] to rows [targets, ...]; for several
        types, `layer(blocks, rows)` from dictionaries by edge type and by node type to one by node type.
      edges: the edges of one type, or of several.
      features: floating [nodes, ...]; by node type if there are several.
      batch_size: largest number of nodes of a type computed at a time.
      max_edges: largest number of their edges of a type; a node with more is computed alone.

    Returns:
      [nodes, ...] in the last layer's dtype; by node type if there are several.

    Raises:
      TypeError: a number is not an integer.
      ValueError: features have another number of rows, or a number is not positive.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs import graph_conv, host_edges
      >>> edges = host_edges([1, 2, 0, 0], [0, 0, 1, 2], 3)
      >>> layer = lambda block, rows: graph_conv(block, rows, norm="none")
      >>> layerwise_inference([layer, layer], edges, np.array([[1.0], [2.0], [4.0]], np.float32)).tolist()
      [[2.0], [6.0], [6.0]]

    Reference: the inference of DGL's and PyG's GraphSAGE examples.
    """
    by_type = edges_by_type(edges)
    is_alone = isinstance(edges, HostEdges)
    for name, number in (("batch_size", batch_size), ("max_edges", max_edges)):
        as_count(name, number, sys.maxsize, least=1)
    batch_size, max_edges = min(batch_size, LARGEST_COUNT), min(max_edges, LARGEST_COUNT)
    rows = {EDGE[0]: features} if is_alone else dict(features)
    for node_type, count in node_counts(by_type).items():
        if node_type not in rows or len(rows[node_type]) != count:
            got = f"{len(rows[node_type])} rows" if node_type in rows else "none"
            raise ValueError(f"features of {node_type!r} must have {count} rows, got {got}")
    ranges = list(_ranges(by_type, batch_size, max_edges))
    if not ranges:
        raise ValueError("edges have no nodes")
    sizes = _sizes(by_type, ranges)
    for layer in layers:
        run = jax.jit(layer)
        rows = _all_rows(run, by_type, rows, ranges, sizes, is_alone=is_alone)
    return rows[EDGE[0]] if is_alone else rows


def _all_rows(
    run: Callable[..., Any],
    edges: Edges,
    rows: Mapping[str, Any],
    ranges: Sequence[Ranges],
    sizes: tuple[LayerSizes, dict[str, int]],
    *,
    is_alone: bool,
) -> dict[str, np.ndarray]:
    """Returns the results of a layer for all nodes, by node type."""
    results: dict[str, np.ndarray] = {}

    def write(targets: Ranges, result: Any) -> None:
        for node_type, array in ({EDGE[0]: result} if is_alone else result).items():
            ids = targets[node_type]
            if node_type not in results:
                shape = (len(rows[node_type]), *array.shape[1:])
                results[node_type] = np.empty(shape, array.dtype)
            results[node_type][ids] = np.asarray(array)[: len(ids)]

    waiting: tuple[Ranges, Any] | None = None  # computed while the next block is made
    for targets in ranges:
        blocks, inputs = _block(edges, targets, sizes)
        some = {node_type: take_rows(rows[node_type], ids) for node_type, ids in inputs.items()}
        result = run(blocks[EDGE], some[EDGE[0]]) if is_alone else run(FrozenDict(blocks), some)
        if waiting is not None:
            write(*waiting)
        waiting = targets, result
    if waiting is not None:
        write(*waiting)
    return results


def _block(
    edges: Edges, targets: Ranges, sizes: tuple[LayerSizes, dict[str, int]]
) -> tuple[dict[EdgeType, Block], dict[str, np.ndarray]]:
    """Returns the blocks of some targets, by edge type, and their sources, by node type, padded."""
    fanout, (size, num_targets) = dict.fromkeys(edges, ALL), sizes
    layer = sample_layer(edges, targets, fanout, np.random.default_rng(0))
    return blocks_of(layer, size, num_targets, edges, fanout), inputs_of(layer, size)


def _sizes(edges: Edges, ranges: Sequence[Ranges]) -> tuple[LayerSizes, dict[str, int]]:
    """Returns sizes into which the blocks of all ranges fit, and their largest number of targets."""
    fanout, random = dict.fromkeys(edges, ALL), np.random.default_rng(0)
    num_targets = {kind: max(len(part[kind]) for part in ranges) for kind in ranges[0]}
    largest = LayerSizes(num_targets, dict.fromkeys(edges, 0), dict.fromkeys(edges, 0))
    for targets in ranges:
        needed = sizes_needed(sample_layer(edges, targets, fanout, random))
        largest = largest.combine(needed, max)
    return largest, num_targets


def _ranges(edges: Edges, batch_size: int, max_edges: int) -> Iterator[Ranges]:
    """Yields ranges of nodes of each type that are computed together; the ranges of some types may be empty."""
    counts = node_counts(edges)
    begins = dict.fromkeys(counts, 0)
    while any(begins[node_type] < count for node_type, count in counts.items()):
        ranges = {}
        for node_type, count in counts.items():
            begin = begins[node_type]
            end = min(begin + batch_size, count)
            for kind, these in edges.items():
                if kind[2] == node_type and end > begin:
                    most = these.starts[begin] + max_edges
                    end = min(end, int(np.searchsorted(these.starts, most, side="right")) - 1)
            end = max(end, min(begin + 1, count))
            ranges[node_type] = np.arange(begin, end)
            begins[node_type] = end
        yield ranges
