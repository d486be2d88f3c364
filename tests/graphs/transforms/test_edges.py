import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import networkx as nx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from pytrees import assert_bitwise_equal
from refusals import assert_refused

from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "add_self_loop": graphs.add_self_loop,
    "remove_self_loop": graphs.remove_self_loop,
    "reverse": graphs.reverse,
    "to_simple": graphs.to_simple,
    "to_bidirected": graphs.to_bidirected,
    "reorder by degree": lambda graph, **kwargs: graphs.reorder(graph, **kwargs)[0],
    "reorder by rcm": lambda graph, **kwargs: graphs.reorder(graph, "rcm", **kwargs)[0],
}
IN_FLOAT64: dict[str, Callable[..., Any]] = {
    "first": lambda rows: rows[0],
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
}
Edge = tuple[int, int]
Tuple: Any = jraph.GraphsTuple  # whose annotations know arrays of jax only


def draw_batch(seed: int, formats: tuple[str, ...] = ("coo",), *, weighted: bool = True) -> graphs.Graph:
    """Returns up to three graphs of few nodes with many self-loops and parallel edges, some of them empty."""
    random = np.random.default_rng(seed)
    n_node, n_edge = random.integers(0, 6, 3), random.integers(0, 14, 3)
    n_node, n_edge = n_node[: 1 + seed % 3], np.where(n_node == 0, 0, n_edge)[: 1 + seed % 3]
    starts = np.repeat(np.cumsum(n_node) - n_node, n_edge)
    senders, receivers = (starts + random.integers(0, np.repeat(np.maximum(n_node, 1), n_edge)) for _ in range(2))
    nodes, count = n_node.sum(), n_edge.sum()
    weights = random.integers(-40, 40, count) / 8
    return graphs.from_jraph(
        Tuple(
            nodes={"h": random.normal(size=(nodes, 2)).astype(np.float16)},
            edges={"w": weights.astype(np.float16)} if weighted else None,
            senders=senders,
            receivers=receivers,
            n_node=n_node,
            n_edge=n_edge,
            globals={"y": np.arange(len(n_node), dtype=np.float32)},
        ),
        formats=formats,
    )


def pairs(graph: Any) -> list[Edge]:
    return list(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))


def adjacency(graph: graphs.Graph) -> np.ndarray:
    """Returns how many edges lead from each node to each."""
    entries = np.ones(graph.num_edges, int), (np.asarray(graph.senders), np.asarray(graph.receivers))
    return scipy.sparse.coo_array(entries, shape=(graph.num_nodes,) * 2).toarray()


def joined(weights: dict[Edge, list[float]], edges: list[Edge], reduce: str) -> np.ndarray:
    return np.array([IN_FLOAT64[reduce](weights[edge]) for edge in edges], np.float64)


def assert_in_step(new: graphs.Graph, old: graphs.Graph) -> None:
    """Asserts that all but the edges is what it was, and that each graph of the batch has its edges."""
    for name in ("nodes", "n_node", "globals"):
        assert_bitwise_equal(getattr(new, name), getattr(old, name))
    owners = np.repeat(np.arange(len(old.n_node)), old.n_node)
    found = owners[np.asarray(new.receivers)]
    assert (np.diff(found) >= 0).all()
    assert new.n_edge.dtype == "int32"
    assert new.n_edge.tolist() == np.bincount(found, minlength=len(old.n_node)).tolist()


seeds = st.integers(0, 10_000)
reductions = st.sampled_from(list(IN_FLOAT64))


