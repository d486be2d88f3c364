"""Features of nodes: normalized rows, and encodings from a graph's structure; on the host."""

from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.structure import AnyBatch, Graph, as_count, batch_of, check_known
from jmp_train.graphs.transforms.edge_lists import edges_on_host, owning_graphs

DENSE_NODES = 512  # up to which all eigenvectors of a component are computed
SAME = 1e-6  # relative difference up to which two entries have the same magnitude

Array = TypeVar("Array", np.ndarray, jax.Array)


def laplacian_pe(graph: AnyBatch, k: int, key: jax.Array | None = None) -> np.ndarray:
    """Returns Laplacian positional encodings: eigenvectors of the normalized Laplacian of each graph of a batch.

    The Laplacian is that of the undirected graph, I - D**-1/2 A D**-1/2, in which A has half of the edges between
    two nodes in either direction. Eigenvectors are sorted by eigenvalue, and the first one is left out. They have
    length 1.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      k: number of eigenvectors.
      key: a random key, which decides the sign of each eigenvector of each graph; None for a fixed sign: the entry of
        largest magnitude is positive, and the first of several.

    Returns:
      Float32 [nodes, k]; 0 if a graph has no further eigenvectors.

    Raises:
      TypeError: the graph is traced, or `k` is not an integer.
      ValueError: the graph is padded, or `k` is negative.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> vectors = laplacian_pe(from_edges([0, 1, 1, 2], [1, 0, 2, 1], 3), 1)
      >>> (vectors**2).round(2).tolist(), bool(vectors[0] > 0)
      ([[0.5], [0.0], [0.5]], True)

    Reference: Dwivedi et al., Benchmarking Graph Neural Networks, https://arxiv.org/abs/2003.00982; lap_pe of Deep
    Graph Library, https://www.dgl.ai.
    """
    from scipy.sparse import diags_array
    from scipy.sparse.csgraph import connected_components

    graph, k = batch_of(graph), as_count("k", k)
    adjacency, owners = _matrix(graph), owning_graphs(graph)
    found = np.zeros((graph.num_nodes, k))
    if not found.size:
        return found.astype(np.float32)
    adjacency = ((adjacency + adjacency.T) / 2).tocsr()
    degrees = adjacency.sum(axis=1)
    scale = diags_array(1 / np.sqrt(np.where(degrees > 0, degrees, 1)))
    adjacency = (scale @ adjacency @ scale).tocsr()
    _, components = connected_components(adjacency, directed=False)
    order = np.argsort(components, kind="stable")
    pairs: list[list[tuple[float, np.ndarray, np.ndarray]]] = [[] for _ in graph.n_node]
    for nodes in np.split(order, np.flatnonzero(np.diff(components[order])) + 1):
        values, vectors = _largest_eigenpairs(adjacency[nodes][:, nodes], k + 1)
        pairs[owners[nodes[0]]] += [(1 - value, nodes, vectors[:, i]) for i, value in enumerate(values)]
    signs = _signs(len(pairs), k, key)
    for mine, sign in zip(pairs, signs, strict=True):
        mine.sort(key=lambda pair: pair[0])
        for column, (_, nodes, vector) in enumerate(mine[1 : k + 1]):
            found[nodes, column] = sign[column] * vector
    return found.astype(np.float32)


def _matrix(graph: Graph, weight: str | None = None) -> Any:
    """Returns the sum of the weights, 1 for None, of edges from each node to each, a scipy.sparse.csr_array."""
    from scipy.sparse import csr_array

    edges, count = edges_on_host(graph), graph.num_nodes
    weights = np.ones(len(edges.senders)) if weight is None else _edge_weights(graph, weight)
    return csr_array((weights, (edges.senders, edges.receivers)), shape=(count, count))


def _signs(num_graphs: int, k: int, key: jax.Array | None) -> np.ndarray:
    """Returns 1 or -1, [graphs, k]."""
    return np.ones((num_graphs, k)) if key is None else np.asarray(jax.random.rademacher(key, (num_graphs, k)))


