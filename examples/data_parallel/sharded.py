"""Shards optimizer state and parameters over the devices of a batch, by ZeRO-1 or FSDP, in any AMP mode.

    jmp-train launch -n 2 -- examples/data_parallel/sharded.py zero1 apex-O2
    JAX_NUM_CPU_DEVICES=8 NPROC=32 python examples/data_parallel/sharded.py fsdp torch

Only the line with `shardings` differs from plain data parallelism. Expected: 95% of the test images right; each of N
devices stores 1/N of the moments and master weights, with fsdp also of the parameters.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jmp_train as jt
from jmp_train.data import array_batches

BATCH_SIZE, EPOCHS = 64, 10
TRAIN, TEST = slice(1500), slice(1500, None)
FORMS = {
    "whole": jt.parallel.state_shardings,
    "zero1": jt.zero1_shardings,
    "fsdp": jt.fsdp_shardings,
}


def make_params(key: jax.Array) -> Any:
    """Returns the parameters of three dense layers."""
    sizes = (64, 512, 512, 10)
    return [
        {"kernel": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
        for k, n, m in zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], strict=True)
    ]


def model(params: Any, x: jax.Array) -> jax.Array:
    """Returns logits [batch, 10] of [batch, 64]."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Returns the mean cross-entropy."""
    logits = model(params, batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def bytes_on_a_device(tree: Any) -> int:
    """Returns the number of bytes of the arrays on the first device of this process."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def main(form: str = "fsdp", mode: str = "apex-O2", seed: int = 0) -> None:
    """Trains, and prints one line per epoch."""
    jt.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    data = {"x": (images / 16).astype(np.float32)[order], "y": labels.astype(np.int32)[order]}
    train, test = ({name: x[part] for name, x in data.items()} for part in (TRAIN, TEST))

    name, _, level = mode.partition("-")
    amp = jt.amp_mode(name, **({"opt_level": level} if level else {}))
    amp = dataclasses.replace(amp, batch_norms=())  # the model has none
    loss, tx = amp.transform(jt.stateless(loss_fn), optax.adam(1e-3))
    state = jt.TrainState.create(make_params(jax.random.key(seed)), tx, cast_params=amp.cast_params)
    shardings = FORMS[form](state, mesh)
    step = jt.train_step(loss, tx)
    step = jt.sharded_step(step, mesh, shardings=shardings, donate_argnums=0)
    state = jt.distributed.broadcast_state(state, shardings=shardings)

    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batches = array_batches(train, BATCH_SIZE, seed=seed, epochs=EPOCHS, sharding=sharding)
    steps_per_epoch = len(train["x"]) // BATCH_SIZE
    for number, batch in enumerate(batches, start=1):
        state, metrics = step(state, batch)
        loss_of_batch = float(metrics["loss"])  # waits for the step, so that a failure shows in it
        if number % steps_per_epoch == 0 and jt.distributed.is_main_process():
            skipped = int(metrics["skipped_steps"])
            print(f"epoch {number // steps_per_epoch}  loss {loss_of_batch:.4f}  skipped {skipped}")
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.jit(lambda tree: tree, out_shardings=everywhere)(state.params)
    params = jax.tree.map(lambda x: x.addressable_data(0), params)
    predict = amp.forward(lambda params, model_state, x: model(params, x))
    logits = jax.jit(predict)(params, None, test["x"])
    if jt.distributed.is_main_process():
        print(f"test accuracy {np.mean(np.argmax(logits, -1) == test['y']):.1%}")
        parameters, optimizer = map(bytes_on_a_device, (state.params, state.opt_state))
        print(f"a device stores {parameters} bytes of parameters, {optimizer} of the optimizer's state")


if __name__ == "__main__":
    main(**dict(zip(("form", "mode"), sys.argv[1:3], strict=False)))
