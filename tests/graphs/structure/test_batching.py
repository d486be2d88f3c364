from typing import Any, cast

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest
from flax import nnx
from pytrees import assert_bitwise_equal
from refusals import assert_refused

from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.structure import formats_made

pytestmark = pytest.mark.quick


def some_graphs() -> list[graphs.Graph]:
    random = np.random.default_rng(0)
    return [
        graphs.from_edges(
            random.integers(0, n, e),
            random.integers(0, n, e),
            n,
            nodes={"h": random.normal(size=(n, 3)).astype(np.float16)},
            edges={"w": random.normal(size=(e, 1)).astype(np.float16)},
            formats=("coo",),
        )
        for n, e in ((4, 9), (3, 0), (5, 11))
    ]


def everything(graph: graphs.Graph) -> dict[str, jax.Array]:
    """Returns a result of each kind of operation, for the nodes."""
    out = {}
    for reducer in (fn.sum, fn.mean, fn.max, fn.min):
        reduce = reducer("m", "x")
        out[reduce.reduction] = graphs.update_all(graph, fn.u_mul_e("h", "w", "m"), reduce).nodes["x"]
    weights = graphs.edge_softmax(graph, graph.edges["w"])
    out["softmax"] = graphs.update_all(graph.with_edges(a=weights), fn.u_mul_e("h", "a", "m"), fn.sum("m", "x")).nodes[
        "x"
    ]
    logits = graph.nodes["h"][:, :1]
    out["attention"] = graphs.gat_attention(graph, graph.nodes["h"][:, None], logits, logits)
    return out


def test_batches_are_jraphs() -> None:
    parts = some_graphs()
    batch = graphs.batch(parts)
    assert_bitwise_equal(graphs.to_jraph(batch), jraph.batch([graphs.to_jraph(graph) for graph in parts]))
    assert batch.n_node.tolist() == [4, 3, 5]
    for found, part in zip(graphs.unbatch(batch), parts, strict=True):
        assert_bitwise_equal(found, part)


def test_graphs_of_new_sizes_are_made_padded_and_batched_without_compiling(caplog: pytest.LogCaptureFixture) -> None:
    ends = np.arange(211), np.arange(211)[::-1]
    features = {"h": np.ones((211, 3), np.float32)}
    with jax.log_compiles():
        graph = graphs.from_edges(*ends, 211, nodes=features, edges=features)
        padded = graphs.pad(graphs.batch([graph, graph]), 439, 443, n_graph=5)
    assert padded.n_node.tolist() == [211, 211, 17, 0, 0]
    assert [record for record in caplog.records if "ompil" in record.message] == []


