"""Results of every kernel and their derivatives of both orders: those of plain jax, with whole arrays, in float64.

The losses are curved in the results: then a second derivative needs that of a kernel's own result, too.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import exact_messages, reduce_in_jax

from jmp_train import graphs
from jmp_train.graphs import fn, kernels
from jmp_train.graphs.kernels import chunks, edge_reads, mapped_sum

pytestmark = pytest.mark.quick

NODES, EDGES, HEADS, WIDTH = 12, 180, 2, 3
REDUCTIONS = ("sum", "mean", "max", "min", "var", "std", "softmax")
Arrays = list[jax.Array]
# A kernel of an implementation, a graph and arrays, and what plain jax makes of the arrays.
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]
ROWS, ENDS, PER_EDGE = (NODES, HEADS, WIDTH), (NODES, HEADS), (EDGES,)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_ELEMENTS", 600)
    monkeypatch.setattr(edge_reads, "CPU_ELEMENTS", 600)
    monkeypatch.setattr(mapped_sum, "XLA_ELEMENTS", 600)


def ends() -> tuple[np.ndarray, np.ndarray]:
    """Returns edges of which 50 enter a node and none the last one; the others have at least 3."""
    senders = np.random.default_rng(0).integers(0, NODES, EDGES)
    receivers = np.arange(EDGES) * 5 % (NODES - 1)
    receivers[:50] = 3
    return senders, receivers


SENDERS, RECEIVERS = ends()


def graph_of(formats: tuple[str, ...]) -> graphs.Graph:
    return graphs.from_edges(SENDERS, RECEIVERS, NODES, formats=formats)


def plain(name: str, messages: jax.Array) -> jax.Array:
    return reduce_in_jax(messages, RECEIVERS, NODES, name)


def built_in(message: str, left: tuple[int, ...], *right: tuple[int, ...], names: Any = REDUCTIONS) -> Case:
    """Returns all reductions of a message of `fn`."""
    made = getattr(fn, message)(*"lr"[: 1 + len(right)], "m")

    def run(implementation: str, graph: graphs.Graph, *arrays: jax.Array) -> Any:
        for (end, name), x in zip(made.operands, arrays, strict=True):
            graph = graph.with_edges(**{name: x}) if end == "e" else graph.with_nodes(**{name: x})
        reductions = [getattr(fn, name)("m", name) for name in names]
        found = graphs.update_all(graph, made, reductions, implementation=implementation).nodes
        return [found[name] for name in names]

    def wanted(*arrays: jax.Array) -> Any:
        features = dict(zip(made.operands, arrays, strict=True))
        messages = exact_messages(made, {"u": SENDERS, "v": RECEIVERS}, features, jnp)
        return [plain(name, messages) for name in names]

    return run, wanted, (left, *right)


def of_one_edge(names: Any = REDUCTIONS) -> Case:
    """Returns all reductions of a function of one edge."""

    def message(source: Any, target: Any, edge: Any, weight: jax.Array) -> jax.Array:
        return jnp.tanh((source * edge) @ weight) * target

    def run(implementation: str, graph: graphs.Graph, x: jax.Array, e: jax.Array, weight: jax.Array) -> Any:
        graph = graph.with_nodes(x=x).with_edges(e=e)
        of_edge = graphs.per_edge(lambda edge: {"m": message(edge.src["x"], edge.dst["x"], edge.data["e"], weight)})
        reductions = [getattr(fn, name)("m", name) for name in names]
        found = graphs.update_all(graph, of_edge, reductions, implementation=implementation).nodes
        return [found[name] for name in names]

    def wanted(x: jax.Array, e: jax.Array, weight: jax.Array) -> Any:
        messages = message(x[SENDERS], x[RECEIVERS], e, weight)
        return [plain(name, messages) for name in names]

    return run, wanted, ((NODES, WIDTH), (EDGES, WIDTH), (WIDTH, WIDTH))


def dot() -> Case:
    def run(implementation: str, graph: graphs.Graph, x: jax.Array, y: jax.Array) -> Any:
        graph = graph.with_nodes(x=x, y=y)
        return graphs.apply_edges(graph, fn.u_dot_v("x", "y", "m"), implementation=implementation).edges["m"]

    return run, lambda x, y: (x[SENDERS] * y[RECEIVERS]).sum(-1, keepdims=True), (ROWS, ROWS)


def attended(logits: jax.Array, values: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns values [edges, heads, ...], weighted by softmaxes of logits [edges, heads] times factors."""
    powers = jnp.exp(logits - plain("max", logits)[RECEIVERS])
    weights = powers / plain("sum", powers)[RECEIVERS] * factor
    return plain("sum", weights[..., None] * values)


