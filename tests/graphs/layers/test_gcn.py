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
