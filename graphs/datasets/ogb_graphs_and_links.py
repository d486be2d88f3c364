"""OGB's other data sets: many graphs, such as ogbg-molhiv, in csv files; links, with a split from `torch.save`."""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets.data_files import (
    LARGEST_EXACT,
    MOST_CLASSES,
    ReadTable,
    check_columns,
    check_rows,
    read_features,
    warn_of_rounding,
)
from jmp_train.graphs.datasets.graph_data import GraphData, LinkData, Links
from jmp_train.graphs.datasets.ogb import (
    find_table,
    find_tables,
    read_counts,
    read_graph,
    read_parts,
    with_inverse,
)
from jmp_train.graphs.file_formats import read_csv_table, read_torch_arrays
from jmp_train.policies.files import DamagedError
from jmp_train.policies.pytrees import check_flag

_OF_NODES = {"node-feat": "feat", "node_year": "year"}
_OF_EDGES = {"edge-feat": "feat", "edge_weight": "weight", "edge_year": "year"}
_ENDS = ("source_node", "target_node")


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
    check_flag("add_inverse_edge", add_inverse_edge)
    raw, paths, split_paths = find_tables(data_dir, split, "graphprop", ("graph-label",))
    read = functools.partial(read_csv_table, max_bytes=max_bytes)
    n_node, n_edge = (read_counts(read, paths[name]) for name in ("num-node-list", "num-edge-list"))
    if len(n_node) != len(n_edge):
        fault = f"has {len(n_node)} graphs, but num-edge-list has {len(n_edge)}"
        raise DamagedError(f"{paths['num-node-list']} {fault}")
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


def _read_ends(read: ReadTable, paths: Mapping[str, Path], n_node: np.ndarray, n_edge: np.ndarray) -> np.ndarray:
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
        raise DamagedError(
            f"{path}: row {row}, column {column} is {ends[row, column]}, but graph {graph} has {n_node[graph]} nodes"
        )
    return ends


def _read_labels(read: ReadTable, path: Path, rows: int, counted_by: Path) -> tuple[np.ndarray, int | None]:
    """Returns int32 [graphs] and the number of classes; or float32 [graphs, tasks] and None."""
    labels = read(path, np.float32, rows)
    check_rows(path, labels, rows, counted_by)
    if not labels.size or np.isnan(labels).all():
        raise DamagedError(f"{path} has no labels")
    if np.isinf(labels).any():
        raise DamagedError(f"{path}: row {np.isinf(labels).any(axis=1).argmax()} is infinite")
    warn_of_rounding(path, labels)
    if labels.shape[1] > 1 or not ((labels >= 0) & (labels < MOST_CLASSES) & (labels == np.floor(labels))).all():
        return labels, None
    classes = labels[:, 0].astype(np.int32)
    return classes, int(classes.max()) + 1


def _read_features(read: ReadTable, raw: Path, name: str, rows: int, counted_by: Path) -> dict[str, np.ndarray]:
    """Returns {"feat": table} for the table of a name; an empty dictionary if there is no such table."""
    path = find_table(raw, name)
    if path is None:
        return {}
    features = read_features(read, path, rows, counted_by)
    is_whole = (features == np.floor(features)).all() and np.abs(features).max(initial=0) < LARGEST_EXACT
    return {"feat": features.astype(np.int32) if is_whole else features}


