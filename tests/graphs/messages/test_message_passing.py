import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import (
    HALVES,
    MESSAGES,
    ONE_HALF,
    REDUCERS,
    assert_within,
    draw,
    exact_messages,
    exact_reduction,
    gradient_magnitudes,
    magnitude_message,
    make_message,
    reduce_in_jax,
    reduction_magnitudes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pytrees import compiled_vjp

from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = [pytest.mark.quick, pytest.mark.newest]

NODES, EDGES = 9, 40
NONLINEAR = ("var", "std", "softmax")
CHUNKED = (fn.copy_u, fn.u_mul_e, fn.e_mul_u)
# After the node or edge axis: of the left feature, of the right one.
SHAPES = [((), ()), ((), (8,)), ((4, 8), (4, 1)), ((8,), (4, 8))]
DOT_SHAPES = [((), ()), ((8,), (8,)), ((8,), (4, 8)), ((4, 8), (1, 8))]


NOT_APART = 'the graph was made with formats=("csr",), which does not store single edges: add "coo" to formats'
NEED_PLACES: dict[str, Any] = {
    "u_dot_v": lambda graph: graphs.apply_edges(graph, fn.u_dot_v("h", "h", "s")),
    "argmax": lambda graph: graphs.update_all(graph, fn.copy_u("h", "m"), fn.argmax("m", "x")),
    "argmax of one edge": lambda graph: graphs.update_all(
        graph, graphs.per_edge(lambda edge: {"m": edge.src["h"]}), fn.argmax("m", "x")
    ),
    "edge_weight": lambda graph: graphs.gat_attention(
        graph, graph.nodes["h"][:, None], *2 * [jnp.ones((3, 1))], edge_weight=jnp.ones(3), implementation="chunked"
    ),
    "types": lambda graph: graphs.rel_graph_conv(graph, graph.nodes["h"], [0, 1, 0], jnp.ones((2, 2, 2))),
    "edge_features": lambda graph: graphs.gine_conv(graph, graph.nodes["h"], jnp.ones((3, 2)), lambda x: x),
    "some edges": lambda graph: graphs.send_and_recv(graph, [0], fn.copy_u("h", "m"), fn.sum("m", "x")),
    "edge_softmax": lambda graph: graphs.edge_softmax(graph, jnp.ones(3)),
    "senders": lambda graph: graph.senders,
    "with_edges": lambda graph: graph.with_edges(w=jnp.ones(3)),
    "edges": lambda _: graphs.from_edges([0], [1], 2, edges={"w": jnp.ones(1)}, formats=("csr",)),
    "edge_dropout": lambda graph: graphs.appnp_conv(
        graph, graph.nodes["h"], edge_dropout=0.5, dropout_key=jax.random.key(0)
    ),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", NEED_PLACES)
def test_graphs_that_keep_no_edge_apart_say_which_format_is_wanted(name: str) -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 1], 3, nodes={"h": jnp.ones((3, 2))}, formats=("csr",))
    with pytest.raises(ValueError, match=re.escape(NOT_APART)):
        NEED_PLACES[name](graph)


def ends_of_edges() -> tuple[np.ndarray, np.ndarray]:
    """Returns ends with self-loops and multiple edges; nothing enters the last node."""
    random = np.random.default_rng(0)
    return random.integers(0, NODES, EDGES), random.integers(0, NODES - 1, EDGES)


def with_features(
    message: fn.Message, dtype: Any, shapes: tuple[tuple[int, ...], ...]
) -> tuple[graphs.Graph, dict[tuple[str, str], np.ndarray]]:
    """Returns a graph with the features that a message reads, and these in float64."""
    senders, receivers = ends_of_edges()
    features, nodes, edges = {}, {}, {}
    for seed, ((end, field), shape) in enumerate(zip(message.operands, shapes, strict=False)):
        rows = EDGES if end == "e" else NODES
        array = jnp.asarray(draw("signed", (rows, *shape), seed), dtype)
        (edges if end == "e" else nodes)[field] = array
        features[end, field] = np.asarray(array, np.float64)
    return graphs.from_edges(senders, receivers, NODES, nodes, edges), features


