"""The models of the graph tasks, layers of `jmp_train.graphs` with activations between them; loss and optimizer.

They set no dtype: features and parameters determine it, so a policy decides. A model applies dropout
only if it has a rate and its call gets random streams, `rngs=`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jmp_train.graphs.datasets import NodeData
from jmp_train.graphs.layers import GATConv, GraphConv, SAGEConv
from jmp_train.graphs.structure import Graph, GraphPart, SparseFeatures
from jmp_train.policies import Params
from jmp_train.policies.pytrees import path_name
from jmp_train.steps import LossFn
from jmp_train.task import Arrays
from jmp_train.types import ModelState

WEIGHT_DECAY = 5e-4

Init = Callable[[jax.Array], tuple[Any, Any]]
Predict = Callable[..., jax.Array]
Features = jax.Array | SparseFeatures


def node_classifier(make: Callable[[jax.Array], nnx.Module]) -> tuple[Init, Predict, LossFn]:
    """Returns the functions of a task for a model that classifies nodes: `init`, `predict` and `loss_fn`.

    A batch has a "graph", the "features" of all its nodes, and "node", the nodes to classify. Or it has a
    device's part of a graph, the features of its own rows, and their labels, -1 for rows that are not
    classified; then there are logits of all own rows.

    Args:
      make: returns the model for a key; its call takes `(graph, features, rngs=None)`.
    """

    @functools.cache  # called later, because it starts the device
    def structure() -> Any:
        return nnx.split(nnx.eval_shape(make, jax.random.key(0)), nnx.Param, ...)

    def init(key: jax.Array) -> tuple[Any, None]:
        return nnx.state(make(key), nnx.Param), None

    def predict(
        params: Params, model_state: ModelState, batch: Mapping[str, Any], rng: jax.Array | None = None
    ) -> jax.Array:
        del model_state
        # The layers' own random streams stay shapes, because nothing draws from them.
        graphdef, _, streams = structure()
        model = nnx.merge(graphdef, params, streams)
        rngs = None if rng is None else nnx.Rngs(dropout=rng)
        logits = model(batch["graph"], batch["features"], rngs=rngs)
        return logits if isinstance(batch["graph"], GraphPart) else logits[batch["node"]]

    return init, predict, cross_entropy(predict)


def cross_entropy(predict: Predict) -> LossFn:
    """Returns a loss function: the mean cross-entropy of a batch's labels, or of all devices' labels of a split graph.

    Args:
      predict: `predict(params, model_state, batch, rng) -> logits [batch, classes]`; the key is for dropout,
        if there is any.
    """

    def loss_fn(
        params: Params, model_state: ModelState, batch: Mapping[str, Any], rng: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        logits, labels = predict(params, model_state, batch, rng).astype(jnp.float32), batch["label"]
        graph = batch.get("graph")
        if not isinstance(graph, GraphPart):
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (model_state, None)
        has_label = labels >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        count = jax.lax.pmean(has_label.sum().astype(jnp.float32), graph.axis_name)  # the mean over the devices
        return jnp.where(has_label, losses, 0).sum() / count, (model_state, None)

    return loss_fn


def adam_with_l2(
    learning_rate: optax.ScalarOrSchedule, decayed: str | None = None, weight_decay: float = WEIGHT_DECAY
) -> optax.GradientTransformation:
    """Returns torch's Adam with `weight_decay`, which is added to the gradient, not to the step.

    It equals Adam on the loss plus half of `weight_decay` times the parameters' squares.

    Args:
      learning_rate: a number or a schedule.
      decayed: the path of the only parameter that decays; None for all.
      weight_decay: the factor.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> optimizer, weights = adam_with_l2(0.5), jnp.array([3.0, -1.0])
      >>> with jax.numpy_dtype_promotion("standard"):  # optax's own code promotes
      ...     updates, _ = optimizer.update(jnp.zeros(2), optimizer.init(weights), weights)
      >>> updates.round(3).tolist()  # the decay went through Adam, which makes all the same size
      [-0.5, 0.5]
    """

    def is_decayed(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path) == decayed, params)

    mask = None if decayed is None else is_decayed
    return optax.chain(optax.add_decayed_weights(weight_decay, mask), optax.adam(learning_rate))


def node_examples(data: NodeData, nodes: np.ndarray) -> Arrays:
    """Returns a batch of some nodes, without the entries that all batches share.

    Args:
      data: has the labels.
      nodes: int32 [batch].
    """
    return {"node": nodes, "label": data.labels[nodes]}


class GCN(nnx.Module):
    """Two graph convolutions with a ReLU between them.

    Args:
      in_features: the width of a node's features.
      hidden: the width between the layers.
      classes: number of logits per node.
      dropout: dropout rate of each layer's input.
      use_bias: whether the layers have biases; the paper's have none.
      rngs: flax's streams.

    Reference: Kipf and Welling, https://arxiv.org/abs/1609.02907.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        classes: int,
        *,
        dropout: float = 0.0,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        self.dropout = nnx.Dropout(dropout)
        self.first = GraphConv(in_features, hidden, use_bias=use_bias, activation=nnx.relu, rngs=rngs)
        self.second = GraphConv(hidden, classes, use_bias=use_bias, rngs=rngs)

    def __call__(self, graph: Graph | GraphPart, features: Features, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns logits [nodes, classes] of features [nodes, in], sparse ones too."""
        for layer in (self.first, self.second):
            features = layer(graph, self._dropped(features, rngs))
        return features

    def _dropped(self, features: Features, rngs: nnx.Rngs | None) -> Features:
        if isinstance(features, SparseFeatures):  # dropout leaves zeros at 0
            return features.map_values(lambda values: self.dropout(values, deterministic=rngs is None, rngs=rngs))
        return self.dropout(features, deterministic=rngs is None, rngs=rngs)


class GAT(nnx.Module):
    """Layers of graph attention with an ELU between them: heads are concatenated, and averaged in the last layer.

    Args:
      in_features: the width of a node's features.
      hidden: the width of each head between the layers.
      classes: number of logits per node.
      heads: number of heads of each layer.
      feature_dropout: dropout rate of each layer's input.
      attention_dropout: dropout rate of the attention weights.
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
        feature_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        *inner, last = heads
        make = functools.partial(
            GATConv,
            feature_dropout=feature_dropout,
            attention_dropout=attention_dropout,
            rngs=rngs,
        )
        layers, width = [], in_features
        for count in inner:
            layers.append(make(width, hidden, count, activation=nnx.elu))
            width = count * hidden
        self.layers = nnx.List([*layers, make(width, classes, last)])

    def __call__(self, graph: Graph | GraphPart, features: Features, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns logits [nodes, classes] of features [nodes, in], sparse ones too."""
        *inner, last = self.layers
        for layer in inner:
            features = layer(graph, features, deterministic=rngs is None, rngs=rngs)
            features = features.reshape(features.shape[0], -1)
        return last(graph, features, deterministic=rngs is None, rngs=rngs).mean(axis=1)


class SAGE(nnx.Module):
    """Two layers of GraphSAGE with a ReLU between them.

    Args:
      in_features: the width of a node's features.
      hidden: the width between the layers.
      classes: number of logits per node.
      aggregator: see `sage_conv`.
      dropout: dropout rate of each layer's input.
      rngs: flax's streams.

    Reference: Hamilton et al., https://arxiv.org/abs/1706.02216.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        classes: int,
        *,
        aggregator: str = "mean",
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        make = functools.partial(SAGEConv, aggregator=aggregator, feature_dropout=dropout, rngs=rngs)
        self.first = make(in_features, hidden, activation=nnx.relu)
        self.second = make(hidden, classes)

    def __call__(self, graph: Graph | GraphPart, features: Features, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns logits [nodes, classes] of features [nodes, in], sparse ones too."""
        for layer in (self.first, self.second):
            features = layer(graph, features, deterministic=rngs is None, rngs=rngs)
        return features