def dropped() -> Any:
    return kernels.edge_dropout(0.4, jax.random.key(1), HEADS)


def kept() -> jax.Array:
    return dropped().of_edges(jnp.arange(EDGES)).astype("float64")


DROPPED: Any = {"dropout_rate": 0.4, "dropout_key": jax.random.key(1), "negative_slope": 0.3}


def gat(*, has_all: bool) -> Case:
    def run(implementation: str, graph: graphs.Graph, *arrays: jax.Array) -> jax.Array:
        x, left, right, *weight = arrays
        options: Any = {"edge_weight": weight[0], **DROPPED} if has_all else {"negative_slope": 0.3}
        return graphs.gat_attention(graph, x, left, right, implementation=implementation, **options)

    def wanted(x: jax.Array, left: jax.Array, right: jax.Array, *weight: jax.Array) -> jax.Array:
        logits = jax.nn.leaky_relu(left[SENDERS] + right[RECEIVERS], 0.3)
        return attended(logits, x[SENDERS], weight[0][:, None] * kept() if has_all else jnp.ones(()))

    return run, wanted, (ROWS, ENDS, ENDS, *([PER_EDGE] if has_all else []))


def gatv2(*, has_all: bool) -> Case:
    def run(implementation: str, graph: graphs.Graph, *arrays: jax.Array) -> jax.Array:
        left, right, shared, *weight = arrays
        options: Any = {"edge_weight": weight[0], **DROPPED} if has_all else {"negative_slope": 0.3}
        return graphs.gatv2_attention(graph, left, right, shared, implementation=implementation, **options)

    def wanted(left: jax.Array, right: jax.Array, attention: jax.Array, *weight: jax.Array) -> Any:
        both = jax.nn.leaky_relu(left[SENDERS] + right[RECEIVERS], 0.3)
        factor = weight[0][:, None] * kept() if has_all else jnp.ones(())
        return attended((attention * both).sum(-1), left[SENDERS], factor)

    return run, wanted, (ROWS, ROWS, (HEADS, WIDTH), *([PER_EDGE] if has_all else []))


def transformer() -> Case:
    """Returns the layer with edge features and dropout."""

    def run(implementation: str, graph: graphs.Graph, x: jax.Array, *arrays: jax.Array) -> jax.Array:
        *weights, features, feature_weight = arrays
        options: Any = {"edge_features": features, "edge_feature_weight": feature_weight, "num_heads": HEADS}
        options |= {"attention_dropout": 0.4, "dropout_key": jax.random.key(1)}
        return graphs.transformer_conv(graph, x, *weights, implementation=implementation, **options)

    def wanted(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        *weights, features, feature_weight = arrays
        query, key, value = ((x @ weight).reshape(ROWS) for weight in weights)
        of_edges = (features @ feature_weight).reshape(EDGES, HEADS, WIDTH)
        logits = (query[RECEIVERS] * (key[SENDERS] + of_edges)).sum(-1) / WIDTH**0.5
        return attended(logits, value[SENDERS] + of_edges, kept()).reshape(NODES, -1)

    width = HEADS * WIDTH
    return run, wanted, ((NODES, 4), *[(4, width)] * 3, (EDGES, 3), (3, width))


def dot_attention(*, has_all: bool) -> Case:
    def run(implementation: str, graph: graphs.Graph, *arrays: jax.Array) -> Any:
        query, key, value, features, edge_query = (*arrays, None, None)[:5]
        inputs = kernels.AttentionInputs((key, value), (query, edge_query), features)
        dropout = dropped() if has_all else None
        found = kernels.ATTENTION(implementation, graph.connections, kernels.DotAttention(0.7), dropout, inputs)
        return jax.tree.leaves(found)

    def wanted(query: jax.Array, key: jax.Array, value: jax.Array, *of_edges: jax.Array) -> Any:
        logits = (query[RECEIVERS] * key[SENDERS]).sum(-1)
        factor, more = jnp.ones(()), []
        if has_all:
            features, edge_query = of_edges
            logits += (edge_query[RECEIVERS] * features[:, None]).sum(-1)
            factor = kept()
            more = [attended(0.7 * logits, jnp.repeat(features[:, None], HEADS, 1), factor)]
        total = plain("sum", jnp.exp(0.7 * logits))
        log_sum = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)), 0)
        return [attended(0.7 * logits, value[SENDERS], factor), *more, log_sum]

    return run, wanted, (ROWS, ROWS, ROWS, *([(EDGES, 4), (NODES, HEADS, 4)] if has_all else []))


