"""Measures what moments in few bits add to a step's program: its length, compile time and step time.

The model is nanoGPT with 12 blocks, whose 148 parameter arrays are narrow here, because a program's length does not
depend on widths. A second table is of a model whose arrays all have different shapes. `optimizer_state.py --parts
compile shapes` prints the tables.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_train as jt

_HEADS, _TOKENS, _VOCABULARY = 4, 64, 256
_BOTH = {"mu": "int8", "nu": "uint8"}

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda adam: adam,
    "nu bfloat16": lambda adam: jt.with_state_dtypes(adam, {"nu": "bfloat16"}),
    "both float8_e4m3fn": lambda adam: jt.with_state_dtypes(adam, {"mu|nu": "float8_e4m3fn"}),
    "both int8, nearest": lambda adam: jt.with_state_dtypes(adam, _BOTH, rounding="nearest"),
    "both int8": lambda adam: jt.with_state_dtypes(adam, _BOTH),
}


def programs(depth: int, width: int, repeats: int) -> dict[str, Any]:
    """Prints one line per optimizer: lines of HLO, seconds of CPU to trace and to compile, memory, and a step's time.

    Args:
      depth: blocks of the model.
      width: features of a token.
      repeats: how often each is compiled, and its step timed; the least of each counts.
    """
    params = gpt_params(jax.random.key(0), depth, width)
    arrays = len(jax.tree.leaves(params))
    print(f"\nsteps of a nanoGPT of {depth} blocks, {width} wide, {arrays} parameter arrays; seconds are of CPU")
    batch = jax.random.randint(jax.random.key(1), (2, _TOKENS + 1), 0, _VOCABULARY)
    found = _table(params, gpt_loss, batch, OPTIMIZERS, repeats)
    return {"arrays": arrays, "depth": depth, "width": width, "optimizers": found}


def shapes(count: int, repeats: int) -> dict[str, Any]:
    """Prints the lines of `programs` for parameter arrays that all have different shapes.

    Args:
      count: number of arrays.
      repeats: see `programs`.
    """
    params = {f"w{chr(97 + n)}": jax.random.normal(jax.random.key(n), (64 + n, 72 + 3 * n)) for n in range(count)}
    print(f"\nsteps of {count} parameter arrays of different shapes; seconds are of CPU")
    chosen = {name: OPTIMIZERS[name] for name in ("Adam", "both int8, nearest", "both int8")}
    return {"arrays": count, "optimizers": _table(params, squares_loss, jnp.ones(3), chosen, repeats)}


def squares_loss(params: Any, batch: jax.Array) -> jax.Array:
    """Returns a loss whose program is short."""
    return sum((x * x).sum() for x in jax.tree.leaves(params)) * batch.sum()


def _table(
    params: Any, loss: Callable[..., jax.Array], batch: jax.Array, optimizers: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """Prints a line per optimizer."""
    print(
        f"{'optimizer':22}{'lowered':>8}{'compiled':>9}{'trace s':>9}{'compile s':>10}{'x Adam':>8}{'temp MB':>9}"
        f"{'state MB':>9}{'step ms':>9}"
    )
    rows: dict[str, Any] = {}
    for name, wrap in optimizers.items():
        found = [_program(params, wrap(optax.adam(1e-3)), loss, batch) for _ in range(repeats)]
        row = {key: min(each[key] for each in found) for key in found[0]}
        rows[name] = row
        plain = rows["Adam"]
        times = (row["trace_s"] + row["compile_s"]) / (plain["trace_s"] + plain["compile_s"])
        print(
            f"{name:22}{row['lowered_lines']:8d}{row['compiled_lines']:9d}{row['trace_s']:9.2f}{row['compile_s']:10.2f}"
            f"{times:8.2f}{row['temporary_bytes'] / 1e6:9.2f}{row['donated_bytes'] / 1e6:9.2f}{row['step_ms']:9.1f}",
            flush=True,
        )
    return rows


def _program(params: Any, optimizer: Any, loss: Callable[..., jax.Array], batch: jax.Array) -> dict[str, Any]:
    """Returns the figures of one step's program, traced and compiled anew."""
    jax.clear_caches()
    step = jax.jit(jt.train_step(jt.stateless(loss), optimizer), donate_argnums=0)
    state = jt.TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
    jax.block_until_ready((state, batch))
    started = time.process_time()
    lowered = step.lower(state, batch)
    traced = time.process_time()
    compiled = lowered.compile()
    ended = time.process_time()
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("this backend does not say how much memory a program takes")
    times = []
    for _ in range(12):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch))
        times.append(time.perf_counter() - began)
    return {
        "lowered_lines": lowered.as_text().count("\n"),
        "compiled_lines": (compiled.as_text() or "").count("\n"),
        "trace_s": traced - started,
        "compile_s": ended - traced,
        "temporary_bytes": memory.temp_size_in_bytes,
        "donated_bytes": memory.alias_size_in_bytes,
        "step_ms": 1e3 * min(times),
    }


def gpt_params(key: jax.Array, depth: int, width: int) -> dict[str, Any]:
    """Returns the parameters of a nanoGPT, 12 arrays per block and 4 others."""
    shapes = {"qkv": (width, 3 * width), "proj": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}

    def block(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, len(shapes))
        weights = {name: 0.02 * jax.random.normal(k, shapes[name]) for name, k in zip(shapes, keys, strict=True)}
        biases = {f"{name}_bias": jnp.zeros(shape[1]) for name, shape in shapes.items()}
        return (
            weights
            | biases
            | {
                f"norm{i}_{part}": jnp.full(width, part == "scale", jnp.float32)
                for i in (1, 2)
                for part in ("scale", "bias")
            }
        )

    *blocks, tokens, positions = jax.random.split(key, depth + 2)
    return {
        "blocks": [block(k) for k in blocks],
        "tokens": 0.02 * jax.random.normal(tokens, (_VOCABULARY, width)),
        "positions": 0.02 * jax.random.normal(positions, (_TOKENS, width)),
        "norm_scale": jnp.ones(width),
        "norm_bias": jnp.zeros(width),
    }


def gpt_loss(params: Any, batch: jax.Array) -> jax.Array:
    """Returns the loss in nats per token of int32 [batch, tokens + 1]."""
    x = params["tokens"][batch[:, :-1]] + params["positions"]
    for block in params["blocks"]:
        query, key, value = jnp.split(_linear(block, "qkv", _norm(block, "norm1", x)), 3, axis=-1)
        heads = (*x.shape[:2], _HEADS, x.shape[2] // _HEADS)
        attended = jax.nn.dot_product_attention(*(y.reshape(heads) for y in (query, key, value)), is_causal=True)
        x = x + _linear(block, "proj", attended.reshape(x.shape))
        x = x + _linear(block, "down", jax.nn.gelu(_linear(block, "up", _norm(block, "norm2", x))))
    logits = _norm(params, "norm", x) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def _linear(block: Any, name: str, x: jax.Array) -> jax.Array:
    return x @ block[name] + block[f"{name}_bias"]


def _norm(block: Any, name: str, x: jax.Array) -> jax.Array:
    x = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
    return x * block[f"{name}_scale"] + block[f"{name}_bias"]
