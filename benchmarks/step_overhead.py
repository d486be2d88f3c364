"""Measures what a mixed-precision step costs, compared with the same step written by hand.

    python benchmarks/step_overhead.py [--rounds 60] [--steps 20] [--json FILE] [--watch [--examples 32]]

One model (the digits CNN: BatchNorm, dropout, Adam, float16 computation) runs in four ways, in one process and in
turn: by `jmp_train.train_step`, by hand with jmp, by hand with flax's `DynamicScale`, and without scaling. The first
three skip non-finite steps, leaving parameters, optimizer and batch statistics unchanged, and all return the same
metrics and counters. The script prints the median time of a step, the median of its ratio to the fastest scaled way of
the same round, and the number of instructions in the compiled HLO.

`--watch` instead prints the cost of `train_step(..., watch=...)`: MNIST's network and a small vision transformer
(width 128, four blocks), with float32 parameters in mixed_float16 and mixed_bfloat16, without watches, with each and
with both, in turn. Next to each median is the median of its ratio to the step without watches in the same round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from example_tasks import load_task, models, vit
from flax.training.dynamic_scale import DynamicScale
from result_files import write_results

import jmp_train as jt
from jmp_train import Task

LEARNING_RATE = 1e-3
WATCHES = ((), ("lost_updates",), ("underflow",), ("lost_updates", "underflow"))


class Contender(NamedTuple):
    """A way to step: the compiled step and the state that it goes on from."""

    step: Callable[[Any, Any], tuple[Any, dict[str, Any]]]
    state: Any


class HandState(NamedTuple):
    """The state of the steps written by hand."""

    params: Any
    opt_state: Any
    batch_stats: Any
    loss_scale: Any
    rng: jax.Array
    step: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


def with_train_step(task: Task, params: Any, batch_stats: Any) -> tuple[Any, Any]:
    """Returns our step and its first state."""
    optimizer = jt.with_loss_scale(optax.adam(LEARNING_RATE), jt.torch_loss_scale())
    step = jt.train_step(task.loss_fn, optimizer, policy="mixed_float16")
    rng = jax.random.key(0)
    return step, jt.TrainState.create(params, optimizer, model_state=batch_stats, rng=rng)


def hand_state(task: Task, params: Any, batch_stats: Any, loss_scale: Any) -> HandState:
    """Returns the first state of a step by hand."""
    step, skipped, consecutive = (jnp.zeros((), jnp.int32) for _ in range(3))
    opt_state = optax.adam(LEARNING_RATE).init(params)
    rng = jax.random.key(0)
    return HandState(params, opt_state, batch_stats, loss_scale, rng, step, skipped, consecutive)


def next_hand_state(state: HandState, finite: jax.Array, chosen: Any, scale: Any) -> HandState:
    """Returns the state after a step whose skipping was decided already."""
    skipped = (~finite).astype(jnp.int32)
    params, opt_state, batch_stats = chosen
    return HandState(
        params=params,
        opt_state=opt_state,
        batch_stats=batch_stats,
        loss_scale=scale,
        rng=jax.random.split(state.rng)[0],
        step=state.step + 1,
        skipped_steps=state.skipped_steps + skipped,
        consecutive_skips=(state.consecutive_skips + 1) * skipped,
    )


def metrics_of(state: HandState, loss: Any, aux: Any, grads: Any, finite: Any, scale: Any) -> Any:
    """Returns the metrics that `train_step` returns."""
    return {
        "loss": loss,
        "aux": aux,
        "grad_norm": optax.tree.norm(grads),
        "grads_finite": finite,
        "loss_scale": scale,
        "skipped_steps": state.skipped_steps,
    }


def with_jmp(task: Task, params: Any, batch_stats: Any) -> tuple[Any, Any]:
    """Returns the step that a user of jmp writes."""
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: HandState, batch: Any) -> tuple[HandState, Any]:
        rng = jax.random.split(state.rng)[1]
        # Carried as its leaves: jmp's class cannot be unflattened with what `lower` puts in.
        loss_scale = jmp.DynamicLossScale(*state.loss_scale)

        def scaled_loss(params: Any) -> Any:
            compute_params, compute_batch = policy.cast_to_compute((params, batch))
            loss, (batch_stats, aux) = task.loss_fn(compute_params, state.batch_stats, compute_batch, rng)
            return loss_scale.scale(loss), (loss, batch_stats, policy.cast_to_output(aux))

        grads, (loss, batch_stats, aux) = jax.grad(scaled_loss, has_aux=True)(state.params)
        grads = loss_scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        scale = loss_scale.adjust(finite)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state, batch_stats)
        old = (state.params, state.opt_state, state.batch_stats)
        chosen = jmp.select_tree(finite, new, old)
        state = next_hand_state(state, finite, chosen, (scale.loss_scale, scale.counter))
        return state, metrics_of(state, loss, aux, grads, finite, scale.loss_scale)

    return step, hand_state(task, params, batch_stats, (jnp.float32(2**16), jnp.int32(0)))


def with_flax(task: Task, params: Any, batch_stats: Any) -> tuple[Any, Any]:
    """Returns the step of flax's own examples (imagenet), with `DynamicScale`."""
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: HandState, batch: Any) -> tuple[HandState, Any]:
        rng = jax.random.split(state.rng)[1]

        def loss_fn(params: Any) -> Any:
            compute_params, compute_batch = policy.cast_to_compute((params, batch))
            return task.loss_fn(compute_params, state.batch_stats, compute_batch, rng)

        value_and_grad = state.loss_scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (loss, (batch_stats, aux)), grads = value_and_grad(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state, batch_stats)
        old = (state.params, state.opt_state, state.batch_stats)
        chosen = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        state = next_hand_state(state, finite, chosen, scale)
        return state, metrics_of(state, loss, aux, grads, finite, scale.scale)

    scale = DynamicScale(scale=jnp.float32(2**16))  # the default is weakly typed and retraces
    return step, hand_state(task, params, batch_stats, scale)


