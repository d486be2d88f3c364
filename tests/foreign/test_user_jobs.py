"""A user's job in the style of jraph's examples: batches of graphs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jraph
import numpy as np
import optax
import pytest

import jmp_train as jt
from jmp_train.app.cli import main
from jmp_train.app.runs import RunSettings, train
from jmp_train.app.runs.resuming import Saving, Stopped
from jmp_train.checkpoints import CheckpointStore

pytestmark = pytest.mark.full

STEPS = 6


class Ring(NamedTuple):
    """A ring of nodes, some of which are padding, with a label per node: jraph's examples have batches like this."""

    graph: jraph.GraphsTuple
    labels: np.ndarray
    mask: np.ndarray


def ring(size: int, room: int, seed: int) -> Ring:
    nodes = np.random.default_rng(seed).normal(size=(size, 2))  # float64, as NumPy's are
    ids: Any = np.arange(size)
    counts: Any = np.array([size])
    graph = jraph.GraphsTuple(
        nodes=nodes,
        edges=np.ones((size, 1)),
        senders=ids,
        receivers=(ids + 1) % size,
        n_node=counts,
        n_edge=counts,
        globals=None,
    )
    above = (nodes[:, 0] + np.roll(nodes[:, 0], 1) > 0).astype(np.int64)
    padding = room + 1 - size
    return Ring(
        jraph.pad_with_graphs(graph, room + 1, room), np.pad(above, (0, padding)), np.pad(np.ones(size), (0, padding))
    )


def of_rings() -> jt.Task:
    def network(graph: jraph.GraphsTuple) -> Any:
        def update(width: int) -> Any:
            return jraph.concatenated_args(hk.Sequential([hk.Linear(width), jax.nn.relu]))

        net: Any = jraph.InteractionNetwork(update(8), update(8))
        return hk.Linear(2)(net(graph).nodes)

    net = hk.without_apply_rng(hk.transform(network))

    def loss_fn(params: Any, batch: Ring) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch.graph), batch.labels)
        return (losses * batch.mask).sum() / batch.mask.sum()

    def batches(epoch: int) -> Iterator[Ring]:
        for number in range(STEPS):
            yield ring(4 + number, 10, 10 * epoch + number)

    return jt.Task(
        init=lambda key: (net.init(key, ring(4, 10, 0).graph), None),
        loss_fn=jt.stateless(loss_fn),
        optimizer=optax.adam(0.01),
        train=batches,
        epochs=2,
        metrics=lambda params, model_state, batch: {"loss": loss_fn(params, batch)},
        test=lambda: [ring(15, 20, 100), ring(18, 20, 101)],  # larger than those of training
        higher_is_better=False,
    )


def test_a_stopped_run_goes_on_as_the_unbroken_one(tmp_path: Path) -> None:
    whole = train(of_rings(), "autocast_float16", RunSettings(seed=2))
    assert whole.costs.half_flops_share > 0.5
    looks = iter(range(10))
    with CheckpointStore(tmp_path) as store, pytest.raises(Stopped):
        train(
            of_rings(),
            "autocast_float16",
            RunSettings(seed=2),
            saving=Saving(store, 4, False, lambda: next(looks) >= 3),
        )
    with CheckpointStore(tmp_path) as store:
        again = train(of_rings(), "autocast_float16", RunSettings(seed=2), saving=Saving(store, 4, True))
    assert again.steps == whole.steps
    assert again.metrics == whole.metrics


def test_the_command_line_runs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{__file__}:of_rings", "--policy", "mixed_bfloat16", "--steps", "3", "--json"]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(run["steps"]) == 3
    assert list(run["metrics"]) == ["loss"]