@settings(max_examples=10, deadline=None)
@given(seed=seeds, fill=st.sampled_from([1.0, -0.5, "sum", "mean", "max", "min"]), keep=st.booleans())
def test_each_node_gets_a_self_loop(seed: int, fill: Any, keep: bool) -> None:
    graph = draw_batch(seed)
    new = graphs.add_self_loop(graph, fill, keep)
    assert_in_step(new, graph)
    wanted = adjacency(graph) + np.eye(graph.num_nodes, dtype=int)
    if not keep:
        np.fill_diagonal(wanted, 1)
    np.testing.assert_array_equal(adjacency(new), wanted)
    rows = list(zip(pairs(graph), graph.edges["w"].tolist(), strict=True))
    old = [row for row in rows if keep or row[0][0] != row[0][1]]
    entering = collections.defaultdict(list)
    for (_, receiver), weight in old:
        entering[receiver].append(weight)
    self_loops = [
        ((v, v), fill if fill not in IN_FLOAT64 else entering[v] and IN_FLOAT64[fill](entering[v]))
        for v in range(graph.num_nodes)
    ]
    owners = np.repeat(np.arange(len(graph.n_node)), graph.n_node)
    both = sorted(old + self_loops, key=lambda row: owners[row[0][0]])  # stable: self-loops come last
    assert pairs(new) == [edge for edge, _ in both]
    weights = np.array([weight or 0 for _, weight in both], np.float64).astype(np.float16)
    np.testing.assert_array_equal(new.edges["w"], weights)
    assert new.edges["w"].dtype == "float16"
    if not keep:
        assert_bitwise_equal(graphs.add_self_loop(new, fill), new)


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_self_loops_are_removed_and_edges_reversed(seed: int) -> None:
    graph = draw_batch(seed)
    graph = graph.with_edges(id=np.arange(graph.num_edges, dtype=np.int32))
    bare = graphs.remove_self_loop(graph)
    assert_in_step(bare, graph)
    wanted = [row for row in zip(pairs(graph), range(99), strict=False) if row[0][0] != row[0][1]]
    assert list(zip(pairs(bare), bare.edges["id"].tolist(), strict=True)) == wanted
    np.testing.assert_array_equal(bare.edges["w"], np.asarray(graph.edges["w"])[np.asarray(bare.edges["id"])])
    assert_bitwise_equal(graphs.remove_self_loop(bare), bare)
    reversed_ = graphs.reverse(graph)
    assert_in_step(reversed_, graph)
    assert pairs(reversed_) == [(v, u) for u, v in pairs(graph)]
    assert_bitwise_equal(reversed_.edges, graph.edges)
    assert_bitwise_equal(graphs.reverse(reversed_), graph)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, reduce=reductions)
def test_parallel_edges_are_joined(seed: int, reduce: str) -> None:
    graph = draw_batch(seed)
    weights = collections.defaultdict(list)
    for edge, weight in zip(pairs(graph), graph.edges["w"].tolist(), strict=True):
        weights[edge].append(weight)
    new = graphs.to_simple(graph, reduce, "times")
    assert_in_step(new, graph)
    assert pairs(new) == list(weights)  # where the first one was
    wanted = joined(weights, list(weights), reduce).astype(np.float16)
    np.testing.assert_array_equal(new.edges["w"], wanted)
    assert new.edges["times"].dtype == "int32"
    assert new.edges["times"].tolist() == [len(rows) for rows in weights.values()]
    simple = graphs.to_simple(graph, reduce)
    assert_bitwise_equal(simple.edges["w"], new.edges["w"])
    assert_bitwise_equal(graphs.to_simple(simple, reduce), simple)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, reduce=reductions)
def test_every_edge_goes_in_both_directions(seed: int, reduce: str) -> None:
    graph = draw_batch(seed)
    new = graphs.to_bidirected(graph, reduce)
    assert_in_step(new, graph)
    wanted = nx.DiGraph(pairs(graph)).to_undirected().to_directed()
    assert sorted(pairs(new)) == sorted(wanted.edges)
    rows = list(zip(pairs(graph), graph.edges["w"].tolist(), strict=True))
    rows += [((v, u), weight) for (u, v), weight in rows if u != v]
    weights = collections.defaultdict(list)
    for edge, weight in rows:
        weights[edge].append(weight)
    found = joined(weights, pairs(new), reduce).astype(np.float16)
    np.testing.assert_array_equal(new.edges["w"], found)
    firsts = list(dict.fromkeys(pairs(graph)))
    assert [edge for edge in pairs(new) if edge in firsts] == firsts
    if reduce != "sum":
        assert_bitwise_equal(graphs.to_bidirected(new, reduce), new)
    assert_bitwise_equal(graphs.to_simple(new, reduce), new)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_features_are_upcast_added_and_rounded_once(dtype: str) -> None:
    """5,000 parallel edges; and a sum just above the middle of two bfloat16s, which float32 lacks."""
    ones = graphs.from_edges([0] * 5_000, [1] * 5_000, 2, edges={"w": np.ones((5_000, 3), jnp.dtype(dtype))})
    wanted = np.full(3, 5_000, jnp.dtype(dtype)).tolist()  # bfloat16: 4992
    for new in (graphs.to_simple(ones, "sum"), graphs.to_bidirected(ones, "sum"), graphs.add_self_loop(ones, "sum")):
        assert new.edges["w"].dtype == dtype
    assert graphs.to_simple(ones, "sum").edges["w"].tolist() == [wanted]
    assert graphs.to_bidirected(ones, "sum").edges["w"].tolist() == [wanted] * 2
    assert np.asarray(graphs.add_self_loop(ones, "sum").edges["w"])[-2:].tolist() == [[0] * 3, wanted]
    assert graphs.to_simple(ones, "mean").edges["w"].tolist() == [[1] * 3]
    bits = 7 if dtype == "bfloat16" else 10
    terms = [1, 2.0 ** -(bits + 1), 2.0**-24]
    for sign, least in ((1, 2.0**-24), (-1, 2.0**-24), (1, -(2.0**-24)), (-1, -(2.0**-24))):
        rows = np.array([sign * term for term in (*terms[:2], least)]).astype(dtype)
        above = graphs.from_edges([0] * 3, [1] * 3, 2, edges={"w": rows})
        found = graphs.to_simple(above, "sum").edges["w"].tolist()
        assert found == [sign * (1 + (least > 0) * 2.0**-bits)]


