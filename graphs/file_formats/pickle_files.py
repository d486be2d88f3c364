"""Reads files of pickles without unpickling: those of Python 2, as Planetoid's, and those of `torch.save`.

Pickles of Python 2 hold arrays, sparse matrices or lists of neighbors. A file of torch is a zip archive with a pickle
in it, or, before torch 1.6, several pickles one after the other. `pickle_notes` describes how they are read.
"""

import contextlib
import errno
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jmp_train.graphs.file_formats.file_limits import check_bytes, most_bytes
from jmp_train.graphs.file_formats.pickle_notes import (
    FAULTS,
    PYTHON2_ARRAYS,
    PYTHON3_ARRAYS,
    STORAGE,
    PickleNote,
    Refused,
    array_of,
    carried_out,
    check_shape,
    is_name,
)
from jmp_train.graphs.structure import as_count
from jmp_train.policies.files import DamagedError, open_plain, printable

_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of an old file
_VERSION = 1001
_MOST_INSTRUCTIONS = 10_000  # a dictionary of arrays has about 30 per array
_LARGEST_TORCH = 2**32  # bytes; the largest of the public files, ogbl-citation2's, have 0.8 GB
_TENSOR = "torch._utils _rebuild_tensor_v2"
_STORAGES = {
    f"torch {kind}Storage": np.dtype(code)
    for kind, code in {
        "Long": "<i8", "Int": "<i4", "Short": "<i2", "Char": "<i1", "Byte": "<u1", "Bool": "?",
        "Half": "<f2", "Float": "<f4", "Double": "<f8",
    }.items()
}  # fmt: skip
_TORCH_NAMES = {*PYTHON3_ARRAYS, *_STORAGES, _TENSOR, "collections OrderedDict"}
_LARGEST_PYTHON2 = 2**26  # bytes; the largest of the public files, Pubmed's allx, has 11 million
_MATRIX = "scipy.sparse.csr csr_matrix"
_PYTHON2_NAMES = {*PYTHON2_ARRAYS, _MATRIX, "collections defaultdict", "__builtin__ list"}


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
      OSError: the file cannot be read, or does not fit into memory.

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
    most = _LARGEST_PYTHON2 if max_bytes is None else as_count("max_bytes", max_bytes, sys.maxsize)
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_bytes(f"{path}: the file", size, most)
        try:
            value = carried_out(file.read(size), _PYTHON2_NAMES)
            if isinstance(value, PickleNote):
                value = _matrix(value) if value.name == _MATRIX else array_of(value)
        except Refused as fault:
            raise DamagedError(f"{path} {fault}") from None
        except FAULTS as error:
            fault = printable(error)
            raise DamagedError(f"{path} is not a pickle of Python 2, or a damaged one: {fault}") from None
    return value


def _matrix(note: PickleNote) -> SparseRows:
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


def read_torch_arrays(path: Path, *, max_bytes: int | None = None) -> dict[str, np.ndarray]:
    """Reads a dictionary of NumPy arrays or torch tensors from a file of `torch.save`.

    Args:
      path: the file.
      max_bytes: largest size of the file, and of all arrays together; None for 4 GiB.

    Returns:
      The arrays by their names, of one or two axes.

    Raises:
      ValueError: the file is damaged, too large, or of another kind; or it has other content. The message has its name
        and the fault.
      OSError: the file cannot be read, or does not fit into memory.

    Example:
      >>> import pickle, tempfile
      >>> file = Path(tempfile.mkdtemp()) / "train.pt"
      >>> with zipfile.ZipFile(file, "w") as archive:
      ...     archive.writestr("train/data.pkl", pickle.dumps({"edge": np.array([[0, 1]])}, protocol=2))
      >>> read_torch_arrays(file)["edge"].tolist()
      [[0, 1]]
    """
    most = _LARGEST_TORCH if max_bytes is None else most_bytes(max_bytes, path)
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_bytes(f"{path}: the file", size, most)
        with _faults_told(path):
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    return _of_archive(archive, size)
            file.seek(0)
            return _arrays(_of_pickles(file), None, size)


@contextlib.contextmanager
def _faults_told(path: Path) -> Iterator[None]:
    try:
        yield
    except Refused as fault:
        raise DamagedError(f"{path} {fault}") from None
    except (*FAULTS, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # by the system, and not a seek to a negative position
        raise DamagedError(f"{path} is not a torch file, or a damaged one: {printable(error)}") from None


def _of_archive(archive: zipfile.ZipFile, size: int) -> dict[str, np.ndarray]:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if len({info.filename.partition("/")[0] for info in archive.infolist()}) != 1:
        raise ValueError("its entries are not in one folder")

    def content(name: str) -> bytes:
        info = members[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name!r} is compressed, which torch does not do")
        return archive.read(info)

    if "byteorder" in members and content("byteorder") != b"little":
        raise ValueError("its numbers are not little-endian")
    return _arrays(_carried_out(content("data.pkl"), has_storages=True), lambda key: content(f"data/{key}"), size)


def _of_pickles(file: IO[bytes]) -> Any:
    """Returns the value in a file of pickles: a number that marks it, its version, the system, the value, storages."""
    if _carried_out(file) != _MAGIC or _carried_out(file) != _VERSION:
        raise ValueError("it does not start with torch's magic number")
    _carried_out(file)
    value, storages = _carried_out(file), _carried_out(file)
    if storages != [] or file.read(1):
        raise ValueError("it has data after its arrays")
    return value


def _carried_out(source: bytes | IO[bytes], *, has_storages: bool = False) -> Any:
    return carried_out(source, _TORCH_NAMES, most=_MOST_INSTRUCTIONS, has_storages=has_storages)


def _arrays(value: Any, stored: Callable[[str], bytes] | None, size: int) -> dict[str, np.ndarray]:
    if not isinstance(value, dict):
        raise TypeError("it must hold a dictionary of arrays")
    arrays, left = {}, size
    for name, note in value.items():
        if not isinstance(name, str) or not isinstance(note, PickleNote):
            raise Refused(f"holds {str(name)[:40]!r}, which is not an array")
        arrays[name] = _tensor(note, stored) if stored and note.name == _TENSOR else array_of(note)
        left -= arrays[name].nbytes
        if left < 0:
            raise ValueError(f"its arrays would take more than its {size} bytes")
    return arrays


def _tensor(note: PickleNote, stored: Callable[[str], bytes]) -> np.ndarray:
    """Returns the tensor described by a note: all of its storage, or a part without gaps."""
    storage, first, shape, strides, requires_grad, hooks = note.arguments
    is_plain = isinstance(requires_grad, bool) and hooks == {}
    if not isinstance(storage, PickleNote) or storage.name != STORAGE or not is_plain:
        raise ValueError("a tensor is not created as torch does")
    kind, dtype_name, key, _, count = storage.arguments[0]
    known = [dtype for name, dtype in _STORAGES.items() if is_name(dtype_name, name)]
    if kind != "storage" or not known or not isinstance(key, str):
        raise ValueError("the storage type of a tensor is unknown")
    check_shape(shape)
    check_shape((first, count))
    size = math.prod(shape)
    if size and strides != tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))):
        raise ValueError("a tensor is not contiguous: save it after .contiguous()")
    content = np.frombuffer(stored(key), known[0])
    if len(content) != count or first + size > count:
        raise ValueError(f"a tensor of shape {shape} has {len(content)} numbers, where {count} are stored")
    array = content[first : first + size].reshape(shape).copy()
    if not np.isfinite(array).all():
        raise ValueError("a tensor has numbers that are not finite")
    return array