def test_arrays_that_change_afterwards_leave_a_graph_as_it_was() -> None:
    ends, buffer = (np.array([0, 1, 1], np.int32), np.array([1, 1, 2], np.int32)), np.ones(32, np.float32)
    features = buffer[-buffer.ctypes.data % 64 // 4 :][:12].reshape(3, 4)  # so aligned, jax would share its memory
    graph = graphs.from_edges(*ends, 3, nodes={"h": features}, formats=("coo", "csr", "mailbox"))
    before = jax.tree.map(np.array, graph)
    for array in (*ends, features):
        array[:] = 0
    assert_bitwise_equal(graph, before)


@pytest.mark.full
def test_a_batch_gives_what_its_graphs_give() -> None:
    parts, run = some_graphs(), jax.jit(everything)
    each = [run(graph) for graph in parts]
    for name, found in run(graphs.batch(parts)).items():
        np.testing.assert_array_equal(found, np.concatenate([x[name] for x in each]))


@pytest.mark.full
def test_padding_is_jraphs_and_changes_nothing() -> None:
    batch = graphs.batch(some_graphs())
    padded = graphs.pad(batch, 16, 5_000, 6)
    wanted = jraph.pad_with_graphs(graphs.to_jraph(batch), 16, 5_000, 6)
    assert_bitwise_equal(graphs.to_jraph(padded), jax.tree.map(jnp.asarray, wanted))
    assert padded.is_padded
    assert padded.in_degrees[12:].tolist() == [0] * 4
    assert_bitwise_equal(graphs.unpad(padded), batch)
    for run in (everything, jax.jit(everything)):
        found = run(padded)
        for name, rows in run(batch).items():
            np.testing.assert_array_equal(found[name][:12], rows)
            np.testing.assert_array_equal(found[name][12:], 0)


@pytest.mark.full
def test_the_padding_nodes_false_degree_poisons_nothing() -> None:
    """Padding nodes that have become large, and 5,000 padding edges, whose sum is beyond float16."""
    batch = graphs.batch(some_graphs())
    padded = graphs.pad(batch, 16, 5_000)
    tuple_ = graphs.to_jraph(padded)

    def loss(h: jax.Array, graph: graphs.Graph) -> jax.Array:
        h = h + jnp.where(graphs.node_mask(graph), 0, 1_000).astype(h.dtype)[:, None]
        for _ in range(2):
            out = everything(graph.with_nodes(h=h))
            h = out["sum"] + out["mean"] + out["attention"][:, 0]
        return jnp.where(graphs.node_mask(graph)[:, None], h, 0).sum(dtype=jnp.float32)

    grad = jax.jit(jax.grad(loss))
    wanted = grad(batch.nodes["h"], batch)
    for graph in (padded, graphs.from_jraph(tuple_, padded=True)):
        found = grad(padded.nodes["h"], graph)
        np.testing.assert_array_equal(found[:12], wanted)
        assert np.isfinite(found).all()
    found = jax.jit(lambda h, t: grad(h, graphs.from_jraph(t, padded=True)))(padded.nodes["h"], tuple_)
    np.testing.assert_allclose(found[:12], wanted, rtol=1e-3)


def test_padding_edges_divide_by_one_and_their_logits_are_masked() -> None:
    padded = graphs.pad(some_graphs()[0], 6, 12)

    def total(scale: jax.Array) -> jax.Array:
        graph = padded.with_edges(w=scale * padded.edges["w"], h=scale * padded.edges["w"])
        quotients = [
            graphs.update_all(graph, message("h", "w", "m"), fn.sum("m", "x")).nodes["x"].sum()
            for message in (fn.u_div_e, fn.v_div_e)
        ]
        return sum(quotients)  # pyright: ignore[reportReturnType]

    def results(scale: jax.Array) -> Any:
        logits = jnp.where(graphs.edge_mask(padded), 0, jnp.nan).astype(jnp.float16)
        weights, pullback = jax.vjp(lambda x: graphs.edge_softmax(padded, x), logits)
        return jax.grad(total)(scale), weights, pullback(jnp.ones_like(weights))[0]

    slope, weights, grad = map(np.asarray, jax.jit(results)(np.float16(1)))
    assert np.isfinite(slope)
    assert (weights[9:] == 0).all() and np.isfinite(weights).all()
    assert np.isfinite(grad).all()


def test_graphs_of_different_sizes_compile_once() -> None:
    traces = []

    @jax.jit
    def run(graph: graphs.Graph) -> Any:
        traces.append(graph)
        return everything(graph)

    for graph in (some_graphs()[0], some_graphs()[2]):
        run(graphs.pad(graph, 8, 16))
    assert len(traces) == 1


def hub(degree: int, unreached: int, dtype: str = "float32") -> graphs.Graph:
    """Returns a graph of 40 nodes whose first is entered and whose second is left by so many edges."""
    random = np.random.default_rng(degree)
    others = random.integers(0, 40 - unreached, (2, degree))
    ring = np.arange(40 - unreached)
    senders = np.concatenate([others[0], np.ones(degree, int), ring])
    receivers = np.concatenate([np.zeros(degree, int), others[1], ring])
    h = random.normal(size=(40, 3)).astype(dtype)
    return graphs.from_edges(senders, receivers, 40, nodes={"h": h}, formats=("coo",))


FORMATS = {"coo": ("coo",), "csr": ("csr",), "both": ("coo", "csr")}


@pytest.mark.full
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_padded_graphs_of_a_size_have_one_structure(formats: tuple[str, ...]) -> None:
    empty = graphs.from_edges([], [], 0, nodes={"h": np.zeros((0, 3), np.float32)})
    parts = [hub(*size) for size in ((0, 0), (30, 5), (300, 0), (3_000, 1), (3_000, 39))]
    padded = [graphs.pad(graph, 64, 6_100, formats=formats) for graph in (empty, *parts)]
    kinds = {(jax.tree.structure(x), tuple(map(np.shape, jax.tree.leaves(x)))) for x in padded}
    assert len(kinds) == 1
    assert len(graphs.stack(padded)) == 6


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("formats", [("coo",), ("coo", "csr"), ("coo", "csr", "mailbox")])
def test_graphs_keep_the_formats_that_they_were_made_with(formats: tuple[str, ...]) -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 1], 3, nodes={"h": jnp.ones((3, 2))}, formats=formats)
    padded = graphs.pad(graph, 5, 8)
    batch = graphs.batch([graphs.from_edges([0], [0], 1, nodes={"h": jnp.ones((1, 2))}, formats=("coo",)), graph])
    for found in (padded, batch, graphs.pad(batch, 9, 9), *graphs.unbatch(batch), graphs.unpad(padded)):
        assert formats_made(found.connections) == formats
    assert formats_made(graphs.pad(graph, 5, 8, formats=("coo",)).connections) == ("coo",)
    if "csr" in formats:
        total = graphs.update_all(padded, fn.copy_u("h", "m"), fn.sum("m", "x"), implementation="chunked").nodes["x"]
        assert total[:, 0].tolist() == [0, 2, 1, 0, 0]


