"""Under autocast, cuBLAS and cuDNN get half precision, in the program that the GPU runs.

A CPU computes half in float32, so that there the program before compilation is read.
"""

from collections import Counter
from typing import Any

import gpu_programs
import jax
import numpy as np
import pytest
from product_operands import products

import jmp_train as jt

pytestmark = pytest.mark.gpu
NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@pytest.mark.parametrize("dtype", NAMES)
def test_products_and_convolutions_are_in_half(dtype: str, is_gpu: bool) -> None:
    function, arguments = gpu_programs.autocast_products(dtype)
    lowered = jax.jit(function).lower(*arguments)
    hlo = lowered.compile().as_text() if is_gpu else lowered.as_text(dialect="hlo")
    found = products(hlo or "")
    assert {product.operands for product in found} == {(NAMES[dtype], NAMES[dtype])}
    assert Counter(product.kind for product in found) == {"dot": 9, "convolution": 3}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_in_half_are_near_float32s(dtype: str, cpu: Any) -> None:
    """Of the loss and all gradients; 12 products in a row at most, each rounded to half."""
    random = np.random.default_rng(0)
    function, (shapes,) = gpu_programs.autocast_products(dtype)
    inputs = {name: random.normal(size=x.shape).astype(np.float32) / 8 for name, x in shapes.items()}
    loss, grads = jax.jit(function)(inputs)
    with jax.default_device(cpu):
        exact_loss, exact_grads = jax.jit(gpu_programs.autocast_products("float32")[0])(inputs)
    eps = float(jax.numpy.finfo(dtype).eps)
    assert float(loss) == pytest.approx(float(exact_loss), rel=12 * eps)

    def assert_near(grad: Any, exact: Any) -> None:
        assert np.abs(np.asarray(grad) - np.asarray(exact)).max() <= 12 * eps * np.abs(exact).max()

    jax.tree.map(assert_near, grads, exact_grads)
    assert jt.all_finite(grads)
