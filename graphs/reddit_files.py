"""Reddit's graph of posts, as DGL publishes it: two npz files, one of them a scipy sparse matrix."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jmp_train.graphs.node_data import NodeData

FEATURES = 602
CLASSES = 41

GRAPH_FILES = ("reddit_graph.npz", "reddit_self_loop_graph.npz")  # either will do
DATA_FILE = "reddit_data.npz"
PUBLIC = "Reddit's two files are public in https://data.dgl.ai/dataset/reddit.zip"

_TRAIN, _VALIDATION, _TEST = 1, 2, 3  # what `node_types` says of a node

Arrays = dict[str, np.ndarray]


def read_reddit(data_dir: Path | str) -> NodeData:
    """Reads Reddit's graph: posts, joined where a user commented on both, whose class is their community.

    Args:
      data_dir: the folder of `reddit_graph.npz`, or `reddit_self_loop_graph.npz`, and `reddit_data.npz`.

    Returns:
      The data, its edges as they are in the file; features are 602 wide, and there are 41 classes.

    Raises:
      FileNotFoundError: a file is missing; the message says where it is public.
      ValueError: a file is damaged or does not fit the other; the message names it and the fault.

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
    graph_path, data_path = _find_files(Path(data_dir))
    senders, receivers, num_nodes = _read_graph(graph_path)
    arrays = _read_npz(data_path, ("feature", "label", "node_types"))
    shapes = {"feature": (num_nodes, FEATURES), "label": (num_nodes,), "node_types": (num_nodes,)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(
                f"{data_path}: {name!r} has shape {arrays[name].shape}, where the {num_nodes} nodes "
                f"of {graph_path.name} want {shape}"
            )
    if not np.issubdtype(arrays["feature"].dtype, np.floating):
        raise ValueError(f"{data_path}: 'feature' has {arrays['feature'].dtype}, no floats")
    with np.errstate(over="ignore"):
        features = arrays["feature"].astype(np.float32, copy=False)
    is_finite = np.isfinite(features).all(axis=1)
    if not is_finite.all():
        raise ValueError(f"{data_path}: 'feature' is not finite in row {is_finite.argmin()}")
    _check_integers(data_path, "label", arrays["label"], 0, CLASSES - 1)
    _check_integers(data_path, "node_types", arrays["node_types"], _TRAIN, _TEST)
    for kind, name in ((_TRAIN, "train"), (_TEST, "test")):
        if kind not in arrays["node_types"]:
            raise ValueError(f"{data_path}: 'node_types' has no {kind}: no node to {name} on")
    train, validation, test = (
        np.flatnonzero(arrays["node_types"] == kind).astype(np.int32)
        for kind in (_TRAIN, _VALIDATION, _TEST)
    )
    return NodeData(
        senders,
        receivers,
        features,
        arrays["label"].astype(np.int32),
        CLASSES,
        train,
        validation,
        test,
    )


def sorted_ends(keys: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns senders and receivers, int32 [edges], sorted by receiver, then sender.

    Args:
      keys: int64 [edges], `receiver * num_nodes + sender` of each edge; sorted in place.
      num_nodes: how many nodes there are.

    Example:
      >>> sorted_ends(np.array([2 * 3 + 0, 0 * 3 + 1]), 3)
      (array([1, 0], dtype=int32), array([0, 2], dtype=int32))
    """
    keys.sort()
    receivers = (keys // num_nodes).astype(np.int32)
    senders = (keys % num_nodes).astype(np.int32)
    return senders, receivers


def _find_files(data_dir: Path) -> tuple[Path, Path]:
    if not data_dir.is_dir():
        raise FileNotFoundError(f"data_dir {data_dir} is no folder; {PUBLIC}")
    graphs = [data_dir / name for name in GRAPH_FILES if (data_dir / name).is_file()]
    data = data_dir / DATA_FILE
    missing = [] if graphs else [" or ".join(GRAPH_FILES)]
    missing += [] if data.is_file() else [DATA_FILE]
    if missing:
        raise FileNotFoundError(f"data_dir {data_dir} lacks {' and '.join(missing)}; {PUBLIC}")
    return graphs[0], data


def _read_graph(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns senders and receivers, int32 [edges], and the number of nodes."""
    arrays = _read_npz(path, ("format", "shape", "row", "col"))
    if arrays["format"].tolist() not in (b"coo", "coo"):
        kind = arrays["format"].tolist()
        raise ValueError(f"{path} holds a sparse matrix in the format {kind!r}, not in b'coo'")
    shape = arrays["shape"].tolist()
    is_pair = isinstance(shape, list) and len(shape) == 2 and type(shape[0]) is int
    if not is_pair or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(f"{path}: 'shape' is {shape}, where [nodes, nodes] is wanted")
    rows, columns = arrays["row"], arrays["col"]
    if rows.ndim != 1 or rows.shape != columns.shape:
        raise ValueError(
            f"{path}: 'row' and 'col' have shapes {rows.shape} and {columns.shape}, "
            "where both are [edges]"
        )
    for name, ids in (("row", rows), ("col", columns)):
        _check_integers(path, name, ids, 0, shape[0] - 1)
    return rows.astype(np.int32, copy=False), columns.astype(np.int32, copy=False), shape[0]


def _read_npz(path: Path, names: Sequence[str]) -> Arrays:
    """Returns arrays of an npz file, without unpickling anything."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no npz file, or an incomplete one")
    part, arrays = "its list of arrays", {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            present = archive.files
            for name in set(names) & set(present):
                part = repr(name)
                arrays[name] = np.asarray(archive[name])
    except Exception as error:  # noqa: BLE001  # what wrong bytes lead zipfile and numpy to
        fault = str(error).partition("\n")[0]
        raise ValueError(f"{path}: {part} cannot be read: {fault}") from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{path} has no {missing[0]!r}, only {', '.join(present)}")
    return arrays


def _check_integers(path: Path, name: str, array: np.ndarray, least: int, most: int) -> None:
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{path}: {name!r} has {array.dtype}, no integers")
    if array.size and not least <= array.min() <= array.max() <= most:
        row = int(np.argmax((array < least) | (array > most)))
        raise ValueError(
            f"{path}: {name!r} has {array[row]} at row {row}, where {least} to {most} are right"
        )
