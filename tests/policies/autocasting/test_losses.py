"""Cross-entropies under autocast shift logits in float32, at no cost in what is saved for the gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from promotion import promoting

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

CLASSES = 50
Loss = Callable[[jax.Array, jax.Array], jax.Array]


def shifted(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """As earlier versions of optax wrote it."""
    logits = logits - lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    label_logits = jnp.take_along_axis(logits, labels[:, None], -1).take(0, axis=-1)
    return jnp.log(jnp.sum(jnp.exp(logits), -1)) - label_logits


def shifted_and_indexed(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits - jnp.max(logits, -1, keepdims=True)
    label_logits = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.log(jnp.sum(jnp.exp(logits), -1)) - label_logits


def of_one_example(logits: jax.Array, label: jax.Array) -> jax.Array:
    logits = logits - jnp.max(logits)
    return jnp.log(jnp.sum(jnp.exp(logits))) - logits[label]


def of_log_softmax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]


def of_one_hot(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES))


LOSSES: dict[str, Loss] = {
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "optax, one-hot": of_one_hot,
    "shifted": shifted,
    "shifted and indexed": shifted_and_indexed,
    "vmap": jax.vmap(of_one_example),
    "log_softmax": of_log_softmax,
    "jitted": jax.jit(shifted),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_half_logits_are_as_exact_as_float32(name: str, half: Any) -> None:
    random = np.random.default_rng(0)
    logits = jnp.asarray(8 * random.normal(size=(64, CLASSES)), half)
    labels = random.integers(0, CLASSES, 64)
    weights = random.uniform(size=64).astype(np.float32)
    loss = promoting(LOSSES[name])

    def run(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        losses = loss(logits, labels)
        return losses, jnp.mean(loss(logits, labels)), jnp.sum(weights * loss(logits, labels))

    x = np.asarray(logits.astype(jnp.float32), np.float64)
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    sums = exponentials.sum(-1)
    exact = np.log(sums) + x.max(-1) - x[np.arange(64), labels]
    losses, mean, weighted = jax.jit(autocast(run, half))(logits, jnp.asarray(labels))
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, exact, rtol=1e-6, atol=5e-6)
    np.testing.assert_allclose(mean, exact.mean(), rtol=1e-6)
    np.testing.assert_allclose(weighted, weights @ exact, rtol=1e-6)

    grads = jax.jit(jax.grad(lambda x: jnp.sum(autocast(loss, half)(x, labels))))(x.astype("f4"))
    expected = exponentials / sums[:, None] - np.eye(CLASSES)[labels]
    np.testing.assert_allclose(grads, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["optax", "shifted", "log_softmax"])
def test_a_head_saves_its_logits_once_in_half(name: str) -> None:
    def head(x: jax.Array, w: jax.Array, b: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(promoting(LOSSES[name])(jnp.dot(x, w) + b, labels))

    shapes = (256, 128), (128, 1024), (1024,)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    report = explain_autocast(head, *arrays, jax.ShapeDtypeStruct((256,), jnp.int32))
    in_half = 2 * (256 * 128 + 128 * 1024 + 256 * 1024)
    assert report.residual_bytes_autocast is not None
    assert in_half <= report.residual_bytes_autocast <= in_half + 256 * 16  # and rows' sums


def test_a_rounding_that_is_asked_for_stays() -> None:
    def fn(x: jax.Array) -> jax.Array:
        shifted = x - jnp.max(x)
        return jnp.sum(jnp.exp(shifted.astype(jnp.bfloat16)).astype(jnp.float32))

    x = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.bfloat16)
    rounded = np.asarray((x - jnp.max(x)).astype(jnp.float32), np.float64)
    np.testing.assert_allclose(autocast(fn, jnp.bfloat16)(x), np.exp(rounded).sum(), rtol=1e-6)


@pytest.mark.full
def test_symbolic_shapes() -> None:
    def fn(table: jax.Array, words: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (2 * table)[words] @ table.T
        return jnp.mean(shifted(logits, labels) + jnp.sum(jnp.exp((2 * table)[words]), -1))

    (size,) = jax.export.symbolic_shape("size")
    words = jax.ShapeDtypeStruct((size,), jnp.int32)
    table = np.random.default_rng(0).normal(size=(CLASSES, 8)).astype(np.float32)
    exported = jax.export.export(jax.jit(autocast(fn)))(jnp.asarray(table), words, words)
    args = jnp.asarray(table), jnp.arange(CLASSES), jnp.arange(CLASSES)
    np.testing.assert_allclose(exported.call(*args), autocast(fn)(*args), rtol=1e-4)
