"""What holds for all layers, with each of their options."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import (
    CASES,
    Call,
    Case,
    draw_inputs,
    given,
    hub_graph,
    in_float64,
    layer_call,
    parameters,
    small_graph,
    weights_of,
)
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs

pytestmark = pytest.mark.full  # all of them together; each layer has a file of its own too

TYPICAL = [
    "graph both expanding, weighted",
    "sage mean expanding, weighted",
    "sage gcn",
    "sage lstm, weighted",
    "gat residual, weighted",
    "gatv2 residual, weighted",
    "gin mean, weighted",
    "appnp, weighted",
    "sg",
    "tag, weighted",
    "cheb expanding, weighted",
    "relational basis, weighted",
    "nn mean, weighted",
    "gated graph",
    "transformer with edge features",
    "gine",
    "edge network",
    "pna with edges",
]
WITH_FLOAT32_GRADIENTS = [
    *TYPICAL,
    "relational bdd, weighted",
    "transformer gated, mean of heads",
    "sage pool, weighted",
    "gatv2 identity, shared",
    "gin max",
    "tag expanding",
    "cheb",
    "edge",
    "pna",
]
cases = pytest.mark.parametrize("name", CASES)
typical_cases = pytest.mark.parametrize("name", TYPICAL)


def graph_of(case: Case) -> Any:
    return small_graph() if case.is_recurrent else hub_graph()


@functools.cache
def exact_gradient(name: str) -> Callable[..., Any]:
    """Returns the gradient of the reference's sum, weighted by a cotangent, in float64."""
    case = CASES[name]
    _, edges, _ = graph_of(case)

    def loss(p: Any, x: Any, w: Any, cotangent: Any) -> jax.Array:
        return (case.exact(jnp, p, edges, x, w) * cotangent).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


