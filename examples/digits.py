"""Trains a small CNN on handwritten digits in mixed precision.

    python examples/digits.py [autocast_float16 | autocast_bfloat16 | mixed_float16 | float32]

Expected: about 99% of the test images right after ten epochs, in every policy.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_train as jt


class CNN(nn.Module):
    """Two convolutions with BatchNorm; it has no code for precision."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 8, 8, 1]."""
        for features in (32, 64):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


model = CNN()


def loss_fn(params: Any, batch_stats: Any, batch: Any, rng: jax.Array) -> Any:
    """Returns the loss and the next batch statistics; it has no code for precision."""
    logits, updated = model.apply(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": rng},
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
    return losses.mean(), (updated["batch_stats"], None)


def main(policy_name: str = "autocast_float16", epochs: int = 10, batch_size: int = 64) -> None:
    """Trains, and prints the test accuracy."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)

    policy = jt.get_policy(policy_name)
    loss_scale = jt.torch_loss_scale(enabled="float16" in policy_name)
    tx = jt.with_loss_scale(optax.adam(1e-3), loss_scale)
    step = jax.jit(jt.train_step(loss_fn, tx, policy=policy), donate_argnums=0)

    variables = model.init(jax.random.key(0), train_x[:1], train=False)
    state = jt.TrainState.create(
        policy.cast_to_param(variables["params"]),
        tx,
        model_state=variables["batch_stats"],
        rng=jax.random.key(1),
    )
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(train_x))
        metrics = {}
        for indices in np.split(order, range(batch_size, len(order), batch_size))[:-1]:
            batch = {"image": train_x[indices], "label": train_y[indices]}
            state, metrics = step(state, batch)
        jt.check_progress(state.opt_state, stop_after=50)
        print(
            f"epoch {epoch + 1}  loss {metrics['loss']:.4f}  "
            f"loss scale {metrics['loss_scale']:g}  skipped {metrics['skipped_steps']}"
        )

    def predict(params: Any, x: Any) -> Any:
        variables = {"params": params, "batch_stats": state.model_state}
        return model.apply(variables, x, train=False)

    logits = jax.jit(jt.apply_policy(predict, policy))(state.params, test_x)
    print(f"test accuracy {np.mean(np.argmax(logits, -1) == test_y):.2%}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "autocast_float16")
