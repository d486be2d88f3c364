"""What the tables about DGL and PyTorch Geometric promise, and where they say that the other differs.

The other libraries' side is the formula of their source, in NumPy with dense matrices in float64.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import networkx as nx
import numpy as np
import pytest
from flax import nnx

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick

NODES, WIDTH = 7, 3
RANDOM = np.random.default_rng(0)
# Parallel edges, a self-loop with another weight than 1, a node with no edge in and one with no edge at all.
SENDERS = np.array([0, 0, 1, 2, 2, 4, 5, 5, 1, 3])
RECEIVERS = np.array([1, 1, 2, 0, 3, 3, 0, 1, 1, 2])
WEIGHTS = np.array([0.5, 2, 3, 0.25, 1, 4, 2, 1, 0.75, 8])
X = RANDOM.normal(size=(NODES, WIDTH))
KERNEL = RANDOM.normal(size=(WIDTH, 2))


def dense(senders: Any, receivers: Any, weights: Any = None, nodes: int = NODES) -> np.ndarray:
    """Returns the sum of the weights of the edges from the column to the row."""
    matrix = np.zeros((nodes, nodes))
    np.add.at(matrix, (np.asarray(receivers), np.asarray(senders)), 1 if weights is None else np.asarray(weights))
    return matrix


def dense_of(graph: graphs.Graph) -> np.ndarray:
    return dense(graph.senders, graph.receivers, graph.edges["w"], graph.num_nodes)


def with_remaining_loops(matrix: np.ndarray) -> np.ndarray:
    """Returns the matrix with 1 on the diagonal where there was no self-loop, as PyTorch Geometric's GCN has it."""
    return matrix + np.diag(np.diag(matrix) == 0)


def power(sums: np.ndarray, exponent: float) -> np.ndarray:
    return np.where(sums == 0, 0, np.where(sums == 0, 1, sums) ** exponent)


def normalized(matrix: np.ndarray, norm: str) -> np.ndarray:
    """Returns the matrix over sums of its columns, which leave, and of its rows, which enter."""
    leave, enter = matrix.sum(0), matrix.sum(1)
    return {
        "none": lambda: matrix,
        "both": lambda: power(enter, -0.5)[:, None] * matrix * power(leave, -0.5),
        "in": lambda: power(enter, -0.5)[:, None] * matrix * power(enter, -0.5),
        "left": lambda: matrix * power(leave, -1),
        "right": lambda: power(enter, -1)[:, None] * matrix,
    }[norm]()


GRAPH = graphs.from_edges(SENDERS, RECEIVERS, NODES, edges={"w": jnp.float32(WEIGHTS)})
LOOPED = graphs.add_self_loop(GRAPH, only_missing=True)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("norm", ["both", "in", "left", "right"])
def test_edge_weights_over_weighted_degrees(norm: str) -> None:
    padded = graphs.pad(GRAPH, 9, 14)
    run = jax.jit(lambda graph, weight: graphs.edge_weight_norm(graph, weight, norm=norm))
    found = run(padded, padded.edges["w"])
    matrix = normalized(dense(SENDERS, RECEIVERS, WEIGHTS), norm)
    np.testing.assert_allclose(dense(SENDERS, RECEIVERS, found[:10]), matrix, rtol=1e-6)
    assert found.dtype == jnp.float32 and not found[10:].any()
    slope = jax.grad(lambda weight: run(padded, weight).sum())(padded.edges["w"])
    step = 1e-6 * (np.arange(10) == 2)
    sums = [normalized(dense(SENDERS, RECEIVERS, WEIGHTS + sign * step), norm).sum() for sign in (1, -1)]
    np.testing.assert_allclose(slope[2], (sums[0] - sums[1]) / 2e-6, rtol=1e-4, atol=1e-6)
    assert np.isfinite(slope).all()
    half = jt.autocast(run)(padded, padded.edges["w"].astype(jnp.bfloat16))  # which holds these weights
    np.testing.assert_array_equal(half, found)
    ones = graphs.edge_weight_norm(GRAPH, norm=norm)
    counted = normalized(dense(SENDERS, RECEIVERS), norm)
    np.testing.assert_allclose(dense(SENDERS, RECEIVERS, ones), counted, rtol=1e-6)


