"""The layer of APPNP: personalized PageRank of predictions, by a few hops with restarts."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.gcn import NORMS
from jmp_train.graphs.layers.layer import DropoutKeys, Layer
from jmp_train.graphs.layers.propagation import propagate
from jmp_train.graphs.structure import AnyBatch, checked_word


def appnp_conv(
    graph: AnyBatch,
    features: Floats,
    k: int = 10,
    alpha: float = 0.1,
    *,
    norm: str = "both",
    edge_weight: Floats | None = None,
    edge_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns features after `k` hops of `(1 - alpha) * neighbors + alpha * features`; see `propagate`.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used; best with self-loops.
      features: floating [nodes, ...], such as the predictions of a network for each node separately.
      k: number of hops.
      alpha: the fraction of the first features in each hop, in [0, 1]; the restart probability of a random walk.
      norm: see `graph_conv`.
      edge_weight: see `propagate`.
      edge_dropout: see `propagate`.
      dropout_key: see `propagate`.

    Returns:
      [nodes, ...] in the features' dtype; half under autocast.

    Raises:
      ValueError: see `propagate`.
      TypeError: see `propagate`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> pair = from_edges([0, 1], [1, 0], 2)
      >>> appnp_conv(pair, jnp.array([0.0, 1.0]), k=1, alpha=0.25).tolist()
      [0.75, 0.25]

    Reference: Klicpera et al., Predict then Propagate: Graph Neural Networks meet Personalized PageRank,
    https://arxiv.org/abs/1810.05997; DGL's APPNPConv.
    """
    return propagate(
        graph,
        features,
        k,
        alpha=alpha,
        norm=norm,
        edge_weight=edge_weight,
        edge_dropout=edge_dropout,
        dropout_key=dropout_key,
    )


class APPNPConv(Layer, of=appnp_conv):
    """The layer of `appnp_conv`: `layer(graph, features, edge_weight=None)`. It has no parameters.

    Args:
      k: see `appnp_conv`.
      alpha: see `appnp_conv`.
      edge_dropout: see `propagate`; `train` and `eval` switch it on and off.
      norm: see `graph_conv`.
      dtype: dtype to which features are cast; None for their own.
      rngs: flax's random streams; "dropout" is used, and required if the rate is not 0.

    Raises:
      ValueError: the rate is not in [0, 1), has no streams, or `norm` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> APPNPConv(k=3, alpha=0.2)(graph, jnp.ones((3, 4), jnp.float16)).dtype.name
      'float16'
    """

    def __init__(
        self,
        k: int = 10,
        alpha: float = 0.1,
        *,
        edge_dropout: float = 0.0,
        norm: str = "both",
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        checked_word("norm", norm, NORMS)
        self.k = k
        self.alpha = alpha
        self.norm = norm
        self.dtype = dtype
        self.edge_dropout = edge_dropout
        self.dropout_keys = DropoutKeys(rngs, edge_dropout=edge_dropout)

    def __call__(
        self,
        graph: AnyBatch,
        features: Floats,
        edge_weight: Floats | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Returns the features after all hops, [nodes, ...].

        Args:
          graph: see `appnp_conv`.
          features: see `appnp_conv`.
          edge_weight: see `propagate`.
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """
        dropout = self.dropout_keys(deterministic, rngs)
        return self.call(graph, self.cast(features), edge_weight=edge_weight, **dropout)
