"""Batches of the graphs of a data set, padded to a few sizes, built on the host from existing arrays."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.datasets.graph_data import GraphData
from jmp_train.graphs.structure import (
    Graph,
    as_count,
    check_formats,
    checked_features,
    filled,
    formats_of_size,
    known_ids,
    make_adjacency_checked,
    on_device,
    ranges,
)

TRIALS = 200
MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class PaddedSize:
    """The padded numbers of nodes, edges and graphs of a batch.

    Attributes:
      n_node: number of nodes, larger than without padding.
      n_edge: number of edges.
      n_graph: number of graphs, larger than without padding.

    Example:
      >>> PaddedSize(n_node=64, n_edge=128, n_graph=9).n_node
      64
    """

    n_node: int
    n_edge: int
    n_graph: int


def padded_sizes(
    data: GraphData, batch_size: int, *, places: ArrayLike | Sequence[int] | None = None, buckets: int = 2
) -> tuple[PaddedSize, ...]:
    """Returns sizes for batches of a data set's graphs, ascending; any batch fits into the last.

    A program is compiled for each size that batches have. Nine of ten random batches fit into the first of
    two sizes; 99 of a hundred into the second of three, and so on.

    Args:
      data: the graphs.
      batch_size: number of graphs per batch.
      places: int [some graphs], the graphs for batches; None for all.
      buckets: number of sizes; equal sizes are listed once.

    Raises:
      ValueError: there are fewer graphs, or a number is not positive.
      TypeError: a number is not an integer.

    Example:
      >>> import numpy as np
      >>> sizes, ends = np.array([2, 4, 30], np.int32), np.zeros(9, np.int32)
      >>> data = GraphData(sizes, np.array([1, 3, 5], np.int32), ends, ends, np.zeros(3, np.int32), 1)
      >>> padded_sizes(data, 2, buckets=1)
      (PaddedSize(n_node=40, n_edge=8, n_graph=3),)
    """
    chosen = _checked_places(data, places)
    if not 1 <= as_count("batch_size", batch_size) <= len(chosen):
        raise ValueError(f"batch_size={batch_size} must be between 1 and the {len(chosen)} graphs")
    as_count("buckets", buckets, least=1)
    counts = np.stack([data.n_node[chosen], data.n_edge[chosen]], 1).astype(np.int64)
    largest = np.sort(counts, axis=0)[-batch_size:].sum(0)
    random = np.random.default_rng(0)
    trials = np.stack([counts[random.permutation(len(counts))[:batch_size]].sum(0) for _ in range(TRIALS)])
    wanted = [np.quantile(trials, 1 - 0.1**bucket, axis=0) for bucket in range(1, buckets)]
    found = {}
    for nodes, edges in [*wanted, largest]:
        found[PaddedSize(_rounded(nodes + 1), _rounded(edges), batch_size + 1)] = None
    return tuple(found)


def _rounded(count: float) -> int:
    return MULTIPLE * -(-int(np.ceil(count)) // MULTIPLE)


def first_that_holds(data: GraphData, sizes: Sequence[PaddedSize], parts: Sequence[np.ndarray]) -> PaddedSize:
    """Returns the first size into which each of some batches fits.

    Args:
      data: the graphs.
      sizes: ascending, see `padded_sizes`.
      parts: for each batch, its graphs, int [graphs of the batch].

    Raises:
      ValueError: no size holds them all.

    Example:
      >>> import numpy as np
      >>> ends = np.zeros(9, np.int32)
      >>> data = GraphData(np.array([2, 4, 30]), np.array([1, 3, 5]), ends, ends, np.zeros(3, np.int32), 1)
      >>> sizes = [PaddedSize(8, 8, 3), PaddedSize(40, 8, 3)]
      >>> [first_that_holds(data, sizes, [np.array(part)]).n_node for part in ([0, 1], [0, 2])]
      [8, 40]
    """
    nodes, edges = (max(int(counts[part].sum()) for part in parts) for counts in (data.n_node, data.n_edge))
    graphs = max(map(len, parts))
    for size in sizes:
        if nodes < size.n_node and edges <= size.n_edge and graphs < size.n_graph:
            return size
    raise ValueError(f"no size fits a batch of {graphs} graphs with {nodes} nodes and {edges} edges: {list(sizes)}")


def padded_batch(
    data: GraphData,
    places: ArrayLike | Sequence[int],
    size: PaddedSize | None = None,
    *,
    formats: Sequence[str] | None = None,
) -> Graph:
    """Returns some graphs of a data set as one padded graph; runs on the host.

    All batches of a size have one structure, and share programs. The result equals `pad` of `batch` of these graphs.

    Args:
      data: the graphs.
      places: int [graphs of the batch], indices of the graphs, possibly repeated.
      size: padded size; None for one more node and graph than there are.
      formats: see `pad`.

    Raises:
      ValueError: a graph does not exist, or the batch is larger than the size.
      TypeError: places are not integers.

    Example:
      >>> import numpy as np
      >>> counts, ends = np.array([2, 1], np.int32), np.array([0, 1, 0], np.int32)
      >>> data = GraphData(counts, np.array([2, 1], np.int32), ends, ends, np.array([1, 0], np.int32), 2)
      >>> batch = padded_batch(data, [1, 0], PaddedSize(n_node=5, n_edge=4, n_graph=3))
      >>> batch.n_node.tolist(), batch.senders.tolist()
      ([1, 2, 2], [0, 1, 2, 5])
    """
    check_formats(formats or ())
    chosen = _checked_places(data, places)
    n_node, n_edge = data.n_node[chosen], data.n_edge[chosen]
    has = {"n_node": int(n_node.sum()), "n_edge": int(n_edge.sum()), "n_graph": len(chosen)}
    if size is None:
        size = PaddedSize(has["n_node"] + 1, has["n_edge"], has["n_graph"] + 1)
    for name, least in (("n_node", has["n_node"] + 1), ("n_edge", has["n_edge"]), ("n_graph", has["n_graph"] + 1)):
        if getattr(size, name) < least:
            raise ValueError(f"size has {name}={getattr(size, name)}, but the batch needs {least}")
    formats = formats_of_size(size.n_edge) if formats is None else formats
    nodes = ranges(data.node_starts[chosen], n_node)
    edges = ranges(data.edge_starts[chosen], n_edge)
    firsts = np.repeat(np.cumsum(n_node) - n_node, n_edge)
    # Padding edges are between nodes out of range, so they do not count.
    senders, receivers = (
        filled(known[edges] + firsts, size.n_edge, size.n_node) for known in (data.senders, data.receivers)
    )
    node_rows = {name: _filled(rows[nodes], size.n_node) for name, rows in data.nodes.items()}
    edge_rows = {name: _filled(rows[edges], size.n_edge) for name, rows in data.edges.items()}
    counts = (
        np.append(n_node, size.n_node - has["n_node"]),
        np.append(n_edge, size.n_edge - has["n_edge"]),
    )
    return Graph(
        checked_features("nodes", node_rows, size.n_node),
        checked_features("edges", edge_rows, size.n_edge),
        make_adjacency_checked(senders, receivers, size.n_node, size.n_node, formats=formats, is_fixed=True),
        *(on_device(_filled(count, size.n_graph), np.int32) for count in counts),
        is_padded=True,
    )


def _checked_places(data: GraphData, places: ArrayLike | Sequence[int] | None) -> np.ndarray:
    if places is None:
        return np.arange(len(data))
    return known_ids("places", places, len(data), "graphs").astype(np.int64)


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns rows padded with zeros."""
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])
