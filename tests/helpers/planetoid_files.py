"""Writes files as Planetoid's: pickles of protocol 2, in the words that Python 2 and its numpy used."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse


def pickled(value: Any) -> bytes:
    """Returns the pickle of an array, a CSR matrix or a dictionary of lists."""
    return b"\x80\x02" + _instructions(value) + b"."


def pickled_matrix(shape: tuple[int, ...], indptr: np.ndarray, indices: np.ndarray, data: np.ndarray) -> bytes:
    """Returns the pickle of a CSR matrix of these parts, which need not fit each other."""
    return b"\x80\x02" + _matrix_of(shape, indptr, indices, data) + b"."


def _instructions(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_instructions, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_instructions, value)) + b"e"
    if isinstance(value, np.ndarray):
        return _array(value)
    if scipy.sparse.issparse(value):
        return _matrix(value)
    return b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R" + _items(value)


def _items(items: Mapping[Any, Any]) -> bytes:
    inside = b"".join(_instructions(key) + _instructions(value) for key, value in items.items())
    return b"(" + inside + b"u"


def _array(array: np.ndarray) -> bytes:
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + _instructions((0,))
    code, order = array.dtype.str[1:], array.dtype.str[0]
    dtype = b"cnumpy\ndtype\n" + _instructions((code, 0, 1)) + b"R"
    dtype += _instructions((3, order, None, None, None, -1, -1, 0)) + b"b"
    by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
    flag = b"\x88" if by_columns else b"\x89"
    content = _instructions(array.tobytes("F" if by_columns else "C"))
    state = b"(" + _instructions(1) + _instructions(array.shape) + dtype + flag + content + b"t"
    return made + b"U\x01b\x87R" + state + b"b"


def _matrix(matrix: Any) -> bytes:
    return _matrix_of(matrix.shape, matrix.indptr, matrix.indices, matrix.data)


def _matrix_of(shape: tuple[int, ...], *arrays: np.ndarray) -> bytes:
    parts = {"format": "csr", "_shape": shape, "maxprint": 50}
    parts |= dict(zip(("indptr", "indices", "data"), arrays, strict=True))
    return b"cscipy.sparse.csr\ncsr_matrix\n)\x81}" + _items(parts) + b"b"


def write_planetoid(
    folder: Path,
    features: np.ndarray,
    labels: np.ndarray,
    neighbors: Mapping[int, Sequence[int]],
    train: int,
    test: Sequence[int],
    name: str = "cora",
) -> None:
    """Writes the eight files.

    Args:
      folder: where to.
      features: float [nodes, width].
      labels: integers [nodes]; those of nodes that are in neither allx nor tx are not written.
      neighbors: of each node.
      train: how many nodes are for training: the first ones.
      test: ids of test nodes, in the order of tx; nodes before the least of them are in allx.
      name: the data set's.
    """
    one_hot = np.eye(labels.max() + 1, dtype=np.int32)[labels]
    rows = {"": slice(0, train), "all": slice(0, min(test)), "t": list(test)}
    for prefix, ids in rows.items():
        matrix = scipy.sparse.csr_matrix(features[ids].astype(np.float32))
        (folder / f"ind.{name}.{prefix}x").write_bytes(pickled(matrix))
        (folder / f"ind.{name}.{prefix}y").write_bytes(pickled(one_hot[ids]))
    lists = {node: list(ids) for node, ids in neighbors.items()}
    (folder / f"ind.{name}.graph").write_bytes(pickled(lists))
    (folder / f"ind.{name}.test.index").write_text("".join(f"{node}\n" for node in test))
