"""Several pipelines of two stages with micro-batches, in float16.

    jmp-train launch -n 2 -- examples/data_parallel/pipeline.py
    JAX_NUM_CPU_DEVICES=8 NPROC=32 python examples/data_parallel/pipeline.py

Each device along "pipe" has half of the blocks. Micro-batches pass through them in sequence, and `jax.checkpoint`
stores only the inputs of a stage. Embedding and head are replicated.
Expected: 95% of the test images right after 10 epochs.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jmp_train as jt
from jmp_train.data import array_batches

BATCH_SIZE, EPOCHS, STAGES, BLOCKS, WIDTH = 64, 10, 2, 2, 64
TRAIN, TEST = slice(1500), slice(1500, 1796)


def make_params(key: jax.Array) -> Any:
    """Returns an embedding, the blocks [stages, blocks, ...] and a head."""
    keys = iter(jax.random.split(key, 4))

    def kernel(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    blocks = {
        "up": kernel(STAGES, BLOCKS, WIDTH, 4 * WIDTH),
        "down": 0.5 * kernel(STAGES, BLOCKS, 4 * WIDTH, WIDTH),
    }
    return {"embedding": kernel(64, WIDTH), "blocks": blocks, "head": kernel(WIDTH, 10)}


def stage(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    """Runs the blocks of one stage, one after another."""
    del rng

    def block(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"], None

    return jax.lax.scan(block, x, params)[0]


def main(seed: int = 0) -> None:
    """Trains, and prints one line per epoch."""
    jt.distributed.initialize()
    if jax.device_count() % STAGES:
        sys.exit(f"{STAGES} stages need as many devices; there are {jax.device_count()}")
    mesh = Mesh(np.array(jax.devices()).reshape(-1, STAGES), ("data", "pipe"))
    run_blocks = jt.pipeline(jax.checkpoint(stage), mesh, "pipe", micro_batches=4)

    def model(params: Any, x: jax.Array) -> jax.Array:
        x = run_blocks(params["blocks"], x @ params["embedding"])
        return (x @ params["head"]).astype(jnp.float32)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    data = {"x": (images / 16).astype(np.float32)[order], "y": labels.astype(np.int32)[order]}
    train, test = ({name: x[part] for name, x in data.items()} for part in (TRAIN, TEST))

    tx = jt.with_loss_scale(optax.adam(5e-4), jt.torch_loss_scale())
    step = jt.train_step(jt.stateless(loss_fn), tx, policy="mixed_float16")
    state = jt.TrainState.create(make_params(jax.random.key(seed)), tx)
    specs = jt.parallel.specs_by_path(state.params, {"blocks": P("pipe")})
    shardings = jt.parallel.state_shardings(state, mesh, params=specs)
    step = jt.sharded_step(step, mesh, shardings=shardings, donate_argnums=0)
    state = jt.distributed.broadcast_state(state, shardings=shardings)

    by_example = NamedSharding(mesh, P("data"))
    batches = array_batches(train, BATCH_SIZE, seed=seed, epochs=EPOCHS, sharding=by_example)
    steps_per_epoch = len(train["x"]) // BATCH_SIZE
    for number, batch in enumerate(batches, start=1):
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])  # waits for the step, so that a failure shows in it
        if number % steps_per_epoch == 0 and jt.distributed.is_main_process():
            skipped = int(metrics["skipped_steps"])
            print(f"epoch {number // steps_per_epoch}  loss {loss:.4f}  skipped {skipped}")
    accuracy = jax.jit(lambda params, x, y: (model(params, x).argmax(-1) == y).mean())
    right = float(accuracy(state.params, test["x"], test["y"]))
    if jt.distributed.is_main_process():
        print(f"test accuracy {right:.1%}")


if __name__ == "__main__":
    main()