@functools.cache
def exact_results(name: str, dtype: str) -> Any:
    """Returns parameters and inputs that the dtype can hold, a cotangent, and the float64 results."""
    case = CASES[name]
    graph, edges, count = graph_of(case)
    _, state = parameters(case.make(rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda a: a.astype(dtype).astype(jnp.float32), state)
    x, w = draw_inputs(case, count, edges, dtype)
    p, exact_x, exact_w = in_float64(state), np.asarray(x, np.float64), weights_of(w, edges)
    exact = case.exact(np, p, edges, exact_x, exact_w)
    sizes = case.sizes(p, edges, exact_x, exact_w)
    cotangent = np.random.default_rng(9).normal(size=exact.shape).astype(np.float32)
    gradients = None
    if name in (WITH_FLOAT32_GRADIENTS if dtype == "float32" else TYPICAL):
        with jax.enable_x64(True):
            inputs = jax.tree.map(jnp.asarray, (p, exact_x, exact_w, cotangent.astype(np.float64)))
            of_params, of_x, of_w = jax.tree.map(np.asarray, exact_gradient(name)(*inputs))
        gradients = {**of_params, "features": of_x, "edge_weight": of_w}
    return graph, state, x, w, cotangent, exact, sizes, gradients


def assert_close(name: str, dtype: str, call: Call, state: Any, inputs: Any) -> None:
    """Asserts that results, and of typical layers gradients, are within what the dtype allows."""
    _, _, x, w, cotangent, exact, sizes, exact_grads = inputs

    def loss(state: Any, x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        result = call(state, x, w)
        return jnp.sum(result.astype(jnp.float32) * cotangent), result

    numbers = (0, 1) if w is None else (0, 1, 2)
    run = jax.value_and_grad(loss, numbers, has_aux=True)
    if exact_grads is None:
        (_, result), grads = jax.jit(loss)(state, x, w), None
    else:
        (_, result), grads = jax.jit(run)(state, x, w)
    eps = float(jnp.finfo(dtype).eps)
    assert result.dtype == dtype
    error = np.abs(np.asarray(result, np.float64) - exact)
    if dtype == "float32":
        assert error.max() <= 1e-5 * np.abs(exact).max()
    else:
        assert (error <= 8 * eps * sizes).all()
    if grads is None or exact_grads is None:
        return
    by_name = {**in_float64(grads[0]), "features": grads[1]}
    if w is not None:
        by_name["edge_weight"] = grads[2]
    # Leaky units of GATv2 are others after a rounding, and PNA divides by standard deviations that are small here.
    tolerance = 32 * eps if name.startswith(("gatv2", "pna")) else 8 * eps
    least = 1e-3 if name.startswith("pna") else 1e-4
    largest = max(np.abs(grad).max() for grad in exact_grads.values())
    for key, grad in by_name.items():
        wanted = exact_grads[key]
        scale = max(np.abs(wanted).max(), 0.01 * largest)
        worst = np.abs(np.asarray(grad, np.float64) - wanted).max() / scale
        assert worst <= max(tolerance, least), f"{key}: {worst / eps:.3g} eps"


@cases
def test_float32_equals_float64(name: str) -> None:
    inputs = exact_results(name, "float32")
    assert_close(name, "float32", layer_call(CASES[name], inputs[0]), inputs[1], inputs)


@pytest.mark.parametrize(("name", "half"), [(n, "float16") for n in CASES] + [(n, "bfloat16") for n in TYPICAL])
def test_autocast_within_eps_of_float64(name: str, half: str) -> None:
    inputs = exact_results(name, half)
    call = jt.autocast(layer_call(CASES[name], inputs[0]), half)
    assert_close(name, half, call, inputs[1], inputs)


@typical_cases
def test_a_half_policy_and_a_half_dtype_within_eps_of_float64(name: str) -> None:
    inputs = exact_results(name, "float16")
    cast = jt.get_policy("mixed_float16").cast_to_compute(inputs[1])
    assert_close(name, "float16", layer_call(CASES[name], inputs[0]), cast, inputs)
    inputs = exact_results(name, "bfloat16")
    call = layer_call(CASES[name], inputs[0], dtype=jnp.bfloat16)
    assert_close(name, "bfloat16", call, inputs[1], (*inputs[:-1], None))


@cases
def test_dtypes_of_policies_of_mixed_inputs_and_of_parameters(name: str) -> None:
    case = CASES[name]
    graph, edges, count = small_graph()
    _, state = parameters(case.make(rngs=nnx.Rngs(0)))
    x, w = draw_inputs(case, count, edges, "float32")
    call, policy = layer_call(case, graph), jt.get_policy("mixed_bfloat16")
    results = {
        "float32": jax.eval_shape(jt.apply_policy(call, policy), state, x, w),
        "bfloat16": jax.eval_shape(call, *policy.cast_to_compute((state, x, w))),
        "float16": jax.eval_shape(layer_call(case, graph, dtype="float16"), state, x, w),
    }
    for dtype, result in results.items():
        assert result.dtype == dtype
    for dtype in ("float32", "bfloat16"):
        layer = nnx.eval_shape(lambda dtype=dtype: CASES[name].make(rngs=nnx.Rngs(0), param_dtype=dtype))
        state = jax.tree.leaves(nnx.state(layer))
        assert all(x.dtype == dtype for x in state)


@typical_cases
def test_jraphs_graphs_and_padded_ones_give_the_same(name: str) -> None:
    case = CASES[name]
    graph, edges, count = small_graph()
    definition, state = parameters(case.make(rngs=nnx.Rngs(0)))
    x, w = draw_inputs(case, count, edges, "float32")
    layer = nnx.merge(definition, state)
    wanted = layer(graph, x, *given(w))
    theirs = graphs.to_jraph(graph)._replace(nodes=np.ones((count, 1)), globals={"a": 1})
    np.testing.assert_array_equal(layer(theirs, x, *given(w)), wanted)
    if not case.is_recurrent:
        found = jax.jit(lambda theirs, x, w: layer(theirs, x, *given(w)))(
            theirs._replace(nodes=None, globals=None), x, w
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        larger = graphs.pad(graph, count + 4, graph.num_edges + 9)
        rows = jnp.pad(x, ((0, 4), (0, 0)), constant_values=1e4)
        padding = [(0, 9)] + [(0, 0)] * (np.ndim(w) - 1)
        weights = None if w is None else jnp.pad(w, padding, constant_values=1e4)
        found = jax.jit(layer)(larger, rows, *given(weights))[:count]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


KEEPS_OF_EDGES = [n for n, case in CASES.items() if "lstm" in n or "network" in n or case.has_edge_features]


@pytest.mark.parametrize("name", [name for name in CASES if name not in KEEPS_OF_EDGES])
def test_the_gradient_needs_nothing_that_was_computed_per_edge(name: str) -> None:
    case = CASES[name]
    graph, edges, count = hub_graph()
    _, state = parameters(case.make(rngs=nnx.Rngs(0)))
    x, w = draw_inputs(case, count, edges, "float32")
    pullback = jax.eval_shape(lambda state, x, w: jax.vjp(layer_call(case, graph), state, x, w)[1], state, x, w)
    kept = [x for x in jax.tree.leaves(pullback) if x.shape[:1] == (graph.num_edges,)]
    floats = [x for x in kept if x.dtype != jnp.int32]
    assert kept
    assert [x.shape for x in floats] == ([] if w is None else [w.shape])


DROPPING: dict[str, Callable[..., Any]] = {
    "sage": lambda **o: graphs.SAGEConv(6, 4, feature_dropout=0.5, **o),
    "gat features": lambda **o: graphs.GATConv(6, 4, 2, feature_dropout=0.5, **o),
    "gat attention": lambda **o: graphs.GATConv(6, 4, 2, attention_dropout=0.5, **o),
    "gatv2 features": lambda **o: graphs.GATv2Conv(6, 4, 2, feature_dropout=0.5, **o),
    "gatv2 attention": lambda **o: graphs.GATv2Conv(6, 4, 2, attention_dropout=0.5, **o),
    "transformer attention": lambda **o: graphs.TransformerConv(6, 4, 2, attention_dropout=0.5, **o),
    "appnp": lambda **o: graphs.APPNPConv(3, edge_dropout=0.5, **o),
}


@pytest.mark.parametrize("name", ["sage", "gat attention", "gatv2 features", "appnp"])
def test_dropout_is_on_in_training_only(name: str) -> None:
    graph, x = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3), jnp.ones((3, 6))
    layer = DROPPING[name](rngs=nnx.Rngs(0))

    @nnx.jit
    def run(layer: Any, key: Any = None) -> jax.Array:
        return layer(graph, x, rngs=None if key is None else nnx.Rngs(dropout=key))

    first, second = run(layer), run(layer)
    assert (first != second).any()
    five, six = jax.random.key(5), jax.random.key(6)
    np.testing.assert_array_equal(run(layer, five), run(layer, five))
    assert (run(layer, five) != run(layer, six)).any()
    np.testing.assert_array_equal(run(DROPPING[name](rngs=nnx.Rngs(0))), first)
    layer.eval()
    still = run(layer)
    np.testing.assert_array_equal(run(layer, six), still)
    assert (still != first).any()
    layer.train()
    assert (run(layer) != still).any()


def test_calls_and_views_say_whether_dropout_is_on() -> None:
    graph, x = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3), jnp.ones((3, 6))
    layer = DROPPING["sage"](rngs=nnx.Rngs(0))
    still = layer(graph, x, deterministic=True)
    assert (layer(graph, x) != still).any()
    view = nnx.view(layer, deterministic=True)
    np.testing.assert_array_equal(view(graph, x), still)
    assert (view(graph, x, deterministic=False) != still).any()


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in DROPPING), ("gat attention", "float16")])
def test_dropout_keeps_the_mean(name: str, dtype: str) -> None:
    """Where the network is linear in what is dropped: logits are 0."""
    graph = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6)), dtype)
    layer = DROPPING[name](rngs=nnx.Rngs(0), dtype=dtype)
    for vector in ("left", "right", "attention"):
        if hasattr(layer, vector):
            getattr(layer, vector)[...] *= 0
    definition, params, others = nnx.split(layer, nnx.Param, ...)

    def dropped(key: jax.Array | None) -> jax.Array:
        layer = nnx.merge(definition, params, others)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return layer(graph, x, rngs=rngs, deterministic=key is None)

    still, count = dropped(None), 4_000
    results = jax.jit(jax.vmap(dropped))(jax.random.split(jax.random.key(1), count))
    assert results.dtype == still.dtype == dtype
    results = np.asarray(results, np.float64)
    error = np.abs(results.mean(0) - np.asarray(still, np.float64))
    assert (error < 5 * results.std(0) / count**0.5 + 1e-3).all()