def test_sums_beyond_a_dtype_are_infinite_or_refused() -> None:
    def twice(row: Any) -> graphs.Graph:
        return graphs.from_edges([0, 0], [1, 1], 2, edges={"w": jnp.stack([row, row])})

    for dtype in ("float16", "bfloat16", "float32"):
        large = jnp.array(jnp.finfo(dtype).max, dtype)
        assert graphs.to_simple(twice(large), "sum").edges["w"].tolist() == [np.inf]
        assert graphs.to_simple(twice(large), "mean").edges["w"].tolist() == [float(large)]
    infinite = graphs.from_edges([0, 0], [1, 1], 2, edges={"w": jnp.array([np.inf, -np.inf])})
    assert np.isnan(graphs.to_simple(infinite, "sum").edges["w"]).all()
    fault = r"the sum of edges\['w'\] is 200, which does not fit into int8"
    with pytest.raises(ValueError, match=fault):
        graphs.to_simple(twice(jnp.array(100, "int8")), "sum")
    assert graphs.to_simple(twice(jnp.array(50, "uint8")), "sum").edges["w"].tolist() == [100]
    assert graphs.to_simple(twice(jnp.array(True)), "max").edges["w"].tolist() == [True]
    with pytest.raises(TypeError, match=r"edges\['w'\] must be floating to have a mean, got int8"):
        graphs.to_simple(twice(jnp.array(100, "int8")), "mean")
    with pytest.raises(TypeError, match=r"edges\['w'\] must be numbers to have a sum, got bool"):
        graphs.add_self_loop(twice(jnp.array(True)), "sum")


def test_many_features_are_coalesced_in_chunks() -> None:
    """2**19 numbers, a hub of 3,000 parallel edges among them, and rows of several axes."""
    random = np.random.default_rng(0)
    senders = np.append(random.integers(0, 60, 5_192), np.zeros(3_000, int))
    receivers = np.append(random.integers(0, 60, 5_192), np.ones(3_000, int))
    rows = random.normal(size=(8_192, 8, 8)).astype(np.float32)
    graph = graphs.from_edges(senders, receivers, 60, edges={"w": rows, "none": rows[:, :0]})
    ids = {edge: place for place, edge in enumerate(dict.fromkeys(pairs(graph)))}
    groups = np.array([ids[edge] for edge in pairs(graph)])
    exact = np.zeros((len(ids), 8, 8))
    np.add.at(exact, groups, rows.astype(np.float64))
    new = graphs.to_simple(graph, "sum")
    np.testing.assert_allclose(new.edges["w"], exact, rtol=1e-6, atol=1e-12)
    assert new.edges["none"].shape == (len(ids), 0, 8)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("formats", [("coo",), ("coo", "csr"), ("csr",), ("coo", "mailbox")])
