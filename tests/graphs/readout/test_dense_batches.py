import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_graphs import ODD, Ends, edges

from jmp_train import graphs

pytestmark = pytest.mark.quick


def make(ends: Ends) -> graphs.Graph:
    random = np.random.default_rng(len(ends[0]))
    features = {"w": random.integers(-9, 9, (len(ends[0]), 2)).astype(np.float16)}
    nodes = {"h": random.normal(size=(ends[2], 3)).astype(np.float16)}
    return graphs.from_edges(*ends, nodes, features, formats=("coo",))


@functools.partial(jax.jit, static_argnums=1)
def arrays(graph: graphs.Graph, width: int) -> Any:
    dense, mask = graphs.to_dense_batch(graph, "h", width)
    matrices = graphs.to_dense_adj(graph, max_nodes=width), graphs.to_dense_adj(graph, "w", width)
    return dense, mask, graphs.from_dense_batch(graph, dense), *matrices


def check(several: list[Ends], width: int, sizes: tuple[int, int, int]) -> None:
    parts = [make(ends) for ends in several]
    batch = graphs.batch(parts)
    count = len(parts)
    wanted = np.zeros((count, width, 3), np.float16)
    counts, sums = np.zeros((count, width, width)), np.zeros((count, width, width, 2))
    for place, part in enumerate(parts):
        wanted[place, : part.num_nodes] = part.nodes["h"]
        ends = np.asarray(part.senders), np.asarray(part.receivers)
        np.add.at(counts[place], ends, 1)
        np.add.at(sums[place], ends, np.asarray(part.edges["w"], np.float64))
    dense, mask, back, found, found_sums = arrays(graphs.pad(batch, *sizes), width)
    np.testing.assert_array_equal(dense[:count], wanted)
    np.testing.assert_array_equal(mask[:count], np.arange(width) < np.array([[ends[2]] for ends in several]))
    assert not mask[count:].any()
    np.testing.assert_array_equal(back[: batch.num_nodes], batch.nodes["h"])
    assert not back[batch.num_nodes :].any()
    np.testing.assert_array_equal(found[:count], counts)
    np.testing.assert_array_equal(found_sums[:count], sums)
    assert dense.dtype == found_sums.dtype == jnp.float16
    again = graphs.from_dense_adj(counts, [ends[2] for ends in several], formats=("coo",))
    assert again.n_node.tolist() == batch.n_node.tolist()
    entries = np.nonzero(counts)
    np.testing.assert_array_equal(again.edges["w"], counts[entries])
    starts = (np.cumsum(again.n_node) - again.n_node)[entries[0]]
    np.testing.assert_array_equal(again.senders, starts + entries[1])
    np.testing.assert_array_equal(again.receivers, starts + entries[2])


def test_dense_arrays_of_odd_graphs() -> None:
    check(list(ODD.values()), 40, (56, 96, 8))


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(st.lists(edges(5, 9), min_size=1, max_size=4))
def test_dense_arrays_equal_loops(several: list[Ends]) -> None:
    check(several, 6, (24, 40, 6))


@pytest.mark.full
def test_without_padding_places_are_as_many_as_the_largest_graph_has_nodes() -> None:
    batch = graphs.batch([make(ODD["isolated"]), make(ODD["multi-edges"])])
    dense, mask = graphs.to_dense_batch(batch, "h")
    assert dense.shape == (2, 6, 3)
    np.testing.assert_array_equal(graphs.from_dense_batch(batch, dense), batch.nodes["h"])
    np.testing.assert_array_equal(dense[mask], batch.nodes["h"])
    assert graphs.to_dense_batch(make(ODD["none"]), "h")[0].shape == (1, 0, 3)


