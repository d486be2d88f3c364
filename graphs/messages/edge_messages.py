"""`per_edge`: messages made by a function of one edge, which is run for a chunk of edges at a time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels import EdgeIds, Inputs
from jmp_train.graphs.messages.user_functions import EdgeBatch, Fields
from jmp_train.graphs.structure import NOT_APART

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
