"""Convolutions with kernels in the layout that GPUs read, and torch's initializer and BatchNorm."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax
from jax.typing import DTypeLike

Initializer = Callable[..., jax.Array]


class Conv(nn.Module):
    """A convolution of square kernels.

    On GPUs XLA convolves NHWC with OHWI kernels. linen's HWIO ones it would transpose, and the step would keep copies
    of all of them, of their master weights and moments even in float32; stored as OHWI they are cast and updated in
    that layout.

    Args:
      features: channels out.
      size: of the kernel, in rows and in columns.
      stride: in rows and in columns.
      padding: with zeros, on all four sides.
      kernel_init: of kernels [features, size, size, channels].
      bias_init: of the bias [features]; None for a convolution without.
    """

    features: int
    size: int
    stride: int = 1
    padding: int = 0
    kernel_init: Initializer = nn.initializers.lecun_normal(in_axis=(1, 2, 3), out_axis=0)
    bias_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, rows, columns, features] of x [batch, rows, columns, channels]."""
        shape = (self.features, self.size, self.size, x.shape[-1])
        kernel = self.param("kernel", self.kernel_init, shape)
        bias = None if self.bias_init is None else self.param("bias", self.bias_init, shape[:1])
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=None)
        y = lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding=[(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
        )
        return y if bias is None else y + bias


def torch_uniform(fan_in: int) -> Initializer:
    """Returns PyTorch's default initializer of kernels and biases: uniform in +-1/sqrt(fan_in)."""
    bound = fan_in**-0.5

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def batch_norm(train: bool, axis_name: str | None, name: str | None = None) -> nn.BatchNorm:
    """Returns a BatchNorm with torch's defaults, whose momentum of 0.1 is flax's 0.9.

    Args:
      train: whether the batch's statistics count, and not the running ones.
      axis_name: the mesh axis over which it is synchronized; None on one device.
      name: of the module; None for linen's own.
    """
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-5,
        axis_name=axis_name,
        name=name,
    )
