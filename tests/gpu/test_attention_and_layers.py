"""Attention over edges in every implementation, and the layers, beside float64.

Float64 is computed on the CPU, by formulas with dense matrices [edges, nodes]. See `test_graph_operations` for how
far sums in any order may be off.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import assert_within, draw
from layer_cases import CASES, Edges, draw_inputs, edge_softmax, in_float64, parameters, small_graph, weights_of
from pytrees import compiled_vjp

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS

pytestmark = pytest.mark.gpu
NODES, EDGES, HUB, HEADS, WIDTH = 20, 3_000, 1_500, 2, 4
TYPICAL = [
    "graph both expanding, weighted",
    "sage mean expanding, weighted",
    "sage lstm, weighted",
    "gat residual, weighted",
    "gatv2 residual, weighted",
    "gin max",
    "relational basis, weighted",
    "transformer with edge features",
]


def draw_edges() -> tuple[np.ndarray, np.ndarray]:
    """Returns edges of which half enter node 0."""
    senders, receivers = np.random.default_rng(0).integers(0, NODES, (2, EDGES))
    receivers[:HUB] = 0
    return senders, receivers


def exact_attention(name: str, *arrays: Any) -> Any:
    """Returns the attention of these arrays, by its papers' formulas."""
    edges = Edges(*(np.eye(NODES)[ends] for ends in draw_edges()))
    if name == "gat":
        features, left, right = arrays
        logits = jax.nn.leaky_relu(edges.senders @ left + edges.receivers @ right, 0.2)
    else:
        features, right, vector = arrays
        ends = jnp.einsum("en,nhd->ehd", edges.senders, features) + jnp.einsum("en,nhd->ehd", edges.receivers, right)
        logits = (jax.nn.leaky_relu(ends, 0.2) * vector).sum(-1)
    weights = edge_softmax(jnp, edges, logits)
    messages = jnp.einsum("en,nhd->ehd", edges.senders, features) * weights[..., None]
    return jnp.einsum("en,ehd->nhd", edges.receivers, messages)


def draw_attention(name: str, dtype: str) -> list[jax.Array]:
    """Returns what the attention takes, and a cotangent; the attention's own numbers are best in float32."""
    rows, ends = (NODES, HEADS, WIDTH), (NODES, HEADS)
    shapes = ((rows, dtype), (ends, "float32"), (ends, "float32"))
    if name == "gatv2":
        shapes = ((rows, dtype), (rows, dtype), ((HEADS, WIDTH), "float32"))
    drawn = [draw("signed", shape, seed) / 2 for seed, (shape, _) in enumerate((*shapes, (rows, dtype)))]
    return [jnp.asarray(x, kind) for x, (_, kind) in zip(drawn, (*shapes, (rows, dtype)), strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_attention_is_within_bounds_of_float64(name: str, implementation: str, dtype: str, cpu: Any) -> None:
    """The weights' denominators, the sums of messages and, of gradients, those over the edges of a node: each is a
    sum of up to `HUB` float32 numbers and more, in any order, and so is each gradient's difference of two such sums."""
    *arrays, cotangent = draw_attention(name, dtype)
    attend = graphs.gat_attention if name == "gat" else graphs.gatv2_attention
    run = functools.partial(attend, graphs.from_edges(*draw_edges(), NODES), implementation=implementation)
    with jax.default_matmul_precision("float32"):
        result, grads = compiled_vjp(run, cotangent, *arrays)
    with jax.enable_x64(True), jax.default_device(cpu):
        given = [jnp.asarray(np.asarray(x, np.float64)) for x in (cotangent, *arrays)]
        exact = functools.partial(exact_attention, name)
        wanted, wanted_grads = jax.tree.map(np.asarray, compiled_vjp(exact, *given))
        # With all weights as they are and all terms positive; of logits' gradients, whose terms cancel, see below.
        sizes = np.asarray(jax.jit(exact)(jnp.abs(given[1]), *given[2:]))
    senders, receivers = draw_edges()
    share = 4 * (max(np.bincount(receivers).max(), np.bincount(senders).max()) + 8) * 2.0**-24
    assert result.dtype == dtype
    assert_within(result, wanted, dtype, np.maximum(sizes, abs(wanted)), 2, share)
    for grad, exact_grad in zip(grads, wanted_grads, strict=True):
        # A gradient's terms cancel: they are as large as the largest gradient, if not the sum's own.
        assert_within(grad, exact_grad, grad.dtype, np.abs(exact_grad).max(), 2, share)


def test_softmax_of_edges_adds_up_to_one() -> None:
    senders, receivers = draw_edges()
    logits = jnp.asarray(draw("of many sizes", (EDGES, HEADS), 3), jnp.float32)
    weights = jax.jit(graphs.edge_softmax)(graphs.from_edges(senders, receivers, NODES), logits)
    exact_logits = np.asarray(logits, np.float64)
    for node in range(NODES):
        mine = exact_logits[receivers == node]
        wanted = np.exp(mine - mine.max(0))
        # The exponential of a difference of up to 16 is off by up to 16 units, and the sum by one a term.
        share = (len(mine) + 32) * 2.0**-24
        assert_within(np.asarray(weights)[receivers == node], wanted / wanted.sum(0), "float32", wanted, 4, share)


def layer_call(name: str, graph: graphs.Graph) -> Callable[[Any, jax.Array, Any], jax.Array]:
    """Returns a layer as a function of its parameters, features and edge weights."""
    definition, _ = nnx.split(CASES[name].make(rngs=nnx.Rngs(0)))
    return lambda state, x, w: nnx.merge(definition, state)(graph, x, w)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", TYPICAL)
def test_layers_are_within_bounds_of_float64(name: str, dtype: str, cpu: Any) -> None:
    """In float32, and under autocast: each of up to 8 roundings in a row is an eps of the terms' magnitudes' sum."""
    case, (graph, edges, count) = CASES[name], small_graph()
    _, state = parameters(case.make(rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), state)
    x, w = draw_inputs(case, count, edges, dtype)
    p, exact_x, exact_w = in_float64(state), np.asarray(x, np.float64), weights_of(w, edges)
    exact, sizes = (part(p, edges, exact_x, exact_w) for part in (functools.partial(case.exact, np), case.sizes))
    cotangent = np.random.default_rng(9).normal(size=exact.shape).astype(np.float32)
    call = layer_call(name, graph)
    call = call if dtype == "float32" else jt.autocast(call, dtype)

    def loss(state: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = call(state, x, w)
        return jnp.sum(result.astype(jnp.float32) * cotangent), result

    with jax.default_matmul_precision("float32"):
        (_, result), (_, grad) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(state, x)
    with jax.enable_x64(True), jax.default_device(cpu):

        def exact_loss(x: jax.Array) -> jax.Array:
            return (case.exact(jnp, p, edges, x, exact_w) * cotangent.astype(np.float64)).sum()

        exact_grad = np.asarray(jax.jit(jax.grad(exact_loss))(jnp.asarray(exact_x)))
    eps = float(jnp.finfo(dtype).eps)
    assert result.dtype == dtype
    assert (np.abs(np.asarray(result, np.float64) - exact) <= max(8 * eps, 1e-5) * sizes).all()
    # Leaky units of GATv2 are others after a rounding.
    tolerance = 32 * eps if "gatv2" in name else 8 * eps
    worst = np.abs(np.asarray(grad, np.float64) - exact_grad).max() / np.abs(exact_grad).max()
    assert worst <= max(tolerance, 1e-4)