def test_layers_without_dropout_have_no_random_state() -> None:
    layer = graphs.GATConv(6, 4, 2, rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(layer, nnx.RngState))


def test_features_and_parameters_promote() -> None:
    graph, layer = graphs.from_edges([0], [0], 1), graphs.GraphConv(2, 2, rngs=nnx.Rngs(0))
    assert layer(graph, jnp.ones((1, 2), jnp.float16)).dtype == jnp.float32


def plain(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Any:
    """Calls a layer's function on a graph of three nodes and four edges, with arrays of ones."""
    graph = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3)
    return function(graph, *map(jnp.ones, shapes), **options)


RNGS = nnx.Rngs(0)
names = "appnp_conv cheb_conv gat_conv gatv2_attention gatv2_conv gin_conv graph_conv sage_conv sg_conv tag_conv"
appnp_conv, cheb_conv, gat_conv, gatv2_attention, gatv2_conv, gin_conv, graph_conv, sage_conv, sg_conv, tag_conv = (
    functools.partial(plain, getattr(graphs, name)) for name in names.split()
)
LOOP = graphs.from_edges([0], [0], 1), jnp.ones((1, 2))
REFUSALS: dict[str, Any] = {
    "norm='rigth' must be one of 'none', 'both', 'left', 'right'": lambda: graph_conv((3, 2), norm="rigth"),
    "norm='all' must be one of": [
        lambda: graphs.GraphConv(2, 2, norm="all", rngs=RNGS),
        lambda: graphs.APPNPConv(norm="all"),
    ],
    "features must be [3, 4], got shape (3, 2)": [
        lambda: graph_conv((3, 2), (4, 2)),
        lambda: gat_conv((3, 2), (4, 6), (1, 2, 3), (1, 2, 3)),
        lambda: sg_conv((3, 2), (4, 2)),
    ],
    "features must be [3, in], got shape (2, 2)": lambda: graph_conv((2, 2)),
    "weight must be [in, out], got shape (2,)": lambda: graph_conv((3, 2), (2,)),
    "bias must be [5], got shape (2,)": lambda: graph_conv((3, 2), (2, 5), (2,)),
    "edge_weight must be [4], got shape (3,)": [
        lambda: graph_conv((3, 2), edge_weight=jnp.ones(3)),
        lambda: gat_conv((3, 2), (2, 6), (1, 2, 3), (1, 2, 3), edge_weight=jnp.ones(3)),
    ],
    "use_weight=False keeps the width: in_features=2 and out_features=3 must be equal": lambda: graphs.GraphConv(
        2, 3, use_weight=False, rngs=RNGS
    ),
    "aggregator='max' must be one of 'mean', 'gcn', 'pool', 'lstm'": lambda: sage_conv(
        (3, 2), (2, 2), aggregator="max"
    ),
    "aggregator='max' must be one of": lambda: graphs.SAGEConv(2, 2, aggregator="max", rngs=RNGS),
    "aggregator='mean' takes a self_weight": lambda: sage_conv((3, 2), (2, 2)),
    "aggregator='gcn' takes no self_weight": lambda: sage_conv((3, 2), (2, 2), (2, 2), aggregator="gcn"),
    "aggregator='pool' takes 2 aggregator_weights, got 0": lambda: sage_conv((3, 2), (2, 2), (2, 2), aggregator="pool"),
    "aggregator_weights[1] must be [2], got shape (3,)": lambda: sage_conv(
        (3, 2), (2, 2), (2, 2), aggregator="pool", aggregator_weights=[jnp.ones((2, 2)), jnp.ones(3)]
    ),
    "features must be [3, 2], got shape (3, 4)": lambda: sage_conv((3, 4), (2, 2), (2, 2)),
    "edge_weight must be [4], got shape (4, 1)": lambda: sage_conv(
        (3, 2), (2, 2), (2, 2), edge_weight=jnp.ones((4, 1))
    ),
    "feature_dropout=1.5 must be in [0, 1)": lambda: graphs.SAGEConv(2, 2, feature_dropout=1.5, rngs=RNGS),
    "feature_dropout=0.5 needs a random key": lambda: sage_conv((3, 2), (2, 2), (2, 2), feature_dropout=0.5),
    "weight must be [in, 6], got shape (2, 5)": lambda: gat_conv((3, 2), (2, 5), (1, 2, 3), (1, 2, 3)),
    "right must be [1, 2, 3], got shape (1, 3, 2)": lambda: gat_conv((3, 2), (2, 6), (1, 2, 3), (1, 3, 2)),
    "features of width 2 to 6: residual_weight [2, 6] is needed": lambda: gat_conv(
        (3, 2), (2, 6), (1, 2, 3), (1, 2, 3), residual=True
    ),
    "residual_weight needs residual=True": lambda: gat_conv(
        (3, 6), (6, 6), (1, 2, 3), (1, 2, 3), residual_weight=jnp.ones((6, 6))
    ),
    "attention_dropout=-0.5 must be in [0, 1)": lambda: graphs.GATConv(2, 2, 2, attention_dropout=-0.5, rngs=RNGS),
    "negative_slope=nan must be a finite number": [
        lambda: gat_conv((3, 2), (2, 6), (1, 2, 3), (1, 2, 3), negative_slope=np.nan),
        lambda: gatv2_conv((3, 2), (2, 6), (1, 2, 3), negative_slope=np.nan),
        lambda: graphs.GATConv(2, 2, 2, negative_slope=float("nan"), rngs=RNGS)(*LOOP),
    ],
    "negative_slope=inf must be a finite number": lambda: gatv2_attention(
        (3, 2, 3), (3, 2, 3), (2, 3), negative_slope=np.inf
    ),
    "temperature=nan must be a finite number": lambda: graphs.fn.softmax("m", "x", float("nan")),
    "right_bias needs right_weight": lambda: gatv2_conv((3, 2), (2, 6), (1, 2, 3), right_bias=jnp.ones(6)),
    "left_weight must be [in, 6], got shape (2, 5)": lambda: gatv2_conv((3, 2), (2, 5), (1, 2, 3)),
    "got shapes (3, 2, 3), (3, 2, 3) and (3, 2)": lambda: gatv2_attention((3, 2, 3), (3, 2, 3), (3, 2)),
    "aggregator='min' must be one of 'sum', 'max', 'mean'": lambda: gin_conv((3, 2), aggregator="min"),
    "eps must be a number, got shape (2,)": lambda: gin_conv((3, 2), eps=jnp.ones(2)),
    "features must be [3, ...], got shape (4, 2)": [lambda: gin_conv((4, 2)), lambda: appnp_conv((4, 2))],
    "edge_weight must be [4], got shape (5,)": lambda: gin_conv((3, 2), edge_weight=jnp.ones(5)),
    "k=-1 must be at least 0": lambda: appnp_conv((3, 2), k=-1),
    "alpha=1.5 must be in [0, 1]": lambda: appnp_conv((3, 2), alpha=1.5),
    "edge_dropout=0.5 needs a random key": lambda: graphs.APPNPConv(edge_dropout=0.5),
    "edge_weight needs a graph: features that are already propagated are already weighted": lambda: graphs.sg_conv(
        None, jnp.ones((3, 2)), jnp.ones((2, 2)), edge_weight=jnp.ones(4)
    ),
    "weight must be [hops + 1, in, out], got shape (2, 2)": lambda: tag_conv((3, 2), (2, 2)),
    "weight must have at least one of terms, got shape (0, 2, 2)": lambda: cheb_conv((3, 2), (0, 2, 2)),
    "lambda_max must be [3], got shape (2,)": lambda: cheb_conv((3, 2), (2, 2, 2), lambda_max=jnp.ones(2)),
}


