"""The loss of the tasks that tell what is on an image, by a model with BatchNorm."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


def image_loss(
    model: nn.Module, params: Any, batch_stats: Any, batch: Any, rngs: Any = None
) -> tuple[jax.Array, Any]:
    """Returns the mean cross-entropy, the next batch statistics and the accuracy.

    Args:
      model: of which `model(images, train)` are logits [batch, classes].
      params: the model's.
      batch_stats: the model's.
      batch: `image` and `label`, as `prepare` makes them.
      rngs: the random keys by their names, for a model that draws.
    """
    updated: Any
    logits, updated = model.apply(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        train=True,
        mutable=["batch_stats"],
        rngs=rngs,
    )
    logits = logits.astype(jnp.float32)  # the loss is no place for half precision
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    accuracy = (logits.argmax(-1) == batch["label"]).mean(dtype=jnp.float32)
    return loss, (updated["batch_stats"], {"accuracy": accuracy})