def without_scaling(task: Task, params: Any, batch_stats: Any) -> tuple[Any, Any]:
    """Returns the step that neither scales nor tests."""
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: HandState, batch: Any) -> tuple[HandState, Any]:
        rng = jax.random.split(state.rng)[1]

        def loss_fn(params: Any) -> Any:
            compute_params, compute_batch = policy.cast_to_compute((params, batch))
            return task.loss_fn(compute_params, state.batch_stats, compute_batch, rng)

        (loss, (batch_stats, aux)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.array(True)
        state = next_hand_state(state, finite, (params, opt_state, batch_stats), jnp.float32(1))
        return state, metrics_of(state, loss, aux, grads, finite, state.loss_scale)

    return step, hand_state(task, params, batch_stats, jnp.float32(1))


WAYS = {
    "jmp_train": with_train_step,
    "jmp by hand": with_jmp,
    "flax DynamicScale": with_flax,
    "no scaling": without_scaling,
}
SCALED = ("jmp_train", "jmp by hand", "flax DynamicScale")


def count_instructions(compiled: Any) -> int:
    """Returns how many instructions the optimized HLO has, fused ones included."""
    return sum(" = " in line for line in compiled.as_text().splitlines())


def measure(contenders: dict[str, Contender], batch: Any, rounds: int, steps: int) -> Any:
    """Returns seconds per step, [round], of each contender; each round runs all, in turn."""
    states = {name: contender.state for name, contender in contenders.items()}
    seconds = {name: [] for name in contenders}
    names = list(contenders)
    for round_index in range(-2, rounds):  # two rounds to warm up
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            step, state = contenders[name].step, states[name]
            start = time.perf_counter()
            for _ in range(steps):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            elapsed = (time.perf_counter() - start) / steps
            states[name] = state
            if round_index >= 0:
                seconds[name].append(elapsed)
    return seconds


class Watched(NamedTuple):
    """A model whose watched step is measured: its loss function, parameters, model state and batch."""

    loss_fn: Callable[..., Any]
    params: Any
    model_state: Any
    batch: Any


def watched_models(examples: int) -> dict[str, Watched]:
    """Returns MNIST's network and a small transformer, each with a batch of the given size."""
    rng = np.random.default_rng(0)
    label = jnp.asarray(rng.integers(10, size=examples))
    mnist = load_task("mnist", synthetic=True)
    images = [jnp.asarray(rng.random((examples, *shape), np.float32)) for shape in ((28, 28, 1), (32, 32, 3))]
    transformer = vit.classifier(
        models.VisionTransformer(classes=10, patch=4, width=128, depth=4, heads=4, mlp=512), 32
    )
    return {
        "mnist": Watched(mnist.loss_fn, *mnist.init(jax.random.key(0)), {"image": images[0], "label": label}),
        "transformer": Watched(
            transformer.loss_fn,
            *transformer.init(jax.random.key(0)),
            {"image": images[1], "label": label},
        ),
    }


def measure_watches(rounds: int, steps: int, examples: int) -> dict[str, Any]:
    """Prints and returns milliseconds a step and ratios of each model, policy and choice of watches."""
    print(f"{'':<28}  {'watch':<24}  ms/step  /no watch of its round  HLO instructions")
    results = {}
    for name, model in watched_models(examples).items():
        for policy in ("mixed_float16", "mixed_bfloat16"):
            contenders, instructions = {}, {}
            for watch in WATCHES:
                optimizer = jt.with_loss_scale(optax.adamw(LEARNING_RATE), jt.torch_loss_scale(2.0**10))
                step = jt.train_step(model.loss_fn, optimizer, policy=policy, watch=watch)
                params = jax.tree.map(jnp.copy, model.params)
                state = jt.TrainState.create(params, optimizer, model_state=model.model_state, rng=jax.random.key(0))
                state = jax.tree.map(jnp.copy, state)
                compiled = jax.jit(step, donate_argnums=0).lower(state, model.batch).compile()
                key = " ".join(watch) or "none"
                contenders[key], instructions[key] = Contender(compiled, state), count_instructions(compiled)
            seconds = measure(contenders, model.batch, rounds, steps)
            for key, times in seconds.items():
                ratio = statistics.median(t / f for t, f in zip(times, seconds["none"], strict=True))
                milliseconds = statistics.median(times) * 1e3
                row = {"ms": milliseconds, "ratio": ratio, "instructions": instructions[key]}
                results[f"{name} {policy} {key}"] = row
                print(
                    f"{name + ' ' + policy:<28}  {key:<24}  {milliseconds:7.2f}  {ratio:22.3f}  {instructions[key]:16d}"
                )
    return results


def summed_models() -> dict[str, tuple[Callable[..., Any], Any, Any]]:
    """Returns (loss function, parameters, batch) of models with more and more values that are read often."""
    width, depth = 64, 12
    weights = jnp.ones((depth, width, width)) / width
    rows, tokens = jnp.ones((256, width)), jnp.arange(4096) % 512

    def products(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def biases(params: Any, x: jax.Array) -> jax.Array:
        for w, b in params:
            x = jnp.tanh(x @ w + b) * b
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def loop(params: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return biases(params, h[None] + x)[None].astype(h.dtype) * h, None

        return jnp.mean(jax.lax.scan(cell, x[0], x)[0].astype(jnp.float32) ** 2)

    def embedding(params: Any, ids: jax.Array) -> jax.Array:
        return biases(params["layers"], params["table"][ids])

    layers = [(w, jnp.ones(width)) for w in weights]
    return {
        "products": (products, list(weights), rows),
        "biases": (biases, layers, rows),
        "loop": (loop, layers[:2], rows),
        "embedding": (embedding, {"layers": layers, "table": jnp.ones((512, width))}, tokens),
    }


def measure_sums(rounds: int) -> dict[str, Any]:
    """Prints and returns seconds to trace and to compile each model, by hand and under the policy, and instructions."""
    print(f"{'':<10}  {'':<7}  trace s  trace and compile s  HLO instructions")
    results = {}
    for name, (loss_fn, params, batch) in summed_models().items():

        def by_hand(params: Any, batch: Any, loss_fn: Callable[..., Any] = loss_fn) -> Any:
            return loss_fn(*jt.get_policy("mixed_bfloat16").cast_to_compute((params, batch)))

        for way in ("by hand", "policy"):
            seconds, instructions = [], 0
            for _ in range(rounds):
                jax.clear_caches()
                fn = by_hand if way == "by hand" else jt.apply_policy(loss_fn, "mixed_bfloat16")
                start = time.process_time()
                traced = jax.jit(jax.grad(fn)).trace(params, batch)
                middle = time.process_time()
                compiled = traced.lower().compile()
                seconds.append((middle - start, time.process_time() - start))
                instructions = count_instructions(compiled)
            trace, total = (min(column) for column in zip(*seconds, strict=True))
            row = {"trace": trace, "total": total, "instructions": instructions}
            results[f"{name} {way}"] = row
            print(f"{name:<10}  {way:<7}  {trace:7.3f}  {total:19.3f}  {row['instructions']:16d}")
    return results


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--examples", type=int, default=32, help="with --watch, a batch's; the cost does not grow with them"
    )
    parser.add_argument("--watch", action="store_true", help="what the watches of train_step cost")
    parser.add_argument("--sums", action="store_true", help="what float32 sums of gradients cost")
    args = parser.parse_args()
    if args.watch or args.sums:
        results = measure_sums(args.rounds) if args.sums else measure_watches(args.rounds, args.steps, args.examples)
        if args.json:
            write_results(args.json, results)
        return

    task = load_task("digits")
    batch = {name: jnp.asarray(x[: task.batch_size]) for name, x in task.train.items()}
    contenders, instructions = {}, {}
    for name, make in WAYS.items():
        step, state = make(task, *task.init(jax.random.key(1)))
        compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        contenders[name], instructions[name] = (
            Contender(compiled, state),
            count_instructions(compiled),
        )

    seconds = measure(contenders, batch, args.rounds, args.steps)
    fastest = [min(seconds[name][i] for name in SCALED) for i in range(args.rounds)]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(medians[name] for name in SCALED)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.rounds} rounds of {args.steps} steps in turn")
    print(f"{'':<18}  ms/step  /fastest median  /fastest of its round  HLO instructions")
    for name, times in seconds.items():
        ratio = statistics.median(t / f for t, f in zip(times, fastest, strict=True))
        print(
            f"{name:<18}  {medians[name] * 1e3:7.3f}  {medians[name] / best:15.3f}  "
            f"{ratio:21.3f}  {instructions[name]:16d}"
        )
    if args.json:
        write_results(args.json, {"medians": medians, "instructions": instructions})


if __name__ == "__main__":
    main()
