"""Pieces that are rounded once, beside float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.rounded_once import gated, unrounded_product
from pytrees import assert_bitwise_equal

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.fp8 import DEFAULT_RECIPE, product_in_few_bits
from jmp_train.policies.autocasting.rules import TORCH_CUDA
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

NUMBERS = ((2,), (0,)), ((), ())  # of the dimensions of a dense layer

HALVES = [jnp.float16, jnp.bfloat16]


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", HALVES)
def test_gates_and_their_gradients_are_within_half_a_unit_of_float64s(dtype: Any) -> None:
    gate, up, cotangent = (normal(seed, (500,), dtype) for seed in range(3))
    out, pullback = jax.vjp(gated, gate, up)
    assert sum(x.size for x in jax.tree.leaves(pullback)) == 2 * gate.size
    x, y, g = (np.asarray(array, np.float64) for array in (gate, up, cotangent))
    slope = silu(x) + (1 - silu(x)) / (1 + np.exp(-x))
    for found, exact in zip((out, *pullback(cotangent)), (silu(x) * y, g * y * slope, g * silu(x)), strict=True):
        assert found.dtype == dtype
        rtol = 0.51 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_of_half_operands_are_not_rounded(dtype: Any) -> None:
    x, kernel, cotangent = normal(0, (2, 3, 16)), normal(1, (16, 5)), normal(2, (2, 3, 5))
    product = autocast(unrounded_product, dtype)
    out, pullback = jax.vjp(product, x, kernel)
    a, b, g = (np.asarray(array.astype(dtype), np.float64) for array in (x, kernel, cotangent))
    of_x, of_kernel = pullback(cotangent)
    for found, exact in ((out, a @ b), (of_x, g @ b.T)):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    # The kernel was rounded as an operand, and so is its gradient.
    exact = np.einsum("bti,bto->io", a, g)
    np.testing.assert_allclose(of_kernel, exact, rtol=0.51 * float(jnp.finfo(dtype).eps), atol=1e-5)
    np.testing.assert_array_equal(of_kernel, of_kernel.astype(dtype).astype(jnp.float32))


@pytest.mark.full
@pytest.mark.parametrize("how", [{"paths": {"queries": "fp8"}}, {"primitives": {"dot_general": "fp8"}}])
def test_products_in_8_bits_are_those_of_any_dense_layer_and_not_rounded(how: Any) -> None:
    def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
        with jax.named_scope("queries"):
            return unrounded_product(x, kernel)

    product = autocast(layer, jnp.bfloat16, rules=TORCH_CUDA.replace(**how))
    x, kernel, cotangent = normal(0, (2, 3, 16)), normal(1, (16, 5)), normal(2, (2, 3, 5))
    out, pullback = jax.vjp(product, x, kernel)
    wanted, wanted_pullback = jax.vjp(
        lambda x, kernel: product_in_few_bits(x, kernel.astype(jnp.bfloat16), NUMBERS, DEFAULT_RECIPE), x, kernel
    )
    assert out.dtype == jnp.float32
    assert_bitwise_equal((out, pullback(cotangent)), (wanted, wanted_pullback(cotangent)))
    (row,) = [row for row in explain_autocast(product, x, kernel).operations if row.rule == "fp8"]
    assert (row.operation, row.dtypes_in, row.dtypes_out) == ("dot_general", ("float8_e4m3fn",) * 2, ("float32",))
    assert row.path == "queries"