def test_messages_name_the_argument_what_came_and_what_was_wanted() -> None:
    assert_refused(REFUSALS)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: graphs.GraphConv(2, 2, **options),
        lambda **options: graphs.GATConv(2, 2, 1, **options),
        lambda **options: graphs.GATv2Conv(2, 2, 1, **options),
        lambda **options: graphs.SGConv(2, 2, 1, **options),
    ],
    ids=["graph", "gat", "gatv2", "sg"],
)
def test_nodes_that_no_edge_enters_have_to_be_allowed(make: Callable[..., Any]) -> None:
    graph, x = graphs.from_edges([0, 1], [1, 1], 2), jnp.ones((2, 2))
    layer = make(rngs=nnx.Rngs(0))
    for call in (layer, jax.jit(layer)):
        with pytest.raises(ValueError, match="pass allow_zero_in_degree=True"):
            call(graph, x)
    allowed = make(rngs=nnx.Rngs(0), allow_zero_in_degree=True)(graph, x)
    assert (allowed[0] == 0).all() and (allowed[1] != 0).any()
    # Only the device knows the edges, and nothing is checked.
    unknown = jax.jit(lambda theirs, x: layer(theirs, x))(graphs.to_jraph(graph), x)
    np.testing.assert_array_equal(unknown, allowed)


def test_what_is_no_graph_and_no_float_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a Block or a jraph\.GraphsTuple, got HeteroGraph"):
        graph: Any = graphs.hetero_from_edges({("a", "b", "a"): ([0], [0])}, {"a": 1})
        graphs.graph_conv(graph, jnp.ones((1, 1)))
    with pytest.raises(TypeError, match="features must be floats, got int32"):
        graphs.gin_conv(graphs.from_edges([0], [0], 1), jnp.ones((1, 1), jnp.int32))
    with pytest.raises(TypeError, match="edge_weight must be floats, got bool"):
        graph_conv((3, 2), edge_weight=jnp.ones(4, bool))
