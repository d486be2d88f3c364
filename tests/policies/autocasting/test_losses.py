"""Cross-entropies under autocast shift logits in float32, at no cost in what is saved for the gradient.

Probabilities that only a float32 loss reads are float32 under autocast: half would round their gradients all alike.

The gradients of a dice loss with respect to the probabilities of all pixels are two numbers. Rounded to half precision,
they are off by the same fraction for all pixels, which the sums over the pixels keep.
"""

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


SIDE, CHANNELS = 32, 8


def dice(p: jax.Array, y: jax.Array) -> jax.Array:
    return 1 - (2 * jnp.sum(p * y) + 1) / (jnp.sum(p) + jnp.sum(y) + 1)


def tversky(p: jax.Array, y: jax.Array) -> jax.Array:
    both = jnp.sum(p * y)
    return 1 - both / (both + 0.3 * jnp.sum(p * (1 - y)) + 0.7 * jnp.sum((1 - p) * y))


DICE_LOSSES: dict[str, Loss] = {
    "dice": lambda z, y: dice(jax.nn.sigmoid(z), y),
    "logistic": lambda z, y: dice(lax.logistic(z), y),
    "jitted": lambda z, y: jax.jit(dice)(jax.jit(jax.nn.sigmoid)(z), y),
    "Tversky": lambda z, y: tversky(jax.nn.sigmoid(z), y),
}


@pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_gradients_of_a_head(half: Any) -> None:
    def loss(heads: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
        losses = [DICE_LOSSES[name]((x @ w + b)[..., 0], y) for name, (w, b) in heads.items()]
        return sum(losses, start=jnp.zeros(()))

    ours, plain = jax.jit(jax.grad(autocast(loss, half))), jax.jit(jax.grad(loss))
    for seed in range(4):
        random = np.random.default_rng(seed)
        x = np.maximum(random.normal(size=(4, SIDE, SIDE, CHANNELS)), 0).astype("f4")
        place, center = np.mgrid[:SIDE, :SIDE], random.uniform(SIDE / 4, 3 * SIDE / 4, (4, 2, 1, 1))
        y = (np.square(place - center).sum(1) < (SIDE / 5) ** 2).astype("f4")
        w, b = random.normal(size=(CHANNELS, 1)).astype("f4") / 3, 0.1 * random.normal(size=1).astype("f4")
        heads = dict.fromkeys(DICE_LOSSES, (w, b))
        found, exact = ours(heads, x, y), plain(heads, x, y)
        for name in DICE_LOSSES:
            gradient, wanted = (np.concatenate([np.ravel(part) for part in tree[name]]) for tree in (found, exact))
            apart = np.linalg.norm(gradient - wanted) / np.linalg.norm(wanted)
            assert apart < 0.5 * float(jnp.finfo(half).eps), (name, seed)


def test_probabilities_that_a_product_reads_stay_half() -> None:
    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x * jax.nn.sigmoid(x @ w)) @ w

    rows = explain_autocast(gated, np.ones((2, 2), "f4"), np.ones((2, 2), "f4")).operations
    assert [row.dtypes_out for row in rows if row.operation == "logistic"] == [("float16",)]
