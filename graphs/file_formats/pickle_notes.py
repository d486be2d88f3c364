"""Interprets pickles as plain data: the objects that they name are recorded, and neither imported nor called.

A pickle is a program: unpickling imports and calls the objects that it names. Here nothing is called. Its instructions
operate on numbers, strings, lists, tuples and dictionaries. For the few names that a kind of file uses, a note records
the arguments of the call, and arrays are built from checked notes. Any other name and
any instruction that the files do not need is an error.
"""

import dataclasses
import math
import pickletools
import re
from collections.abc import Callable, Collection
from typing import IO, Any

import numpy as np

_DEEPEST = 2**17  # values on the stack; pickles append 1,000 at a time
_DTYPE = "numpy dtype"
_ARRAY = "numpy ndarray"
_MAKERS = {f"numpy.{core}.multiarray _reconstruct" for core in ("core", "_core")}
_DICTS = {"collections defaultdict", "collections OrderedDict"}
_PLAIN = (3, None, None, None, -1, -1, 0)  # the state of a dtype without fields, except its order
_BYTES, _ENCODE = "__builtin__ bytes", "_codecs encode"  # Python 3's forms of bytes for Python 2
STORAGE = "persistent"  # of a note: a reference to data stored next to the pickle

PYTHON2_ARRAYS = {_DTYPE, _ARRAY, "numpy.core.multiarray _reconstruct"}
PYTHON3_ARRAYS = {_DTYPE, _ARRAY, *_MAKERS, _BYTES, _ENCODE}


class Refused(Exception):
    """A fault; the caller puts the name of the file before its message."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A name that a pickle would import."""

    text: str


@dataclasses.dataclass(slots=True)
class PickleNote:
    """A call that a pickle would make, with its arguments, and the state that it would set afterward."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


# Errors of instructions in a wrong place; `pickletools` also warns, and warnings may be errors.
FAULTS = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError, Warning),
)

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE"),
}


def carried_out(
    source: bytes | IO[bytes], names: Collection[str], *, most: int | None = None, has_storages: bool = False
) -> Any:
    r"""Returns the result of a pickle's instructions, which `pickletools` describes.

    Args:
      source: the pickle; a file is read from its current position, and only to the pickle's end.
      names: the names that it may use, each a module and a name.
      most: largest number of instructions; None for no limit.
      has_storages: True if it may refer to data stored next to it, as torch's pickles do.

    Raises:
      Refused: it uses another name.
      Exception: one of `FAULTS`: it is damaged, or of another kind.

    Example:
      >>> carried_out(b"\x80\x02]K\x07a.", ())
      [7]
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}  # not a list, which a number in a damaged file could make huge
    for count, (instruction, argument, _) in enumerate(pickletools.genops(source)):
        if most is not None and count >= most:
            raise ValueError(f"it has more than {most} instructions")
        if len(stack) > _DEEPEST:
            raise ValueError(f"its stack has more than {_DEEPEST} values")
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
            stack.append(_allowed(str(argument), names))
        elif name == "BINPERSID" and has_storages:
            stack.append(PickleNote(STORAGE, (_pop(stack),)))
        elif name in _STEPS:
            _STEPS[name](stack)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"instruction {name} is not allowed")
    (value,) = stack
    return value


def _allowed(name: str, names: Collection[str]) -> Name:
    if name not in names:
        raise Refused(f"asks for {name[:99]!r}, which no file of this kind needs; it was not called")
    return Name(name)


def _last(stack: list[Any]) -> Any:
    """Returns the last value of the stack, which must not be a mark."""
    if stack[-1] is _MARK:
        raise ValueError("it has a mark in place of a value")
    return stack[-1]


def _pop(stack: list[Any]) -> Any:
    _last(stack)
    return stack.pop()


def _marked(stack: list[Any]) -> list[Any]:
    """Removes the values after the last mark from the stack, and the mark, and returns the values."""
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
        raise TypeError("it appends values to an object that is not a list")
    stack[-1].extend(values)


def _set_items(stack: list[Any], items: list[Any]) -> None:
    keys, values = items[::2], items[1::2]
    # Hashing would take forever for nested tuples that contain the same tuple twice at each level.
    if not isinstance(stack[-1], dict) or not {type(key) for key in keys} <= {int, str}:
        raise TypeError(
            "it sets items of an object that is not a dictionary, or with keys that are not numbers or names"
        )
    stack[-1].update(zip(keys, values, strict=True))


def _call(stack: list[Any]) -> None:
    arguments, name = _pop(stack), _pop(stack)
    if not isinstance(arguments, tuple) or not isinstance(name, Name):
        raise TypeError("it calls an object that is not a name, or with arguments that are not a tuple")
    stack.append({} if name.text in _DICTS else PickleNote(name.text, arguments))


def _build(stack: list[Any]) -> None:
    state = _pop(stack)
    if not isinstance(stack[-1], PickleNote):
        raise TypeError("it sets the state of an object that it did not create")
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


def array_of(note: Any) -> np.ndarray:
    """Returns the array described by a note."""
    if not isinstance(note, PickleNote) or note.name not in _MAKERS:
        raise TypeError("an array is missing")
    kind, shape, code = note.arguments
    if not is_name(kind, _ARRAY) or shape != (0,) or _bytes_of(code) != b"b":
        raise ValueError("an array is not created as NumPy does")
    version, shape, dtype, by_columns, content = note.state
    if type(by_columns) is not bool:
        raise ValueError("an array does not give its order, by rows or columns")
    if version != 1:
        raise ValueError("an array has an unknown version")
    dtype, content = _dtype(dtype), _bytes_of(content)
    check_shape(shape)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} has {len(content)} bytes of {dtype}")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C")
    if not np.isfinite(array).all():
        raise ValueError("an array has numbers that are not finite")
    return array.astype(dtype.newbyteorder("="))


def _dtype(note: Any) -> np.dtype:
    if not isinstance(note, PickleNote) or note.name != _DTYPE:
        raise TypeError("a dtype is missing")
    code, order = note.arguments[0], note.state[1]
    if note.arguments[1:] != (0, 1) or (note.state[:1] + note.state[2:]) != _PLAIN:
        raise ValueError("the dtype of an array is not created as NumPy does")
    if not re.fullmatch(r"[<>|](b1|[iu][1248]|f[48])", order + code):
        raise ValueError("the dtype of an array is not numeric")
    return np.dtype(order + code)


def _bytes_of(value: Any) -> bytes:
    """Returns bytes, which Python 2 wrote directly, and Python 3 as text to encode."""
    if isinstance(value, PickleNote) and value.state is None:
        if value.name == _BYTES and value.arguments == ():
            return b""
        if value.name == _ENCODE and value.arguments[1:] == ("latin1",):
            value = value.arguments[0]
    if not isinstance(value, str):
        raise TypeError("the bytes of an array are missing")
    return value.encode("latin1")


def is_name(value: Any, name: str) -> bool:
    """Returns whether a value of a pickle is a name."""
    return isinstance(value, Name) and value.text == name


def check_shape(shape: Any) -> None:
    """Raises ValueError if a value of a pickle is not a shape of one or two axes."""
    is_tuple = isinstance(shape, tuple) and len(shape) <= 2
    if not is_tuple or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the shape of an array must be one or two integers of at least 0")
