"""Cora, Citeseer and Pubmed: graphs of citations, in the eight files that Planetoid published of each.

Papers are nodes, words that they use are features, and the subject is the class. The split is the public
one: 20 nodes of each class to train on, 500 to choose a model by, 1,000 to test it on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jmp_train.graphs.node_data import NodeData
from jmp_train.graphs.python2_pickles import SparseRows, read_python2_pickle

PLANETOID = ("cora", "citeseer", "pubmed")
ADDRESS = "https://github.com/kimiyoung/planetoid/tree/master/data"

_MATRICES, _LABELS = ("x", "tx", "allx"), ("y", "ty", "ally")
_SUFFIXES = (*_MATRICES, *_LABELS, "graph", "test.index")
_VALIDATION = 500
_WIDEST = 2**16  # columns of features: a width in a damaged file is no reason to take all memory

Paths = Mapping[str, Path]


def read_planetoid(data_dir: Path | str, name: str = "cora") -> NodeData:
    """Reads one of Planetoid's three graphs of citations.

    The files are pickles, of which nothing is imported or called: a file that asks for more than arrays,
    sparse matrices, lists and dictionaries is refused.

    Args:
      data_dir: the folder of `ind.<name>.x`, `.y`, `.tx`, `.ty`, `.allx`, `.ally`, `.graph` and
        `.test.index`.
      name: "cora", "citeseer" or "pubmed".

    Returns:
      The data. Each edge is there both ways and once, loops as in the file, sorted by receiver, then
      sender; features are the file's, not normalised; ids of the split ascend. Citeseer's 15 papers of
      which only the number is known have features of 0 and the label -1.

    Raises:
      FileNotFoundError: files are missing; the message names them and says where they are public.
      ValueError: the name is another one; or a file is damaged, asks for what it should not, or does not
        fit the others: the message names it and the fault.

    Example:
      >>> try:
      ...     read_planetoid("nowhere", "cora")
      ... except FileNotFoundError as fault:
      ...     print(fault)
      data_dir nowhere is no folder; Planetoid's files are public in \
https://github.com/kimiyoung/planetoid/tree/master/data

    Reference: Yang, Cohen and Salakhutdinov, Revisiting Semi-Supervised Learning with Graph Embeddings,
    https://arxiv.org/abs/1603.08861.
    """
    if name not in PLANETOID:
        raise ValueError(f"name={name!r} must be one of {', '.join(map(repr, PLANETOID))}")
    paths = _find_files(Path(data_dir), name)
    senders, receivers, num_nodes = _read_graph(paths["graph"])
    matrices = {suffix: _read_matrix(paths[suffix]) for suffix in _MATRICES}
    labels = {suffix: _read_labels(paths[suffix]) for suffix in _LABELS}
    num_classes = _check_widths(paths, matrices, labels)
    known, train = len(matrices["allx"]), len(matrices["x"])
    if train > known:
        raise ValueError(f"{paths['x']} has {train} rows, more than the {known} of allx")
    test = _read_test_ids(paths["test.index"], known, num_nodes)
    if len(test) != len(matrices["tx"]):
        raise ValueError(f"{paths['tx']} has {len(matrices['tx'])} rows for {len(test)} test nodes")

    features = np.zeros((num_nodes, matrices["allx"].shape[1]), np.float32)
    classes = np.full(num_nodes, -1, np.int32)
    for ids, suffix in ((np.arange(known), "all"), (test, "t")):
        features[ids] = matrices[f"{suffix}x"]
        classes[ids] = labels[f"{suffix}y"].argmax(axis=1)
    validation = np.arange(train, min(train + _VALIDATION, known), dtype=np.int32)
    split = (np.arange(train, dtype=np.int32), validation, np.sort(test))
    return NodeData(senders, receivers, features, classes, num_classes, *split)


def _find_files(data_dir: Path, name: str) -> Paths:
    public = f"Planetoid's files are public in {ADDRESS}"
    if not data_dir.is_dir():
        raise FileNotFoundError(f"data_dir {data_dir} is no folder; {public}")
    paths = {suffix: data_dir / f"ind.{name}.{suffix}" for suffix in _SUFFIXES}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"data_dir {data_dir} lacks {', '.join(missing)}; {public}")
    return paths


def _read_graph(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns senders and receivers, int32 [edges], sorted, and the number of nodes."""
    neighbors: Any = read_python2_pickle(path)
    if not isinstance(neighbors, dict) or not neighbors:
        raise ValueError(f"{path} holds no dictionary of the nodes' neighbours")
    num_nodes = len(neighbors)
    missing = next((node for node in range(num_nodes) if node not in neighbors), None)
    if missing is not None:
        raise ValueError(f"{path} has {num_nodes} nodes, but none that is numbered {missing}")
    for node, ids in neighbors.items():
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < num_nodes for i in ids):
            raise ValueError(
                f"{path}: the neighbours of node {node} are no list of numbers from 0 to "
                f"{num_nodes - 1}"
            )
    if len({id(ids) for ids in neighbors.values()}) < num_nodes:  # a small file of endless edges
        raise ValueError(f"{path}: several nodes have one list of neighbours in common")
    degrees = [len(ids) for ids in neighbors.values()]
    ends = np.repeat(np.fromiter(neighbors, np.int64, num_nodes), degrees)
    others = np.fromiter((i for ids in neighbors.values() for i in ids), np.int64, len(ends))
    keys = np.unique(np.concatenate([ends * num_nodes + others, others * num_nodes + ends]))
    receivers, senders = np.divmod(keys, num_nodes)
    return senders.astype(np.int32), receivers.astype(np.int32), num_nodes


