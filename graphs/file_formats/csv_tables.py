"""Tables of numbers in csv files without a header, gzipped or not, as OGB publishes them."""

import contextlib
import io
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from jax.typing import DTypeLike

from jmp_train.graphs.file_formats.file_limits import check_bytes, most_bytes
from jmp_train.policies.files import DamagedError, faults_named, open_plain, printable

_BLOCK = 2**21  # bytes of text parsed at once, and of the longest line
_GZIP = b"\x1f\x8b"  # the first bytes of gzip files
_ZIPPED = 2**17  # bytes unzipped at once


def read_csv_table(
    path: Path, dtype: DTypeLike, rows: int | None = None, *, max_bytes: int | None = None
) -> np.ndarray:
    r"""Reads a csv file of numbers, at the speed of `numpy.loadtxt`; empty lines are skipped.

    Args:
      path: the file; it is gzipped if its name ends with `.gz`.
      dtype: dtype of the numbers: int32, float32 or float64.
      rows: expected number of rows: memory is allocated for them at once, and reading ends soon after them.
      max_bytes: largest number of bytes of the text, and of the numbers; None for 100 times the file's
        size, and 256 MiB at least.

    Returns:
      An array of that dtype [rows, columns]; [0, 0] if the file is empty. If the file has more rows than
      expected, not all of them.

    Raises:
      ValueError: the file is damaged or too large, a row has more or fewer columns than the first, or
        something is not a number of that dtype; the message names the file and the row, counted from 0.
      OSError: the file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "edge.csv"
      >>> _ = file.write_text("0,1\n1,2\n")
      >>> read_csv_table(file, np.int32)
      array([[0, 1],
             [1, 2]], dtype=int32)
    """
    try:
        with faults_named(path):
            return _parsed(path, np.dtype(dtype), rows, most_bytes(max_bytes, path))
    except (EOFError, zlib.error) as error:
        raise DamagedError(f"{path} is not a gzip file, or a damaged one: {printable(error)}") from None


def _parsed(path: Path, dtype: np.dtype, rows: int | None, most: int) -> np.ndarray:
    table, count = np.zeros((0, 0), dtype), 0
    with warnings.catch_warnings(), _fast_sources() as source:
        warnings.simplefilter("ignore", UserWarning)  # about an empty file
        warnings.simplefilter("error", DeprecationWarning)  # about 1.5 read as the integer 1
        for block in _blocks(path, most):
            columns = table.shape[1] if count else None
            try:
                part = np.loadtxt(source(block), dtype, comments=None, delimiter=",", ndmin=2, encoding="latin1")
            except (ValueError, DeprecationWarning) as error:
                fault = next(_faults(block, dtype, count, columns), printable(error))
                raise DamagedError(f"{path}: {fault}") from None
            if not part.size:
                continue
            if columns not in (None, part.shape[1]):
                raise DamagedError(f"{path}: {next(_faults(block, dtype, count, columns))}")
            needed = count + len(part)
            check_bytes(f"{path}: the table", needed * part[0].nbytes, most)
            if not count:
                is_room = rows is not None and rows * part[0].nbytes <= most
                table = np.empty((max(needed, rows if is_room else 0), part.shape[1]), dtype)
            elif needed > len(table):  # in place, without a second copy of a large table
                table.resize((max(needed, len(table) * 5 // 4), part.shape[1]), refcheck=False)
            table[count:needed] = part
            count = needed
            if rows is not None and count > rows:
                break
    table.resize((count, table.shape[1]), refcheck=False)
    return table


def _blocks(path: Path, most: int) -> Iterator[memoryview]:
    """Yields the text of a file, at most `most` bytes, in blocks of whole lines."""
    parts, size, length = [], 0, 0
    for chunk in _unzipped(path) if path.suffix == ".gz" else _read(path, _BLOCK):
        length += len(chunk)
        check_bytes(f"{path}: the text", length, most)
        parts.append(chunk)
        size += len(chunk)
        if size < _BLOCK:
            continue
        text = b"".join(parts)
        end = 1 + max(text.rfind(b"\n"), text.rfind(b"\r"))
        if not end:
            raise DamagedError(f"{path} has a line of more than {_BLOCK} bytes")
        yield memoryview(text)[:end]
        parts, size = [text[end:]], len(text) - end
    if size:
        yield memoryview(b"".join(parts))


def _read(path: Path, size: int) -> Iterator[bytes]:
    with open_plain(path) as file:
        while chunk := file.read(size):
            yield chunk


def _unzipped(path: Path) -> Iterator[bytes]:
    """Yields the content of a gzip file with one or several members, faster than `gzip`."""
    unzip, is_within, is_first = zlib.decompressobj(31), False, True
    for data in _read(path, _ZIPPED):
        if is_first and not _GZIP.startswith(data[:2]):
            raise zlib.error("Not a gzip file")
        while data := data if is_within or is_first else data.lstrip(b"\0"):
            yield unzip.decompress(data, _BLOCK)
            is_within, is_first, data = True, False, unzip.unconsumed_tail
            if unzip.eof:
                data = unzip.unused_data
                unzip, is_within = zlib.decompressobj(31), False
    if is_within:
        raise EOFError("it is truncated")


@contextlib.contextmanager
def _fast_sources() -> Iterator[Callable[[memoryview], Any]]:
    """Yields a function that prepares a block of text for `numpy.loadtxt`.

    For short lines, it reads a named file in half the time of an open one; Linux has named files in memory.
    """
    file = _memory_file()
    if file is None:
        yield _lines
        return
    name = f"/proc/self/fd/{file}"

    def written(block: memoryview) -> str:
        os.pwrite(file, block, 0)
        os.ftruncate(file, len(block))  # afterward, so that its pages are reused
        return name

    try:
        yield written
    finally:
        os.close(file)


def _memory_file() -> int | None:
    """Returns a file in memory; None if such a file has no name to open it by."""
    if sys.platform != "linux" or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.memfd_create("csv")
    except OSError:  # forbidden in some containers
        return None


def _lines(block: memoryview) -> IO[str]:
    return io.StringIO(str(block, "latin1"), newline=None)


def _faults(block: memoryview, dtype: np.dtype, before: int, columns: int | None) -> Iterator[str]:
    """Yields the faults of a part of a table, row by row, because NumPy's messages differ between its versions.

    Args:
      block: its text.
      dtype: dtype of its numbers.
      before: number of rows before it.
      columns: number of columns of these; None if there are none.
    """
    whole = dtype.kind == "i"
    lines = (line.removesuffix("\n") for line in _lines(block))
    for row, line in enumerate(filter(None, lines), before):
        fields = line.split(",")
        columns = columns or len(fields)
        for column, field in enumerate(fields):
            if not _is_number(field, whole):
                kind = f"whole number of {dtype}" if whole else "number"
                yield f"row {row}, column {column} is {field[:40]!r}, no {kind}"
        if len(fields) != columns:
            yield f"row {row} has {len(fields)} columns, where those before have {columns}"


def _is_number(field: str, whole: bool) -> bool:
    if whole:
        digits = field.strip()  # of everything that NumPy skips, including \x1e, which `int` does not
        return bool(re.fullmatch(r"[+-]?[0-9]{1,20}", digits)) and -(2**31) <= int(digits) < 2**31
    try:
        float(field)
    except ValueError:
        return False
    return "_" not in field
