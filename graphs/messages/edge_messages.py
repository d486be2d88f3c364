"""`per_edge`: messages made by a function of one edge, run for a chunk of edges at a time, and their reductions."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels import (
    PLACES,
    EdgeIds,
    EdgeOperation,
    Inputs,
    Reductions,
    of_nothing,
    once_if_compared,
    reduce_function,
    reduce_rows,
)
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.messages.user_functions import EdgeBatch, Fields, call_message_function
from jmp_train.graphs.structure import (
    NOT_APART,
    Adjacency,
    graph_storage,
    in_float32,
    upcast,
)

Features = Mapping[str, jax.Array]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Edge:
    """The edge that a function of `per_edge` sees.

    Attributes:
      src: features [...] of the sender by name.
      dst: features [...] of the receiver by name.
      data: features [...] of the edge by name.
      sender: int32, the node that it leaves.
      receiver: int32, the node that it enters.

    Example:
      >>> from jmp_train.graphs import apply_edges, from_edges, per_edge
      >>> graph = from_edges([0, 1], [1, 1], 2)
      >>> is_loop = per_edge(lambda edge: {"self_loop": edge.sender == edge.receiver})
      >>> apply_edges(graph, is_loop).edges["self_loop"].tolist()
      [False, True]
    """

    src: Features
    dst: Features
    data: Features
    sender: jax.Array
    receiver: jax.Array
    _id: jax.Array | None

    @property
    def id(self) -> jax.Array:
        """Int32, the edge's place in the graph.

        Raises:
          ValueError: the graph does not store the places of its edges.
        """
        if self._id is None:
            raise ValueError(f"edge.id: {NOT_APART}")
        return self._id


@dataclasses.dataclass(frozen=True)
class PerEdge:
    """A message that is a function of one edge; see `per_edge`."""

    function: Callable[[Edge], Features]

    def __call__(self, edges: EdgeBatch) -> dict[str, jax.Array]:
        """Returns the messages [edges, ...] of all edges by name."""
        fields = Inputs(edges.data, edges.src, edges.dst)
        read, _ = self.traced(jax.eval_shape(lambda: Inputs(*map(dict, fields))))
        rows = chosen_features(fields, read)
        return self.of_rows(rows, EdgeIds(edges.senders, edges.receivers, edges.ids))

    def of_rows(self, rows: Inputs, ids: EdgeIds) -> dict[str, jax.Array]:
        """Returns the messages [edges, ...] of some edges by name.

        Args:
          rows: the rows to read, [edges, ...] by name.
          ids: ids of the edges.
        """
        return jax.vmap(lambda rows, ids: self._message(Inputs(*map(Fields, _ENDS, rows)), ids))(rows, ids)

    def traced(self, features: Inputs, *, have_places: bool = True) -> tuple[Inputs, Shapes]:
        """Returns the names of the features that it reads, and the shapes of one edge's messages.

        Args:
          features: features of all edges and nodes, arrays or their shapes [rows, ...] by name.
          have_places: whether edges have places of their own.

        Raises:
          KeyError: it reads a feature that is not there.
          TypeError: it returns no dictionary.
        """

        def rows_of(part: Features | Shapes) -> dict[str, jax.ShapeDtypeStruct]:
            return {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in part.items()}

        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        ids = EdgeIds(number, number, number if have_places else None)
        read = Inputs(set(), set(), set())

        def run(rows: Inputs, ids: EdgeIds) -> dict[str, jax.Array]:
            return self._message(Inputs(*map(Fields, _ENDS, rows, map(_noted_in, read))), ids)

        shapes = jax.eval_shape(run, Inputs(*map(rows_of, features)), ids)
        return Inputs(*map(sorted, read)), shapes

    def _message(self, fields: Inputs, ids: EdgeIds) -> dict[str, jax.Array]:
        edge = Edge(fields.senders, fields.receivers, fields.edge, ids.senders, ids.receivers, ids.edges)
        messages = self.function(edge)
        if not isinstance(messages, Mapping):
            kind = type(messages).__name__
            raise TypeError(f"the message function must return a dictionary of arrays, got {kind}")
        return {name: jnp.asarray(x) for name, x in messages.items()}


def chosen_features(features: Inputs, names: Inputs) -> Inputs:
    """Returns some of the features, by name: those that `PerEdge.traced` has found to be read."""
    return Inputs(*({name: part[name] for name in some} for part, some in zip(features, names, strict=True)))


_ENDS = Inputs("edge feature", "sender feature", "receiver feature")


def _noted_in(names: set[str]) -> Callable[[str, jax.Array], jax.Array]:
    """Returns a function that reads features, and adds the names of those that it reads to a set."""

    def read(name: str, feature: jax.Array) -> jax.Array:
        names.add(name)
        return feature

    return read


def per_edge(function: Callable[[Edge], Features]) -> PerEdge:
    """Returns the message of a function of one edge, for `update_all` and similar functions.

    The function sees one edge, `edge.src["h"]` is of the shape of one row, and so cannot mix edges. That allows what
    no look at a function of all edges could show to be right: it is run for a chunk of edges at a time (`jax.vmap`),
    no message is stored, and the gradient runs it again.

    Args:
      function: returns a dictionary of arrays, the messages of an `Edge`. Parameters that it closes over have
        gradients, as all that it reads.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges, per_edge, update_all
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(6.0).reshape(3, 2)})
      >>> @per_edge
      ... def difference(edge):
      ...     return {"m": jax.nn.relu(edge.src["h"] - edge.dst["h"]).sum()}
      >>> update_all(graph, difference, fn.sum("m", "x")).nodes["x"].tolist()
      [8.0, 0.0, 0.0]
    """
    if not callable(function):
        raise TypeError(f"function must be a function of an edge, got {function!r}")
    return PerEdge(function)


Messages = Mapping[str, jax.Array]


def reduce_all(frame: Frame, messages: Messages, reductions: Reductions) -> dict[str, jax.Array]:
    """Returns reductions of the messages of all edges, [receivers, ...] by name.

    Args:
      frame: the edges.
      messages: arrays [edges, ...] by name.
      reductions: which.

    Raises:
      ValueError: a message is missing.
    """
    _check_names(messages, reductions)
    results = {}
    for name in dict.fromkeys(reduce.message for reduce in reductions):
        some = tuple(reduce for reduce in reductions if reduce.message == name)
        reduced = functools.partial(_of_rows, frame.adjacency, some)
        results |= in_float32(reduced, messages[name])
    return results


def _of_rows(adjacency: Adjacency, reductions: Reductions, messages: jax.Array) -> dict[str, jax.Array]:
    return reduce_rows(adjacency, reductions, once_if_compared(reductions, upcast(messages)))


def _by_xla(adjacency: Adjacency, frame: Frame, message: PerEdge, reductions: Reductions) -> dict[str, jax.Array]:
    del adjacency
    return reduce_all(frame, call_message_function(message, frame, None), reductions)


def _traced(frame: Frame, message: PerEdge) -> tuple[Inputs, Shapes]:
    """Returns the features that a message reads, by name, and the shapes of one edge's messages."""
    features = Inputs(frame.data, frame.src, frame.dst)
    read, shapes = message.traced(features, have_places=frame.adjacency.ends is not None)
    return chosen_features(features, read), shapes


