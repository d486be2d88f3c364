"""What is dropped under jit is as if it were removed, for every operation, in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.stats
from hypothesis import given, settings
from odd_graphs import ODD, Ends, edges

from jmp_train import graphs
from jmp_train.graphs import fn, normalize_rows
from jmp_train.graphs.structure import CSR, padded_block

pytestmark = pytest.mark.quick

FORMATS = (("coo",), ("coo", "csr"), ("csr",))


def sorted_edges(csr: CSR) -> tuple[list[tuple[int, int]], dict[int, tuple[int, int]]]:
    """Returns the (node, other) of all edges by block, and the same by the ids of edges, read by their slots."""
    csr = jax.tree.map(np.asarray, csr)
    ends = np.cumsum(csr.degrees)
    found = []
    for start, count, node in zip(csr.starts, csr.counts, csr.nodes, strict=True):
        found += [(int(node), int(other)) for other in csr.others[start : start + count]]
        assert not count or ends[node] - csr.degrees[node] <= start <= start + count <= ends[node]
    by_id = {}
    for edge, slot in enumerate([] if csr.slots is None else csr.slots.tolist()):
        if slot >= 0:
            block, place = divmod(slot, csr.width)
            position = csr.starts[block] + place
            assert place < csr.counts[block]
            assert csr.edge_ids[position] == edge
            by_id[edge] = int(csr.nodes[block]), int(csr.others[position])
    return found, by_id


@functools.partial(jax.jit, static_argnums=1)
def dropped(graph: Any, rate: float, key: jax.Array) -> Any:
    return graphs.drop_edges(graph, rate, key)


def check_structure(ends: Ends, seed: int, formats: tuple[str, ...], padded: bool) -> None:
    """Asserts that all indices have the kept edges, and nothing else."""
    graph = graphs.from_edges(*ends, formats=("coo",) if padded else formats)
    if padded:
        graph = graphs.pad(graph, 42, 96, formats=formats)
    found = dropped(graph, 0.5, jax.random.key(seed))
    pairs = list(zip(ends[0].tolist(), ends[1].tolist(), strict=True))
    mask = np.zeros(0, bool)
    if formats == ("csr",):
        kept = {pair for pair in pairs if pair in sorted_edges(found.connections.neighbors.by_source)[0]}
        left = [pair for pair in pairs if pair in kept]  # parallel edges are dropped together
    else:
        mask = np.asarray(graphs.edge_mask(found))
        assert not mask[len(pairs) :].any()
        left = [pair for pair, is_kept in zip(pairs, mask, strict=False) if is_kept]
        for name, column in (("senders", 0), ("receivers", 1)):
            ids = np.where(mask[: len(pairs)], ends[column], graph.num_nodes)
            assert getattr(found, name).tolist()[: len(pairs)] == ids.tolist()
    for degrees, column in ((found.out_degrees, 0), (found.in_degrees, 1)):
        counts = np.bincount([pair[column] for pair in left], minlength=graph.num_nodes)
        assert degrees.tolist() == counts.tolist()
    if "csr" in formats:
        neighbors = found.connections.neighbors
        by_source, of_sources = sorted_edges(neighbors.by_source)
        by_target, of_targets = sorted_edges(neighbors.by_target)
        assert sorted(by_source) == sorted(left)
        assert sorted((v, u) for u, v in by_target) == sorted(left)
        if "coo" in formats:
            ids = np.flatnonzero(mask).tolist()
            assert of_sources == dict(zip(ids, left, strict=True))
            assert of_targets == {edge: (v, u) for edge, (u, v) in of_sources.items()}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("padded", [True, False])
def test_indices_have_the_kept_edges(padded: bool, name: str, formats: tuple[str, ...]) -> None:
    check_structure(ODD[name], 1, formats, padded=padded)


@pytest.mark.full
@pytest.mark.parametrize("formats", FORMATS)
@settings(max_examples=60, deadline=None)
@given(ends=edges())
def test_indices_of_random_graphs_have_the_kept_edges(formats: tuple[str, ...], ends: Ends) -> None:
    check_structure(ends, len(ends[0]), formats, padded=True)


@pytest.fixture(name="graph", scope="module")
def fixture_graph() -> graphs.Graph:
    """Returns a padded batch of odd graphs with features in float64."""
    random = np.random.default_rng(0)
    parts = [ODD[name] for name in ("hub", "multi-edges", "one node", "isolated", "none")]
    parts.append((*random.integers(0, 30, (2, 90)), 30))
    with jax.enable_x64(True):
        batch = graphs.batch([graphs.from_edges(*ends) for ends in parts])
        nodes = {name: random.normal(size=(batch.num_nodes, 3)) for name in ("h", "k")}
        batch = batch.with_nodes(**nodes).with_edges(w=random.normal(size=(batch.num_edges, 3)))
        return graphs.pad(batch, batch.num_nodes + 5, batch.num_edges + 9)


def few_of_batch(graph: graphs.Graph) -> dict[str, jax.Array]:
    """Returns some of what graphs, and their real nodes, make of a batch."""
    rows = jnp.stack([graphs.softmax_nodes(graph, "k"), graph.nodes["h"]], 1)
    return {
        "nodes": graphs.mean_nodes(graph, "h"),
        "edges": graphs.mean_edges(graph, "w"),
        "rows": rows,
        "edge rows": jnp.where(graphs.edge_mask(graph)[:, None], graphs.edge_softmax(graph, graph.edges["w"]), 0),
    }


def of_batch(graph: graphs.Graph) -> dict[str, jax.Array]:
    """Returns what graphs, and their real nodes, make of a batch."""
    h, w = graph.nodes["h"], graph.edges["w"]
    found = {}
    for op in ("sum", "mean", "max", "min", "var", "std"):
        found[f"nodes {op}"] = graphs.readout_nodes(graph, "h", op=op)
        found[f"edges {op}"] = graphs.readout_edges(graph, "w", op=op)
    found["topk nodes"] = graphs.topk_nodes(graph, "h", 3).values
    found["topk edges"] = graphs.topk_edges(graph, w, 3, sortby=0).values
    found["attention"] = graphs.attention_pooling(graph, h, h[:, :1])
    found["dense"] = graphs.to_dense_adj(graph, "w", 60).sum((1, 2))
    gcn = graphs.graph_conv(graph, h, allow_zero_in_degree=True)
    rows = jnp.stack([graphs.graph_norm(graph, h), graphs.softmax_nodes(graph, "k"), gcn], 1)
    mean, variance = graphs.masked_moments(h, graphs.node_mask(graph))
    found["moments"] = jnp.concatenate([mean, variance])[None]
    dense, mask = graphs.to_dense_batch(graph, "h", 60)
    found["dense nodes"] = jnp.stack(
        [dense.sum(1), jnp.broadcast_to(mask.sum(1, dtype=h.dtype)[:, None], (len(mask), 3))], 1
    )
    edge_rows = jnp.where(
        graphs.edge_mask(graph)[:, None], graphs.softmax_edges(graph, "w") + graphs.edge_softmax(graph, w), 0
    )
    return found | {"rows": rows, "edge rows": edge_rows}


@pytest.mark.full
@pytest.mark.parametrize("results", [few_of_batch, of_batch])
def test_batches_are_as_if_nodes_and_edges_were_removed(graph: graphs.Graph, results: Any) -> None:
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0))
        drop = jax.jit(lambda graph: graphs.drop_edges(graphs.drop_nodes(graph, 0.3, keys[0]), 0.2, keys[1]))
        smaller = drop(graph)
        found = jax.tree.map(np.asarray, jax.jit(results)(smaller))
        nodes, kept = np.asarray(graphs.node_mask(smaller)), np.flatnonzero(graphs.edge_mask(smaller))
        assert 0.5 < nodes.sum() / 90 < 0.95
        numbers = np.cumsum(nodes) - 1
        owners = np.repeat(np.arange(len(graph.n_node)), graph.n_node)[nodes]
        of_edges = np.repeat(np.arange(len(graph.n_edge)), graph.n_edge)[kept]
        left = graphs.from_edges(
            numbers[np.asarray(graph.senders)[kept]],
            numbers[np.asarray(graph.receivers)[kept]],
            int(nodes.sum()),
            {name: np.asarray(rows)[nodes] for name, rows in graph.nodes.items()},
            {"w": np.asarray(graph.edges["w"])[kept]},
        )
        count = len(graph.n_node)
        counts = {name: np.bincount(ids, minlength=count) for name, ids in (("n_node", owners), ("n_edge", of_edges))}
        left = dataclasses.replace(left, **{name: jnp.asarray(x, jnp.int32) for name, x in counts.items()})
        for name, rows in jax.jit(results)(left).items():
            actual = found[name]
            actual = actual[nodes] if name == "rows" else actual[kept] if name == "edge rows" else actual
            np.testing.assert_allclose(actual, rows, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.full
def test_the_largest_nodes_are_found_at_their_places(graph: graphs.Graph) -> None:
    @jax.jit
    def largest(graph: graphs.Graph) -> Any:
        smaller = graphs.drop_nodes(graph, 0.3, jax.random.key(0))
        return graphs.node_mask(smaller), graphs.topk_nodes(smaller, "h", 2, sortby=0)

    with jax.enable_x64(True):
        mask, top = largest(graph)
    starts = np.cumsum(graph.n_node) - graph.n_node
    mask, places, values, h = map(np.asarray, (mask, top.places, top.values, graph.nodes["h"]))
    for place, start, rows in zip(places, starts, values, strict=True):
        np.testing.assert_array_equal(h[place + start][place >= 0], rows[place >= 0])
    assert mask[(places + starts[:, None])[places >= 0]].all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("formats", FORMATS)
def test_each_key_drops_others_in_one_trace(formats: tuple[str, ...]) -> None:
    traces, count = [], 3_000
    ends = np.arange(count), np.roll(np.arange(count), 1)
    graph = graphs.from_edges(ends[0], ends[1], count, {"h": np.ones((count, 2), np.float16)}, formats=formats)

    @jax.jit
    def degrees(graph: graphs.Graph, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        traces.append(None)
        smaller = graphs.drop_nodes(graph, 0.25, key)
        return graphs.drop_edges(graph, 0.25, key).in_degrees, graphs.node_mask(smaller), smaller.in_degrees

    edges_kept, nodes_kept = np.zeros(count), np.zeros(count)
    for seed in range(16):
        of_edges, of_nodes, left = degrees(graph, jax.random.key(seed))
        edges_kept += np.asarray(of_edges)
        nodes_kept += np.asarray(of_nodes)
        np.testing.assert_array_equal(left[ends[1]], of_nodes[ends[0]] & of_nodes[ends[1]])
    assert len(traces) == 1
    for kept in (edges_kept, nodes_kept):  # binomial, of 16 draws
        seen = np.bincount(kept.astype(int), minlength=17)
        expected = count * scipy.stats.binom.pmf(np.arange(17), 16, 0.75)
        seen, expected = (np.append(x[:7].sum(), x[7:]) for x in (seen, expected))
        assert scipy.stats.chisquare(seen, expected).pvalue > 1e-4

    @jax.jit
    def extremes(graph: graphs.Graph, key: jax.Array) -> list[jax.Array]:
        all_kept, none_kept = (graphs.drop_edges(graph, rate, key).in_degrees for rate in (0.0, 1.0))
        return [all_kept, none_kept, graphs.node_mask(graphs.drop_nodes(graph, 1, key))]

    all_kept, none_kept, nodes_left = extremes(graph, jax.random.key(0))
    assert all_kept.tolist() == graph.in_degrees.tolist()
    assert not np.asarray(none_kept).any() and not np.asarray(nodes_left).any()


def test_edges_of_several_types_and_of_blocks_are_dropped() -> None:
    kinds = {("a", "to", "b"): ODD["hub"][:2], ("b", "to", "b"): ODD["multi-edges"][:2]}
    graph = graphs.hetero_from_edges(kinds, {"a": 40, "b": 40})
    block = padded_block(np.arange(40), np.repeat([0, 1], 20), 40, 3, num_edges=50)

    @jax.jit
    def run(key: jax.Array) -> tuple[graphs.HeteroGraph, jax.Array, jax.Array]:
        less = graphs.drop_edges(block, 0.5, key)
        given = less.graph({"h": jnp.ones(40, jnp.float16)})
        passed = graphs.update_all(given, fn.copy_u("h", "m"), fn.sum("m", "s")).nodes["target"]["s"]
        return graphs.drop_edges(graph, 0.5, key), passed, less.in_degrees

    smaller, passed, degrees = run(jax.random.key(0))
    for kind, (senders, receivers) in kinds.items():
        mask = np.asarray(smaller.connections[kind].receivers.is_counted)
        assert smaller.in_degrees(kind).tolist() == np.bincount(receivers[mask], minlength=40).tolist()
        assert smaller.out_degrees(kind).tolist() == np.bincount(senders[mask], minlength=40).tolist()
    assert passed.tolist() == degrees.tolist()
    assert 8 < passed.sum() < 32
    assert passed[2] == 0


def test_columns_of_features_are_dropped() -> None:
    nodes = {"h": np.ones((4, 64), np.float16), "i": np.ones((4, 2), np.int32)}
    graph = graphs.from_edges([0], [1], 4, nodes, {"w": np.ones((1, 2, 50), np.float32)})

    @jax.jit
    def run(key: jax.Array) -> tuple[graphs.Graph, graphs.Graph]:
        some = graphs.drop_features(graph, 0.75, key, edges=("w",))
        return some, graphs.drop_features(graph, 1.0, key, nodes=("i",))

    found, none = run(jax.random.key(0))
    h, w = np.asarray(found.nodes["h"]), np.asarray(found.edges["w"])
    assert h.dtype == np.float16
    assert (h == h[0]).all()
    assert 5 < h[0].sum() < 27
    assert 10 < w.sum() < 40
    assert found.nodes["i"].sum() == 8
    assert none.nodes["i"].sum() == 0


def test_what_dropping_refuses() -> None:
    graph, key = graphs.from_edges([0], [1], 2), jax.random.key(0)
    drop = jax.jit(lambda key: (graphs.drop_edges(graph, 1, key), graphs.drop_nodes(graph, 0, key)))
    fewer_edges, fewer_nodes = drop(key)
    cases: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (graphs.drop_edges, (graph, 1.5, key), ValueError, "rate=1.5 must be between 0 and 1"),
        (graphs.drop_edges, (graph, jnp.float32(0.5), key), TypeError, "rate must be a Python number, got ArrayImpl"),
        (
            graphs.drop_edges,
            (graphs.to_jraph(graph), 0.5, key),
            TypeError,
            "got GraphsTuple; convert .* with from_jraph",
        ),
        (graphs.drop_nodes, (3, 0.5, key), TypeError, "graph must be a Graph, got int"),
        (graphs.drop_features, (graph, 0.5, key, ("x",)), ValueError, "no feature 'x' of the nodes; there are: none"),
        (graphs.batch, ([fewer_edges],), ValueError, "graph has dropped edges or nodes"),
        (graphs.pad, (fewer_nodes, 4, 4), ValueError, "graph has dropped edges or nodes"),
        (graphs.reverse, (fewer_nodes,), ValueError, "graph has dropped nodes"),
        (graphs.reverse, (fewer_edges,), ValueError, r"senders\[0\] = 2 is out of range"),
    ]
    for function, arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            function(*arguments)

    def last(nodes: graphs.NodeBatch) -> dict[str, jax.Array]:
        return {"r": nodes.mailbox["m"][:, -1]}

    def reduced(key: jax.Array) -> jax.Array:
        smaller = jax.jit(lambda key: graphs.drop_edges(graph.with_nodes(h=np.ones(2, "f")), 0.0, key))(key)
        return graphs.update_all(smaller, fn.copy_u("h", "m"), last).nodes["r"]

    assert reduced(key).tolist() == [0, 1]
    with pytest.raises(TypeError, match="graphs with dropped edges, have no mailboxes"):
        jax.jit(reduced)(key)


def test_rows_of_counts_are_planetoids() -> None:
    """By the product with a diagonal matrix of inverse sums, 0 where a row is empty."""
    counts = np.random.default_rng(0).poisson(0.2, (40, 12)).astype(np.float32)
    counts[3] = 0
    sums = counts.sum(axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(sums == 0, 0, 1 / sums.astype(np.float64))
    wanted: Any = scipy.sparse.diags_array(inverse) @ scipy.sparse.csr_array(counts)
    found = normalize_rows(counts)
    assert (type(found), found.dtype) == (np.ndarray, np.float32)
    np.testing.assert_allclose(found, wanted.toarray(), rtol=1e-7)
    assert not found[3].any()
    np.testing.assert_allclose(found.sum(axis=1), sums > 0, rtol=1e-6)


def test_signs_stay_and_what_cancels_is_not_blown_up() -> None:
    rows = np.array([[1, -1], [-3, -1], [3, -1]], np.float32)
    wanted = [[0.5, -0.5], [-0.75, -0.25], [0.75, -0.25]]
    assert normalize_rows(rows).tolist() == wanted
    assert rows.tolist() == [[1, -1], [-3, -1], [3, -1]]  # the caller's, still as they were


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_half_rows_are_upcast_added_and_stay_half(dtype: str, make: Any) -> None:
    """5,000 ones add up to 5,000, and a sum beyond float16 still divides."""
    ones, large = np.ones((2, 5_000)), np.full((2, 5_000), 60_000.0)
    for rows in (ones, large):
        found = normalize_rows(make(rows.astype(jnp.dtype(dtype))))
        assert isinstance(found, type(make(ones)))
        assert found.dtype == dtype
        exact = np.full((2, 5_000), np.float32(1 / 5_000)).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(found), exact)


def test_sums_beyond_float32_and_infinities() -> None:
    rows = np.array([[3e38, 3e38], [np.inf, 1], [1, 1]], np.float32)
    np.testing.assert_array_equal(normalize_rows(rows), [[0.5, 0.5], [np.nan, 0], [0.5, 0.5]])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing(shape: tuple[int, int]) -> None:
    assert normalize_rows(jnp.ones(shape)).shape == shape


def test_what_has_no_rows_of_floats_is_refused() -> None:
    with pytest.raises(TypeError, match="features must be an array, got list"):
        normalize_rows([[1.0]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="features must be floating, got int64"):
        normalize_rows(np.ones((2, 2), np.int64))
    with pytest.raises(ValueError, match=r"must have shape \[nodes, width\], got shape \(2,\)"):
        normalize_rows(np.ones(2))
    with pytest.raises(TypeError, match="features is traced: call normalize_rows outside of jit"):
        jax.jit(normalize_rows)(jnp.ones((2, 2)))
