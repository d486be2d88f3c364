"""Jumping knowledge: combines the features of all layers of a network for each node."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.layer import Drawing, Layer
from jmp_train.graphs.layers.layer_inputs import as_floats, promoted
from jmp_train.graphs.structure import checked_word, graph_storage, in_float32, largest_over, lstm_cell, upcast

MODES = ("cat", "max", "lstm")


class JumpingWeights(NamedTuple):
    """The parameters of `jumping_knowledge` with "lstm"; gates are in torch's order: input, forget, cell, output.

    Attributes:
      of_input: floating [2, width, 4 * hidden], for the directions from the first layer and from the last.
      of_hidden: floating [2, hidden, 4 * hidden].
      input_bias: floating [2, 4 * hidden].
      hidden_bias: floating [2, 4 * hidden].
      attention: floating [2 * hidden, 1].
      attention_bias: floating [1].

    Example:
      >>> import jax.numpy as jnp
      >>> shapes = [(2, 3, 8), (2, 2, 8), (2, 8), (2, 8), (4, 1), (1,)]
      >>> JumpingWeights(*map(jnp.zeros, shapes)).attention.shape
      (4, 1)
    """

    of_input: Floats
    of_hidden: Floats
    input_bias: Floats
    hidden_bias: Floats
    attention: Floats
    attention_bias: Floats


def jumping_knowledge(layers: Sequence[Floats], mode: str = "cat", weights: JumpingWeights | None = None) -> jax.Array:
    """Combines the rows of all layers for each node.

    Args:
      layers: floating [nodes, width] each, of equal widths unless the mode is "cat".
      mode: "cat" concatenates; "max" is elementwise; "lstm" is a weighted sum, with weights from a softmax over the
        layers' outputs of a bidirectional LSTM. Its states are float32.
      weights: for "lstm".

    Returns:
      [nodes, width], or with "cat" [nodes, sum of the widths], in the promoted dtype; half under autocast.

    Raises:
      ValueError: there are no layers, shapes do not fit, `mode` is unknown, or weights do not go with it.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> jumping_knowledge([jnp.array([[1.0, 5.0]]), jnp.array([[2.0, 3.0]])], "max").tolist()
      [[2.0, 5.0]]

    Reference: Xu et al., Representation Learning on Graphs with Jumping Knowledge Networks,
    https://arxiv.org/abs/1806.03536; DGL's JumpingKnowledge.
    """
    checked_word("mode", mode, MODES)
    if (weights is None) == (mode == "lstm"):
        raise ValueError(f"mode={mode!r} takes {'weights' if mode == 'lstm' else 'no weights'}")
    if not layers:
        raise ValueError("layers is empty: at least one is needed")
    first = as_floats("layers[0]", layers[0], "nodes", "width")
    shape = (len(first), "width" if mode == "cat" else first.shape[1])
    arrays = [as_floats(f"layers[{place}]", layer, *shape) for place, layer in enumerate(layers)]
    checked = () if weights is None else _checked(weights, first.shape[1])
    (*rows,) = promoted(*arrays, *checked)
    rows, parameters = rows[: len(arrays)], rows[len(arrays) :]
    if mode == "cat":
        return graph_storage(jnp.concatenate(rows, 1))
    if mode == "max":
        return in_float32(lambda *rows: largest_over(jnp.stack(rows), 0), *rows)
    return in_float32(lambda *x: _attended(jnp.stack(x[: len(rows)]), *x[len(rows) :]), *rows, *parameters)


def _shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "of_input": (2, width, 4 * hidden),
        "of_hidden": (2, hidden, 4 * hidden),
        "input_bias": (2, 4 * hidden),
        "hidden_bias": (2, 4 * hidden),
        "attention": (2 * hidden, 1),
        "attention_bias": (1,),
    }


def _checked(weights: JumpingWeights, width: int) -> list[jax.Array]:
    hidden = as_floats("weights.of_hidden", weights.of_hidden, 2, "hidden", "4 * hidden").shape[1]
    shapes = _shapes(width, hidden)
    return [as_floats(f"weights.{name}", getattr(weights, name), *shape) for name, shape in shapes.items()]


def _attended(layers: jax.Array, *parameters: jax.Array) -> jax.Array:
    """Returns the weighted sum [nodes, width] of layers [layers, nodes, width], in float32 or higher precision."""
    *gates, attention, attention_bias = (upcast(x) for x in parameters)
    layers = upcast(layers)
    onward, back = (_states(layers, [x[way] for x in gates], reverse=bool(way)) for way in range(2))
    logits = jnp.concatenate([onward, back], -1) @ attention + attention_bias
    return (jax.nn.softmax(logits, 0) * layers).sum(0)


def _states(layers: jax.Array, weights: Sequence[jax.Array], *, reverse: bool) -> jax.Array:
    """Returns an LSTM's hidden states [layers, nodes, hidden] at each layer."""

    def step(state: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state = lstm_cell(weights, row, state)
        return state, state[0]

    start = jnp.zeros((layers.shape[1], weights[1].shape[0]), layers.dtype)
    return jax.lax.scan(step, (start, start), layers, reverse=reverse)[1]


class JumpingKnowledge(Layer, of=jumping_knowledge):
    """The layer of `jumping_knowledge`: `layer([first, second, ...])`.

    Weights of "lstm" have the uniform initializers of torch's LSTM and linear layers.

    Args:
      mode: see `jumping_knowledge`.
      features: for "lstm", the width of the layers.
      num_layers: for "lstm", number of layers; its states have `features * num_layers // 2` numbers.
      dtype: dtype to which layers and parameters are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: for "lstm", flax's random streams; "params" is used.

    Raises:
      ValueError: `mode` is unknown, or "lstm" lacks a width, a number of layers or streams.

    Example:
      >>> import jax.numpy as jnp
      >>> JumpingKnowledge("cat")([jnp.ones((3, 4)), jnp.ones((3, 8))]).shape
      (3, 12)
    """

    def __init__(
        self,
        mode: str = "cat",
        features: int | None = None,
        num_layers: int | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        checked_word("mode", mode, MODES)
        self.mode = mode
        self.dtype = dtype
        self.weights: nnx.Dict | None = nnx.data(None)
        if mode == "lstm":
            if features is None or num_layers is None or rngs is None:
                raise ValueError(f'mode="lstm" needs {features=}, {num_layers=} and {rngs=}')
            hidden = features * num_layers // 2
            drawn, draw = {}, Drawing(rngs, param_dtype)
            for name, shape in _shapes(features, hidden).items():
                fan_in = 2 * hidden if name.startswith("attention") else hidden
                drawn[name] = draw.linear(fan_in, *shape)
            self.weights = nnx.Dict(drawn)

    def __call__(self, layers: Sequence[Floats]) -> jax.Array:
        """Returns the joined rows, [nodes, ...], for the arguments of `jumping_knowledge`."""
        weights = None
        if self.weights is not None:
            weights = JumpingWeights(**{name: self.cast(self.weights[name]) for name in JumpingWeights._fields})
        return jumping_knowledge([self.cast(rows) for rows in layers], self.mode, weights)
