"""Features at both ends of a layer's edges; a block's targets are the first of its sources."""

import dataclasses
import functools
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import jax

from jmp_train.graphs.array_types import EndFeatures
from jmp_train.graphs.layers.dropout import drop
from jmp_train.graphs.layers.layer_inputs import as_floats, promoted
from jmp_train.graphs.structure import Block, Graph, GraphPart, SparseFeatures, first_rows

Axis = int | str | EllipsisType


@dataclasses.dataclass(frozen=True)
class EndRows:
    """Rows of the sending nodes, and of the receiving nodes.

    Attributes:
      given: floating [senders, ...]; for a `GraphPart` only its own rows, so that a layer computes
        each row only once over all devices.
      own_receivers: floating [receivers, ...]; None if they are the first of the senders' rows.
      num_receivers: number of receiving nodes.
      part: exchanges the given rows; None if they are the rows of all senders.
    """

    given: jax.Array
    own_receivers: jax.Array | None
    num_receivers: int
    part: GraphPart | None = None

    @functools.cached_property
    def senders(self) -> jax.Array:
        """The rows [senders, ...] of the sending nodes; those of a part are exchanged once."""
        return self.given if self.part is None else self.part.with_halo(self.given)

    @property
    def receivers(self) -> jax.Array:
        """The rows [receivers, ...] of the receiving nodes."""
        if self.own_receivers is not None:
            return self.own_receivers
        return first_rows(self.given, self.num_receivers)

    def of_receivers(self, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Applies a function to the receivers' rows; sparse rows are all passed through it."""
        if isinstance(self.given, SparseFeatures):
            return first_rows(function(self.given), self.num_receivers)
        return function(self.receivers)

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "EndRows":
        """Applies a function to the rows at both ends, only once if they are shared."""
        own = None if self.own_receivers is None else function(self.own_receivers)
        return dataclasses.replace(self, given=function(self.given), own_receivers=own)

    def dropped(self, rate: float, key: jax.Array | None) -> "EndRows":
        """Returns the rows with entries dropped; shared rows lose the same ones at both ends."""
        if self.own_receivers is None or key is None:
            return self.map(lambda rows: drop(rows, rate, key))
        first, second = jax.random.split(key)
        given, receivers = drop(self.given, rate, first), drop(self.own_receivers, rate, second)
        return dataclasses.replace(self, given=given, own_receivers=receivers)


def end_rows(graph: Graph | Block, features: EndFeatures, *shape: Axis, can_be_sparse: bool = False) -> EndRows:
    """Returns a layer's checked features.

    Args:
      graph: a graph or a block.
      features: floating [senders, *shape], or a pair, of the senders and of the receivers; the senders of a
        `GraphPart` are its own rows.
      *shape: see `as_floats`.
      can_be_sparse: True to accept `SparseFeatures`, except in a pair.

    Raises:
      TypeError: an array is not floating, or features may not be sparse.
      ValueError: a shape does not fit.
    """
    _check_sparse(features, can_be_sparse)
    adjacency = graph.connections
    num_receivers = adjacency.num_receivers
    part = graph if isinstance(graph, GraphPart) else None
    num_given = adjacency.num_senders if part is None else num_receivers
    if isinstance(features, SparseFeatures):
        return EndRows(_sparse_rows(features, num_given, shape[0]), None, num_receivers)
    if not isinstance(features, tuple):
        return EndRows(as_floats("features", features, num_given, *shape), None, num_receivers, part)
    if len(features) != 2:
        raise ValueError(f"features must be one array, or a pair (of senders, of receivers), got {len(features)}")
    given = as_floats("features[0]", features[0], num_given, *shape)
    receivers = as_floats("features[1]", features[1], num_receivers, *given.shape[1:])
    return EndRows(given, receivers, num_receivers, part)


def _check_sparse(features: EndFeatures, can_be_sparse: bool) -> None:
    parts = features if isinstance(features, tuple) else (features,)
    are_sparse = any(isinstance(part, SparseFeatures) for part in parts)
    if are_sparse and not can_be_sparse:
        raise TypeError(
            "features must be an array, got sparse rows: only layers that multiply them by a weight first support those"
        )
    if are_sparse and len(parts) > 1:
        raise TypeError("features: a pair must not have sparse rows")


def _sparse_rows(features: SparseFeatures, rows: int, width: Axis) -> Any:
    """Returns sparse features, which replace an array in a layer; raises ValueError if shapes do not fit."""
    if features.shape[0] != rows or (isinstance(width, int) and features.shape[1] != width):
        raise ValueError(f"features must be [{rows}, {width}], got shape {features.shape}")
    return features


def promoted_with(rows: EndRows, *arrays: jax.Array | None) -> tuple[EndRows, list[Any]]:
    """Returns rows and arrays in their promoted dtype; None stays None."""
    given, receivers, *others = promoted(rows.given, rows.own_receivers, *arrays)
    return dataclasses.replace(rows, given=given, own_receivers=receivers), others
