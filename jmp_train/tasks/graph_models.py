"""The models of the graph tasks, layers of `jmp_train.graphs` with activations between them, and their loss.

They name no dtype: features and parameters bring theirs, and so a policy decides.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jmp_train.graphs.gat_conv import GATConv
from jmp_train.graphs.graph import Graph
from jmp_train.graphs.graph_conv import GraphConv
from jmp_train.train_step import LossFn


def cross_entropy(predict: Callable[[Any, Any, Any], jax.Array]) -> LossFn:
    """Returns the mean cross-entropy of a batch's labels, for models without dropout.

    Args:
      predict: `predict(params, model_state, batch) -> logits [batch, classes]`.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        del rng
        logits = predict(params, model_state, batch).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (model_state, None)

    return loss_fn


class GCN(nnx.Module):
    """Two graph convolutions with a ReLU between them.

    Args:
      in_features: the width of a node's features.
      hidden: the width between the layers.
      classes: how many logits a node gets.
      rngs: flax's streams.

    Reference: Kipf and Welling, https://arxiv.org/abs/1609.02907.
    """

    def __init__(self, in_features: int, hidden: int, classes: int, *, rngs: nnx.Rngs) -> None:
        self.first = GraphConv(in_features, hidden, activation=nnx.relu, rngs=rngs)
        self.second = GraphConv(hidden, classes, rngs=rngs)

    def __call__(self, graph: Graph, features: jax.Array) -> jax.Array:
        """Returns logits [nodes, classes] of features [nodes, in]."""
        return self.second(graph, self.first(graph, features))


class GAT(nnx.Module):
    """Layers of graph attention with an ELU between them: heads side by side, in the last layer their mean.

    Args:
      in_features: the width of a node's features.
      hidden: the width of each head between the layers.
      classes: how many logits a node gets.
      heads: how many heads each layer has.
      rngs: flax's streams.

    Reference: Velickovic et al., https://arxiv.org/abs/1710.10903.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        classes: int,
        heads: Sequence[int],
        *,
        rngs: nnx.Rngs,
    ) -> None:
        *inner, last = heads
        layers, width = [], in_features
        for count in inner:
            layers.append(GATConv(width, hidden, count, activation=nnx.elu, rngs=rngs))
            width = count * hidden
        self.layers = nnx.List([*layers, GATConv(width, classes, last, rngs=rngs)])

    def __call__(self, graph: Graph, features: jax.Array) -> jax.Array:
        """Returns logits [nodes, classes] of features [nodes, in]."""
        *inner, last = self.layers
        for layer in inner:
            features = layer(graph, features)
            features = features.reshape(features.shape[0], -1)
        return last(graph, features).mean(axis=1)
