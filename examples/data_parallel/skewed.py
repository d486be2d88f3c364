"""Processes of unequal speed wait for the slow one, or give up after a time.

    jmp-train launch -n 2 -- examples/data_parallel/skewed.py --delay 20
    jmp-train launch -n 2 -- examples/data_parallel/skewed.py --delay 20 --timeout 5

The last process is late for the tenth step. By default, the others wait in the reduction of the gradients,
and the result is the same. With a time-out, they raise an error there, `Timed out waiting 5000ms`,
and the launcher stops them all.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_train as jt
from jmp_train.data import array_batches

LATE_STEP = 10


def main() -> None:
    """Trains a linear model, and prints how long each process waited in the late step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=20, help="seconds; default: 20")
    parser.add_argument("--timeout", type=int, help="seconds; default: none")
    args = parser.parse_args()

    jt.distributed.initialize(collective_timeout=args.timeout)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    tx = optax.sgd(0.1)
    step = jt.train_step(jt.stateless(lambda w, batch: ((batch["x"] @ w) ** 2).mean()), tx)
    run = jt.data_parallel(step, mesh, donate_argnums=0)
    state = jt.distributed.broadcast_state(jt.TrainState.create(jnp.ones((8, 1)), tx), mesh)

    data = {"x": np.random.default_rng(0).normal(size=(1024, 8)).astype(np.float32)}
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    last = jax.process_index() == jax.process_count() - 1
    for number, batch in enumerate(array_batches(data, 64, sharding=sharding), start=1):
        if last and number == LATE_STEP:
            time.sleep(args.delay)
        start = time.perf_counter()
        state, metrics = run(state, batch)
        loss = float(metrics["loss"])
        if number == LATE_STEP:
            waited = time.perf_counter() - start
            print(f"process {jax.process_index()} waited {waited:.2f} s, loss {loss:.4f}")


if __name__ == "__main__":
    main()
