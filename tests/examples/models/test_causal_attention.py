"""Attention by blocks of queries beside float64, and what it stores."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.causal_attention import causal_attention

from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 2, 12, 4, 2, 8
PER_TOKEN = BATCH * HEADS * TOKENS


def operands(dtype: Any = jnp.float32) -> list[jax.Array]:
    """Returns queries, keys, values, and a cotangent of what is gathered."""
    random = np.random.default_rng(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [jnp.asarray(random.normal(size=(BATCH, TOKENS, n, SIZE)), dtype) for n in heads]


def exact(query: Any, key: Any, value: Any, cotangent: Any) -> list[np.ndarray]:
    """Returns what is gathered, and the gradients of queries, keys and values, in float64."""
    group = HEADS // KV_HEADS
    q, k, v, g = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (query, key, value, cotangent))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(SIZE) + np.triu(np.full((TOKENS, TOKENS), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = g @ v.swapaxes(2, 3)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) / np.sqrt(SIZE)
    of_key, of_value = of_scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ g
    shared = [x.reshape(BATCH, KV_HEADS, group, TOKENS, SIZE).sum(2) for x in (of_key, of_value)]
    return [x.transpose(0, 2, 1, 3) for x in (weights @ v, of_scores @ k, *shared)]


def with_gradients(largest_chunk: int) -> Any:
    def run(*arrays: jax.Array) -> Any:
        *heads, cotangent = arrays
        attend = partial(causal_attention, largest_chunk=largest_chunk)
        out, pullback = jax.vjp(attend, *heads)
        return out, *pullback(cotangent.astype(out.dtype))

    return run


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("block", [12, 3])
@pytest.mark.parametrize(("dtype", "allowed"), [(jnp.float32, 16), (jnp.float16, 4), (jnp.bfloat16, 4)])
def test_it_and_its_gradients_are_those_of_float64(dtype: Any, allowed: int, block: int) -> None:
    arrays = operands(dtype)
    results = jax.jit(with_gradients(block * PER_TOKEN))(*arrays)
    for found, wanted in zip(results, exact(*arrays), strict=True):
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - wanted).max()
        # Weights and the gradients of scores are rounded to half as operands of products.
        assert error <= allowed * float(jnp.finfo(dtype).eps) * np.abs(wanted).max()


def test_the_values_dtype_decides_and_queries_gradients_are_not_rounded() -> None:
    query, key, value, cotangent = operands()
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (query, key, value, cotangent)]
    half = value.astype(jnp.bfloat16)
    out, *grads = jax.jit(with_gradients(2**20))(query, key, half, cotangent)
    assert [x.dtype.name for x in (out, *grads)] == ["bfloat16", "float32", "float32", "bfloat16"]
    np.testing.assert_allclose(np.asarray(out, np.float32), exact(*rounded)[0], atol=0.02)
    assert any((x != x.astype(jnp.bfloat16).astype(jnp.float32)).any() for x in grads[:2])


def test_within_autocast_it_computes_in_the_half_type_of_the_values() -> None:
    query, key, value, _ = operands()

    def gathered(x: jax.Array) -> jax.Array:
        product = jnp.einsum("btkd,de->btke", x, jnp.eye(SIZE, dtype=x.dtype))
        return causal_attention(query, key, product)

    out = jax.jit(autocast(gathered, jnp.float16))(value)
    assert out.dtype == jnp.float16
    wanted = causal_attention(query, key, value.astype(jnp.float16))
    np.testing.assert_array_equal(out, wanted)


def test_no_array_of_all_scores_is_made() -> None:
    text = str(jax.make_jaxpr(with_gradients(3 * PER_TOKEN))(*operands()))
    assert f"[{BATCH},3,{KV_HEADS},{HEADS // KV_HEADS},{TOKENS}]" in text
    assert f"{TOKENS},{KV_HEADS},{HEADS // KV_HEADS},{TOKENS}]" not in text
    assert f"{TOKENS},{TOKENS}]" not in text
