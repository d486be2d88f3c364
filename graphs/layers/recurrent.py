"""Recurrent units with torch's gates: the GRU, and the LSTM aggregator of GraphSAGE."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.messages import EdgeBatch, NodeBatch, update_all
from jmp_train.graphs.structure import Graph, graph_storage, rows_like, upcast
from jmp_train.policies.autocasting import autocast_as


def lstm_shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of an LSTM's weights, for input and hidden state, and of their biases."""
    return ((width, 4 * width), (width, 4 * width), (4 * width,), (4 * width,))


def lstm_aggregate(
    graph: Graph,
    features: jax.Array,
    weights: Sequence[jax.Array],
    edge_weight: jax.Array | None = None,
) -> jax.Array:
    """Returns the last hidden state of an LSTM that reads the neighbors' features, [nodes, width].

    Both states are float32, because slow changes of a state stagnate in half precision. The gradient recomputes
    the gates.

    Args:
      graph: a graph; under jit it needs `formats=("mailbox",)`.
      features: floating [nodes, width].
      weights: floating, of the shapes of `lstm_shapes`; gates are in torch's order: input, forget, cell, output.
      edge_weight: floating [edges], factors of the features.

    Raises:
      TypeError: a graph under jit has no mailboxes.
    """
    edges = {} if edge_weight is None else {"weight": edge_weight}
    carrier = dataclasses.replace(graph, nodes={"h": features}, edges=edges)

    def message(edges: EdgeBatch) -> dict[str, jax.Array]:
        return {"m": graph_storage(_weighted(edges.src["h"], edges.data.get("weight")))}

    def reduce(nodes: NodeBatch) -> dict[str, jax.Array]:
        return {"last": graph_storage(_last_state(nodes.mailbox["m"], *weights))}

    nodes = update_all(carrier, message, reduce).nodes
    return nodes["last"] if "last" in nodes else jnp.zeros_like(features)


@autocast_as("float32")
def _weighted(rows: jax.Array, weight: jax.Array | None) -> jax.Array:
    if weight is None:
        return rows
    messages = upcast(rows)
    return (messages * rows_like(weight.astype(messages.dtype), rows)).astype(rows.dtype)


@autocast_as("float32")
def _last_state(messages: jax.Array, *weights: jax.Array) -> jax.Array:
    """Returns the hidden state [nodes, width] after messages [nodes, degree, width], in their dtype."""
    of_input, of_hidden, input_bias, hidden_bias = (upcast(weight) for weight in weights)

    @jax.checkpoint
    def step(states: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        hidden, cell = states
        gates = upcast(row) @ of_input + input_bias + (hidden @ of_hidden + hidden_bias)
        enter, forget, new, leave = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        return (jax.nn.sigmoid(leave) * jnp.tanh(cell), cell), None

    start = jnp.zeros((messages.shape[0], messages.shape[2]), of_input.dtype)
    (hidden, _), _ = jax.lax.scan(step, (start, start), jnp.moveaxis(messages, 1, 0))
    return hidden.astype(messages.dtype)


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
