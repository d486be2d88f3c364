"""Messages, reductions and their gradients beside float64, in every implementation.

A GPU adds by atomics, in any order. However n float32 numbers are added, the sum is off by at most n units of 2**-24
of their magnitudes' sum; rounding the result to its dtype takes one unit in its last place, and a second one where
the error before crosses a boundary between two.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import assert_within, draw

from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS

pytestmark = pytest.mark.gpu
NODES, EDGES, HUB, WIDTH = 40, 6_000, 3_000, 8
UNIT = 2.0**-24
FUSED = {"copy": fn.copy_u("h", "m"), "multiply": fn.u_mul_e("h", "w", "m")}


def draw_edges() -> tuple[np.ndarray, np.ndarray]:
    """Returns edges of which half enter node 0, and others leave node 1: half precision would stop adding there."""
    senders, receivers = np.random.default_rng(0).integers(0, NODES, (2, EDGES))
    receivers[:HUB], senders[-HUB:] = 0, 1
    return senders, receivers


def draw_arrays(dtype: str) -> tuple[jax.Array, ...]:
    """Returns features of nodes and weights of edges, all positive, and cotangents of nodes and of edges."""
    shapes = ((NODES, WIDTH), (EDGES, 1), (NODES, WIDTH), (EDGES, 1))
    kinds = ("uniform", "uniform", "signed", "signed")
    drawn = [draw(kind, shape, seed) for seed, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))]
    return tuple(jnp.asarray(x, dtype) for x in drawn)


@functools.cache
def program(implementation: str) -> Any:
    """Returns the operations of an implementation with their gradients, by name, as one program."""

    def reduced(graph: graphs.Graph, message: str, reduce: Any, h: jax.Array, w: jax.Array) -> jax.Array:
        whole = graph.with_nodes(h=h).with_edges(w=w)
        whole = graphs.update_all(whole, FUSED[message], reduce("m", "y"), implementation=implementation)
        return whole.nodes["y"]

    def dot(graph: graphs.Graph, left: jax.Array, right: jax.Array) -> jax.Array:
        whole = graph.with_nodes(left=left, right=right)
        message = fn.u_dot_v("left", "right", "y")
        return graphs.apply_edges(whole, message, implementation=implementation).edges["y"]

    def run(graph: graphs.Graph, h: jax.Array, w: jax.Array, of_nodes: jax.Array, of_edges: jax.Array) -> Any:
        results = {}
        for message in FUSED:
            for name, reduce in (("sum", fn.sum), ("mean", fn.mean)):
                partial = functools.partial(reduced, graph, message, reduce)
                result, pullback = jax.vjp(partial, h, w)
                results[f"{message} {name}"] = result, *pullback(of_nodes)
        result, pullback = jax.vjp(functools.partial(dot, graph), h, of_nodes)
        results["dot"] = result, *pullback(of_edges)
        return results

    return jax.jit(run)


def exact_results(arrays: tuple[Any, ...]) -> dict[str, tuple[np.ndarray, ...]]:
    """Returns the same in float64, with matrices [edges, nodes] of zeros and ones; of magnitudes, their sums."""
    h, w, of_nodes, of_edges = (np.asarray(x, np.float64) for x in arrays)
    starts, ends = (np.eye(NODES)[places] for places in draw_edges())
    degrees = np.maximum(ends.sum(0), 1)[:, None]
    results = {}
    for message, weight in (("copy", np.ones_like(w)), ("multiply", w)):
        for reduce, divisor in (("sum", 1), ("mean", degrees)):
            of_messages = ends @ (of_nodes / divisor)
            of_weights = (of_messages * (starts @ h)).sum(1, keepdims=True) * (message == "multiply")
            total = ends.T @ (weight * (starts @ h)) / divisor
            results[f"{message} {reduce}"] = total, starts.T @ (weight * of_messages), of_weights
    left, right = starts @ h, ends @ of_nodes
    products = (left * right).sum(1, keepdims=True)
    results["dot"] = products, starts.T @ (of_edges * right), ends.T @ (of_edges * left)
    return results


def terms() -> tuple[int, int]:
    """Returns how many terms a sum has at most, over a node's edges and over a row; two more for the products."""
    return max(np.bincount(ends).max() for ends in draw_edges()) + 2, WIDTH + 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operations_are_within_bounds_of_float64(implementation: str, dtype: str) -> None:
    arrays = draw_arrays(dtype)
    with jax.default_matmul_precision("float32"):  # a GPU's default is TF32
        found = program(implementation)(graphs.from_edges(*draw_edges(), NODES), *arrays)
    exact, sizes = exact_results(arrays), exact_results(tuple(np.abs(np.asarray(x, np.float64)) for x in arrays))
    of_nodes, of_rows = terms()
    for name, results in found.items():
        counts = (of_rows, of_nodes, of_nodes) if name == "dot" else (of_nodes, of_nodes, of_rows)
        for result, wanted, size, count in zip(results, exact[name], sizes[name], counts, strict=True):
            assert result.dtype == dtype, name
            assert_within(result, wanted, dtype, size, 2, count * UNIT)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_segments_and_extremes(dtype: str) -> None:
    """Maxima are exact whatever the order; a maximum's gradient goes to the edge that has it."""
    _, receivers = draw_edges()
    values = jnp.asarray(draw("signed", (EDGES, 2), 7), dtype)
    exact = np.asarray(values, np.float64)

    def run(values: jax.Array, ids: Any) -> Any:
        largest, pullback = jax.vjp(lambda x: graphs.segment_max(x, ids, NODES), values)
        return {
            "sum": graphs.segment_sum(values, ids, NODES),
            "mean": graphs.segment_mean(values, ids, NODES),
            "max": largest,
            "min": graphs.segment_min(values, ids, NODES),
            "gradient": pullback(jnp.ones_like(largest))[0],
        }

    found = jax.jit(run)(values, jnp.asarray(receivers))
    rows = [exact[receivers == node] for node in range(NODES)]
    np.testing.assert_array_equal(np.asarray(found["max"], np.float64), [x.max(0) for x in rows])
    np.testing.assert_array_equal(np.asarray(found["min"], np.float64), [x.min(0) for x in rows])
    share = (max(map(len, rows)) + 2) * UNIT
    assert_within(found["sum"], [x.sum(0) for x in rows], dtype, [abs(x).sum(0) for x in rows], 2, share)
    assert_within(found["mean"], [x.mean(0) for x in rows], dtype, [abs(x).mean(0) for x in rows], 2, share)
    is_largest = exact == np.stack([x.max(0) for x in rows])[receivers]
    gradient = np.asarray(found["gradient"], np.float64)
    assert not gradient[~is_largest].any()
    shares = np.stack([gradient[receivers == node].sum(0) for node in range(NODES)])
    np.testing.assert_allclose(shares, 1, rtol=0.01)  # ties share it, in the dtype