def shapes_of(message: fn.Message) -> list[tuple[tuple[int, ...], ...]]:
    if message.operation == "copy":
        return [((),), ((8,),), ((4, 8),)]
    return DOT_SHAPES if message.operation == "dot" else SHAPES


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("message", [make_message(f) for f in MESSAGES], ids=lambda m: m.name)
def test_equal_to_float64(message: fn.Message, dtype: str) -> None:
    senders, receivers = ends_of_edges()
    ends = {"u": senders, "v": receivers}
    for shapes in shapes_of(message):
        graph, features = with_features(message, dtype, shapes)
        messages = exact_messages(message, ends, features)
        sizes = exact_messages(magnitude_message(message), ends, {key: np.abs(x) for key, x in features.items()})
        reductions = [reducer("m", reducer("m", "x").reduction) for reducer in REDUCERS]

        @jax.jit
        def run(graph: graphs.Graph) -> Any:
            nodes = graphs.update_all(graph, message, reductions).nodes  # noqa: B023
            return graphs.apply_edges(graph, message).edges["m"], nodes

        found, results = run(graph)
        assert (found.dtype, found.shape) == (dtype, messages.shape)
        assert_within(found, messages, dtype, sizes, 1)
        for name in (reduce.out for reduce in reductions):
            exact = exact_reduction(messages, receivers, NODES, name)
            assert (results[name].dtype, results[name].shape) == (dtype, exact.shape)
            magnitudes = reduction_magnitudes(sizes, receivers, NODES, name)
            assert_within(results[name], exact, dtype, magnitudes, 1)


@pytest.mark.full
@pytest.mark.parametrize("place", range(len(MESSAGES)), ids=lambda i: make_message(MESSAGES[i]).name)
def test_user_defined_functions_equal_built_ins(place: int) -> None:
    message, reducer = make_message(MESSAGES[place]), REDUCERS[place % len(REDUCERS)]
    graph, _ = with_features(message, "float32", shapes_of(message)[-1])
    reduction = reducer("m", "x").reduction

    def send(edges: graphs.EdgeBatch) -> dict[str, jax.Array]:
        of_ends = {"u": edges.src, "v": edges.dst, "e": edges.data}
        features = {(end, field): of_ends[end][field] for end, field in message.operands}
        return {"m": exact_messages(message, {"u": slice(None), "v": slice(None)}, features, xp=jnp)}

    def receive(nodes: graphs.NodeBatch) -> dict[str, jax.Array]:
        mailbox = nodes.mailbox["m"]
        if reduction == "softmax":
            return {"x": (jax.nn.softmax(mailbox, axis=1) * mailbox).sum(1)}
        return {"x": getattr(jnp, reduction)(mailbox, axis=1)}

    wanted = graphs.update_all(graph, message, reducer("m", "x")).nodes["x"]
    for m in (message, send):
        for r in (reducer("m", "x"), receive):
            found = graphs.update_all(graph, m, r).nodes["x"]
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        graphs.apply_edges(graph, send).edges["m"], graphs.apply_edges(graph, message).edges["m"], rtol=1e-6, atol=1e-6
    )


