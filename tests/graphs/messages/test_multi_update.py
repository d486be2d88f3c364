from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = [pytest.mark.quick, pytest.mark.newest]

PLAYS, MAKES, KNOWS = (("user", "plays", "game"), ("firm", "makes", "game"), ("user", "knows", "user"))
EDGES = {PLAYS: ([0, 1, 2, 2], [0, 0, 1, 0]), MAKES: ([0, 1], [0, 2]), KNOWS: ([0, 1], [1, 2])}
COUNTS = {"user": 3, "firm": 2, "game": 4}


def make_graph(dtype: str = "float16") -> graphs.HeteroGraph:
    nodes = {kind: {"h": -1 - jnp.arange(n, dtype=dtype)} for kind, n in COUNTS.items()}
    return graphs.hetero_from_edges(EDGES, COUNTS, nodes)


def by_type(reducer: Any) -> dict[Any, Any]:
    return {kind: (fn.copy_u("h", "m"), reducer("m", "x")) for kind in (PLAYS, "makes")}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("cross", "reducer", "wanted"),
    [
        ("sum", fn.sum, [-7, -3, -2, 0]),
        ("mean", fn.sum, [-3.5, -1.5, -1, 0]),
        ("max", fn.sum, [-1, 0, 0, 0]),  # sums without messages are 0, and count
        ("min", fn.sum, [-6, -3, -2, 0]),
        ("max", fn.max, [-1, -3, -2, 0]),  # maxima without messages do not
        ("min", fn.min, [-3, -3, -2, 0]),
        ("sum", fn.max, [-2, -3, -2, 0]),
        ("stack", fn.sum, [[-1, -6], [0, -3], [-2, 0], [0, 0]]),
        (lambda results: results[0] - results[1], fn.sum, [5, 3, -2, 0]),
    ],
)
def test_results_of_several_types_are_joined(cross: Any, reducer: Any, wanted: Any) -> None:
    run = lambda graph: graphs.multi_update_all(graph, by_type(reducer), cross).nodes["game"]["x"]
    for found in (run(make_graph()), jax.jit(run)(make_graph())):
        assert (found.dtype, found.tolist()) == ("float16", wanted)


def test_one_type_alone_stays_as_it_is() -> None:
    step = (fn.copy_u("h", "m"), fn.sum("m", "x"))
    graph = graphs.multi_update_all(make_graph(), {PLAYS: step, KNOWS: step}, "stack")
    assert graph.nodes["game"]["x"].tolist() == [-6, -3, 0, 0]
    assert graph.nodes["user"]["x"].tolist() == [0, -1, -2]


def test_functions_applied_to_one_type_and_to_all() -> None:
    message, reduce = fn.copy_u("h", "m"), fn.sum("m", "x")
    double = lambda nodes: {"x": 2 * nodes.data["x"]}
    plus = lambda nodes: {"x": nodes.data["x"] + nodes.data["h"]}
    functions = {PLAYS: (message, reduce, double), MAKES: (message, reduce)}
    graph = graphs.multi_update_all(make_graph(), functions, "sum", plus)
    assert graph.nodes["game"]["x"].tolist() == [-14, -8, -5, -4]


def test_sums_of_types_are_float32_inside() -> None:
    step = (fn.copy_u("h", "m"), fn.sum("m", "x"))
    edges = {("a", str(i), "a"): ([0], [0]) for i in range(5)}
    graph = graphs.hetero_from_edges(edges, {"a": 1}, {"a": {"h": jnp.full(1, 30_000, "float16")}})
    mean = graphs.multi_update_all(graph, dict.fromkeys(edges, step), "mean")
    assert mean.nodes["a"]["x"].tolist() == [30_000]


def test_update_all_of_one_type_and_of_all() -> None:
    graph, message = make_graph(), fn.copy_u("h", "m")
    one = graphs.update_all(graph, message, fn.mean("m", "x"), etype="plays")
    assert one.nodes["game"]["x"].tolist() == [-2, -3, 0, 0]
    every = graphs.update_all(graph, message, fn.max("m", "x"))
    assert every.nodes["game"]["x"].tolist() == [-1, -3, -2, 0]
    assert every.nodes["user"]["x"].tolist() == [0, -1, -2]


def test_the_other_functions_take_a_type() -> None:
    graph = make_graph("float32")
    scored = graphs.apply_edges(graph, fn.u_mul_v("h", "h", "s"), etype=PLAYS)
    assert scored.edges[PLAYS]["s"].tolist() == [1, 2, 6, 3]
    weights = graphs.edge_softmax(graph, jnp.zeros(4), etype="plays")
    np.testing.assert_allclose(weights, [1 / 3, 1 / 3, 1, 1 / 3])
    pulled = graphs.pull(graph, [3, 1], fn.copy_u("h", "m"), fn.sum("m", "h"), etype="plays")
    assert pulled.nodes["game"]["h"].tolist() == [-1, -3, -3, 0]
    named = graphs.apply_nodes(graph, lambda nodes: {"h": -nodes.data["h"]}, ntype="firm")
    assert named.nodes["firm"]["h"].tolist() == [1, 2]


def test_a_node_type_without_edges() -> None:
    nodes = {"lone": {"h": jnp.ones(2)}}
    graph = graphs.hetero_from_edges({KNOWS: ([0], [1])}, {"user": 3, "lone": 2}, nodes)
    assert graph.num_nodes("lone") == 2
    assert graph.with_nodes("lone", node_type=jnp.ones(2)).nodes["lone"]["node_type"].shape == (2,)
    with pytest.raises(ValueError, match="node_type='other' is not one of 'user', 'lone'"):
        graph.num_nodes("other")


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="graph must be a HeteroGraph, got Graph"):
        graphs.multi_update_all(graphs.rand_graph(3, 3), {}, "sum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"functions\[.*plays.*\] must be \(message, reduce"):
        graphs.multi_update_all(make_graph(), cast(Any, {PLAYS: fn.copy_u("h", "m")}), "sum")
    graph, step = make_graph(), (fn.copy_u("h", "m"), fn.mean("m", "x"))
    with pytest.raises(ValueError, match="cross='prod' must be one of 'sum', 'mean', 'max'"):
        graphs.multi_update_all(graph, {PLAYS: step}, "prod")
    with pytest.raises(ValueError, match="etype='eats' is not an edge type; there are: "):
        graphs.multi_update_all(graph, {"eats": step}, "sum")
    with pytest.raises(ValueError, match="over several edge types, update_all supports only"):
        graphs.update_all(graph, *step)
    with pytest.raises(ValueError, match="etype=None is ambiguous; there are: "):
        graphs.apply_edges(graph, fn.copy_u("h", "m"))
    with pytest.raises(ValueError, match="ntype=None is not one of 'user', 'firm', 'game'"):
        graphs.apply_nodes(graph, lambda nodes: {})
    with pytest.raises(ValueError, match=r"senders\[1\] = 7 of \('user', 'plays', 'game'\) is out"):
        graphs.hetero_from_edges({PLAYS: ([0, 7], [0, 0])}, COUNTS)
    with pytest.raises(ValueError, match=r"edge type \('user', 'plays', 'toy'\): n_node lacks 'toy'"):
        graphs.hetero_from_edges({("user", "plays", "toy"): ([0], [0])}, COUNTS)
    with pytest.raises(ValueError, match="edge type 'plays' must be"):
        graphs.hetero_from_edges({"plays": ([0], [0])}, COUNTS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"nodes\['firm'\]\['h'\] must have 2 rows"):
        graphs.hetero_from_edges({MAKES: ([0], [0])}, COUNTS, {"firm": {"h": jnp.ones(3)}})
