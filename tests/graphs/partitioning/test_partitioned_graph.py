"""A graph cut over devices: layers, messages and training steps give what the whole graph gives.

The parts of nodes: their sizes, how few edges run between them, and bad arguments.

One graph cut over two real processes, by `jmp-train launch`: the losses of one process.
"""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import partition_programs
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from layer_cases import CASES, draw_inputs, hub_graph, parameters
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick

# What these send is sent again, or the case has its edges' types or features of the whole graph.
WHOLE = ("appnp", "sg", "tag", "cheb", "gated", "relational", "nn", "transformer with")
ON_PARTS = [name for name, case in CASES.items() if not case.is_recurrent and not name.startswith(WHOLE)]
QUICK = ("gin mean, weighted",)
SPLIT = P("data")


def mesh_of(parts: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:parts]), ("data",))


def on_parts(parts: int, run: Any, in_specs: Any, out_specs: Any = SPLIT) -> Any:
    return jax.jit(jax.shard_map(run, mesh=mesh_of(parts), in_specs=in_specs, out_specs=out_specs))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in ON_PARTS]
)
@pytest.mark.parametrize("formats", [("coo",), pytest.param(("coo", "csr"), marks=pytest.mark.full)])
def test_layers_make_of_parts_what_they_make_of_the_graph(name: str, formats: tuple[str, ...]) -> None:
    count = 3
    with jax.enable_x64(True):
        case, (graph, edges, num_nodes) = CASES[name], hub_graph()
        definition, state = parameters(case.make(rngs=nnx.Rngs(0), param_dtype=jnp.float64))
        x, w = draw_inputs(case, num_nodes, edges, jnp.float64)
        cut = graphs.partition(graph, count, formats=formats)

        def run_layer(state: Any, graph: Any, x: Any, w: Any) -> jax.Array:
            layer = nnx.merge(definition, state)
            return layer(graph, x) if w is None else layer(graph, x, w)

        weights = None if w is None else cut.take_edges(w)
        out = nnx.eval_shape(lambda: run_layer(state, graph, x, w))
        cotangent = np.random.default_rng(2).normal(size=out.shape)

        def total(state: Any, graph: Any, x: Any, w: Any, cotangent: Any) -> Any:
            result = run_layer(state, graph, x, w)
            return (cotangent * result).sum(), result

        gradients = jax.grad(total, argnums=(0, 2, 3) if case.is_weighted else (0, 2), has_aux=True)
        wanted, whole = jax.jit(gradients)(state, graph, x, w, cotangent)

        def local(parts: Any, state: Any, x: Any, w: Any, cotangent: Any) -> Any:
            (of_state, *of_rows), result = gradients(jt.policies.pvary(state, ("data",)), parts[0], x, w, cotangent)
            return jax.lax.psum(of_state, "data"), of_rows, result

        run = on_parts(count, local, (SPLIT, P(), SPLIT, SPLIT, SPLIT), (P(), SPLIT, SPLIT))
        of_state, of_rows, result = run(cut.parts, state, cut.take(x), weights, cut.take(cotangent))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    close(cut.restore(result), whole)
    jax.tree.map(close, of_state, wanted[0])
    close(cut.restore(of_rows[0]), wanted[1])
    if case.is_weighted:
        close(of_rows[1], cut.take_edges(wanted[2]))


def loss_of(graph: Any, rows: Any, w: Any) -> jax.Array:
    hidden = jnp.sin(graphs.graph_conv(graph, rows, w, allow_zero_in_degree=True))
    z = hidden.reshape(-1, 2, 2)
    sent = graph.with_halo(z) if isinstance(graph, graphs.GraphPart) else z
    return graphs.gat_attention(graph, sent, sent.sum(-1), -z.sum(-1))


