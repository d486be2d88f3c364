"""The vision transformer ViT-B/16 of Dosovitskiy et al., as timm's `vit_base_patch16_224` builds it.

For each block, a training step stores the inputs of its two parts and the products with its weights. The cheap
operations (norms, GELU, the attention between tokens and the dropout masks) are recomputed for the gradient.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from jmp_train.policies import autocast_as

from .convolution import torch_uniform

_SAVED = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_EPSILON = 1e-6  # of the norms
_NORMAL = nn.initializers.normal(0.02)  # timm truncates it at +-2, a hundred standard deviations


class VisionTransformer(nn.Module):
    """Patch and position embedding, pre-norm blocks, and a head on the class token.

    It sets no dtype: inputs and parameters determine it, so a policy decides. The defaults are ViT-B/16's.

    Attributes:
      classes: number of classes.
      patch: the side of a patch in pixels.
      width: features of a token.
      depth: number of blocks.
      heads: number of attention heads; they divide the width.
      mlp: features within a block's two dense layers.
      drop_rate: dropout rate after the position embedding, the attention and each of a block's dense layers.
    """

    classes: int = 1000
    patch: int = 16
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp: int = 3072
    drop_rate: float = 0.1

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, classes].

        Args:
          images: floating [batch, height, width, channels], sides a multiple of the patch's.
          train: True to apply dropout with the key "dropout".
        """
        words = None
        if train and self.drop_rate:  # the embedding's dropout and each block's three, drawn at once
            words = jax.random.bits(self.make_rng("dropout"), (1 + 3 * self.depth, 2), jnp.uint32)
        # As in the blocks, the mask is recomputed for the gradient instead of stored.
        first_dropout = jax.checkpoint(dropout, static_argnums=1)
        x = first_dropout(self._tokens(images), self.drop_rate, None if words is None else words[0])
        # Separate calls; otherwise the compiler may store what both recompute.
        attention_part, mlp_part = (nn.remat(part, policy=_SAVED) for part in (AttentionPart, MlpPart))
        for block in range(self.depth):
            own = None if words is None else words[1 + 3 * block :][:3]
            x = attention_part(self.heads, self.drop_rate, name=f"attention_{block}")(x, own)
            x = mlp_part(self.mlp, self.drop_rate, name=f"mlp_{block}")(x, own)
        x = nn.LayerNorm(_EPSILON, name="norm")(x[:, 0])
        return nn.Dense(self.classes, kernel_init=nn.initializers.zeros, name="head")(x)

    def _tokens(self, images: jax.Array) -> jax.Array:
        """Returns the class token and the embedded patches, with their positions [batch, 1 + patches, width]."""
        side = (self.patch, self.patch)
        init = torch_uniform(self.patch**2 * images.shape[-1])
        embed = nn.Conv(self.width, side, side, "VALID", kernel_init=init, bias_init=init, name="patch_embed")
        patches = embed(images)
        patches = patches.reshape(len(patches), -1, self.width)
        first = self.param("class_token", _NORMAL, (1, 1, self.width))
        positions = self.param("positions", _NORMAL, (1, 1 + patches.shape[1], self.width))
        return _placed(patches, first, positions)


# Otherwise autocast would pass on and store everything in float32 between blocks, because the positions are float32.
@autocast_as("lower")
def _placed(patches: jax.Array, first: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns tokens [batch, 1 + patches, width] with their positions added.

    Args:
      patches: floating [batch, patches, width].
      first: the class token, floating [1, 1, width].
      positions: floating [1, 1 + patches, width].
    """
    firsts = jnp.broadcast_to(first, (len(patches), *first.shape[1:]))
    return jnp.concatenate([firsts, patches], axis=1) + positions


class AttentionPart(nn.Module):
    """The first part of a block: attention with a norm before it, added to its input.

    Attributes:
      heads: number of heads.
      drop_rate: dropout rate.
    """

    heads: int
    drop_rate: float

    @nn.compact
    def __call__(self, x: jax.Array, words: jax.Array | None) -> jax.Array:
        """Returns tokens [batch, tokens, width].

        Args:
          x: floating [batch, tokens, width].
          words: random words of the block's dropouts, uint32 [3, 2]; None for no dropout.
        """
        width = x.shape[-1]
        y = _dense(3 * width, "qkv")(nn.LayerNorm(_EPSILON, name="norm")(x))
        y = _dense(width, "projection")(attention(y, self.heads))
        return x + dropout(y, self.drop_rate, None if words is None else words[0])


class MlpPart(nn.Module):
    """The second part of a block: two dense layers with a norm before them, added to their input.

    Attributes:
      features: features between the layers.
      drop_rate: dropout rate after each layer.
    """

    features: int
    drop_rate: float

    @nn.compact
    def __call__(self, x: jax.Array, words: jax.Array | None) -> jax.Array:
        """Returns tokens [batch, tokens, width]; see `AttentionPart`."""
        first, second = (None, None) if words is None else (words[1], words[2])
        y = _dense(self.features, "dense_1")(nn.LayerNorm(_EPSILON, name="norm")(x))
        y = dropout(nn.gelu(y, approximate=False), self.drop_rate, first)
        y = _dense(x.shape[-1], "dense_2")(y)
        return x + dropout(y, self.drop_rate, second)


def _dense(features: int, name: str) -> nn.Dense:
    return nn.Dense(features, kernel_init=_NORMAL, name=name)


def attention(query_key_value: jax.Array, heads: int) -> jax.Array:
    """Returns the attention output of each token over all tokens of its image, [batch, tokens, width].

    Softmax is computed in float32.

    Args:
      query_key_value: floating [batch, tokens, 3 * width], the three one after the other, each head by head.
      heads: number of heads.
    """
    batch, tokens, features = query_key_value.shape
    parts = query_key_value.reshape(batch, tokens, 3, heads, features // (3 * heads))
    query, key, value = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)
    weights = nn.softmax(logits.astype(jnp.float32)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, tokens, -1)


def dropout(x: jax.Array, rate: float, words: jax.Array | None) -> jax.Array:
    """Returns x with some values 0 and the others divided by 1 - rate.

    Args:
      x: floating [...], fewer than 2**32 values.
      rate: the fraction of values to drop, from 0 to below 1.
      words: uint32 [2], random; None to drop nothing.
    """
    if words is None:
        return x
    return jnp.where(is_kept(words, rate, x.shape), x / (1 - rate), 0)


def is_kept(words: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """Returns bool [*shape], False with probability `rate`: a hash of the words and the place.

    It is only arithmetic, which XLA fuses into its consumer: no mask is stored, and no separate kernel draws it,
    as for jax.random on GPUs.

    Args:
      words: uint32 [2], random.
      rate: from 0 to below 1.
      shape: shape of the mask, fewer than 2**32 values.
    """
    places = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mixed(_mixed(places ^ words[0]) ^ words[1]) >= jnp.uint32(int(rate * 2**32))


def _mixed(x: jax.Array) -> jax.Array:
    """Returns a bijection of uint32 with every output bit dependent on every input bit (Wellons' lowbias32)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
