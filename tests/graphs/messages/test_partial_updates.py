from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pytrees import assert_bitwise_equal

from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = [pytest.mark.quick, pytest.mark.newest]

SENDERS, RECEIVERS = np.array([0, 1, 2, 2, 3, 0]), np.array([1, 2, 0, 1, 1, 1])
COPY, ADD = fn.copy_u("h", "m"), fn.sum("m", "x")


def make_graph(**options: Any) -> graphs.Graph:
    """Returns a graph of five nodes, into the last two of which nothing leads."""
    h = jnp.array([1, 10, 100, 1000, 10000], jnp.float32)
    return graphs.from_edges(SENDERS, RECEIVERS, 5, nodes={"h": h}, **options)


def with_old(graph: graphs.Graph) -> graphs.Graph:
    return graph.with_nodes(x=jnp.full(5, -1.0))


def reduce_by_hand(nodes: graphs.NodeBatch) -> dict[str, jax.Array]:
    return {"x": nodes.mailbox["m"].sum(1)}


@pytest.mark.full
@pytest.mark.parametrize("reduce", [ADD, reduce_by_hand])
def test_only_what_is_reached_changes(reduce: Any) -> None:
    graph = with_old(make_graph())
    edges, pair = [3, 0], (np.array([2, 0]), np.array([1, 1]))
    assert graphs.send_and_recv(graph, edges, COPY, reduce).nodes["x"].tolist() == [-1, 101, -1, -1, -1]
    # All edges between the two are meant: there are two from node 0 to node 1.
    assert graphs.send_and_recv(graph, pair, COPY, reduce).nodes["x"].tolist() == [-1, 102, -1, -1, -1]
    assert graphs.pull(graph, [0, 4], COPY, reduce).nodes["x"].tolist() == [100, -1, -1, -1, 0]
    assert graphs.push(graph, [1, 3], COPY, reduce).nodes["x"].tolist() == [-1, 1000, 10, -1, -1]


def test_without_an_old_feature_the_others_are_zero() -> None:
    graph = make_graph()
    assert graphs.pull(graph, [0], COPY, ADD).nodes["x"].tolist() == [100, 0, 0, 0, 0]
    assert graphs.apply_edges(graph, COPY, [1]).edges["m"].tolist() == [0, 10, 0, 0, 0, 0]


@pytest.mark.parametrize("reducer", [fn.max, fn.min])
def test_nodes_without_messages_become_zero_and_infinities_stay(reducer: Any) -> None:
    graph = make_graph().with_nodes(h=jnp.array([np.inf, -np.inf, 3, 4, 5], jnp.float16))
    whole = graphs.update_all(graph, COPY, reducer("m", "x")).nodes["x"].tolist()
    assert whole[2:] == [-np.inf, 0, 0]
    assert whole[1] == (np.inf if reducer is fn.max else 3)
    pulled = graphs.pull(graph, [2, 3], COPY, reducer("m", "x")).nodes["x"].tolist()
    assert pulled == [0, 0, -np.inf, 0, 0]


def test_other_rows_keep_their_values_in_a_dtype_that_holds_them() -> None:
    graph = with_old(make_graph()).with_nodes(x=jnp.full(5, 1e6), h=jnp.ones(5, "float16"))
    for pulled in (
        graphs.pull(graph, [0], COPY, ADD),
        graphs.apply_nodes(graph, lambda nodes: {"x": nodes.data["h"]}, [0]),
    ):
        assert pulled.nodes["x"].dtype == "float32"
        assert pulled.nodes["x"].tolist() == [1, 1e6, 1e6, 1e6, 1e6]


def test_one_place_may_be_a_number() -> None:
    graph = make_graph()
    assert graphs.pull(graph, 0, COPY, ADD).nodes["x"].tolist() == [100, 0, 0, 0, 0]
    assert graphs.send_and_recv(graph, (2, 0), COPY, ADD).nodes["x"].tolist() == [100, 0, 0, 0, 0]


def test_nothing_sent_changes_nothing() -> None:
    graph = make_graph()
    for call in (graphs.send_and_recv, graphs.pull, graphs.push):
        assert call(graph, [], COPY, ADD) is graph


