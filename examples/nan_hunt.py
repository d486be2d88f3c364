"""Finds out why a small transformer learns nothing in float16, and fixes it by the rules that the report proposes.

    python examples/nan_hunt.py

The network has parts of published ones: RMSNorm, squared ReLU, embeddings times the square root of the width.
Activations exceed 256, so their squares overflow in float16: the norm divides by infinity, and the layer returns zeros.
No step fails, no value is NaN, but the model does not learn.

Expected: in mixed_float16 the loss stays at that of guessing, log(32) = 3.47; `jt.diagnose` names the line with the
squares; with its rule in the policy, the loss falls below 0.1 as in float32.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_train as jt

WORDS, LENGTH, WIDTH, HEADS = 32, 16, 64, 4


class RMSNorm(nn.Module):
    """Root mean square normalization."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features [..., width] of mean square 1, times a learned scale."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],)).astype(x.dtype)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


class Block(nn.Module):
    """Causal attention and a feed-forward network, each after a norm and added to its input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features [batch, length, width] of features of this shape."""
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(HEADS, deterministic=True)(RMSNorm()(x), mask=mask)
        h = nn.relu(nn.Dense(4 * WIDTH, kernel_init=nn.initializers.normal(0.5))(RMSNorm()(x)))
        return x + nn.Dense(WIDTH, kernel_init=nn.initializers.normal(1.0))(h * h)


class Transformer(nn.Module):
    """A decoder that predicts each next word."""

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Returns logits [batch, length, words] of int32 words [batch, length]."""
        x = nn.Embed(WORDS, WIDTH)(words) * WIDTH**0.5 + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(WORDS)(RMSNorm()(x))


model = Transformer()


def loss_fn(params: Any, words: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of each next word."""
    logits = jnp.asarray(model.apply({"params": params}, words))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype(jnp.float32), words[:, 1:])
    return losses.mean()


def sequences(count: int) -> np.ndarray:
    """Returns int32 sequences [count, length] that count upwards from any word."""
    return (np.arange(count)[:, None] * 7 + np.arange(LENGTH)) % WORDS


def train(policy: jt.Policy | str, steps: int = 150) -> tuple[jt.steps.TrainStep, jt.TrainState, float]:
    """Trains in a policy and prints the result; returns the step, the last state and the last loss."""
    tx = jt.with_loss_scale(optax.adam(1e-3), jt.torch_loss_scale())
    step = jt.train_step(jt.stateless(loss_fn), tx, policy=policy)
    batch = sequences(32)
    state = jt.TrainState.create(model.init(jax.random.key(0), batch)["params"], tx)
    run = jax.jit(step)
    metrics = {}
    for _ in range(steps):
        state, metrics = run(state, batch)
    loss, skipped = float(metrics["loss"]), int(metrics["skipped_steps"])
    print(f"loss {loss:.3f}, {skipped} of {steps} steps skipped, loss scale {float(metrics['loss_scale']):g}")
    return step, state, loss


def main() -> None:
    """Trains in float16, diagnoses the step, and trains with the proposed rules."""
    step, state, _ = train("mixed_float16")

    report = jt.diagnose(step, state, sequences(32))
    print(report)

    mended = jt.AutocastPolicy(jnp.float32, jnp.float32, jnp.float32, autocast_dtype=jnp.float16, rules=report.rules)
    train(mended)


if __name__ == "__main__":
    main()
