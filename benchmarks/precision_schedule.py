"""Measures how float32 in the last tenth of a run changes the test loss of half-precision runs.

    python benchmarks/precision_schedule.py [--task regression] [--policies NAME ...] [--seeds 6] [--json FILE]

`regression` fits a product of a sine and a cosine by two hidden layers of 64 and Adam, whose learning rate falls by a
cosine to a tenth; `digits` and `lm` are the tasks of `jmp-train`.

For each seed, one run is in float32 and one in each policy. Each policy's run is copied before its last tenth: one
copy continues unchanged, the other in float32, so that the two differ only in these steps. A seed determines
parameters, dropout and the order of the data, the same in each policy. All runs are evaluated in float32; the
half-precision run also in its own precision. Parameters that a policy stores in half precision stay so in the float32
phase.

The gap is the excess of a policy's loss over float32's. It is noisy, because runs with different rounding soon differ
in everything. The effect of the float32 end is less noisy, because both runs share the steps before it.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import load_task, models
from result_files import write_results

import jmp_train as jt
from jmp_train import Task
from jmp_train.app.runs import evaluation_batches, phase_bounds, setup_of, train_batches

ENDS = {
    "mixed_bfloat16": "float32",
    "mixed_float16": "float32",
    "autocast_bfloat16": "float32",
    "autocast_float16": "float32",
    "bfloat16": "params=bfloat16,compute=float32,output=float32",
}
SHARE = 0.9
SIZES = (2, 64, 64, 1)


def regression() -> Task:
    """Returns the task of a smooth function of two numbers, 4,096 of whose values are known, without noise."""
    return Task(
        train=_values(4096, seed=0),
        test=_values(4096, seed=1),
        init=_init,
        loss_fn=jt.stateless(lambda params, batch: _squares(_fitted(params, None, batch), batch["label"]).mean()),
        metrics=models.Accuracy(_fitted),  # whose function is evaluated
        optimizer=lambda steps: optax.adam(optax.cosine_decay_schedule(3e-3, steps, 0.1)),
        batch_size=256,
        epochs=125,
    )


def _values(count: int, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).uniform(-1, 1, (count, SIZES[0])).astype(np.float32)
    return {"x": x, "label": np.sin(3 * x[:, 0]) * np.cos(2 * x[:, 1])}


def _init(key: jax.Array) -> tuple[Any, Any]:
    keys = jax.random.split(key, len(SIZES) - 1)
    shapes = list(itertools.pairwise(SIZES))
    weights = [1.5 * jax.random.normal(k, shape) / shape[0] ** 0.5 for k, shape in zip(keys, shapes, strict=True)]
    return [{"w": w, "b": jnp.zeros(w.shape[1])} for w in weights], None


def _fitted(params: Any, model_state: Any, batch: Any) -> jax.Array:
    del model_state
    x = batch["x"]
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def _squares(values: jax.Array, wanted: jax.Array) -> jax.Array:
    return (values.astype(jnp.float32) - wanted.astype(jnp.float32)) ** 2


class Trainer:
    """A task, and the compiled steps of its policies, each of which is compiled once for all seeds."""

    def __init__(self, task: Task, epochs: int) -> None:
        self.task = task
        self.epochs = epochs
        self.batch_size = task.batch_size or 1
        self.total = epochs * (len(task.train["label"]) // self.batch_size)
        self.setup = functools.cache(lambda name: setup_of(task, name, total=self.total))
        self.step = functools.cache(lambda name: jax.jit(self.setup(name).step, donate_argnums=0))
        self.losses = functools.cache(lambda name: jax.jit(functools.partial(_losses, task, self.setup(name))))

    def first_state(self, name: str, seed: int) -> jt.TrainState:
        """Returns the state before the first step."""
        init_key, step_key = jax.random.split(jax.random.key(seed))
        return self.setup(name).create_state(*self.task.init(init_key), step_key)

    def train(self, name: str, state: jt.TrainState, batches: Iterator[Any], steps: int) -> jt.TrainState:
        """Returns the state after some steps; the one given is taken over."""
        for _ in range(steps):
            state, _ = self.step(name)(state, next(batches))
        return state

    def test_loss(self, name: str, state: jt.TrainState) -> float:
        """Returns the mean loss of the test data, evaluated in a precision."""
        total = count = 0.0
        for batch, examples in evaluation_batches(self.task, self.batch_size):
            losses = np.asarray(self.losses(name)(state.params, state.model_state, batch), np.float64)[:examples]
            total, count = total + losses.sum(), count + losses.size
        return total / count

    def batches(self, seed: int, start: int = 0) -> Iterator[Any]:
        """Yields the batches of a run, as `jmp-train` would train on them."""
        return train_batches(self.task, self.batch_size, seed, self.epochs, start=start)


def _losses(task: Task, setup: Any, params: Any, model_state: Any, batch: Any) -> jax.Array:
    logits = setup.forward(task.metrics.predict)(params, model_state, batch).astype(jnp.float32)
    if jnp.issubdtype(batch["label"].dtype, jnp.floating):
        return _squares(logits, batch["label"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


class Losses(NamedTuple):
    """Test losses of one seed in a policy; the first is of an evaluation in the policy, the others in float32."""

    in_half: float
    half: float
    float32_end: float


def run_policy(trainer: Trainer, name: str, seed: int) -> Losses:
    """Trains a seed in a policy, with and without a float32 end."""
    end = ENDS[name]
    (_, switch), _ = phase_bounds(f"{name},{SHARE}:{end}", trainer.total)
    state = trainer.train(name, trainer.first_state(name, seed), trainer.batches(seed), switch)
    copy = jax.tree.map(jnp.copy, state)
    half, full = (
        trainer.train(part, start, trainer.batches(seed, switch), trainer.total - switch)
        for part, start in ((name, state), (end, copy))
    )
    return Losses(trainer.test_loss(name, half), trainer.test_loss("float32", half), trainer.test_loss("float32", full))


def gaps(full: Sequence[float], found: Sequence[Losses]) -> dict[str, tuple[float, float]]:
    """Returns what losses are more than float32's of the same seed, in percent: the mean, and its standard error."""
    relative = 100 * (np.array(found) / np.array(full)[:, None] - 1)
    columns = {
        "evaluated in half": relative[:, 0],
        "gap": relative[:, 1],
        "gap with a float32 end": relative[:, 2],
        "what the end changes": relative[:, 2] - relative[:, 1],
    }
    error = len(full) ** -0.5
    return {name: (float(x.mean()), float(x.std(ddof=1) * error)) for name, x in columns.items()}