def mapped(kind: str) -> Case:
    """Returns sums of senders' rows times matrices of edges; the arrays are rows, edge weights and matrices."""
    types = jnp.asarray(np.arange(EDGES) * 7 % 4, jnp.int32)
    shapes = {
        "mixed": ((4, WIDTH, 2),),
        "mixed, bases": ((2, WIDTH, 2), (4, 2)),
        "blocks": ((4, 3, 1, 2),),
        "network": ((4, WIDTH * 2), (EDGES, 4)),
    }[kind]

    def network(features: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.tanh(features @ kernel)

    def run(implementation: str, graph: graphs.Graph, rows: jax.Array, weight: jax.Array, *shared: Any) -> Any:
        options: Any = {"edge_weight": weight, "implementation": implementation}
        if kind == "network":
            by_network = lambda kernel, features: network(features, kernel)
            return graphs.nn_conv(graph, rows, shared[1], by_network, shared[0], 2, aggregator="sum", **options)
        return graphs.rel_graph_conv(graph, rows, types, *shared, **options)

    def wanted(rows: jax.Array, weight: jax.Array, *shared: jax.Array) -> Any:
        sent = rows[SENDERS] * weight[:, None]
        if kind == "network":
            matrices = network(shared[1], shared[0]).reshape(EDGES, WIDTH, 2)
        elif kind == "blocks":
            return plain("sum", jnp.einsum("eb,ebo->ebo", sent, shared[0][types][:, :, 0]).reshape(EDGES, -1))
        else:
            matrices = (jnp.einsum("tb,bio->tio", shared[1], shared[0]) if len(shared) == 2 else shared[0])[types]
        return plain("sum", jnp.einsum("ei,eio->eo", sent, matrices))

    return run, wanted, ((NODES, WIDTH), PER_EDGE, *shapes)


def by_blocks(name: Any) -> Case:
    def message(x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tanh((x + y) @ weight)

    def run(implementation: str, graph: graphs.Graph, x: jax.Array, weight: jax.Array) -> Any:
        del implementation
        assert graph.connections.neighbors is not None
        messages = lambda senders, receivers: message(x[senders], x[receivers], weight)
        return kernels.reduce_blocks(graph.connections.neighbors.by_target, messages, name)

    return run, lambda x, w: plain(name, message(x[SENDERS], x[RECEIVERS], w)), ((NODES, WIDTH), (WIDTH, WIDTH))


EXTREMES = ("max", "min")
CASES: dict[str, Case] = {
    "extremes": built_in("copy_u", ROWS, names=EXTREMES),
    "copy": built_in("copy_u", ROWS),
    "a weight for each head": built_in("u_mul_e", ROWS, (EDGES, HEADS, 1), names=("mean", "max", "std")),
    "term of both ends": built_in("u_mul_v", ROWS, ROWS, names=("min", "var", "softmax")),
    "term of edges": built_in("v_dot_e", (NODES, 10), (EDGES, 10), names=("sum", "max")),
    "extremes of one edge": of_one_edge(EXTREMES),
    "function of one edge": of_one_edge(("mean", "std", "softmax")),
    "numbers": built_in("u_mul_e", (NODES,), PER_EDGE, names=("mean", "var")),
    "broadcast rows": built_in("u_sub_v", (NODES, 4, 1, 3), (NODES, 1, 2, 1), names=("sum", "softmax")),
    "more axes at nodes": built_in("u_dot_e", ROWS, (EDGES, 1, WIDTH), names=("max",)),
    "more axes at edges": built_in("u_add_e", (NODES,), (EDGES, 2), names=("std",)),
    "of edges alone": built_in("copy_e", (EDGES, 12), names=("min",)),
    "dot": dot(),
    "gat": gat(has_all=False),
    "gat, dropout and weights": gat(has_all=True),
    "gatv2": gatv2(has_all=False),
    "gatv2, dropout and weights": gatv2(has_all=True),
    "dot attention": dot_attention(has_all=False),
    "dot attention, dropout and edge features": dot_attention(has_all=True),
    "transformer, dropout and edge features": transformer(),
    **{f"mapped, {kind}": mapped(kind) for kind in ("mixed", "mixed, bases", "blocks", "network")},
    **{f"blocks, {name}": by_blocks(name) for name in ("sum", "mean", "max")},
}
QUICK = ("extremes", "mapped, mixed, bases")  # what all edges share has a gradient of all chunks
FORWARD = ("gat", "dot attention", "copy", "dot")
WITHOUT_PLACES = ("extremes", "gat")
BY_XLA = ("copy", "function of one edge", "dot", "gatv2", "dot attention, dropout and edge features", "mapped, blocks")


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def gradient_of(function: Callable[..., Any], arrays: Arrays) -> Callable[[Arrays], Arrays]:
    shapes = jax.tree.leaves(jax.eval_shape(function, *arrays))
    weights = [drawn(40 + i, *x.shape) for i, x in enumerate(shapes)]

    def loss(arrays: Arrays) -> jax.Array:
        results = jax.tree.leaves(function(*arrays))
        return sum(((w * x**2).sum() for w, x in zip(weights, results, strict=True)), jnp.zeros(()))

    return jax.grad(loss)


def reverse(gradient: Callable[[Arrays], Arrays], arrays: Arrays, directions: Arrays) -> tuple[Arrays, Arrays]:
    """Returns the gradient, and the product of the Hessian and a direction, as a gradient of a gradient."""

    def along(arrays: Arrays) -> tuple[jax.Array, Arrays]:
        gradients = gradient(arrays)
        return sum(map(jnp.vdot, gradients, directions), jnp.zeros(())), gradients

    product, gradients = jax.grad(along, has_aux=True)(arrays)
    return gradients, product


def forward(gradient: Callable[[Arrays], Arrays], arrays: Arrays, directions: Arrays) -> tuple[Arrays, Arrays]:
    """Returns the same, the product as the derivative of a gradient."""
    return jax.jvp(gradient, (arrays,), (directions,))


def check(
    name: str, implementation: str, formats: tuple[str, ...] = ("coo", "csr"), product: Callable[..., Any] = reverse
) -> None:
    run, wanted, shapes = CASES[name]
    with jax.enable_x64(True):
        arrays, directions = ([drawn(first + i, *shape) for i, shape in enumerate(shapes)] for first in (0, 20))
        if name == "extremes":  # of few numbers, so that there are ties
            arrays = [jnp.round(x) for x in arrays]

        def derivatives(function: Any, product: Any, arrays: Arrays) -> Any:
            return function(*arrays), product(gradient_of(function, arrays), arrays, directions)

        exact = jax.jit(functools.partial(derivatives, wanted, reverse))(arrays)
        kernel = functools.partial(run, implementation, graph_of(formats))
        found = jax.jit(functools.partial(derivatives, kernel, product))(arrays)
        for place, (x, y) in enumerate(zip(*map(jax.tree.leaves, (found, exact)), strict=True)):
            assert x.dtype == y.dtype == "float64" and np.abs(y).max() > 0.1
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * np.abs(y).max(), err_msg=f"array {place}")


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in CASES])
def test_results_and_both_gradients_in_chunks(name: str) -> None:
    check(name, "chunked")


