"""Measures what saving every 50 steps costs the training of the MNIST network.

    python benchmarks/checkpoint.py [--every 50] [--batch-size 32] [--rounds 5] [--json FILE]

Each round runs the steps between two checkpoints (Adam, mixed_float16, synthetic images), in turn: without saving,
with `CheckpointStore`, with orbax's `StandardCheckpointer`, which is asynchronous too but neither verifies nor counts
checkpoints, and, if torch is installed, with `torch.save` of the same arrays, which is synchronous. The script prints
the median seconds of a round, the median of its ratio to the round without saving, and the seconds of the call itself.
A round ends when its steps are done, so a write in progress slows the next round, which saves in the same way. The
first round of each way does not count.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from result_files import write_results

import jmp_train as jt
from jmp_train.tasks import mnist

TARGET = 1.05
WITHOUT, OURS, ORBAX, TORCH = "without", "CheckpointStore", "orbax", "torch.save"


def make_savers(
    directory: Path,
) -> dict[str, tuple[Callable[[int, Any], None], Callable[[], None]]]:
    """Returns for each way how to save a step's state, and how to wait for the end of it."""
    import orbax.checkpoint as ocp

    store = jt.CheckpointStore(directory / "ours", max_to_keep=1)
    orbax = ocp.StandardCheckpointer()

    def save_with_orbax(step: int, state: Any) -> None:
        path = directory / "orbax" / str(step)
        orbax.save(path, {"params": state.params, "opt_state": state.opt_state})
        shutil.rmtree(path.with_name(str(step - 1)), ignore_errors=True)

    savers: dict[str, tuple[Callable[[int, Any], None], Callable[[], None]]] = {
        WITHOUT: (lambda step, state: None, lambda: None),
        OURS: (store.save, store.wait),
        ORBAX: (save_with_orbax, orbax.wait_until_finished),
    }
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return savers

    def save_with_torch(step: int, state: Any) -> None:
        leaves = jax.tree.leaves((state.params, state.opt_state))
        torch.save([torch.from_numpy(np.array(x)) for x in leaves], directory / "torch.pt")

    return {**savers, TORCH: (save_with_torch, lambda: None)}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    tx = jt.with_loss_scale(optax.adam(1e-4), jt.torch_loss_scale())
    step = jax.jit(jt.train_step(mnist.loss_fn, tx, policy="mixed_float16"), donate_argnums=0)
    params, stats = mnist.init(jax.random.key(0))
    state = jt.TrainState.create(params, tx, model_state=stats)
    batch = jax.device_put(mnist.prepare(mnist.synthetic_data(args.batch_size, 0)))
    megabytes = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6
    state = jax.block_until_ready(step(state, batch)[0])

    with tempfile.TemporaryDirectory() as folder:
        savers = make_savers(Path(folder))
        rounds = {name: [] for name in savers}
        calls = {name: [] for name in savers}
        for number in range(args.rounds):
            for name, (save, wait) in savers.items():
                for counts in (False, True):
                    start = time.perf_counter()
                    for _ in range(args.every):
                        state = jax.block_until_ready(step(state, batch)[0])
                    before = time.perf_counter()
                    save(2 * number + counts, state)
                    end = time.perf_counter()
                    if counts:
                        rounds[name].append(end - start)
                        calls[name].append(end - before)
                wait()

    plain = rounds[WITHOUT]
    print(f"{args.every} steps of {args.batch_size} images, a state of {megabytes:.0f} MB; seconds")
    print("way               a round   ratio   the call")
    report = {"every": args.every, "batch_size": args.batch_size, "megabytes": megabytes}
    for name, seconds in rounds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, plain, strict=True))
        report[name] = {"rounds": seconds, "ratio": ratio, "calls": calls[name]}
        row = f"{statistics.median(seconds):7.2f}  {ratio:6.3f}    {statistics.median(calls[name]):7.3f}"
        print(f"{name:<17} {row}")
    within = report[OURS]["ratio"] <= TARGET
    print(f"target: at most {TARGET} with {OURS}: {'within' if within else 'MISSED'}")
    if args.json:
        write_results(args.json, report)


if __name__ == "__main__":
    main()
