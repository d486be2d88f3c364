"""Cross-entropy by chunks of tokens beside float64, and what it stores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.token_losses import token_losses

from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

BATCH, TOKENS, WIDTH, VOCABULARY = 2, 12, 8, 40
PER_TOKEN = BATCH * VOCABULARY


def operands(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns features, embedding, labels, and weights of the losses."""
    random = np.random.default_rng(0)
    features = jnp.asarray(2 * random.normal(size=(BATCH, TOKENS, WIDTH)), dtype)
    embedding = jnp.asarray(random.normal(size=(VOCABULARY, WIDTH)), dtype)
    labels = jnp.asarray(random.integers(0, VOCABULARY, (BATCH, TOKENS)), jnp.int32)
    return features, embedding, labels, jnp.asarray(random.uniform(size=(BATCH, TOKENS)), jnp.float32)


def exact(features: Any, embedding: Any, labels: Any, weights: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the losses, and the gradients of their weighted sum, in float64."""
    x, w, g = (np.asarray(array, np.float64) for array in (features, embedding, weights))
    logits = x @ w.T
    logits -= logits.max(-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    one_hot = np.eye(len(w))[np.asarray(labels)]
    off = (np.exp(log_probs) - one_hot) * g[..., None]
    return -(log_probs * one_hot).sum(-1), off @ w, np.einsum("btv,btw->vw", off, x)


def weighted(chunk: int, features: Any, embedding: Any, labels: Any, weights: Any) -> tuple[jax.Array, Any]:
    """Returns the weighted sum of the losses, and the losses."""
    found = token_losses(features, embedding, labels, chunk)
    return (found.losses * weights).sum(), found


def differentiated(chunk: int) -> Any:
    return jax.value_and_grad(lambda *args: weighted(chunk, *args), argnums=(0, 1), has_aux=True)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("chunk_tokens", [12, 3])
@pytest.mark.parametrize(("dtype", "allowed"), [(jnp.float32, 16), (jnp.float16, 2), (jnp.bfloat16, 2)])
def test_losses_and_gradients_are_those_of_float64(dtype: Any, allowed: int, chunk_tokens: int) -> None:
    arguments = operands(dtype)
    (_, found), grads = jax.jit(differentiated(chunk_tokens * PER_TOKEN))(*arguments)
    losses, *wanted = exact(*arguments)
    # The logits are not rounded to half: only the operands are, and these are given.
    np.testing.assert_allclose(found.losses, losses, rtol=2e-6, atol=2e-6)
    for grad, of_operand in zip(grads, wanted, strict=True):
        assert grad.dtype == dtype
        error = np.abs(np.asarray(grad, np.float64) - of_operand).max()
        assert error <= allowed * float(jnp.finfo(dtype).eps) * np.abs(of_operand).max()


def test_within_autocast_the_operands_are_half_and_the_losses_float32() -> None:
    features, embedding, *rest = operands()
    found = jax.jit(autocast(token_losses, jnp.bfloat16))(features, embedding, rest[0])
    rounded = [x.astype(jnp.bfloat16) for x in (features, embedding)]
    losses, *_ = exact(*rounded, *rest)
    assert found.losses.dtype == jnp.float32
    np.testing.assert_allclose(found.losses, losses, rtol=2e-6, atol=2e-6)
    assert np.abs(losses - exact(features, embedding, *rest)[0]).max() > 1e-3


@pytest.mark.full
def test_what_is_right_is_what_argmax_says() -> None:
    embedding = jnp.array([[1.0], [2.0], [2.0], [0.0]])
    features = jnp.array([1.0, 1.0, 1.0, -1.0, jnp.nan]).reshape(1, 5, 1)
    labels = jnp.array([[1, 2, 0, 3, 0]])
    assert token_losses(features, embedding, labels).right.tolist() == [[True, False, False, True, False]]
    features, embedding, labels, _ = operands()
    predicted = (features @ embedding.T).argmax(-1)
    mixed = jnp.where(jnp.arange(TOKENS) % 2 == 0, predicted.astype(jnp.int32), labels)
    np.testing.assert_array_equal(token_losses(features, embedding, mixed).right, predicted == mixed)


def test_no_array_of_all_logits_is_made() -> None:
    text = str(jax.make_jaxpr(differentiated(3 * PER_TOKEN))(*operands()))
    assert f"[{BATCH},3,{VOCABULARY}]" in text
    assert f"{TOKENS},{VOCABULARY}]" not in text