def test_functions_applied_in_the_end_see_the_new_features() -> None:
    graph = with_old(make_graph())
    double = lambda nodes: {"x": 2 * nodes.data["x"], "y": nodes.data["x"] + nodes.data["h"]}
    whole = graphs.update_all(graph, COPY, ADD, double)
    assert whole.nodes["x"].tolist() == [200, 2204, 20, 0, 0]
    assert whole.nodes["y"].tolist() == [101, 1112, 110, 1000, 10000]
    part = graphs.pull(graph, [0], COPY, ADD, double)
    assert part.nodes["x"].tolist() == [200, -1, -1, -1, -1]
    assert part.nodes["y"].tolist() == [101, 0, 0, 0, 0]


def test_apply_nodes_and_edges_to_some() -> None:
    graph = with_old(make_graph())
    plus = lambda nodes: {"x": nodes.data["h"] + nodes.nodes().astype(jnp.float32)}
    assert graphs.apply_nodes(graph, plus).nodes["x"].tolist() == [1, 11, 102, 1003, 10004]
    assert graphs.apply_nodes(graph, plus, [3]).nodes["x"].tolist() == [-1, -1, -1, 1003, -1]
    ends = lambda edges: {"s": edges.src["h"] - edges.dst["h"], "id": edges.edges()[2]}
    found = graphs.apply_edges(graph, ends, (np.array([0]), np.array([1]))).edges
    assert found["s"].tolist() == [-9, 0, 0, 0, 0, -9]
    assert found["id"].tolist() == [0, 0, 0, 0, 0, 5]


def test_the_mailbox_is_ordered_by_edge() -> None:
    seen = {}

    def keep(nodes: graphs.NodeBatch) -> dict[str, jax.Array]:
        for node, box in zip(nodes.nodes().tolist(), nodes.mailbox["m"].tolist(), strict=True):
            seen[node] = box
        assert len(nodes) == nodes.batch_size() == nodes.mailbox["m"].shape[0]
        return {"last": nodes.mailbox["m"][:, -1] + nodes.data["h"] * 0}

    last = graphs.update_all(make_graph(), COPY, keep).nodes["last"].tolist()
    assert seen == {0: [100], 1: [1, 100, 1000, 1], 2: [10]}
    assert last == [100, 1, 10, 0, 0]


def test_propagation_in_order() -> None:
    chain = graphs.from_edges([0, 1, 2], [1, 2, 3], 4, nodes={"h": jnp.array([1.0, 0, 0, 0])})
    step = (fn.copy_u("h", "m"), fn.sum("m", "h"))
    assert graphs.prop_nodes(chain, [[1], [2], [3]], *step).nodes["h"].tolist() == [1, 1, 1, 1]
    assert graphs.prop_nodes(chain, [[3], [2], [1]], *step).nodes["h"].tolist() == [1, 1, 0, 0]
    assert graphs.prop_edges(chain, [[0], [1], [2]], *step).nodes["h"].tolist() == [1, 1, 1, 1]


def test_under_jit_with_traced_places() -> None:
    graph = with_old(make_graph(formats=("mailbox",)))
    for call, ids in ((graphs.send_and_recv, [3, 0]), (graphs.pull, [0, 4]), (graphs.push, [1, 3])):
        jitted = jax.jit(lambda g, i, call=call: call(g, i, COPY, ADD))
        assert_bitwise_equal(jitted(graph, jnp.array(ids)).nodes, call(graph, ids, COPY, ADD).nodes)
    pulled = jax.jit(lambda g, i: graphs.pull(g, i, COPY, reduce_by_hand))(graph, jnp.array([0]))
    assert pulled.nodes["x"].tolist() == [100, -1, -1, -1, -1]


def test_user_defined_reductions_under_jit_need_mailboxes() -> None:
    run = jax.jit(lambda g: graphs.update_all(g, COPY, reduce_by_hand).nodes["x"])
    assert run(make_graph(formats=("mailbox",))).tolist() == [100, 1102, 10, 0, 0]
    with pytest.raises(TypeError, match=r'make the graph with formats=\("mailbox",\)'):
        run(make_graph())
    closed_over = make_graph()
    run = jax.jit(lambda h: graphs.update_all(closed_over.with_nodes(h=h), COPY, reduce_by_hand))
    assert run(closed_over.nodes["h"]).nodes["x"].tolist() == [100, 1102, 10, 0, 0]