def _largest_eigenpairs(matrix: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns up to `count` largest eigenvalues of a symmetric sparse matrix, descending, and eigenvectors in columns.

    The entry of an eigenvector with the largest magnitude is positive.
    """
    from scipy.sparse.linalg import eigsh

    size = matrix.shape[0]
    if size <= max(DENSE_NODES, 2 * count):
        values, vectors = np.linalg.eigh(matrix.toarray())
    else:
        values, vectors = eigsh(matrix, count, which="LA", v0=np.random.default_rng(0).normal(size=size))
    order = np.argsort(-values, kind="stable")[:count]
    values, vectors = values[order], vectors[:, order]
    sizes = np.abs(vectors)
    first = (sizes >= (1 - SAME) * sizes.max(axis=0)).argmax(axis=0)
    return values, vectors * np.where(vectors[first, np.arange(len(order))] < 0, -1, 1)


def random_walk_pe(graph: AnyBatch, k: int, weight: str | None = None) -> np.ndarray:
    """Returns random-walk positional encodings: probabilities that a walk is back at its start after 1 to `k` steps.

    A step follows one of the edges that leave a node, uniformly or in proportion to their weights. A walk ends at a
    node without such edges. Memory grows with the number of pairs of nodes at most `k / 2` steps apart.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      k: number of steps.
      weight: the name of an edge feature [edges], positive weights; None for equal weights.

    Returns:
      Float32 [nodes, k].

    Raises:
      TypeError: the graph is traced, or `k` is not an integer.
      ValueError: the graph is padded, `k` is negative, or there is no such feature or it has more than one axis.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> random_walk_pe(from_edges([0, 1, 1, 2], [1, 0, 2, 1], 3), 4).tolist()
      [[0.0, 0.5, 0.0, 0.5], [0.0, 1.0, 0.0, 1.0], [0.0, 0.5, 0.0, 0.5]]

    Reference: Dwivedi et al., Graph Neural Networks with Learnable Structural and Positional Representations,
    https://arxiv.org/abs/2110.07875; random_walk_pe of Deep Graph Library, https://www.dgl.ai.
    """
    from scipy.sparse import diags_array

    graph, k = batch_of(graph), as_count("k", k)
    count, steps = graph.num_nodes, _matrix(graph, weight)
    totals = steps.sum(axis=1)
    steps = diags_array(1 / np.where(totals > 0, totals, 1)) @ steps
    found, before, power = np.zeros((count, k)), None, steps
    for i in range(k):  # the diagonal of a product of two powers of about half the exponent, which are sparser
        other = power if i % 2 else before
        found[:, i] = steps.diagonal() if other is None else power.multiply(other.T).sum(axis=1)
        if i % 2 and i + 1 < k:
            before, power = power, power @ steps
    return found.astype(np.float32)


def _edge_weights(graph: Graph, name: str) -> np.ndarray:
    """Returns float64 [edges]."""
    if name not in graph.edges:
        known = ", ".join(map(repr, graph.edges)) or "none"
        raise ValueError(f"weight={name!r} is not an edge feature; there are: {known}")
    weights = np.asarray(graph.edges[name]).astype(np.float64)
    if weights.ndim != 1:
        raise ValueError(f"edges[{name!r}] must have one axis to be a weight, got shape {weights.shape}")
    if not (weights >= 0).all():
        raise ValueError(f"edges[{name!r}] must be at least 0 to be a weight, got {np.min(weights)}")
    return weights


def shortest_path_distances(graph: AnyBatch, max_distance: int, max_nodes: int | None = None) -> np.ndarray:
    """Returns the number of edges on a shortest path between each two nodes of each graph of a batch.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      max_distance: the largest distance to look for.
      max_nodes: number of places for the nodes of a graph; None for the largest number of nodes.

    Returns:
      Int32 [graphs, max_nodes, max_nodes], from the row's node to the column's; -1 if there is no path of at most
      `max_distance` edges, and for places without a node. The places are those of `to_dense_batch`.

    Raises:
      TypeError: the graph is traced, or a number is not an integer.
      ValueError: the graph is padded, a number is negative, or `max_nodes` is too small.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> shortest_path_distances(from_edges([0, 1, 2], [1, 2, 3], 4), 2).tolist()
      [[[0, 1, 2, -1], [-1, 0, 1, 2], [-1, -1, 0, 1], [-1, -1, -1, 0]]]

    Reference: Ying et al., Do Transformers Really Perform Bad for Graph Representation?,
    https://arxiv.org/abs/2106.05234; shortest_dist of Deep Graph Library, https://www.dgl.ai.
    """
    from scipy.sparse.csgraph import dijkstra

    graph, limit = batch_of(graph), as_count("max_distance", max_distance)
    whole, sizes = _matrix(graph), np.asarray(graph.n_node)
    most = int(sizes.max(initial=0))
    places = most if max_nodes is None else as_count("max_nodes", max_nodes)
    if places < most:
        raise ValueError(f"max_nodes={places} is too small: a graph has {most} nodes")
    found = np.full((len(sizes), places, places), -1, np.int32)
    for place, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        if size:
            distances = dijkstra(whole[end - size : end, end - size : end], unweighted=True, limit=limit)
            found[place, :size, :size] = np.where(np.isfinite(distances), distances, -1)
    return found


def normalize_rows(features: Array) -> Array:
    """Returns each row divided by the sum of its magnitudes, as is usual for Planetoid's words; on the host.

    For nonnegative features that is the row's sum. If signs differ, a sum may be close to 0,
    and dividing by it would make rows huge or change their signs. Magnitudes add up to 0 only in rows of
    zeros, which stay zeros. (PyTorch Geometric subtracts the smallest of all features first, and leaves rows
    unchanged that add up to less than 1.)

    Args:
      features: floating [nodes, width], an array of NumPy or jax.

    Returns:
      [nodes, width] in the features' dtype, a NumPy or jax array like the features. Half precision is computed in
      float32 and rounded once; sums are float64.

    Raises:
      TypeError: features are not an array, not floating, or traced.
      ValueError: features have another rank than 2.

    Example:
      >>> import numpy as np
      >>> normalize_rows(np.array([[1, 3], [0, 0], [-1, 1]], np.float16)).tolist()
      [[0.25, 0.75], [0.0, 0.0], [-0.5, 0.5]]
    """
    if not isinstance(features, np.ndarray | jax.Array):
        raise TypeError(f"features must be an array, got {type(features).__name__}")
    check_known("features", features, "call normalize_rows outside of jit")
    if not jnp.issubdtype(features.dtype, jnp.floating):
        raise TypeError(f"features must be floating, got {features.dtype}")
    if features.ndim != 2:
        raise ValueError(f"features must have shape [nodes, width], got shape {features.shape}")
    rows = np.asarray(features)
    rows = rows.astype(np.promote_types(rows.dtype, np.float32), copy=False)
    sums = np.abs(rows).sum(axis=1, keepdims=True, dtype=np.float64)
    sums[sums == 0] = 1
    with np.errstate(invalid="ignore"):  # inf / inf
        results = np.divide(rows, sums, out=np.empty_like(rows), casting="same_kind")
    results = results.astype(features.dtype, copy=False)
    return cast(Array, results if isinstance(features, np.ndarray) else jnp.asarray(results))
