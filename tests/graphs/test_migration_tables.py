"""What the tables about DGL and PyTorch Geometric promise of weighted degrees and self-loops.

The other libraries' side is the formula of their source, in NumPy with dense matrices in float64.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_train as jt
from jmp_train import graphs

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


def test_self_loops_are_added_to_the_other_nodes_with_the_largest_weight_that_enters() -> None:
    matrix = dense(SENDERS, RECEIVERS, WEIGHTS)
    largest = graphs.add_self_loop(GRAPH, "max", only_missing=True)
    entering = dense_of(graphs.to_simple(GRAPH, "max")).max(1)
    np.testing.assert_array_equal(np.diag(dense_of(largest)), np.where(np.diag(matrix) > 0, np.diag(matrix), entering))
    with pytest.raises(ValueError, match=r"allow_duplicate=True .* only_missing=True"):
        graphs.add_self_loop(GRAPH, allow_duplicate=True, only_missing=True)
