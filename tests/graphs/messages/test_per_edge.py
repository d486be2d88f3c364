"""Messages made by a function of one edge: in chunks they are what a function of all edges makes, in a tenth of it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import ONE_HALF, assert_within
from pytrees import compiled_vjp

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.structure import padded_block

pytestmark = [pytest.mark.quick, pytest.mark.newest]

NODES, EDGES, WIDTH = 40, 500, 3
FLOATS = ("sum", "mean", "max", "min", "var", "std")
REDUCTIONS = [
    *(getattr(fn, name)("m", name) for name in FLOATS),
    *(fn.softmax("m", "softmax", 0.5), fn.argmax("m", "argmax"), fn.argmin("m", "argmin"), fn.sum("n", "other")),
]
Arrays = dict[str, Any]


def ends() -> tuple[np.ndarray, np.ndarray]:
    """Returns edges of which 200 enter a node, and 130 leave one; node 39 has none."""
    senders, receivers = np.random.default_rng(0).integers(0, NODES - 1, (2, EDGES))
    receivers[:200], senders[100:230] = 3, 5
    return senders, receivers


def drawn(dtype: str = "float32") -> Arrays:
    random = np.random.default_rng(1)
    shapes = {"h": (NODES, WIDTH), "e": (EDGES, WIDTH), "w": (2 * WIDTH, 4)}
    return {name: jnp.asarray(random.normal(size=shape), dtype) for name, shape in shapes.items()}


def messages(edges: Any, w: jax.Array) -> dict[str, jax.Array]:
    """Returns messages of one edge, or of many."""
    both = jnp.concatenate([edges.src["h"], edges.dst["h"] + edges.data["e"]], -1)
    return {"m": jnp.tanh(both @ w), "n": both.sum(-1)}


def reduced(graph: Any, arrays: Arrays, *, mark: Callable[..., Any] = graphs.per_edge, **options: Any) -> Arrays:
    graph = graph.with_nodes(h=arrays["h"]).with_edges(e=arrays["e"])
    found = graphs.update_all(graph, mark(lambda edges: messages(edges, arrays["w"])), REDUCTIONS, **options)
    return {reduce.out: found.nodes[reduce.out] for reduce in REDUCTIONS}


def unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def chosen(mark: Callable[..., Any]) -> str | None:
    return None if mark is unmarked else "chunked"


def floats(graph: Any, arrays: Arrays, **options: Any) -> Arrays:
    return {name: x for name, x in reduced(graph, arrays, **options).items() if "arg" not in name}


def in_float64(run: Callable[..., Any], *args: Any) -> Any:
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(run)(*jax.tree.map(lambda x: np.asarray(x, np.float64), args)))


@functools.cache
def whole() -> graphs.Graph:
    with jax.ensure_compile_time_eval():  # in whatever trace it is asked for
        return graphs.from_edges(*ends(), NODES)


def results_and_gradients(graph: Any, arrays: Arrays, **options: Any) -> tuple[Arrays, Arrays]:
    found, pullback = jax.vjp(lambda arrays: floats(graph, arrays, **options), arrays)
    return reduced(graph, arrays, **options), pullback(jax.tree.map(jnp.cos, found))[0]


@pytest.mark.parametrize("kind", ["whole", pytest.param("padded", marks=pytest.mark.full)])
def test_chunks_make_what_a_function_of_all_edges_makes_in_float64(kind: str) -> None:
    graph = whole()
    arrays = drawn()
    exact, exact_gradients = in_float64(lambda arrays: results_and_gradients(whole(), arrays, mark=unmarked), arrays)
    if kind == "padded":
        graph = graphs.pad(graph, NODES + 9, EDGES + 30, formats=("coo", "csr"))
        more = {"h": NODES + 9, "e": EDGES + 30, "w": 2 * WIDTH}
        arrays = {name: jnp.pad(x, ((0, more[name] - len(x)), (0, 0))) for name, x in arrays.items()}
    chunked = functools.partial(results_and_gradients, implementation="chunked")
    found, gradients = jax.jit(chunked)(graph, arrays)
    for name in ("argmax", "argmin"):
        assert found[name][:NODES].tolist() == exact[name].tolist()
    for results, wanted in ((found, exact), (gradients, exact_gradients)):
        for name, x in wanted.items():
            scale = np.abs(x).max()
            np.testing.assert_allclose(results[name][: len(x)], x, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("half", ONE_HALF)
def test_half_is_rounded_once_and_its_gradients_are_added_in_float32(half: str) -> None:
    graph = graphs.from_edges(range(1, 13_162), [0] * 13_161, 13_162)
    ones, scale = jnp.ones(13_162, half), jnp.ones((), half)

    def run(h: jax.Array, scale: jax.Array) -> jax.Array:
        message = graphs.per_edge(lambda edge: {"m": edge.src["h"] * scale})
        graph_of_h = graph.with_nodes(h=h)
        return graphs.update_all(graph_of_h, message, fn.sum("m", "x"), implementation="chunked").nodes["x"][:1]

    (total,), (of_nodes, of_scale) = compiled_vjp(run, jnp.ones(1, half), ones, scale)
    for found in (total, of_scale):
        assert_within(found, 13_161, half, 13_161, 1)
    assert of_nodes[1:].tolist() == [1] * 13_161
    gone = graphs.from_edges([0] * 13_161, range(1, 13_162), 13_162)
    message = graphs.per_edge(lambda edge: {"m": edge.src["h"]})

    def sent(h: jax.Array) -> jax.Array:
        return graphs.update_all(gone.with_nodes(h=h), message, fn.max("m", "x"), implementation="chunked").nodes["x"]

    _, (of_sender,) = compiled_vjp(sent, ones, ones)
    assert_within(of_sender[0], 13_161, half, 13_161, 1)


@pytest.mark.parametrize("what", ["results", pytest.param("gradients", marks=pytest.mark.full)])
def test_autocast_has_the_rules_that_it_has_for_all_edges(what: str) -> None:
    def run(mark: Callable[..., Any], arrays: Arrays) -> Arrays:
        if what == "results":
            return jt.autocast(functools.partial(reduced, whole(), mark=mark, implementation=chosen(mark)))(arrays)
        loss = functools.partial(total, whole(), mark=mark, implementation=chosen(mark))
        return jax.grad(lambda arrays: jt.autocast(loss)(arrays))(arrays)

    arrays = drawn()
    plain, found = (jax.jit(functools.partial(run, mark))(arrays) for mark in (unmarked, graphs.per_edge))
    for name, x in plain.items():
        assert found[name].dtype == x.dtype
        wanted = x.astype("float32")
        np.testing.assert_allclose(found[name].astype("float32"), wanted, atol=2e-3 * float(jnp.abs(wanted).max()))


def total(graph: Any, arrays: Arrays, **options: Any) -> jax.Array:
    return sum((jnp.sin(x.astype("float32")).sum() for x in floats(graph, arrays, **options).values()), jnp.zeros(()))


@pytest.mark.full
def test_vmap_and_gradients_of_gradients() -> None:
    arrays, several = drawn(), jnp.stack([drawn()["h"], -drawn()["h"]])

    def curvature(h: jax.Array, **options: Any) -> jax.Array:
        def some(h: jax.Array) -> jax.Array:
            found = floats(whole(), {**arrays, "h": h}, **options)
            return sum((jnp.sin(found[name]).sum() for name in ("max", "std", "softmax")), jnp.zeros(()))

        of_h = jax.grad(some)
        return jax.grad(lambda h: jnp.sin(of_h(h)).sum())(h)

    chunked = jax.jit(jax.vmap(functools.partial(curvature, implementation="chunked")))(several)
    plain = jax.jit(jax.vmap(functools.partial(curvature, mark=unmarked)))(several)
    np.testing.assert_allclose(chunked, plain, atol=1e-4 * float(jnp.abs(plain).max()))


def test_a_function_is_only_asked_for_edges_that_there_are() -> None:
    # 1 / (x_u - x_v) of an edge is finite, and of two nodes that no edge joins it need not be.
    graph = graphs.pad(graphs.from_edges([0, 1, 0], [1, 2, 2], 3), 6, 8, formats=("csr",))

    def run(h: jax.Array, w: jax.Array) -> jax.Array:
        message = graphs.per_edge(lambda edge: {"m": w / (edge.src["h"] - edge.dst["h"])})
        return graphs.update_all(graph.with_nodes(h=h), message, fn.sum("m", "x")).nodes["x"]

    h = jnp.array([1.0, 2.0, 4.0, 4.0, 4.0, 4.0])
    result, gradients = compiled_vjp(run, jnp.ones(6), h, jnp.ones(()))
    assert result.tolist() == pytest.approx([0, -1, -1 / 2 - 1 / 3, 0, 0, 0])
    assert gradients[1] == pytest.approx(-1 - 1 / 2 - 1 / 3)
    assert gradients[0].tolist() == pytest.approx([-1 - 1 / 9, 1 - 1 / 4, 1 / 4 + 1 / 9, 0, 0, 0])


@pytest.mark.full
def test_complex_features_have_gradients() -> None:
    graph = graphs.from_edges([0, 1, 0], [1, 2, 2], 3)
    message = graphs.per_edge(lambda edge: {"m": (edge.src["h"] * edge.dst["h"]).real})

    def run(h: jax.Array) -> jax.Array:
        found = graphs.update_all(graph.with_nodes(h=h), message, fn.sum("m", "x"), implementation="chunked")
        return found.nodes["x"].sum()

    h = jnp.array([1 + 2j, 3j, 4 - 1j], jnp.complex64)
    found = jax.grad(run)(h)
    np.testing.assert_allclose(found, [h[1] + h[2], h[0] + h[2], h[0] + h[1]], rtol=1e-6)


def test_ties_share_the_gradient_whichever_blocks_they_are_in() -> None:
    graph = graphs.from_edges(range(1, 41), [0] * 40, 41)
    h = jnp.where(jnp.arange(41) % 3 == 1, 5.0, 1.0)  # 14 ties, 11 of them in the first block of 32
    message = graphs.per_edge(lambda edge: {"m": edge.src["h"]})

    def largest(h: jax.Array) -> jax.Array:
        reduce = [fn.max("m", "x"), fn.argmax("m", "first")]
        found = graphs.update_all(graph.with_nodes(h=h), message, reduce, implementation="chunked").nodes
        return found["x"] + found["first"].astype(jnp.float32)

    result, (gradient,) = compiled_vjp(largest, jnp.ones(41), h)
    assert result[:3].tolist() == [5, -1, -1]
    np.testing.assert_allclose(gradient, np.where(np.arange(41) % 3 == 1, 1 / 14, 0), rtol=1e-6)


@pytest.mark.full
def test_without_edges_of_blocks_and_with_sorted_edges_only() -> None:
    none = graphs.from_edges([], [], 3, formats=("csr",))
    message = graphs.per_edge(lambda edge: {"m": edge.src["h"] * edge.sender.astype("float32")})
    reduce = [fn.max("m", "x"), fn.sum("m", "y")]
    found = graphs.update_all(none.with_nodes(h=jnp.ones((3, 2))), message, reduce).nodes
    assert not found["x"].any() and found["y"].shape == (3, 2)
    lean = graphs.from_edges([1, 2, 2], [0, 0, 1], 3, {"h": jnp.ones((3, 2))}, formats=("csr",))
    assert graphs.update_all(lean, message, reduce).nodes["y"].tolist() == [[3, 3], [2, 2], [0, 0]]
    with pytest.raises(ValueError, match=r"edge\.id: the graph was made with formats"):
        graphs.update_all(lean, graphs.per_edge(lambda edge: {"m": edge.id}), fn.sum("m", "x"))
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 4, 17_000), random.integers(0, 2, 17_000)
    block = padded_block(senders, receivers, 5, 3, num_edges=17_500)
    of_block = block.graph({"h": jnp.ones((5, 2))}, {"h": jnp.ones((3, 2))})
    found = graphs.update_all(of_block, message, reduce, implementation="chunked").nodes["target"]["y"]
    wanted = [senders[receivers == target].sum() for target in range(3)]
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-6)


@pytest.mark.full
def test_no_array_as_long_as_the_edges_is_stored() -> None:
    nodes, edges, width = 5_000, 400_000, 64
    senders, receivers = np.random.default_rng(0).integers(0, nodes, (2, edges))
    graph = graphs.from_edges(senders, receivers, nodes)

    def run(mark: Callable[..., Any], arrays: Arrays) -> jax.Array:
        def gate(edges: Any) -> Arrays:
            return {"m": jax.nn.sigmoid(edges.src["h"] * arrays["w"] + edges.data["e"]) * edges.dst["h"]}

        whole = graph.with_nodes(h=arrays["h"]).with_edges(e=arrays["e"])
        found = graphs.update_all(whole, mark(gate), [fn.softmax("m", "x"), fn.max("m", "y")])
        return found.nodes["x"].sum() + found.nodes["y"].sum()

    shapes = {"h": (nodes, width), "e": (edges, width), "w": (width,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    units = []
    for mark in (unmarked, graphs.per_edge):
        compiled = jax.jit(jax.value_and_grad(functools.partial(run, mark))).lower(arrays).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        units.append(analysis.temp_size_in_bytes / (edges * width * 4))
    assert units[0] > 3 and units[1] < 0.3, units


def test_all_edges_at_once_where_some_send_or_a_function_reduces() -> None:
    graph = graphs.from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
    message = graphs.per_edge(lambda edge: {"m": edge.src["h"] + edge.id.astype("float32")})
    assert graphs.apply_edges(graph, message).edges["m"].tolist() == [0, 2, 4]
    assert graphs.apply_edges(graph, message, [2]).edges["m"].tolist() == [0, 0, 4]
    last = graphs.update_all(graph, message, lambda nodes: {"x": nodes.mailbox["m"][:, -1]})
    assert last.nodes["x"].tolist() == [4, 0, 2]
    pulled = graphs.pull(graph, [2], message, fn.sum("m", "x"))
    assert pulled.nodes["x"].tolist() == [0, 0, 2]
    whole_numbers = graphs.per_edge(lambda edge: {"m": edge.receiver})
    assert graphs.update_all(graph, whole_numbers, fn.sum("m", "x")).nodes["x"].tolist() == [0, 0, 4]


def test_faults_are_named() -> None:
    graph, add = graphs.from_edges([0, 1], [1, 2], 3, nodes={"h": jnp.ones((3, 2))}), fn.sum("m", "x")
    for implementation in (None, "chunked"):
        pass_by = functools.partial(graphs.update_all, graph, reduce=add, implementation=implementation)
        with pytest.raises(KeyError, match="no sender feature 'g'; there are: 'h'"):
            pass_by(message=graphs.per_edge(lambda edge: {"m": edge.src["g"]}))
        with pytest.raises(TypeError, match="message function must return a dictionary of arrays, got"):
            pass_by(message=graphs.per_edge(lambda edge: edge.src["h"]))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="sum needs the message 'm'; there are: 'n'"):
            pass_by(message=graphs.per_edge(lambda edge: {"n": edge.src["h"]}))
    with pytest.raises(ValueError, match="reduces messages of floats; these are others"):
        graphs.update_all(graph, graphs.per_edge(lambda edge: {"m": edge.sender}), add, implementation="chunked")
    with pytest.raises(
        ValueError, match=r'implementation="chunked" needs functions of one edge: mark yours with graphs\.per_edge'
    ):
        graphs.update_all(graph, lambda edges: {"m": edges.src["h"]}, add, implementation="chunked")
    with pytest.raises(TypeError, match="function must be a function of an edge, got Reduce"):
        graphs.per_edge(add)  # pyright: ignore[reportArgumentType]