@pytest.mark.full
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    nodes=st.integers(1, 20),
    edges=st.integers(0, 60),
    parts=st.integers(1, 8),
    seed=st.integers(0, 2**16),
    method=st.sampled_from(["greedy", "ranges", "random"]),
    formats=st.sampled_from([("coo",), ("csr",), ("coo", "csr")]),
)
def test_any_graph_in_any_parts(
    nodes: int, edges: int, parts: int, seed: int, method: str, formats: tuple[str, ...]
) -> None:
    parts = min(parts, nodes)
    random = np.random.default_rng(seed)
    ends = random.integers(0, nodes, (2, edges))
    x, w = random.normal(size=(nodes, 3)), random.normal(size=(3, 4))
    with jax.enable_x64(True):
        graph = graphs.from_edges(ends[0], ends[1], nodes)

        def total(rows: Any, w: Any) -> jax.Array:
            return (loss_of(graph, rows, w) ** 2).sum()

        exact, of_exact = jax.jit(jax.value_and_grad(total, (0, 1)))(jnp.asarray(x), jnp.asarray(w))
    chosen = random.integers(0, parts, nodes) if method == "random" else method
    cut = graphs.partition(graphs.from_edges(ends[0], ends[1], nodes, formats=formats), parts, method=chosen)

    def local(stack: Any, rows: Any, w: Any) -> Any:
        def total(rows: Any, w: Any) -> jax.Array:
            return jnp.where(stack[0].is_node[:, None, None], loss_of(stack[0], rows, w) ** 2, 0).sum()

        loss, (of_rows, of_w) = jax.value_and_grad(total, (0, 1))(rows, jt.policies.pvary(w, ("data",)))
        return jax.lax.psum((loss, of_w), "data"), of_rows

    run = on_parts(parts, local, (SPLIT, SPLIT, P()), (P(), SPLIT))
    (loss, of_w), of_rows = run(cut.parts, cut.take(x.astype(np.float32)), w.astype(np.float32))
    size = 1 + abs(float(exact))
    np.testing.assert_allclose(loss, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_w, of_exact[1], atol=3e-5 * size)
    np.testing.assert_allclose(cut.restore(of_rows), of_exact[0], atol=3e-5 * size)


@pytest.mark.full
def test_messages_with_edge_features() -> None:
    count, (graph, edges, num_nodes) = 4, hub_graph()
    random = np.random.default_rng(0)
    h, w = (random.normal(size=size).astype(np.float32) for size in (num_nodes, len(edges.senders)))
    cut = graphs.partition(graph, count, formats=("coo",))

    def local(parts: Any, h: Any, w: Any) -> tuple[jax.Array, jax.Array]:
        part = parts[0]
        of_part = part.graph({"h": part.with_halo(h)}, {"h": h}, {"w": w})
        passed = graphs.update_all(of_part, fn.u_mul_e("h", "w", "m"), fn.max("m", "x"))
        return passed.nodes["target"]["x"], graphs.edge_softmax(part, w)

    found, softmax = on_parts(count, local, SPLIT)(cut.parts, cut.take(h), cut.take_edges(w))
    whole = graph.with_nodes(h=h).with_edges(w=w)
    wanted = graphs.update_all(whole, fn.u_mul_e("h", "w", "m"), fn.max("m", "x")).nodes["x"]
    np.testing.assert_array_equal(cut.restore(found), wanted)
    np.testing.assert_allclose(softmax, cut.take_edges(graphs.edge_softmax(graph, w)), rtol=1e-6, atol=1e-9)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = graphs.GATConv(6, 4, 2, activation=nnx.elu, allow_zero_in_degree=True, rngs=rngs)
        self.second = graphs.SAGEConv(8, 3, rngs=rngs)

    def __call__(self, graph: Any, features: Any) -> jax.Array:
        return self.second(graph, self.first(graph, features).reshape(-1, 8))


def training(policy: str, count: int) -> tuple[list[float], list[float]]:
    """Returns the losses of five steps on the whole graph, and on so many devices."""
    random = np.random.default_rng(4)
    nodes = 50
    ends = random.integers(0, nodes, (2, 400))
    graph = graphs.from_edges(ends[0], ends[1], nodes)
    features = random.normal(size=(nodes, 6)).astype(np.float32)
    labels = np.where(np.arange(nodes) < 33, random.integers(0, 3, nodes), -1)  # the others have none
    structure, params = nnx.split(Net(nnx.Rngs(0)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["graph"], batch["features"]).astype(jnp.float32)
        label = batch["label"]
        has_label = label >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(label, 0))
        total = has_label.sum().astype(jnp.float32)
        if isinstance(batch["graph"], graphs.GraphPart):  # the mean of the devices' losses is the loss
            total = jax.lax.pmean(total, "data")
        return jnp.where(has_label, losses, 0).sum() / total

    tx = jt.with_loss_scale(optax.sgd(0.3), jt.torch_loss_scale(2.0**8))
    step = jt.train_step(jt.stateless(loss_fn), tx, policy=policy)
    cut = graphs.partition(graph, count)
    whole = {"graph": graph, "features": features, "label": labels}
    batch = {"graph": cut.parts, "features": cut.take(features), "label": cut.take(labels, fill=-1)}
    found = []
    for run, data in ((jax.jit(step), whole), (jt.data_parallel(step, mesh_of(count)), batch)):
        state, losses = jt.TrainState.create(params, tx), []
        for _ in range(5):
            state, metrics = run(state, data)
            losses.append(float(metrics["loss"]))
        found.append(losses)
    return found[0], found[1]


