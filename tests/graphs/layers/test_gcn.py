import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_train as jt
from jmp_train import graphs

pytestmark = [pytest.mark.quick, pytest.mark.newest]


def test_the_product_comes_first_where_it_makes_features_narrower() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    for width, out in ((8, 2), (2, 8), (4, 4)):
        x, weight = jnp.ones((3, width)), jnp.ones((width, out))
        text = str(jax.make_jaxpr(graphs.graph_conv)(graph, x, weight))
        (summed,) = re.findall(r"f32\[3,(\d)\] = scatter-add", text)
        assert int(summed) == min(width, out)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("norm", ["both", "right", "left", "none"])
def test_against_a_dense_adjacency(norm: str) -> None:
    """As in Kipf's and Welling's paper, with self-loops and multiple edges."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 8, (2, 40))
    senders, receivers = np.append(senders, np.arange(8)), np.append(receivers, np.arange(8))
    weights = random.uniform(size=48).astype(np.float32)
    x = random.normal(size=(8, 3)).astype(np.float32)
    weight = random.normal(size=(3, 5)).astype(np.float32)
    counts, adjacency = np.zeros((2, 8, 8))
    np.add.at(counts, (receivers, senders), 1)
    np.add.at(adjacency, (receivers, senders), weights)
    into, out = np.diag(1 / counts.sum(1)), np.diag(1 / counts.sum(0))
    scaled = {
        "both": into**0.5 @ adjacency @ out**0.5,
        "right": into @ adjacency,
        "left": adjacency @ out,
        "none": adjacency,
    }[norm]
    wanted = np.maximum(scaled @ x @ weight + 0.5, 0)
    graph = graphs.from_edges(senders, receivers, 8)
    found = graphs.graph_conv(
        graph, x, weight, jnp.full(5, 0.5), norm=norm, edge_weight=weights, activation=jax.nn.relu
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_the_activations_result_is_stored_in_half_under_autocast() -> None:
    layer = graphs.GraphConv(2, 3, activation=nnx.elu, rngs=nnx.Rngs(0))
    graph = graphs.from_edges([0, 1], [1, 0], 2)
    run = jt.autocast(lambda x: layer(graph, x))
    assert run(jnp.ones((2, 2))).dtype == jnp.float16


def test_edge_weights_of_another_dtype_do_not_decide_the_results() -> None:
    graph = graphs.from_edges([0, 1, 1], [1, 0, 0], 2)
    x, w = jnp.ones((2, 2), jnp.float16), jnp.array([1 / 3, 2048.25, -2048])
    result = graphs.graph_conv(graph, x, norm="none", edge_weight=w)
    assert result.dtype == jnp.float16
    np.testing.assert_array_equal(result[:, 0], jnp.asarray([0.25, 1 / 3], jnp.float16))
