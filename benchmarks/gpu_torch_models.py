"""The networks of the workloads `resnet34` and `vit-b16` in plain torch, their submodules named as ours are.

Only processes that run torch import this file.
"""

import importlib
from typing import Any

torch: Any = importlib.import_module("torch")
nn: Any = torch.nn


def _conv(channels: int, features: int, size: int, stride: int = 1) -> Any:
    conv = nn.Conv2d(channels, features, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class Block(nn.Module):
    """Two convolutions of 3 x 3, added to the identity or a projection.

    Args:
      channels: in.
      features: channels out.
      stride: of the first convolution.
    """

    def __init__(self, channels: int, features: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, features, 3, stride)
        self.norm1 = nn.BatchNorm2d(features)
        self.conv2 = _conv(features, features, 3)
        self.norm2 = nn.BatchNorm2d(features)
        self.relu = nn.ReLU(inplace=True)
        self.has_projection = stride != 1 or channels != features
        if self.has_projection:
            self.projection = _conv(channels, features, 1, stride)
            self.projection_norm = nn.BatchNorm2d(features)

    def forward(self, x: Any) -> Any:
        """Returns [batch, features, rows / stride, columns / stride] of x [batch, channels, rows, columns]."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.has_projection:
            x = self.projection_norm(self.projection(x))
        return self.relu(y + x)


class ResNet(nn.Module):
    """ResNet-34 for images of 32 x 32 pixels: a stem of stride 1 and no max-pooling.

    Args:
      stages: blocks a stage.
      features: channels a stage; all stages but the first halve rows and columns.
      classes: number of classes.
    """

    def __init__(
        self,
        stages: tuple[int, ...] = (3, 4, 6, 3),
        features: tuple[int, ...] = (64, 128, 256, 512),
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.stem = _conv(3, features[0], 3)
        self.stem_norm = nn.BatchNorm2d(features[0])
        self.relu = nn.ReLU(inplace=True)
        self.blocks = []
        channels = features[0]
        for stage, (count, width) in enumerate(zip(stages, features, strict=True)):
            for number in range(count):
                block = Block(channels, width, 2 if stage and not number else 1)
                self.add_module(f"stage{stage + 1}_block{number + 1}", block)
                self.blocks.append(block)
                channels = width
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        """Returns logits [batch, classes] of images [batch, 3, rows, columns]."""
        x = self.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def _linear(features_in: int, features: int) -> Any:
    linear = nn.Linear(features_in, features)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


class AttentionPart(nn.Module):
    """The first part of a block: attention behind a norm, added to what came.

    Args:
      width: features of a token.
      heads: how many.
      drop_rate: of the dropout.
    """

    def __init__(self, width: int, heads: int, drop_rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.qkv = _linear(width, 3 * width)
        self.projection = _linear(width, width)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, x: Any) -> Any:
        """Returns tokens [batch, tokens, width] of tokens of the same shape."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        y = y.transpose(1, 2).reshape(batch, tokens, width)
        return x + self.dropout(self.projection(y))


class MlpPart(nn.Module):
    """The second part of a block: two dense layers behind a norm, added to what came.

    Args:
      width: features of a token.
      features: between the layers.
      drop_rate: of the dropout behind each.
    """

    def __init__(self, width: int, features: int, drop_rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.dense_1 = _linear(width, features)
        self.dense_2 = _linear(features, width)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, x: Any) -> Any:
        """Returns tokens [batch, tokens, width] of tokens of the same shape."""
        y = self.dropout(nn.functional.gelu(self.dense_1(self.norm(x))))
        return x + self.dropout(self.dense_2(y))


class VisionTransformer(nn.Module):
    """ViT-B/16 as timm's `vit_base_patch16_224` is, its head zeros as ours.

    Args:
      image_size: the side of an image in pixels.
      depth: how many blocks there are.
      classes: number of classes.
      patch: the length of a patch's side in pixels.
      width: features of a token.
      heads: of the attention; they divide the width.
      mlp: features within a block's two dense layers.
      drop_rate: of the dropouts.
    """

    def __init__(
        self,
        image_size: int = 224,
        depth: int = 12,
        classes: int = 1000,
        patch: int = 16,
        width: int = 768,
        heads: int = 12,
        mlp: int = 3072,
        drop_rate: float = 0.1,
    ) -> None:
        super().__init__()
        tokens = 1 + (image_size // patch) ** 2
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(nn.init.normal_(torch.empty(1, 1, width), std=0.02))
        self.positions = nn.Parameter(nn.init.normal_(torch.empty(1, tokens, width), std=0.02))
        self.dropout = nn.Dropout(drop_rate)
        self.parts = []
        for block in range(depth):
            for name, part in (
                (f"attention_{block}", AttentionPart(width, heads, drop_rate)),
                (f"mlp_{block}", MlpPart(width, mlp, drop_rate)),
            ):
                self.add_module(name, part)
                self.parts.append(part)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Any) -> Any:
        """Returns logits [batch, classes] of images [batch, 3, rows, columns]."""
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(patches), -1, -1)
        x = self.dropout(torch.cat([first, patches], dim=1) + self.positions)
        for part in self.parts:
            x = part(x)
        return self.head(self.norm(x)[:, 0])
