"""Layers of graphs with several types: one for each type of edges, and attention over all of them."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs.kernels import chunks
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS

pytestmark = [pytest.mark.quick, pytest.mark.newest]

COUNTS = {"user": 9, "game": 7, "firm": 3}
FOLLOWS, PLAYS, MAKES = ("user", "follows", "user"), ("user", "plays", "game"), ("firm", "makes", "game")
SIZES = {FOLLOWS: 30, PLAYS: 60, MAKES: 5}
Arrays = Mapping[Any, Any]


def ends() -> dict[Any, tuple[np.ndarray, np.ndarray]]:
    """Returns edges of three types; no user is followed by the last one, and no edge enters the last game."""
    random = np.random.default_rng(0)
    return {
        kind: (random.integers(0, COUNTS[kind[0]], size), random.integers(0, COUNTS[kind[2]] - 1, size))
        for kind, size in SIZES.items()
    }


def whole_graph(**options: Any) -> graphs.HeteroGraph:
    return graphs.hetero_from_edges(ends(), COUNTS, **options)


def features(width: int, dtype: Any = "float32") -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    return {name: jnp.asarray(random.normal(size=(count, width)), dtype) for name, count in COUNTS.items()}


def sums(kind: Any, rows: Arrays) -> np.ndarray:
    """Returns the sums of the senders' features by plain numpy, in float64."""
    senders, receivers = ends()[kind]
    found = np.zeros((COUNTS[kind[2]], rows[kind[0]].shape[1]))
    np.add.at(found, receivers, np.asarray(rows[kind[0]], np.float64)[senders])
    return found


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "min", "stack", "function"])
def test_results_of_the_edge_types_are_aggregated(aggregate: str) -> None:
    graph, x = whole_graph(), features(2)
    how: Any = (lambda rows: rows[0] - rows[1]) if aggregate == "function" else aggregate
    add = functools.partial(graphs.graph_conv, norm="none", allow_zero_in_degree=True)
    layers = {"plays": add, MAKES: add}
    if aggregate != "function":
        layers["follows"] = add
    found = jax.jit(lambda x: graphs.hetero_graph_conv(graph, layers, x, how))(x)
    both = np.stack([sums(MAKES, x), sums(PLAYS, x)], 1)
    reduce = {"stack": lambda x, axis: x, "function": lambda x, axis: x[:, 0] - x[:, 1]}
    wanted = (reduce.get(aggregate) or getattr(np, aggregate))(both, axis=1)
    np.testing.assert_allclose(found["game"], wanted, rtol=1e-5, atol=1e-5)
    if aggregate != "function":
        alone = sums(FOLLOWS, x)
        np.testing.assert_allclose(
            found["user"], alone[:, None] if aggregate == "stack" else alone, rtol=1e-5, atol=1e-5
        )
    assert "firm" not in found


@pytest.mark.parametrize("half", HALVES)
def test_aggregates_are_added_in_float32_and_rounded_once(half: str) -> None:
    kinds = [("a", name, "b") for name in "uvw"]
    graph = graphs.hetero_from_edges({kind: ([0], [0]) for kind in kinds}, {"a": 1, "b": 1})
    big = 40_000 if half == "float16" else 256
    values = dict(zip(kinds, (big, big, 1), strict=True))
    x = {"a": jnp.ones((1, 1), half), "b": jnp.ones((1, 1), half)}
    layers = {
        kind: lambda block, pair, value=value: value * graphs.gin_conv(block, (pair[0], 0 * pair[1]))
        for kind, value in values.items()
    }
    total = (2 * big + 1) / 3
    assert graphs.hetero_graph_conv(graph, layers, x, "mean")["b"].item() == float(jnp.asarray(total, half))


@pytest.mark.full
def test_layers_get_a_graph_a_block_and_what_edges_have() -> None:
    graph, boxes, x, rngs = whole_graph(), whole_graph(formats=("coo", "mailbox")), features(4), nnx.Rngs(0)
    lstm = graphs.SAGEConv(4, 5, aggregator="lstm", rngs=rngs)  # of graphs alone
    attention = graphs.GATConv(4, 5, 1, allow_zero_in_degree=True, activation=lambda x: x[:, 0], rngs=rngs)
    layers: Any = {"follows": lstm, PLAYS: attention}
    layer = graphs.HeteroGraphConv(layers)
    weights = jnp.linspace(0, 1, SIZES[PLAYS])
    found = jax.jit(lambda x, w: layer(boxes, x, {"plays": (w,)}))(x, weights)
    assert {name: rows.shape for name, rows in found.items()} == {"user": (9, 5), "game": (7, 5)}
    block = graphs.Block(graph.connections[PLAYS])
    wanted = jax.jit(attention)(block, (x["user"], x["game"]), weights)
    np.testing.assert_allclose(found["game"], wanted, rtol=1e-5, atol=1e-6)
    paths = {"/".join(map(str, path[:2])) for path, _ in nnx.to_flat_state(nnx.state(layer))}
    assert paths == {"layers/follows", "layers/user/plays/game"}


