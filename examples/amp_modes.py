"""Switches a training script between AMP modes by one line of configuration.

    python examples/amp_modes.py [float32 | torch | apex-O1 | apex-O2 | apex-O3 | naive | CONFIG.toml]

The dictionaries are those of the Colossal-AI tutorial; a TOML file has the same keys in a table [fp16].
Expected: about 99% of the test images right after fifteen epochs, in every mode.
"""

import logging
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

CONFIGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "torch": {"fp16": {"mode": jt.policies.AmpType.TORCH, "init_scale": 2.0**16}},
    "apex-O1": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O1"}},
    "apex-O2": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O2"}},
    "apex-O3": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O3"}},
    "naive": {"fp16": {"mode": jt.policies.AmpType.NAIVE, "initial_scale": 2.0**16, "verbose": True}},
}


class CNN(nn.Module):
    """Two convolutions with BatchNorm; it has no code for precision."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 8, 8, 1]."""
        for features in (32, 64):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def main(config: str = "apex-O2", epochs: int = 15, batch_size: int = 64) -> None:
    """Trains, and prints the test accuracy."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)
    model = CNN()
    variables = model.init(jax.random.key(0), images[:1], train=False)

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        del rng
        logits, new = model.apply(
            {"params": params, "batch_stats": stats},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
        return losses.mean(), (new["batch_stats"], None)

    def predict(params: Any, stats: Any, images: Any) -> Any:
        return model.apply({"params": params, "batch_stats": stats}, images, train=False)

    # All that is about precision, in any mode.
    amp = jt.amp_from_config(CONFIGS.get(config, config))
    amp, model = amp.for_model(model, images[:1], train=False)
    loss_fn, tx = amp.transform(loss_fn, optax.adam(optax.cosine_decay_schedule(3e-3, 22 * epochs)))
    predict = jax.jit(amp.forward(predict))
    step = jax.jit(jt.train_step(loss_fn, tx), donate_argnums=0)
    state = jt.TrainState.create(
        variables["params"],
        tx,
        model_state=amp.cast_model_state(variables["batch_stats"]),
        cast_params=amp.cast_params,
    )

    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(train_x))
        metrics: Any = {}
        for indices in np.split(order, range(batch_size, len(order), batch_size))[:-1]:
            batch = {"image": train_x[indices], "label": train_y[indices]}
            state, metrics = step(state, batch)
        amp.log(metrics)
        print(
            f"epoch {epoch + 1}  loss {metrics['loss']:.4f}  "
            f"loss scale {metrics['loss_scale']:g}  skipped {metrics['skipped_steps']}"
        )
    logits = predict(state.params, state.model_state, test_x)
    print(f"test accuracy {np.mean(np.argmax(logits, -1) == test_y):.2%}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(sys.argv[1] if len(sys.argv) > 1 else "apex-O2")
