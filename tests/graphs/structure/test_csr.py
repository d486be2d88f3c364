"""Sorted edges: a symmetric graph has the arrays of both directions once; large batches and blocks have them."""

from typing import Any

import jax
import numpy as np
import pytest
from pytrees import compiled_vjp

from jmp_train.graphs import Graph, batch, fn, from_edges, pad, update_all
from jmp_train.graphs.structure import padded_block
from jmp_train.graphs.structure.csr import CSR, EdgePlaces

pytestmark = pytest.mark.quick

COPY, SUM = fn.copy_u("x", "m"), fn.sum("m", "y")
NODES = 200  # with more edges than those whose shapes are fixed


def symmetric_ends() -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of edges in both directions, sorted by receiver, and then by sender."""
    are_joined = np.random.default_rng(0).random((NODES, NODES)) < 0.3
    receivers, senders = np.nonzero(are_joined | are_joined.T)
    assert len(senders) > 2**14
    return senders, receivers


def shared(graph: Graph) -> Any:
    neighbors = graph.connections.neighbors
    assert neighbors is not None
    return neighbors.leaving


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("formats", [("csr",), ("coo", "csr")])
def test_a_symmetric_graph_has_its_neighbors_once(formats: tuple[str, ...], is_permuted: bool) -> None:
    senders, receivers = symmetric_ends()
    if is_permuted:
        order = np.random.default_rng(1).permutation(len(senders))
        senders, receivers = senders[order], receivers[order]
    graph = from_edges(senders, receivers, NODES, formats=formats)
    has_places = "coo" in formats  # which set the order of the neighbors
    kind = (CSR if is_permuted else EdgePlaces) if has_places else type(None)
    assert isinstance(shared(graph), kind)
    random = np.random.default_rng(2)
    weight = random.random(len(senders), np.float32) if has_places else np.ones(len(senders), np.float32)
    x, cotangent = random.random((2, NODES, 3), np.float32)

    def run(graph: Graph, x: jax.Array, weight: jax.Array) -> jax.Array:
        graph = graph.with_nodes(x=x)
        message = fn.copy_u("x", "m")
        if has_places:
            graph, message = graph.with_edges(w=weight), fn.u_mul_e("x", "w", "m")
        return update_all(graph, message, fn.sum("m", "y"), implementation="chunked").nodes["y"]

    found, (of_x, of_weight) = compiled_vjp(lambda *arrays: run(graph, *arrays), cotangent, x, weight)
    matrix = np.zeros((NODES, NODES))
    matrix[receivers, senders] = weight
    np.testing.assert_allclose(found, matrix @ x, rtol=1e-5)
    np.testing.assert_allclose(of_x, matrix.T @ cotangent, rtol=1e-5)
    if has_places:
        np.testing.assert_allclose(of_weight, (x[senders] * cotangent[receivers]).sum(1), rtol=1e-5)


def test_a_graph_of_equal_degrees_that_is_not_symmetric_has_both_directions() -> None:
    ring = np.arange(2**15)
    senders, receivers = ring, np.roll(ring, 1)
    graph = from_edges(senders, receivers, len(ring), formats=("csr",))
    assert isinstance(shared(graph), CSR)
    x = ring.astype(np.float32)
    _, (of_x,) = compiled_vjp(
        lambda x: update_all(graph.with_nodes(x=x), fn.copy_u("x", "m"), fn.sum("m", "y")).nodes["y"], x, x
    )
    assert (np.asarray(of_x) == np.roll(ring, 1)).all()


def test_large_batches_that_are_padded_come_with_sorted_edges() -> None:
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, NODES, (2, 10_000))
    half = from_edges(senders, receivers, NODES, formats=("coo",))
    assert pad(half, NODES + 1, 10_001).connections.neighbors is None
    graph = pad(batch([half, half]), 2 * NODES + 5, 20_007)
    assert graph.connections.neighbors is not None
    whole = [np.concatenate([x, x + NODES]) for x in (senders, receivers)]

    def run(x: jax.Array) -> jax.Array:
        return update_all(graph.with_nodes(x=x), COPY, SUM, implementation="chunked").nodes["y"]

    check_sums(run, whole[0], whole[1], graph.num_nodes, graph.num_nodes)


def test_large_blocks_come_with_sorted_edges_in_the_hosts_memory() -> None:
    senders, receivers = np.random.default_rng(0).integers(0, 50, (2, 10_000))
    block = padded_block(senders, receivers, NODES, 60, num_edges=20_000)
    neighbors = block.connections.neighbors
    assert neighbors is not None and isinstance(neighbors.by_target.others, np.ndarray)

    def run(x: jax.Array) -> jax.Array:
        return update_all(block.graph({"x": x}), COPY, SUM, implementation="chunked").nodes["target"]["y"]

    check_sums(run, senders, receivers, NODES, 60)


def check_sums(run: Any, senders: np.ndarray, receivers: np.ndarray, num_senders: int, num_receivers: int) -> None:
    random = np.random.default_rng(1)
    x, cotangent = random.random((num_senders, 3), np.float32), random.random((num_receivers, 3), np.float32)
    found, (of_x,) = compiled_vjp(run, cotangent, x)
    matrix = np.zeros((num_receivers, num_senders))
    np.add.at(matrix, (receivers, senders), 1)
    np.testing.assert_allclose(found, matrix @ x, rtol=1e-5)
    np.testing.assert_allclose(of_x, matrix.T @ cotangent, rtol=1e-5)