def test_edges_whose_senders_have_no_features_are_left_out() -> None:
    graph, x = whole_graph(), features(2)
    layers = {"plays": graphs.gin_conv, "makes": graphs.gin_conv}
    some = {name: x[name] for name in ("user", "game")}
    run = jax.jit(lambda x: graphs.hetero_graph_conv(graph, layers, x)["game"])
    found = run(some)
    np.testing.assert_allclose(found, sums(PLAYS, x) + np.asarray(x["game"]), rtol=1e-5, atol=1e-5)
    pair = run(({"user": x["user"]}, {"game": 0 * x["game"]}))
    np.testing.assert_allclose(pair, sums(PLAYS, x), rtol=1e-5, atol=1e-5)


def make_hgt(width: int = 4, **options: Any) -> graphs.HGTConv:
    return graphs.HGTConv(width, 4, tuple(COUNTS), tuple(SIZES), 2, rngs=nnx.Rngs(0), **options)


def drawn(layer: Any) -> Any:
    """Returns definition and parameters of a layer, all of them drawn."""
    definition, state = nnx.split(layer)
    random = np.random.default_rng(2)
    return definition, jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape) / 2, x.dtype), state)


def exact_hgt(xp: Any, p: Arrays, x: Arrays) -> dict[str, Any]:
    """The paper's formulas in whole arrays of edges."""

    def tables(name: str, end: str) -> Any:
        rows = x[name] @ p[f"node_weights/{name}/{end}"] + p[f"node_weights/{name}/{end}_bias"]
        return rows.reshape(len(rows), 2, 2)

    results = {}
    for node_type in ("user", "game"):
        logits, messages, receivers = [], [], []
        for kind in (kind for kind in SIZES if kind[2] == node_type):
            senders, into = ends()[kind]
            name = "edge_weights/" + "/".join(kind)
            key, value = (
                xp.einsum("nhd,hde->nhe", tables(kind[0], end), p[f"{name}/{end}"]) for end in ("key", "value")
            )
            products = (tables(node_type, "query")[into] * key[senders]).sum(-1)
            logits.append(products * p[f"{name}/prior"] / 2**0.5)
            messages.append(value[senders])
            receivers.append(into)
        logits, messages = xp.concatenate(logits), xp.concatenate(messages)
        of_node = np.eye(COUNTS[node_type])[:, np.concatenate(receivers)]
        powers = xp.exp(logits)
        shares = powers / (of_node.T @ (of_node @ powers))
        total = xp.einsum("ne,ehd->nhd", of_node, shares[..., None] * messages).reshape(-1, 4)
        result = jax.nn.gelu(jnp.asarray(total), approximate=False) @ p[f"node_weights/{node_type}/result"]
        result = result + p[f"node_weights/{node_type}/result_bias"]
        if f"node_weights/{node_type}/skip" in p:
            share = 1 / (1 + xp.exp(-p[f"node_weights/{node_type}/skip"]))
            result = share * result + (1 - share) * x[node_type]
        results[node_type] = result
    return results


def by_path(state: Any) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


