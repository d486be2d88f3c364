"""Layers hold the arguments of their functions under the same names, and pass them on."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_train import graphs

pytestmark = pytest.mark.quick

SHARED = ("dtype", "param_dtype", "rngs")
LAYERS: dict[Callable[..., Any], Callable[[nnx.Rngs], Any]] = {
    graphs.graph_conv: lambda rngs: graphs.GraphConv(3, 2, rngs=rngs),
    graphs.sage_conv: lambda rngs: graphs.SAGEConv(3, 2, aggregator="lstm", rngs=rngs),
    graphs.gat_conv: lambda rngs: graphs.GATConv(3, 2, 2, residual=True, rngs=rngs),
    graphs.gatv2_conv: lambda rngs: graphs.GATv2Conv(3, 2, 2, residual=True, rngs=rngs),
    graphs.gin_conv: lambda rngs: graphs.GINConv(learn_eps=True),
    graphs.gine_conv: lambda rngs: graphs.GINEConv(learn_eps=True),
    graphs.edge_conv: lambda rngs: graphs.EdgeConv(3, 2, rngs=rngs),
    graphs.dynamic_edge_conv: lambda rngs: graphs.DynamicEdgeConv(3, 2, k=2, rngs=rngs),
    graphs.cheb_conv: lambda rngs: graphs.ChebConv(3, 2, 2, rngs=rngs),
    graphs.tag_conv: lambda rngs: graphs.TAGConv(3, 2, rngs=rngs),
    graphs.sg_conv: lambda rngs: graphs.SGConv(3, 2, rngs=rngs),
    graphs.appnp_conv: lambda rngs: graphs.APPNPConv(),
    graphs.nn_conv: lambda rngs: graphs.NNConv(3, 2, nnx.Linear(2, 6, rngs=rngs), rngs=rngs),
    graphs.pna_conv: lambda rngs: graphs.PNAConv(3, 2, delta=1.0, rngs=rngs),
    graphs.rel_graph_conv: lambda rngs: graphs.RelGraphConv(3, 2, 2, regularizer="basis", rngs=rngs),
    graphs.gated_graph_conv: lambda rngs: graphs.GatedGraphConv(3, 3, 1, rngs=rngs),
    graphs.transformer_conv: lambda rngs: graphs.TransformerConv(3, 2, edge_width=2, use_gate=True, rngs=rngs),
}


@pytest.mark.parametrize("function", LAYERS)
def test_what_a_layer_holds_are_arguments_of_its_function(function: Callable[..., Any]) -> None:
    layer = nnx.eval_shape(lambda: LAYERS[function](nnx.Rngs(0)))
    assert layer._function is function
    given = inspect.signature(type(layer).__init__).parameters
    held = {name for name in vars(layer) if not name.startswith("_")} - {"dropout_keys"}
    assert held - given.keys() <= inspect.signature(function).parameters.keys()
    # the fields that all layers have come last, after a layer's own
    assert [name for name in given if name in SHARED] == list(given)[-sum(name in SHARED for name in given) :]


@pytest.mark.parametrize("function", LAYERS)
def test_layers_are_pickled_and_copied(function: Callable[..., Any]) -> None:
    layer = nnx.eval_shape(lambda: LAYERS[function](nnx.Rngs(0)))
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert nnx.graphdef(other) == nnx.graphdef(layer)
        assert vars(other).keys() == vars(layer).keys()


def test_parameters_are_cast_and_given_arguments_are_not() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    layer = graphs.GATConv(3, 4, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    layer.left[...] = layer.left[...] + 1e-5  # which float16 would round off
    rows = jax.random.normal(jax.random.key(0), (3, 3))

    def results(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        half, weight = rows.astype(jnp.float16), layer.weight[...].astype(jnp.float16)
        wanted = graphs.gat_conv(graph, half, weight, layer.left, layer.right, jnp.zeros(8, jnp.float16))
        return layer(graph, rows), wanted

    found, wanted = jax.jit(results)(rows)
    np.testing.assert_array_equal(found, wanted)
    assert wanted.dtype == jnp.float16


def test_dropout_of_a_layer_has_its_rate_unless_it_is_off() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    layer = graphs.APPNPConv(1, 0.0, edge_dropout=0.75, norm="none", rngs=nnx.Rngs(0))
    run = nnx.jit(lambda layer: layer(graph, jnp.ones((3, 1))))
    drawn = np.stack([run(layer) for _ in range(40)])
    assert set(drawn.ravel().tolist()) == {0.0, 4.0}
    np.testing.assert_array_equal(layer(graph, jnp.ones((3, 1)), deterministic=True), np.ones((3, 1)))
    layer.eval()
    np.testing.assert_array_equal(layer(graph, jnp.ones((3, 1))), np.ones((3, 1)))
