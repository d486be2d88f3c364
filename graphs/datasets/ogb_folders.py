"""The common folders of the Open Graph Benchmark (OGB): tables in `raw`, and parts in `split/<scheme>`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets.checked_tables import Table, check_columns, read_ids
from jmp_train.graphs.datasets.data_files import find_file, find_files

_ENDINGS = (".csv.gz", ".csv")
_PARTS = ("train", "valid", "test")


def raw_folder(data_dir: Path | str) -> Path:
    """Returns the folder of the tables; raises ValueError if it has the binary layout."""
    raw = Path(data_dir) / "raw"
    if (raw / "data.npz").is_file():
        raise ValueError(f"{raw / 'data.npz'} is in OGB's binary format (ogbn-papers100M), which is not supported")
    return raw


def find_table(folder: Path, name: str) -> Path | None:
    """Returns the file of an optional table, or None."""
    return find_file(folder, [name + ending for ending in _ENDINGS])


def find_tables(folder: Path, names: Sequence[str], public: str, endings: Sequence[str] = _ENDINGS) -> dict[str, Path]:
    """Returns the files of tables; raises FileNotFoundError if one is missing.

    Args:
      folder: their folder.
      names: names of the tables.
      public: public address of the data sets, for messages.
      endings: endings of the files' names.
    """
    return find_files(folder, {name: [name + ending for ending in endings] for name in names}, public)


def find_split(folder: Path, split: str | None, public: str, endings: Sequence[str] = _ENDINGS) -> dict[str, Path]:
    """Returns the three files of a scheme; for None, of the only scheme."""
    schemes = sorted(path.name for path in folder.glob("*/"))
    if not schemes:
        raise FileNotFoundError(f"{folder} has no split folder; {public}")
    if split not in schemes and (split is not None or len(schemes) > 1):
        raise ValueError(f"split={split!r} must be one of {', '.join(map(repr, schemes))}, the splits in {folder}")
    return find_tables(folder / (split or schemes[0]), _PARTS, public, endings)


def read_count(read: Table, path: Path) -> int:
    """Returns the number of nodes or edges of the only graph."""
    counts = read_counts(read, path)
    if len(counts) != 1:
        raise ValueError(f"{path} must have one number, that of a single graph, got {len(counts)}")
    return int(counts[0])


def read_counts(read: Table, path: Path) -> np.ndarray:
    """Returns the numbers of nodes or edges of graphs, int32 [graphs]."""
    counts = read(path, np.int32)
    if counts.size:
        check_columns(path, counts, 1)
    if counts.min(initial=0) < 0:
        raise ValueError(f"{path} has a negative number, {counts.min()}")
    return np.ascontiguousarray(counts.reshape(-1))


def read_parts(
    read: Table, paths: Mapping[str, Path], count: int, known: str, faults: Mapping[str, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Returns the distinct ids of training, validation and test, int32 [ids of that part].

    Args:
      read: reads a table.
      paths: the three files.
      count: number of nodes or graphs.
      known: what the ids count, for messages.
      faults: by description of a fault, the ids that have it, bool [count].
    """
    parts, is_taken = [], np.full(count, False)
    for name, path in paths.items():
        ids = read_ids(read, path, 1, count, known=known)[:, 0]
        if not len(ids) and name != "valid":
            raise ValueError(f"{path} lists no {'node' if 'nodes' in known else 'graph'}")
        is_first = np.full(len(ids), False)
        is_first[np.unique(ids, return_index=True)[1]] = True
        is_again = is_taken[ids] | ~is_first
        wrong = {"is in the split twice": is_again, **{fault: is_it[ids] for fault, is_it in (faults or {}).items()}}
        for fault, is_wrong in wrong.items():
            if is_wrong.any():
                row = int(is_wrong.argmax())
                raise ValueError(f"{path}: row {row} is {ids[row]}, which {fault}")
        is_taken[ids] = True
        parts.append(np.ascontiguousarray(ids))
    return parts


def with_inverse(ends: np.ndarray, edges: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns edges, each followed by its reverse, and their features twice.

    Args:
      ends: int [edges, 2].
      edges: arrays [edges, ...] by name.

    Example:
      >>> with_inverse(np.array([[0, 1], [2, 3]]), {})[0].tolist()
      [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    both = np.stack([ends, ends[:, ::-1]], axis=1).reshape(-1, 2)
    return both, {name: np.repeat(array, 2, axis=0) for name, array in edges.items()}
