"""Measures optimizer state in few bits, compared with optax's own: bytes per parameter and losses.

    python benchmarks/optimizer_state.py [--parts bytes training compile shapes] [--cases digits cifar10 lm] [--seeds 3]
        [--json FILE]
    python benchmarks/optimizer_state.py --parts bytes --without-peaks     # nothing is compiled
    python benchmarks/optimizer_state.py --tiny     # a few steps of the smallest case, to see that it runs

`bytes` plans the steps of GPT-2 small (task lm) and ViT-B/16 with AdamW for an A100-40GB: bytes of parameters and
optimizer state, by the arguments of the step, and the peak of the program. No GPU is needed. `training` trains on the
CPU, each choice with the same seeds for parameters and the order of the data: the task digits, a ResNet with one block
per stage of 8 to 64 channels on the synthetic images of task cifar10, and the language model `lm --model tiny` on a
part of its text, all with Adam. Optax's own choices are Adam in float32 and with its `mu_dtype`. `compile` compiles
the step of a nanoGPT of 148 arrays, and prints lines of HLO, CPU seconds, memory, and the step's time; `shapes` that of
24 arrays of different shapes, if asked for.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import cifar10, load_task, models
from optimizer_state_programs import programs, shapes
from result_files import write_results

import jmp_train as jt
from jmp_train import Task
from jmp_train.planning import PlanSearch, Workload

Optimizer = Callable[..., optax.GradientTransformation]

HALF, FULL = "params=bfloat16,compute=bfloat16,output=float32", "mixed_bfloat16"
INT8 = {"mu": "int8", "nu": "uint8"}
PLANNED = {"gpt2-small": ("lm", "gpt2-small"), "vit-b16": ("vit-b16", None)}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The dtypes of parameters and moments.

    Attributes:
      policy: what the parameters are stored in, and computed in bfloat16.
      wrap: makes of Adam what steps.
      mu_dtype: optax's.
    """

    policy: str
    wrap: Callable[[Any], Any] = lambda optimizer: optimizer
    mu_dtype: Any = None


def in_int8(optimizer: Any) -> Any:
    """Returns an optimizer with both moments in 8 bits."""
    return jt.with_state_dtypes(optimizer, INT8)


def rounded(optimizer: Any) -> Any:
    """Returns an optimizer that rounds the parameters stochastically."""
    return jt.with_stochastic_rounding(optimizer, jax.random.key(1))