@pytest.mark.full
def test_layers_refuse_zero_in_degree_nodes_of_padded_graphs_outside_of_jit() -> None:
    layer = graphs.GraphConv(3, 2, rngs=nnx.Rngs(0))
    for degree, unreached in ((3, 0), (3, 2)):
        padded = graphs.pad(hub(degree, unreached), 64, 128)
        if not unreached:  # padding nodes have in-degree 0, too, and do not count
            assert layer(padded, padded.nodes["h"]).shape == (64, 2)
            continue
        with pytest.raises(ValueError, match="some nodes have no incoming edges, so their"):
            layer(padded, padded.nodes["h"])


def test_masks() -> None:
    batch = graphs.batch(some_graphs())
    padded = graphs.pad(batch, 16, 30, 6)
    tuple_ = graphs.to_jraph(padded)

    def masks(graph: graphs.Graph) -> list[jax.Array]:
        return [mask(graph) for mask in (graphs.node_mask, graphs.edge_mask, graphs.graph_mask)]

    def of_jraph(tuple_: Any) -> list[Any]:
        kinds = (jraph.get_node_padding_mask, jraph.get_edge_padding_mask, jraph.get_graph_padding_mask)
        return [mask(tuple_) for mask in kinds]

    without_ends = graphs.from_edges([0, 1], [1, 0], 2, formats=("csr",))
    assert all(np.asarray(mask).all() for graph in (batch, without_ends) for mask in masks(graph))
    wanted = [[True] * real + [False] * padding for real, padding in ([12, 4], [20, 10], [3, 3])]
    for found in (masks(padded), jax.jit(masks)(padded), jax.jit(of_jraph)(tuple_)):
        assert [mask.tolist() for mask in found] == wanted


def test_wrong_arguments_are_named() -> None:
    parts = some_graphs()
    padded = graphs.pad(parts[0], 8, 16)
    with pytest.raises(ValueError, match=r"graphs\[1\] has nodes \['g', 'h'\], graphs\[0\] has"):
        graphs.batch([parts[0], parts[1].with_nodes(g=jnp.ones(3))])
    for call in (graphs.node_mask, graphs.unpad, lambda graph: graphs.pad(graph, 9, 99)):
        with pytest.raises(TypeError, match="graph must be a Graph, got GraphsTuple; convert jraph's with from_jraph"):
            call(cast(Any, graphs.to_jraph(parts[0])))
    refusals = {
        "graphs is empty": lambda: graphs.batch([]),
        "graphs[1] is padded: batch first": lambda: graphs.batch([parts[0], padded]),
        "graph is padded already": lambda: graphs.pad(padded, 20, 20),
        "n_node=4 is too small by 1: at least 5": lambda: graphs.pad(parts[0], 4, 16),
        "n_edge=5 is too small by 4: at least 9": lambda: graphs.pad(parts[0], 5, 5),
        "graph is not padded": lambda: graphs.unpad(parts[0]),
        "TypeError: graph is traced": lambda: jax.jit(lambda g: graphs.pad(g, 8, 16))(parts[0]),
    }
    assert_refused(refusals)
