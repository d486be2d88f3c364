"""What user-defined functions see: a batch of edges, and a batch of nodes with their mailbox."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.accumulation import Incidence
from jmp_train.graphs.storage import wide


class Fields(Mapping[str, jax.Array]):
    """Features by name, read for some rows when they are asked for.

    Args:
      kind: what they are, for messages.
      features: arrays [rows, ...] by name.
      end: which of the rows each edge reads, with gradients that are added in float32; None for all.
    """

    def __init__(
        self, kind: str, features: Mapping[str, jax.Array], end: Incidence | None = None
    ) -> None:
        self._kind, self._features, self._end = kind, features, end

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self._features:
            known = ", ".join(map(repr, self._features)) or "none"
            raise KeyError(f"no {self._kind} {name!r}; there are: {known}")
        feature = self._features[name]
        if self._end is None:
            return feature
        return self._end.read(wide(feature)).astype(feature.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)


@dataclasses.dataclass(frozen=True)
class EdgeBatch:
    """The edges that a message function sees.

    Attributes:
      src: features [edges, ...] of the senders by name.
      dst: features [edges, ...] of the receivers by name.
      data: features [edges, ...] of the edges by name.
      senders: int32 [edges].
      receivers: int32 [edges].
      ids: int32 [edges], the edges' places in the graph.

    Example:
      >>> from jmp_train.graphs import apply_edges, from_edges
      >>> graph = from_edges([0, 1], [1, 1], 2)
      >>> apply_edges(graph, lambda edges: {"loop": edges.senders == edges.receivers}).edges["loop"]
      Array([False,  True], dtype=bool)
    """

    src: Mapping[str, jax.Array]
    dst: Mapping[str, jax.Array]
    data: Mapping[str, jax.Array]
    senders: jax.Array
    receivers: jax.Array
    ids: jax.Array

    def edges(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns senders, receivers and ids, each int32 [edges]."""
        return self.senders, self.receivers, self.ids

    def batch_size(self) -> int:
        """Returns the number of edges."""
        return self.ids.shape[0]

    def __len__(self) -> int:
        return self.batch_size()


@dataclasses.dataclass(frozen=True)
class NodeBatch:
    """The nodes that a reduce or apply function sees, all of one in-degree where there is a mailbox.

    Attributes:
      data: features [nodes, ...] by name.
      mailbox: messages [nodes, degree, ...] by name, those of a node by ascending edge id.
      ids: int32 [nodes], the nodes' places in the graph.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges, update_all
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
      >>> last = lambda nodes: {"last": nodes.mailbox["m"][:, -1]}
      >>> update_all(graph, fn.copy_u("h", "m"), last).nodes["last"].tolist()
      [2.0, 0.0, 1.0]
    """

    data: Mapping[str, jax.Array]
    mailbox: Mapping[str, jax.Array]
    ids: jax.Array

    def nodes(self) -> jax.Array:
        """Returns the nodes' places in the graph, int32 [nodes]."""
        return self.ids

    def batch_size(self) -> int:
        """Returns the number of nodes."""
        return self.ids.shape[0]

    def __len__(self) -> int:
        return self.batch_size()


def make_node_batch(
    data: Mapping[str, jax.Array], ids: jax.Array, mailbox: Mapping[str, jax.Array] | None = None
) -> NodeBatch:
    """Returns the batch of these nodes, whose features and messages are named where one is missed."""
    return NodeBatch(Fields("node feature", data), Fields("message", mailbox or {}), ids)


EdgeFunction = Callable[[EdgeBatch], Mapping[str, jax.Array]]
NodeFunction = Callable[[NodeBatch], Mapping[str, jax.Array]]


def checked_results(name: str, results: Any, rows: int) -> dict[str, jax.Array]:
    """Returns what a user-defined function gave, checked.

    Args:
      name: of the function, for messages.
      results: what should be arrays [rows, ...] by name.
      rows: how many rows each should have.

    Raises:
      TypeError: it is no dictionary.
      ValueError: an array has another number of rows.
    """
    if not isinstance(results, Mapping):
        kind = type(results).__name__
        raise TypeError(f"the {name} function must return a dictionary of arrays, got {kind}")
    arrays = {key: jnp.asarray(value) for key, value in results.items()}
    for key, array in arrays.items():
        if array.ndim == 0 or array.shape[0] != rows:
            raise ValueError(
                f"the {name} function's {key!r} must have {rows} rows, got shape {array.shape}"
            )
    return arrays


def apply_to_nodes(
    function: NodeFunction, nodes: Mapping[str, jax.Array], count: int
) -> dict[str, jax.Array]:
    """Returns what a user-defined function makes of all nodes, checked; see `checked_results`."""
    return checked_results("node", function(make_node_batch(nodes, jnp.arange(count))), count)