def _elements(frame: Frame, message: PerEdge, reductions: Reductions) -> int | None:
    """Returns the size of the largest row that an edge reads or computes; None for messages that are not floats."""
    used, shapes = _traced(frame, message)
    _check_names(shapes, reductions)
    return _largest_row(used, shapes, reductions)


def _largest_row(used: Inputs, shapes: Shapes, reductions: Reductions) -> int | None:
    """Returns `_elements` of a message that was traced already."""
    reduced = [shapes[reduce.message] for reduce in reductions]
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in reduced):
        return None
    read = [x.shape[1:] for x in jax.tree.leaves(used)]
    return max(map(math.prod, [*read, *(x.shape for x in reduced)]))


def _by_chunks(adjacency: Adjacency, frame: Frame, message: PerEdge, reductions: Reductions) -> dict[str, jax.Array]:
    used, shapes = _traced(frame, message)
    edges, count = adjacency.neighbors, adjacency.num_receivers
    assert edges is not None
    if edges.by_target.num_blocks == 0 or not all(x.size for x in jax.tree.leaves((used, shapes))):
        like = {name: ((count, *x.shape), x.dtype) for name, x in shapes.items()}
        return {reduce.out: of_nothing(reduce, *like[reduce.message]) for reduce in reductions}
    results = reduce_function(edges, message.of_rows, used, _largest_row(used, shapes, reductions) or 1, reductions)
    dtypes = {reduce.out: shapes[reduce.message].dtype for reduce in reductions if reduce.reduction not in PLACES}
    return {name: graph_storage(x.astype(dtypes.get(name, x.dtype))) for name, x in results.items()}


def _check_names(messages: Mapping[str, object], reductions: Reductions) -> None:
    for reduce in reductions:
        if reduce.message not in messages:
            known = ", ".join(map(repr, messages))
            raise ValueError(f"{reduce.reduction} needs the message {reduce.message!r}; there are: {known}")


PER_EDGE = EdgeOperation(
    {"xla": _by_xla, "chunked": _by_chunks}, _elements, "reduces messages of floats; these are others"
)