@pytest.mark.full
@pytest.mark.parametrize("name", WITHOUT_PLACES)
def test_edges_without_places(name: str) -> None:
    check(name, "chunked", ("csr",))


@pytest.mark.full
@pytest.mark.parametrize("product", [reverse, forward])
@pytest.mark.parametrize("name", BY_XLA)
def test_whole_arrays_of_edges(name: str, product: Callable[..., Arrays]) -> None:
    check(name, "xla", product=product)


@pytest.mark.parametrize(
    "name", [x if x == "copy" else pytest.param(x, marks=pytest.mark.full) for x in ("gatv2", *FORWARD)]
)
def test_forward_mode_of_gradients_in_chunks_is_right_or_refused(name: str) -> None:
    """Gradients of attention are plain code; those of sums are sums with gradients of their own."""
    refused = pytest.raises(TypeError, match="forward-mode")
    with refused if name in ("copy", "dot") else contextlib.nullcontext():
        check(name, "chunked", product=forward)


def of_types() -> Case:
    """Returns the mean over edges that are there 40 times, of senders' rows times matrices of edge types."""
    types = np.arange(EDGES) % 4

    def run(implementation: str, graph: graphs.Graph, x: jax.Array, weight: jax.Array) -> jax.Array:
        many = np.tile(types, graph.num_edges // EDGES)
        return graphs.rel_graph_conv(graph, x, many, weight, implementation=implementation) / 40

    def wanted(x: jax.Array, weight: jax.Array) -> jax.Array:
        return plain("sum", jnp.einsum("ei,eio->eo", x[SENDERS], weight[types]))

    return run, wanted, ((NODES, WIDTH), (4, WIDTH, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", ["gat", "gatv2", "mapped"])
def test_second_derivatives_in_half_precision_are_those_of_float32_sums(name: str) -> None:
    """Edges that are there 40 times share their weight, so that results are those of one; 2,000 edges enter a node."""
    run, wanted, shapes = of_types() if name == "mapped" else CASES[name]
    random, dtype = np.random.default_rng(0), "float16"
    arrays, directions = ([random.uniform(0.5, 1, x).astype(dtype) for x in shapes] for _ in range(2))
    graph = graphs.from_edges(np.tile(SENDERS, 40), np.tile(RECEIVERS, 40), NODES)

    def product(function: Callable[..., Any], arrays: Arrays, directions: Arrays) -> Arrays:
        wide = "float64" if arrays[0].dtype == "float64" else "float32"

        def loss(arrays: Arrays) -> jax.Array:
            return (function(*arrays).astype(wide) ** 2).mean()

        def along(arrays: Arrays) -> jax.Array:
            pairs = zip(jax.grad(loss)(arrays), directions, strict=True)
            return jnp.stack([(x.astype(wide) * y.astype(wide)).sum() for x, y in pairs]).sum()

        return jax.grad(along)(arrays)

    with jax.enable_x64(True):
        wide = [[jnp.asarray(x, "float64") for x in each] for each in (arrays, directions)]
        exact = jax.jit(functools.partial(product, wanted))(*wide)
    found = jax.jit(functools.partial(product, functools.partial(run, "chunked", graph)))(arrays, directions)
    largest = max(np.abs(x).max() for x in exact)
    for x, y in zip(found, exact, strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(np.asarray(x, "float64"), y, rtol=0, atol=16 * largest * float(jnp.finfo(dtype).eps))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["gat", "gatv2", "copy", "dot", *(x for x in CASES if x.startswith(("mapped", "tran")))]
)
def test_under_vmap(name: str) -> None:
    run, _, shapes = CASES[name]
    kernel = functools.partial(run, "chunked", graph_of(("coo", "csr")))
    with jax.enable_x64(True):
        first, *others = (drawn(i, *shape) for i, shape in enumerate(shapes))
        both = jax.jit(jax.vmap(lambda x: kernel(x, *others)))(jnp.stack([first, 2 * first]))
        wanted = jax.jit(kernel)(2 * first, *others)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=1e-12, atol=1e-12), both, wanted)
