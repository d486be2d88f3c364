"""ResNet-34 for images of 32 x 32 pixels: a stem of stride 1, no max-pooling, sixteen basic blocks.

It sets no dtype: inputs and parameters determine it, so a policy decides. Its initializers and
paddings are torchvision's.

Reference: https://arxiv.org/abs/1512.03385; torchvision's `resnet34`.
"""

import flax.linen as nn
import jax

from jmp_train.tasks.models.convolution import Conv, batch_norm, torch_uniform

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
