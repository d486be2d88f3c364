"""Reads arrays of npz files without unpickling, and only if their sizes match the file."""

import errno
import io
import math
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from jmp_train.graphs.file_formats.file_limits import check_bytes, most_bytes
from jmp_train.policies.files import DamagedError, open_plain, printable

_LONGEST_NPY_HEADER = 10_000  # NumPy's limit
_MOST_AXES = 8
_SUFFIX = ".npy"


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
      OSError: the file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "arrays.npz"
      >>> np.savez(file, label=np.array([3, 40]))
      >>> read_npz(file, ["label"])["label"].tolist()
      [3, 40]
    """
    most = most_bytes(max_bytes, path)
    part, present, arrays = "its list of arrays", [], {}
    with open_plain(path) as file:
        if not zipfile.is_zipfile(file):
            raise DamagedError(f"{path} is not an npz file, or an incomplete one")
        try:
            with zipfile.ZipFile(file) as archive:
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
        except (MemoryError, DamagedError):
            raise
        except Exception as error:  # of any kind, raised by zipfile and NumPy for damaged bytes
            is_of_system = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
            if is_of_system:  # and not a seek to a negative position
                raise
            raise DamagedError(f"{path}: {part} cannot be read: {printable(error)}") from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DamagedError(f"{path} has no {missing[0]!r}, only {_listed(present)}")
    return arrays


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str, most: int) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it uses a compression method that numpy does not write")  # and that has no size limit
    with archive.open(info) as file:
        start = io.BytesIO(file.read(_LONGEST_NPY_HEADER))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about files written by Python 2
        shape, dtype = _header(start)
        count = math.prod(shape) * dtype.itemsize
        check_bytes(f"{what} of shape {shape}", count, most)
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
