"""Data sets of node classification in the csv files of the Open Graph Benchmark (OGB)."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets.checked_tables import (
    MOST_CLASSES,
    Table,
    check_columns,
    check_rows,
    read_features,
    read_ids,
    read_table,
    whole,
)
from jmp_train.graphs.datasets.data_files import find_file, find_files
from jmp_train.graphs.datasets.node_data import NodeData

PUBLIC = "OGB's data sets are public in https://ogb.stanford.edu/docs/nodeprop"

_NEEDED = ("edge", "num-node-list", "num-edge-list", "node-feat", "node-label")


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
      data_dir: the folder of `raw`, with edge, num-node-list, num-edge-list, node-feat, node-label and, where
        there are any, edge-feat and node_year; and of `split/<scheme>`, with train, valid and test.
      split: the name of the scheme; where there is one only, it need not be named.
      add_inverse_edge: whether each edge is followed by the same one the other way round, with the same
        features, as OGB does for ogbn-products.
      max_bytes: how many bytes the text of a file may have, and its numbers may take; None for 100 times the
        file's size, and 256 MiB at least. The text of OGB's files is about 3 times as long as they are.

    Returns:
      The data, edges and ids of the split in the order of the files; years are `nodes["year"]`, int32
      [nodes], and features of edges `edges["feat"]`, float32 [edges, width]. A label that is NaN is -1.

    Raises:
      FileNotFoundError: files are missing; the message names them and says where they are public.
      ValueError: `split` is not one of the schemes, or does not choose among several; or a file is damaged, or
        asks for more memory than it may, or does not fit the others: the message names it, and the row and
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
    raw = Path(data_dir) / "raw"
    if (raw / "data.npz").is_file():
        raise ValueError(f"{raw / 'data.npz'} is of OGB's binary layout (ogbn-papers100M), which is not supported")
    paths = _find_tables(raw, _NEEDED)
    split_paths = _find_split(Path(data_dir) / "split", split)
    read = functools.partial(read_table, max_bytes=max_bytes)
    num_nodes = _read_count(read, paths["num-node-list"])
    num_edges = _read_count(read, paths["num-edge-list"])
    ends = read_ids(read, paths["edge"], 2, num_nodes, num_edges)
    check_rows(paths["edge"], ends, num_edges, paths["num-edge-list"])
    features = read_features(read, paths["node-feat"], num_nodes, paths["num-node-list"])
    labels = _read_labels(read, paths["node-label"], num_nodes, paths["num-node-list"])
    train, validation, test = _read_split(read, split_paths, labels)

    nodes, edges = {}, {}
    if year := find_file(raw, _choices("node_year")):
        nodes["year"] = _read_year(read, year, num_nodes, paths["num-node-list"])
    if feat := find_file(raw, _choices("edge-feat")):
        edges["feat"] = read_features(read, feat, num_edges, paths["num-edge-list"])
    if add_inverse_edge:
        ends = np.stack([ends, ends[:, ::-1]], axis=1).reshape(-1, 2)
        edges = {name: np.repeat(array, 2, axis=0) for name, array in edges.items()}
    senders, receivers = (np.ascontiguousarray(ids) for ids in ends.T)
    classes = int(labels.max()) + 1
    return NodeData(senders, receivers, features, labels, classes, train, validation, test, nodes, edges)


def _choices(name: str) -> tuple[str, str]:
    """Returns what a file may be called."""
    return f"{name}.csv.gz", f"{name}.csv"


def _find_tables(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    return find_files(folder, {name: _choices(name) for name in names}, PUBLIC)


def _find_split(folder: Path, split: str | None) -> dict[str, Path]:
    """Returns the paths of a scheme's three files."""
    schemes = sorted(path.name for path in folder.glob("*/"))
    if not schemes:
        raise FileNotFoundError(f"{folder} has no folder of a split; {PUBLIC}")
    if split not in schemes and (split is not None or len(schemes) > 1):
        raise ValueError(f"split={split!r} must be one of {', '.join(map(repr, schemes))}, which are in {folder}")
    return _find_tables(folder / (split or schemes[0]), ("train", "valid", "test"))


def _read_count(read: Table, path: Path) -> int:
    counts = read(path, np.int32)
    if counts.shape != (1, 1):
        raise ValueError(f"{path} has {counts.size} numbers, where that of one graph is wanted")
    if counts[0, 0] < 0:
        raise ValueError(f"{path} has the number {counts[0, 0]}, which is negative")
    return int(counts[0, 0])


def _read_labels(read: Table, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns int32 [rows], -1 where the file has NaN."""
    labels = read(path, np.float64, rows)
    if labels.shape[1] > 1:
        raise ValueError(f"{path} has {labels.shape[1]} columns: several labels a node are not supported, one is")
    check_rows(path, labels, rows, counted_by)
    if np.isnan(labels).all():
        raise ValueError(f"{path} has no label")
    most = max(MOST_CLASSES, rows) - 1
    return whole(path, np.where(np.isnan(labels), -1, labels), ~np.isnan(labels), most)


def _read_year(read: Table, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns int32 [rows]."""
    years = read(path, np.float64, rows)
    check_rows(path, years, rows, counted_by)
    check_columns(path, years, 1)
    return whole(path, years, np.full(years.shape, True))


def _read_split(read: Table, paths: dict[str, Path], labels: np.ndarray) -> list[np.ndarray]:
    """Returns the ids of training, validation and test nodes, int32 [nodes of that part]."""
    parts, is_taken = [], np.full(len(labels), False)
    for name, path in paths.items():
        ids = read_ids(read, path, 1, len(labels))[:, 0]
        if not len(ids) and name != "valid":
            raise ValueError(f"{path} names no node")
        is_first = np.full(len(ids), False)
        is_first[np.unique(ids, return_index=True)[1]] = True
        is_again = is_taken[ids] | ~is_first
        for is_wrong, fault in (
            (is_again, "is in the split twice"),
            (labels[ids] < 0, "has no label"),
        ):
            if is_wrong.any():
                row = int(is_wrong.argmax())
                raise ValueError(f"{path}: row {row} is {ids[row]}, which {fault}")
        is_taken[ids] = True
        parts.append(np.ascontiguousarray(ids))
    return parts