def main() -> None:
    """Trains, and prints one line per policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("regression", "digits", "lm"), default="regression")
    parser.add_argument(
        "--policies", choices=tuple(ENDS), nargs="+", default=["autocast_bfloat16", "autocast_float16", "bfloat16"]
    )
    parser.add_argument("--seeds", type=int, default=6, help="at least 2")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--train-size", type=int)
    parser.add_argument("--json", type=Path, help="keeps what it has of other tasks")
    args = parser.parse_args()
    task = regression() if args.task == "regression" else load_task(args.task)
    train = {name: array[: args.train_size] for name, array in task.train.items()}
    task = dataclasses.replace(task, train=train)
    trainer = Trainer(task, args.epochs or task.epochs)

    full, runs = [], {name: [] for name in args.policies}
    for seed in range(args.seeds):
        state = trainer.train("float32", trainer.first_state("float32", seed), trainer.batches(seed), trainer.total)
        full.append(trainer.test_loss("float32", state))
        print(f"seed {seed}  float32 {full[-1]:.5g}", end="", flush=True)
        for name in args.policies:
            runs[name].append(run_policy(trainer, name, seed))
            print(f"  {name} {runs[name][-1].half:.5g} -> {runs[name][-1].float32_end:.5g}", end="", flush=True)
        print()

    print(f"{args.task}, {trainer.total} steps, {args.seeds} seeds; percent of float32's loss, mean and standard error")
    report: dict[str, Any] = {"steps": trainer.total, "float32": full, "policies": {}}
    for name, found in runs.items():
        percent = gaps(full, found)
        print(
            f"{name:<17}", *(f"{text} {mean:+.2f} ± {error:.2f}" for text, (mean, error) in percent.items()), sep="  "
        )
        losses = [one._asdict() for one in found]
        report["policies"][name] = {"end": ENDS[name], "percent": percent, "losses": losses}
    if args.json is not None:
        others = json.loads(args.json.read_text()) if args.json.exists() else {}
        write_results(args.json, {**others, args.task: report})


if __name__ == "__main__":
    main()
