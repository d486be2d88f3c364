"""Layers hold the arguments of their functions under the same names, and pass them on.

First parameters are those of Deep Graph Library: which there are, their shapes, and how they are drawn.
"""

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
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


ZERO = 0.0


def uniform(bound: float) -> tuple[str, float]:
    return "uniform", bound


def normal(std: float) -> tuple[str, float]:
    return "normal", std


GLOROT = uniform((12 / 500) ** 0.5)  # with gain sqrt(2)
INNER = uniform(300**-0.5)
SAGE = {"weight": ((300, 200), GLOROT), "self_weight": ((300, 200), GLOROT), "bias": ((200,), INNER)}
LSTM = {f"aggregator_weights/{i}": (shape, INNER) for i, shape in enumerate([(300, 1200)] * 2 + [(1200,)] * 2)}
OF_HEADS = normal((4 / (300 + 2000)) ** 0.5)
VECTOR = normal(2 / (40 * 51) ** 0.5)
BARE: dict[str, Any] = {"residual": True, "use_bias": False}
VECTORS = {"left": ((1, 5, 4), None), "right": ((1, 5, 4), None)}
# Of each layer its parameters: the shape, and how they are drawn; None where that is not looked at.
CASES: dict[str, tuple[Any, dict[str, tuple[tuple[int, ...], Any]]]] = {
    "gcn": (
        partial(graphs.GraphConv, 300, 200),
        {"weight": ((300, 200), uniform((6 / 500) ** 0.5)), "bias": ((200,), ZERO)},
    ),
    "gcn, bare": (partial(graphs.GraphConv, 3, 3, use_weight=False, use_bias=False), {}),
    "sage mean": (partial(graphs.SAGEConv, 300, 200), SAGE),
    "sage gcn": (
        partial(graphs.SAGEConv, 300, 200, aggregator="gcn"),
        {"weight": ((300, 200), GLOROT), "bias": ((200,), ZERO)},
    ),
    "sage pool": (
        partial(graphs.SAGEConv, 300, 200, aggregator="pool"),
        {
            **SAGE,
            "aggregator_weights/0": ((300, 300), uniform((12 / 600) ** 0.5)),
            "aggregator_weights/1": ((300,), INNER),
        },
    ),
    "sage lstm": (partial(graphs.SAGEConv, 300, 200, aggregator="lstm"), SAGE | LSTM),
    "gat": (
        partial(graphs.GATConv, 300, 40, 50, residual=True),
        {
            **dict.fromkeys(("weight", "residual_weight"), ((300, 2000), OF_HEADS)),
            **dict.fromkeys(("left", "right"), ((1, 50, 40), VECTOR)),
            "bias": ((2000,), ZERO),
        },
    ),
    "gat, residual": (
        partial(graphs.GATConv, 30, 4, 5, **BARE),
        {"weight": ((30, 20), None), **VECTORS, "residual_weight": ((30, 20), None)},
    ),
    "gat, identity": (partial(graphs.GATConv, 20, 4, 5, **BARE), {"weight": ((20, 20), None), **VECTORS}),
    "gatv2": (
        partial(graphs.GATv2Conv, 300, 40, 50, residual=True),
        {
            "attention": ((1, 50, 40), VECTOR),
            **{f"{name}_weight": ((300, 2000), OF_HEADS) for name in ("left", "right", "residual")},
            **{f"{name}_bias": ((2000,), ZERO) for name in ("left", "right", "residual")},
        },
    ),
    "gatv2, shared": (
        partial(graphs.GATv2Conv, 30, 4, 5, share_weights=True, use_bias=False),
        {"attention": ((1, 5, 4), None), "left_weight": ((30, 20), None)},
    ),
    # Two times 2 / (fan in + fan out), where all hops enter: Glorot's variance with the gain of relu.
    "tag": (
        partial(graphs.TAGConv, 150, 100, 3),
        {"weight": ((4, 150, 100), normal((2 * 2 / (4 * 150 + 100)) ** 0.5)), "bias": ((100,), None)},
    ),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", CASES)
def test_parameters_have_their_shapes_and_are_drawn_as_in_dgl(name: str) -> None:
    make, wanted = CASES[name]
    layer = make(rngs=nnx.Rngs(0))
    found = {"/".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert {key: array.shape for key, array in found.items()} == {key: shape for key, (shape, _) in wanted.items()}
    for key, (_, law) in wanted.items():
        array = found[key].astype(np.float64)
        if law == ZERO:
            assert not array.any(), key
        elif law is not None and law[0] == "uniform":
            assert 0.95 * law[1] < np.abs(array).max() <= law[1] * (1 + 1e-6), key
            assert array.std() == pytest.approx(law[1] / 3**0.5, rel=1.5 / array.size**0.5 + 0.01), key
        elif law is not None:
            assert array.std() == pytest.approx(law[1], rel=0.02 if array.size > 10_000 else 0.1), key


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_parameters_are_rounded_float32_ones(dtype: str) -> None:
    """bfloat16's own generator knows 128 numbers."""
    for name in ("gcn", "gat", "sage pool"):
        full, half = (nnx.state(CASES[name][0](rngs=nnx.Rngs(0), param_dtype=x)) for x in ("float32", dtype))
        for x, y in zip(jax.tree.leaves(full), jax.tree.leaves(half), strict=True):
            np.testing.assert_array_equal(x.astype(dtype), y)
