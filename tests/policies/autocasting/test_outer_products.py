"""A product over an axis of length 1 is a multiplication: autocast does not round its operands."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.rules import TORCH_CUDA
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

F32 = np.dtype(np.float32)
TIMES = np.random.default_rng(0).uniform(0, 4096, 16).astype(F32)
FREQUENCIES = (10_000.0 ** -(np.arange(8) / 8)).astype(F32)
ANGLES = TIMES[:, None].astype(np.float64) * FREQUENCIES


def by_nnx(t: jax.Array, f: jax.Array) -> jax.Array:
    layer = nnx.Linear(1, 8, rngs=nnx.Rngs(0))
    layer.kernel[...] = f[None]
    return layer(t[:, None])


def by_equinox(t: jax.Array, f: jax.Array) -> jax.Array:
    layer = eqx.tree_at(lambda layer: layer.weight, eqx.nn.Linear(1, 8, False, key=jax.random.key(0)), f[:, None])
    return jax.vmap(layer)(t[:, None])


def by_haiku(t: jax.Array, f: jax.Array) -> jax.Array:
    layer = hk.without_apply_rng(hk.transform(lambda t: hk.Linear(8)(t)))
    return layer.apply({"linear": {"w": f[None], "b": jnp.zeros(8)}}, t[:, None])


PRODUCTS: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "matmul": lambda t, f: t[:, None] @ f[None],
    "batched": lambda t, f: jnp.einsum("bto,of->btf", t.reshape(2, 8, 1), f[None]).reshape(16, 8),
    "a batch of rows": lambda t, f: jnp.einsum("bo,bof->bf", t[:, None], jnp.broadcast_to(f, (16, 1, 8))),
    "only a batch": lambda t, f: jnp.einsum(
        "bfo,bfo->bf", jnp.broadcast_to(t[:, None, None], (16, 8, 1)), jnp.broadcast_to(f[:, None], (16, 8, 1))
    ),
    "dot": lambda t, f: jnp.dot(t[:, None], f[None]),
    "tensordot": lambda t, f: jnp.tensordot(t[:, None], f[None], 1),
    "vmap": jax.vmap(lambda t, f: t[None] @ f[None], in_axes=(0, None)),
    "scan": lambda t, f: lax.scan(lambda c, t: (c, t[None] @ f[None]), 0, t)[1],
    "convolution": lambda t, f: lax.conv(t[None, None], f[:, None, None], (1,), "SAME")[0].T,
    "depthwise": lambda t, f: (
        lax.conv_general_dilated(
            jnp.broadcast_to(t, (1, 8, 16)), f[:, None, None], (1,), "SAME", feature_group_count=8
        )[0].T
    ),
    "ragged": lambda t, f: lax.ragged_dot(t[:, None], f[None, None], jnp.array([16])),
    "linen": lambda t, f: nn.Dense(8).apply({"params": {"kernel": f[None], "bias": jnp.zeros(8)}}, t[:, None]),
    "nnx": by_nnx,
    "haiku": by_haiku,
    "equinox": by_equinox,
}


@pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_angles_of_positions_and_their_gradients(half: Any) -> None:
    def total(copies: dict[str, jax.Array]) -> tuple[Any, Any]:
        def waves(copies: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: jnp.cos(product(jnp.asarray(TIMES), copies[name])) for name, product in PRODUCTS.items()}

        found = autocast(waves, half)(copies)
        return sum(x.sum() for x in found.values()), found

    slopes, found = jax.jit(jax.grad(total, has_aux=True))(dict.fromkeys(PRODUCTS, FREQUENCIES))
    slope = -(np.sin(ANGLES) * TIMES[:, None]).sum(0)
    for name, wave in found.items():
        assert wave.dtype == F32, name
        np.testing.assert_allclose(wave, np.cos(ANGLES), atol=5e-4, err_msg=name)  # float32 has 7 digits of 4096
        np.testing.assert_allclose(slopes[name], slope, atol=0.5, rtol=1e-3, err_msg=name)


MADE_WITHIN: dict[str, Callable[[], Any]] = {
    "arange": lambda: jnp.arange(1000.0),
    "int32": lambda: jnp.arange(1000).astype(F32),
    "bytes": lambda: jnp.arange(256, dtype=jnp.uint8).astype(F32),
}


@pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_angles_of_positions_that_are_made_within(half: Any) -> None:
    def waves(frequencies: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.cos(jnp.matmul(t()[:, None], frequencies[None])) for name, t in MADE_WITHIN.items()}

    for name, found in jax.jit(autocast(waves, half))(FREQUENCIES).items():
        angles = np.arange(len(found))[:, None] * FREQUENCIES.astype(np.float64)
        np.testing.assert_allclose(found, np.cos(angles), atol=5e-4, err_msg=name)


X, W = np.ones((4, 3), F32), np.ones((3, 1), F32)
IN_HALF: dict[str, Callable[[], Any]] = {
    "an operand that is half": lambda: jnp.matmul(jnp.matmul(X, W), jnp.asarray(W.T)),
    "masks": lambda: jnp.matmul((jnp.asarray(X[:, :1]) > 0).astype(F32), jnp.asarray(W.T)),
}


def test_what_half_holds_and_reasons() -> None:
    for name, fn in IN_HALF.items():
        assert jax.eval_shape(autocast(fn)).dtype == jnp.float16, name
    (row,) = explain_autocast(jnp.matmul, X[:, :1], W.T).operations
    assert (row.rule, row.reason) == ("promote", "outer product")
    lower = TORCH_CUDA.replace(paths={"": "lower"})
    assert autocast(jnp.matmul, rules=lower)(X[:, :1], W.T).dtype == jnp.float16
