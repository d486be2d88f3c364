"""Pickles of Python 2 with arrays, sparse matrices or lists of neighbors in them, read as plain data.

A pickle is a program: what it names is imported and called. Here nothing of it is called. Its instructions
are carried out on numbers, strings, lists, tuples and dictionaries; of the six names that the files of
Planetoid use, it is noted what they would be called with, and from those notes, once they are checked, the
arrays are made. Any other name and any instruction that the files have no use for is an error.
"""

import dataclasses
import math
import pickletools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmp_train.graphs.datasets.file_limits import one_line
from jmp_train.graphs.structure import as_count

_LARGEST = 2**26  # bytes; the largest of the public files, Pubmed's allx, has 11 million
_DEEPEST = 2**17  # values on the stack; pickles append 1,000 at a time
_DTYPE = "numpy dtype"
_ARRAY = "numpy.core.multiarray _reconstruct"
_MATRIX = "scipy.sparse.csr csr_matrix"
_DICT = "collections defaultdict"
_PLAIN = (3, None, None, None, -1, -1, 0)  # the state of a dtype without fields, but for its order
_NAMES = {_DTYPE, _ARRAY, _MATRIX, _DICT, "numpy ndarray", "__builtin__ list"}


class SparseRows(NamedTuple):
    """A sparse matrix by rows: of row `r`, columns and values stand from `indptr[r]` to `indptr[r + 1]`.

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
    r"""Reads a pickle of protocol 2, as Python 2 wrote it, without importing or calling what it names.

    Args:
      path: the file.
      max_bytes: how large it may be; None for 64 MiB. What is made of it takes up to 40 times as much.

    Returns:
      An array, a `SparseRows` or a dictionary, whatever the file holds; the last is not checked further.

    Raises:
      ValueError: the file is damaged or too large, or is another pickle; the message names it and the fault.
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
        raise ValueError(f"{path} has {size} bytes, more than {most}; max_bytes= allows more")
    try:
        with path.open("rb") as file:
            value = _carried_out(file.read(size))
        if isinstance(value, _Note):
            value = _matrix(value) if value.name == _MATRIX else _array(value)
    except _Refused as fault:
        raise ValueError(f"{path} {fault}") from None
    except _FAULTS as error:
        fault = one_line(error)
        raise ValueError(f"{path} is not a pickle of Python 2, or a damaged one: {fault}") from None
    return value


class _Refused(Exception):
    """A fault whose text goes on after the name of the file."""


@dataclasses.dataclass(frozen=True)
class _Name:
    """What a pickle would import."""

    text: str


@dataclasses.dataclass(slots=True)
class _Note:
    """What a pickle would call, with which arguments, and the state that it would set afterward."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


# What instructions raise that stand in a wrong place; `pickletools` also warns, and warnings may be errors.
_FAULTS = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError, Warning),
)

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE"),
}


def _carried_out(content: bytes) -> Any:
    """Returns what the instructions of a pickle leave: see `pickletools` for what each of them does."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}  # and no list, which a number in a damaged file could make huge
    for instruction, argument, _ in pickletools.genops(content):
        if len(stack) > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} values wait for what is to become of them")
        name: Any = instruction.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = _last(stack)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_allowed(str(argument)))
        elif name in _STEPS:
            _STEPS[name](stack)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"the instruction {name} is not expected")
    (value,) = stack
    return value


def _allowed(name: str) -> _Name:
    if name not in _NAMES:
        raise _Refused(f"asks for {name[:99]!r}, which no file of this kind needs; it was not called")
    return _Name(name)


def _last(stack: list[Any]) -> Any:
    """Returns the last value of the stack; a mark is not one."""
    if stack[-1] is _MARK:
        raise ValueError("there is a mark where a value is expected")
    return stack[-1]


def _pop(stack: list[Any]) -> Any:
    _last(stack)
    return stack.pop()


def _marked(stack: list[Any]) -> list[Any]:
    """Takes what was pushed after the last mark from the stack, and the mark."""
    values = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _push_tuple(length: int) -> Callable[[list[Any]], None]:
    def step(stack: list[Any]) -> None:
        values = [_pop(stack) for _ in range(length)]
        stack.append(tuple(values[::-1]))

    return step


def _append(stack: list[Any], values: list[Any]) -> None:
    if not isinstance(stack[-1], list):
        raise TypeError("values are appended to what is not a list")
    stack[-1].extend(values)


