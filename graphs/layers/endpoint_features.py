"""The features at both ends of a layer's edges: of a graph the same, of a block the first rows of the sources'."""

import dataclasses
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import jax

from jmp_train.graphs.array_types import EndFeatures
from jmp_train.graphs.layers.dropout import drop
from jmp_train.graphs.layers.layer_inputs import as_floats, promoted
from jmp_train.graphs.structure import Block, Graph, first_rows

Axis = int | str | EllipsisType


@dataclasses.dataclass(frozen=True)
class EndRows:
    """Rows of the nodes that send, and of those that receive.

    Attributes:
      sources: floating [sources, ...].
      own_targets: floating [targets, ...]; None where they are the first of the sources'.
      num_targets: how many nodes there are to receive.
    """

    sources: jax.Array
    own_targets: jax.Array | None
    num_targets: int

    @property
    def targets(self) -> jax.Array:
        """The rows [targets, ...] of the nodes that receive."""
        if self.own_targets is not None:
            return self.own_targets
        return first_rows(self.sources, self.num_targets)

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "EndRows":
        """Returns what a function makes of the rows at either end, computed once where they are shared."""
        own = None if self.own_targets is None else function(self.own_targets)
        return EndRows(function(self.sources), own, self.num_targets)

    def dropped(self, rate: float, key: jax.Array | None) -> "EndRows":
        """Returns the rows with entries dropped; shared rows lose the same ones at both ends."""
        if self.own_targets is None or key is None:
            return self.map(lambda rows: drop(rows, rate, key))
        first, second = jax.random.split(key)
        sources, targets = drop(self.sources, rate, first), drop(self.own_targets, rate, second)
        return EndRows(sources, targets, self.num_targets)


def end_rows(graph: Graph | Block, features: EndFeatures, *shape: Axis) -> EndRows:
    """Returns a layer's features, checked.

    Args:
      graph: a graph or a block.
      features: floating [sources, *shape], or a pair, of the sources and of the targets.
      *shape: see `as_floats`.

    Raises:
      TypeError: an array has no floats.
      ValueError: a shape does not fit.
    """
    adjacency = graph.connections
    num_sources, num_targets = adjacency.num_sources, adjacency.num_targets
    if not isinstance(features, tuple):
        return EndRows(as_floats("features", features, num_sources, *shape), None, num_targets)
    if len(features) != 2:
        raise ValueError(f"features must be one array or a pair, of sources and of targets, got {len(features)}")
    sources = as_floats("features[0]", features[0], num_sources, *shape)
    return EndRows(
        sources,
        as_floats("features[1]", features[1], num_targets, *sources.shape[1:]),
        num_targets,
    )


def promoted_with(rows: EndRows, *arrays: jax.Array | None) -> tuple[EndRows, list[Any]]:
    """Returns rows and arrays in the dtype that theirs promote to; None stays None."""
    sources, targets, *others = promoted(rows.sources, rows.own_targets, *arrays)
    return EndRows(sources, targets, rows.num_targets), others