def test_wrong_arguments_are_named() -> None:
    graph = make_graph(edges={"w": jnp.ones((6, 3))})
    errors = [
        (fn.copy_u("g", "m"), ADD, "copy_u: no sender feature 'g'; there are: 'h'"),
        (fn.copy_e("h", "m"), ADD, "copy_e: no edge feature 'h'; there are: 'w'"),
        (fn.copy_u("h", "n"), ADD, "copy_u returns the message 'n', but sum needs 'm'"),
        (lambda edges: {"n": edges.src["h"]}, ADD, "sum needs the message 'm'; there are: 'n'"),
        (lambda edges: {"m": edges.src["h"][:2]}, ADD, r"message function's 'm' must have 6 rows"),
        (COPY, lambda nodes: {"x": jnp.ones(9)}, r"reduce function's 'x' must have \d rows"),
    ]
    for message, reduce, text in errors:
        with pytest.raises(ValueError, match=text):
            graphs.update_all(graph, message, reduce)
    with pytest.raises(TypeError, match="message function must return a dictionary of arrays, got"):
        graphs.update_all(graph, lambda edges: edges.src["h"], ADD)  # pyright: ignore[reportArgumentType]
    wrong: list[tuple[Any, Any, str]] = [
        ("copy_u", ADD, "message must be a function or a built-in one, such as fn.copy_u"),
        (fn.u_mul_e, ADD, "message must be a function or a built-in one, such as"),
        (ADD, COPY, "reduce must be a function or a built-in one, such as fn.sum"),
        (COPY, fn.sum, "reduce must be a function or a built-in one, such as"),
    ]
    for message, reduce, text in wrong:
        with pytest.raises(TypeError, match=text):
            graphs.update_all(graph, message, reduce)
    with pytest.raises(KeyError, match="no sender feature 'g'; there are: 'h'"):
        graphs.update_all(graph, lambda edges: {"m": edges.src["g"]}, ADD)
    with pytest.raises(KeyError, match="no message 'n'; there are: 'm'"):
        graphs.update_all(graph, COPY, lambda nodes: {"x": nodes.mailbox["n"]})
    with pytest.raises(ValueError, match=r"edges must be indices or \(senders, receivers\), got 3 arrays"):
        three: Any = (0, 1, 2)
        graphs.send_and_recv(graph, three, COPY, ADD)
    other_shape = graph.with_nodes(h=jnp.ones((5, 4)))
    with pytest.raises(
        ValueError,
        match=r"u_mul_e: feature 'h' of the sender and 'w' of the edge have shapes \(4,\) and "
        r"\(3,\) after their first axes: they do not broadcast",
    ):
        graphs.update_all(other_shape, fn.u_mul_e("h", "w", "m"), ADD)
    with pytest.raises(ValueError, match=r"u_dot_e: .* the last axes differ"):
        graphs.apply_edges(other_shape.with_edges(w=jnp.ones((6, 1))), fn.u_dot_e("h", "w", "m"))
    with pytest.raises(ValueError, match=r"edges\[1\] = 6 is out of range for 6 edges"):
        graphs.send_and_recv(graph, [0, 6], COPY, ADD)
    with pytest.raises(ValueError, match=r"nodes\[0\] = -1 is out of range for 5 nodes"):
        graphs.pull(graph, [-1], COPY, ADD)
    with pytest.raises(TypeError, match="nodes must be integers, got float64"):
        half: Any = [0.5]
        graphs.push(graph, half, COPY, ADD)
    with pytest.raises(ValueError, match="edges: there is no edge from 3 to 4"):
        graphs.send_and_recv(graph, (np.array([0, 3]), np.array([1, 4])), COPY, ADD)
    with pytest.raises(ValueError, match="etype='knows', but the graph has one type"):
        graphs.update_all(graph, COPY, ADD, etype="knows")
    with pytest.raises(ValueError, match=r"'h' has shape \(5,\), but the new rows have shape"):
        graphs.pull(graph, [0], COPY, lambda nodes: {"h": jnp.ones((len(nodes), 2))})