def read_ogb_links(
    data_dir: Path | str,
    split: str | None = None,
    *,
    add_inverse_edge: bool = False,
    max_bytes: int | None = None,
) -> LinkData:
    r"""Reads a data set of links in OGB's layout, such as ogbl-collab or ogbl-citation2.

    The files of the split were written by `torch.save`. Torch is not needed, and nothing that they name is called.

    Args:
      data_dir: the folder of `raw`, with edge, num-node-list, num-edge-list and optionally node-feat,
        node_year, edge-feat, edge_weight and edge_year, each `.csv.gz` or `.csv`; and of `split/<scheme>`, with
        train.pt, valid.pt and test.pt.
      split: the name of the scheme, such as "time"; optional if there is only one.
      add_inverse_edge: True to follow each edge of the graph by the same edge in the other direction, as OGB does
        for ogbl-ppa, ogbl-collab and ogbl-ddi.
      max_bytes: see `read_ogb`; also the largest size of the split's files, None for 4 GiB.

    Returns:
      The data: `nodes` and `edges` by the names "feat", "weight" and "year", float32 [rows, width]; for links, further
      entries of the split's files, such as "weight" and "year", unchanged.

    Raises:
      FileNotFoundError: see `read_ogb`.
      ValueError: see `read_ogb`; or a split's file has neither `edge` nor `source_node` and `target_node`, as for
        knowledge graphs, or has an entry that is not an array of numbers.
      OSError: see `read_ogb`.

    Example:
      >>> import pickle, tempfile, zipfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> for name, text in {"edge": "0,1\n1,2\n", "num-node-list": "3\n", "num-edge-list": "2\n"}.items():
      ...     (folder / "raw").mkdir(exist_ok=True)
      ...     _ = (folder / "raw" / f"{name}.csv").write_text(text)
      >>> (folder / "split/time").mkdir(parents=True)
      >>> for part in ("train", "valid", "test"):
      ...     arrays = {"edge": np.array([[0, 1]]), "edge_neg": np.array([[2, 0]])}
      ...     with zipfile.ZipFile(folder / "split/time" / f"{part}.pt", "w") as archive:
      ...         archive.writestr(f"{part}/data.pkl", pickle.dumps(arrays, protocol=2))
      >>> data = read_ogb_links(folder, add_inverse_edge=True)
      >>> data.senders.tolist(), data.test.receivers.tolist(), data.test.negative_senders.tolist()
      ([0, 1, 1, 2], [1], [2])

    Reference: Hu et al., Open Graph Benchmark, https://arxiv.org/abs/2005.00687;
    https://github.com/snap-stanford/ogb (ogb/linkproppred/dataset.py).
    """
    check_flag("add_inverse_edge", add_inverse_edge)
    raw, paths, split_paths = find_tables(data_dir, split, "linkprop", (), endings=(".pt",))
    read = functools.partial(read_csv_table, max_bytes=max_bytes)
    counted_nodes, counted_edges = paths["num-node-list"], paths["num-edge-list"]
    ends, num_nodes = read_graph(read, paths)
    nodes = _read_known(read, raw, _OF_NODES, num_nodes, counted_nodes)
    edges = _read_known(read, raw, _OF_EDGES, len(ends), counted_edges)
    train, validation, test = (_read_links(path, num_nodes, max_bytes) for path in split_paths.values())
    if add_inverse_edge:
        ends, edges = with_inverse(ends, edges)
    senders, receivers = (np.ascontiguousarray(ids) for ids in ends.T)
    return LinkData(senders, receivers, num_nodes, train, validation, test, nodes, edges)


def _read_known(
    read: ReadTable, raw: Path, names: Mapping[str, str], rows: int, counted_by: Path
) -> dict[str, np.ndarray]:
    """Returns the tables that exist, float32 [rows, width]."""
    found = {name: find_table(raw, file) for file, name in names.items()}
    return {name: read_features(read, path, rows, counted_by) for name, path in found.items() if path is not None}


def _read_links(path: Path, num_nodes: int, max_bytes: int | None) -> Links:
    arrays = read_torch_arrays(path, max_bytes=max_bytes)
    if "edge" in arrays:
        senders, receivers = _pairs(path, "edge", arrays.pop("edge"), num_nodes)
    elif set(_ENDS) <= arrays.keys():
        senders, receivers = (_ids(path, name, arrays.pop(name), num_nodes, axes=1) for name in _ENDS)
    else:
        known = ", ".join(arrays)[:200] or "nothing"
        raise DamagedError(f"{path} must have edge, or source_node and target_node; it has {known}")
    count = len(senders)
    if len(receivers) != count:
        raise DamagedError(f"{path}: target_node has {len(receivers)} nodes, but source_node has {count}")
    negatives = ()
    if "edge_neg" in arrays:
        negatives = _pairs(path, "edge_neg", arrays.pop("edge_neg"), num_nodes)
    elif "target_node_neg" in arrays:
        others = _ids(path, "target_node_neg", arrays.pop("target_node_neg"), num_nodes, axes=2)
        if len(others) != count:
            raise DamagedError(f"{path}: target_node_neg has {len(others)} rows, but source_node has {count}")
        negatives = (senders[:, None], others)
    for name, array in arrays.items():
        if len(array.shape) == 0 or len(array) != count:
            raise DamagedError(f"{path}: {name} has shape {array.shape}, but there are {count} links")
    return Links(senders, receivers, *negatives, values=arrays)


def _pairs(path: Path, name: str, array: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    ids = _ids(path, name, array, num_nodes, axes=2)
    if ids.shape[1] != 2:
        raise DamagedError(f"{path}: {name} must be pairs of nodes, got shape {array.shape}")
    senders, receivers = (np.ascontiguousarray(column) for column in ids.T)
    return senders, receivers


def _ids(path: Path, name: str, array: np.ndarray, num_nodes: int, *, axes: int) -> np.ndarray:
    """Returns ids of nodes, int32 of the array's shape."""
    if array.ndim != axes or array.dtype.kind not in "iu":
        raise DamagedError(f"{path}: {name} must be integers with {axes} axes, got {array.dtype} {array.shape}")
    if array.size and not 0 <= array.min() <= array.max() < num_nodes:
        wrong = int(array.min() if array.min() < 0 else array.max())
        raise DamagedError(f"{path}: {name} has {wrong}, but the graph has {num_nodes} nodes")
    return array.astype(np.int32)
