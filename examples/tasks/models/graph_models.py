"""The models of the graph tasks, layers of `jmp_train.graphs` with activations between them.

They set no dtype: features and parameters determine it, so a policy decides. A model applies dropout
only if it has a rate and its call gets random streams, `rngs=`.
"""

import functools
from collections.abc import Sequence

import jax
from flax import nnx

from jmp_train.graphs import BatchNorm, GATConv, GINConv, GraphConv, SAGEConv, mean_nodes
from jmp_train.graphs.structure import Graph, GraphPart, SparseFeatures, node_mask

Features = jax.Array | SparseFeatures


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
