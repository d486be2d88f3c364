"""Reddit's graph of posts, as DGL publishes it: two npz files, one of them a scipy sparse matrix."""

from pathlib import Path
from typing import Any

import numpy as np

from jmp_train.graphs.datasets.data_files import find_files
from jmp_train.graphs.datasets.graph_data import NodeData
from jmp_train.graphs.file_formats import read_npz
from jmp_train.graphs.structure import LARGEST_COUNT
from jmp_train.policies.files import DamagedError, faults_named
from jmp_train.policies.pytrees import checked_path

REDDIT_FEATURES = 602
REDDIT_CLASSES = 41

REDDIT_GRAPH_FILES = ("reddit_graph.npz", "reddit_self_loop_graph.npz")  # either of them
REDDIT_DATA_FILE = "reddit_data.npz"
REDDIT_SOURCE = "Reddit's two files are public in https://data.dgl.ai/dataset/reddit.zip"

_TRAIN, _VALIDATION, _TEST = 1, 2, 3  # the values of `node_types`


def read_reddit(data_dir: Path | str, *, max_bytes: int | None = None) -> NodeData:
    """Reads Reddit's graph of posts, which are connected if a user commented on both; their class is their community.

    Args:
      data_dir: the folder of `reddit_graph.npz`, or `reddit_self_loop_graph.npz`, and `reddit_data.npz`.
      max_bytes: largest number of bytes of a file's arrays; None for 100 times the file's size, and
        256 MiB at least. The public files are far below.

    Returns:
      The data, with edges in the order of the file, 602 features and 41 classes.

    Raises:
      FileNotFoundError: a file is missing; the message has its public address.
      ValueError: a file is damaged, needs more memory than allowed, or does not fit the other; the message has
        its name and the fault.
      OSError: a file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> import scipy.sparse
      >>> folder = Path(tempfile.mkdtemp())
      >>> ends = np.array([0, 1, 2]), np.array([1, 0, 2])
      >>> graph = scipy.sparse.coo_matrix((np.ones(3), ends), shape=(3, 3))
      >>> scipy.sparse.save_npz(folder / "reddit_graph.npz", graph)
      >>> np.savez(folder / "reddit_data.npz", feature=np.ones((3, 602)), label=[0, 40, 1],
      ...          node_types=[1, 2, 3])
      >>> data = read_reddit(folder)
      >>> data.senders.tolist(), data.receivers.tolist(), data.labels.tolist()
      ([0, 1, 2], [1, 0, 2], [0, 40, 1])
      >>> data.train.tolist(), data.validation.tolist(), data.test.tolist()
      ([0], [1], [2])

    Reference: https://docs.dgl.ai/generated/dgl.data.RedditDataset.html.
    """
    names = {"graph": REDDIT_GRAPH_FILES, "data": (REDDIT_DATA_FILE,)}
    paths = find_files(checked_path("data_dir", data_dir), names, REDDIT_SOURCE)
    graph_path, data_path = paths["graph"], paths["data"]
    with faults_named(graph_path):
        senders, receivers, num_nodes = _read_graph(graph_path, max_bytes)
    with faults_named(data_path):
        of_nodes = _read_nodes(data_path, num_nodes, graph_path.name, max_bytes)
    return NodeData(senders, receivers, *of_nodes)


def _read_nodes(path: Path, num_nodes: int, counted_by: str, max_bytes: int | None) -> list[Any]:
    """Returns features, labels, the number of classes, and the nodes of each part of the split."""
    arrays = read_npz(path, ("feature", "label", "node_types"), max_bytes=max_bytes)
    shapes = {
        "feature": (num_nodes, REDDIT_FEATURES),
        "label": (num_nodes,),
        "node_types": (num_nodes,),
    }
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise DamagedError(
                f"{path}: {name!r} must have shape {shape} for the {num_nodes} nodes of {counted_by}, got "
                f"{arrays[name].shape}"
            )
    if not np.issubdtype(arrays["feature"].dtype, np.floating):
        raise DamagedError(f"{path}: 'feature' must be floating, got {str(arrays['feature'].dtype)[:80]}")
    with np.errstate(over="ignore"):
        features = arrays["feature"].astype(np.float32, copy=False)
    is_finite = np.isfinite(features).all(axis=1)
    if not is_finite.all():
        raise DamagedError(f"{path}: 'feature' is not finite in row {is_finite.argmin()}")
    _check_integers(path, "label", arrays["label"], 0, REDDIT_CLASSES - 1)
    _check_integers(path, "node_types", arrays["node_types"], _TRAIN, _TEST)
    for kind, name in ((_TRAIN, "train"), (_TEST, "test")):
        if kind not in arrays["node_types"]:
            raise DamagedError(f"{path}: 'node_types' has no {kind} for the {name} nodes")
    parts = [np.flatnonzero(arrays["node_types"] == kind).astype(np.int32) for kind in (_TRAIN, _VALIDATION, _TEST)]
    return [features, arrays["label"].astype(np.int32), REDDIT_CLASSES, *parts]


def sorted_ends(keys: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns senders and receivers, int32 [edges], sorted by receiver, then sender.

    Args:
      keys: int64 [edges], `receiver * num_nodes + sender` of each edge; sorted in place.
      num_nodes: number of nodes.

    Example:
      >>> sorted_ends(np.array([2 * 3 + 0, 0 * 3 + 1]), 3)
      (array([1, 0], dtype=int32), array([0, 2], dtype=int32))
    """
    keys.sort()
    receivers = (keys // num_nodes).astype(np.int32)
    senders = (keys % num_nodes).astype(np.int32)
    return senders, receivers


def _read_graph(path: Path, max_bytes: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns senders and receivers, int32 [edges], and the number of nodes."""
    arrays = read_npz(path, ("format", "shape", "row", "col"), max_bytes=max_bytes)
    if _value(arrays["format"]) not in (b"coo", "coo"):
        kind = repr(_value(arrays["format"]))[:40]
        raise DamagedError(f"{path} must hold a sparse matrix in the format b'coo', got {kind}")
    shape = _value(arrays["shape"])
    is_pair = isinstance(shape, list) and len(shape) == 2 and type(shape[0]) is int
    if not is_pair or shape[0] != shape[1] or not 1 <= shape[0] <= LARGEST_COUNT:
        raise DamagedError(f"{path}: 'shape' must be [nodes, nodes], got {str(shape)[:80]}")
    rows, columns = arrays["row"], arrays["col"]
    if rows.ndim != 1 or rows.shape != columns.shape:
        raise DamagedError(f"{path}: 'row' and 'col' must both be [edges], got shapes {rows.shape} and {columns.shape}")
    for name, ids in (("row", rows), ("col", columns)):
        _check_integers(path, name, ids, 0, shape[0] - 1)
    return rows.astype(np.int32, copy=False), columns.astype(np.int32, copy=False), shape[0]


def _value(array: np.ndarray) -> Any:
    """Returns the value of a small array; for a large one, a description."""
    return array.tolist() if array.nbytes <= 256 else "of many elements"


def _check_integers(path: Path, name: str, array: np.ndarray, least: int, most: int) -> None:
    if not np.issubdtype(array.dtype, np.integer):
        raise DamagedError(f"{path}: {name!r} must be integers, got {str(array.dtype)[:80]}")
    if array.size and not least <= array.min() <= array.max() <= most:
        row = int(np.argmax((array < least) | (array > most)))
        raise DamagedError(f"{path}: {name!r}: row {row} must be from {least} to {most}, got {array[row]}")