def _set_items(stack: list[Any], items: list[Any]) -> None:
    keys, values = items[::2], items[1::2]
    # A tuple of tuples of tuples, each the same twice, would be hashed for ever.
    if not isinstance(stack[-1], dict) or not {type(key) for key in keys} <= {int, str}:
        raise TypeError("items are set in what is not a dictionary, or under what is not a number or name")
    stack[-1].update(zip(keys, values, strict=True))


def _call(stack: list[Any]) -> None:
    arguments, name = _pop(stack), _pop(stack)
    if not isinstance(arguments, tuple) or not isinstance(name, _Name):
        raise TypeError("what is called is not a name, or its arguments are not a tuple")
    stack.append({} if name.text == _DICT else _Note(name.text, arguments))


def _build(stack: list[Any]) -> None:
    state = _pop(stack)
    if not isinstance(stack[-1], _Note):
        raise TypeError("a state is set of what was not made")
    stack[-1].state = state


_STEPS: dict[str, Callable[[list[Any]], None]] = {
    "EMPTY_LIST": lambda stack: stack.append([]),
    "EMPTY_DICT": lambda stack: stack.append({}),
    "EMPTY_TUPLE": _push_tuple(0),
    "TUPLE1": _push_tuple(1),
    "TUPLE2": _push_tuple(2),
    "TUPLE3": _push_tuple(3),
    "TUPLE": lambda stack: stack.append(tuple(_marked(stack))),
    "APPEND": lambda stack: _append(stack, [_pop(stack)]),
    "APPENDS": lambda stack: _append(stack, _marked(stack)),
    "SETITEM": lambda stack: _set_items(stack, [_pop(stack), _pop(stack)][::-1]),
    "SETITEMS": lambda stack: _set_items(stack, _marked(stack)),
    "REDUCE": _call,
    "NEWOBJ": _call,
    "BUILD": _build,
}


def _array(note: Any) -> np.ndarray:
    """Returns the array whose making was noted."""
    if not isinstance(note, _Note) or note.name != _ARRAY:
        raise TypeError("there is no array where one is expected")
    if not _is_name(note.arguments[0], "numpy ndarray") or note.arguments[1:] != ((0,), "b"):
        raise ValueError("an array is not made as arrays are")
    version, shape, dtype, by_columns, content = note.state
    if type(by_columns) is not bool:
        raise ValueError("an array does not say whether it is by columns")
    if version != 1:
        raise ValueError("an array is of another version than arrays are")
    dtype, content = _dtype(dtype), content.encode("latin1")
    _check_shape(shape)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} has {len(content)} bytes of {dtype}")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C")
    if not np.isfinite(array).all():
        raise ValueError("a number of an array is not finite")
    return array.astype(dtype.newbyteorder("="))


def _dtype(note: Any) -> np.dtype:
    if not isinstance(note, _Note) or note.name != _DTYPE:
        raise TypeError("there is no dtype where one is expected")
    code, order = note.arguments[0], note.state[1]
    if note.arguments[1:] != (0, 1) or (note.state[:1] + note.state[2:]) != _PLAIN:
        raise ValueError("the dtype of an array is not made as dtypes are")
    if not re.fullmatch(r"[<>|](b1|[iu][1248]|f[48])", order + code):
        raise ValueError("the dtype of an array is not of numbers")
    return np.dtype(order + code)


def _is_name(value: Any, name: str) -> bool:
    return isinstance(value, _Name) and value.text == name


def _check_shape(shape: Any) -> None:
    is_tuple = isinstance(shape, tuple) and len(shape) <= 2
    if not is_tuple or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the shape of an array is not one or two integers from 0")


def _matrix(note: _Note) -> SparseRows:
    """Returns the parts of the matrix whose making was noted; they fit each other."""
    if not isinstance(note.state, dict) or note.state.get("format") != "csr":
        raise ValueError("a sparse matrix is not in the format 'csr'")
    indptr, indices, data = (_array(note.state[name]) for name in ("indptr", "indices", "data"))
    shape = note.state["_shape"]
    _check_shape(shape)
    rows, columns = shape
    if indptr.shape != (rows + 1,) or indices.ndim != 1 or data.shape != indices.shape:
        raise ValueError(
            f"a matrix of shape {shape} has {indptr.shape} indptr, {indices.shape} indices and {data.shape} data"
        )
    if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu":
        raise ValueError("the indices of a sparse matrix are not integers")
    if indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(f"the rows of a sparse matrix do not divide its {len(indices)} values")
    if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
        raise ValueError(f"a column of a sparse matrix is not among its {columns}")
    return SparseRows(indptr, indices, data, (rows, columns))