CHOICES = {
    "float32": Choice(FULL),
    "optax mu_dtype=bfloat16": Choice(FULL, mu_dtype=jnp.bfloat16),
    "nu bfloat16": Choice(FULL, lambda adam: jt.with_state_dtypes(adam, {"nu": "bfloat16"})),
    "nu bfloat16, nearest": Choice(
        FULL, lambda adam: jt.with_state_dtypes(adam, {"nu": "bfloat16"}, rounding="nearest")
    ),
    "both int8": Choice(FULL, in_int8),
    "bfloat16 parameters alone": Choice(HALF, lambda adam: jt.with_loss_scale(adam, jt.NoOpLossScale())),
    "master weights": Choice(HALF, jt.with_master_weights),
    "master weights, both int8": Choice(HALF, lambda adam: jt.with_master_weights(in_int8(adam))),
    "Kahan": Choice(HALF, jt.with_kahan),
    "Kahan, both int8": Choice(HALF, lambda adam: jt.with_kahan(in_int8(adam))),
    "Kahan in int8, both int8": Choice(HALF, lambda adam: jt.with_kahan(in_int8(adam), compensation_dtype="int8")),
    "stochastic rounding, both int8": Choice(HALF, lambda adam: rounded(in_int8(adam))),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A task and how it is trained here.

    Attributes:
      task: the task.
      adam: its Adam, of a learning rate and `mu_dtype`.
      steps: of a run.
      batch_size: examples per step.
    """

    task: Task
    adam: Optimizer
    steps: int
    batch_size: int


def case_of(name: str, tiny: bool) -> Case:
    """Returns a case of the training."""
    if name == "digits":
        return Case(load_task("digits"), adam, 3 if tiny else 330, 64)
    if name == "cifar10":
        task = load_task("cifar10", synthetic=True)
        small = cifar10.make_task(
            models.ResNet((1, 1, 1, 1), (8, 16, 32, 64)), task.train, {k: x[:500] for k, x in task.test.items()}
        )
        small = dataclasses.replace(small, learning_rate=lambda steps: optax.cosine_decay_schedule(1e-3, steps))
        return Case(small, adam, 3 if tiny else 80, 32)
    task = load_task("lm")
    task = dataclasses.replace(task, test={k: x[:100] for k, x in task.test.items()})
    return Case(task, adamw_of_lm, 3 if tiny else 120, (task.batch_size or 2) // 2)


def adam(rate: Any, mu_dtype: Any) -> optax.GradientTransformation:
    """Returns Adam as optax has it."""
    return optax.adam(rate, mu_dtype=mu_dtype)


def adamw_of_lm(rate: Any, mu_dtype: Any) -> optax.GradientTransformation:
    """Returns task lm's optimizer, but that all parameters decay."""
    adamw = optax.adamw(rate, 0.9, 0.95, weight_decay=0.1, mu_dtype=mu_dtype)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("bytes", "training", "compile", "shapes")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:-1])
    parser.add_argument("--cases", nargs="+", choices=("digits", "cifar10", "lm"), default=("digits", "cifar10", "lm"))
    parser.add_argument("--models", nargs="+", choices=[*PLANNED], default=[*PLANNED])
    parser.add_argument("--choices", nargs="+", choices=[*CHOICES], default=[*CHOICES], metavar="CHOICE")
    parser.add_argument("--without-peaks", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.tiny:
        args.cases, args.models = ["digits"], []
    results: dict[str, Any] = {"jax": jax.__version__}
    if "bytes" in args.parts:
        results["bytes"] = [bytes_of(model, args.choices, with_peaks=not args.without_peaks) for model in args.models]
    if "training" in args.parts:
        results["training"] = [training(name, args) for name in args.cases]
    if "compile" in args.parts:
        results["compile"] = programs(2 if args.tiny else 12, 128, repeats=1 if args.tiny else 3)
    if "shapes" in args.parts:
        results["shapes"] = shapes(4 if args.tiny else 24, repeats=1 if args.tiny else 2)
    if args.json is not None:
        write_results(args.json, results)


def bytes_of(model: str, choices: list[str], *, with_peaks: bool) -> dict[str, Any]:
    """Prints the bytes per parameter of a model for each choice."""
    name, size = PLANNED[model]
    task = load_task(name, **({"model": size} if name == "lm" else {"synthetic": True}))
    print(f"\n{model}, batch {task.batch_size}, A100-40GB; bytes a parameter, and with gradients; peak")
    rows = {}
    for choice in choices:
        state, batch, step = planned(task, CHOICES[choice])
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        in_params, in_state = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (state.params, state.opt_state)
        )
        peak = peak_bytes(step, state, batch) if with_peaks else None
        rows[choice] = {
            "parameters": parameters,
            "parameter_bytes": in_params,
            "state_bytes": in_state,
            "bytes_a_parameter": round((in_params + in_state) / parameters, 3),
            "with_gradients": round((2 * in_params + in_state) / parameters, 3),  # in the parameters' dtype
            "peak_bytes": peak,
        }
        found = rows[choice]
        shown = "" if peak is None else f"{peak / 1e9:9.2f} GB"
        print(f"{choice:32}{found['bytes_a_parameter']:8.2f}{found['with_gradients']:8.2f}{shown}", flush=True)
    return {"model": model, "gpu": "A100-40GB", "batch_size": task.batch_size, "choices": rows}


def peak_bytes(step: Any, state: Any, batch: Any) -> int:
    """Returns the peak of a step on an A100, whose program has these bytes of state as its arguments."""
    (row,) = jt.plan(Workload(step, state, batch), "A100-40GB", PlanSearch(largest_batch=False)).rows
    return row.peak_bytes


