import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from promotion import relaxed

import jmp_train as jt
from jmp_train.cli import compare as compare_command
from jmp_train.cli import entry as cli
from jmp_train.graphs.datasets.graph_data import NodeData
from jmp_train.graphs.datasets.synthetic_graphs import synthetic_reddit
from jmp_train.runs import RunSettings
from jmp_train.runs.loop import train
from jmp_train.task import Task
from jmp_train.tasks import load_task
from jmp_train.tasks.models.graph_classifiers import adam_with_l2
from jmp_train.tasks.reddit import make_graph

pytestmark = pytest.mark.quick

TINY = 0.001


@pytest.fixture(name="tiny", scope="module")
def fixture_tiny() -> Task:
    return load(TINY)


def load(scale: float, **options: Any) -> Task:
    task = load_task("reddit", synthetic=True, scale=scale, **options)
    return dataclasses.replace(task, optimizer=lambda steps: relaxed(task.optimizer_for(steps)))


@pytest.mark.parametrize(("scale", "nodes", "edges", "classes"), [(0.001, 233, 6756, 4), (0.02, 4659, 2292318, 4)])
def test_the_synthetic_graph_has_reddits_counts(scale: float, nodes: int, edges: int, classes: int) -> None:
    data = synthetic_reddit(scale)
    assert (data.num_nodes, len(data.senders), len(data.receivers)) == (nodes, edges, edges)
    assert (data.features.shape, data.features.dtype) == ((nodes, 602), np.float32)
    assert data.senders.dtype == data.receivers.dtype == np.int32
    assert np.bincount(data.labels).min() >= nodes // classes
    assert data.labels.max() == classes - 1
    split = [data.train, data.validation, data.test]
    shares = [len(ids) / nodes for ids in split]
    np.testing.assert_allclose(shares, np.array([153_431, 23_831, 55_703]) / 232_965, atol=0.005)
    assert sorted(np.concatenate(split).tolist()) == list(range(nodes))
    assert all((np.diff(ids) > 0).all() for ids in split)
    # Sorted by receiver, then sender; no edge twice, no self-loops, and each in both directions.
    keys = data.receivers.astype(np.int64) * nodes + data.senders
    assert (np.diff(keys) > 0).all()
    assert not (data.senders == data.receivers).any()
    reversed_keys = data.senders.astype(np.int64) * nodes + data.receivers
    np.testing.assert_array_equal(np.sort(reversed_keys), keys)
    # Degrees fall slowly, neighbors mostly share the class, features have mean 0 and variance about 1.
    degrees = np.bincount(data.receivers, minlength=nodes)
    assert degrees.max() > 3 * degrees.mean() > 3.5 * np.median(degrees)
    assert degrees.min() > 0
    assert (data.labels[data.senders] == data.labels[data.receivers]).mean() > 0.6
    assert abs(data.features.mean()) < 0.01
    assert 0.8 < data.features.std() < 1.1


def test_scales_out_of_range_are_named() -> None:
    for scale in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"scale={scale} must be between 0"):
            synthetic_reddit(scale)
    with pytest.raises(ValueError, match=r"scale=0.0004 gives 93 of 232965 nodes; a graph needs at least 100"):
        synthetic_reddit(0.0004)


def test_each_node_has_one_self_loop() -> None:
    none = np.zeros(4, np.int32)
    senders, receivers = np.array([[2, 1, 3, 1, 2], [0, 1, 1, 1, 2]], np.int32)
    graph = make_graph(NodeData(senders, receivers, none, none, 1, none, none, none))
    neighbors = graph.connections.neighbors
    assert neighbors is not None
    assert graph.in_degrees.tolist() == [2, 2, 1, 1]
    assert neighbors.by_target.others.tolist() == [0, 2, 1, 3, 2, 3]
    assert graph.out_degrees.tolist() == [1, 1, 2, 2]
    assert neighbors.by_source.others.tolist() == [0, 1, 0, 2, 1, 3]


