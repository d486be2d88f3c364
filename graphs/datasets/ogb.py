"""Data sets of node classification in the csv files of the Open Graph Benchmark (OGB), and its folders."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets.data_files import (
    MOST_CLASSES,
    ReadTable,
    check_columns,
    check_rows,
    find_file,
    find_files,
    read_features,
    read_ids,
    whole,
)
from jmp_train.graphs.datasets.graph_data import NodeData
from jmp_train.graphs.file_formats import read_csv_table
from jmp_train.policies.files import DamagedError
from jmp_train.policies.pytrees import check_flag, checked_path

_ENDINGS = (".csv.gz", ".csv")
_PARTS = ("train", "valid", "test")


def find_tables(
    data_dir: Path | str,
    split: str | None,
    task: str,
    labels: Sequence[str],
    endings: Sequence[str] = _ENDINGS,
) -> tuple[Path, dict[str, Path], dict[str, Path]]:
    """Returns the folder of a data set's tables, the required tables by name, and the files of its split by part.

    Raises an error if a file is missing, or if the data set has the binary layout.

    Args:
      data_dir: the folder of `raw` and `split`.
      split: the name of the scheme; None for the only one.
      task: OGB's name of the task, which ends the data sets' public address.
      labels: the names of required tables, in addition to the edges and the numbers of nodes and edges.
      endings: the endings of the split's files.
    """
    public = f"OGB's data sets are public in https://ogb.stanford.edu/docs/{task}"
    raw = checked_path("data_dir", data_dir) / "raw"
    if (raw / "data.npz").is_file():
        raise ValueError(f"{raw / 'data.npz'} is in OGB's binary format (ogbn-papers100M), which is not supported")
    paths = _found(raw, ("edge", "num-node-list", "num-edge-list", *labels), public)
    folder = checked_path("data_dir", data_dir) / "split"
    schemes = sorted(path.name for path in folder.glob("*/"))
    if not schemes:
        raise FileNotFoundError(f"{folder} has no split folder; {public}")
    if split not in schemes and (split is not None or len(schemes) > 1):
        raise ValueError(f"split={split!r} must be one of {', '.join(map(repr, schemes))}, the splits in {folder}")
    return raw, paths, _found(folder / (split or schemes[0]), _PARTS, public, endings)


def _found(folder: Path, names: Sequence[str], public: str, endings: Sequence[str] = _ENDINGS) -> dict[str, Path]:
    return find_files(folder, {name: [name + ending for ending in endings] for name in names}, public)


def find_table(folder: Path, name: str) -> Path | None:
    """Returns the file of an optional table, or None."""
    return find_file(folder, [name + ending for ending in _ENDINGS])


def read_count(read: ReadTable, path: Path) -> int:
    """Returns the number of nodes or edges of the only graph."""
    counts = read_counts(read, path)
    if len(counts) != 1:
        raise DamagedError(f"{path} must have one number, that of a single graph, got {len(counts)}")
    return int(counts[0])


def read_counts(read: ReadTable, path: Path) -> np.ndarray:
    """Returns the numbers of nodes or edges of graphs, int32 [graphs]."""
    counts = read(path, np.int32)
    if counts.size:
        check_columns(path, counts, 1)
    if counts.min(initial=0) < 0:
        raise DamagedError(f"{path} has a negative number, {counts.min()}")
    return np.ascontiguousarray(counts.reshape(-1))


def read_parts(
    read: ReadTable, paths: Mapping[str, Path], count: int, known: str, faults: Mapping[str, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Returns the distinct ids of training, validation and test, int32 [ids of that part].

    Args:
      read: reads a table.
      paths: the three files.
      count: number of nodes or graphs.
      known: name of the things that have the ids, for messages.
      faults: by description of a fault, the ids that have it, bool [count].
    """
    parts, is_taken = [], np.full(count, False)
    for name, path in paths.items():
        ids = read_ids(read, path, 1, count, known=known)[:, 0]
        if not len(ids) and name != "valid":
            raise DamagedError(f"{path} lists no {'node' if 'nodes' in known else 'graph'}")
        is_first = np.full(len(ids), False)
        is_first[np.unique(ids, return_index=True)[1]] = True
        is_again = is_taken[ids] | ~is_first
        wrong = {"is in the split twice": is_again, **{fault: is_it[ids] for fault, is_it in (faults or {}).items()}}
        for fault, is_wrong in wrong.items():
            if is_wrong.any():
                row = int(is_wrong.argmax())
                raise DamagedError(f"{path}: row {row} is {ids[row]}, which {fault}")
        is_taken[ids] = True
        parts.append(np.ascontiguousarray(ids))
    return parts


