"""Readouts of batches beside float64 by numpy, graph by graph: padding is no part of any."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import ONE_HALF, assert_within, softmax_sum
from pytrees import compiled_vjp

from jmp_train import graphs

pytestmark = pytest.mark.quick

SIZES = ((3, 5), (1, 0), (0, 0), (70, 90), (2, 4))  # nodes and edges of each graph
OPERATIONS = ("sum", "mean", "max", "min", "var", "std")
OF = {
    "nodes": {"readout": graphs.readout_nodes, "softmax": graphs.softmax_nodes, "broadcast": graphs.broadcast_nodes},
    "edges": {"readout": graphs.readout_edges, "softmax": graphs.softmax_edges, "broadcast": graphs.broadcast_edges},
}


def a_batch(*, padded: bool = True) -> graphs.Graph:
    """Returns a batch of graphs, one without nodes and one without edges."""
    random = np.random.default_rng(0)
    parts = [
        graphs.from_edges(senders, receivers, nodes, formats=("coo",))
        for nodes, edges in SIZES
        for senders, receivers in [random.integers(0, max(nodes, 1), (2, edges))]
    ]
    whole = graphs.batch(parts)
    return graphs.pad(whole, 90, 128, n_graph=8) if padded else whole


def parts_of(rows: Any, part: str) -> list[np.ndarray]:
    """Returns the rows of each graph, in float64, those of padding left out."""
    counts = [size[part == "edges"] for size in SIZES]
    return np.split(np.asarray(rows, np.float64)[: sum(counts)], np.cumsum(counts)[:-1])


def rows_for(part: str, dtype: Any, seed: int = 0) -> jax.Array:
    count = 90 if part == "nodes" else 128
    rows = np.random.default_rng(seed).normal(3, 1, (count, 2)).astype(dtype)
    rows[sum(size[part == "edges"] for size in SIZES) :] = 1e4  # padding, which would be noticed
    return jnp.asarray(rows)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [*ONE_HALF, pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize("part", ["nodes", "edges"])
def test_readouts_are_exact_and_so_are_their_gradients(part: str, dtype: str) -> None:
    batch, rows = a_batch(), rows_for(part, dtype)
    run = lambda rows: [OF[part]["readout"](batch, rows, op=op) for op in OPERATIONS]
    cotangents = [jnp.ones((8, 2), dtype)] * len(OPERATIONS)
    results, (grads,) = compiled_vjp(run, cotangents, rows)
    wanted = {op: [getattr(x, op)(0) if len(x) else np.zeros(2) for x in parts_of(rows, part)] for op in OPERATIONS}
    sizes = [np.abs(x).sum(0) for x in parts_of(rows, part)]
    for op, result in zip(OPERATIONS, results, strict=True):
        assert (result.shape, result.dtype) == ((8, 2), dtype)
        assert not np.asarray(result[len(SIZES) :]).any()
        assert_within(result[: len(SIZES)], wanted[op], dtype, sizes, 1)
    assert grads.dtype == dtype
    for rows_of_graph, found in zip(parts_of(rows, part), parts_of(grads, part), strict=True):
        if not len(rows_of_graph):
            continue
        rest = rows_of_graph - rows_of_graph.mean(0)
        std = np.where(rest.std(0) > 0, rest.std(0), 1)
        largest, least = (rows_of_graph == getattr(rows_of_graph, name)(0) for name in ("max", "min"))
        exact = 1 + 1 / len(rest) + 2 * rest / len(rest) + rest / std / len(rest)
        exact = exact + largest / largest.sum(0) + least / least.sum(0)
        tolerance = 8 * float(jnp.finfo(dtype).eps)  # the gradients of six readouts are added in the rows' dtype
        np.testing.assert_allclose(found, exact, rtol=tolerance, atol=tolerance)
    assert not np.asarray(grads[-5:]).any()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("part", ["nodes", "edges"])
def test_softmax_broadcasts_and_weights(part: str) -> None:
    batch, rows = a_batch(), rows_for(part, "float32")
    of_graphs = jnp.arange(16.0).reshape(8, 2)
    weight = jnp.linspace(0, 1, len(rows))

    @jax.jit
    def run(batch: graphs.Graph, rows: jax.Array, of_graphs: jax.Array) -> Any:
        named = batch.with_nodes(x=rows, w=weight) if part == "nodes" else batch.with_edges(x=rows, w=weight)
        functions = OF[part]
        read, pullback = jax.vjp(lambda x: functions["broadcast"](named, x), of_graphs)
        weighted = functions["readout"](named, "x", "w", op="mean")
        return functions["softmax"](named, "x"), read, pullback(rows)[0], weighted

    weights, read, back, weighted = run(batch, rows, of_graphs)
    lists = zip(*(parts_of(x, part) for x in (rows, weights, read, weight)), strict=True)
    for place, (x, softmax, copies, w) in enumerate(lists):
        if len(x):
            np.testing.assert_allclose((softmax * x).sum(0), softmax_sum(x), rtol=1e-5)
            np.testing.assert_allclose(weighted[place], (x * w[:, None]).mean(0), rtol=1e-5)
        np.testing.assert_array_equal(copies, np.broadcast_to(np.asarray(of_graphs)[place], x.shape))
        np.testing.assert_allclose(back[place], x.sum(0), rtol=1e-5, atol=1e-5)
    total = sum(size[part == "edges"] for size in SIZES)
    assert not np.asarray(weights[total:]).any() and not np.asarray(read[total:]).any()


@pytest.mark.parametrize("half", ONE_HALF)
def test_a_graph_of_many_nodes_does_not_stagnate(half: str) -> None:
    graph = graphs.from_edges([], [], 5_000, {"h": np.ones(5_000, jnp.dtype(half))}, formats=("coo",))
    nearest = float(np.asarray(5_000, jnp.dtype(half)))

    @jax.jit
    def run(graph: graphs.Graph) -> list[jax.Array]:
        _, pullback = jax.vjp(lambda x: graphs.broadcast_nodes(graph, x), jnp.ones(1, half))
        return [graphs.sum_nodes(graph, "h"), graphs.mean_nodes(graph, "h"), *pullback(graph.nodes["h"])]

    assert [found.tolist() for found in run(graph)] == [[nearest], [1], [nearest]]


@pytest.mark.full
def test_the_short_names_are_readouts_and_take_jraphs_graphs() -> None:
    batch = a_batch(padded=False).with_nodes(h=jnp.arange(76.0)).with_edges(h=jnp.arange(99))
    jraphs = graphs.to_jraph(batch)
    for op in ("sum", "mean", "max", "min"):
        for part in ("nodes", "edges"):
            found = getattr(graphs, f"{op}_{part}")(jraphs, "h")
            np.testing.assert_array_equal(found, OF[part]["readout"](batch, "h", op=op))
    assert graphs.sum_edges(batch, "h").dtype == graphs.max_edges(batch, "h").dtype == "int32"
    assert graphs.sum_nodes(batch, batch.nodes["h"] > 1).tolist() == [1, 1, 0, 70, 2]  # booleans are counted


def test_running_sums_along_edges_of_nodes_and_graphs() -> None:
    batch = a_batch()
    values = jnp.asarray(np.random.default_rng(0).integers(1, 9, 128), jnp.int16)
    run = jax.jit(lambda by: graphs.edge_cumsum(batch, values, by), static_argnums=0)
    ids = {"dst": batch.receivers, "src": batch.senders, "graph": np.repeat(np.arange(5), [e for _, e in SIZES])}
    for by, owners in ids.items():
        owners = np.asarray(owners)[:99]
        wanted = np.zeros(128)
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            wanted[mine] = np.cumsum(np.asarray(values)[mine])
        assert run(by).tolist() == wanted.tolist()
    with pytest.raises(ValueError, match="by='edge' must be one of 'dst', 'src', 'graph'"):
        graphs.edge_cumsum(batch, values, "edge")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8", "bool"])
def test_the_largest_rows_are_numpys(dtype: str) -> None:
    batch, k = a_batch(), 4
    rows = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (90, 3)).astype(dtype)
    if dtype == "float16":
        rows[5, 1] = np.nan
    runs = [functools.partial(graphs.topk_nodes, batch, k=k, descending=descending) for descending in (True, False)]
    results = jax.jit(lambda rows: [(run(rows), run(rows, sortby=-1)) for run in runs])(rows)
    for descending, (each, by_last) in zip((True, False), results, strict=True):
        assert each.values.dtype == by_last.values.dtype == dtype
        start = 0
        for place, (count, _) in enumerate(SIZES):
            mine, start = rows[start : start + count].astype(np.float64), start + count
            keys = -mine if descending else mine
            order, kept = np.argsort(keys, axis=0, kind="stable")[:k], min(k, count)
            np.testing.assert_array_equal(each.places[place, :kept], order)
            np.testing.assert_array_equal(each.values[place, :kept], np.take_along_axis(mine, order, 0))
            np.testing.assert_array_equal(by_last.places[place, :kept], order[:, -1])
            np.testing.assert_array_equal(by_last.values[place, :kept], mine[order[:, -1]])
            assert (np.asarray(each.places[place, kept:]) == -1).all()
            assert not np.asarray(by_last.values[place, kept:]).any()


def test_the_gradient_of_the_largest_goes_to_their_rows() -> None:
    batch = graphs.batch([graphs.from_edges([], [], 3), graphs.from_edges([0, 0], [0, 0], 1)])
    run = lambda x: graphs.topk_nodes(batch, x, 2).values
    _, (grads,) = compiled_vjp(run, jnp.array([[1, 2], [3, 4]], jnp.float16), jnp.array([1, 9, 4, 7], jnp.float16))
    assert grads.tolist() == [0, 1, 2, 3]
    found = jax.jit(lambda x: graphs.topk_edges(batch, x, 1))(np.array([1, 5], np.float32))
    assert (found.values.tolist(), found.places.tolist()) == ([[0], [5]], [[-1], [1]])


def test_wrong_arguments_are_named() -> None:
    graph = graphs.from_edges([0], [1], 2, nodes={"h": jnp.ones((2, 3))})
    with pytest.raises(ValueError, match="no feature 'x' of the nodes; there are: 'h'"):
        graphs.sum_nodes(graph, "x")
    with pytest.raises(ValueError, match="no feature 'x' of the edges; there are: none"):
        graphs.softmax_edges(graph, "x")
    with pytest.raises(ValueError, match=r"feature must have 2 rows, one for each of the nodes, got shape \(3,\)"):
        graphs.mean_nodes(graph, jnp.ones(3))
    with pytest.raises(ValueError, match=r"weight must fit the shape of the feature, \(2, 3\)"):
        graphs.max_nodes(graph, "h", jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="op='prod' must be one of 'sum', 'mean', 'max', 'min', 'var', 'std'"):
        graphs.readout_nodes(graph, "h", op="prod")
    with pytest.raises(ValueError, match="of_graphs must have 1 rows, one for each of the graphs"):
        graphs.broadcast_nodes(graph, jnp.ones((2, 3)))
    with pytest.raises(TypeError, match=r"graph must be a Graph or a jraph.GraphsTuple, got int"):
        graphs.sum_nodes(3, "h")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"sortby=3 is out of range for the last axis of the feature \["):
        graphs.topk_nodes(graph, "h", 1, sortby=3)
    with pytest.raises(ValueError, match="k=-1 must be at least 0"):
        graphs.topk_nodes(graph, "h", -1)
