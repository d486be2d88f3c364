import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import HALVES, assert_within, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from pytrees import compiled_vjp
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS

pytestmark = [pytest.mark.quick, pytest.mark.newest]

NODES = 20


def draw_ends(degree: int, is_reversed: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns edges of which `degree` enter, or leave, node 0."""
    random = np.random.default_rng(seed)
    others = random.integers(0, NODES, degree + 60)
    hub = np.concatenate([np.zeros(degree, int), random.integers(1, NODES - 1, 60)])
    order = random.permutation(degree + 60)
    senders, receivers = (others[order], hub[order])[:: -1 if is_reversed else 1]
    return senders, receivers


def exact_softmax(logits: jax.Array, ids: Any) -> jax.Array:
    weights = jnp.exp(logits - jax.ops.segment_max(logits, ids, NODES)[ids])
    return weights / jax.ops.segment_sum(weights, ids, NODES)[ids]


def exact_attention(ends: Any, features: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    senders, receivers = ends
    logits = jax.nn.leaky_relu(left[senders] + right[receivers], 0.2)
    messages = exact_softmax(logits, receivers)[..., None] * features[senders]
    return jax.ops.segment_sum(messages, receivers, NODES)


@jax.jit
def exact_attention_and_gradients(ends: Any, cotangent: jax.Array, *inputs: jax.Array) -> list[list[jax.Array]]:
    """Returns the result and the gradients, and of each the sums of its terms' magnitudes."""
    attention = functools.partial(exact_attention, ends)
    features, left, right = inputs
    exact, pullback = jax.vjp(attention, *inputs)
    sizes, size_pullback = jax.vjp(attention, jnp.abs(features), left, right)
    feature_sizes, *_ = size_pullback(jnp.abs(cotangent))
    # A logit's gradient is its weight times a difference of two sums over the width.
    per_edge = exact_softmax(jax.nn.leaky_relu(left[ends[0]] + right[ends[1]], 0.2), ends[1])
    product = jnp.abs(cotangent)[ends[1]] * (jnp.abs(features)[ends[0]] + sizes[ends[1]])
    terms = per_edge * product.sum(-1)
    end_sizes = [jax.ops.segment_sum(terms, ids, NODES) for ids in ends]
    return [[exact, *pullback(cotangent)], [sizes, feature_sizes, *end_sizes]]


def in_float64(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.astype(np.float64) for x in arrays]


degrees = st.sampled_from([1, 2, 300, 1_024, 2_049, 13_161, 100_000])
kinds = st.sampled_from(["uniform", "signed", "equal", "of many sizes"])
checks = settings(max_examples=4, deadline=None, derandomize=True)


@pytest.mark.parametrize(("half", "rounding", "smallest"), [("float16", 2**-11, 2**-25), ("bfloat16", 2**-8, 0.0)])
def test_weights_of_a_hub_add_up_to_one_within_the_documented_bound(
    half: str, rounding: float, smallest: float
) -> None:
    degree = 50_000
    graph = graphs.from_edges(np.arange(degree) % 5, np.zeros(degree, int), 5, formats=("coo",))
    logits = np.stack([np.zeros(degree), np.random.default_rng(0).normal(size=degree)], 1)
    weights = jax.jit(graphs.edge_softmax)(graph, jnp.asarray(logits, half))
    errors = np.abs(np.asarray(weights, np.float64).sum(0) - 1)
    assert (errors <= rounding + degree * smallest + 1e-6).all()
    assert half != "float16" or errors[0] > 1e-3  # so that the bound is not said for nothing


def check_gat_attention(implementation: str, half: str, degree: int, is_reversed: bool, kind: str, seed: int) -> None:
    ends = draw_ends(degree, is_reversed, seed)
    graph = graphs.from_edges(*ends, NODES)
    features = draw(kind, (NODES, 2, 3), seed).astype(half)
    left, right = (draw("signed", (NODES, 2), seed + i).astype(half) for i in (1, 2))
    run = functools.partial(graphs.gat_attention, graph, implementation=implementation)
    cotangent = draw("signed", features.shape, seed + 3).astype(half)
    result, grads = compiled_vjp(run, cotangent, features, left, right)
    assert result.dtype == half and all(grad.dtype == half for grad in grads)
    with jax.enable_x64(True):
        inputs = in_float64(cotangent, features, left, right)
        exact, sizes = exact_attention_and_gradients(np.stack(ends), *inputs)
    for found, wanted, size in zip((result, *grads), exact, sizes, strict=True):
        assert_within(found, wanted, half, size, 2)


@pytest.mark.full
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@checks
@given(degree=degrees, is_reversed=st.booleans(), kind=kinds, seed=st.integers(0, 99))
def test_gat_attention_is_exact_and_so_is_its_gradient(
    implementation: str, half: str, degree: int, is_reversed: bool, kind: str, seed: int
) -> None:
    check_gat_attention(implementation, half, degree, is_reversed, kind, seed)


def test_gat_attention_of_a_hub_is_exact_and_so_is_its_gradient() -> None:
    check_gat_attention("chunked", "float16", 2_049, False, "signed", 0)


def test_softmax_over_some_edges() -> None:
    graph = graphs.from_edges([0, 1, 2, 2], [1, 1, 1, 0], 3)

    def results(logits: jax.Array, zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
        return graphs.edge_softmax(graph, logits, [0, 2]), graphs.edge_softmax(graph, zeros, norm_by="src")

    some, by_source = jax.jit(results)(np.log([1, 3]).astype(np.float32), np.zeros((4, 2, 1), np.float32))
    np.testing.assert_allclose(some, [0.25, 0.75], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(by_source)[:, 0, 0], [1, 1, 0.5, 0.5])


def test_softmax_saves_its_logits_only() -> None:
    graph = graphs.rand_graph(20, 3_000)
    logits = jax.ShapeDtypeStruct((3_000, 1), jnp.float16)
    pullback = jax.eval_shape(lambda x: jax.vjp(lambda x: graphs.edge_softmax(graph, x), x)[1], logits)
    saved = [x for x in jax.tree.leaves(pullback) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {(x.dtype, x.shape) for x in saved} <= {(logits.dtype, logits.shape)}


def test_masked_edges_have_weight_zero_and_a_gradient_of_zero() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 1, 0], 3)
    logits = np.array([0.0, -np.inf, -np.inf], np.float16)
    weights, (grad,) = compiled_vjp(lambda x: graphs.edge_softmax(graph, x), np.ones(3, np.float16), logits)
    assert weights.tolist() == [1, 0, 0]
    assert grad.tolist() == [0, 0, 0]


@pytest.mark.full
def test_dropout_of_attention() -> None:
    graph = graphs.rand_graph(2_000, 20_000)
    zeros, degrees = np.zeros((2_000, 2), np.float32), np.asarray(graph.in_degrees)

    def results(features: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def run(features: jax.Array, seed: int = 0) -> jax.Array:
            key = jax.random.key(seed)
            return graphs.gat_attention(graph, features, zeros, zeros, dropout_rate=0.4, dropout_key=key)

        return [run(features, seed) for seed in (0, 0, 1)], jax.grad(lambda x: run(x).sum())(features)

    each, grad = jax.jit(results)(np.ones((2_000, 2, 1), np.float32))
    dropped, again, other = map(np.asarray, each)
    assert (dropped == again).all()
    assert (dropped != other).any()
    assert (dropped[:, 0] != dropped[:, 1]).any()
    entered = dropped[degrees > 0]
    assert entered.mean() == pytest.approx(1, abs=0.02)
    assert entered.var() == pytest.approx((0.4 / 0.6 / degrees[degrees > 0]).mean(), rel=0.1)
    # Linear in the features: the backward pass drops what the forward pass dropped.
    np.testing.assert_allclose(np.asarray(grad).sum(), dropped.sum(), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("half", HALVES)
def test_autocast_stores_in_half_and_adds_in_float32(half: str) -> None:
    edges = 13_161
    graph = graphs.from_edges(np.zeros(edges, int), np.zeros(edges, int), 1)

    def run(h: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        whole = graph.with_nodes(h=h @ jnp.ones((1, 1))).with_edges(w=w)
        z = whole.nodes["h"][:, None]
        return (
            graphs.update_all(whole, fn.u_mul_e("h", "w", "m"), fn.sum("m", "x")).nodes["x"],
            graphs.apply_edges(whole, fn.u_dot_v("h", "h", "m")).edges["m"],
            graphs.edge_softmax(whole, w),
            graphs.gat_attention(whole, z, z[..., 0], z[..., 0]),
            graphs.segment_sum(w, graph.receivers, 1),
        )

    def loss(h: jax.Array, w: jax.Array) -> jax.Array:
        return sum(x.astype(jnp.float32).mean() for x in run(h, w)[:4])  # pyright: ignore[reportReturnType]

    def results(*ones: jax.Array) -> Any:
        gradient = functools.partial(jax.grad, argnums=(0, 1))
        in_half = lambda function: jt.autocast(function, jnp.dtype(half))
        return in_half(run)(*ones), gradient(in_half(loss))(*ones), gradient(loss)(*ones)

    ones = (np.ones((1, 1), np.float32), np.ones((edges, 1), np.float32))
    (*stored, segment), found, wanted = jax.jit(results)(*ones)
    assert [x.dtype for x in stored] == [half] * 4
    assert stored[0].item() == pytest.approx(edges, rel=float(jnp.finfo(half).eps))
    assert (segment.dtype, segment.tolist()) == ("float32", [[edges]])
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.05, atol=1e-3)
    exact = jt.TORCH_CUDA.replace(functions={"graph_storage": "float32"})
    in_float32 = jax.eval_shape(jt.autocast(run, jnp.dtype(half), rules=exact), *ones)
    assert {x.dtype for x in in_float32} == {jnp.dtype("float32")}


def test_wrong_arguments_are_named() -> None:
    graph = graphs.from_edges([0, 1], [1, 0], 2)
    z, end = jnp.ones((2, 1, 3)), jnp.ones((2, 1))
    pair: Any = (jnp.array([0]), jnp.array([1]))
    with pytest.raises(ValueError, match=r"right \[nodes, heads\], got shapes \(2, 1, 3\) and \(2, 2\)"):
        graphs.gat_attention(graph, z, end, jnp.ones((2, 2)))
    hetero = graphs.hetero_from_edges({("a", "b", "a"): ([0], [0])}, {"a": 2})
    with pytest.raises(TypeError, match=r"graph must be a Graph, a Block or a jraph\.GraphsTuple, got Hetero"):
        graphs.gat_attention(cast(Any, hetero), z, end, end)
    refusals = {
        "norm_by='in' must be one of 'dst', 'src'": lambda: graphs.edge_softmax(graph, jnp.ones(2), norm_by="in"),
        "edges must have one axis, got shape (2, 1)": lambda: graphs.edge_softmax(graph, jnp.ones(1), pair),
        "logits must have 2 rows, one for each of the edges": lambda: graphs.edge_softmax(graph, jnp.ones(3)),
        "TypeError: logits must be floats, got int32": lambda: graphs.edge_softmax(graph, jnp.ones(2, jnp.int32)),
        "dropout_rate=1.5 must be in [0, 1)": lambda: graphs.gat_attention(graph, z, end, end, dropout_rate=1.5),
        "dropout_rate=0.5 needs a random key": lambda: graphs.gat_attention(graph, z, end, end, dropout_rate=0.5),
    }
    assert_refused(refusals)
