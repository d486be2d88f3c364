"""Layers in half precision: hubs are rounded once, nothing overflows in between, and gradients do not stagnate."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import HALVES

import jmp_train as jt
from jmp_train import graphs

pytestmark = [pytest.mark.quick, pytest.mark.newest]

HUB = 13_161
gcn = functools.partial(graphs.graph_conv, allow_zero_in_degree=True)


@functools.cache
def star(count: int) -> graphs.Graph:
    """Returns edges from so many nodes to node 0."""
    with jax.ensure_compile_time_eval():
        return graphs.from_edges(range(1, count + 1), [0] * count, count + 1)


@functools.cache
def small_graphs() -> dict[str, graphs.Graph]:
    with jax.ensure_compile_time_eval():
        return {
            "out of a hub": graphs.from_edges([0] * 10, range(1, 11), 11),
            "two edges": graphs.from_edges([1, 1], [0, 0], 2),
            "star and more": graphs.from_edges([*range(1, 11), 0], [0] * 10 + [1], 12),
            "self-loops": graphs.from_edges(range(HUB), range(HUB), HUB),
        }


def appnp(x: jax.Array) -> jax.Array:
    return graphs.appnp_conv(small_graphs()["star and more"], x, 1, norm="right")


def sage(x: jax.Array, one: jax.Array, aggregator: str) -> jax.Array:
    own = None if aggregator == "gcn" else 0 * one
    return graphs.sage_conv(star(10), x, one, own, aggregator=aggregator)[:1]


def rows(count: int, value: float, first: float | None = None, width: int = 1) -> np.ndarray:
    """Returns equal rows [count + 1, width], but for the first."""
    found = np.full((count + 1, width), value)
    found[0] = value if first is None else first
    return found


def network(graph: graphs.Graph, x: jax.Array, edges: jax.Array, kernel: jax.Array, aggregator: str) -> jax.Array:
    """Returns what the edges' numbers times the kernel make of node 0's neighbors."""
    return graphs.nn_conv(graph, x, edges, lambda kernel, rows: rows @ kernel, kernel, 1, aggregator=aggregator)[:1]


def transformer(x: jax.Array, eye: jax.Array, edges: jax.Array) -> jax.Array:
    of_edges: Any = {"edge_features": edges, "edge_feature_weight": eye[:1]}
    return graphs.transformer_conv(star(HUB), x, eye, eye, eye, num_heads=2, **of_edges)[:1]


def gat(x: jax.Array, eye: jax.Array, vector: jax.Array) -> jax.Array:
    return graphs.gat_conv(star(HUB), x, eye, vector, vector, allow_zero_in_degree=True)[:1]


def gatv2(x: jax.Array, eye: jax.Array, vector: jax.Array) -> jax.Array:
    return graphs.gatv2_conv(star(HUB), x, eye, vector, allow_zero_in_degree=True)[:1]


ONE, EQUAL = np.ones((1, 1)), [rows(HUB, 1, width=2), np.eye(2), np.full((1, 2, 1), 0.3)]
LARGE = rows(10, 1e4)  # ten of them add up to more than float16 has
# Of each case: a function, its arrays, and the result in float64 as a function of the arrays.
CASES: dict[str, tuple[Callable[..., Any], list[np.ndarray], Callable[..., Any]]] = {
    "gcn right": (lambda x: gcn(star(10), x, norm="right")[:1], [LARGE], lambda x: x[1]),
    "gcn both": (lambda x: gcn(star(10), x, norm="both")[:1], [LARGE], lambda x: 10**0.5 * x[1]),
    "gcn left": (lambda x: gcn(small_graphs()["out of a hub"], x, norm="left")[3:4], [LARGE], lambda x: x[0] / 10),
    "gcn both, out of a hub": (
        lambda x: gcn(small_graphs()["out of a hub"], x, norm="both")[3:4],
        [LARGE],
        lambda x: x[0] / 10**0.5,
    ),
    "gin": (lambda x: graphs.gin_conv(star(HUB), x, eps=0.5)[:1], [rows(HUB, 1, 30)], lambda _: HUB + 45),
    "gin of what cancels": (
        lambda x: graphs.gin_conv(small_graphs()["two edges"], x, eps=jnp.array([0.5]))[:1],
        [rows(1, 32_768, -40_000)],
        lambda x: 65_536 + 1.5 * x[0],
    ),
    "gin mean": (
        lambda x: graphs.gin_conv(small_graphs()["two edges"], x, aggregator="mean")[:1],
        [rows(1, 32_768, -40_000)],
        lambda x: x[1] + x[0],
    ),
    "gine": (  # neighbors of 2 whose edges have -1, one of whose edges takes all of it
        lambda x, edges: graphs.gine_conv(star(HUB), x, edges, eps=0.5)[:1],
        [rows(HUB, 2, 30), rows(HUB - 1, -1, -5)],
        lambda *_: HUB - 1 + 45,
    ),
    "sage mean": (functools.partial(sage, aggregator="mean"), [LARGE, ONE], lambda x, _: x[1]),
    "sage gcn": (functools.partial(sage, aggregator="gcn"), [LARGE, ONE], lambda x, _: x[1]),
    "sage gcn, rounded once": (
        lambda x, one: graphs.sage_conv(star(2047), x, one, aggregator="gcn")[:1],
        [rows(2047, 1, 3), ONE],
        lambda *_: (2047 + 3) / 2048,
    ),
    "network": (
        lambda *arrays: network(star(HUB), *arrays, aggregator="sum"),
        [rows(HUB, 1), np.ones((HUB, 1)), ONE],
        lambda *_: HUB,
    ),
    "network mean": (
        lambda *arrays: network(star(10), *arrays, aggregator="mean"),
        [LARGE, np.ones((10, 1)), ONE],
        lambda x, *_: x[1],
    ),
    "transformer": (transformer, [rows(HUB, 1, width=2), np.eye(2), np.full((HUB, 1), 2.0)], lambda *_: [3, 1]),
    "gat": (gat, EQUAL, lambda *_: [1, 1]),
    "gatv2": (gatv2, EQUAL, lambda *_: [1, 1]),
    "appnp": (lambda x: appnp(x)[:1], [rows(11, 1e4, 1e3)], lambda x: 0.9 * x[2] + 0.1 * x[0]),
    "appnp, no neighbor": (lambda x: appnp(x)[2:3], [rows(11, 1e4, 1e3)], lambda x: 0.1 * x[2]),
}
# Bounds in eps of results that are no whole numbers; the others are the nearest of their dtype.
BOUNDS = {"gcn both": 0.5, "gcn both, out of a hub": 0.5, "gcn left": 0.5, "appnp": 0.5, "appnp, no neighbor": 1}

halves = pytest.mark.parametrize("half", HALVES)
ways = pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "autocast"])


@pytest.mark.quick_cases(1)
@ways
@halves
def test_results_are_rounded_once_and_nothing_overflows_before(half: str, is_cast: bool) -> None:
    def results(arrays: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
        runs = {name: function if is_cast else jt.autocast(function, half) for name, (function, *_) in CASES.items()}
        return {name: run(*arrays[name]) for name, run in runs.items()}

    arrays = {name: [x.astype(jnp.dtype(half)) for x in given] for name, (_, given, _) in CASES.items()}
    given = arrays if is_cast else jax.tree.map(lambda x: x.astype(np.float32), arrays)
    for name, found in jax.jit(results)(given).items():
        exact = np.asarray(CASES[name][2](*(x.astype(np.float64) for x in arrays[name])), np.float64).ravel()
        assert found.dtype == half, name
        wanted = exact if name in BOUNDS else exact.astype(jnp.dtype(half)).astype(np.float64)
        limit = BOUNDS.get(name, 0) * float(jnp.finfo(half).eps)
        np.testing.assert_allclose(np.asarray(found, np.float64).ravel(), wanted, rtol=limit, err_msg=name)


def test_sums_that_float16_cannot_hold_are_infinite() -> None:
    def total(x: jax.Array) -> jax.Array:
        return gcn(star(10), x, norm="none")[0, 0]

    assert [float(jax.jit(total)(LARGE.astype(jnp.dtype(half)))) for half in HALVES] == [np.inf, 99_840]


@ways
@halves
def test_the_gradient_of_what_all_nodes_share_does_not_stagnate(half: str, is_cast: bool) -> None:
    dtype = jnp.dtype(half if is_cast else "float32")
    graph, zeros, ones = small_graphs()["self-loops"], jnp.zeros((HUB, 1), dtype), jnp.ones((HUB, 1), dtype)
    layers = [
        lambda bias: graphs.graph_conv(graph, zeros, bias=bias),
        lambda eps: graphs.gin_conv(graph, ones, eps=eps),
        lambda kernel: graphs.nn_conv(graph, ones, ones, lambda kernel, rows: rows @ kernel, kernel[None], 1),
    ]

    def gradients(shared: jax.Array) -> list[jax.Array]:
        runs = layers if is_cast else [jt.autocast(layers[0], half)]
        return [jax.grad(lambda x, run=run: run(x).sum(dtype=jnp.float32))(shared) for run in runs]

    found = jax.jit(gradients)(jnp.zeros(1, dtype))
    assert {float(x[0]) for x in found[:2]} == {float(jnp.asarray(HUB, half))}
    np.testing.assert_allclose(np.asarray(found[-1], float), HUB, rtol=float(jnp.finfo(half).eps))


@halves
def test_the_gradient_of_what_each_hop_brings_back_is_added_in_float32(half: str) -> None:
    """A node with a self-loop gets alpha times its own of all hops."""
    loop, k, alpha = graphs.from_edges([0], [0], 1), 300, 2.0**-6
    gradient = jax.grad(lambda x: graphs.appnp_conv(loop, x, k, alpha).sum(dtype=jnp.float32))(jnp.ones((1, 1), half))
    assert float(gradient[0, 0]) == pytest.approx(1, rel=0.02)
