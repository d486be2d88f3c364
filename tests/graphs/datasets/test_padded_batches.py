"""Padded batches of a data set: those of `pad` and `batch`, in the sizes that were measured."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pytrees import assert_bitwise_equal
from refusals import assert_refused

from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick


def a_data_set(count: int = 30) -> graphs.GraphData:
    data = graphs.synthetic_proteins(count)
    weights = np.random.default_rng(0).normal(size=(len(data.senders), 2)).astype(np.float16)
    return dataclasses.replace(data, edges={"w": weights})


@pytest.mark.parametrize("formats", [("coo",), ("coo", "csr")])
def test_a_batch_is_that_of_pad_and_batch(formats: tuple[str, ...]) -> None:
    data, places = a_data_set(), np.array([4, 0, 4, 29])
    (size,) = graphs.padded_sizes(data, 4, buckets=1)
    found = graphs.padded_batch(data, places, size, formats=formats)
    whole = graphs.batch([data.graph(place) for place in places])
    wanted = graphs.pad(whole, size.n_node, size.n_edge, size.n_graph, formats=formats)
    assert_bitwise_equal(found, wanted)
    fewer = graphs.padded_batch(data, places[:2], size, formats=formats)
    assert graphs.graph_mask(fewer).tolist() == [True, True, False, False, False]
    assert jax.tree.structure(fewer) == jax.tree.structure(found)
    assert jax.tree.map(jnp.shape, fewer) == jax.tree.map(jnp.shape, found)


def test_any_batch_fits_into_the_last_size_and_most_into_the_first() -> None:
    data = a_data_set(300)
    first, second, last = graphs.padded_sizes(data, 16, buckets=3)
    assert first.n_node < second.n_node < last.n_node
    largest = np.argsort(data.n_node)[-16:]
    graphs.padded_batch(data, largest, last)
    with pytest.raises(ValueError, match=f"size has n_node={first.n_node}, but the batch needs"):
        graphs.padded_batch(data, largest, first)
    random = np.random.default_rng(1)
    sizes = [data.n_node[random.permutation(300)[:16]].sum() for _ in range(200)]
    assert 0.8 < np.mean(np.array(sizes) < first.n_node) < 0.98
    few = graphs.padded_sizes(data, 16, places=np.argsort(data.n_node)[:16])
    assert few[-1].n_node < first.n_node


def test_nine_tenths_of_the_batches_fit_into_the_first_size() -> None:
    data, random = graphs.synthetic_proteins(1000), np.random.default_rng(1)
    sizes = [data.n_node[random.permutation(1000)[:64]].sum() for _ in range(4000)]
    first, _ = graphs.padded_sizes(data, 64, buckets=2)
    assert first.n_node == pytest.approx(np.quantile(sizes, 0.9), rel=0.02)


def test_wrong_arguments_are_named() -> None:
    data = a_data_set()
    refusals = {
        "batch_size=31 must be between 1 and the 30 graphs": lambda: graphs.padded_sizes(data, 31),
        "buckets=0 must be at least 1": lambda: graphs.padded_sizes(data, 3, buckets=0),
        "places[1] = 30 is out of range for 30 graphs": lambda: graphs.padded_batch(data, [0, 30]),
        "TypeError: places must be integers, got float64": lambda: graphs.padded_batch(data, np.array([0.5])),
        "places must have one axis, got shape (1, 1)": lambda: graphs.padded_batch(data, np.array([[0]])),
    }
    assert_refused(refusals)


@pytest.mark.full
def test_batches_of_a_size_share_a_program() -> None:
    data = a_data_set()
    traces = []

    @jax.jit
    def run(graph: graphs.Graph) -> jax.Array:
        traces.append(graph)
        passed = graphs.update_all(graph, fn.copy_e("w", "m"), fn.sum("m", "x"))
        return graphs.sum_nodes(passed, "x")

    (size,) = graphs.padded_sizes(data, 5, buckets=1)
    for start in range(0, 30, 5):
        found = run(graphs.padded_batch(data, np.arange(start, start + 5), size))
        edges = [slice(*data.edge_starts[place : place + 2]) for place in range(start, start + 5)]
        wanted = [data.edges["w"][edge].astype(float).sum(0) for edge in edges]
        np.testing.assert_allclose(np.asarray(found, float)[:5], wanted, rtol=5e-3, atol=5e-2)
    assert len(traces) == 1
