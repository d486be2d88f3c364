"""Trains on one graph that is cut over the devices of several processes, and writes the losses of each process."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_train as jt
from jmp_train import graphs

NODES, EDGES, CLASSES, STEPS = 60, 500, 3, 5


def problem() -> tuple[graphs.Graph, np.ndarray, np.ndarray, jt.steps.TrainStep, jt.TrainState]:
    """Returns a graph, features, labels, a step and its first state."""
    random = np.random.default_rng(0)
    ends = random.integers(0, NODES, (2, EDGES))
    graph = graphs.from_edges(ends[0], ends[1], NODES)
    features = random.normal(size=(NODES, 6)).astype(np.float32)
    labels = random.integers(0, CLASSES, NODES)
    layer = graphs.GATConv(6, CLASSES, 2, allow_zero_in_degree=True, rngs=nnx.Rngs(0))
    structure, params = nnx.split(layer)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["graph"], batch["features"]).mean(1)
        label = batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(label, 0))
        count = (label >= 0).sum().astype(jnp.float32)
        if isinstance(batch["graph"], graphs.GraphPart):
            count = jax.lax.pmean(count, "data")
        return jnp.where(label >= 0, losses, 0).sum() / count

    optimizer = optax.sgd(0.5)
    return (
        graph,
        features,
        labels,
        jt.train_step(jt.stateless(loss_fn), optimizer),
        jt.TrainState.create(params, optimizer),
    )


def main(folder: Path) -> None:
    """Trains, and writes the losses that this process saw."""
    jt.distributed.initialize(collective_timeout=60)
    graph, features, labels, step, state = problem()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    cut = graphs.partition(graph, mesh.size)
    batch = {"graph": cut.parts, "features": cut.take(features), "label": cut.take(labels, fill=-1)}
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    jt.distributed.check_agreement(state, seed=0)
    state = jt.distributed.broadcast_state(state, mesh)
    run, losses = jt.data_parallel(step, mesh), []
    for _ in range(STEPS):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    np.save(folder / f"losses_{jax.process_index()}.npy", losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
