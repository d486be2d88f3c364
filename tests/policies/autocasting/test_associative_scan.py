"""`lax.associative_scan` of an addition adds in float32 under autocast, as `cumsum` does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train.policies.autocasting.transform import autocast

pytestmark = [pytest.mark.quick, pytest.mark.newest]

SUMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "add": lambda x: lax.associative_scan(jnp.add, x),
    "a lambda": lambda x: lax.associative_scan(lambda a, b: b + a, x),
    "axis": lambda x: lax.associative_scan(jnp.add, x.T, axis=1).T,
    "reverse": lambda x: lax.associative_scan(jnp.add, x[::-1], reverse=True)[::-1],
    "odd": lambda x: lax.associative_scan(jnp.add, jnp.concatenate([x, x[:1]]))[:-1],
    "a tuple": lambda x: lax.associative_scan(lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (x, x))[0],
    "vmap": jax.vmap(lambda x: lax.associative_scan(jnp.add, x), 1, 1),
}


@pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_sums_are_float32(half: Any) -> None:
    def sums(x: jax.Array) -> dict[str, jax.Array]:
        y = x @ jnp.eye(2)
        return {name: fn(y) for name, fn in SUMS.items()} | {"into a product": SUMS["add"](y) @ jnp.eye(2)}

    x = jnp.asarray(np.random.default_rng(0).uniform(size=(100, 2)), half)
    exact = np.cumsum(np.asarray(x.astype(jnp.float32), np.float64), 0)
    found = jax.jit(autocast(sums, half))(x)
    product = found.pop("into a product")
    for name, value in found.items():
        assert value.dtype == jnp.float32, name
        np.testing.assert_allclose(value, exact, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(product.astype(jnp.float32), exact, rtol=float(jnp.finfo(half).eps) / 1.9)


def test_other_sums_of_slices_stay_half() -> None:
    def fn(x: jax.Array) -> Any:
        y = x @ jnp.eye(8)
        return y[:, ::2] + y[:, 4:8], y[:, ::4] + y[:, 1::4], y[:, :4] + y[:, 4:], y[:, ::2] * y[:, 1::2]

    assert {x.dtype for x in jax.eval_shape(autocast(fn), np.ones((2, 8), "f4"))} == {np.dtype(np.float16)}