def test_sums_of_many_half_weights_do_not_stagnate_and_wrong_weights_are_refused() -> None:
    star = graphs.from_edges([0] * 5_000, [0] * 5_000, 1)
    np.testing.assert_allclose(graphs.edge_weight_norm(star, jnp.ones(5_000, jnp.float16)), 1 / 5_000, rtol=1e-6)
    assert graphs.edge_weight_norm(graphs.to_jraph(star)).shape == (5_000,)
    with pytest.raises(ValueError, match="norm='none' must be one of 'both', 'left', 'right', 'in'"):
        graphs.edge_weight_norm(star, norm="none")
    with pytest.raises(ValueError, match=r"edge_weight must be \[5000\]"):
        graphs.edge_weight_norm(star, jnp.ones(3))


def chebyshev(matrix: np.ndarray, norm: str, kernels: np.ndarray) -> np.ndarray:
    """Returns the sum of Chebyshev polynomials of minus the normalized matrix, for the largest eigenvalue 2."""
    hop, terms = normalized(matrix, norm), [X]
    terms += [-hop @ X]
    terms += [-2 * hop @ terms[1] - X]
    return np.sum([term @ kernel for term, kernel in zip(terms, kernels, strict=True)], axis=0)


def hops(hop: np.ndarray, k: int, alpha: float = 0.0) -> np.ndarray:
    rows = X
    for _ in range(k):
        rows = (1 - alpha) * hop @ rows + alpha * X
    return rows


