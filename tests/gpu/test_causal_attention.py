"""Causal attention in half precision on this device, by cuDNN where it serves, beside float32 on a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.causal_attention import causal_attention

pytestmark = pytest.mark.gpu

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 2, 256, 4, 2, 64


def with_gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    *heads, cotangent = arrays
    out, pullback = jax.vjp(causal_attention, *heads)
    return out, *pullback(cotangent.astype(out.dtype))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_it_and_its_gradients_are_the_cpus(dtype: Any) -> None:
    random = np.random.default_rng(0)
    shapes = [(BATCH, TOKENS, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    compiled = jax.jit(with_gradients).lower(*arrays).compile()
    if jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= 8:
        assert "__cudnn$fmha" in (compiled.as_text() or "")
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = jax.jit(with_gradients)(*(np.asarray(x, np.float32) for x in arrays))
    for found, exact in zip(compiled(*arrays), wanted, strict=True):
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float32) - np.asarray(exact)).max()
        assert error <= 4 * float(jnp.finfo(dtype).eps) * np.abs(exact).max()
