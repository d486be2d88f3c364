"""GraphSAGE on a loader of sampled neighbors: scikit-learn's digits, each connected to the most similar ones.

jmp-train compare examples/tasks/sampled_graph.py:task --policies float32 mixed_float16 --out out/sampled
"""

import dataclasses
from typing import Any

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import kneighbors_graph

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data import neighbor_batches

SEEDS = 64  # digits of a mini-batch, which brings their neighbors and the neighbors of those


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the job; the last two are the command's."""

    neighbors: int = dataclasses.field(default=10, metadata={"help": "edges to each digit"})
    devices: int = 1
    accumulate_steps: int = 1


def task(options: Options) -> jt.Task:
    """Returns the job: each device and micro-batch has its own mini-batch."""
    x, y = load_digits(return_X_y=True)
    features, labels, adjacency = (x / 16).astype(np.float32), y, kneighbors_graph(x, options.neighbors).tocoo()
    train, test = train_test_split(np.arange(len(x)), test_size=0.25, random_state=0)
    sampler = graphs.neighbor_sampler(graphs.host_edges(adjacency.col, adjacency.row, len(x)), (5, 5), train, SEEDS)
    parts = options.devices * options.accumulate_steps
    stack = parts if parts > 1 else None

    def make_layers(rngs: nnx.Rngs) -> nnx.List:
        first = graphs.SAGEConv(64, 64, activation=nnx.relu, rngs=rngs)
        return nnx.List([first, graphs.SAGEConv(64, 10, rngs=rngs)])

    def fetch(batch: graphs.MiniBatch) -> dict[str, Any]:
        label = np.where(batch.seeds < 0, -1, graphs.take_rows(labels, batch.seeds))  # -1: padding
        return {"blocks": batch.blocks, "h": graphs.take_rows(features, batch.inputs), "label": label}

    def metrics(params: jt.policies.Params, model_state: jt.steps.ModelState, batch: dict[str, Any]) -> dict[str, Any]:
        h, label = batch["h"], batch["label"]
        for layer, block in zip(nnx.merge(structure, params), batch["blocks"], strict=True):
            h = layer(block, h)
        losses = optax.softmax_cross_entropy_with_integer_labels(h.astype("float32"), label, where=label >= 0)
        count = (label >= 0).sum()
        return {"accuracy": ((h.argmax(-1) == label).sum(), count), "loss": (losses.sum(), count)}

    structure = nnx.graphdef(make_layers(nnx.Rngs(0)))
    return jt.Task(
        init=lambda key: (nnx.state(make_layers(nnx.Rngs(key)), nnx.Param), None),
        loss_fn=jt.stateless(lambda params, batch: metrics(params, None, batch)["loss"][0] / SEEDS),
        optimizer=optax.adam(3e-3),
        learning_rate=3e-3,
        train=lambda epoch: neighbor_batches(sampler, train, fetch, seed=epoch, stack=stack, drop_remainder=True),
        steps_per_epoch=len(train) // (SEEDS * parts),
        epochs=10,
        test=lambda: neighbor_batches(sampler, test, fetch, shuffle=False),
        metrics=metrics,
    )