KERNELS = RANDOM.normal(size=(3, WIDTH, 2))
LOOSE: Any = {"allow_zero_in_degree": True}
# Our layer by its norm, its formula of a normalized matrix.
LAYERS: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], np.ndarray]]] = {
    "graph_conv": (
        lambda graph, x, **options: graphs.graph_conv(graph, x, jnp.float32(KERNEL), **LOOSE, **options),
        lambda hop: hop @ X @ KERNEL,
    ),
    "sg_conv": (
        lambda graph, x, **options: graphs.sg_conv(graph, x, jnp.float32(KERNEL), k=2, **LOOSE, **options),
        lambda hop: hops(hop, 2) @ KERNEL,
    ),
    "tag_conv": (
        lambda graph, x, **options: graphs.tag_conv(graph, x, jnp.float32(KERNELS), **options),
        lambda hop: np.sum([hops(hop, k) @ KERNELS[k] for k in range(3)], axis=0),
    ),
    "appnp_conv": (
        lambda graph, x, **options: graphs.appnp_conv(graph, x, 3, 0.2, **options),
        lambda hop: hops(hop, 3, 0.2),
    ),
    "cheb_conv": (
        lambda graph, x, **options: graphs.cheb_conv(graph, x, jnp.float32(KERNELS), **options),
        lambda hop: chebyshev(hop, "none", KERNELS),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weighted_degrees_and_self_loops_of_the_others(name: str) -> None:
    """With `edge_weight_norm`, as of DGL ("both") and PyTorch Geometric ("in"); by default, as the tables say, not."""
    layer, formula = LAYERS[name]
    without_loops = graphs.remove_self_loop(GRAPH)
    graph, matrix = {
        "tag_conv": (GRAPH, dense_of(GRAPH)),  # to which PyTorch Geometric adds no self-loops
        "cheb_conv": (without_loops, dense_of(without_loops)),  # of which it takes them away
    }.get(name, (LOOPED, with_remaining_loops(dense_of(GRAPH))))

    @jax.jit
    def run(x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        by_norm = {norm: graphs.edge_weight_norm(graph, graph.edges["w"], norm=norm) for norm in ("in", "both")}
        weighted = {norm: layer(graph, x, edge_weight=weight, norm="none") for norm, weight in by_norm.items()}
        return weighted, layer(GRAPH, x, edge_weight=GRAPH.edges["w"])

    weighted, plain = run(jnp.float32(X))
    for norm, found in weighted.items():
        np.testing.assert_allclose(found, formula(normalized(matrix, norm)), rtol=2e-4, atol=1e-5)
    counts = normalized(dense(SENDERS, RECEIVERS), "both")
    counted = np.divide(counts, dense(SENDERS, RECEIVERS), out=np.zeros_like(counts), where=counts > 0)
    np.testing.assert_allclose(plain, formula(counted * dense_of(GRAPH)), rtol=2e-4, atol=1e-5)
    assert np.abs(plain - weighted["in"]).max() > 0.1


@pytest.mark.full
def test_attention_has_no_self_loops_unless_they_are_added() -> None:
    left, right = RANDOM.normal(size=(2, 2))
    rows = X @ KERNEL
    sums = (rows @ left)[None] + (rows @ right)[:, None]
    logits = np.where(sums > 0, sums, 0.2 * sums)
    both = rows[None] + rows[:, None]
    second = (np.where(both > 0, both, 0.2 * both) * left).sum(-1)
    looped = graphs.add_self_loop(GRAPH)  # the one self-loop that was there is replaced
    for graph, is_equal in ((looped, True), (GRAPH, False)):
        x, kernel, of_left, of_right = map(jnp.float32, (X, KERNEL, left[None, None], right[None, None]))
        first = graphs.gat_conv(graph, x, kernel, of_left, of_right, **LOOSE)
        other = graphs.gatv2_conv(graph, x, kernel, of_left, **LOOSE)
        for found, scores in ((first, logits), (other, second)):
            counts = dense(SENDERS, RECEIVERS)
            np.fill_diagonal(counts, 1)
            weights = counts * np.exp(scores)
            wanted = weights @ rows / weights.sum(1, keepdims=True)
            assert np.allclose(found[:, 0], wanted, rtol=1e-4, atol=1e-5) == is_equal


def test_relational_layers_add_and_the_paper_averages() -> None:
    types, kernels = np.arange(10) % 3, RANDOM.normal(size=(3, WIDTH, 2))
    matrices = [dense(SENDERS[types == i], RECEIVERS[types == i]) for i in range(3)]
    sums = sum(matrix @ X @ kernel for matrix, kernel in zip(matrices, kernels, strict=True))
    means = sum(normalized(matrix, "right") @ X @ kernel for matrix, kernel in zip(matrices, kernels, strict=True))
    run = lambda weight: graphs.rel_graph_conv(GRAPH, jnp.float32(X), types, jnp.float32(kernels), edge_weight=weight)
    np.testing.assert_allclose(run(None), sums, rtol=1e-4, atol=1e-5)
    weight = graphs.relation_norm(graphs.to_jraph(GRAPH), types)
    np.testing.assert_allclose(run(weight), means, rtol=1e-4, atol=1e-5)


def test_self_loops_and_directions_of_transforms() -> None:
    matrix = dense(SENDERS, RECEIVERS, WEIGHTS)
    eye = np.eye(NODES)
    np.testing.assert_array_equal(dense_of(graphs.add_self_loop(GRAPH, allow_duplicate=True)), matrix + eye)
    np.testing.assert_array_equal(dense_of(graphs.add_self_loop(GRAPH)), np.where(eye, 1, matrix))
    np.testing.assert_array_equal(dense_of(LOOPED), with_remaining_loops(matrix))
    largest = graphs.add_self_loop(GRAPH, "max", only_missing=True)
    entering = dense_of(graphs.to_simple(GRAPH, "max")).max(1)
    np.testing.assert_array_equal(np.diag(dense_of(largest)), np.where(np.diag(matrix) > 0, np.diag(matrix), entering))
    with pytest.raises(ValueError, match=r"allow_duplicate=True .* only_missing=True"):
        graphs.add_self_loop(GRAPH, allow_duplicate=True, only_missing=True)
    theirs = matrix + matrix.T  # PyTorch Geometric's sum, in which a self-loop counts twice
    np.testing.assert_array_equal(dense_of(graphs.to_bidirected(GRAPH, "sum")), np.where(eye, matrix, theirs))
    first = dense_of(graphs.to_bidirected(GRAPH))
    assert first[1, 0] == first[0, 1] == 0.5  # the first of both, where theirs has 2.5
    line = graphs.line_graph(graphs.from_edges([0, 1], [1, 1], 2))
    assert (line.senders.tolist(), line.receivers.tolist()) == ([0, 1], [1, 1])  # DGL's self-loop sends to itself not
    virtual = graphs.add_virtual_node(GRAPH)
    assert not virtual.edges["w"][-2 * NODES :].any()  # 1 in PyTorch Geometric
    points = np.zeros((40, 1))
    assert graphs.knn_graph(points[:1], 1).num_edges == 1  # none in PyTorch Geometric
    assert graphs.knn_graph(points[:1], 1, exclude_self=True).num_edges == 0
    assert graphs.radius_graph(points, 1.0).in_degrees[0] == 39  # not 32


@pytest.mark.full
def test_what_is_empty_or_too_long() -> None:
    values, ids = jnp.array([-1.0, -2.0]), jnp.array([0, 0])
    assert graphs.segment_max(values, ids, 2).tolist() == [-1, -np.inf]  # 0 in PyTorch Geometric
    assert graphs.segment_min(values, ids, 2).tolist() == [-2, np.inf]
    with pytest.raises(ValueError, match="max_nodes=1 is too small"):
        graphs.to_dense_batch(GRAPH, jnp.float32(X), 1)
    cut = jax.jit(lambda graph: graphs.to_dense_batch(graph, jnp.float32(X), 2)[0])(GRAPH)
    np.testing.assert_array_equal(cut, jnp.float32(X)[None, :2])
    best = graphs.topk_nodes(graphs.from_edges([], [], 1), jnp.ones((1, 1)), 2)
    assert best.places.ravel().tolist() == [0, -1] and best.values.ravel().tolist() == [1, 0]


def test_rows_and_encodings() -> None:
    rows = np.array([[0.0, 3], [-1, 0.5]], np.float32)
    np.testing.assert_allclose(graphs.normalize_rows(rows), rows / np.abs(rows).sum(1, keepdims=True))
    moved = rows - rows.min()  # PyTorch Geometric's; below 1, sums do not divide
    theirs = moved / np.maximum(moved.sum(1, keepdims=True), 1)
    np.testing.assert_allclose(graphs.normalize_rows(moved), theirs, rtol=1e-6)
    assert np.abs(graphs.normalize_rows(moved / 100) - moved / 100).max() > 0.5
    counts = dense(SENDERS, RECEIVERS).T  # a row of it leaves
    walk = power(counts.sum(1), -1)[:, None] * counts
    np.testing.assert_allclose(graphs.random_walk_pe(GRAPH, 2)[:, 1], np.diag(walk @ walk), atol=1e-6)
    weighted = dense_of(GRAPH).T
    walk = power(weighted.sum(1), -1)[:, None] * weighted
    np.testing.assert_allclose(graphs.random_walk_pe(GRAPH, 2, "w")[:, 1], np.diag(walk @ walk), atol=1e-6)


@pytest.mark.full
def test_nodes_that_only_some_edge_types_enter() -> None:
    follows, plays = ("user", "follows", "user"), ("game", "played", "user")
    ends = {follows: ([0, 1], [0, 1]), plays: ([0], [0])}
    nodes = {"user": {"h": jnp.array([-1.0, -2.0, -3.0])}, "game": {"h": jnp.array([-5.0])}}
    graph = graphs.hetero_from_edges(ends, {"game": 1, "user": 3}, nodes=nodes)
    found = {}
    for cross in ("sum", "mean", "max", "min"):
        functions = {kind: (fn.copy_u("h", "m"), fn.max("m", "x")) for kind in ends}
        found[cross] = graphs.multi_update_all(graph, functions, cross).nodes["user"]["x"].tolist()
    # DGL's are [-6, 0, 0], [-3, 0, 0], [-1, -2, 0], [-5, 0, 0]: a sum with a maximum of nothing, -inf, becomes 0
    assert found == {"sum": [-6, -2, 0], "mean": [-3, -1, 0], "max": [-1, -2, 0], "min": [-5, -2, 0]}


@pytest.mark.full
def test_jraphs_self_edges_are_added_to_those_there_are() -> None:
    tuple_ = graphs.to_jraph(GRAPH)._replace(nodes=jnp.float32(X), edges=None)
    with jax.numpy_dtype_promotion("standard"):
        theirs: Any = jraph.GraphConvolution(lambda x: x @ jnp.float32(KERNEL), add_self_edges=True)(tuple_).nodes
    twice = graphs.add_self_loop(GRAPH, allow_duplicate=True)
    found = graphs.graph_conv(twice, jnp.float32(X), jnp.float32(KERNEL))
    np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_graphs_of_other_libraries() -> None:
    ends = np.array(nx.path_graph(4).to_directed().edges).T  # DGL takes an undirected graph in both directions
    both = graphs.to_bidirected(graphs.from_edges([0, 1, 2], [1, 2, 3], 4))
    np.testing.assert_array_equal(dense(*ends, nodes=4), dense(both.senders, both.receivers, nodes=4))
    jraphs = graphs.to_jraph(GRAPH)
    key = jax.random.key(0)
    refused: dict[str, Callable[[Any], Any]] = {
        "pad": lambda graph: graphs.pad(graph, 8, 16),
        "node_mask": graphs.node_mask,
        "unbatch": graphs.unbatch,
        "drop_edges": lambda graph: graphs.drop_edges(graph, 0.5, key),
        "partition": lambda graph: graphs.partition(graph, 2),
    }
    for name, function in refused.items():
        with pytest.raises(TypeError, match=r"must be a Graph.*got GraphsTuple"):
            function(jraphs)
        assert function(graphs.from_jraph(jraphs)) is not None, name


@pytest.mark.full
def test_running_variances_are_over_all_rows() -> None:
    norm = graphs.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
    norm(jnp.array([[1.0], [3.0]]))
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * 1)  # torch's is 0.9 + 0.1 * 2
