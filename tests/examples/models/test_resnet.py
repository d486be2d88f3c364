"""ResNet's parts against float64 ones written out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.convolution import Block, conv
from promotion import promoting

pytestmark = pytest.mark.quick


def convolve(x: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    """torch's conv2d with padding k // 2: x [n, h, w, i], kernel [o, k, k, i]."""
    size = kernel.shape[1]
    pad = size // 2
    x = np.pad(x.astype(np.float64), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
    return np.einsum("nhwikl,okli->nhwo", windows[:, ::stride, ::stride], kernel.astype(np.float64))


def batch_norm(x: np.ndarray, params: Any) -> np.ndarray:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(var + 1e-5) * np.asarray(params["scale"]) + np.asarray(params["bias"])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_a_convolution_is_torchs(size: int, stride: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 8, 6, 5)).astype(np.float32)
    module = conv(7, size, stride)
    params = jax.jit(module.init)(jax.random.key(0), x)["params"]
    kernel = np.asarray(params["kernel"])
    assert kernel.shape == (7, size, size, 5)
    y: Any = module.apply({"params": params}, x)
    np.testing.assert_allclose(y, convolve(x, kernel, stride), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_is_torchvisions(stride: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 6, 6, 4)).astype(np.float32)
    block = Block(4 * stride, stride)
    variables = jax.jit(promoting(lambda key, x: block.init(key, x, True)))(jax.random.key(0), x)
    params = jax.tree.map(  # not 1 and 0
        lambda p: p + jnp.asarray(random.normal(size=p.shape), jnp.float32) / 4, variables["params"]
    )
    assert ("projection" in params) == (stride == 2)

    exact = convolve(x, np.asarray(params["conv1"]["kernel"]), stride)
    exact = np.maximum(batch_norm(exact, params["norm1"]), 0)
    exact = batch_norm(convolve(exact, np.asarray(params["conv2"]["kernel"]), 1), params["norm2"])
    beside = x
    if stride == 2:
        beside = convolve(x, np.asarray(params["projection"]["kernel"]), stride)
        beside = batch_norm(beside, params["projection_norm"])
    wanted = np.maximum(exact + beside, 0)

    def apply(variables: Any, x: Any) -> Any:
        return block.apply(variables, x, True, mutable=["batch_stats"])

    y, _ = jax.jit(promoting(apply))({**variables, "params": params}, x)
    np.testing.assert_allclose(y, wanted, atol=2e-4)