def read_graph(read: ReadTable, paths: Mapping[str, Path]) -> tuple[np.ndarray, int]:
    """Returns the ends of the edges of the only graph, int32 [edges, 2], and its number of nodes."""
    num_nodes, num_edges = (read_count(read, paths[name]) for name in ("num-node-list", "num-edge-list"))
    ends = read_ids(read, paths["edge"], 2, num_nodes, num_edges)
    check_rows(paths["edge"], ends, num_edges, paths["num-edge-list"])
    return ends, num_nodes


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


def read_ogb(
    data_dir: Path | str,
    split: str | None = None,
    *,
    add_inverse_edge: bool = False,
    max_bytes: int | None = None,
) -> NodeData:
    r"""Reads a data set in OGB's layout of csv files, such as ogbn-arxiv or ogbn-products.

    Each file may be gzipped (`edge.csv.gz`) or not (`edge.csv`); none has a header.

    Args:
      data_dir: the folder of `raw`, with edge, num-node-list, num-edge-list, node-feat, node-label and
        optionally edge-feat and node_year; and of `split/<scheme>`, with train, valid and test.
      split: the name of the scheme; optional if there is only one.
      add_inverse_edge: True to follow each edge by the same edge in the other direction, with the same
        features, as OGB does for ogbn-products.
      max_bytes: largest number of bytes of a file's text, and of its numbers; None for 100 times the
        file's size, and 256 MiB at least. The text of OGB's files is about 3 times as long as the files.

    Returns:
      The data, with edges and ids of the split in the order of the files; years are `nodes["year"]`, int32
      [nodes], and features of edges `edges["feat"]`, float32 [edges, width]. A label that is NaN is -1.

    Raises:
      FileNotFoundError: files are missing; the message has their names and public address.
      ValueError: `split` is not one of the schemes, or is missing for several; or a file is damaged,
        needs more memory than allowed, or does not fit the others: the message has its name, the row and
        the fault.
      OSError: a file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> files = {"raw/edge": "0,1\n1,2\n", "raw/num-node-list": "3\n", "raw/num-edge-list": "2\n",
      ...          "raw/node-feat": "0.5,1\n1,2\n2,4\n", "raw/node-label": "1\n0\nnan\n",
      ...          "split/time/train": "0\n", "split/time/valid": "", "split/time/test": "1\n"}
      >>> for name, text in files.items():
      ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
      ...     _ = (folder / f"{name}.csv").write_text(text)
      >>> data = read_ogb(folder, add_inverse_edge=True)
      >>> data.senders.tolist(), data.receivers.tolist(), data.labels.tolist(), data.num_classes
      ([0, 1, 1, 2], [1, 0, 2, 1], [1, 0, -1], 2)

    Reference: Hu et al., Open Graph Benchmark, https://arxiv.org/abs/2005.00687;
    https://github.com/snap-stanford/ogb (ogb/io/read_graph_raw.py).
    """
    check_flag("add_inverse_edge", add_inverse_edge)
    raw, paths, split_paths = find_tables(data_dir, split, "nodeprop", ("node-feat", "node-label"))
    read = functools.partial(read_csv_table, max_bytes=max_bytes)
    ends, num_nodes = read_graph(read, paths)
    features = read_features(read, paths["node-feat"], num_nodes, paths["num-node-list"])
    labels = _read_labels(read, paths["node-label"], num_nodes, paths["num-node-list"])
    faults = {"has no label": labels < 0}
    train, validation, test = read_parts(read, split_paths, num_nodes, "the graph has {} nodes", faults)

    nodes, edges = {}, {}
    if year := find_table(raw, "node_year"):
        nodes["year"] = _read_year(read, year, num_nodes, paths["num-node-list"])
    if feat := find_table(raw, "edge-feat"):
        edges["feat"] = read_features(read, feat, len(ends), paths["num-edge-list"])
    if add_inverse_edge:
        ends, edges = with_inverse(ends, edges)
    senders, receivers = (np.ascontiguousarray(ids) for ids in ends.T)
    classes = int(labels.max()) + 1
    return NodeData(senders, receivers, features, labels, classes, train, validation, test, nodes, edges)


def _read_labels(read: ReadTable, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns int32 [rows], with -1 for NaN in the file."""
    labels = read(path, np.float64, rows)
    if labels.shape[1] > 1:
        raise DamagedError(f"{path} has {labels.shape[1]} columns: only one label per node is supported")
    check_rows(path, labels, rows, counted_by)
    if np.isnan(labels).all():
        raise DamagedError(f"{path} has no labels")
    most = max(MOST_CLASSES, rows) - 1
    return whole(path, np.where(np.isnan(labels), -1, labels), ~np.isnan(labels), most)


def _read_year(read: ReadTable, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns int32 [rows]."""
    years = read(path, np.float64, rows)
    check_rows(path, years, rows, counted_by)
    check_columns(path, years, 1)
    return whole(path, years, np.full(years.shape, True))
