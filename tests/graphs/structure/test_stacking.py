"""Stacks of graphs, and what of a stack goes to each device and micro-batch."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data.array_loading import array_batches
from jmp_train.graphs import fn

pytestmark = [pytest.mark.quick, pytest.mark.newest]

OPTIMIZER = optax.sgd(0.5)
Route = Callable[[jt.steps.TrainStep], Any]


def mesh(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("data",))


ROUTES: dict[str, Route] = {
    "data_parallel": lambda step: jax.jit(jt.data_parallel(step, mesh(4))),
    "sharded_step": lambda step: jax.jit(jt.sharded_step(step, mesh(4))),
    "pmap_step": lambda step: jt.pmap_step(step, devices=jax.devices()[:4]),
}


def molecules(count: int) -> list[graphs.Graph]:
    """Returns graphs of one to three molecules each, padded to one size, with hubs in some."""
    random = np.random.default_rng(0)

    def molecule() -> graphs.Graph:
        nodes, edges = int(random.integers(1, 9)), int(random.integers(0, 20))
        ends = random.integers(0, nodes, (2, edges))
        return graphs.from_edges(
            ends[0],
            ends[1],
            nodes,
            nodes={"h": random.normal(size=(nodes, 3)).astype(np.float32)},
            edges={"w": random.normal(size=(edges, 1)).astype(np.float32)},
            formats=("coo",),
        )

    several = [[molecule() for _ in range(random.integers(1, 4))] for _ in range(count)]
    return [graphs.pad(graphs.batch(parts), 32, 64, 4) for parts in several]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Returns a mean over the molecules that are not padding, of our graph or jraph's."""
    graph: Any = batch["graph"]
    assert isinstance(graph, graphs.Graph | jraph.GraphsTuple)
    message, reduce = fn.u_mul_e("h", "w", "m"), fn.sum("m", "x")
    passed: Any = graphs.update_all(cast(Any, graph), message, reduce)
    score = (jnp.tanh(passed.nodes["x"] @ params["w"]) ** 2).sum(1)
    owners = jnp.repeat(jnp.arange(4), graph.n_node, total_repeat_length=32)
    totals = graphs.segment_sum(score, owners, 4)
    is_real = jnp.arange(4) < 3
    return jnp.where(is_real, (totals - batch["y"]) ** 2, 0).sum()


def batches(graph_list: list[Any], as_jraph: bool) -> list[dict[str, Any]]:
    labels = np.random.default_rng(1).normal(size=(len(graph_list), 4)).astype(np.float32)
    made = [graphs.to_jraph(graph) if as_jraph else graph for graph in graph_list]
    return [{"graph": graph, "y": y} for graph, y in zip(made, labels, strict=True)]


def params() -> Any:
    return {"w": jnp.asarray(np.random.default_rng(2).normal(size=(3, 2)), jnp.float32)}


def one_by_one(parts: list[Any]) -> tuple[Any, Any]:
    """Returns the mean loss and gradient of batches, each alone on one device."""
    run = jax.jit(jax.value_and_grad(loss_fn))
    each = [run(params(), part) for part in parts]
    return jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x) / len(x), *each)


def joined(parts: list[Any]) -> Any:
    return {
        "graph": graphs.stack([part["graph"] for part in parts]),
        "y": np.concatenate([part["y"] for part in parts]),
    }


@pytest.mark.full
@pytest.mark.parametrize("as_jraph", [False, True], ids=["Graph", "GraphsTuple"])
def test_each_device_and_micro_batch_has_a_whole_graph(as_jraph: bool) -> None:
    parts = batches(molecules(8), as_jraph)
    loss, gradient = one_by_one(parts)
    whole = joined(parts)
    several = {name: (2, route) for name, route in ROUTES.items()}
    runs = {**({} if as_jraph else several), "accumulation": (8, jax.jit)}
    for name, (steps, route) in runs.items():
        step = jt.train_step(jt.stateless(loss_fn), OPTIMIZER, accumulate_steps=steps)
        state, metrics = route(step)(jt.TrainState.create(params(), OPTIMIZER), whole)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6, err_msg=name)
        moved = (np.asarray(params()["w"]) - np.asarray(state.params["w"])) / 0.5
        np.testing.assert_allclose(moved, gradient["w"], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_stack_of_one_is_its_graph() -> None:
    (part,) = batches(molecules(1), as_jraph=False)
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), OPTIMIZER))
    state = jt.TrainState.create(params(), OPTIMIZER)
    plain, stacked = step(state, part)[1], step(state, joined([part]))[1]
    assert float(plain["loss"]) == float(stacked["loss"])


def single_graphs() -> dict[str, Any]:
    ends = (np.arange(8), np.roll(np.arange(8), 1), 8)
    graph = graphs.from_edges(*ends, nodes={"h": jnp.ones(8)}, formats=("coo",))
    edges = graphs.host_edges(*ends)
    sampler = graphs.neighbor_sampler(edges, (1,), seeds=np.arange(8), batch_size=8)
    hetero = {("a", "to", "b"): (ends[0], ends[1])}
    return {
        "Graph": graph,
        "csr": graphs.from_edges(*ends, formats=("csr",)),
        "GraphsTuple": graphs.to_jraph(graph),
        "HeteroGraph": graphs.hetero_from_edges(hetero, {"a": 8, "b": 8}),
        "Block": sampler.sample(np.arange(8), np.random.default_rng(0)).blocks[0],
    }