def test_formats_stay_or_are_chosen(name: str, formats: tuple[str, ...]) -> None:
    transform = TRANSFORMS[name]
    graph = draw_batch(5, formats, weighted=False)
    new, wanted = transform(graph), transform(draw_batch(5, weighted=False))
    kept = new.connections
    assert (kept.ends is None, kept.neighbors is None, kept.mailboxes is None) == (
        "coo" not in formats,
        "csr" not in formats,
        "mailbox" not in formats,
    )
    assert_bitwise_equal((new.nodes, new.n_edge), (wanted.nodes, wanted.n_edge))
    readable = transform(graph, formats=("coo",))
    np.testing.assert_array_equal(adjacency(readable), adjacency(wanted))
    message, reduce = fn.copy_u("h", "m"), fn.sum("m", "x")
    found, expected = (graphs.update_all(g, message, reduce).nodes["x"] for g in (new, wanted))
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=1e-2)
    assert new.in_degrees.tolist() == wanted.in_degrees.tolist()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_of_jraphs_tuples_and_of_nothing(name: str) -> None:
    transform = TRANSFORMS[name]
    for graph in (draw_batch(5), draw_batch(5, weighted=False)):
        found = transform(graphs.to_jraph(graph))
        assert isinstance(found, jraph.GraphsTuple)
        assert_bitwise_equal(found, graphs.to_jraph(transform(graph)))
    for nodes in (0, 2):
        empty = graphs.from_edges([], [], nodes, edges={"w": jnp.ones((0, 2))})
        assert transform(empty).num_edges == (nodes if name == "add_self_loop" else 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_no_graph_on_the_host_is_refused(name: str) -> None:
    transform, graph = TRANSFORMS[name], draw_batch(5)
    padded = graphs.pad(graph, 40, 50)
    with pytest.raises(TypeError, match="graph is traced: transforms run outside of jit"):
        jax.jit(lambda graph: transform(graph).nodes)(graph)
    hetero = graphs.hetero_from_edges({("a", "to", "a"): ([0], [0])}, {"a": 1})
    refusals = {
        "graph is padded: unpad it first": lambda: transform(padded),
        "TypeError: graph is traced": lambda: jax.jit(lambda graph: transform(graph).nodes)(graphs.to_jraph(graph)),
        "TypeError: must be a Graph or a GraphsTuple, got HeteroGraph": lambda: transform(hetero),
        "formats has 'csc', which is not one of": lambda: transform(graph, formats=("csc",)),
        'graph was made with formats=("csr",), which does': lambda: transform(graph, formats=("csr",)),
    }
    assert_refused(refusals)
    unchecked = jax.jit(graphs.from_jraph)(graphs.to_jraph(graph)._replace(senders=graph.senders.at[1].set(99)))
    with pytest.raises(ValueError, match=rf"senders\[1\] = {graph.num_nodes} is out of range"):
        transform(unchecked)
    uneven = graphs.to_jraph(graph)._replace(n_node=graph.n_node.at[0].add(1))
    with pytest.raises(ValueError, match=f"n_node adds up to {graph.num_nodes + 1}, but there are"):
        transform(jax.jit(graphs.from_jraph)(uneven))
    connecting = graphs.from_edges([0, 0], [1, 2], 3)
    connecting = graphs.to_jraph(connecting)._replace(n_node=np.array([2, 1]), n_edge=np.array([1, 1]))
    with pytest.raises(ValueError, match="an edge connects two graphs of the batch, "):
        transform(connecting)


def test_other_wrong_arguments_are_named() -> None:
    graph = graphs.from_edges([0], [1], 2, edges={"w": jnp.ones(1, "float16")})
    for call in (graphs.to_simple, graphs.to_bidirected):
        with pytest.raises(ValueError, match="reduce='prod' must be one of 'first', 'sum', 'mean', 'max', 'min'"):
            call(graph, "prod")
    with pytest.raises(ValueError, match="count='w' is already an edge feature"):
        graphs.to_simple(graph, count="w")
    with pytest.raises(TypeError, match="count must be the name of an edge feature or None, got Tr"):
        graphs.to_simple(graph, count=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'graph was made with formats=\("csr",\), which does'):
        graphs.to_simple(graphs.from_edges([0], [1], 2, formats=("csr",)), count="times")
    with pytest.raises(ValueError, match="fill_value='first' must be a number or one of sum, mean, max, min"):
        graphs.add_self_loop(graph, "first")
    for wrong in ([1.0], None, 1j):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"fill_value must be a number or .* got {kind}"):
            graphs.add_self_loop(graph, wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"edges\['w'\] is 1000000\.0, which does not fit into float16"):
        graphs.add_self_loop(graph, 1e6)
    assert graphs.add_self_loop(graph, np.inf).edges["w"].tolist() == [1, np.inf, np.inf]
    kinds = graphs.from_edges([0], [1], 2, edges={"kind": jnp.ones(1, "int32")})
    with pytest.raises(ValueError, match=r"fill_value for edges\['kind'\] is 0\.5, which does not fit into int32"):
        graphs.add_self_loop(kinds, 0.5)
    assert graphs.add_self_loop(kinds, 7).edges["kind"].tolist() == [1, 7, 7]
