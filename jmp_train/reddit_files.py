"""Reddit's graph of posts, as DGL publishes it: two npz files, one of them a scipy sparse matrix."""

import dataclasses
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FEATURES = 602
CLASSES = 41
TRAIN, VALIDATION, TEST = 1, 2, 3  # what `node_types` says of a node

GRAPH_FILES = ("reddit_graph.npz", "reddit_self_loop_graph.npz")  # either will do
DATA_FILE = "reddit_data.npz"
ADDRESS = "https://data.dgl.ai/dataset/reddit.zip"

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RedditData:
    """Posts that are joined where a user commented on both; a post's class is its community.

    Attributes:
      senders: int32 [edges]; an edge that joins two posts is there both ways.
      receivers: int32 [edges].
      features: float32 [nodes, 602].
      labels: int32 [nodes], from 0 to 40.
      node_types: int8 [nodes], `TRAIN`, `VALIDATION` or `TEST`.
    """

    senders: np.ndarray
    receivers: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    node_types: np.ndarray

    @property
    def num_nodes(self) -> int:
        """How many posts there are."""
        return len(self.labels)


def read_reddit(data_dir: Path) -> RedditData:
    """Reads Reddit's graph and what is known of its nodes.

    Args:
      data_dir: the folder of `reddit_graph.npz`, or `reddit_self_loop_graph.npz`, and `reddit_data.npz`.

    Returns:
      The data, its edges as they are in the file.

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

    Reference: https://docs.dgl.ai/generated/dgl.data.RedditDataset.html.
    """
    graph_path, data_path = _find_files(data_dir)
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
    is_finite = np.isfinite(arrays["feature"]).all(axis=1)
    if not is_finite.all():
        raise ValueError(f"{data_path}: 'feature' is not finite in row {is_finite.argmin()}")
    _check_integers(data_path, "label", arrays["label"], 0, CLASSES - 1)
    _check_integers(data_path, "node_types", arrays["node_types"], TRAIN, TEST)
    for kind, name in ((TRAIN, "train"), (TEST, "test")):
        if kind not in arrays["node_types"]:
            raise ValueError(f"{data_path}: 'node_types' has no {kind}: no node to {name} on")
    return RedditData(
        senders,
        receivers,
        arrays["feature"].astype(np.float32, copy=False),
        arrays["label"].astype(np.int32),
        arrays["node_types"].astype(np.int8),
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
        raise FileNotFoundError(f"--data-dir {data_dir} is no folder; {_where_public()}")
    graphs = [data_dir / name for name in GRAPH_FILES if (data_dir / name).is_file()]
    data = data_dir / DATA_FILE
    missing = [] if graphs else [" or ".join(GRAPH_FILES)]
    missing += [] if data.is_file() else [DATA_FILE]
    if missing:
        raise FileNotFoundError(
            f"--data-dir {data_dir} lacks {' and '.join(missing)}; {_where_public()}"
        )
    return graphs[0], data


def _where_public() -> str:
    return f"Reddit's two files are public in {ADDRESS}"


def missing_folder() -> FileNotFoundError:
    """Returns the error for who says neither where the files are nor that data is to be made up.

    Example:
      >>> print(missing_folder())
      task reddit wants --data-dir, the folder of reddit_graph.npz and reddit_data.npz (or --synthetic); \
Reddit's two files are public in https://data.dgl.ai/dataset/reddit.zip
    """
    return FileNotFoundError(
        f"task reddit wants --data-dir, the folder of {GRAPH_FILES[0]} and {DATA_FILE} "
        f"(or --synthetic); {_where_public()}"
    )


def _read_graph(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns senders and receivers, int32 [edges], and the number of nodes."""
    arrays = _read_npz(path, ("format", "shape", "row", "col"))
    if arrays["format"].tolist() not in (b"coo", "coo"):
        kind = arrays["format"].tolist()
        raise ValueError(f"{path} holds a sparse matrix in the format {kind!r}, not in b'coo'")
    shape = arrays["shape"].tolist()
    if not isinstance(shape, list) or len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
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
    with np.load(path, allow_pickle=False) as archive:
        missing = [name for name in names if name not in archive]
        if missing:
            raise ValueError(f"{path} has no {missing[0]!r}, only {', '.join(archive)}")
        arrays = {}
        for name in names:
            try:
                arrays[name] = archive[name]
            except (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
                fault = str(error).partition("\n")[0]
                raise ValueError(f"{path}: {name!r} cannot be read: {fault}") from None
    return arrays


def _check_integers(path: Path, name: str, array: np.ndarray, least: int, most: int) -> None:
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{path}: {name!r} has {array.dtype}, no integers")
    if array.size and not least <= array.min() <= array.max() <= most:
        row = int(np.argmax((array < least) | (array > most)))
        raise ValueError(
            f"{path}: {name!r} has {array[row]} at row {row}, where {least} to {most} are right"
        )
