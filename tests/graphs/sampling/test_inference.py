"""Inference with all neighbors, a layer at a time: the whole graph's result, in fixed memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_train import graphs

pytestmark = [pytest.mark.quick, pytest.mark.newest]

COUNT, HUB = 400, 900  # nodes, and the edges of one of them


def edges() -> tuple[np.ndarray, np.ndarray]:
    """Edges with a self-loop at each node, a hub that is entered by many and one that sends as many."""
    random = np.random.default_rng(0)
    ends = random.integers(0, COUNT, (2, 2_000))
    hub = np.stack([random.integers(0, COUNT, HUB), np.zeros(HUB, int)])
    self_loops = np.tile(np.arange(COUNT), (2, 1))
    senders, receivers = np.concatenate([ends, hub, hub[::-1], self_loops], axis=1)
    return senders, receivers


def models() -> dict[str, list[Any]]:
    rngs = nnx.Rngs(0)
    double: dict[str, Any] = {"param_dtype": jnp.float64, "rngs": rngs}
    return {
        "gcn": [graphs.GraphConv(6, 5, activation=nnx.relu, **double), graphs.GraphConv(5, 3, **double)],
        "sage": [graphs.SAGEConv(6, 5, activation=nnx.relu, **double), graphs.SAGEConv(5, 3, **double)],
        "gat": [graphs.GATConv(6, 4, 2, activation=nnx.elu, **double), graphs.GATConv(8, 3, 1, **double)],
    }


def flat(layer: Any) -> Callable[[Any, Any], jax.Array]:
    def run(graph: Any, rows: Any) -> jax.Array:
        result = layer(graph, rows)
        return result.reshape(len(result), -1)

    return run


@pytest.mark.parametrize("name", ["sage", *(pytest.param(name, marks=pytest.mark.full) for name in ("gcn", "gat"))])
def test_it_equals_the_whole_graphs_result(name: str) -> None:
    with jax.enable_x64(True):
        layers = [flat(layer) for layer in models()[name]]
        features = np.random.default_rng(1).normal(size=(COUNT, 6))
        ends = edges()
        whole, rows = graphs.from_edges(*ends, COUNT), jnp.asarray(features)
        for layer in layers:
            rows = jax.jit(layer)(whole, rows)
        on_host = graphs.host_edges(*ends, COUNT)
        found = graphs.layerwise_inference(layers, on_host, features, batch_size=64, max_edges=300)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, rows, rtol=1e-11, atol=1e-11)


def test_each_layer_is_compiled_once_and_stays_in_its_memory() -> None:
    shapes = []

    def layer(power: int, block: graphs.Block, rows: jax.Array) -> jax.Array:
        shapes.append((block.num_targets, block.num_edges, rows.shape))
        return graphs.graph_conv(block, rows) ** power

    on_host = graphs.host_edges(*edges(), COUNT)
    features = np.ones((COUNT, 2), np.float16)
    layers = [functools.partial(layer, power) for power in (1, 2)]
    found = graphs.layerwise_inference(layers, on_host, features, batch_size=50, max_edges=300)
    assert found.dtype == np.float16
    assert len(shapes) == 2
    most = int(on_host.in_degrees.max())  # the hub, which is computed alone
    assert shapes[0] == shapes[1]
    num_targets, num_edges, (num_sources, _) = shapes[0]
    assert (num_targets <= 50, num_edges, num_sources <= COUNT + 50) == (True, most, True)


def test_wrong_calls_are_refused() -> None:
    on_host = graphs.host_edges([0], [1], 2)
    with pytest.raises(ValueError, match="features of 'node' must have 2 rows, got 3 rows"):
        graphs.layerwise_inference([], on_host, np.ones((3, 1)))
    with pytest.raises(ValueError, match="max_edges=0 must be at least 1"):
        graphs.layerwise_inference([], on_host, np.ones((2, 1)), max_edges=0)
    by_type = {("a", "to", "b"): graphs.host_edges([0], [1], 2, 3)}
    with pytest.raises(ValueError, match="features of 'b' must have 3 rows, got none"):
        graphs.layerwise_inference([], by_type, {"a": np.ones((2, 1))})
    with pytest.raises(ValueError, match="edges have no nodes"):
        graphs.layerwise_inference([], graphs.host_edges([], [], 0), np.ones((0, 1)))
