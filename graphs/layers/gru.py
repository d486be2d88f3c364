"""The gated recurrent unit (GRU), with torch's gates: reset, update, new."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.structure import upcast
from jmp_train.policies.autocasting import autocast_as


def gru_shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a GRU's weights, for input and hidden state, and of their biases."""
    return ((width, 3 * width), (width, 3 * width), (3 * width,), (3 * width,))


@autocast_as("float32")
@jax.checkpoint
def gru_state(hidden: jax.Array, inputs: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """Returns the next hidden state [nodes, width], in float32 or higher precision; the gradient recomputes the gates.

    Args:
      hidden: the state, in float32 or higher precision, [nodes, width].
      inputs: floating [nodes, width].
      weights: floating, of the shapes of `gru_shapes`.

    Reference: Cho et al., https://arxiv.org/abs/1406.1078, in the form of torch.nn.GRUCell.
    """
    of_input, of_hidden, input_bias, hidden_bias = (upcast(weight) for weight in weights)
    reset, update, new = jnp.split(upcast(inputs) @ of_input + input_bias, 3, axis=-1)
    own_reset, own_update, own_new = jnp.split(hidden @ of_hidden + hidden_bias, 3, axis=-1)
    update = jax.nn.sigmoid(update + own_update)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new)
    return (1 - update) * new + update * hidden