def test_decay_is_added_to_the_gradient_before_adam() -> None:
    """Compares with Adam in float64, by its paper, of gradients with an L2 term."""
    random = np.random.default_rng(0)
    weights, gradients = random.normal(size=(2, 5)), random.normal(size=(4, 2, 5)) * 1e-3
    optimizer = relaxed(adam_with_l2(1e-3))
    params: Any = {"w": jnp.asarray(weights, jnp.float32)}
    state = optimizer.init(params)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update({"w": jnp.float32(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        decayed = gradient + 5e-4 * weights
        mean = 0.9 * mean + 0.1 * decayed
        square = 0.999 * square + 0.001 * decayed**2
        unbiased = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        weights = weights - 1e-3 * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    np.testing.assert_allclose(np.asarray(params["w"]), weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [None, (3, 1, 2)])
def test_the_model_is_the_guides(heads: Any) -> None:
    task = load(TINY, heads=heads)
    params, model_state = jax.eval_shape(task.init, jax.random.key(0))
    one, two, three = heads or (1, 1, 1)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(params))
    assert shapes == sorted(
        shape
        for width, out, count in ((602, 256, one), (one * 256, 256, two), (two * 256, 41, three))
        for shape in ((width, count * out), (1, count, out), (1, count, out), (count * out,))
    )
    assert model_state is None
    assert (task.epochs, task.batch_size, task.learning_rate) == (100, None, 1e-3)


@pytest.mark.full
def test_the_loss_is_the_training_nodes(tiny: Task) -> None:
    params, _ = tiny.init(jax.random.key(0))
    shared = tiny.shared()
    data = synthetic_reddit(TINY)
    everyone = {"node": np.arange(data.num_nodes)}

    @jax.jit
    def both(params: Any, shared: Any) -> Any:
        loss, _ = tiny.loss_fn(params, None, tiny.train | shared, None)
        return loss, tiny.metrics.predict(params, None, everyone | shared)

    loss, logits = both(params, shared)
    logits = np.asarray(logits, np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), data.labels]
    assert float(loss) == pytest.approx(losses[data.train].mean(), rel=1e-5)
    assert float(loss) != pytest.approx(losses.mean(), rel=1e-5)
    assert set(tiny.train["node"]).isdisjoint(tiny.test["node"])
    assert tiny.test["node"].tolist() == data.test.tolist()


@pytest.mark.full
def test_it_learns_in_float32_and_float16(tiny: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loop makes the graph once a run, and casts the features before they are arguments."""
    made, traced = [], []
    step = jt.steps.TrainStep.__call__

    def shared() -> dict[str, Any]:
        made.append(1)
        return tiny.shared()

    def look(self: Any, state: Any, batch: Any) -> Any:
        traced.append(batch["features"].dtype)
        return step(self, state, batch)

    monkeypatch.setattr(jt.steps.TrainStep, "__call__", look)
    counted = dataclasses.replace(tiny, shared=shared)
    runs = [train(counted, policy, RunSettings(epochs=14)) for policy in ("float32", "mixed_float16")]
    assert (len(made), traced) == (2, [jnp.float32, jnp.float16])
    for run in runs:
        assert run.metrics["test_accuracy"] > 0.75  # chance level: 0.25
        assert run.epochs[-1].loss < 0.5 * run.epochs[-14 + 2].loss
    losses = [[step.loss for step in run.steps if step.finite] for run in runs]
    np.testing.assert_allclose(losses[1], losses[0][: len(losses[1])], rtol=0.05, atol=0.02)


def test_compare_hands_scale_and_heads_on() -> None:
    arguments = ["compare", "reddit", "--synthetic", "--scale", "0.002", "--heads", "2", "1", "2"]
    command = compare_command._command(cli._parser(arguments).parse_args(arguments), "float32")
    expected = "train reddit --policy float32 --json --synthetic --heads 2 1 2 --scale=0.002"
    assert " ".join(command).endswith(expected)


def test_a_run_from_files(tmp_path: Path) -> None:
    data = synthetic_reddit(TINY)
    ends, entries = (data.senders, data.receivers), np.ones(len(data.senders))
    graph = scipy.sparse.coo_matrix((entries, ends), shape=(data.num_nodes, data.num_nodes))
    scipy.sparse.save_npz(tmp_path / "reddit_graph.npz", graph)
    node_types = np.full(data.num_nodes, 2)
    node_types[data.train], node_types[data.test] = 1, 3
    nodes = {"feature": data.features, "label": data.labels, "node_types": node_types}
    np.savez(tmp_path / "reddit_data.npz", allow_pickle=False, **nodes)
    read = load_task("reddit", data_dir=tmp_path)
    made = load_task("reddit", synthetic=True, scale=TINY)
    for name in ("train", "test"):
        for key, array in getattr(made, name).items():
            np.testing.assert_array_equal(getattr(read, name)[key], array)
    leaves = [jax.tree.leaves(task.shared()) for task in (read, made)]
    jax.tree.map(np.testing.assert_array_equal, *leaves)
