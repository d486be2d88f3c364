"""Attention's logits under autocast keep float32's range, at no cost in what is saved for the gradient."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import promoting

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

HALVES = pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
CAUSAL = np.tril(np.ones((16, 16), bool))


def by_einsum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * 0.125
    logits = jnp.where(CAUSAL, logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)


ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "jax": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, scale=0.125),
    "jax, causal": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, scale=0.125, is_causal=True),
    "jax, jitted": jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, scale=0.125)),
    "jax, remat": jax.checkpoint(lambda q, k, v: jax.nn.dot_product_attention(q, k, v)),
    "linen": nn.dot_product_attention,
    "einsum": by_einsum,
    "matmul": lambda q, k, v: (
        jax.jit(jax.nn.softmax)(q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)) @ v.swapaxes(1, 2)
    ).swapaxes(1, 2),
    "vmap": jax.vmap(lambda q, k, v: jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k)), v)),
}


def inputs(size: float) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 2, 16, 2, 64)).astype(np.float32)
    return size * q, size * k, v


@pytest.mark.quick_cases(1)
@HALVES
@pytest.mark.parametrize("name", ATTENTIONS)
def test_logits_beyond_the_range_of_float16(name: str, half: Any) -> None:
    fn = ATTENTIONS[name]
    q, k, v = (jnp.asarray(x, half) for x in inputs(500.0))  # exact in half, their products are not
    in_float32 = [x.astype(jnp.float32) for x in (q, k, v)]
    assert float(jnp.abs(jnp.einsum("bthd,bshd->bhts", *in_float32[:2])).max()) > 2 * 65504
    out = jax.jit(autocast(fn, half))(*in_float32)
    assert out.dtype == half
    with jax.enable_x64(True):
        expected = promoting(fn)(*(np.asarray(x, np.float64) for x in in_float32))
    epsilon = float(jnp.finfo(half).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=epsilon * np.abs(expected).max())
    rows = explain_autocast(autocast(fn, half), *in_float32).operations
    products = [row for row in rows if row.operation == "dot_general"]
    assert [row.dtypes_out[0] for row in products] == ["float32", jnp.dtype(half).name]
    assert all(row.in_half for row in products)
    assert products[0].reason == "primitive 'dot_general', logits of a softmax"


@pytest.mark.full
@HALVES
def test_gradients_and_tangents_of_logits(half: Any) -> None:
    def loss(q: Any, k: Any, v: Any) -> jax.Array:
        return jnp.sum(jnp.square(by_einsum(q, k, v)), dtype=jnp.float32)

    args = inputs(1.0)
    ours = autocast(loss, half)
    grads = jax.jit(jax.grad(ours, (0, 1, 2)))(*args)
    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    epsilon = float(jnp.finfo(half).eps)
    for grad, exact in zip(grads, expected, strict=True):
        assert grad.dtype == jnp.float32
        distance = jnp.linalg.norm(grad - exact) / jnp.linalg.norm(exact)
        assert float(distance) < 4 * epsilon
    _, tangent = jax.jvp(lambda q: ours(q, *args[1:]), args[:1], args[:1])
    along = float(jnp.vdot(args[0], expected[0]))
    size = float(jnp.linalg.norm(args[0]) * jnp.linalg.norm(expected[0]))
    assert abs(float(tangent) - along) < 4 * epsilon * size
    text = str(jax.make_jaxpr(jax.grad(ours, (0, 1, 2)))(*args))
    assert not [line for line in text.splitlines() if "dot_general" in line and ":f32" in line][1:]


def saved(fn: Callable[..., Any], *args: Any) -> float:
    report = explain_autocast(fn, *args)
    assert report.residual_bytes_autocast is not None
    assert report.residual_bytes_float32 is not None
    return report.residual_bytes_autocast / report.residual_bytes_float32


def test_what_is_saved_does_not_grow() -> None:
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.float32)
    for attention in (ATTENTIONS["jax"], ATTENTIONS["linen"]):
        # q, k, v and the probabilities in half, the exponentials and their sum in float32
        assert saved(lambda *args, f=attention: jnp.sum(f(*args)), q, q, q) < 0.65

    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 128, 256), (256, 1024)))
    labels = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def classified(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        rows = jax.nn.one_hot(labels, 1024)
        return optax.softmax_cross_entropy(promoting(jnp.matmul)(x, w), rows).mean()

    assert saved(classified, x, w, labels) < 0.66  # its logits stay half
