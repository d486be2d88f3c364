"""Tables of numbers in csv files without a header, gzipped or not, as OGB publishes them."""

import gzip
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np


def read_csv_table(path: Path, dtype: Any) -> np.ndarray:
    r"""Reads a csv file of numbers, at the speed of `numpy.loadtxt`; empty lines are passed over.

    Args:
      path: the file; it is gzipped if its name ends with `.gz`.
      dtype: of the numbers: int32, float32 or float64.

    Returns:
      An array of that dtype [rows, columns]; [0, 0] if the file is empty.

    Raises:
      ValueError: the file is damaged, a row has more or fewer columns than the first, or something is no
        number of that dtype; the message names the file and the row, which are counted from 0.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "edge.csv"
      >>> _ = file.write_text("0,1\n1,2\n")
      >>> read_csv_table(file, np.int32)
      array([[0, 1],
             [1, 2]], dtype=int32)
    """
    try:
        return _parsed(path, dtype)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        fault = str(error).partition("\n")[0]
        raise ValueError(f"{path} is no gzip file, or a damaged one: {fault}") from None


def _parsed(path: Path, dtype: Any) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the file is empty
        warnings.simplefilter("error", DeprecationWarning)  # that 1.5 is read as the integer 1
        try:
            table = np.loadtxt(
                path, dtype, comments=None, delimiter=",", ndmin=2, encoding="latin1"
            )
        except (ValueError, DeprecationWarning) as error:
            fault = next(_faults(path, np.dtype(dtype)), str(error).partition("\n")[0])
            raise ValueError(f"{path}: {fault}") from None
    return table if table.size else np.zeros((0, 0), dtype)


def _faults(path: Path, dtype: np.dtype) -> Iterator[str]:
    """Says what is wrong with a table, row by row: numpy's words differ between its versions."""
    whole = dtype.kind == "i"
    columns = None
    with _open_text(path) as lines:
        for row, line in enumerate(line for line in lines if line.strip()):
            fields = line.strip().split(",")
            columns = columns or len(fields)
            for column, field in enumerate(fields):
                if not _is_number(field, whole):
                    kind = f"whole number of {dtype}" if whole else "number"
                    yield f"row {row}, column {column} is {field[:40]!r}, no {kind}"
            if len(fields) != columns:
                yield f"row {row} has {len(fields)} columns, where those before have {columns}"


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="latin1")
    return path.open(encoding="latin1")


def _is_number(field: str, whole: bool) -> bool:
    if whole:
        is_short = re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", field)
        return bool(is_short) and -(2**31) <= int(field) < 2**31
    try:
        float(field)
    except ValueError:
        return False
    return "_" not in field
