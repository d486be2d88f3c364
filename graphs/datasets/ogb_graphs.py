"""Data sets of graph classification and regression in the csv files of OGB, such as ogbg-molhiv."""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets.data_files import (
    LARGEST_EXACT,
    MOST_CLASSES,
    Table,
    check_columns,
    check_rows,
    read_features,
    read_table,
    warn_of_rounding,
)
from jmp_train.graphs.datasets.graph_data import GraphData
from jmp_train.graphs.datasets.ogb import (
    find_split,
    find_table,
    find_tables,
    raw_folder,
    read_counts,
    read_parts,
    with_inverse,
)

_PUBLIC = "OGB's data sets are public in https://ogb.stanford.edu/docs/graphprop"
_NEEDED = ("edge", "num-node-list", "num-edge-list", "graph-label")


def read_ogb_graphs(
    data_dir: Path | str,
    split: str | None = None,
    *,
    add_inverse_edge: bool = False,
    max_bytes: int | None = None,
) -> GraphData:
    r"""Reads a data set of many graphs in OGB's layout of csv files, such as ogbg-molhiv or ogbg-ppa.

    Each file may be gzipped (`edge.csv.gz`) or not (`edge.csv`); none has a header.

    Args:
      data_dir: the folder of `raw`, with edge, num-node-list, num-edge-list, graph-label and optionally
        node-feat and edge-feat; and of `split/<scheme>`, with train, valid and test.
      split: the name of the scheme, such as "scaffold"; optional if there is only one.
      add_inverse_edge: True to follow each edge by the same edge in the other direction, with the same features, as
        OGB does for its molecules and for ogbg-ppa.
      max_bytes: see `read_ogb`.

    Returns:
      The data, with OGB's split. A single column of integers from 0 on are classes; other labels, and those of several
      tasks, are float32 [graphs, tasks], NaN if unknown, with `num_classes` None. Features are `nodes["feat"]`
      and `edges["feat"]`, [rows, width]: int32 if all are integers, as the categories of molecules, otherwise
      float32.

    Raises:
      FileNotFoundError: see `read_ogb`.
      ValueError: see `read_ogb`.
      OSError: see `read_ogb`.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> files = {"raw/edge": "0,1\n0,1\n1,2\n", "raw/num-node-list": "2\n3\n", "raw/num-edge-list": "1\n2\n",
      ...          "raw/node-feat": "6\n7\n6\n6\n8\n", "raw/graph-label": "1\n0\n",
      ...          "split/scaffold/train": "1\n", "split/scaffold/valid": "", "split/scaffold/test": "0\n"}
      >>> for name, text in files.items():
      ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
      ...     _ = (folder / f"{name}.csv").write_text(text)
      >>> data = read_ogb_graphs(folder, add_inverse_edge=True)
      >>> data.n_node.tolist(), data.n_edge.tolist(), data.labels.tolist(), data.train.tolist()
      ([2, 3], [2, 4], [1, 0], [1])
      >>> data.graph(1).senders.tolist(), data.nodes["feat"][:, 0].tolist()
      ([0, 1, 1, 2], [6, 7, 6, 6, 8])

    Reference: Hu et al., Open Graph Benchmark, https://arxiv.org/abs/2005.00687;
    https://github.com/snap-stanford/ogb (ogb/io/read_graph_raw.py).
    """
    raw = raw_folder(data_dir)
    paths = find_tables(raw, _NEEDED, _PUBLIC)
    split_paths = find_split(Path(data_dir) / "split", split, _PUBLIC)
    read = functools.partial(read_table, max_bytes=max_bytes)
    n_node, n_edge = (read_counts(read, paths[name]) for name in ("num-node-list", "num-edge-list"))
    if len(n_node) != len(n_edge):
        fault = f"has {len(n_node)} graphs, but num-edge-list has {len(n_edge)}"
        raise ValueError(f"{paths['num-node-list']} {fault}")
    ends = _read_ends(read, paths, n_node, n_edge)
    labels, num_classes = _read_labels(read, paths["graph-label"], len(n_node), paths["num-node-list"])
    train, validation, test = read_parts(read, split_paths, len(n_node), "there are {} graphs")
    nodes = _read_features(read, raw, "node-feat", int(n_node.sum()), paths["num-node-list"])
    edges = _read_features(read, raw, "edge-feat", len(ends), paths["num-edge-list"])
    if add_inverse_edge:
        (ends, edges), n_edge = with_inverse(ends, edges), n_edge * 2
    senders, receivers = (np.ascontiguousarray(ids) for ids in ends.T)
    return GraphData(
        *(n_node, n_edge, senders, receivers, labels, num_classes, nodes, edges),
        train=train,
        validation=validation,
        test=test,
    )


def _read_ends(read: Table, paths: Mapping[str, Path], n_node: np.ndarray, n_edge: np.ndarray) -> np.ndarray:
    """Returns the ends of edges, int32 [edges, 2], counted from 0 in each graph."""
    path, count = paths["edge"], int(n_edge.sum())
    ends = read(path, np.int32, count)
    if ends.size:
        check_columns(path, ends, 2)
    check_rows(path, ends, count, paths["num-edge-list"])
    of_graph = np.repeat(np.arange(len(n_edge)), n_edge)
    ends = ends.reshape(count, 2)
    is_wrong = (ends < 0) | (ends >= n_node[of_graph][:, None])
    if is_wrong.any():
        row, column = np.argwhere(is_wrong)[0]
        graph = of_graph[row]
        raise ValueError(
            f"{path}: row {row}, column {column} is {ends[row, column]}, but graph {graph} has {n_node[graph]} nodes"
        )
    return ends


def _read_labels(read: Table, path: Path, rows: int, counted_by: Path) -> tuple[np.ndarray, int | None]:
    """Returns int32 [graphs] and the number of classes; or float32 [graphs, tasks] and None."""
    labels = read(path, np.float32, rows)
    check_rows(path, labels, rows, counted_by)
    if not labels.size or np.isnan(labels).all():
        raise ValueError(f"{path} has no labels")
    if np.isinf(labels).any():
        raise ValueError(f"{path}: row {np.isinf(labels).any(axis=1).argmax()} is infinite")
    warn_of_rounding(path, labels)
    if labels.shape[1] > 1 or not ((labels >= 0) & (labels < MOST_CLASSES) & (labels == np.floor(labels))).all():
        return labels, None
    classes = labels[:, 0].astype(np.int32)
    return classes, int(classes.max()) + 1


def _read_features(read: Table, raw: Path, name: str, rows: int, counted_by: Path) -> dict[str, np.ndarray]:
    """Returns the table of a name as "feat" if it exists."""
    path = find_table(raw, name)
    if path is None:
        return {}
    features = read_features(read, path, rows, counted_by)
    is_whole = (features == np.floor(features)).all() and np.abs(features).max(initial=0) < LARGEST_EXACT
    return {"feat": features.astype(np.int32) if is_whole else features}
