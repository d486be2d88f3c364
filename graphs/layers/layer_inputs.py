"""Checks of layers' arguments: graphs of this library or jraph's, shapes, options and dtypes."""

from collections.abc import Iterable
from types import EllipsisType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import EndFeatures, Floats, Ids, SparseRows
from jmp_train.graphs.structure import Block, Graph, SparseFeatures, common_dtype, from_jraph, node_mask
from jmp_train.policies.pytrees import has_tracers

Word = TypeVar("Word", bound=str)


def as_graph(graph: Graph | Block | jraph.GraphsTuple, features: EndFeatures) -> Graph | Block:
    """Returns a graph of ours or jraph's as ours, and a block unchanged; features in jraph's graphs are ignored.

    Args:
      graph: a graph of ours or jraph's, or a block.
      features: the layer's own, [nodes, ...], which determine the number of nodes of jraph's graphs under jit.

    Raises:
      TypeError: it is of another kind.
    """
    if isinstance(graph, jraph.GraphsTuple):
        nodes = jnp.asarray(cast(Any, features)) if has_tracers(graph.n_node) else None
        return from_jraph(graph._replace(nodes=nodes, edges=None, globals=None))
    if not isinstance(graph, Graph | Block):
        kind = type(graph).__name__
        raise TypeError(f"graph must be a Graph, a Block or a jraph.GraphsTuple, got {kind}")
    return graph


def as_floats(name: str, array: Floats | SparseRows, *shape: int | str | EllipsisType) -> jax.Array:
    """Returns a checked array.

    Args:
      name: the argument's name, for messages.
      array: an array of floats.
      *shape: the expected axes: a length, the name of any length, or, last, any axes.

    Raises:
      TypeError: it is not floating.
      ValueError: it has another shape.
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
    is_traced = has_tracers(edge_types)
    array = cast(Any, edge_types) if is_traced else np.asarray(edge_types)
    num_edges = graph.connections.receivers.num_edges
    if array.shape != (num_edges,):
        raise ValueError(f"edge_types must be [{num_edges}], got shape {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.integer) and num_edges:  # an empty list is float64
        raise TypeError(f"edge_types must be integers, got {array.dtype}")
    if not is_traced:
        wrong = (array < 0) | (array >= num_types)
        if wrong.any():
            edge = int(wrong.argmax())
            raise ValueError(f"edge_types[{edge}] = {array[edge]} is out of range for {num_types} types")
    return jnp.asarray(array, jnp.int32)


def as_optional(name: str, array: Floats | None, *shape: int | str | EllipsisType) -> jax.Array | None:
    """Returns an array as `as_floats` does, or None."""
    return None if array is None else as_floats(name, array, *shape)


def checked_word(name: str, word: str, words: Iterable[Word]) -> Word:
    """Returns an argument that is one of some words; raises ValueError if it is another."""
    known = list(words)
    for each in known:
        if each == word:
            return each
    raise ValueError(f"{name}={word!r} must be one of {', '.join(map(repr, known))}")


def check_in_degrees(graph: Graph | Block, allow_zero_in_degree: bool) -> None:
    """Raises ValueError if some node is known to have no incoming edge, and that is not allowed."""
    if not allow_zero_in_degree and _has_zero_in_degree(graph):
        raise ValueError(
            "some nodes have no incoming edges, so their results would not depend on their features: add "
            "self-loops, or pass allow_zero_in_degree=True"
        )


def _has_zero_in_degree(graph: Graph | Block) -> bool | None:
    """Returns whether some node, except padding, has no incoming edge; None if that is unknown."""
    known = graph.connections.has_zero_in_degree
    if known is not None or isinstance(graph, Block) or not graph.is_padded:
        return known
    if has_tracers((graph.in_degrees, graph.n_node)):
        return None
    return bool((node_mask(graph) & (graph.in_degrees == 0)).any())


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
