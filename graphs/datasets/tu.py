"""Data sets of graph classification in the text files of TU Dortmund, such as PROTEINS, MUTAG or ENZYMES."""

import functools
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets.data_files import (
    MOST_CLASSES,
    ReadTable,
    check_columns,
    check_finite,
    check_rows,
    find_file,
    find_files,
    read_features,
    read_ids,
    warn_of_rounding,
)
from jmp_train.graphs.datasets.graph_data import GraphData
from jmp_train.graphs.file_formats import read_csv_table
from jmp_train.policies.files import DamagedError
from jmp_train.policies.pytrees import checked_path, shown

TU_ADDRESS = "https://chrsmrrs.github.io/datasets"
_PUBLIC = f"the data sets are public in {TU_ADDRESS}"


def read_tu(data_dir: Path | str, name: str | None = None, *, max_bytes: int | None = None) -> GraphData:
    r"""Reads a data set of graphs in the layout of TU Dortmund's collection.

    Args:
      data_dir: the folder of `<name>_A.txt`, `<name>_graph_indicator.txt`, `<name>_graph_labels.txt` or
        `<name>_graph_attributes.txt`, and optionally `<name>_node_labels.txt`, `<name>_node_attributes.txt`,
        `<name>_edge_labels.txt` and `<name>_edge_attributes.txt`; or the folder that holds that folder, `<name>`.
      name: name of the data set, in any case; None for the only one in the folder.
      max_bytes: largest number of bytes of a file's text, and of its numbers; None for 100 times the
        file's size, and 256 MiB at least.

    Returns:
      The data: graphs in the order of their numbers; nodes and edges of each in the order of the files; no split.
      Classes are numbered from 0, ascending with the file's numbers. Labels of nodes and edges are
      `nodes["label"]` and `edges["label"]`, int32 [rows], or [rows, columns] if there are several, each column
      counted from 0; attributes are `nodes["attr"]`, `edges["attr"]` and `graphs["attr"]`, float32 [rows,
      width]. Without labels of graphs, the attributes of graphs are the labels.

    Raises:
      FileNotFoundError: files are missing; the message has their names and public address.
      ValueError: `name` is unknown, or is missing for several data sets; or a file is damaged, needs
        more memory than allowed, or does not fit the others: the message has its name, the row and the fault.
      OSError: a file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> files = {"A": "1, 2\n2, 1\n3, 4\n", "graph_indicator": "1\n1\n2\n2\n", "graph_labels": "1\n-1\n"}
      >>> for kind, text in files.items():
      ...     _ = (folder / f"TINY_{kind}.txt").write_text(text)
      >>> data = read_tu(folder)
      >>> data.n_node.tolist(), data.labels.tolist(), data.senders.tolist(), data.receivers.tolist()
      ([2, 2], [1, 0], [0, 1, 0], [1, 0, 1])

    Reference: Morris et al., TUDataset, https://arxiv.org/abs/2007.08663.
    """
    folder, stem = _find_data_set(checked_path("data_dir", data_dir), name)
    names = {
        "A": (f"{stem}_A.txt",),
        "graph_indicator": (f"{stem}_graph_indicator.txt",),
        "graph_labels": (f"{stem}_graph_labels.txt", f"{stem}_graph_attributes.txt"),
    }
    paths = find_files(folder, names, _PUBLIC)
    read = functools.partial(read_csv_table, max_bytes=max_bytes)
    labels, num_classes = _read_targets(read, paths["graph_labels"])
    owners = read_ids(read, paths["graph_indicator"], 1, len(labels), first=1, known="there are {} graphs")[:, 0]
    ends = read_ids(read, paths["A"], 2, len(owners), first=1)
    _check_apart(paths["A"], owners[ends])

    # Puts the nodes and edges of each graph together; in most files they already are.
    node_order = np.argsort(owners, kind="stable")
    n_node = np.bincount(owners, minlength=len(labels)).astype(np.int32)
    of_edge = owners[ends[:, 0]]
    edge_order = np.argsort(of_edge, kind="stable")
    n_edge = np.bincount(of_edge, minlength=len(labels)).astype(np.int32)
    places = np.empty(len(owners), np.int32)  # index of a node in its graph
    firsts = np.repeat(np.cumsum(n_node) - n_node, n_node)
    places[node_order] = np.arange(len(owners)) - firsts
    senders, receivers = np.ascontiguousarray(places[ends[edge_order]].T)

    def features(of: str, rows: int, counted_by: str, order: np.ndarray) -> dict[str, np.ndarray]:
        found = _read_known(read, folder, f"{stem}_{of}", rows, paths[counted_by])
        return {name: array[order] for name, array in found.items()}

    nodes = features("node", len(owners), "graph_indicator", node_order)
    edges = features("edge", len(ends), "A", edge_order)
    known = _read_known(read, folder, f"{stem}_graph", len(labels), paths["graph_labels"]) if num_classes else {}
    graphs = {"attr": known["attr"]} if "attr" in known else {}
    return GraphData(n_node, n_edge, senders, receivers, labels, num_classes, nodes, edges, graphs)


