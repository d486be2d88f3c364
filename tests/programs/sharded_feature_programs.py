"""Trains on mini-batches whose features are sharded over several processes, and writes what each process saw."""

import dataclasses
import sys
from collections.abc import Callable
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

NODES, WIDTH, CLASSES, COUNT, STEPS = 150, 16, 3, 4, 5  # COUNT mini-batches make a step, on as many devices


@dataclasses.dataclass(frozen=True)
class Problem:
    """A graph's features, a loss of a mini-batch, the first parameters, and the mini-batches of all steps."""

    features: np.ndarray
    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    steps: list[graphs.GraphStack]


def problem() -> Problem:
    """Returns the problem, the same in all processes."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, NODES, (2, 900))
    features = random.normal(size=(NODES, WIDTH)).astype(np.float32)
    labels = random.integers(0, CLASSES, NODES).astype(np.int32)
    edges = graphs.host_edges(senders, receivers, NODES)
    sampler = graphs.neighbor_sampler(edges, (4, 4), np.arange(NODES), 8, num_trials=4)

    def stacked() -> graphs.GraphStack:
        parts = np.split(random.permutation(NODES)[: 8 * COUNT], COUNT)
        batches = sampler.sample_several(parts, random)
        return graphs.stack([{"sampled": each, "label": graphs.take_rows(labels, each.seeds)} for each in batches])

    layers = [graphs.SAGEConv(WIDTH, 8, rngs=nnx.Rngs(0)), graphs.SAGEConv(8, CLASSES, rngs=nnx.Rngs(1))]
    structure, params = nnx.split(nnx.List(layers))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        """Returns the loss of a mini-batch, of features of its inputs or of all nodes in shares."""
        rows, sampled = batch["features"], batch["batch"]["sampled"]
        if isinstance(rows, graphs.ShardedFeatures):
            rows = rows.take(sampled.inputs)
        for layer, block in zip(nnx.merge(structure, params), sampled.blocks, strict=True):
            rows = jnp.sin(layer(block, rows))
        losses = optax.softmax_cross_entropy_with_integer_labels(rows.astype(jnp.float32), batch["batch"]["label"])
        return losses.mean()

    return Problem(features, loss_fn, params, [stacked() for _ in range(STEPS)])


def train(steps: list[Any], run: Any, state: jt.TrainState) -> list[float]:
    """Returns the loss of each step, of each of which the batch is given."""
    losses = []
    for batch in steps:
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def losses_of_one_device(policy: str) -> list[float]:
    """Returns the losses of one device, which has the features of each mini-batch's inputs from the host."""
    given, dtype = problem(), jt.get_policy(policy).compute_dtype
    optimizer = jt.with_loss_scale(optax.sgd(0.5), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(given.loss_fn), optimizer, policy=policy, accumulate_steps=COUNT)

    def with_rows(stack: graphs.GraphStack) -> Any:
        inputs = stack.graphs["sampled"].inputs
        return {"batch": stack, "features": graphs.take_rows(given.features, inputs.ravel(), dtype)}

    steps = [with_rows(stack) for stack in given.steps]
    return train(steps, jax.jit(step), jt.TrainState.create(given.params, optimizer))


def losses_of_shares(policy: str, mesh: Mesh, features: Any, transform: Any = jt.data_parallel) -> list[float]:
    """Returns the losses over the devices of a mesh, each of which has a share of the features.

    Where there are fewer than COUNT devices, each has several micro-batches.
    """
    given, dtype = problem(), jt.get_policy(policy).compute_dtype
    optimizer = jt.with_loss_scale(optax.sgd(0.5), jt.NoOpLossScale())
    store = graphs.shard_features(features, mesh, dtype=dtype)
    apart = NamedSharding(mesh, P("data"))
    steps = [{"batch": jax.device_put(stack, apart), "features": store} for stack in given.steps]
    step = jt.train_step(jt.stateless(given.loss_fn), optimizer, policy=policy, accumulate_steps=COUNT // mesh.size)
    run = transform(step, mesh)
    return train(steps, run, jt.distributed.broadcast_state(jt.TrainState.create(given.params, optimizer), mesh))


class Counting:
    """An array on whose rows it is counted how many are read."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.shape, self.dtype, self.num_read = rows, rows.shape, rows.dtype, 0

    def __getitem__(self, place: slice) -> np.ndarray:
        found = self.rows[place]
        self.num_read += len(found)
        return found


def main(folder: Path) -> None:
    """Trains in both precisions, and writes the losses that this process saw, and how many rows it read."""
    jt.distributed.initialize(collective_timeout=60)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    for policy in ("float32", "mixed_float16"):
        features = Counting(problem().features)
        losses = losses_of_shares(policy, mesh, features)
        np.savez(folder / f"{policy}_{jax.process_index()}.npz", losses=losses, num_read=features.num_read)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