@pytest.mark.full
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", [4, 6])
def test_hgt_and_its_gradients_are_those_of_the_formulas(
    width: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CPU_ELEMENTS", 500)
    graph = whole_graph()
    with jax.enable_x64(True):
        definition, state = drawn(make_hgt(width, param_dtype=jnp.float64))
        x = features(width, "float64")

        def run(state: Any, x: Any) -> Any:
            layer = nnx.merge(definition, state)
            nodes = {name: graphs.HGTNodeWeights(**dict(rows)) for name, rows in layer.node_weights.items()}
            edges = {kind: graphs.HGTEdgeWeights(**dict(layer.edge_weights["/".join(kind)])) for kind in SIZES}
            return graphs.hgt_conv(graph, x, nodes, edges, implementation=implementation)

        def loss(compute: Any, state: Any, x: Any) -> tuple[Any, Any]:
            results = compute(state, x)
            return sum((jnp.sin(rows) * rows).sum() for rows in results.values()), results

        exact = functools.partial(loss, lambda state, x: exact_hgt(jnp, by_path(state), x))
        both = [jax.jit(jax.grad(each, (0, 1), has_aux=True)) for each in (functools.partial(loss, run), exact)]
        (grads, found), (wanted_grads, wanted) = (each(state, x) for each in both)
        for one, other in zip(jax.tree.leaves((grads, found)), jax.tree.leaves((wanted_grads, wanted)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.full
@pytest.mark.parametrize("half", HALVES)
def test_hgt_in_half_is_near_float64(half: str) -> None:
    graph = whole_graph()
    definition, state = drawn(make_hgt())
    state = jax.tree.map(lambda a: a.astype(half).astype(jnp.float32), state)
    x = features(4, half)
    run = lambda state, x: nnx.merge(definition, state)(graph, x)
    cast = jt.get_policy(f"mixed_{half}").cast_to_compute((state, x))
    by_autocast = jax.jit(jt.autocast(run, half))(state, jax.tree.map(lambda x: x.astype(jnp.float32), x))
    p = {name: np.asarray(array, np.float64) for name, array in by_path(state).items()}
    wanted = exact_hgt(np, p, {name: np.asarray(rows, np.float64) for name, rows in x.items()})
    for found in (jax.jit(run)(*cast), by_autocast):
        for name, rows in found.items():
            assert rows.dtype == half
            error = np.abs(np.asarray(rows, np.float64) - np.asarray(wanted[name], np.float64))
            assert error.max() <= 8 * float(jnp.finfo(half).eps) * np.abs(np.asarray(wanted[name])).max()


def test_softmaxes_of_many_edges_of_several_types_are_joined() -> None:
    """A thousand times as many edges of one type: its weight is a thousand times as large."""
    few, many = ("a", "few", "b"), ("a", "many", "b")
    graph = graphs.hetero_from_edges({few: ([0], [0]), many: ([1] * 1_000, [0] * 1_000)}, {"a": 2, "b": 2})
    one = jnp.ones((1, 1), jnp.float16)
    node = graphs.HGTNodeWeights(one, 0 * one, one, one)
    edge = graphs.HGTEdgeWeights(one[None], one[None], one[0])
    x = {"a": jnp.array([[5_005.0], [0.0]], jnp.float16), "b": one.repeat(2, 0)}
    run = jax.jit(lambda x: graphs.hgt_conv(graph, x, {"a": node, "b": node}, {few: edge, many: edge})["b"])
    found = run(x)
    wanted = jax.nn.gelu(np.float32(np.float16(5_005) / 1_001), approximate=False)
    np.testing.assert_allclose(np.asarray(found, float).ravel(), [float(wanted), 0], rtol=1e-3)


@pytest.mark.full
def test_dropout_of_hgt_is_on_in_training_only() -> None:
    graph, x, layer = whole_graph(), features(4), make_hgt(attention_dropout=0.5)
    run = nnx.jit(lambda layer: layer(graph, x)["user"])
    assert (run(layer) != run(layer)).any()
    layer.eval()
    np.testing.assert_array_equal(run(layer), run(layer))


SLASHES = ("a/b", "c", "d"), ("a", "b", "c/d")  # joined by "/" they are one


def test_what_is_wrong_is_named() -> None:
    graph, x = whole_graph(), features(4)
    one: Any = graphs.from_edges([0], [0], 1)
    layer = make_hgt()
    nodes = {name: graphs.HGTNodeWeights(**dict(rows)) for name, rows in layer.node_weights.items()}
    edges = {kind: graphs.HGTEdgeWeights(**dict(layer.edge_weights["/".join(kind)])) for kind in SIZES}
    convolve = functools.partial(graphs.hetero_graph_conv, graph, {"plays": graphs.gin_conv})
    attend = functools.partial(graphs.hgt_conv, graph)
    cases: list[tuple[Any, str]] = [
        (lambda: convolve(x, "median"), "aggregate='median' must be"),
        (lambda: graphs.HeteroGraphConv({}, "median"), "aggregate='median' must be one of 'sum', 'mean'"),
        (lambda: graphs.hetero_graph_conv(graph, {"likes": graphs.gin_conv}, x), "etype='likes' is not an edge type"),
        (lambda: convolve({"user": x["user"]}), "features of 'game', the receivers of"),
        (
            lambda: convolve({**x, "game": jnp.ones((2, 4))}),
            r"features\['game'\] must be \[7, \.\.\.\], got shape \(2, 4\)",
        ),
        (
            lambda: convolve(x, edge_inputs={"makes": ()}),
            r"edge_inputs has \('firm', 'makes', 'game'\), but layers has no such edge type",
        ),
        (lambda: graphs.HeteroGraphConv(dict.fromkeys(SLASHES, graphs.gin_conv)), "'b', 'c/d'. have the same name"),
        (lambda: graphs.HGTConv(4, 4, (), SLASHES, rngs=nnx.Rngs(0)), "have the same name 'a/b/c/d': avoid slashes"),
        (lambda: graphs.HGTConv(4, 4, (), (), 3, rngs=nnx.Rngs(0)), "num_heads=3 must"),
        (lambda: attend({"user": x["user"]}, nodes, edges), "features of 'firm' are missing"),
        (lambda: attend(x, {}, edges), "node_weights of 'firm' are missing"),
        (lambda: attend(x, nodes, {}), "edge_weights is empty: at least one edge type is needed"),
        (
            lambda: attend({**x, "game": jnp.ones((7, 5))}, nodes, edges),
            r"features\['game'\] must be \[7, 4\], got shape \(7, 5\)",
        ),
        (
            lambda: attend(x, nodes, {PLAYS: edges[PLAYS]._replace(key=jnp.ones((2, 3, 3)))}),
            r"edge_weights\[\('user', 'plays', 'game'\)\]\.key must be \[2, 2, 2\], got shape \(2, 3, 3\)",
        ),
        (lambda: attend(x, nodes, edges, attention_dropout=0.5), "attention_dropout=0.5 needs a random"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    for call in (lambda: graphs.hgt_conv(one, x, nodes, edges), lambda: graphs.hetero_graph_conv(one, {}, x)):
        with pytest.raises(TypeError, match="graph must be a HeteroGraph, or a Block by edge type, got Graph"):
            call()
    wrong: Any = {PLAYS: one}
    with pytest.raises(TypeError, match=r"graph\[\('user', 'plays', 'game'\)\] must be a Block, got Graph"):
        graphs.hetero_graph_conv(wrong, {}, x)


BOUGHT = ("game", "played by", "user")


@pytest.mark.full
@pytest.mark.parametrize("name", ["HeteroGraphConv", "HGTConv"])
def test_blocks_of_all_neighbors_give_what_the_graph_gives(name: str) -> None:
    given = ends()
    edges = {FOLLOWS: given[FOLLOWS], PLAYS: given[PLAYS], BOUGHT: given[PLAYS][::-1]}
    counts = {end: COUNTS[end] for end in ("user", "game")}
    graph, x, rngs = graphs.hetero_from_edges(edges, counts), features(4), nnx.Rngs(0)
    if name == "HGTConv":
        layers = [graphs.HGTConv(4, 4, tuple(counts), tuple(edges), 2, rngs=rngs) for _ in range(2)]
    else:
        layers = [
            graphs.HeteroGraphConv({kind: graphs.SAGEConv(4, 4, rngs=rngs) for kind in edges}, "mean") for _ in range(2)
        ]
    seeds = np.array([5, 0, 6])  # whose users no game of the last layer enters
    indices = {
        kind: graphs.host_edges(pair[0], pair[1], counts[kind[0]], counts[kind[2]]) for kind, pair in edges.items()
    }
    sampler = graphs.neighbor_sampler(indices, (-1, -1), seeds, batch_size=4, seed_type="game")
    batch = sampler.sample(seeds, np.random.default_rng(0))
    whole = {end: x[end] for end in counts}
    inputs = {end: jnp.asarray(graphs.take_rows(np.asarray(x[end]), ids)) for end, ids in batch.inputs.items()}
    rows = inputs
    for layer, blocks in zip(layers, batch.blocks, strict=True):
        whole, rows = layer(graph, whole), layer(blocks, rows)
    np.testing.assert_allclose(rows["game"][:3], whole["game"][seeds], rtol=1e-5, atol=1e-6)
    on_host = {end: np.asarray(x[end]) for end in counts}
    inferred = graphs.layerwise_inference(layers, indices, on_host, batch_size=7, max_edges=30)
    for end, found in inferred.items():
        np.testing.assert_allclose(found, whole[end], rtol=1e-5, atol=1e-6)
    wrong: Any = batch.blocks
    with pytest.raises(TypeError, match="graph must be a HeteroGraph, or a Block by edge type, got tuple"):
        layers[0](wrong, inputs)
    few = {**inputs, "user": inputs["user"][:1]}
    with pytest.raises(ValueError, match=r"features\['user'\] must be \["):
        layers[0](batch.blocks[0], few)
