"""Reads pickles of Python 2 with arrays, sparse matrices or lists of neighbors as plain data.

The files of Planetoid use six names, and no other is allowed; `pickle_notes` describes how they are read.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmp_train.graphs.file_formats.file_limits import one_line
from jmp_train.graphs.file_formats.pickle_notes import (
    FAULTS,
    PYTHON2_ARRAYS,
    Note,
    Refused,
    array_of,
    carried_out,
    check_shape,
)
from jmp_train.graphs.structure import as_count

_LARGEST = 2**26  # bytes; the largest of the public files, Pubmed's allx, has 11 million
_MATRIX = "scipy.sparse.csr csr_matrix"
_NAMES = {*PYTHON2_ARRAYS, _MATRIX, "collections defaultdict", "__builtin__ list"}


class SparseRows(NamedTuple):
    """A sparse matrix by rows: columns and values of row `r` are from `indptr[r]` to `indptr[r + 1]`.

    Attributes:
      indptr: integers [rows + 1], ascending from 0 to the number of values.
      indices: integers [values], the columns.
      data: numbers [values], all finite.
      shape: rows and columns.
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    shape: tuple[int, int]


def read_python2_pickle(path: Path, *, max_bytes: int | None = None) -> Any:
    r"""Reads a pickle of protocol 2, written by Python 2, without importing or calling the objects that it names.

    Args:
      path: the file.
      max_bytes: largest size of the file; None for 64 MiB. The result takes up to 40 times as much.

    Returns:
      The content of the file, an array, a `SparseRows` or a dictionary; the last is not checked further.

    Raises:
      ValueError: the file is damaged or too large, or is another pickle; the message has its name and the fault.
      OSError, MemoryError: as the system raises them.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "file"
      >>> _ = file.write_bytes(b"\x80\x02cposix\nsystem\nU\x06reboot\x85R.")
      >>> try:
      ...     read_python2_pickle(file)
      ... except ValueError as fault:
      ...     print(str(fault).replace(str(file), "file"))
      file asks for 'posix system', which no file of this kind needs; it was not called
    """
    size = path.stat().st_size
    most = _LARGEST if max_bytes is None else as_count("max_bytes", max_bytes, sys.maxsize)
    if size > most:
        raise ValueError(f"{path} has {size} bytes, more than the limit of {most}; raise it with max_bytes=")
    try:
        with path.open("rb") as file:
            value = carried_out(file.read(size), _NAMES)
        if isinstance(value, Note):
            value = _matrix(value) if value.name == _MATRIX else array_of(value)
    except Refused as fault:
        raise ValueError(f"{path} {fault}") from None
    except FAULTS as error:
        fault = one_line(error)
        raise ValueError(f"{path} is not a pickle of Python 2, or a damaged one: {fault}") from None
    return value


def _matrix(note: Note) -> SparseRows:
    """Returns the checked parts of the matrix described by a note."""
    if not isinstance(note.state, dict) or note.state.get("format") != "csr":
        raise ValueError("a sparse matrix is not in the format 'csr'")
    indptr, indices, data = (array_of(note.state[name]) for name in ("indptr", "indices", "data"))
    shape = note.state["_shape"]
    check_shape(shape)
    rows, columns = shape
    if indptr.shape != (rows + 1,) or indices.ndim != 1 or data.shape != indices.shape:
        raise ValueError(
            f"a matrix of shape {shape} has indptr, indices and data of shapes {indptr.shape}, {indices.shape} "
            f"and {data.shape}"
        )
    if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu":
        raise ValueError("the indices of a sparse matrix are not integers")
    if indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(f"the row pointers of a sparse matrix do not fit its {len(indices)} values")
    if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
        raise ValueError(f"a column index of a sparse matrix is out of range for {columns} columns")
    return SparseRows(indptr, indices, data, (rows, columns))