def planned(task: Task, choice: Choice) -> tuple[Any, Any, Any]:
    """Returns the shapes of a task's state and batch, and its step with AdamW."""
    step, create = step_of(task, choice, lambda rate, mu_dtype: optax.adamw(rate, mu_dtype=mu_dtype), 100)
    rows = {name: array[: task.batch_size] for name, array in task.train.items()}
    return jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: task.prepare(rows)), step


def step_of(task: Task, choice: Choice, adam: Optimizer, steps: int) -> tuple[jt.steps.TrainStep, Callable[..., Any]]:
    """Returns a task's step in a choice, and what makes the state of a key."""
    optimizer, policy = choice.wrap(adam(task.schedule_for(steps), choice.mu_dtype)), jt.get_policy(choice.policy)

    def create(key: jax.Array) -> jt.TrainState:
        init_key, step_key = jax.random.split(key)
        params, model_state = task.init(init_key)
        params = policy.cast_to_param(params)
        return jt.TrainState.create(params, optimizer, model_state=model_state, rng=step_key)

    return jt.train_step(task.loss_fn, optimizer, policy=policy), create


def training(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Prints what each choice learns, as the mean of all seeds and their standard deviation."""
    case = case_of(name, args.tiny)
    measure = "bits per byte" if case.task.metrics.with_bits else "test loss, nats"
    print(f"\n{name}, {case.steps} steps of {case.batch_size}: {measure}, accuracy; {args.seeds} seeds")
    rows = {}
    for choice in args.choices:
        step, create = step_of(case.task, CHOICES[choice], case.adam, case.steps)
        compiled = jax.jit(step, donate_argnums=0)
        runs = [trained(case, compiled, create, seed) for seed in range(args.seeds)]
        losses, accuracies = zip(*runs, strict=True)
        rows[choice] = {"losses": losses, "accuracies": accuracies}
        spread = statistics.stdev(losses) if args.seeds > 1 else 0.0
        print(
            f"{choice:32}{statistics.mean(losses):9.4f} +- {spread:.4f}{statistics.mean(accuracies):9.4f}", flush=True
        )
    return {"case": name, "steps": case.steps, "measure": measure, "choices": rows}


def trained(case: Case, step: Callable[..., Any], create: Callable[..., Any], seed: int) -> tuple[float, float]:
    """Returns the loss and the accuracy on the test data after a run."""
    state = create(jax.random.key(seed))
    for number, batch in enumerate(batches(case, seed)):
        state, _ = step(state, batch)
        if number % 100 == 99:
            print(f"  seed {seed}, step {number + 1}", file=sys.stderr, flush=True)
    return evaluated(case, state)


def batches(case: Case, seed: int) -> Iterator[Any]:
    """Yields a run's batches, in an order of the seed."""
    random, count = np.random.default_rng(seed), len(case.task.train["label"])
    order = np.concatenate([random.permutation(count) for _ in range(1 + case.steps * case.batch_size // count)])
    for number in range(case.steps):
        chosen = order[number * case.batch_size : (number + 1) * case.batch_size]
        yield case.task.prepare({name: array[chosen] for name, array in case.task.train.items()})


def evaluated(case: Case, state: jt.TrainState) -> tuple[float, float]:
    """Returns loss and accuracy on at most 500 examples of the test data, computed in float32."""
    examples = case.task.prepare({name: array[:500] for name, array in case.task.test.items()})
    params = jt.cast_to_full(state.params)
    predict = jax.jit(lambda params, model_state, batch: case.task.metrics.predict(params, model_state, batch))
    losses, hits = [], []
    for start in range(0, len(examples["label"]), 50):
        batch = {name: array[start : start + 50] for name, array in examples.items()}
        logits = predict(params, state.model_state, batch).astype(jnp.float32)
        labels = jnp.asarray(batch["label"])
        losses.append(optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(axis=None))
        hits.append((logits.argmax(-1) == labels).mean())
    scale = np.log(2) if case.task.metrics.with_bits else 1.0
    return float(np.mean(losses) / scale), float(np.mean(hits))


if __name__ == "__main__":
    main()