def _read_matrix(path: Path) -> np.ndarray:
    """Returns float32 [rows, width]."""
    import scipy.sparse

    rows = read_python2_pickle(path)
    if not isinstance(rows, SparseRows):
        raise ValueError(f"{path} holds no sparse matrix of features")
    if not rows.shape[0] or not 0 < rows.shape[1] <= _WIDEST:
        raise ValueError(
            f"{path} has features of shape {rows.shape}, where at least one row of 1 to {_WIDEST} "
            "columns is wanted"
        )
    with np.errstate(over="ignore"):
        data = rows.data.astype(np.float32)
    matrix = scipy.sparse.csr_matrix((data, rows.indices, rows.indptr), shape=rows.shape).toarray()
    if not np.isfinite(matrix).all():
        raise ValueError(f"{path} has a feature too large for float32")
    return matrix


def _read_labels(path: Path) -> np.ndarray:
    """Returns bool [rows, classes], True once a row."""
    one_hot = read_python2_pickle(path)
    if not isinstance(one_hot, np.ndarray) or one_hot.ndim != 2:
        raise ValueError(f"{path} holds no array of labels [rows, classes]")
    is_one_hot = ((one_hot == 0) | (one_hot == 1)).all(axis=1) & ((one_hot == 1).sum(axis=1) == 1)
    if not is_one_hot.all():
        raise ValueError(f"{path}: row {is_one_hot.argmin()} is not one-hot")
    return one_hot == 1


def _check_widths(
    paths: Paths, matrices: Mapping[str, np.ndarray], labels: Mapping[str, np.ndarray]
) -> int:
    """Checks that features and labels fit each other, and returns how many classes there are."""
    width, num_classes = matrices["allx"].shape[1], labels["ally"].shape[1]
    for of_features, of_labels in zip(_MATRICES, _LABELS, strict=True):
        matrix, one_hot = matrices[of_features], labels[of_labels]
        if matrix.shape[1] != width:
            raise ValueError(
                f"{paths[of_features]} has {matrix.shape[1]} columns, where allx has {width}"
            )
        if one_hot.shape != (len(matrix), num_classes):
            raise ValueError(
                f"{paths[of_labels]} has shape {one_hot.shape}, where {of_features} and ally want "
                f"{(len(matrix), num_classes)}"
            )
    return num_classes


def _read_test_ids(path: Path, known: int, num_nodes: int) -> np.ndarray:
    """Returns int32 [test nodes], in the order of tx."""
    ids = []
    for row, line in enumerate(path.read_bytes().split()):
        if not line.isdigit() or len(line) > 10 or not known <= int(line) < num_nodes:
            shown = line[:20].decode("ascii", "backslashreplace")
            raise ValueError(
                f"{path} has {shown!r} at row {row}, where {known} to {num_nodes - 1} are right"
            )
        ids.append(int(line))
    if not ids:
        raise ValueError(f"{path} names no test node")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{path} names a test node twice")
    return np.array(ids, np.int32)
