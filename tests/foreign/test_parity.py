"""Generation with a cache beside the full forward pass in flax linen: other people's attention."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_train as jt

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

WORDS, WIDTH, TEXTS, LENGTH = 23, 16, 3, 9
TOKENS = np.random.default_rng(0).integers(0, WORDS, (TEXTS, LENGTH + 1), np.int32)


def chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]


class Decoder(nn.Module):
    """Flax's own attention, whose cache `decode=True` makes and fills."""

    dtype: Any
    decode: bool = False
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(WORDS, WIDTH, dtype=self.dtype)(tokens)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype, epsilon=self.epsilon)(x)
            mask = None if self.decode else nn.make_causal_mask(tokens)
            x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype, decode=self.decode)(y, mask=mask)
            x = x + nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(nn.LayerNorm(dtype=self.dtype)(x)))
        return nn.Dense(WORDS, dtype=self.dtype)(x)


def linen_pair(dtype: Any, epsilon: float = 1e-6) -> tuple[Any, Any, Any]:
    """Returns the full forward pass, the sampler, and parameters."""
    full, decoder = Decoder(dtype), Decoder(dtype, decode=True, epsilon=epsilon)
    params = full.init(jax.random.key(0), TOKENS[:, :-1])["params"]
    empty = decoder.init(jax.random.key(0), TOKENS[:, :-1])["cache"]

    def train(params: Any, tokens: jax.Array) -> jax.Array:
        return chosen(jnp.asarray(full.apply({"params": params}, tokens[:, :-1])), tokens)

    def infer(params: Any, tokens: jax.Array) -> jax.Array:
        def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            logits, changed = decoder.apply({"params": params, "cache": cache}, token[:, None], mutable=["cache"])
            return changed["cache"], logits[:, 0]

        _, logits = jax.lax.scan(step, empty, tokens[:, :-1].T)
        return chosen(logits.swapaxes(0, 1), tokens)

    return jax.jit(train), jax.jit(infer), params


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_flax_decodes_what_it_trains(dtype: Any) -> None:
    train, infer, params = linen_pair(dtype)
    report = jt.parity(train, infer, params, TOKENS)
    if dtype == jnp.float32:
        assert report.maximum < 1e-5
        assert report.first_difference is None
    else:
        exact = linen_pair(jnp.float32)[0](params, TOKENS)
        assert report.mean <= np.abs(np.asarray(train(params, TOKENS) - exact)).mean()
        assert report.first_difference is None or report.first_difference.kind == "rounding"


def test_another_epsilon_in_flax_is_found_at_the_norm() -> None:
    train, infer, params = linen_pair(jnp.float32, epsilon=1e-2)
    report = jt.parity(train, infer, params, TOKENS)
    first = report.first_difference
    assert first is not None
    assert first.kind == "value"
    assert first.infer is not None
    assert first.train is not None
    for operation in (first.train, first.infer):
        assert operation.path.startswith("Decoder/LayerNorm_0")
        assert (Path(operation.file).name, operation.code[:20]) == (Path(__file__).name, "y = nn.LayerNorm(dty")
