"""Cora, Citeseer and Pubmed: citation graphs, in the eight files that Planetoid published for each.

Papers are nodes, their words are features, and their subject is the class. The split is the public
one: 20 training nodes of each class, 500 validation nodes and 1,000 test nodes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jmp_train.graphs.datasets.data_files import find_files
from jmp_train.graphs.datasets.graph_data import NodeData
from jmp_train.graphs.file_formats import SparseRows, check_bytes, most_bytes, read_python2_pickle
from jmp_train.graphs.structure import checked_word
from jmp_train.policies.files import DamagedError, faults_named, read_plain
from jmp_train.policies.pytrees import checked_path

PLANETOID = ("cora", "citeseer", "pubmed")
PLANETOID_ADDRESS = "https://github.com/kimiyoung/planetoid/tree/master/data"

_MATRICES, _LABELS = ("x", "tx", "allx"), ("y", "ty", "ally")
_SUFFIXES = (*_MATRICES, *_LABELS, "graph", "test.index")
_VALIDATION = 500
_LONGEST_ID = 1024  # bytes of a line of test.index, blanks included
_MAX_WIDTH = 2**16  # columns of features, so that a damaged file's width does not exhaust the memory

Paths = Mapping[str, Path]


def read_planetoid(data_dir: Path | str, name: str = "cora", *, max_bytes: int | None = None) -> NodeData:
    """Reads one of Planetoid's three citation graphs.

    The files are pickles, from which nothing is imported or called. A file that uses more than arrays,
    sparse matrices, lists and dictionaries is refused.

    Args:
      data_dir: the folder of `ind.<name>.x`, `.y`, `.tx`, `.ty`, `.allx`, `.ally`, `.graph` and
        `.test.index`.
      name: "cora", "citeseer" or "pubmed", in any case.
      max_bytes: largest size of a file, and of the features; None for 64 MiB, and for
        100 times the size of the matrices' files, 256 MiB at least. The public data sets are far below.

    Returns:
      The data. The graph has each edge once in each direction and the self-loops of the file, sorted by receiver, then
      sender; features are the file's, not normalized; ids of the split ascend. 15 papers of Citeseer,
      of which only the number is known, have features of 0 and the label -1.

    Raises:
      FileNotFoundError: files are missing; the message has their names and public address.
      ValueError: the name is unknown; or a file is damaged, uses other names, needs more
        memory than allowed, or does not fit the others: the message has its name and the fault.
      OSError: a file cannot be read, or does not fit into memory.

    Example:
      >>> try:
      ...     read_planetoid("nowhere", "cora")
      ... except FileNotFoundError as fault:
      ...     print(fault)
      data_dir nowhere is not a folder; Planetoid's files are public in \
https://github.com/kimiyoung/planetoid/tree/master/data

    Reference: Yang, Cohen and Salakhutdinov, Revisiting Semi-Supervised Learning with Graph Embeddings,
    https://arxiv.org/abs/1603.08861.
    """
    name = name.lower() if isinstance(name, str) else name
    checked_word("name", name, PLANETOID)
    names = {suffix: (f"ind.{name}.{suffix}",) for suffix in _SUFFIXES}
    paths = find_files(
        checked_path("data_dir", data_dir), names, f"Planetoid's files are public in {PLANETOID_ADDRESS}"
    )
    with faults_named(paths["graph"]):
        senders, receivers, num_nodes = _read_graph(paths["graph"], max_bytes)
    matrices = {suffix: _read_matrix(paths[suffix], max_bytes) for suffix in _MATRICES}
    labels = {suffix: _read_labels(paths[suffix], max_bytes) for suffix in _LABELS}
    num_classes = _check_widths(paths, matrices, labels)
    known, train = matrices["allx"].shape[0], matrices["x"].shape[0]
    if train > known:
        raise DamagedError(f"{paths['x']} has {train} rows, but allx has only {known}")
    test = _read_test_ids(paths["test.index"], known, num_nodes)
    if len(test) != matrices["tx"].shape[0]:
        rows = matrices["tx"].shape[0]
        raise DamagedError(f"{paths['tx']} has {rows} rows for {len(test)} test nodes")

    classes = np.full(num_nodes, -1, np.int32)
    for ids, suffix in ((np.arange(known), "ally"), (test, "ty")):
        classes[ids] = labels[suffix].argmax(axis=1)
    most = most_bytes(max_bytes, *(paths[suffix] for suffix in _MATRICES))
    with faults_named(paths["allx"]):
        features = _features(paths, matrices, num_nodes, test, most)
    validation = np.arange(train, min(train + _VALIDATION, known), dtype=np.int32)
    split = (np.arange(train, dtype=np.int32), validation, np.sort(test))
    return NodeData(senders, receivers, features, classes, num_classes, *split)


def _features(paths: Paths, matrices: Mapping[str, Any], num_nodes: int, test: np.ndarray, most: int) -> np.ndarray:
    """Returns float32 [nodes, width], at most `most` bytes; 0 for nodes without features."""
    known, width = matrices["allx"].shape
    what = f"{paths['allx']}: {num_nodes} rows of {width} columns"
    check_bytes(what, 4 * num_nodes * width, most)
    features = np.zeros((num_nodes, width), np.float32)
    matrices["allx"].toarray(out=features[:known])
    features[test] = matrices["tx"].toarray()
    for suffix, ids in (("allx", slice(known)), ("tx", test)):
        if not np.isfinite(features[ids]).all():  # the sum of several values for one entry
            raise ValueError(_too_large(paths[suffix]))
    return features


def _read_graph(path: Path, max_bytes: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns senders and receivers, int32 [edges], sorted, and the number of nodes."""
    neighbors: Any = read_python2_pickle(path, max_bytes=max_bytes)
    if not isinstance(neighbors, dict) or not neighbors:
        raise DamagedError(f"{path} must hold a dictionary of the nodes' neighbors")
    num_nodes = len(neighbors)
    missing = next((node for node in range(num_nodes) if node not in neighbors), None)
    if missing is not None:
        raise DamagedError(f"{path} has {num_nodes} nodes, but node {missing} is missing")
    for node, ids in neighbors.items():
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < num_nodes for i in ids):
            raise DamagedError(
                f"{path}: the neighbors of node {node} are not a list of numbers from 0 to {num_nodes - 1}"
            )
    if len({id(ids) for ids in neighbors.values()}) < num_nodes:  # a small file could repeat one list without end
        raise DamagedError(f"{path}: several nodes share one list of neighbors")
    degrees = [len(ids) for ids in neighbors.values()]
    ends = np.repeat(np.fromiter(neighbors, np.int64, num_nodes), degrees)
    others = np.fromiter((i for ids in neighbors.values() for i in ids), np.int64, len(ends))
    keys = np.unique(np.concatenate([ends * num_nodes + others, others * num_nodes + ends]))
    receivers, senders = np.divmod(keys, num_nodes)
    return senders.astype(np.int32), receivers.astype(np.int32), num_nodes


