"""Measures how far training and cached inference of a language model differ, by dtype.

    python benchmarks/parity.py [--seeds 3] [--steps 150] [--json FILE]
    python benchmarks/parity.py --seeds 1 --steps 2     # to see that it runs

The GPT of `examples/tasks/lm.py`, with two blocks of width 64, learns Python's documentation for some steps in float32.
Then the script compares the log-probabilities of held-out bytes by the full forward pass with those of the same bytes
one by one through the cache of keys and values, as in a sampler, in float32, float16 and bfloat16. Each function runs
compiled as a whole, as users run it, and operation by operation, without fusion by the compiler. Seeds determine the
parameters and the bytes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import lm, models
from flax import nnx
from result_files import write_results

import jmp_train as jt

CONFIG = models.GPTConfig(width=64, depth=2, heads=4, kv_heads=2, mlp=192)
GRAPHDEF = nnx.graphdef(nnx.eval_shape(lambda: models.GPT(CONFIG, nnx.Rngs(0))))
CONTEXT, BATCH = 32, 32
DTYPES = ("float32", "float16", "bfloat16")
COLUMNS = ("mean", "99%", "maximum", "0.1%", "1%", "KL (k3)", "op by op")


def main() -> None:
    """Prints a table of the dtypes, each with its means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = lm.windows(lm.documentation(), CONTEXT + 1)["token"].astype(np.int32)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in DTYPES}
    for seed in range(args.seeds):
        order = np.random.default_rng(seed).permutation(len(text))
        params = trained(text[order[BATCH:]], seed, args.steps)
        for name in DTYPES:
            found[name].append(compared(params, text[order[:BATCH]], name))
    print(f"{'':<10}{''.join(f'{title:>10}' for title in COLUMNS)}")
    for name, rows in found.items():
        cells = (np.mean([row[title] for row in rows]) for title in COLUMNS)
        print(f"{name:<10}{''.join(f'{x:>10.2g}' for x in cells)}")
    if args.json:
        write_results(args.json, {"seeds": found})


def full(params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities of all tokens but the first, by the full forward pass."""
    return chosen(nnx.merge(GRAPHDEF, params)(tokens[:, :-1]), tokens)


def cached(params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the same, token by token with a cache."""
    model = nnx.merge(GRAPHDEF, params)

    def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = model.extend(token[:, None], cache)
        return cache, logits[:, 0]

    _, logits = jax.lax.scan(step, models.empty_cache(model, len(tokens), tokens.shape[1] - 1), tokens[:, :-1].T)
    return chosen(logits.swapaxes(0, 1), tokens)


def chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities of the tokens that follow."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]


def trained(text: np.ndarray, seed: int, steps: int) -> Any:
    """Returns parameters after some steps in float32."""
    params, tx = nnx.state(models.GPT(CONFIG, nnx.Rngs(seed)), nnx.Param), optax.adam(3e-3)
    step = jax.jit(jt.train_step(jt.stateless(lambda params, tokens: -full(params, tokens).mean()), tx))
    state = jt.TrainState.create(params, tx)
    for number in range(steps):
        start = number * BATCH % (len(text) - BATCH)
        state, _ = step(state, text[start : start + BATCH])
    return state.params


def compared(params: Any, tokens: np.ndarray, name: str) -> dict[str, float]:
    """Returns the numbers of a report by the titles of their columns."""
    report = jt.parity(*(jax.jit(in_dtype(fn, jnp.dtype(name))) for fn in (full, cached)), params, tokens)
    assert report.operations is not None
    by_band = list(report.bands.values())
    numbers = (report.mean, report.quantiles[0.99], report.maximum, *by_band[:2], report.kl, report.operations.mean)
    return dict(zip(COLUMNS, map(float, numbers), strict=True))


def in_dtype(fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Returns the function with parameters cast to a dtype, in which the model computes."""
    return lambda params, tokens: fn(jax.tree.map(lambda x: x.astype(dtype), params), tokens)


if __name__ == "__main__":
    main()