@pytest.mark.parametrize("kind", ["Graph", "csr", "GraphsTuple", "HeteroGraph", "Block"])
def test_a_graph_that_would_be_split_is_refused_by_its_path(kind: str) -> None:
    graph = single_graphs()[kind]
    rows = (graph, {"y": jnp.ones((8, 4))})
    state = jt.TrainState.create(params(), OPTIMIZER)
    plain = jt.train_step(jt.stateless(lambda p, batch: p["w"].sum()), OPTIMIZER)
    runs = {name: route(plain) for name, route in ROUTES.items()}
    runs["accumulate_steps"] = jt.train_step(plain.loss_fn, OPTIMIZER, accumulate_steps=2)
    name = "Graph" if kind == "csr" else kind
    for run in runs.values():
        with pytest.raises(TypeError, match=rf"would split the {name} at 'inner/0' .*graphs.stack"):
            run(state, {"inner": rows})
    assert np.isfinite(plain(state, {"inner": rows})[1]["loss"])  # on one device nothing is split


def test_a_graph_is_no_row_of_array_batches() -> None:
    parts = batches(molecules(6), as_jraph=False)
    with pytest.raises(TypeError, match="array_batches would split the Graph at 'graph'"):
        array_batches(parts[0], 2)
    whole = {
        "graph": jax.device_get(graphs.stack([part["graph"] for part in parts])),
        "y": np.stack([part["y"] for part in parts]),
    }
    drawn = list(array_batches(whole, 2, seed=1))
    assert [len(batch["graph"]) for batch in drawn] == [2, 2, 2]
    wanted = {part["y"].tobytes(): part["graph"] for part in parts}
    for batch in drawn:
        for graph, y in zip(graphs.unstack(batch["graph"]), np.asarray(batch["y"]), strict=True):
            jax.tree.map(np.testing.assert_array_equal, graph, wanted[y.tobytes()])


def test_other_numbers_of_graphs_are_refused() -> None:
    whole = joined(batches(molecules(6), as_jraph=False))
    state = jt.TrainState.create(params(), OPTIMIZER)
    step = jt.train_step(jt.stateless(loss_fn), OPTIMIZER)
    with pytest.raises(ValueError, match=r"4 devices .* must divide the graphs .* 'graph' has 6"):
        jt.data_parallel(step, mesh(4))(state, whole)
    with pytest.raises(
        ValueError,
        match=(
            r"'graph' of the batch must have one graph for each micro-batch of a device, got 3; stack as many as "
            r"devices times accumulate_steps=1"
        ),
    ):
        jax.eval_shape(jt.data_parallel(step, mesh(2)), state, whole)


@pytest.mark.full
def test_stacks_are_scanned_mapped_and_taken_apart() -> None:
    parts = molecules(3)
    stacked = graphs.stack(parts)
    assert len(stacked) == 3
    for graph, again in zip(parts, graphs.unstack(stacked), strict=True):
        assert jax.tree.structure(graph) == jax.tree.structure(again)
        jax.tree.map(np.testing.assert_array_equal, graph, again)

    def total(graph: graphs.Graph) -> jax.Array:
        passed = graphs.update_all(graph, fn.u_mul_e("h", "w", "m"), fn.sum("m", "x"))
        return passed.nodes["x"].sum()

    def results(parts: list[graphs.Graph], stacked: graphs.GraphStack) -> Any:
        _, scanned = jax.lax.scan(lambda carry, graph: (carry, total(graph)), 0, stacked.graphs)
        return [total(graph) for graph in parts], (scanned, jax.vmap(total)(stacked.graphs))

    wanted, both = jax.jit(results)(parts, stacked)
    for found in both:
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with pytest.raises(IndexError, match="graph 3 is out of range for a stack of 3"):
        stacked[3]


def test_graphs_that_differ_are_not_stacked() -> None:
    first, other = molecules(2)
    wrong: dict[str, tuple[list[Any], str]] = {
        "graphs is empty": ([], "graphs is empty"),
        "features": ([first, other.with_nodes(z=other.nodes["h"])], "'nodes/z' is float32.*missing"),
        "sizes": ([first, graphs.pad(graphs.unpad(other), 33, 64, 4)], r"\[33, 3\], not float32\[32"),
        "kinds": ([{"a": 1.0}, [1.0]], "'a' is missing"),
    }
    for made, message in wrong.values():
        with pytest.raises(ValueError, match=message):
            graphs.stack(made)
    with pytest.raises(TypeError, match=r"stack must be a result of graphs\.stack, got Graph"):
        graphs.unstack(first)  # pyright: ignore[reportArgumentType]


def test_graphs_of_which_one_has_zero_in_degree_nodes_are_stacked_as_if_all_had() -> None:
    kind = ("a", "to", "b")
    parts = [
        graphs.hetero_from_edges({kind: ([0, 1, 1], receivers)}, {"a": 2, "b": 2})
        for receivers in ([0, 1, 1], [1, 1, 1])
    ]
    for order in (parts, parts[::-1]):
        stacked = graphs.stack(order)
        assert stacked.graphs.connections[kind].has_zero_in_degree is True
        degrees = [graph.connections[kind].in_degrees.tolist() for graph in graphs.unstack(stacked)]
        assert sorted(degrees) == [[0, 3], [1, 2]]