@pytest.mark.full
@pytest.mark.parametrize("count", [4, 8])
def test_steps_equal_one_devices(count: int) -> None:
    alone, together = training("float32", count)
    assert alone[-1] < 0.9 * alone[0]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_float16", "mixed_bfloat16"])
def test_steps_in_half_stay_near_one_devices(policy: str) -> None:
    alone, together = training(policy, 4)
    np.testing.assert_allclose(together, alone, rtol=2e-2 if policy == "mixed_bfloat16" else 3e-3)


def test_rows_of_parts() -> None:
    graph = graphs.from_edges([0, 1, 2, 3, 3], [1, 2, 3, 0, 1], 5)
    cut = graphs.partition(graph, 3, method=[2, 0, 0, 2, 2])
    assert cut.nodes.tolist() == [[1, 2, -1], [-1, -1, -1], [0, 3, 4]]
    x = np.arange(10).reshape(5, 2)
    assert cut.take(x, fill=-1)[:, 0].tolist() == [2, 4, -1, -1, -1, -1, 0, 6, 8]
    np.testing.assert_array_equal(cut.restore(cut.take(x)), x)
    # Of edge 0 -> 1, 3 -> 1 and 2 -> 3 the senders belong to another part.
    assert cut.halo_rows == 3
    assert cut.take_edges(np.arange(10, 15)).tolist() == [10, 14, 11, 0, 0, 0, 13, 12, 0]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(cut.parts))
    assert [part.num_edges for part in graphs.unstack(cut.parts)] == [3] * 3
    assert [part.in_degrees.tolist() for part in graphs.unstack(cut.parts)] == [[2, 1, 0], [0, 0, 0], [1, 1, 0]]


def test_bad_arguments_are_named() -> None:
    graph = graphs.from_edges([0, 1], [1, 2], 3)
    with pytest.raises(ValueError, match=r"method must be a name, or integers \[3\], the part of each node, got"):
        graphs.partition(graph, 2, method=np.array([0, 1]))
    cut = graphs.partition(graph, 2)
    with pytest.raises(ValueError, match=r"features must have 2 rows, one for each of the edges, got shape \(3, 1\)"):
        cut.take_edges(np.ones((3, 1)))
    refusals = {
        "TypeError: method must be integers, got float64": lambda: graphs.partition(graph, 2, method=np.ones(3)),
        "method[1] = 2 is out of range for 2 parts": lambda: graphs.partition(graph, 2, method=[0, 2, 1]),
        'formats has "mailbox", whose shapes differ': lambda: graphs.partition(graph, 2, formats=("coo", "mailbox")),
        "n_parts=4 must be between 1 and the 3 nodes": lambda: graphs.partition(graph, 4),
        "features must have 3 rows, one for each of the nodes, got shape (4,)": lambda: cut.take(np.ones(4)),
        "rows must have 4 rows, those of all parts, got shape (3,)": lambda: cut.restore(np.ones(3)),
        'the parts do not store their edges: make the graph with formats that include "coo"': lambda: graphs.partition(
            graphs.from_edges([0], [1], 2, formats=("csr",)), 2
        ).take_edges(np.ones(1)),
    }
    assert_refused(refusals)


def test_a_layer_refuses_nodes_without_edges_as_of_the_whole_graph() -> None:
    cut = graphs.partition(graphs.from_edges([0], [1], 2), 2)
    with pytest.raises(ValueError, match=r"some nodes have no incoming edges, so their"):
        jax.eval_shape(lambda parts, x: graphs.graph_conv(parts[0], x), cut.parts, np.ones((1, 1), np.float32))


def cliques(count: int, size: int) -> tuple[np.ndarray, graphs.HostEdges]:
    """Returns the clique of each node, and cliques in a ring, an edge from each to the next, nodes shuffled."""
    names = np.random.default_rng(0).permutation(count * size)
    owner = np.empty(count * size, int)
    owner[names] = np.arange(count * size) // size
    left, right = np.nonzero(~np.eye(size, dtype=bool))
    starts = np.arange(count)[:, None] * size
    senders = np.concatenate([(starts + left).ravel(), starts.ravel()])
    receivers = np.concatenate([(starts + right).ravel(), np.roll(starts.ravel(), 1)])
    return owner, graphs.host_edges(names[senders], names[receivers], count * size)


