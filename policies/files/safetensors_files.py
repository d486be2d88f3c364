"""Reads and writes safetensors files, a header of JSON before the bytes of the arrays, with only NumPy.

A sealed file has a sha256 of each array and one of the header in its metadata, so that no damage goes unnoticed. Other
programs read it as any file of the format.

Reference: https://huggingface.co/docs/safetensors.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.files.plain_files import DamagedError, damage_named, open_plain, parse_json, write_atomically

DTYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
MOST_AXES = 32  # of an array in a file that is read
_NAMES = {name: stored for stored, name in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit
_METADATA = "__metadata__"
_SUMS, _SUM = "sha256_of_arrays", "sha256"  # of a sealed file: in JSON by the arrays' names, and of all of the header


class SafetensorsFile:
    """A file open for reading, with a checked header; arrays are read on request.

    Args:
      path: the file.
      sealed: True for a file of `write_safetensors(..., sealed=True)`: every byte of it is checked when it is read, and
        it is not reached by a link.

    Attributes:
      metadata: texts by name.
      names: names of the arrays.

    Raises:
      DamagedError: the file is damaged, or not of this format; so does `read`.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "some"
      >>> write_safetensors(path, {"a": np.arange(3)}, {"of": "us"})
      >>> with SafetensorsFile(path) as file:
      ...     file.metadata, file.names, file.read("a")
      ({'of': 'us'}, ['a'], array([0, 1, 2]))
    """

    def __init__(self, path: str | os.PathLike[str], *, sealed: bool = False) -> None:
        self._path, what = path, f"{path} is not a safetensors file, or a damaged one"
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(open_plain(path, follow=not sealed))
            with damage_named(what):
                header, self._start = self._header(what)
                self._sums = _checked_sums(header) if sealed else {}
                self.metadata: Mapping[str, str] = _metadata(header.pop(_METADATA, {}))
                self._arrays = {name: _place(name, entry) for name, entry in header.items()}
                _check_places(self._arrays, os.fstat(self._file.fileno()).st_size - self._start)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return list(self._arrays)

    @property
    def types(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype, by name, and the shape of each array."""
        return {name: (dtype.name, shape) for name, (dtype, shape, _, _) in self._arrays.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns one of the arrays.

        Args:
          name: name of the array.
        """
        dtype, shape, begin, end = self._arrays[name]
        self._file.seek(self._start + begin)
        content = bytearray(end - begin)
        if self._file.readinto(content) < end - begin:
            raise DamagedError(f"{self._path}: the array {name[:200]!r} is truncated")
        if self._sums and self._sums.get(name) != hashlib.sha256(content).hexdigest():
            raise DamagedError(f"{self._path}: the array {name[:200]!r} is not as it was written")
        if dtype == np.bool_ and content.strip(b"\0\1"):
            raise DamagedError(f"{self._path}: the array {name[:200]!r} has booleans that are neither 0 nor 1")
        return np.frombuffer(content, dtype).reshape(shape)

    def _header(self, what: str) -> tuple[dict[str, Any], int]:
        size = int.from_bytes(self._file.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError(f"its header has {size} bytes, more than the limit of {_LONGEST_HEADER}")
        content = self._file.read(size)
        if len(content) < size or size < 2:
            raise ValueError("its header is truncated")
        header = parse_json(f"{what}: its header", content)
        if not isinstance(header, dict):
            raise ValueError("its header is not a dictionary")
        return header, 8 + size


def write_safetensors(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, sealed: bool = False
) -> None:
    """Writes a file atomically, one array after the other.

    Args:
      path: the file, in an existing folder. An existing file is replaced.
      arrays: arrays by name, with dtypes in `DTYPES`; names are valid unicode.
      metadata: texts by name.
      sealed: True to add a sha256 of each array and of the header.

    Raises:
      ValueError: the header is longer than the format allows, or a name is the format's own.
      OSError: the file cannot be written.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    if _METADATA in arrays:
        raise ValueError(f"an array of a safetensors file cannot be called {_METADATA}")
    parts: dict[str, np.ndarray] = {}
    begin = 0
    # As in the format's own writer: the widest elements first, so that all are aligned.
    for name in sorted(arrays, key=lambda name: (-arrays[name].itemsize, name)):
        array = arrays[name]
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).ravel().view(np.uint8)
        if array.dtype == np.bool_:
            content = np.minimum(content, 1)  # a view of other bytes as booleans has any; readers allow 0 and 1
        end = begin + content.size
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, end]}
        parts[name] = content
        begin = end
    if sealed:
        header[_METADATA][_SUMS] = json.dumps({name: hashlib.sha256(x.data).hexdigest() for name, x in parts.items()})
        header[_METADATA][_SUM] = _sum_of(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise ValueError(f"the header of {path} has {len(text)} bytes, more than the limit of {_LONGEST_HEADER}")
    write_atomically(path, [len(text).to_bytes(8, "little"), text, *parts.values()])


def _sum_of(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _checked_sums(header: dict[str, Any]) -> dict[str, str]:
    """Returns the sums of the arrays, after a check of the header's own; takes both out of the header."""
    metadata = header[_METADATA]
    if metadata.pop(_SUM, None) != _sum_of(header):
        raise ValueError("its header is not as it was written")
    sums = json.loads(metadata.pop(_SUMS))
    if sums.keys() != header.keys() - {_METADATA}:
        raise ValueError("its header does not have a sha256 of each array")
    return sums


def _metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata must map names to texts")
    return metadata


def _place(name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Returns dtype, shape, and the range of an array's bytes."""
    fields = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the array {name[:200]!r} has the unknown dtype {str(dtype)[:20]!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the array {name[:200]!r} has no valid shape or data_offsets")
    found, (begin, end) = np.dtype(jnp.dtype(DTYPES[dtype])), offsets
    if end - begin != math.prod(shape) * found.itemsize:
        raise ValueError(f"the array {name[:200]!r} has {end - begin} bytes, which does not fit its shape")
    return found.newbyteorder("<"), tuple(shape), begin, end


def _are_counts(numbers: Any) -> bool:
    """Returns whether a value is a list of numbers from 0, with few enough axes and a small enough size for NumPy."""
    return (
        isinstance(numbers, list)
        and len(numbers) <= MOST_AXES
        and all(type(n) is int and 0 <= n < 2**62 for n in numbers)
    )


def _check_places(arrays: Mapping[str, tuple[np.dtype, tuple[int, ...], int, int]], size: int) -> None:
    """Raises ValueError if arrays overlap, or leave bytes of the file unused."""
    last = 0
    for begin, end in sorted((begin, end) for _, _, begin, end in arrays.values()):
        if begin != last:
            raise ValueError(f"its arrays overlap or leave a gap at byte {begin}")
        last = end
    if last != size:
        raise ValueError(f"its arrays end at byte {last}, but the file at byte {size}")
