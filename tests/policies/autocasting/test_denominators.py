"""Under autocast, a float32 quotient does not hide a denominator that overflowed in float16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

BOXES = np.array([[0, 0, 304, 304], [96, 96, 512, 400], [0, 0, 8, 8]], "f4")  # areas of 92,416, 126,464 and 64
OTHERS = np.array([[16, 16, 320, 320], [96, 96, 480, 400]], "f4")


def area(boxes: jax.Array) -> jax.Array:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def intersection(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a[..., :, None, :], b[..., None, :, :]
    sides = jnp.minimum(a[..., 2:], b[..., 2:]) - jnp.maximum(a[..., :2], b[..., :2])
    sides = jnp.maximum(sides, 0.0)
    return sides[..., 0] * sides[..., 1]


def union(a: jax.Array, b: jax.Array) -> jax.Array:
    return area(a)[..., :, None] + area(b)[..., None, :] - intersection(a, b)


def enclosing(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a[:, None], b[None]
    sides = jnp.maximum(a[..., 2:], b[..., 2:]) - jnp.minimum(a[..., :2], b[..., :2])
    return sides[..., 0] * sides[..., 1]


Overlap = Callable[[jax.Array, jax.Array], jax.Array]
OVERLAPS: dict[str, Overlap] = {
    "pairs": lambda a, b: intersection(a, b) / union(a, b),
    "clipped": lambda a, b: intersection(a, b) / jnp.maximum(union(a, b), 1e-6),
    "chosen": lambda a, b: intersection(a, b) / jnp.where(union(a, b) > 0, union(a, b), 1),
    "of one": lambda a, b: intersection(a, b) / area(a)[:, None],
    "jitted": lambda a, b: jax.jit(jnp.divide)(intersection(a, b), jax.jit(union)(a, b)),
    "vmap": lambda a, b: jax.vmap(lambda a, b: intersection(a, b) / union(a, b))(a[None], b[None]),
    "generalized": lambda a, b: union(a, b) / enclosing(a, b),
}


@pytest.mark.parametrize("names", [("pairs", "jitted"), pytest.param(tuple(OVERLAPS), marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("predicted", ["both", pytest.param("one", marks=pytest.mark.full)])
@pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_overlaps_and_their_gradients(half: Any, predicted: str, names: tuple[str, ...]) -> None:
    def loss(scales: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        values = {}
        for name in names:
            b = jnp.matmul(OTHERS, scales[name]) if predicted == "both" else jnp.asarray(OTHERS)
            values[name] = OVERLAPS[name](jnp.matmul(BOXES, scales[name]), b).sum()
        return sum(values.values(), start=jnp.zeros(())), values

    scales = dict.fromkeys(names, np.eye(4, dtype="f4"))
    gradients, values = jax.jit(jax.grad(autocast(loss, half), has_aux=True))(scales)
    slopes, exact = jax.jit(jax.grad(loss, has_aux=True))(scales)
    for name, value in values.items():
        if (name, predicted, half) == ("generalized", "one", "float16"):
            assert np.isinf(value)  # the numerator overflows, which is seen
            continue
        np.testing.assert_allclose(value, exact[name], rtol=2e-2, err_msg=name)
        scale = np.abs(slopes[name]).max()
        np.testing.assert_allclose(gradients[name], slopes[name], atol=0.1 * scale, err_msg=name)


def test_a_float32_numerator_by_half_denominators() -> None:
    def quotients(x: jax.Array, w: jax.Array) -> Any:
        h, k = x @ w, w @ x  # 256
        square, power = h * k, jnp.exp(h / 16)  # 65536, which float16 does not hold, and 8.9e6 in float32
        return (
            x / square,
            x / (square + h).max(),
            x * square**-1.0,
            x * square**-0.5,
            x * jax.lax.rsqrt(square),
            x / power,
        )

    x, w = jnp.full((2, 2), 128.0), jnp.ones((2, 2))
    found = autocast(quotients)(x, w)
    for value, exact in zip(found, (2.0**-9, 128 / 65792, 2.0**-9, 0.5, 0.5, 128 / np.exp(16)), strict=True):
        np.testing.assert_allclose(value, np.full((2, 2), exact), rtol=1e-3)


SHARES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean of counts": lambda h, r: jnp.log(jnp.exp(h) * 100 / (r + jnp.exp(h) * 100)),
    "softsign": lambda h, r: h / (r + jnp.abs(h)),
    "root": lambda h, r: h / jnp.sqrt(r + h**2),
    "squares": lambda h, r: h * h / (h * h + 1),
    "rational": lambda h, r: h * 3 / (r + h * 3),
    "masked": lambda h, r: jnp.where(h > 0, h, 1) / (r + jnp.where(h > 0, h, 1)),
}


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_of_numerator_and_denominator_are_added_before_they_are_rounded(half: Any) -> None:
    """They nearly cancel: that of a share `m / (r + m)` is `r / (r + m)` of each of them."""
    h = np.array([0.5, 2.0, 3.0, 8.0, 20.0, 5.0])
    r = np.array([0.75, 0.25, 2.0, 1.0, 0.125, 1.0])

    def gradients(h: Any, bias: Any) -> dict[str, Any]:
        def total(name: str, w: Any) -> jax.Array:
            shares = SHARES[name](jnp.eye(6) @ w + bias, jnp.asarray(r, jnp.float32)[:, None])
            return jnp.diagonal(shares.astype(jnp.float32)).sum()

        weights = jnp.diag(h)
        return {name: jnp.diag(jax.grad(autocast(lambda w, n=name: total(n, w), half))(weights)) for name in SHARES}

    steps = {}
    with jax.enable_x64():
        for name, share in SHARES.items():
            steps[name] = np.asarray(jax.grad(lambda h, f=share: f(h, jnp.asarray(r)).sum())(jnp.asarray(h)))
    for name, found in jax.jit(gradients)(jnp.float32(h), jnp.zeros(6)).items():
        inside = np.abs(steps[name]) > 1e-4  # float32 itself loses the others
        np.testing.assert_allclose(
            found[inside], steps[name][inside], rtol=3 * float(jnp.finfo(half).eps), err_msg=name
        )
