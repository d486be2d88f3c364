"""Data sets of node classification in the csv files of the Open Graph Benchmark (OGB)."""

import functools
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
from jmp_train.graphs.datasets.graph_data import NodeData
from jmp_train.graphs.datasets.ogb_folders import (
    find_split,
    find_table,
    find_tables,
    raw_folder,
    read_count,
    read_parts,
    with_inverse,
)

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
    raw = raw_folder(data_dir)
    paths = find_tables(raw, _NEEDED, PUBLIC)
    split_paths = find_split(Path(data_dir) / "split", split, PUBLIC)
    read = functools.partial(read_table, max_bytes=max_bytes)
    num_nodes = read_count(read, paths["num-node-list"])
    num_edges = read_count(read, paths["num-edge-list"])
    ends = read_ids(read, paths["edge"], 2, num_nodes, num_edges)
    check_rows(paths["edge"], ends, num_edges, paths["num-edge-list"])
    features = read_features(read, paths["node-feat"], num_nodes, paths["num-node-list"])
    labels = _read_labels(read, paths["node-label"], num_nodes, paths["num-node-list"])
    faults = {"has no label": labels < 0}
    train, validation, test = read_parts(read, split_paths, num_nodes, "the graph has {} nodes", faults)

    nodes, edges = {}, {}
    if year := find_table(raw, "node_year"):
        nodes["year"] = _read_year(read, year, num_nodes, paths["num-node-list"])
    if feat := find_table(raw, "edge-feat"):
        edges["feat"] = read_features(read, feat, num_edges, paths["num-edge-list"])
    if add_inverse_edge:
        ends, edges = with_inverse(ends, edges)
    senders, receivers = (np.ascontiguousarray(ids) for ids in ends.T)
    classes = int(labels.max()) + 1
    return NodeData(senders, receivers, features, labels, classes, train, validation, test, nodes, edges)


def _read_labels(read: Table, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns int32 [rows], -1 where the file has NaN."""
    labels = read(path, np.float64, rows)
    if labels.shape[1] > 1:
        raise ValueError(f"{path} has {labels.shape[1]} columns: only one label per node is supported")
    check_rows(path, labels, rows, counted_by)
    if np.isnan(labels).all():
        raise ValueError(f"{path} has no labels")
    most = max(MOST_CLASSES, rows) - 1
    return whole(path, np.where(np.isnan(labels), -1, labels), ~np.isnan(labels), most)


def _read_year(read: Table, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns int32 [rows]."""
    years = read(path, np.float64, rows)
    check_rows(path, years, rows, counted_by)
    check_columns(path, years, 1)
    return whole(path, years, np.full(years.shape, True))