@pytest.mark.full
@pytest.mark.parametrize("is_padded", [False, True])
def test_dropped_nodes_keep_their_places(is_padded: bool) -> None:
    batch = graphs.batch([make(ODD["isolated"]), make(ODD["multi-edges"])])
    graph = graphs.pad(batch, batch.num_nodes + 9, batch.num_edges + 5) if is_padded else batch
    graph = jax.jit(lambda graph: graphs.drop_nodes(graph, 0.5, jax.random.key(4)))(graph)
    is_kept, width = np.asarray(graphs.node_mask(graph))[: batch.num_nodes], int(max(batch.n_node))
    starts = np.cumsum(batch.n_node) - np.asarray(batch.n_node)
    owner = np.repeat(np.arange(len(starts)), batch.n_node)
    place = np.arange(batch.num_nodes) - starts[owner]
    assert not is_kept[[3, 4]].any() and is_kept[5]  # so the kept nodes are fewer than their places
    wanted, mask = np.zeros((len(starts), width, 3), np.float16), np.zeros((len(starts), width), bool)
    wanted[owner[is_kept], place[is_kept]] = np.asarray(batch.nodes["h"])[is_kept]
    mask[owner[is_kept], place[is_kept]] = True
    ends = np.asarray(batch.senders), np.asarray(batch.receivers)
    left = is_kept[ends[0]] & is_kept[ends[1]]
    counts = np.zeros((len(starts), width, width))
    np.add.at(counts, (owner[ends[0]], place[ends[0]], place[ends[1]]), left)
    assert graphs.to_dense_batch(graph, "h")[0].shape[1] == width
    dense, found, _, matrices, _ = arrays(graph, width)
    np.testing.assert_array_equal(dense[:2], wanted)
    np.testing.assert_array_equal(found[:2], mask)
    np.testing.assert_array_equal(matrices[:2], counts)
    assert not found[2:].any()


@pytest.mark.full
def test_under_jit_there_is_one_trace_for_a_size() -> None:
    traces = []

    @jax.jit
    def dense(graph: graphs.Graph) -> Any:
        traces.append(None)
        rows, mask = graphs.to_dense_batch(graph, "h", 8)
        return rows, mask, graphs.to_dense_adj(graph, max_nodes=8), graphs.from_dense_batch(graph, rows)

    for names in (("multi-edges", "isolated"), ("self-loops", "one node")):
        graph = graphs.pad(graphs.batch([make(ODD[name]) for name in names]), 20, 30)
        *_, back = dense(graph)
        np.testing.assert_array_equal(back, jnp.where(graphs.node_mask(graph)[:, None], graph.nodes["h"], 0))
    assert len(traces) == 1
    mask = jax.jit(lambda graph: graphs.to_dense_batch(graph, "h", 1)[1])(make(ODD["multi-edges"]))
    assert mask.tolist() == [[True]]


@pytest.mark.full
def test_a_known_graph_needs_no_width_in_a_jitted_function_that_closes_over_it() -> None:
    graph = make(ODD["multi-edges"])
    dense, mask = jax.jit(lambda rows: graphs.to_dense_batch(graph, rows))(graph.nodes["h"])
    np.testing.assert_array_equal(dense[0], graph.nodes["h"])
    assert mask.all()
    with pytest.raises(ValueError, match="max_nodes=1 is too small"):
        jax.jit(lambda rows: graphs.to_dense_batch(graph, rows, 1))(graph.nodes["h"])


def test_parallel_edges_are_added_in_float32() -> None:
    graph = graphs.from_edges(np.zeros(5000, int), np.ones(5000, int), 2, formats=("coo",))
    found = jax.jit(lambda graph, rows: graphs.to_dense_adj(graph, rows, 2))(graph, jnp.ones(5000, jnp.float16))
    assert found.tolist() == [[[0, 5000], [0, 0]]]


def test_what_dense_arrays_refuse() -> None:
    graph = make(ODD["hub"])
    cases: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (graphs.to_dense_batch, (graph, "h", 39), ValueError, "max_nodes=39 is too small: a graph has more.*node 39"),
        (graphs.to_dense_batch, (graph, "x"), ValueError, "no feature 'x' of the nodes; there are: 'h'"),
        (graphs.from_dense_batch, (graph, jnp.zeros((2, 40))), ValueError, "dense must have 1 rows, one for each of"),
        (graphs.from_dense_batch, (graph, jnp.zeros(1)), ValueError, r"dense must have shape \[graphs, max_nodes"),
        (graphs.from_dense_batch, (graph, jnp.zeros((1, 4))), ValueError, "max_nodes=4 is too small"),
        (graphs.from_dense_adj, (np.zeros((2, 3)),), ValueError, r"adjacency must be \[graphs.*got \(2, 3\)"),
        (graphs.from_dense_adj, (np.zeros((1, 3, 3)), [1, 2]), ValueError, "n_node must have one number.*got 2"),
        (graphs.from_dense_adj, (np.eye(3), [2]), ValueError, r"adjacency\[0\] has an edge beyond its 2 nodes"),
    ]  # fmt: skip
    for function, arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            function(*arguments)
    with pytest.raises(TypeError, match="max_nodes is needed under jit"):
        jax.jit(lambda graph: graphs.to_dense_batch(graph, "h"))(graph)
    with pytest.raises(TypeError, match="adjacency is traced"):
        jax.jit(lambda matrix: graphs.from_dense_adj(matrix).n_node)(jnp.eye(2))
