"""Trains the language model of `examples/tasks/lm.py` with layers in 8 or 4 bits, in bfloat16 and in float32.

    python benchmarks/fp8.py [--ways bfloat16 Float8CurrentScaling ...] [--seeds 3] [--experts] [--json FILE]
    python benchmarks/fp8.py --steps 3 --seeds 1     # to see that it runs
    python benchmarks/fp8.py --memory                # of a step, compiled for an H100; needs the extra [plan]

Each way trains `--model tiny` for one pass over the text with the task's optimizer, from the same parameters and in
the same order of windows for each seed. Bits per byte are those of the held-out tenth of the text, under the same
policy. The dense layers of the blocks run in few bits; the logits are bfloat16, as in Transformer Engine. Of a step, it
also prints the bytes stored for the backward pass, the fraction of the flops in few bits, and the CPU seconds that
tracing and compiling take. `--experts` trains a layer of eight experts instead, each token by one of them, to predict
what another such layer does, and prints its mean squared error. `--memory` prints the peak of a step of eight SwiGLU
blocks, 4,096 wide, on 16,384 tokens in bfloat16, with plain gradient descent.
"""

import argparse
import dataclasses
import math
import statistics
import time
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
from jmp_train.policies.autocasting import RECIPES

WAYS = ("float32", "bfloat16", *RECIPES)
RULES = jt.TORCH_CUDA.replace(paths={"attention|mlp|experts": "fp8"})
TEST_BATCH = 32
EXPERTS = 8
GPU = "H100-80GB"
DEPTH, WIDTH, TOKENS = 8, 4096, 16_384  # of the step whose memory it is


def main() -> None:
    """Prints a table of the ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run; else one pass over the text")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.memory:
        peaks = {way: peak_bytes(way) for way in args.ways}
        if args.json:
            write_results(args.json, {"peak_bytes": peaks}, device=f"{GPU}, compiled for, not run")
        return
    task = load_task("lm", model="tiny")
    name, unit = ("squared_error", "squared error") if args.experts else ("bits_per_byte", "bits per byte")
    results: dict[str, list[float]] = {}
    costs: dict[str, Any] = {}
    for way in args.ways:
        if args.experts:
            results[way] = [squared_error(way, seed, args.steps or 300) for seed in range(args.seeds)]
            costs[way] = costs_of(*experts(way, 0))
        else:
            results[way] = [bits_per_byte(task, way, seed, args.steps) for seed in range(args.seeds)]
            costs[way] = costs_of(*first_step(task, way, 0, None))
        runs = " ".join(f"{x:.4f}" for x in results[way])
        print(f"{way:<22}{statistics.mean(results[way]):.4f} {unit}   {runs}   {costs[way]}", flush=True)
    if args.json:
        write_results(args.json, {name: results, "costs": costs})


def policy_of(way: str) -> Any:
    """Returns the policy of a way."""
    if way == "float32":
        return jt.get_policy("float32")
    policy = jt.get_policy("autocast_bfloat16")
    return dataclasses.replace(policy, rules=RULES, fp8=RECIPES[way]()) if way in RECIPES else policy


def bits_per_byte(task: Task, way: str, seed: int, steps: int | None) -> float:
    """Returns the bits per byte of the test text after a training run."""
    windows, size = len(task.train["token"]), task.batch_size or 1
    step, state, _ = first_step(task, way, seed, steps)
    order = np.random.default_rng(seed).permutation(windows)
    run = jax.jit(step, donate_argnums=0)
    for number in range(windows // size if steps is None else steps):
        rows = np.sort(order[number * size :][:size])
        state, _ = run(state, task.prepare({name: array[rows] for name, array in task.train.items()}))
    return tested(task, step.policy, state)


def first_step(task: Task, way: str, seed: int, steps: int | None) -> tuple[Any, Any, Any]:
    """Returns a step of the language model, the first state and a batch."""
    size = task.batch_size or 1
    steps = len(task.train["token"]) // size if steps is None else steps
    optimizer = jt.with_loss_scale(task.optimizer_for(steps), jt.NoOpLossScale())
    step = jt.train_step(task.loss_fn, optimizer, policy=policy_of(way))
    params, model_state = task.init(jax.random.key(seed))
    state = jt.TrainState.create(params, optimizer, model_state=model_state, rng=jax.random.key(seed))
    batch = task.prepare({name: array[:size] for name, array in task.train.items()})
    return step, scaled(step, state, batch, way), batch


def scaled(step: Any, state: jt.TrainState, batch: Any, way: str) -> jt.TrainState:
    """Returns the state with that of delayed scaling, if the way needs one."""
    return jt.steps.with_fp8_state(step, state, batch) if way == jt.DelayedScaling.__name__ else state


def costs_of(step: Any, state: jt.TrainState, batch: Any) -> dict[str, Any]:
    """Returns bytes stored for the backward pass, the fraction of flops in few bits, CPU seconds to compile."""
    start = time.process_time()
    traced = jax.jit(step).trace(state, batch)
    traced.lower().compile()
    seconds = time.process_time() - start
    operations = jt.explain_policy(step.loss_fn, step.policy, *call_of(state, batch)).operations
    few = sum(row.flops for row in operations if row.rule == "fp8")
    return {
        "stored_bytes": jt.steps.step_costs(traced, state).residual_bytes,
        "flops_in_few_bits": round(few / sum(row.flops for row in operations), 3),
        "compile_cpu_seconds": round(seconds, 1),
    }


def call_of(state: jt.TrainState, batch: Any) -> tuple[Any, ...]:
    """Returns the arguments of a loss function."""
    return state.params, jt.steps.own_state(state.model_state), batch, jax.random.key(0)


def experts(way: str, seed: int) -> tuple[Any, Any, Any]:
    """Returns a step of a layer of experts, the first state, and a batch of inputs and the results of a teacher."""
    keys = jax.random.split(jax.random.key(seed), 8)

    def drawn(keys: Any) -> dict[str, jax.Array]:
        shapes = {"router": (64, EXPERTS), "up": (EXPERTS, 64, 128), "down": (EXPERTS, 128, 64)}
        pairs = zip(keys, shapes.items(), strict=True)
        return {name: jax.random.normal(key, shape) / shape[-2] ** 0.5 for key, (name, shape) in pairs}

    def predict(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jnp.argmax(gates, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
        with jax.named_scope("experts"):
            hidden = jnp.tanh(jax.lax.ragged_dot(x[order], params["up"], sizes))
            out = jax.lax.ragged_dot(hidden, params["down"], sizes)
        return out[jnp.argsort(order)].astype(jnp.float32) * gates.max(axis=-1, keepdims=True)

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        x, y = batch
        return ((predict(params, x) - y) ** 2).mean(), (model_state, None)

    optimizer = optax.adam(1e-2)
    step = jt.train_step(loss_fn, optimizer, policy=policy_of(way))
    params = drawn(keys[:3])
    x = jax.random.normal(keys[6], (2048, 64))
    batch = x, predict(drawn(keys[3:6]) | {"router": params["router"]}, x)
    state = jt.TrainState.create(params, optimizer, rng=keys[7])
    return step, scaled(step, state, batch, way), batch


def squared_error(way: str, seed: int, steps: int) -> float:
    """Returns the mean squared error of a layer of experts after training, in the last step."""
    step, state, batch = experts(way, seed)
    run = jax.jit(step, donate_argnums=0)
    for _ in range(steps - 1):
        state, _ = run(state, batch)
    return float(run(state, batch)[1]["loss"])


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
    return step, (scaled(step, state, x, way), x), {"donate_argnums": 0}


if __name__ == "__main__":
    main()
