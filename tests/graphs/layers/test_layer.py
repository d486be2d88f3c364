"""Layers hold the arguments of their functions under the same names, and pass them on."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_train import graphs

pytestmark = pytest.mark.quick

OWN = {"dtype", "dropout_keys"}
RNGS = nnx.Rngs(0)
LAYERS: list[tuple[Any, Any]] = [
    (graphs.graph_conv, graphs.GraphConv(3, 2, rngs=RNGS)),
    (graphs.sage_conv, graphs.SAGEConv(3, 2, aggregator="lstm", rngs=RNGS)),
    (graphs.gat_conv, graphs.GATConv(3, 2, 2, residual=True, rngs=RNGS)),
    (graphs.gatv2_conv, graphs.GATv2Conv(3, 2, 2, residual=True, rngs=RNGS)),
    (graphs.gin_conv, graphs.GINConv(learn_eps=True)),
    (graphs.gine_conv, graphs.GINEConv(learn_eps=True)),
    (graphs.edge_conv, graphs.EdgeConv(3, 2, rngs=RNGS)),
    (graphs.dynamic_edge_conv, graphs.DynamicEdgeConv(3, 2, k=2, rngs=RNGS)),
    (graphs.cheb_conv, graphs.ChebConv(3, 2, 2, rngs=RNGS)),
    (graphs.tag_conv, graphs.TAGConv(3, 2, rngs=RNGS)),
    (graphs.sg_conv, graphs.SGConv(3, 2, rngs=RNGS)),
    (graphs.appnp_conv, graphs.APPNPConv()),
    (graphs.nn_conv, graphs.NNConv(3, 2, nnx.Linear(2, 6, rngs=RNGS), rngs=RNGS)),
    (graphs.pna_conv, graphs.PNAConv(3, 2, delta=1.0, rngs=RNGS)),
    (graphs.rel_graph_conv, graphs.RelGraphConv(3, 2, 2, regularizer="basis", rngs=RNGS)),
    (graphs.gated_graph_conv, graphs.GatedGraphConv(3, 3, 1, rngs=RNGS)),
    (graphs.transformer_conv, graphs.TransformerConv(3, 2, edge_width=2, use_gate=True, rngs=RNGS)),
]


@pytest.mark.parametrize(("function", "layer"), LAYERS, ids=[type(layer).__name__ for _, layer in LAYERS])
def test_what_a_layer_holds_are_arguments_of_its_function(function: Any, layer: Any) -> None:
    held = {name for name in vars(layer) if not name.startswith("_")} - OWN
    assert held <= inspect.signature(function).parameters.keys()


def test_parameters_are_cast_and_given_arguments_are_not() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    layer = graphs.GATConv(3, 4, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    layer.left[...] = layer.left[...] + 1e-5  # which float16 would round off
    rows = jax.random.normal(jax.random.key(0), (3, 3))
    weight = layer.weight[...].astype(jnp.float16)
    wanted = graphs.gat_conv(
        graph, rows.astype(jnp.float16), weight, layer.left, layer.right, jnp.zeros(8, jnp.float16)
    )
    np.testing.assert_array_equal(layer(graph, rows), wanted)
    assert wanted.dtype == jnp.float16


def test_dropout_of_a_layer_has_its_rate_unless_it_is_off() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    layer = graphs.APPNPConv(1, 0.0, edge_dropout=0.5, norm="none", rngs=nnx.Rngs(0))
    run = nnx.jit(lambda layer: layer(graph, jnp.ones((3, 1))))
    drawn = np.stack([run(layer) for _ in range(40)])
    assert set(drawn.ravel().tolist()) == {0.0, 2.0}
    np.testing.assert_array_equal(layer(graph, jnp.ones((3, 1)), deterministic=True), np.ones((3, 1)))
    layer.eval()
    np.testing.assert_array_equal(layer(graph, jnp.ones((3, 1))), np.ones((3, 1)))
