"""PyTorch's first DistributedDataParallel example in JAX and in float16, from one device to many machines.

    python examples/data_parallel/basic.py                            # one process, all of its devices
    jmp-train launch -n 2 -- examples/data_parallel/basic.py          # two, with a GPU or a CPU device each
    srun -N 4 --gpus-per-node 1 python examples/data_parallel/basic.py  # any number, started by Slurm

The loop does not depend on the number of devices: all three print the same losses, except for rounding.
Expected: a loss of about 0.02 after 10 epochs.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_train as jt
from jmp_train.data import array_batches

BATCH_SIZE = 64  # of all devices together


class ToyModel(nn.Module):
    """Two dense layers, without code for devices or dtypes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, 5] of [batch, 10]."""
        return nn.Dense(5)(nn.relu(nn.Dense(64)(x)))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Returns the mean square error of a device's part of the batch."""
    predicted: Any = ToyModel().apply({"params": params}, batch["x"])
    return optax.squared_error(predicted.astype(jnp.float32), batch["y"].astype(jnp.float32)).mean()


def make_data(seed: int) -> dict[str, np.ndarray]:
    """Returns points and a smooth function of them to learn."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(2048, 10)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ random.normal(size=(10, 5)) / 3).astype(np.float32)}


def main(seed: int = 0, epochs: int = 10) -> None:
    """Trains, and prints one line per epoch."""
    jt.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",))

    tx = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), jt.torch_loss_scale(2.0**10))
    step = jt.train_step(jt.stateless(loss_fn), tx, policy="mixed_float16")
    run = jt.data_parallel(step, mesh, donate_argnums=0)

    data = make_data(seed)
    params = ToyModel().init(jax.random.key(seed), data["x"][:1])["params"]
    state = jt.TrainState.create(params, tx)
    jt.distributed.check_agreement(state, batch=data, policy=step.policy, seed=seed)
    state = jt.distributed.broadcast_state(state, mesh)

    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batches = array_batches(data, BATCH_SIZE, seed=seed, epochs=epochs, sharding=sharding)
    steps_per_epoch = len(data["x"]) // BATCH_SIZE
    losses = []
    for number, batch in enumerate(batches, start=1):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))  # waits for the step, so that a failure shows in it
        if number % steps_per_epoch == 0 and jt.distributed.is_main_process():
            loss = np.mean(losses[-steps_per_epoch:])
            skipped = int(metrics["skipped_steps"])
            print(f"epoch {number // steps_per_epoch}  loss {loss:.4f}  skipped {skipped}")
    jt.distributed.check_agreement(state)  # to the last bit
    if jt.distributed.is_main_process():
        print(f"{jax.process_count()} processes and {mesh.size} devices agree on the parameters")


if __name__ == "__main__":
    main()
