"""Checks of layers' arguments: graphs, features at both ends of edges, shapes, options and dtypes."""

import dataclasses
import functools
from collections.abc import Callable
from types import EllipsisType
from typing import Any, cast

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats, Ids
from jmp_train.graphs.layers.dense import drop
from jmp_train.graphs.structure import (
    Block,
    Graph,
    GraphPart,
    SparseFeatures,
    as_int32_ids,
    common_dtype,
    first_rows,
    from_jraph,
    known_ids,
    node_mask,
)
from jmp_train.policies.pytrees import has_tracers

# Features of all nodes, or of those that send and those that receive.
EndFeatures = Floats | SparseFeatures | tuple[Floats, Floats]

AnyEdges = Graph | Block | jraph.GraphsTuple
Axis = int | str | EllipsisType


def as_graph(graph: AnyEdges, features: EndFeatures) -> Graph | Block:
    """Returns a graph of ours or jraph's as ours, and a block unchanged; features in jraph's graphs are ignored.

    Args:
      graph: a graph of ours or jraph's, or a block.
      features: the layer's own, [nodes, ...], which determine the number of nodes of jraph's graphs under jit.

    Raises:
      TypeError: the graph is of another kind.
    """
    if isinstance(graph, jraph.GraphsTuple):
        nodes = jnp.asarray(cast(Any, features)) if has_tracers(graph.n_node) else None
        return from_jraph(graph._replace(nodes=nodes, edges=None, globals=None))
    if not isinstance(graph, Graph | Block):
        kind = type(graph).__name__
        raise TypeError(f"graph must be a Graph, a Block or a jraph.GraphsTuple, got {kind}")
    return graph


def as_floats(name: str, array: Floats | SparseFeatures, *shape: int | str | EllipsisType) -> jax.Array:
    """Returns a checked array.

    Args:
      name: the argument's name, for messages.
      array: an array of floats.
      *shape: the expected axes: a length, the name of any length, or, last, any axes.

    Raises:
      TypeError: the array is not floating.
      ValueError: the array has another shape.
    """
    if array is None:
        raise TypeError(f"{name} must be floats, got None")
    array = jnp.asarray(cast(Floats, array))  # sparse features were handled before
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floats, got {array.dtype}")
    axes = [axis for axis in shape if axis is not ...]
    has_rank = array.ndim >= len(axes) if ... in shape else array.ndim == len(axes)
    if not has_rank or any(
        isinstance(axis, int) and axis != length for axis, length in zip(axes, array.shape, strict=False)
    ):
        wanted = ", ".join("..." if axis is ... else str(axis) for axis in shape)
        raise ValueError(f"{name} must be [{wanted}], got shape {array.shape}")
    return array


def as_edge_weight(graph: Graph | Block, edge_weight: Floats | None) -> jax.Array | None:
    """Returns checked weights [edges], or None.

    Raises:
      TypeError: they are not floating.
      ValueError: they have another shape.
    """
    if edge_weight is None:
        return None
    return as_floats("edge_weight", edge_weight, graph.connections.receivers.num_edges)


def as_edge_features(graph: Graph | Block, features: Floats, width: int | str = "width") -> jax.Array:
    """Returns checked features [edges, width].

    Raises:
      TypeError: they are not floating.
      ValueError: they have another shape.
    """
    return as_floats("edge_features", features, graph.connections.receivers.num_edges, width)


def as_edge_types(graph: Graph | Block, edge_types: Ids, num_types: int) -> jax.Array:
    """Returns checked types int32 [edges]; the values of traced types are not checked.

    Args:
      graph: a graph or a block.
      edge_types: int [edges].
      num_types: number of types.

    Raises:
      TypeError: they are not integers.
      ValueError: they have another shape, or one of them is out of range; the message names the edge.
    """
    num_edges = graph.connections.receivers.num_edges
    array: Any = edge_types if has_tracers(edge_types) else np.asarray(edge_types)
    if array.shape != (num_edges,):
        raise ValueError(f"edge_types must be [{num_edges}], got shape {array.shape}")
    if not has_tracers(array):
        array = known_ids("edge_types", array, num_types, "types")
    return as_int32_ids("edge_types", array)


def as_optional(name: str, array: Floats | None, *shape: int | str | EllipsisType) -> jax.Array | None:
    """Returns an array as `as_floats` does, or None."""
    return None if array is None else as_floats(name, array, *shape)


def checked_residual(residual: bool, weight: Floats | None, width: int, out: int) -> jax.Array | None:
    """Returns the weight of a layer's residual, or None.

    Args:
      residual: whether there is a residual.
      weight: floating [width, out]; None if both are equal.
      width: width of the features.
      out: width of the result.

    Raises:
      ValueError: the shape does not fit, or there is a weight without a residual.
      TypeError: the array is not floating.
    """
    if weight is not None and not residual:
        raise ValueError("residual_weight needs residual=True")
    if residual and weight is None and width != out:
        raise ValueError(
            f"residual=True adds features of width {width} to {out}: residual_weight [{width}, {out}] is needed"
        )
    return as_optional("residual_weight", weight, width, out)


def check_in_degrees(graph: Graph | Block, allow_zero_in_degree: bool) -> None:
    """Raises ValueError if some node, except padding, is known to have no incoming edge, and that is not allowed."""
    has_some = graph.connections.has_zero_in_degree
    if has_some is None and isinstance(graph, Graph) and graph.is_padded:
        is_known = not has_tracers((graph.in_degrees, graph.n_node))
        has_some = is_known and (node_mask(graph) & (graph.in_degrees == 0)).any()
    if has_some and not allow_zero_in_degree:
        raise ValueError(
            "some nodes have no incoming edges, so their results would not depend on their features: add "
            "self-loops, or pass allow_zero_in_degree=True"
        )


def promoted(*arrays: jax.Array | None) -> list[Any]:
    """Returns arrays in their promoted dtype; None stays None."""
    return in_dtype(common_dtype(*(x.dtype for x in arrays if x is not None)), *arrays)


def in_dtype(dtype: DTypeLike | None, *arrays: EndFeatures | None) -> list[Any]:
    """Returns arrays, or pairs of them, in a dtype, or unchanged without one; None stays None."""
    if dtype is None:
        return list(arrays)
    return [_in_dtype(dtype, x) for x in arrays]


def _in_dtype(dtype: DTypeLike, array: Any) -> Any:
    if array is None:
        return None
    if isinstance(array, tuple):
        return tuple(in_dtype(dtype, *array))
    return array.astype(dtype) if isinstance(array, SparseFeatures) else jnp.asarray(array, dtype)


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
