"""GIN for graph classification: each layer's mean over the nodes of a graph adds to the logits."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jmp_train.graphs.layers import GINConv
from jmp_train.graphs.readout import BatchNorm, mean_nodes
from jmp_train.graphs.structure import Graph, GraphStack, node_mask
from jmp_train.policies import Params
from jmp_train.types import ModelState


class GIN(nnx.Module):
    """Layers of GIN: each has an MLP of two products, a batch norm over real nodes and a ReLU.

    Args:
      in_features: the width of a node's features.
      hidden: the width of the layers.
      classes: number of logits per graph.
      layers: number of layers.
      dropout: the dropout rate of each layer's contribution to the logits.
      axis_name: the mesh axis over which batch norms are synchronized; None on one device.
      rngs: flax's streams.

    Reference: Xu et al., How Powerful are Graph Neural Networks?, https://arxiv.org/abs/1810.00826.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        classes: int,
        *,
        layers: int = 4,
        dropout: float = 0.5,
        axis_name: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        widths = [in_features, *[hidden] * layers]
        self.dropout = nnx.Dropout(dropout)
        self.convolutions = nnx.List(
            [
                GINConv(
                    nnx.Sequential(
                        nnx.Linear(width, hidden, rngs=rngs), nnx.relu, nnx.Linear(hidden, hidden, rngs=rngs)
                    ),
                    learn_eps=True,
                )
                for width in widths[:-1]
            ]
        )
        self.norms = nnx.List([BatchNorm(hidden, momentum=0.9, axis_name=axis_name, rngs=rngs) for _ in widths[1:]])
        self.voters = nnx.List([nnx.Linear(width, classes, rngs=rngs) for width in widths])

    def __call__(self, graph: Graph, *, train: bool = False, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns logits [graphs, classes] of a batch whose nodes have features "h".

        Args:
          graph: the batch.
          train: True if batch norms use the batch's statistics, and update the running ones.
          rngs: streams for dropout; None for no dropout.
        """
        h, mask = graph.nodes["h"], node_mask(graph)
        logits = self.voters[0](mean_nodes(graph, h))
        for convolution, norm, voter in zip(self.convolutions, self.norms, self.voters[1:], strict=True):
            h = nnx.relu(norm(convolution(graph, h), use_running_average=not train, mask=mask))
            pooled = self.dropout(mean_nodes(graph, h), deterministic=rngs is None, rngs=rngs)
            logits = logits + voter(pooled)
        return logits


def graph_classifier(
    make: Callable[[jax.Array, str | None], nnx.Module], axis_name: str | None = None
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns the functions of a task for a model that classifies graphs: `init`, `predict` and `loss_fn`.

    A batch has a padded "graph" and the "label" of each of its first graphs; or, for several devices, a stack of such
    graphs, and the labels of all of them.

    Args:
      make: returns the model for a key and the axis of its batch norms; its call takes `(graph, train=False,
        rngs=None)`.
      axis_name: the axis of the batch norms in training.
    """

    @cache  # called later, because it starts the device
    def structure(axis: str | None) -> Any:
        return nnx.split(nnx.eval_shape(lambda key: make(key, axis), jax.random.key(0)), nnx.Param, nnx.BatchStat, ...)

    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, statistics, _ = nnx.split(make(key, None), nnx.Param, nnx.BatchStat, ...)
        return params, statistics

    def model_of(params: Params, model_state: ModelState, axis: str | None) -> Any:
        definition, _, _, streams = structure(axis)
        return nnx.merge(definition, params, model_state, streams)

    def loss_fn(
        params: Params, model_state: ModelState, batch: Mapping[str, Any], rng: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        model = model_of(params, model_state, axis_name)
        rngs = None if rng is None else nnx.Rngs(dropout=rng)
        labels = batch["label"]
        logits = model(batch["graph"], train=True, rngs=rngs)[: len(labels)].astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (nnx.state(model, nnx.BatchStat), None)

    def predict(params: Params, model_state: ModelState, batch: Mapping[str, Any]) -> jax.Array:
        def of_graph(graph: Graph, count: int) -> jax.Array:
            return model_of(params, model_state, None)(graph)[:count]

        graph, count = batch["graph"], len(batch["label"])
        if not isinstance(graph, GraphStack):
            return of_graph(graph, count)
        logits = jax.lax.map(lambda one: of_graph(one, count // len(graph)), graph.graphs)
        return logits.reshape(count, -1)

    return init, predict, loss_fn