def _find_data_set(folder: Path, name: str | None) -> tuple[Path, str]:
    """Returns the folder of a data set's files, and its name as spelled in these."""
    if not isinstance(name, str | None):
        raise TypeError(f"name={shown(name)} must be the name of a data set, or None")
    if name is not None and (not name or set(name) & set("/\\\0*?[")):
        raise ValueError(f"name={name!r} is not a valid data set name")
    ending = "_graph_indicator.txt"
    found = {
        path.name.removesuffix(ending).casefold(): path
        for pattern in (f"*/*{ending}", f"*{ending}")
        for path in sorted(folder.glob(pattern))
    }
    if name is None and len(found) == 1:
        name = next(iter(found))
    if name is None and found:
        raise ValueError(f"name=None must be one of {', '.join(map(repr, sorted(found)))}, the data sets in {folder}")
    if name is None or name.casefold() not in found:
        fault = f"lacks {name or '<name>'}{ending}" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(f"data_dir {folder} {fault}; {_PUBLIC}")
    path = found[name.casefold()]
    return path.parent, path.name.removesuffix(ending)


def _read_targets(read: ReadTable, path: Path) -> tuple[np.ndarray, int | None]:
    """Returns int32 [graphs] and the number of classes; or float32 [graphs, width] and None."""
    are_classes = path.name.endswith("_labels.txt")
    labels = read(path, np.int32 if are_classes else np.float32)
    if not labels.size:
        raise DamagedError(f"{path} has no labels")
    if not are_classes:
        check_finite(path, labels)
        warn_of_rounding(path, labels)
        return labels, None
    check_columns(path, labels, 1)
    classes, numbered = np.unique(labels[:, 0], return_inverse=True)
    return numbered.astype(np.int32), len(classes)


def _read_known(read: ReadTable, folder: Path, stem: str, rows: int, counted_by: Path) -> dict[str, np.ndarray]:
    """Returns the existing labels and attributes of nodes, edges or graphs."""
    known = {}
    if path := find_file(folder, (f"{stem}_labels.txt",)):
        known["label"] = _read_labels(read, path, rows, counted_by)
    if path := find_file(folder, (f"{stem}_attributes.txt",)):
        known["attr"] = read_features(read, path, rows, counted_by)
    return known


def _read_labels(read: ReadTable, path: Path, rows: int, counted_by: Path) -> np.ndarray:
    """Returns int32 [rows] or [rows, columns], each column counted from 0."""
    labels = read(path, np.int32, rows)
    check_rows(path, labels, rows, counted_by)
    if not rows:
        return np.zeros(0, np.int32)
    labels = labels - labels.min(axis=0).astype(np.int64)
    if labels.max() >= max(MOST_CLASSES, rows):
        raise DamagedError(
            f"{path} has labels with a range of {labels.max()}, more than the limit of {max(MOST_CLASSES, rows) - 1}"
        )
    labels = labels.astype(np.int32)
    return labels[:, 0] if labels.shape[1] == 1 else labels


def _check_apart(path: Path, owners: np.ndarray) -> None:
    differ = owners[:, 0] != owners[:, 1]
    if differ.any():
        row = int(differ.argmax())
        one, other = owners[row] + 1
        raise DamagedError(f"{path}: row {row} connects graph {one} with graph {other}")
