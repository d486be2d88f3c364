"""Files of data sets: finds them in a folder, and reads checked tables of numbers from csv files."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jmp_train.graphs.structure import LARGEST_COUNT
from jmp_train.policies import CollapsedValuesWarning
from jmp_train.policies.files import DamagedError, faults_named

LARGEST_EXACT = 2**24  # up to which float32 represents all integers
MOST_CLASSES = 2**16  # or the number of rows, so that a label in a damaged file does not make a model huge
ReadTable = Callable[..., np.ndarray]


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the first existing file of some names, or None.

    Args:
      folder: the folder.
      names: possible names of the file.
    """
    return next((folder / name for name in names if (folder / name).is_file()), None)


def find_files(
    data_dir: Path,
    names: Mapping[str, Sequence[str]],
    public: str,
    facts: Mapping[str, str] | None = None,
) -> dict[str, Path]:
    """Returns the files of a data set.

    Args:
      data_dir: the folder.
      names: by key, possible names of each file; the first that exists is taken.
      public: public address of the data set, for messages.
      facts: by key, further text about a file for messages, on its own line; None for nothing.

    Returns:
      The paths by key.

    Raises:
      FileNotFoundError: the folder does not exist, or files are missing; the message names them all.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> (folder / "edges.csv").touch()
      >>> names = {"edges": ("edges.csv.gz", "edges.csv"), "labels": ("labels.csv",)}
      >>> try:
      ...     find_files(folder, names, "they are public in https://example.org")
      ... except FileNotFoundError as fault:
      ...     print(str(fault).replace(str(folder), "data"))
      data_dir data lacks labels.csv; they are public in https://example.org
    """
    if not data_dir.is_dir():
        raise FileNotFoundError(f"data_dir {data_dir} is not a folder; {public}")
    paths = {key: find_file(data_dir, choices) for key, choices in names.items()}
    missing = {key: names[key] for key, path in paths.items() if path is None}
    if missing and facts is not None:
        lines = describe_files(missing, facts)
        raise FileNotFoundError(f"data_dir {data_dir} lacks files; {public}:{lines}")
    if missing:
        files = ", ".join(" or ".join(choices) for choices in missing.values())
        raise FileNotFoundError(f"data_dir {data_dir} lacks {files}; {public}")
    return {key: path for key, path in paths.items() if path is not None}


def describe_files(names: Mapping[str, Sequence[str]], facts: Mapping[str, str]) -> str:
    """Returns an indented line for each file, with a line break before it.

    Args:
      names: by key, possible names of each file.
      facts: by key, further text about it.
    """
    return "".join(f"\n  {' or '.join(choices)} ({facts[key]})" for key, choices in names.items())


def read_ids(
    read: ReadTable,
    path: Path,
    columns: int,
    count: int,
    rows: int | None = None,
    *,
    first: int = 0,
    known: str = "the graph has {} nodes",
) -> np.ndarray:
    """Returns ids from 0, int32 [rows, columns].

    Args:
      read: reads a table.
      path: the file.
      columns: number of columns.
      count: number of nodes.
      rows: expected number of rows.
      first: the id of the first node in the file.
      known: name of the things that have the ids, for messages.
    """
    ids = read(path, np.int32, rows)
    if not ids.size:
        return np.zeros((0, columns), np.int32)
    check_columns(path, ids, columns)
    last = count - 1 + first
    if not first <= ids.min() <= ids.max() <= last:
        row, column = np.argwhere((ids < first) | (ids > last))[0]
        raise DamagedError(
            f"{path}: row {row}, column {column} is {ids[row, column]}, but {known.format(count)}"
            + (f", numbered from {first}" if first else "")
        )
    return ids - np.int32(first) if first else ids


def read_features(read: ReadTable, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns float32 [rows, width], finite."""
    features = read(path, np.float32, rows)
    with faults_named(path):  # the checks need memory too
        check_rows(path, features, rows, counted_by)
        check_finite(path, features)
        warn_of_rounding(path, features)
    return features


def warn_of_rounding(path: Path, numbers: np.ndarray) -> None:
    """Warns if a column of a float32 table has integers so large that float32 rounds them, such as ids or times."""
    largest = np.maximum(np.nanmax(numbers, axis=0, initial=0), -np.nanmin(numbers, axis=0, initial=0))
    is_rounded = np.isfinite(largest) & (largest > LARGEST_EXACT)
    if is_rounded.any():
        column = int(is_rounded.argmax())
        warnings.warn(
            f"{path}: column {column} has numbers up to {largest[column]:.9g}; float32 rounds whole numbers "
            f"above {LARGEST_EXACT}. If they are ids or times, subtract an offset in the file",
            CollapsedValuesWarning,
            stacklevel=2,
        )


def whole(path: Path, numbers: np.ndarray, is_given: np.ndarray, most: int = LARGEST_COUNT) -> np.ndarray:
    """Returns int32 [rows] from float64 [rows, 1]; given entries must be integers from 0 to `most`."""
    is_right = (numbers >= 0) & (numbers <= most) & (numbers == np.floor(numbers))
    is_wrong = is_given & ~is_right
    if is_wrong.any():
        row = int(is_wrong[:, 0].argmax())
        raise DamagedError(f"{path}: row {row} is {numbers[row, 0]:g}, but must be a whole number from 0 to {most}")
    return numbers[:, 0].astype(np.int32)


def check_finite(path: Path, table: np.ndarray) -> None:
    """Raises ValueError if a number is infinite or NaN."""
    is_finite = np.isfinite(table).all(axis=1)
    if not is_finite.all():
        raise DamagedError(f"{path}: row {is_finite.argmin()} is not finite")


def check_columns(path: Path, table: np.ndarray, columns: int) -> None:
    """Raises ValueError if a table has another number of columns."""
    if table.shape[1] != columns:
        raise DamagedError(f"{path} must have {columns} columns, got {table.shape[1]}")


def check_rows(path: Path, table: np.ndarray, rows: int, counted_by: Path) -> None:
    """Raises ValueError if a table does not have the number of rows in another file."""
    if len(table) > rows:
        raise DamagedError(f"{path} has more than the {rows} rows given by {counted_by.name}")
    if len(table) != rows:
        raise DamagedError(f"{path} has {len(table)} rows, but {counted_by.name} gives {rows}")
