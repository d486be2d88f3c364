"""Arguments of a wrong type or in the wrong order: the error names the argument, and what came."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_train import graphs

pytestmark = pytest.mark.quick

GRAPH = graphs.from_edges([0, 1, 2], [1, 2, 0], 3, nodes={"h": jnp.ones((3, 2))})
EDGES = graphs.host_edges([0, 1, 2], [1, 2, 0], 3)
ROWS = np.ones((3, 2), np.float32)
IDS = np.array([0, 1, 1])
UNTYPED: Any = graphs  # whose arguments may be of any type
CASES: Any = [
    (
        lambda: UNTYPED.edge_softmax(jnp.ones((3, 1)), GRAPH),
        "graph must be a Graph, a HeteroGraph or .*, got ArrayImpl",
    ),
    (lambda: UNTYPED.segment_sum(None, IDS, 2), "data must be an array, got None"),
    (lambda: UNTYPED.GraphConv(2, 3, rngs=nnx.Rngs(0))(GRAPH, None), "features must be floats, got None"),
    (lambda: UNTYPED.batch(GRAPH), "graphs must be a sequence of graphs, got Graph"),
    (lambda: UNTYPED.stack(GRAPH), "graphs must be a sequence of graphs, got Graph"),
    (lambda: UNTYPED.to_jraph(ROWS), "graph must be a Graph, got ndarray"),
    (lambda: UNTYPED.neighbor_sampler(GRAPH, (2,), IDS, 2), "edges must be a result of host_edges, or a .*, got Graph"),
    (lambda: UNTYPED.neighbor_sampler(EDGES, 2, IDS, 2), r"fanouts=2 must have one number for each layer: \(2,\)"),
    (lambda: UNTYPED.take_rows(IDS, ROWS), "ids must be integers, got float32"),
    (lambda: UNTYPED.shard_features(ROWS, None), r"mesh must be a jax\.sharding\.Mesh, got NoneType"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_an_argument_of_another_type_is_named(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(("features", "heads"), [(0, 2), (2, 0)])
def test_a_layer_without_features_or_heads_is_refused(features: int, heads: int) -> None:
    with pytest.raises(ValueError, match="features and heads must be at least 1, got a parameter of shape"):
        jax.eval_shape(lambda: graphs.GATConv(features, 3, num_heads=heads, rngs=nnx.Rngs(0)))
