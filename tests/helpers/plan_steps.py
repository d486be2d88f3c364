"""Steps of plain layers as `plan` takes them: a loss, and the state and the batch as shapes."""

from typing import Any

import jax
import jax.numpy as jnp

import jmp_train as jt


def tanh_loss(params: Any, batch: Any) -> jax.Array:
    """Returns the mean square of what layers without biases make of a batch."""
    x = batch["x"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w.astype(x.dtype))
    return (x.astype(jnp.float32) ** 2).mean()


def state_of_layers(optimizer: Any, width: int, depth: int) -> Any:
    params = {"layers": [jnp.zeros((width, width))] * depth}
    return jax.eval_shape(lambda: jt.TrainState.create(params, optimizer))


def batch_of_rows(rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)}
