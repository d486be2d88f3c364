"""Convolutions with kernels in the layout of GPUs, torch's initializer and BatchNorm, and ResNet-34.

The models set no dtype: inputs and parameters determine it, so a policy decides.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax
from jax.typing import DTypeLike

Initializer = Callable[..., jax.Array]


class Conv(nn.Module):
    """A convolution with square kernels.

    On GPUs, XLA convolves NHWC with OHWI kernels. It would transpose linen's HWIO kernels, and the step would keep
    copies of all of them, and of their float32 master weights and moments. Kernels stored as OHWI are cast and updated
    in that layout.

    Args:
      features: output channels.
      size: rows and columns of the kernel.
      stride: stride in rows and columns.
      padding: zeros on each of the four sides.
      kernel_init: initializer of kernels [features, size, size, channels].
      bias_init: initializer of the bias [features]; None for no bias.
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
    """Returns a BatchNorm with torch's defaults; its momentum of 0.1 is flax's 0.9.

    Args:
      train: True to use the batch's statistics, False to use the running ones.
      axis_name: the mesh axis over which it is synchronized; None on one device.
      name: name of the module; None for linen's own.
    """
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-5,
        axis_name=axis_name,
        name=name,
    )


CLASSES = 10

# torch's kaiming_normal_(mode="fan_out", nonlinearity="relu"), for kernels [out, height, width, in].
_kaiming_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal", in_axis=-1, out_axis=0)


def conv(features: int, size: int, stride: int = 1, *, name: str | None = None) -> Conv:
    """Returns a convolution without bias, padded as torch pads odd kernels: by half of the kernel on each side.

    Args:
      features: output channels.
      size: rows and columns of the kernel; odd.
      stride: stride in rows and columns.
      name: name of the module; None for linen's own.
    """
    return Conv(features, size, stride, size // 2, kernel_init=_kaiming_normal, name=name)


class Block(nn.Module):
    """Two convolutions of 3 x 3, added to the input or, if the shape changes, to a projection of it.

    Args:
      features: output channels.
      stride: stride of the first convolution, in rows and columns.
      axis_name: see `ResNet`.
    """

    features: int
    stride: int = 1
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns [batch, rows / stride, columns / stride, features] of x [batch, rows, columns, channels]."""
        y = conv(self.features, 3, self.stride, name="conv1")(x)
        y = nn.relu(batch_norm(train, self.axis_name, "norm1")(y))
        y = conv(self.features, 3, name="conv2")(y)
        y = batch_norm(train, self.axis_name, "norm2")(y)
        if x.shape != y.shape:
            x = conv(self.features, 1, self.stride, name="projection")(x)
            x = batch_norm(train, self.axis_name, "projection_norm")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The network; its defaults are ResNet-34's.

    Args:
      stages: blocks per stage.
      features: channels per stage; all stages but the first halve rows and columns.
      axis_name: the mesh axis over which BatchNorm is synchronized.
    """

    stages: tuple[int, ...] = (3, 4, 6, 3)
    features: tuple[int, ...] = (64, 128, 256, 512)
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 32, 32, 3]."""
        x = conv(self.features[0], 3, name="stem")(x)
        x = nn.relu(batch_norm(train, self.axis_name, "stem_norm")(x))
        for stage, (count, features) in enumerate(zip(self.stages, self.features, strict=True)):
            for number in range(count):
                stride = 2 if stage and not number else 1
                name = f"stage{stage + 1}_block{number + 1}"
                x = Block(features, stride, self.axis_name, name=name)(x, train)
        x = x.mean(axis=(1, 2))
        init = torch_uniform(x.shape[-1])
        return nn.Dense(CLASSES, kernel_init=init, bias_init=init, name="head")(x)
