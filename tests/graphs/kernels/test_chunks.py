"""What is chunked equals what XLA does with whole arrays of edges, and goes where that goes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pytrees import compiled_vjp

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.kernels import chunks, mapped_sum
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS, EdgeOperation

pytestmark = pytest.mark.quick

NODES, EDGES, HEADS, WIDTH = 30, 900, 2, 5
DROPPED = {"dropout_rate": 0.4, "dropout_key": jax.random.key(1), "negative_slope": 0.3}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few blocks, the last of which overlaps with the one before; and of unsorted edges."""
    monkeypatch.setattr(chunks, "CPU_ELEMENTS", 1_000)
    monkeypatch.setattr(mapped_sum, "XLA_ELEMENTS", 3_000)


def graph_with_hub(formats: tuple[str, ...] = ("coo", "csr")) -> graphs.Graph:
    """Returns edges of which a third enter node 3; nothing enters the last two nodes."""
    random = np.random.default_rng(0)
    senders = random.integers(0, NODES, EDGES)
    receivers = np.where(random.random(EDGES) < 0.3, 3, random.integers(0, NODES - 2, EDGES))
    return graphs.from_edges(senders, receivers, NODES, formats=formats)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def gat(graph: graphs.Graph, *arrays: Any, **options: Any) -> jax.Array:
    features, left, right, edge_weight = arrays
    return graphs.gat_attention(graph, features, left, right, edge_weight=edge_weight, **options)


def gatv2(graph: graphs.Graph, *arrays: Any, **options: Any) -> jax.Array:
    left, right, attention, edge_weight = arrays
    return graphs.gatv2_attention(graph, left, right, attention, edge_weight=edge_weight, **options)


def weighted(graph: graphs.Graph, *arrays: Any, reduce: Any, **options: Any) -> jax.Array:
    features, weights = arrays
    whole = graph.with_nodes(h=features).with_edges(w=weights)
    return graphs.update_all(whole, fn.u_mul_e("h", "w", "m"), reduce("m", "x"), **options).nodes["x"]


def dot(graph: graphs.Graph, *arrays: Any, **options: Any) -> jax.Array:
    left, right = arrays
    whole = graph.with_nodes(l=left, r=right)
    return graphs.apply_edges(whole, fn.u_dot_v("l", "r", "m"), **options).edges["m"]


