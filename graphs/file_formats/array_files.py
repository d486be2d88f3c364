"""Reads arrays of npz and safetensors files without unpickling, and only if their sizes match the file.

Safetensors files, a header of JSON before the bytes of the arrays, are written too, with NumPy alone.

Reference: https://huggingface.co/docs/safetensors.
"""

import errno
import io
import json
import math
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from numpy.lib import format as npy

from jmp_train.graphs.file_formats.file_limits import check_bytes, most_bytes, one_line

_LONGEST_NPY_HEADER = 10_000  # NumPy's limit
_MOST_AXES = 8
_SUFFIX = ".npy"

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
_NAMES = {name: stored for stored, name in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit
_METADATA = "__metadata__"


def read_npz(path: Path, names: Sequence[str], *, max_bytes: int | None = None) -> dict[str, np.ndarray]:
    """Returns arrays of an npz file.

    Args:
      path: the file, from `numpy.savez` or `numpy.savez_compressed`.
      names: names of the arrays to read.
      max_bytes: largest number of bytes of these together; None for 100 times the file's size, and 256 MiB
        at least.

    Raises:
      ValueError: the file is not an npz file, is damaged, lacks an array, or has one of objects; or arrays would take
        more memory than allowed. The message names the file, the array and the fault.
      OSError, MemoryError: as the system raises them.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "arrays.npz"
      >>> np.savez(file, label=np.array([3, 40]))
      >>> read_npz(file, ["label"])["label"].tolist()
      [3, 40]
    """
    most = most_bytes(max_bytes, path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an npz file, or an incomplete one")
    part, present, arrays = "its list of arrays", [], {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                info.filename.removesuffix(_SUFFIX): info
                for info in archive.infolist()
                if info.filename.endswith(_SUFFIX)
            }
            present = list(members)
            for name in filter(members.__contains__, names):
                part = repr(name)
                taken = sum(array.nbytes for array in arrays.values())
                arrays[name] = _array(archive, members[name], f"{path}: {name!r}", most - taken)
    except MemoryError:
        raise
    except _TooLargeError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # of any kind, raised by zipfile and NumPy for damaged bytes
        is_of_system = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if is_of_system:  # and not a seek to a negative position
            raise
        raise ValueError(f"{path}: {part} cannot be read: {one_line(error)}") from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{path} has no {missing[0]!r}, only {_listed(present)}")
    return arrays


class _TooLargeError(ValueError):
    """An error whose message is complete."""


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str, most: int) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it uses a compression method that numpy does not write")  # and that has no size limit
    with archive.open(info) as file:
        start = io.BytesIO(file.read(_LONGEST_NPY_HEADER))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about files written by Python 2
        shape, dtype = _header(start)
        count = math.prod(shape) * dtype.itemsize
        try:
            check_bytes(f"{what} of shape {shape}", count, most)
        except ValueError as error:
            raise _TooLargeError(str(error)) from None
        if count != info.file_size - start.tell():
            raise ValueError(
                f"its header gives {dtype} {shape}, {count} bytes, but it has {info.file_size - start.tell()} bytes"
            )
        with archive.open(info) as file:
            return npy.read_array(file, allow_pickle=False, max_header_size=_LONGEST_NPY_HEADER)


def _header(start: io.BytesIO) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and dtype, and leaves the position in `start` at the beginning of the content."""
    version = npy.read_magic(start)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(start)
    elif version == (2, 0):
        shape, _, dtype = npy.read_array_header_2_0(start)
    else:
        raise ValueError(f"version {version} of its format is unknown")
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be read: they are pickles")
    if len(shape) > _MOST_AXES or not all(0 <= length < 2**48 for length in shape):
        raise ValueError("its header has an invalid shape")
    return shape, dtype


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:20])
    return shown[:200] or "none"


class SafetensorsFile:
    """A file open for reading, with a checked header; arrays are read on request.

    Attributes:
      metadata: texts by name.
      names: names of the arrays.

    Raises:
      ValueError: the file is damaged, or not of this format.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "some"
      >>> _ = path.write_bytes(serialized({"a": np.arange(3)}, {"of": "us"}))
      >>> with SafetensorsFile(path) as file:
      ...     file.metadata, file.names, file.read("a")
      ({'of': 'us'}, ['a'], array([0, 1, 2]))
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            header, self._start = self._header()
            self.metadata: Mapping[str, str] = _metadata(header.pop(_METADATA, {}))
            self._arrays = {name: _place(name, entry) for name, entry in header.items()}
            _check_places(self._arrays, os.fstat(self._file.fileno()).st_size - self._start)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return list(self._arrays)

    def read(self, name: str) -> np.ndarray:
        """Returns one of the arrays.

        Args:
          name: name of the array.
        """
        dtype, shape, begin, end = self._arrays[name]
        self._file.seek(self._start + begin)
        content = self._file.read(end - begin)
        if len(content) < end - begin:
            raise ValueError(f"the array {name[:200]!r} is truncated")
        if dtype == np.bool_ and content.strip(b"\0\1"):
            raise ValueError(f"the array {name[:200]!r} has booleans that are neither 0 nor 1")
        return np.frombuffer(bytearray(content), dtype).reshape(shape)

    def _header(self) -> tuple[dict[str, Any], int]:
        size = int.from_bytes(self._file.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError(f"its header has {size} bytes, more than the limit of {_LONGEST_HEADER}")
        content = self._file.read(size)
        if len(content) < size or size < 2:
            raise ValueError("its header is truncated")
        try:
            header = json.loads(content)
        except (ValueError, RecursionError):
            raise ValueError("its header is not JSON") from None
        if not isinstance(header, dict):
            raise ValueError("its header is not a dictionary")
        return header, 8 + size


def serialized(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Returns the content of a file.

    Args:
      arrays: arrays by name, with dtypes in `DTYPES`; names are valid unicode.
      metadata: texts by name.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts, begin = [], 0
    # As in the format's own writer: the widest elements first, so that all are aligned.
    for name in sorted(arrays, key=lambda name: (-arrays[name].itemsize, name)):
        array = arrays[name]
        content = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False).tobytes()
        end = begin + len(content)
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
        parts.append(content)
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


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
        raise ValueError(f"the array {name[:200]!r} has an unknown dtype")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the array {name[:200]!r} has no valid shape or data_offsets")
    found, (begin, end) = np.dtype(jnp.dtype(DTYPES[dtype])), offsets
    if end - begin != math.prod(shape) * found.itemsize:
        raise ValueError(f"the array {name[:200]!r} has {end - begin} bytes, which does not fit its shape")
    return found.newbyteorder("<"), tuple(shape), begin, end


def _are_counts(numbers: Any) -> bool:
    """Returns whether a value is a list of numbers from 0, with few enough axes and a small enough size for NumPy."""
    return isinstance(numbers, list) and len(numbers) <= 32 and all(type(n) is int and 0 <= n < 2**62 for n in numbers)


def _check_places(arrays: Mapping[str, tuple[np.dtype, tuple[int, ...], int, int]], size: int) -> None:
    """Raises ValueError if arrays overlap, or leave bytes of the file unused."""
    last = 0
    for begin, end in sorted((begin, end) for _, _, begin, end in arrays.values()):
        if begin != last:
            raise ValueError(f"its arrays overlap or leave a gap at byte {begin}")
        last = end
    if last != size:
        raise ValueError(f"its arrays end at byte {last}, but the file at byte {size}")
