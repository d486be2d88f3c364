"""Trains small language models in every recipe of 8 and 4 bits, in bfloat16 and in float32.

    python benchmarks/fp8.py [--parts dense mixtral switch variants] [--text FILE] [--seeds 3] [--json FILE]
    python benchmarks/fp8.py --steps 3 --seeds 1 --parts dense --ways bfloat16 DelayedScaling  # to see that it runs
    python benchmarks/fp8.py --parts products  # signal-to-noise ratios of products and gradients with outliers
    python benchmarks/fp8.py --parts memory    # of a step, compiled for an H100; needs the extra [plan]

A seed's runs have the same parameters and windows in each way. Bits per byte are those of held-out text under the same
policy. Dense layers, or the experts and the layers of attention, run in few bits; router, head and attention's own
products are bfloat16. The error of a loss is that of the training loss from bfloat16's, in the last quarter of the
steps, both averaged over 20 steps. Of a step, it also prints the bytes stored for the backward pass and how many of
them are operands in few bits, the fraction of the forward flops in few bits, and the CPU seconds that tracing and
compiling take; on a GPU, the time. `variants` are recipes of which papers have claims: stochastic rounding, Hadamard
transform and tiles of NVFP4, gradients of MXFP8 in e5m2, float32 scales of blocks. Of these and NVFP4, it prints the
distance of a gradient and of the mean of 16 from float32's. FILE gets new entries and keeps others.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp8_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fp8_models import MODELS, Model
from fp8_products import ratios
from gpu_builders import compile_for_gpu
from result_files import write_results

import jmp_train as jt
from jmp_train.policies.autocasting import RECIPES, held_jaxprs, rounding_key

NVFP4 = jt.policies.NVFP4BlockScaling
VARIANTS = {
    "NVFP4, nearest": NVFP4(disable_stochastic_rounding=True),
    "NVFP4, no transform": NVFP4(disable_rht=True),
    "NVFP4, weights by 16": NVFP4(disable_2d_quantization=True),
    "MXFP8, e5m2 gradients": jt.policies.MXFP8BlockScaling("HYBRID"),
    "128 x 128, float32 scales": jt.policies.Float8BlockScaling(power_of_two=False),
}
ALL = {name: recipe() for name, recipe in RECIPES.items()} | VARIANTS
WAYS = ("bfloat16", "float32", *RECIPES)  # the first is what losses are compared with
SMOOTH, KEYS, TIMED = 20, 16, 20
GPU = "H100-80GB"
DEPTH, WIDTH, TOKENS = 8, 4096, 16_384  # of the step whose memory it is


def main() -> None:
    """Prints a table of the ways for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=(*MODELS, "variants", "products", "memory"), default=[*MODELS])
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *VARIANTS), default=WAYS)
    parser.add_argument("--text", type=Path, help="default: Python's documentation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}

    def write(name: str, part: str, results: Any) -> None:
        found.setdefault(name, {})[part] = results
        if args.json:
            write_results(args.json, found, device=f"{GPU}, compiled for, not run" if name == "peak_bytes" else None)

    for part in args.parts:
        if part == "memory":
            for way in args.ways:
                write("peak_bytes", way, peak_bytes(way))
        elif part == "products":
            for kind, rows in ratios(ALL):
                write("signal_to_noise", kind, rows)
        else:
            for results in trained(part, args):
                write("models", part, results)


def trained(part: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields what a model learns in each way so far and what it costs, and prints it."""
    model = MODELS.get(part, MODELS["dense"])
    ways = ("bfloat16", "NVFP4BlockScaling", *VARIANTS) if part == "variants" else args.ways
    texts = fp8_models.windows(args.text)
    results: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for way in ways:
        runner = Runner(model, way, args.steps, texts)
        runs = [runner.run(seed) for seed in range(args.seeds)]
        bits, curves[way] = [bits for bits, _ in runs], [curve for _, curve in runs]
        spread = statistics.stdev(bits) if len(bits) > 1 else 0.0
        learned = {"bits_per_byte": round(statistics.mean(bits), 4), "deviation": round(spread, 4)}
        results[way] = learned | runner.costs()
        if "bfloat16" in curves:
            errors = [loss_error(curve, plain) for curve, plain in zip(curves[way], curves["bfloat16"], strict=True)]
            results[way]["loss_error"] = errors
        if part == "variants":
            results[way]["gradient_error"] = runner.gradient_error()
        print(f"{part:<9}{way:<26}{results[way]}", flush=True)
        yield results


def loss_error(curve: Any, plain: Any) -> float:
    """Returns the relative difference of two losses, averaged over steps, in the last quarter."""
    last = max(len(curve) // 4, 1)
    window = min(SMOOTH, len(curve))
    mean, wanted = (np.convolve(x, np.ones(window) / window, "valid")[-last:] for x in (curve, plain))
    return float(np.mean(np.abs(mean / wanted - 1)))


class Runner:
    """Trains a model in a way; the seeds share the compiled step."""

    def __init__(self, model: Model, way: str, steps: int, texts: Any) -> None:
        self.model, self.way, self.steps, (self.train, self.test) = model, way, steps, texts
        self.policy = policy_of(way, model.few)
        self.optimizer = jt.with_loss_scale(fp8_models.optimizer(steps), jt.NoOpLossScale())
        self.step = jt.train_step(model.loss_fn, self.optimizer, policy=self.policy)
        start = time.process_time()
        self.traced = jax.jit(self.step, donate_argnums=0).trace(*self.first(0))
        self.compiled = self.traced.lower().compile()
        self.seconds = time.process_time() - start
        self.nats = jax.jit(jt.apply_policy(model.losses, self.policy))

    def first(self, seed: int) -> tuple[Any, Any]:
        """Returns the first state and batch of a run."""
        state = jt.TrainState.create(self.model.init(seed), self.optimizer, rng=jax.random.key(seed))
        batch = {name: x[: fp8_models.BATCH] for name, x in self.train.items()}
        return with_scales(self.step, state, batch), batch

    def run(self, seed: int) -> tuple[float, list[float]]:
        """Returns the bits per byte after training, and the losses in training."""
        state, _ = self.first(seed)
        order = np.random.default_rng(seed).permutation(len(self.train["token"]))
        losses = []
        for number in range(self.steps):
            rows = np.take(order, range(number * fp8_models.BATCH, (number + 1) * fp8_models.BATCH), mode="wrap")
            state, metrics = self.compiled(state, {name: x[rows] for name, x in self.train.items()})
            losses.append(metrics["loss"])
        self.state = state
        parts = [slice(i, i + 32) for i in range(0, len(self.test["token"]), 32)]
        nats = [self.nats(state.params, {name: x[part] for name, x in self.test.items()}) for part in parts]
        return float(np.mean([np.asarray(x) for x in nats], dtype=np.float64)) / math.log(2), np.array(losses).tolist()

    def costs(self) -> dict[str, Any]:
        """Returns bytes stored for the backward pass, the fraction of flops in few bits, CPU seconds to compile."""
        state, batch = self.first(0)
        inner = jt.steps.own_state(state.model_state)
        arguments = state.params, inner, batch, jax.random.key(0)
        operations = jt.explain_policy(self.model.loss_fn, self.policy, *arguments).operations
        few = sum(row.flops for row in operations if row.rule == "fp8")
        costs: dict[str, Any] = {
            "stored_bytes": jt.steps.step_costs(self.traced, state).residual_bytes,
            "operand_bytes": named_bytes(self.traced.jaxpr.jaxpr),
            "flops_in_few_bits": round(few / sum(row.flops for row in operations), 3),
            "compile_cpu_seconds": round(self.seconds, 1),
        }
        if jax.default_backend() == "cpu":
            return costs
        times = []
        for _ in range(TIMED):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(self.compiled(state, batch))
            times.append(time.perf_counter() - start)
        return costs | {"seconds_per_step": statistics.median(times)}

    def gradient_error(self) -> dict[str, float]:
        """Returns relative distances from float32's gradient of layers, of one gradient and of the mean of many."""
        batch = {name: x[: fp8_models.BATCH] for name, x in self.train.items()}
        params = self.state.params

        def layers(policy: Any, key: jax.Array) -> jax.Array:
            grads = jt.scaled_value_and_grad(self.model.loss_fn, policy, has_aux=True)
            with rounding_key(key):  # as a train step does
                _, found = grads(jt.NoOpLossScale(), params, {}, batch, key)
            kernels = [x.ravel() for x in jax.tree.leaves(found["blocks"]) if x.ndim > 1]
            return jnp.concatenate(kernels).astype(jnp.float32)

        keys = jax.random.split(jax.random.key(0), KEYS)
        exact = jax.jit(lambda key: layers(jt.get_policy("float32"), key))(keys[0])
        one = jax.jit(lambda key: layers(self.policy, key))
        many = jnp.stack([one(key) for key in keys])
        distance = lambda x: float(jnp.linalg.norm(x - exact) / jnp.linalg.norm(exact))
        return {
            "one": distance(many[0]),
            "mean": distance(many.mean(0)),
            "projection": float(many.mean(0) @ exact / (exact @ exact)),
        }


def named_bytes(jaxpr: Any) -> int:
    """Returns the bytes of the arrays with the checkpoint name of operands in few bits."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name" and equation.params["name"] == "fp8_operands":
            total += sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
        total += sum(named_bytes(inner) for inner in held_jaxprs(equation))
    return total


def policy_of(way: str, few: str) -> Any:
    """Returns the policy of a way, with products under some paths in few bits."""
    if way not in ALL:
        return jt.get_policy("float32" if way == "float32" else "autocast_bfloat16")
    rules = jt.TORCH_CUDA.replace(paths={few: "fp8"})
    return dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=ALL[way])


def with_scales(step: Any, state: jt.TrainState, batch: Any) -> jt.TrainState:
    """Returns the state with that of delayed scaling, if the step needs one."""
    delayed = isinstance(getattr(step.policy, "fp8", None), jt.DelayedScaling)
    return jt.steps.with_fp8_state(step, state, batch) if delayed else state


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
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy_of(way, "mlp"))
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = [dict.fromkeys(("gate", "up", "down"), weight) for _ in range(DEPTH)]
    state = jax.eval_shape(lambda params: jt.TrainState.create(params, optimizer), params)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    return step, (with_scales(step, state, x), x), {"donate_argnums": 0}


if __name__ == "__main__":
    main()
