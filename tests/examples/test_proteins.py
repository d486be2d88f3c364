"""Graph classification: half as accurate as float32, one program, batch norms over real nodes on several devices."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from models import Accuracy
from promotion import relaxed
from proteins import Options, make_task

import jmp_train as jt
from jmp_train import graphs
from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.loop import train
from jmp_train.app.runs.task_batches import train_batches
from jmp_train.steps import TrainState, train_step
from jmp_train.task import Task

pytestmark = pytest.mark.full

POLICIES = ("float32", "mixed_float16", "autocast_float16")


def a_task(count: int, devices: int = 1, epochs: int = 1, most: int = 40) -> Task:
    """Returns the task on made graphs of at most that many nodes, by an optimizer whose dtypes may differ."""
    data = graphs.synthetic_proteins(3 * count)
    small = np.flatnonzero(data.n_node <= most)[:count]
    task = make_task(_taken(data, small), Options(devices=devices), epochs)
    return dataclasses.replace(task, optimizer=lambda steps: relaxed(task.optimizer_for(steps)))


def _taken(data: graphs.GraphData, places: np.ndarray) -> graphs.GraphData:
    nodes = np.concatenate([np.arange(*data.node_starts[place : place + 2]) for place in places])
    edges = np.concatenate([np.arange(*data.edge_starts[place : place + 2]) for place in places])
    return graphs.GraphData(
        data.n_node[places],
        data.n_edge[places],
        data.senders[edges],
        data.receivers[edges],
        data.labels[places],
        data.num_classes,
        {name: rows[nodes] for name, rows in data.nodes.items()},
    )


@pytest.mark.timeout(300)
def test_every_policy_is_as_accurate() -> None:
    runs = [train(a_task(600, epochs=10), policy) for policy in POLICIES]
    accuracies = [run.metrics["test_accuracy"] for run in runs]
    assert min(accuracies) > 0.75  # of 5 in 100 the label is wrong
    assert max(accuracies) - min(accuracies) < 0.09  # of 60 graphs, 5
    for run in runs:
        assert run.epochs[-1].skipped_steps == 0 and run.epochs[-1].loss < run.epochs[0].loss


def test_the_statistics_do_not_depend_on_the_devices() -> None:
    """One step on the graphs of a batch, on one device and on two, and the logits of the model after it."""
    states, logits = [], []
    for devices in (1, 2):
        task = dataclasses.replace(a_task(40, devices), batch_size=16)
        batch = task.prepare({name: array[:16] for name, array in task.train.items()})
        optimizer = task.optimizer_for(100)
        params, model_state = task.init(jax.random.key(0))
        step: Any = train_step(task.loss_fn, optimizer)
        if devices > 1:
            mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
            step = jt.data_parallel(step, mesh)
        state = TrainState.create(params, optimizer, model_state=model_state)  # no key: no dropout
        state, metrics = jax.jit(step)(state, batch)
        states.append((metrics["loss"], jax.device_get(state.model_state)))
        logits.append(jax.jit(task.metrics.predict)(params, model_state, batch))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *states)
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


def test_a_run_traces_its_step_once_for_each_size() -> None:
    """The model is one number here."""
    whole, traced = make_task(graphs.synthetic_proteins(500)), []

    def predict(params: Any, model_state: Any, batch: Any) -> jax.Array:
        traced.append(batch["graph"].num_nodes)
        return params["w"] * graphs.sum_nodes(batch["graph"], "h")[: len(batch["label"]), :2]

    task = dataclasses.replace(
        whole,
        init=lambda key: ({"w": jax.random.normal(key)}, None),
        metrics=Accuracy(predict),
        loss_fn=lambda params, state, batch, rng: (predict(params, state, batch).mean(), (state, None)),
        optimizer=relaxed(optax.sgd(0.01)),
    )
    sizes = {batch["graph"].num_nodes for batch in train_batches(task, 16, 0, 3)}
    train(task, "float32", RunSettings(epochs=3, batch_size=16))
    assert 2 <= len(sizes) <= 3
    in_training, in_evaluation = traced[: len(sizes)], traced[len(sizes) :]
    assert set(in_training) == sizes
    assert len(in_evaluation) <= 4  # whose last batch has fewer graphs
