"""Signal-to-noise ratios of products in few bits whose operands have outliers, for `fp8.py`."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting.fp8 import Extra, Recipe, product_in_few_bits

ROWS, TERMS, COLUMNS = 256, 512, 256
OUTLIERS, FACTORS = 4, (1e3, 1e5)
NUMBERS = (((1,), (0,)), ((), ()))


def operands(kind: str, factor: float) -> tuple[jax.Array, ...]:
    """Returns activations, a weight and the gradient of their product, normal except for outliers."""
    random = np.random.default_rng(0)
    x, w, g = (random.normal(size=size) for size in ((ROWS, TERMS), (TERMS, COLUMNS), (ROWS, COLUMNS)))
    if kind == "tokens":
        x[:OUTLIERS] *= factor
    elif kind == "features":
        x[:, :OUTLIERS] *= factor
        w[:OUTLIERS] /= factor
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, w, g))


def ratios(recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, Any]]:
    """Yields kinds of outliers and decibels of the product and its two gradients by recipe, and prints them.

    Each is the median over rows, because outliers spoil the many rows without any.
    """
    kinds = [("none", 1.0), *((kind, factor) for kind in ("tokens", "features") for factor in FACTORS)]
    for kind, factor in kinds:
        arrays = operands(kind, factor)
        exact = _both_ways(functools.partial(jnp.matmul, precision="highest"), *arrays)
        rows = {}
        for name, recipe in recipes.items():
            pairs = zip(("product", "of activations", "of weights"), _in_few_bits(recipe, *arrays), exact, strict=True)
            rows[name] = row = {part: _decibels(got, wanted) for part, got, wanted in pairs}
            print(f"{kind} {factor:<8g}{name:<26}" + "   ".join(f"{part} {x:.1f} dB" for part, x in row.items()))
        yield f"{kind} {factor:g}", rows


@functools.partial(jax.jit, static_argnums=0)
def _in_few_bits(recipe: Recipe, x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    extra = Extra(key=jax.random.key(0) if recipe.stochastic else None)
    product = functools.partial(product_in_few_bits, numbers=NUMBERS, recipe=recipe, dtype=jnp.float32, extra=extra)
    return _both_ways(product, x, w, g)


def _both_ways(product: Any, x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    out, pullback = jax.vjp(product, x, w)
    return out, *pullback(g)


def _decibels(found: jax.Array, exact: jax.Array) -> float:
    noise = jnp.linalg.norm(found - exact, axis=-1) / jnp.linalg.norm(exact, axis=-1)
    return round(float(-20 * jnp.log10(jnp.median(noise))), 1)