def _read_matrix(path: Path, max_bytes: int | None) -> Any:
    """Returns a sparse matrix by rows, float32 [rows, width]."""
    import scipy.sparse

    rows = read_python2_pickle(path, max_bytes=max_bytes)
    if not isinstance(rows, SparseRows):
        raise DamagedError(f"{path} must hold a sparse matrix of features")
    if not rows.shape[0] or not 0 < rows.shape[1] <= _MAX_WIDTH:
        raise DamagedError(
            f"{path}: features must have at least one row, and 1 to {_MAX_WIDTH} columns, got shape {rows.shape}"
        )
    with faults_named(path), np.errstate(over="ignore"):
        data = rows.data.astype(np.float32)
        if not np.isfinite(data).all():
            raise ValueError(_too_large(path))
        return scipy.sparse.csr_matrix((data, rows.indices, rows.indptr), shape=rows.shape)


def _too_large(path: Path) -> str:
    return f"{path} has a feature too large for float32"


def _read_labels(path: Path, max_bytes: int | None) -> np.ndarray:
    """Returns bool [rows, classes], True once per row."""
    one_hot: object = read_python2_pickle(path, max_bytes=max_bytes)
    if not isinstance(one_hot, np.ndarray) or one_hot.ndim != 2:
        raise DamagedError(f"{path} must hold an array of labels [rows, classes]")
    is_one_hot = ((one_hot == 0) | (one_hot == 1)).all(axis=1) & ((one_hot == 1).sum(axis=1) == 1)
    if not is_one_hot.all():
        raise DamagedError(f"{path}: row {is_one_hot.argmin()} is not one-hot")
    return one_hot == 1


def _check_widths(paths: Paths, matrices: Mapping[str, Any], labels: Mapping[str, np.ndarray]) -> int:
    """Checks that features and labels fit each other, and returns the number of classes."""
    width, num_classes = matrices["allx"].shape[1], labels["ally"].shape[1]
    for of_features, of_labels in zip(_MATRICES, _LABELS, strict=True):
        matrix, one_hot = matrices[of_features], labels[of_labels]
        if matrix.shape[1] != width:
            raise DamagedError(f"{paths[of_features]} has {matrix.shape[1]} columns, but allx has {width}")
        if one_hot.shape != (matrix.shape[0], num_classes):
            raise DamagedError(
                f"{paths[of_labels]} must have shape {(matrix.shape[0], num_classes)} to match {of_features} and "
                f"ally, got {one_hot.shape}"
            )
    return num_classes


def _read_test_ids(path: Path, known: int, num_nodes: int) -> np.ndarray:
    """Returns int32 [test nodes], in the order of tx."""
    ids = []
    for row, line in enumerate(_read_lines(path, num_nodes)):
        if not line.isdigit() or len(line) > 10 or not known <= int(line) < num_nodes:
            shown = line[:20].decode("ascii", "backslashreplace")
            raise DamagedError(f"{path}: row {row} must be from {known} to {num_nodes - 1}, got {shown!r}")
        ids.append(int(line))
    if not ids:
        raise DamagedError(f"{path} lists no test node")
    if len(set(ids)) < len(ids):
        raise DamagedError(f"{path} lists a test node twice")
    return np.array(ids, np.int32)


def _read_lines(path: Path, num_nodes: int) -> list[bytes]:
    """Returns the words of the file, reading no more than the ids of all nodes may take."""
    return read_plain(path, max_bytes=_LONGEST_ID * (num_nodes + 1)).split()
