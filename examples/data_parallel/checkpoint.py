"""Training that resumes after a process is killed, also on another number of devices.

    jmp-train launch -n 2 --restarts 3 -- examples/data_parallel/checkpoint.py --directory out/run
    python examples/data_parallel/checkpoint.py --directory out/run --steps 600

Process 0 writes in the background, and distributes what it reads. Kill a process of the first command by `kill -9`: all
are restarted, and the last line is the same as in an unbroken run, to the last bit of the parameters. At SIGTERM or
Ctrl-C, all processes save the same step and end; the same command resumes.
"""

import argparse
import hashlib
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from basic import BATCH_SIZE, ToyModel, loss_fn, make_data
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_train as jt
from jmp_train.data import array_batches


def fingerprint(tree: Any) -> str:
    """Returns a short digest of all bits of the tree."""
    arrays = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:16]


def main() -> None:
    """Trains from the last checkpoint, and prints one line per checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True, help="where checkpoints are")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    args = parser.parse_args()

    jt.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    tx = jt.with_loss_scale(optax.adam(1e-2), jt.torch_loss_scale(2.0**10, growth_interval=50))
    step = jt.train_step(jt.stateless(loss_fn), tx, policy="mixed_float16")
    run = jt.data_parallel(step, mesh, donate_argnums=0)

    params = ToyModel().init(jax.random.key(0), jnp.zeros((1, 10)))["params"]
    state = jt.distributed.broadcast_state(jt.TrainState.create(params, tx), mesh)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    stop = jt.distributed.StopSignals()
    with jt.CheckpointStore(args.directory) as store:
        try:
            start, state = store.restore(state)
        except FileNotFoundError:
            start = 0
        print(f"process {jax.process_index()} ({os.getpid()}) goes on from step {start}")
        batches = array_batches(make_data(0), BATCH_SIZE, epochs=None, start=start, sharding=sharding)
        metrics = {}
        for number, batch in zip(range(start + 1, args.steps + 1), batches, strict=False):
            state, metrics = run(state, batch)
            if stop.agreed():  # all processes after the same step
                store.save(number, state)
                sys.exit(stop.finish())
            if number % args.every == 0 or number == args.steps:
                store.save(number, state)
                if jt.distributed.is_main_process():
                    print(f"step {number}  loss {metrics['loss']:.4f}")
    if jt.distributed.is_main_process():
        print(f"step {args.steps}: parameters {fingerprint(state.params)}")


if __name__ == "__main__":
    main()
