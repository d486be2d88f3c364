"""Names of DGL and PyTorch Geometric on a graph: the error says which does it here, and nothing else changes."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest
from pytrees import assert_bitwise_equal
from refusals import assert_refused

from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.structure.graph import GRAPH_NAMES, HETERO_NAMES

pytestmark = [pytest.mark.newest, pytest.mark.quick]


def small_graph(**features: Any) -> graphs.Graph:
    return graphs.from_edges([0, 1, 2, 2], [1, 2, 0, 2], 3, **features)


@pytest.mark.parametrize(("formats", "count"), [(("coo",), 2), (("csr",), 2), (("coo", "csr"), 8)])
def test_without_features_there_are_few_edge_long_arrays_even_with_hubs(formats: tuple[str, ...], count: int) -> None:
    hubs = np.zeros(5_000, int)
    for graph in (small_graph(formats=formats), graphs.from_edges(hubs, hubs, 7, formats=formats)):
        long = [x for x in jax.tree.leaves(graph) if x.shape == (graph.num_edges,)]
        assert [x.dtype for x in long] == ["int32"] * count
        others = [x.shape for x in jax.tree.leaves(graph) if x.shape != (graph.num_edges,)]
        assert all(len(shape) == 1 and shape[0] <= 7 + 5_000 // 8 for shape in others)


@pytest.mark.parametrize("count", [3, 3_000])
def test_edges_stay_in_the_callers_order(count: int) -> None:
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 4, (2, count))
    weights = random.normal(size=(count, 2)).astype(np.float32)
    graph = graphs.from_edges(senders, receivers, 4, edges={"w": weights})
    assert graph.senders.tolist() == senders.tolist()
    assert graph.receivers.tolist() == receivers.tolist()
    assert graph.in_degrees.tolist() == np.bincount(receivers, minlength=4).tolist()
    assert graph.out_degrees.tolist() == np.bincount(senders, minlength=4).tolist()
    found = graphs.apply_edges(graph, fn.copy_e("w", "m")).edges
    np.testing.assert_array_equal(found["m"], weights)
    np.testing.assert_array_equal(found["w"], weights)


def test_a_pytree_through_jit_that_compiles_once() -> None:
    traces = []

    @jax.jit
    def step(graph: graphs.Graph) -> graphs.Graph:
        traces.append(graph)
        return graphs.update_all(graph, fn.copy_u("h", "m"), fn.sum("m", "h"))

    graph = small_graph(nodes={"h": jnp.ones((3, 2))})
    again = step(step(graph))
    assert len(traces) == 1
    other = graphs.from_edges([1, 1, 0, 2], [1, 0, 2, 2], 3, nodes={"h": np.ones((3, 2), "f")})
    step(other)
    assert len(traces) == 1
    leaves, tree = jax.tree.flatten(again)
    assert_bitwise_equal(jax.tree.unflatten(tree, leaves), again)


def test_features_are_immutable_and_their_names_free() -> None:
    graph = small_graph(nodes={"h": jnp.ones(3)})
    with pytest.raises(ValueError, match="immutable"):
        graph.nodes["h"] = jnp.ones(7)  # pyright: ignore[reportIndexIssue]
    assert graph.with_nodes(self=jnp.ones(3)).nodes["self"].shape == (3,)


def test_made_within_jit_of_what_is_known() -> None:
    @jax.jit
    def run(h: jax.Array) -> jax.Array:
        graph = graphs.from_edges([0, 1, 1], [1, 0, 0], 3, nodes={"h": h})
        return graphs.update_all(graph, fn.copy_u("h", "m"), fn.sum("m", "x")).nodes["x"]

    assert run(jnp.array([1.0, 2.0, 3.0])).tolist() == [4, 1, 0]


def test_vmap_over_features() -> None:
    graph = small_graph()
    h = np.arange(24, dtype=np.float32).reshape(4, 3, 2)

    def run(h: jax.Array) -> jax.Array:
        return graphs.update_all(graph.with_nodes(h=h), fn.copy_u("h", "m"), fn.max("m", "x")).nodes["x"]

    mapped, each = jax.jit(lambda h: (jax.vmap(run)(h), [run(x) for x in h]))(h)
    assert_bitwise_equal(np.asarray(mapped), np.stack(each))


def test_to_jraph_and_back() -> None:
    features = {"nodes": {"h": jnp.ones((3, 2))}, "edges": {"w": jnp.arange(4.0)}}
    graph = small_graph(**features, formats=("coo",))
    tuple_ = graphs.to_jraph(graph)
    assert isinstance(tuple_, jraph.GraphsTuple)
    assert_bitwise_equal(graphs.from_jraph(tuple_), graph)
    traced = jax.jit(lambda t: graphs.to_jraph(graphs.from_jraph(t)))(tuple_)
    assert_bitwise_equal(traced, tuple_)


def test_no_edges_may_be_an_array_of_floats() -> None:
    none, h = jnp.array([]), {"h": jnp.ones(2)}
    tuple_ = graphs.to_jraph(graphs.from_edges([], [], 2, nodes=h))._replace(senders=none, receivers=none)

    def run(tuple_: Any) -> Any:
        return graphs.update_all(graphs.from_jraph(tuple_), fn.copy_u("h", "m"), fn.sum("m", "x")).nodes["x"]

    assert [f(tuple_).tolist() for f in (run, jax.jit(run))] == [[0, 0]] * 2


@pytest.mark.full
def test_jraphs_tuples_are_taken_everywhere() -> None:
    tuple_ = graphs.to_jraph(small_graph(nodes={"h": jnp.arange(3.0)}, edges={"w": jnp.ones(4)}))
    message, reduce = fn.u_mul_e("h", "w", "m"), fn.sum("m", "x")
    calls: list[Callable[[Any], Any]] = [
        lambda g: graphs.update_all(g, message, reduce),
        lambda g: graphs.apply_edges(g, message),
        lambda g: graphs.apply_nodes(g, lambda nodes: {"x": nodes.data["h"] + 1}),
        lambda g: graphs.send_and_recv(g, [0, 1], message, reduce),
        lambda g: graphs.pull(g, [1], message, reduce),
        lambda g: graphs.push(g, [1], message, reduce),
        lambda g: graphs.prop_nodes(g, [[0], [1]], message, reduce),
        lambda g: graphs.prop_edges(g, [[0], [1]], message, reduce),
    ]
    for call in calls:
        found = call(tuple_)
        assert isinstance(found, jraph.GraphsTuple)
        wanted = graphs.to_jraph(call(graphs.from_jraph(tuple_)))
        assert_bitwise_equal(found, wanted)
        assert_bitwise_equal(jax.jit(call)(tuple_), wanted)
    logits, heads = jnp.arange(4.0), jnp.ones((3, 1, 2))
    graph = graphs.from_jraph(tuple_)
    assert_bitwise_equal(graphs.edge_softmax(tuple_, logits), graphs.edge_softmax(graph, logits))
    assert_bitwise_equal(
        graphs.gat_attention(tuple_, heads, heads[..., 0], heads[..., 0]),
        graphs.gat_attention(graph, heads, heads[..., 0], heads[..., 0]),
    )


def test_one_array_of_jraph_becomes_the_feature_x() -> None:
    tuple_ = graphs.to_jraph(small_graph())._replace(nodes=np.ones((3, 2), "f"), edges=None)
    graph = graphs.from_jraph(tuple_)
    assert graph.nodes["x"].shape == (3, 2)
    assert graph.edges == {}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0, 1], [1, 3], 3), ValueError, r"receivers\[1\] = 3 is out of range for 3 nodes"),
        (([0, -1], [1, 2], 3), ValueError, r"senders\[1\] = -1 is negative"),
        (([0, 1, 2], [1, 2], 3), ValueError, "senders has 3 edges and receivers 2: edge 2 has only one"),
        (([0.0, 1.0], [1, 2], 3), TypeError, "senders must be integers, got float64: edge 0 has"),
        (([[0]], [[1]], 3), ValueError, r"senders must have one axis, got shape \(1, 1\)"),
        (([0], [1], 2.5), TypeError, r"n_node=2\.5 must be an integer"),
        (([0], [1], -1), ValueError, "n_node=-1 must be at least 0"),
        (
            ([0], [1], 2, {"h": np.ones((3, 1))}),
            ValueError,
            r"nodes\['h'\] must have 2 rows, one for each of the nodes, got shape \(3, 1\)",
        ),
        (
            ([0], [1], 2, None, {"w": 1.0}),
            ValueError,
            r"edges\['w'\] must have 1 rows, one for each of the edges, got shape \(\)",
        ),
        (([0], [1], 2, {"h": None}), TypeError, r"nodes\['h'\] must be an array, got NoneType"),
        (([0], [1], 2, np.ones(2)), TypeError, "nodes must be a dictionary of arrays, got ndarray"),
        (([0], [1], 2, {"h": "text"}), TypeError, r"nodes\['h'\] must be an array, got str"),
    ],
)
def test_wrong_edges_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        graphs.from_edges(*arguments)


def test_other_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="formats must be a sequence of names, got 'mailbox'"):
        graphs.from_edges([0], [1], 2, formats="mailbox")
    with pytest.raises(ValueError, match="formats has 'csc', which is not one of coo, csr, mailbox"):
        graphs.from_edges([0], [1], 2, formats=("csc",))
    with pytest.raises(TypeError, match="senders is traced: graphs are made outside of jit"):
        jax.jit(lambda ids: graphs.from_edges(ids, ids, 2).senders)(jnp.array([0]))
    tuple_ = graphs.to_jraph(small_graph())
    with pytest.raises(TypeError, match=r"nodes\['a/0'\] must be an array, got float"):
        graphs.from_jraph(tuple_._replace(nodes={"a": [1.0]}))
    twice = {"a/b": np.ones(3), "a": {"b": np.ones(3)}}
    with pytest.raises(TypeError, match="can only be made outside of jit; under jit only 'coo' is supported"):
        jax.jit(lambda t: graphs.from_jraph(t, formats=("mailbox",)))(tuple_)
    refusals = {
        "num_nodes=0 must be positive for num_edges=3": lambda: graphs.rand_graph(0, 3),
        "senders and receivers must be arrays, got None": lambda: graphs.from_jraph(tuple_._replace(senders=None)),
        "n_edge adds up to 3, but there are 4": lambda: graphs.from_jraph(tuple_._replace(n_edge=np.array([3]))),
        "nodes has two features with the path 'a/b'": lambda: graphs.from_jraph(tuple_._replace(nodes=twice)),
        "TypeError: formats=('coo', 'csr') can only be made outside of jit; under jit only 'coo' is": lambda: jax.jit(
            lambda t: graphs.from_jraph(t, formats=("coo", "csr"))
        )(tuple_),
        "TypeError: under jit the graph needs a node feature": lambda: jax.jit(graphs.from_jraph)(tuple_),
    }
    assert_refused(refusals)


def test_nested_features_have_the_names_of_their_paths() -> None:
    nodes = {"a": {"b": jnp.ones((3, 2)), "c": [jnp.arange(3)]}, "h": jnp.ones(3)}
    tuple_ = graphs.to_jraph(small_graph())._replace(nodes=nodes, edges=(jnp.ones(4), jnp.zeros(4)))
    graph = graphs.from_jraph(tuple_)
    assert sorted(graph.nodes) == ["a/b", "a/c/0", "h"] and sorted(graph.edges) == ["0", "1"]

    def passed(graphs_tuple: Any) -> Any:
        return graphs.update_all(graphs_tuple, fn.u_mul_e("a/b", "0", "m"), fn.sum("m", "x"))

    found = jax.jit(passed)(tuple_)  # a tuple's features stay where they are
    assert jax.tree.structure({**nodes, "x": 0}) == jax.tree.structure(found.nodes)
    degrees = np.asarray(graph.in_degrees, np.float32)
    np.testing.assert_array_equal(found.nodes["x"], degrees[:, None].repeat(2, 1))
    assert passed(graph).nodes["x"].tolist() == found.nodes["x"].tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64", "uint32"])
def test_ids_of_any_integers(dtype: str) -> None:
    ids = np.array([0, 1, 99], dtype)
    graph = graphs.from_edges(ids, ids[::-1], 40_000)
    assert (graph.senders.tolist(), graph.receivers.tolist()) == ([0, 1, 99], [99, 1, 0])


def test_random_graphs_are_the_same_for_the_same_seed() -> None:
    graph = graphs.rand_graph(30, 100)
    assert (graph.num_nodes, graph.num_edges) == (30, 100)
    assert_bitwise_equal(graph, graphs.rand_graph(30, 100))
    assert graph.senders.tolist() != graphs.rand_graph(30, 100, seed=1).senders.tolist()
    assert graphs.rand_graph(0, 0).num_edges == 0


def test_no_edges_and_no_nodes() -> None:
    none = graphs.from_edges([], [], 3, nodes={"h": jnp.ones((3, 2), "float16")})
    for reducer in (fn.sum, fn.mean, fn.max, fn.min):
        x = graphs.update_all(none, fn.copy_u("h", "m"), reducer("m", "x")).nodes["x"]
        assert x.tolist() == [[0, 0]] * 3
    empty = graphs.from_edges([], [], 0, nodes={"h": jnp.ones((0, 2))})
    assert graphs.update_all(empty, fn.copy_u("h", "m"), fn.sum("m", "x")).nodes["x"].shape == (0, 2)


GRAPH = graphs.from_edges([0, 1, 2], [1, 2, 2], 3, nodes={"h": jnp.ones((3, 2))})
HETERO = graphs.hetero_from_edges({("user", "plays", "game"): ([0, 1], [0, 0])}, {"user": 2, "game": 1})
TABLES = pytest.mark.parametrize(("graph", "names"), [(GRAPH, GRAPH_NAMES), (HETERO, HETERO_NAMES)])


@pytest.mark.parametrize(
    ("graph", "name", "here"),
    [
        (GRAPH, "ndata", r"graph\.with_nodes\(h=h\) to write"),
        (GRAPH, "edge_index", r"graph\.senders and graph\.receivers"),
        (GRAPH, "update_all", r"jmp_train\.graphs\.update_all\(graph, \.\.\.\)"),
        (HETERO, "ndata", r'graph\.with_nodes\("user", h=h\) to write'),
        (HETERO, "canonical_etypes", r"graph\.edge_types"),
    ],
)
def test_the_error_says_what_does_it_here(graph: Any, name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"a {type(graph).__name__} has no '{name}', which is .* use .*{here}"):
        getattr(graph, name)
    assert not hasattr(graph, name)


@TABLES
def test_no_name_of_the_table_hides_one_of_ours(graph: Any, names: Any) -> None:
    assert not set(names) & {name for name in dir(graph) if not name.startswith("_")}
    functions = [here for here in names.values() if here.startswith("jmp_train.graphs.")]
    assert functions
    for here in functions:
        assert callable(getattr(graphs, here.removeprefix("jmp_train.graphs.").partition("(")[0]))


@TABLES
def test_other_names_are_pythons_own_errors(graph: Any, names: Any) -> None:
    del names
    with pytest.raises(AttributeError, match=f"^'{type(graph).__name__}' object has no attribute 'nodez'$"):
        _ = graph.nodez
    assert getattr(graph, "nodez", 3) == 3


def test_what_a_property_raises_is_raised() -> None:
    hollow = dataclasses.replace(GRAPH, connections=None)  # as a tree of specs could be
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'in_degrees'"):
        _ = hollow.in_degrees


@TABLES
def test_copies_pickles_and_trees_are_what_they_were(graph: Any, names: Any) -> None:
    del names
    for other in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert jax.tree.structure(other) == jax.tree.structure(graph)
        assert_bitwise_equal(other, graph)
    assert_bitwise_equal(jax.jit(lambda graph: graph)(graph), graph)
