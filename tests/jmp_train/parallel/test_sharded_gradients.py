"""The all-gather dtype of a parameter: a cast to it and back does not change what is computed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.parallel.sharded_gradients import all_gather_dtypes

pytestmark = [pytest.mark.quick, pytest.mark.newest]

Half = jnp.float16


def by_scan(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, row: (x + row.astype(Half), None), x[0].astype(Half), w)[0]


def in_carry(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda w, row: (w * 0.5, row @ w.astype(Half)), w, x.astype(Half))[1]


def by_branches(w: jax.Array, x: jax.Array) -> jax.Array:
    def first(w: jax.Array) -> jax.Array:
        return w.astype(Half).sum()

    def second(w: jax.Array) -> jax.Array:
        return w.T.astype(Half).max()

    return jax.lax.cond(x.sum() > 0, first, second, w)


def in_one_branch(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.cond(
        x.sum() > 0, lambda w: jnp.where(w[0, 0] > 0, Half(1), Half(0)), lambda w: w.astype(Half)[0, 0], w
    )


USES: dict[str, tuple[Callable[..., Any], str]] = {
    "cast": (lambda w, x: x.astype(Half) @ w.astype(Half), "float16"),
    "plain": (lambda w, x: x @ w, "float32"),
    "both": (lambda w, x: (x.astype(Half) @ w.astype(Half), w.sum()), "float32"),
    "returned": (lambda w, x: w, "float32"),
    "two types": (lambda w, x: (w.astype(Half), w.astype(jnp.bfloat16)), "float32"),
    "integer": (lambda w, x: w.astype(jnp.int32), "float32"),
    "unused": (lambda w, x: x, "float32"),
    "moved": (lambda w, x: x.astype(Half) @ w.reshape(2, 2, 4)[:, 0].T.astype(Half), "float16"),
    "looked up": (lambda w, x: w[x.astype(jnp.int32)].astype(Half), "float16"),
    "jit": (lambda w, x: jax.jit(lambda w: w.astype(Half))(w) * 2, "float16"),
    "remat": (lambda w, x: jax.checkpoint(lambda w: jnp.sin(w.astype(Half)))(w), "float16"),
    "jit plain": (lambda w, x: jax.jit(lambda w: w + 1)(w), "float32"),
    "scan": (by_scan, "float16"),
    "carry": (in_carry, "float32"),
    "cond": (by_branches, "float16"),
    "one branch": (in_one_branch, "float32"),
    "gradient": (lambda w, x: jax.grad(lambda w: jnp.sin(x.astype(Half) @ w.astype(Half)).sum())(w), "float16"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", USES)
def test_the_dtype_that_all_uses_cast_to(name: str) -> None:
    fn, dtype = USES[name]
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(3, 4)) if name != "moved" else np.ones((3, 4)), jnp.float32)
    w = jnp.asarray(random.normal(size=(4, 4)), jnp.float32)
    jaxpr = jax.make_jaxpr(fn)(w, x).jaxpr
    assert all_gather_dtypes(jaxpr, jaxpr.invars[:1]) == [jnp.dtype(dtype)]
    rounded = w.astype(dtype).astype(jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, fn(rounded, x), fn(w, x))
