"""The vision transformer ViT-B/16 of Dosovitskiy et al., as timm's `vit_base_patch16_224` builds it.

A training step keeps of each block the inputs of its two parts and the products with its weights; what is cheap, that
is the norms, GELU, the attention between tokens and the dropout masks, is recomputed for the gradient.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from jmp_train.policies.autocasting import autocast_as
from jmp_train.tasks.models.convolution import torch_uniform

_SAVED = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_EPSILON = 1e-6  # of the norms
_NORMAL = nn.initializers.normal(0.02)  # timm truncates it at +-2, a hundred standard deviations


class VisionTransformer(nn.Module):
    """Patch and position embedding, pre-norm blocks, and a head on the class token.

    It names no dtype: inputs and parameters bring theirs, and so a policy decides. The defaults are ViT-B/16's.

    Attributes:
      classes: how many the head tells apart.
      patch: the length of a patch's side in pixels.
      width: features of a token.
      depth: how many blocks there are.
      heads: of the attention; they divide the width.
      mlp: features within a block's two dense layers.
      drop_rate: of the dropout after the position embedding, the attention and each of a block's dense layers.
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
          train: whether dropout draws, of the key "dropout".
        """
        words = self._dropout_words() if train and self.drop_rate else None
        # As in the blocks, the mask is recomputed for the gradient, and not kept.
        first_dropout = jax.checkpoint(dropout, static_argnums=1)
        x = first_dropout(self._tokens(images), self.drop_rate, None if words is None else words[0])
        # Apart, because the compiler may then not hold what both compute again at one time.
        attention_part, mlp_part = (nn.remat(part, policy=_SAVED) for part in (AttentionPart, MlpPart))
        for block in range(self.depth):
            own = None if words is None else words[1 + 3 * block :][:3]
            x = attention_part(self.heads, self.drop_rate, name=f"attention_{block}")(x, own)
            x = mlp_part(self.mlp, self.drop_rate, name=f"mlp_{block}")(x, own)
        x = nn.LayerNorm(_EPSILON, name="norm")(x[:, 0])
        return nn.Dense(self.classes, kernel_init=nn.initializers.zeros, name="head")(x)

    def _dropout_words(self) -> jax.Array:
        """Returns uint32 [1 + 3 * depth, 2] for the embedding's dropout and each block's three, drawn at once."""
        return jax.random.bits(self.make_rng("dropout"), (1 + 3 * self.depth, 2), jnp.uint32)

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


# Under autocast all that blocks pass on and keep would else be float32, as the positions are.
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
    """The first part of a block: attention behind a norm, added to what came.

    Attributes:
      heads: how many.
      drop_rate: of the dropout.
    """

    heads: int
    drop_rate: float

    @nn.compact
    def __call__(self, x: jax.Array, words: jax.Array | None) -> jax.Array:
        """Returns tokens [batch, tokens, width].

        Args:
          x: floating [batch, tokens, width].
          words: of the block's dropouts, uint32 [3, 2]; None for none.
        """
        width = x.shape[-1]
        y = _dense(3 * width, "qkv")(nn.LayerNorm(_EPSILON, name="norm")(x))
        y = _dense(width, "projection")(attention(y, self.heads))
        return x + dropout(y, self.drop_rate, None if words is None else words[0])


class MlpPart(nn.Module):
    """The second part of a block: two dense layers behind a norm, added to what came.

    Attributes:
      features: between the layers.
      drop_rate: of the dropout behind each.
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
    """Returns what each token gathers from all of its image [batch, tokens, width]; softmax is in float32.

    Args:
      query_key_value: floating [batch, tokens, 3 * width], the three one after the other, each head by head.
      heads: how many.
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
      rate: the share that is dropped, from 0 to below 1.
      words: uint32 [2], random; None to drop nothing.
    """
    if words is None:
        return x
    return jnp.where(is_kept(words, rate, x.shape), x / (1 - rate), 0)


def is_kept(words: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """Returns bool [*shape], False with the probability `rate`: a hash of the words and the place.

    It is arithmetic alone, which XLA fuses into what reads it: no mask is stored, and none is drawn by a kernel of its
    own, as jax.random's are on GPUs.

    Args:
      words: uint32 [2], random.
      rate: from 0 to below 1.
      shape: of the mask, fewer than 2**32 values.
    """
    places = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mixed(_mixed(places ^ words[0]) ^ words[1]) >= jnp.uint32(int(rate * 2**32))


def _mixed(x: jax.Array) -> jax.Array:
    """Returns a bijection of uint32 whose every output bit depends on every input bit (Wellons' lowbias32)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