def cut_edges(edges: graphs.HostEdges, parts: np.ndarray) -> int:
    receivers = np.repeat(np.arange(edges.num_targets), edges.in_degrees)
    return int((parts[edges.sources] != parts[receivers]).sum())


def test_greedy_keeps_cliques_together() -> None:
    _, edges = cliques(12, 8)
    found = {method: graphs.partition_nodes(edges, 4, method=method) for method in ("greedy", "ranges")}
    assert found["greedy"].dtype == np.int32
    assert sorted(set(found["greedy"].tolist())) == [0, 1, 2, 3]
    # Each part has three cliques of 56 edges, and at best 4 of the ring's 12 edges run between parts.
    assert cut_edges(edges, found["greedy"]) < 0.1 * edges.num_edges < cut_edges(edges, found["ranges"])
    np.testing.assert_array_equal(found["greedy"], graphs.partition_nodes(edges, 4))


@pytest.mark.parametrize("method", ["greedy", "ranges"])
def test_parts_have_like_numbers_of_nodes_and_edges(method: str) -> None:
    random = np.random.default_rng(1)
    receivers = (300 * random.random(6_000) ** 3).astype(int)  # degrees fall from several hundred to few
    edges = graphs.host_edges(random.integers(0, 300, 6_000), receivers, 300)
    parts = graphs.partition_nodes(edges, 5, method=method)
    nodes = np.bincount(parts, minlength=5) / 300
    into = np.bincount(parts, weights=edges.in_degrees, minlength=5) / 6_000
    largest = (edges.in_degrees / 6_000 + 1 / 300).max()  # no part is cut through a node
    assert (nodes + into).max() <= 1.05 * 2 / 5 + largest
    assert (nodes + into).min() > 0


def test_a_hub_with_all_edges_is_a_part_of_its_own() -> None:
    star = graphs.host_edges([0] * 50, [0] * 50, 40)
    for method in ("greedy", "ranges"):
        hub, *others = graphs.partition_nodes(star, 2, method=method).tolist()
        assert others == [1 - hub] * 39


def test_nodes_without_edges_and_one_part() -> None:
    empty = graphs.host_edges([], [], 7)
    for method in ("greedy", "ranges"):
        assert np.bincount(graphs.partition_nodes(empty, 7, method=method)).tolist() == [1] * 7
        assert graphs.partition_nodes(empty, 1, method=method).tolist() == [0] * 7


def test_bad_arguments_of_parts_are_named() -> None:
    graph = graphs.from_edges([0, 1], [1, 2], 3)
    for count in (0, 4):
        with pytest.raises(ValueError, match=rf"n_parts={count} must be between 1 and the 3 nodes of the graph"):
            graphs.partition_nodes(graph, count)
    with pytest.raises(TypeError, match=r"n_parts=1.5 must be an integer"):
        graphs.partition_nodes(graph, 1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"method='metis' must be one of 'greedy', 'ranges'"):
        graphs.partition_nodes(graph, 2, method="metis")
    with pytest.raises(TypeError, match=r"graph must be a Graph or HostEdges, got list"):
        graphs.partition_nodes([], 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"graph has 3 sources and 2 targets: graphs with two types of nodes cannot be partitioned"
    ):
        graphs.partition_nodes(graphs.host_edges([2], [1], 3, 2), 2)
    with pytest.raises(ValueError, match=r"graph is padded: unpad it first"):
        graphs.partition_nodes(graphs.pad(graph, 8, 8), 2)


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("devices", [1, 2])
def test_losses_are_those_of_one_process(devices: int, tmp_path: Path) -> None:
    program = str(Path(partition_programs.__file__))
    command = [sys.executable, "-m", "jmp_train", "launch", "-n", "2", "--devices-per-process", str(devices)]
    done = subprocess.run(
        [*command, "--", program, str(tmp_path)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    graph, features, labels, step, state = partition_programs.problem()
    run, wanted = jax.jit(step), []
    for _ in range(partition_programs.STEPS):
        state, metrics = run(state, {"graph": graph, "features": features, "label": labels})
        wanted.append(float(metrics["loss"]))
    assert wanted[-1] < wanted[0]
    for process in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"losses_{process}.npy"), wanted, rtol=1e-6)