@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.full), "chunked"])
def test_extremes_their_places_and_what_ties_get(implementation: str) -> None:
    """Half precision of few values, so that a hub has many ties, and NaN."""
    graph = graph_with_hub()
    senders, receivers = np.asarray(graph.senders), np.asarray(graph.receivers)
    random = np.random.default_rng(0)
    x, w = random.integers(-3, 4, (NODES, 2)).astype(np.float16), random.integers(1, 3, EDGES).astype(np.float16)
    reductions = [fn.max("m", "max"), fn.min("m", "min"), fn.argmax("m", "argmax"), fn.argmin("m", "argmin")]

    def run(x: jax.Array, w: jax.Array) -> Any:
        whole = graph.with_nodes(x=x).with_edges(w=w)
        return graphs.update_all(whole, fn.u_mul_e("x", "w", "m"), reductions, implementation=implementation).nodes

    def values_and_gradient(x: jax.Array, w: jax.Array) -> Any:
        def total(x: jax.Array, w: jax.Array) -> jax.Array:
            return run(x, w)["max"].astype("float32").sum()

        return run(x, w), run(x.at[1].set(jnp.nan), w)["max"], jax.grad(total, argnums=(0, 1))(x, w)

    found, with_nan, (of_x, of_w) = jax.jit(values_and_gradient)(x, w)
    messages = x[senders] * w[:, None]
    wanted_x, wanted_w = np.zeros((NODES, 2)), np.zeros(EDGES)
    for node in range(NODES):
        (edges,) = np.nonzero(receivers == node)
        assert np.isnan(np.asarray(with_nan[node])).all() == (1 in senders[edges])
        if not len(edges):
            assert [found[name][node].tolist() for name in ("max", "min", "argmax")] == [[0, 0], [0, 0], [-1, -1]]
            continue
        for name in ("max", "min"):
            assert (np.asarray(found[name][node]) == getattr(messages[edges], name)(0)).all()
            assert (np.asarray(found[f"arg{name}"][node]) == edges[getattr(messages[edges], f"arg{name}")(0)]).all()
        ties = messages[edges] == messages[edges].max(0)
        share = ties / ties.sum(0)
        np.add.at(wanted_x, senders[edges], share * w[edges, None])
        wanted_w[edges] = (share * x[senders[edges]]).sum(1)
    assert found["max"].dtype == of_x.dtype == of_w.dtype == "float16"
    assert found["argmax"].dtype == "int32"
    np.testing.assert_allclose(of_x, wanted_x, rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(of_w, wanted_w, rtol=2e-3, atol=1e-4)


def test_infinities_stay_where_they_are() -> None:
    h = np.array([[np.inf], [1], [2]], np.float32)
    graph = graphs.from_edges([0, 1, 2], [1, 1, 2], 3, nodes={"h": h})
    run = jax.jit(lambda g: graphs.update_all(g, fn.copy_u("h", "m"), fn.sum("m", "x"), implementation="chunked"))
    assert run(graph).nodes["x"].ravel().tolist() == [0, np.inf, 2]


def test_without_edges_and_without_nodes() -> None:
    for count in (0, 3):
        graph = graphs.from_edges([], [], count)
        z, end = np.ones((count, 2, 4), np.float16), np.ones((count, 2), np.float32)
        run = functools.partial(graphs.gat_attention, graph, implementation="chunked")
        result, grads = compiled_vjp(run, z, z, end, end)
        assert result.tolist() == np.zeros((count, 2, 4)).tolist()
        assert not any(np.asarray(x).any() for x in grads)


@pytest.mark.parametrize("count", [0, 3])
def test_every_reduction_of_every_message_without_edges(count: int) -> None:
    names = ("copy_u", "u_mul_e", "u_dot_v", "u_dot_e", "v_sub_e")
    reducers = (fn.sum, fn.mean, fn.max, fn.min, fn.var, fn.std, fn.softmax, fn.argmax, fn.argmin)
    reductions = [reducer("m", reducer("m", "").reduction) for reducer in reducers]
    graph, lean = (graphs.from_edges([], [], count, formats=formats) for formats in (("coo", "csr"), ("csr",)))

    def results(h: jax.Array, w: jax.Array) -> Any:
        whole = graph.with_nodes(x=h).with_edges(x=w)
        messages = [getattr(fn, name)(*("x" if name == "copy_u" else "xx"), "m") for name in names]
        each = [graphs.update_all(whole, one, reductions, implementation="chunked").nodes for one in messages]
        conv = graphs.edge_conv(lean, h, jnp.ones((4, 5)), apply=jnp.tanh)
        return each, conv, jax.grad(lambda h: graphs.edge_conv(lean, h, jnp.ones((4, 5)), apply=jnp.tanh).sum())(h)

    each, conv, of_h = jax.jit(results)(jnp.ones((count, 2)), jnp.ones((0, 2)))
    for nodes in each:
        for reduce in reductions:
            found, empty = nodes[reduce.out], -1 if reduce.out.startswith("arg") else 0
            assert len(found) == count and np.all(np.asarray(found) == empty), reduce
    assert conv.tolist() == np.zeros((count, 5)).tolist() and of_h.shape == (count, 2)


@pytest.mark.parametrize("heads, width", [(0, WIDTH), (HEADS, 0)])
def test_no_heads_and_no_width(heads: int, width: int) -> None:
    rows, end = np.ones((NODES, heads, width), np.float16), np.ones((NODES, heads), np.float32)
    weights, graph = np.ones((EDGES, heads, 1), np.float16), graph_with_hub()
    functions: dict[Any, list[np.ndarray | None]] = {
        gat: [rows, end, end, None],
        gatv2: [rows, rows, rows[0], None],
        dot: [rows, rows],
        functools.partial(weighted, reduce=fn.mean): [rows, weights],
    }

    def run(name: str, function: Any, arrays: list[Any]) -> tuple[jax.Array, tuple[Any, ...]]:
        result, pullback = jax.vjp(functools.partial(function, graph, implementation=name), *arrays)
        return result, pullback(result)

    def results(each: list[list[Any]]) -> Any:
        return [[run(name, *pair) for name in IMPLEMENTATIONS] for pair in zip(functions, each, strict=True)]

    for several in jax.jit(results)(list(functions.values())):
        for result, _ in several:
            assert not np.asarray(result).any() and result.dtype == "float16"
        one, other = ([x.shape for x in jax.tree.leaves(each)] for each in several)
        assert one == other


def test_no_receivers() -> None:
    kind = ("a", "to", "b")
    graph = graphs.hetero_from_edges({kind: ([], [])}, {"a": 3, "b": 0})
    message, reduce = fn.u_mul_e("h", "w", "m"), fn.sum("m", "x")

    def passed(h: jax.Array, w: jax.Array) -> jax.Array:
        whole = graph.with_nodes("a", h=h).with_edges(kind, w=w)
        return graphs.update_all(whole, message, reduce, implementation="chunked").nodes["b"]["x"]

    nodes, edges, nothing = (np.ones(shape, np.float32) for shape in ((3, 2), (0, 1), (0, 2)))
    result, grads = compiled_vjp(passed, nothing, nodes, edges)
    assert result.shape == (0, 2)
    assert [x.shape for x in grads] == [(3, 2), (0, 1)]


def test_attention_saves_inputs_and_two_values_for_each_node_and_head() -> None:
    graph = graph_with_hub()
    z, end = (normal(i, *s) for i, s in enumerate([(NODES, HEADS, WIDTH), (NODES, HEADS)]))
    run = functools.partial(graphs.gat_attention, graph, implementation="chunked")

    def saved(function: Any) -> list[tuple[str, tuple[int, ...]]]:
        pullback = jax.eval_shape(lambda *arrays: jax.vjp(function, *arrays)[1], z.astype("float16"), end, end)
        floats = [x for x in jax.tree.leaves(pullback) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sorted({(str(x.dtype), x.shape) for x in floats})

    wanted = [("float16", z.shape), ("float32", end.shape)]
    assert saved(run) == wanted
    # Autocast has half features too, if what makes them is a product.
    eye = jnp.eye(WIDTH)
    by_autocast = jt.autocast(lambda z, *ends: run(z.astype("float32") @ eye, *ends))
    assert [x for x in saved(by_autocast) if x[1] == z.shape] == wanted[:1]


@pytest.mark.full
def test_autocast_gives_what_half_features_give() -> None:
    graph = graph_with_hub()
    random, eye = np.random.default_rng(0), np.eye(WIDTH, dtype=np.float32)
    z, end = (random.normal(size=shape).astype(np.float32) for shape in [(NODES, HEADS, WIDTH), (NODES, HEADS)])
    run = functools.partial(graphs.gat_attention, graph, implementation="chunked")
    found = jax.jit(jt.autocast(lambda z: run(z @ eye, end, end)))(z)
    assert found.dtype == "float16"
    np.testing.assert_array_equal(found, jax.jit(run)(z.astype(np.float16), end, end))


@pytest.mark.full
def test_dropped_edges_are_the_same_in_all_implementations_and_by_node_pairs_too() -> None:
    dropped = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    graph, lean = graph_with_hub(), graph_with_hub(("csr",))

    def results(z: jax.Array, end: jax.Array) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        each = [
            graphs.gat_attention(graph, z, end, end, implementation=name, **dropped)  # pyright: ignore[reportArgumentType]
            for name in IMPLEMENTATIONS
        ]
        result, pullback = jax.vjp(lambda z: graphs.gat_attention(lean, z, end, end, **dropped), z)
        return each, result, pullback(jnp.ones_like(result))[0]

    (one, other), result, of_features = jax.jit(results)(
        np.ones((NODES, 3, 1), np.float32), np.zeros((NODES, 3), np.float32)
    )
    np.testing.assert_allclose(one, other, rtol=1e-6)
    result = np.asarray(result)
    assert result[: NODES - 2].mean() == pytest.approx(1, abs=0.1)
    # Linear in the features: both directions drop the same edges.
    np.testing.assert_allclose(np.asarray(of_features).sum(), result.sum(), rtol=1e-5)


def test_which_implementation_is_chosen() -> None:
    graph = graph_with_hub()
    adjacency, coo = graph.connections, graph_with_hub(("coo",)).connections
    operation = EdgeOperation({}, elements_per_edge=lambda elements: elements)
    assert operation.choose(None, adjacency, 10) == "xla"
    assert operation.choose(None, adjacency, 2**20) == "chunked"
    assert operation.choose(None, adjacency, None) == "xla"
    assert operation.choose(None, coo, 2**20) == "xla"
    assert operation.choose(None, graph_with_hub(("csr",)).connections, 1) == "chunked"
    z, end = jnp.ones((NODES, 1, 1)), jnp.zeros((NODES, 1))
    with pytest.raises(ValueError, match="implementation='cuda' must be None or one of 'xla', 'chunked'"):
        graphs.gat_attention(graph, z, end, end, implementation="cuda")
    with pytest.raises(ValueError, match=r'needs sorted edges: make the graph with formats=\("coo"'):
        graphs.gat_attention(graph_with_hub(("coo",)), z, end, end, implementation="chunked")
    whole = graph.with_nodes(h=z[:, 0])
    with pytest.raises(ValueError, match='"chunked" makes u_dot_v of floats of one shape'):
        graphs.apply_edges(whole, fn.u_sub_v("h", "h", "m"), implementation="chunked")
    places = graph.with_nodes(h=jnp.arange(NODES))
    with pytest.raises(ValueError, match="reduces messages of floats of one precision; these are others"):
        graphs.update_all(places, fn.copy_u("h", "m"), fn.max("m", "x"), implementation="chunked")


@pytest.mark.full
def test_padding_edges_count_nowhere() -> None:
    graph = graph_with_hub()
    padded = graphs.pad(graph, NODES + 3, EDGES + 50, formats=("coo", "csr"))
    random = np.random.default_rng(0)
    z, end, w = (
        random.normal(size=shape).astype(np.float32) for shape in [(NODES + 3, 2, WIDTH), (NODES + 3, 2), (EDGES + 50,)]
    )
    functions = (
        functools.partial(gat, implementation="chunked", **DROPPED),
        functools.partial(weighted, reduce=fn.mean, implementation="chunked"),
    )
    for function, arrays in zip(functions, [(z, end, end, w), (z, w)], strict=True):
        result, grads = compiled_vjp(functools.partial(function, padded), np.ones_like(z), *arrays)
        rows = [x[:NODES] for x in arrays[:-1]]
        wanted, wanted_grads = compiled_vjp(functools.partial(function, graph), np.ones_like(rows[0]), *rows, w[:EDGES])
        np.testing.assert_allclose(np.asarray(result)[:NODES], wanted, rtol=1e-6, atol=1e-6)
        for found, grad in zip(map(np.asarray, grads), wanted_grads, strict=True):
            np.testing.assert_allclose(found[: len(grad)], grad, rtol=1e-5, atol=1e-5)
            assert not found[len(grad) :].any()
    products = jax.jit(functools.partial(dot, padded, implementation="chunked"))(z, z)
    assert not np.asarray(products)[EDGES:].any()