def test_mixed_dtypes_have_a_result_that_holds_both() -> None:
    pairs = [("float16", "float32"), ("float16", "bfloat16"), ("float16", "int32"), ("int32", "int32")]
    message = fn.u_mul_e("l", "r", "m")
    features = [(np.full(2, 3, jnp.dtype(left)), np.full(3, 2, jnp.dtype(right))) for left, right in pairs]

    def passed(left: jax.Array, right: jax.Array, reduce: fn.Reduce) -> jax.Array:
        graph = graphs.from_edges([0, 1, 1], [1, 0, 0], 2, {"l": left}, {"r": right})
        return graphs.update_all(graph, message, reduce).nodes["x"]

    def results(features: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [*(passed(*pair, fn.sum("m", "x")) for pair in features), passed(*features[-1], fn.mean("m", "x"))]

    *sums, mean = jax.jit(results)(features)
    for found, dtype in zip(sums, ("float32", "float32", "float16", "int32"), strict=True):
        assert (found.dtype, found.tolist()) == (dtype, [12, 6])
    assert (mean.dtype, mean.tolist()) == ("float32", [6, 6])


@functools.cache
def exact_vjp(message: fn.Message, reduction: str) -> Any:
    """Returns a program that returns the result and the gradients, and these of magnitudes, of 20 nodes."""

    def messages_of(message: fn.Message, ends: jax.Array, *operands: jax.Array) -> jax.Array:
        fields = dict(zip(message.operands, operands, strict=True))
        return exact_messages(message, {"u": ends[0], "v": ends[1]}, fields, xp=jnp)

    def run_both(ends: jax.Array, cotangent: jax.Array, *operands: jax.Array) -> Any:
        def reduce(messages: jax.Array) -> jax.Array:
            return reduce_in_jax(messages, ends[1], 20, reduction)

        messages, to_operands = jax.vjp(functools.partial(messages_of, message, ends), *operands)
        result, to_messages = jax.vjp(reduce, messages)
        magnitudes = map(jnp.abs, operands)
        sizes, to_sizes = jax.vjp(functools.partial(messages_of, magnitude_message(message), ends), *magnitudes)
        if reduction in NONLINEAR:
            size = jnp.zeros(())
            of_sizes = gradient_magnitudes(messages, sizes, ends[1], 20, reduction, jnp.abs(cotangent))
        else:
            size, of_reduction = jax.vjp(reduce, sizes)
            (of_sizes,) = of_reduction(jnp.abs(cotangent))
        return (result, to_operands(*to_messages(cotangent))), (size, to_sizes(of_sizes)), sizes

    return jax.jit(run_both)


degrees = st.sampled_from([1, 2, 300, 1_024, 1_025, 2_049, 13_161, 100_000])
kinds = st.sampled_from(["uniform", "signed", "equal", "of many sizes"])


@pytest.mark.full
@pytest.mark.parametrize("half", ONE_HALF)
@pytest.mark.parametrize(
    ("reducer", "implementation"),
    [
        *((reducer, "xla") for reducer in REDUCERS),
        *((reducer, "chunked") for reducer in (fn.sum, fn.mean, fn.var, fn.std, fn.softmax)),
    ],
    ids=lambda x: getattr(x, "reduction", x),
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    function=st.sampled_from(MESSAGES), degree=degrees, is_reversed=st.booleans(), kind=kinds, seed=st.integers(0, 99)
)
def test_exact_at_every_degree_and_so_is_the_gradient(
    reducer: Any, implementation: str, half: str, function: Any, degree: int, is_reversed: bool, kind: str, seed: int
) -> None:
    """A hub that `degree` edges enter, or leave, and other nodes; against float64 by plain jax."""
    if implementation == "chunked":
        function = CHUNKED[seed % len(CHUNKED)]
    message, reduce = make_message(function), reducer("m", "x")
    exact_ties = message.operation in ("copy", "mul", "add", "sub") and kind != "of many sizes"
    random = np.random.default_rng(seed)
    others = random.integers(0, 20, degree + 60)
    hub = np.concatenate([np.zeros(degree, int), random.integers(1, 19, 60)])
    order = random.permutation(degree + 60)
    senders, receivers = (others[order], hub[order])[:: -1 if is_reversed else 1]
    operands = [
        draw(kind, (len(hub) if end == "e" else 20, 2), seed + i).astype(half)
        for i, (end, _) in enumerate(message.operands)
    ]
    graph = graphs.from_edges(senders, receivers, 20)

    def ours(*operands: jax.Array) -> jax.Array:
        nodes, edges = {}, {}
        for (end, field), x in zip(message.operands, operands, strict=True):
            (edges if end == "e" else nodes)[field] = x
        whole = dataclasses.replace(graph, nodes=nodes, edges=edges)
        return graphs.update_all(whole, message, reduce, implementation=implementation).nodes["x"]

    cotangent = draw("signed", (20, 1 if message.operation == "dot" else 2), seed + 7).astype(half)
    result, grads = compiled_vjp(ours, cotangent, *operands)
    assert result.dtype == half and all(grad.dtype == half for grad in grads)
    inputs = [x.astype(np.float64) for x in (cotangent, *operands)]
    with jax.enable_x64(True):
        run = exact_vjp(message, reduce.reduction)
        (exact, exact_grads), (sizes, size_grads), of_messages = run(jnp.array([senders, receivers]), *inputs)
    if reduce.reduction in NONLINEAR:
        sizes = reduction_magnitudes(np.asarray(of_messages), receivers, 20, reduce.reduction)
    assert_within(result, exact, half, sizes, 1)
    if reduce.reduction not in ("max", "min") or exact_ties:
        for grad, wanted, size in zip(grads, exact_grads, size_grads, strict=True):
            if reduce.reduction in ("max", "min"):  # another edge is the largest of the magnitudes
                size = np.abs(wanted).max()
            assert_within(grad, wanted, half, size, 1)


def test_integers_are_added_and_multiplied_in_32_bits() -> None:
    star = graphs.from_edges(np.arange(1, 301), np.zeros(300, int), 301)
    copied, squares = fn.copy_u("h", "m"), fn.u_mul_v("h", "h", "m")
    passes = [(copied, fn.sum), (copied, fn.mean), (squares, fn.sum), (squares, fn.max), (copied, fn.max)]

    def results(h: jax.Array) -> list[jax.Array]:
        whole = star.with_nodes(h=h)
        return [graphs.update_all(whole, message, reducer("m", "x")).nodes["x"][0] for message, reducer in passes]

    run = jax.jit(results)
    for dtype, value in (("int8", 100), ("uint8", 200), ("bool", 1)):
        found = run(np.full(301, value, dtype))
        assert [x.item() for x in found] == [300 * value, value, 300 * value**2, value**2, value]
        assert found[-1].dtype == dtype


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int8", "bool"])
def test_differences_of_small_integers_have_a_sign(dtype: str) -> None:
    pair = graphs.from_edges([0, 1], [1, 0], 2, nodes={"h": np.array([0, 1], dtype)})
    messages = graphs.apply_edges(pair, fn.u_sub_v("h", "h", "m")).edges["m"]
    assert messages.tolist() == [-1, 1] and messages.dtype == "int32"
    least = graphs.update_all(pair, fn.u_sub_v("h", "h", "m"), fn.min("m", "x")).nodes["x"]
    assert least.tolist() == [1, -1] and least.dtype == "int32"
