"""Trains the language model of `examples/tasks/lm.py` with dense layers in 8 bits, in bfloat16 and in float32.

    python benchmarks/fp8.py [--ways bfloat16 Float8CurrentScaling ...] [--seeds 3] [--json FILE]
    python benchmarks/fp8.py --steps 3 --seeds 1     # to see that it runs
    python benchmarks/fp8.py --memory                # of a step, compiled for an H100; needs the extra [plan]

Each way trains `--model tiny` for one pass over the text with the task's optimizer, from the same parameters and in
the same order of windows for each seed. Bits per byte are those of the held-out tenth of the text, under the same
policy. The dense layers of the blocks run in 8 bits; the logits are bfloat16, as in Transformer Engine. `--memory`
prints the peak of a step of eight SwiGLU blocks, 4,096 wide, on 16,384 tokens in bfloat16, with plain gradient
descent.
"""

import argparse
import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import load_task
from gpu_builders import compile_for_gpu
from result_files import write_results

import jmp_train as jt
from jmp_train import Task

RECIPES = {
    recipe.__name__: recipe
    for recipe in (jt.policies.Float8CurrentScaling, jt.DelayedScaling, jt.policies.MXFP8BlockScaling)
}
WAYS = ("float32", "bfloat16", *RECIPES)
RULES = jt.TORCH_CUDA.replace(paths={"attention|mlp": "fp8"})
TEST_BATCH = 32
GPU = "H100-80GB"
DEPTH, WIDTH, TOKENS = 8, 4096, 16_384  # of the step whose memory it is


def main() -> None:
    """Prints a table of the ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run; else one pass over the text")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.memory:
        peaks = {way: peak_bytes(way) for way in args.ways}
        if args.json:
            write_results(args.json, {"peak_bytes": peaks}, device=f"{GPU}, compiled for, not run")
        return
    task = load_task("lm", model="tiny")
    results: dict[str, list[float]] = {}
    for way in args.ways:
        results[way] = [bits_per_byte(task, way, seed, args.steps) for seed in range(args.seeds)]
        runs = " ".join(f"{x:.4f}" for x in results[way])
        print(f"{way:<22}{statistics.mean(results[way]):.4f} bits per byte   {runs}", flush=True)
    if args.json:
        write_results(args.json, {"bits_per_byte": results})


def policy_of(way: str) -> Any:
    """Returns the policy of a way."""
    if way == "float32":
        return jt.get_policy("float32")
    policy = jt.get_policy("autocast_bfloat16")
    return dataclasses.replace(policy, rules=RULES, fp8=RECIPES[way]()) if way in RECIPES else policy


def bits_per_byte(task: Task, way: str, seed: int, steps: int | None) -> float:
    """Returns the bits per byte of the test text after a training run."""
    windows, size = len(task.train["token"]), task.batch_size or 1
    steps = windows // size if steps is None else steps
    optimizer = jt.with_loss_scale(task.optimizer_for(steps), jt.NoOpLossScale())
    policy = policy_of(way)
    step = jt.train_step(task.loss_fn, optimizer, policy=policy)
    params, model_state = task.init(jax.random.key(seed))
    state = jt.TrainState.create(params, optimizer, model_state=model_state)
    if way == jt.DelayedScaling.__name__:
        examples = {name: array[:size] for name, array in task.train.items()}
        state = jt.steps.with_fp8_state(step, state, task.prepare(examples))
    order = np.random.default_rng(seed).permutation(windows)
    run = jax.jit(step, donate_argnums=0)
    for number in range(steps):
        rows = np.sort(order[number * size :][:size])
        state, _ = run(state, task.prepare({name: array[rows] for name, array in task.train.items()}))
    return tested(task, policy, state)


def tested(task: Task, policy: Any, state: jt.TrainState) -> float:
    """Returns the bits per byte of the test text."""

    @jax.jit
    def nats(state: jt.TrainState, batch: Any) -> jax.Array:
        predict = jt.apply_policy(task.metrics.predict, policy)
        logits = predict(state.params, state.model_state, batch).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).sum()

    rows = range(0, len(task.test["token"]) - TEST_BATCH + 1, TEST_BATCH)
    batches = [task.prepare({name: array[i : i + TEST_BATCH] for name, array in task.test.items()}) for i in rows]
    total = sum(float(nats(state, batch)) for batch in batches)
    return total / sum(batch["label"].size for batch in batches) / math.log(2)


def peak_bytes(way: str) -> int:
    """Returns the peak memory of a step on an absent GPU, and prints it."""
    program = compile_for_gpu(f"{__file__}:blocks", way, gpu=GPU)
    in_8_bits = program.hlo.count("__cublas$lt$matmul$f8")
    products = program.hlo.count("__cublas$lt$matmul")
    print(f"{way:<22}{program.peak_bytes / 1e9:.2f} GB   {in_8_bits} of {products} products in 8 bits", flush=True)
    return program.peak_bytes


def blocks(way: str) -> tuple[Any, ...]:
    """Returns a step of SwiGLU blocks for `compile_for_gpu`."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            for block in params:
                x = x + (jax.nn.silu(x @ block["gate"]) * (x @ block["up"])) @ block["down"]
        return (x.astype(jnp.float32) ** 2).mean()

    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy_of(way))
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = [dict.fromkeys(("gate", "up", "down"), weight) for _ in range(DEPTH)]
    state = jax.eval_shape(lambda params: jt.TrainState.create(params, optimizer), params)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    if way == jt.DelayedScaling.__name__:
        state = jt.steps.with_fp8_state(step, state, x)
    return step, (state, x), {"donate_argnums": 0}


if __name__ == "__main__":
    main()
