"""Blocks: the edges that one layer of a mini-batch needs, or that enter a device's part of a graph."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmp_train.graphs.structure.adjacency import FIXED_EDGES, Adjacency
from jmp_train.graphs.structure.csr import host_csr_and_csc
from jmp_train.graphs.structure.edge_order import edge_order, filled, padded_incidence
from jmp_train.graphs.structure.feature_arrays import checked_rows, in_float32, upcast
from jmp_train.graphs.structure.graph import Features
from jmp_train.graphs.structure.hetero_graph import HeteroGraph, hetero_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """Edges from sources to targets, padded, as a pytree that can be passed through jit.

    Layers take it in place of a graph, and turn features [sources, ...] into [targets, ...]. If a layer
    needs the targets' own features, they are the first rows of the sources' features, unless it gets a pair
    (features of the sources, features of the targets). `NeighborSampler` creates blocks. Padding edges
    do not count, as in padded graphs.

    Args:
      connections: the adjacency of sources and targets.
      whole_degrees: int32 [sources] and [targets], number of edges that leave and enter them in the graph from which
        the block was drawn; None if the block is the whole graph.
      edge_ids: int32 [edges], id of each edge in that graph, -1 for padding; None if it was not
        stored.

    Example:
      >>> import numpy as np
      >>> block = padded_block(np.array([0, 2, 3]), np.array([0, 0, 1]), 4, 2, num_edges=8)
      >>> block.num_sources, block.num_targets, block.num_edges, block.in_degrees.tolist()
      (4, 2, 8, [2, 1])
    """

    connections: Adjacency
    whole_degrees: tuple[jax.Array, jax.Array] | None = None
    edge_ids: jax.Array | None = None

    @property
    def num_sources(self) -> int:
        """Number of sources, padding included."""
        return self.connections.num_senders

    @property
    def num_targets(self) -> int:
        """Number of targets, padding included."""
        return self.connections.num_receivers

    @property
    def num_edges(self) -> int:
        """Number of edges, padding included."""
        return self.connections.num_edges

    @property
    def in_degrees(self) -> jax.Array:
        """Int32 [targets], number of edges that enter each target."""
        return self.connections.in_degrees

    @property
    def out_degrees(self) -> jax.Array:
        """Int32 [sources], number of edges that leave each source."""
        return self.connections.out_degrees

    def graph(
        self,
        sources: Features | None = None,
        targets: Features | None = None,
        edges: Features | None = None,
    ) -> HeteroGraph:
        """Returns the block as a graph, for `update_all` and similar functions.

        Args:
          sources: arrays [sources, ...] by name.
          targets: arrays [targets, ...] by name.
          edges: arrays [edges, ...] by name.

        Returns:
          A graph of one edge type, `("source", "sends", "target")`.
        """
        kind = ("source", "sends", "target")
        return hetero_of(
            {kind: self.connections},
            {"source": self.num_sources, "target": self.num_targets},
            {"source": sources or {}, "target": targets or {}},
            {kind: edges or {}},
        )


def padded_block(
    senders: np.ndarray,
    receivers: np.ndarray,
    num_sources: int,
    num_targets: int,
    *,
    num_edges: int,
    most_in: int | None = None,
    most_out: int | None = None,
    has_zero_in_degree: bool | None = None,
    whole_degrees: tuple[np.ndarray, np.ndarray] | None = None,
    edge_ids: np.ndarray | None = None,
) -> Block:
    """Returns a block whose shapes depend only on the counts, with its arrays in the host's memory.

    For more than 16,384 edges, it also has sorted edges for chunked kernels.

    Args:
      senders: int [at most num_edges], places among the sources.
      receivers: int [at most num_edges], places among the targets.
      num_sources: number of sources.
      num_targets: number of targets.
      num_edges: number of edges of the block.
      most_in: largest number of edges of a target; None for `num_edges`.
      most_out: largest number of edges of a source; None for `num_edges`.
      has_zero_in_degree: whether some target, except padding, has no incoming edge; None if unknown.
      whole_degrees: int [at most num_sources] and [at most num_targets], see `Block`.
      edge_ids: int [as senders], see `Block`.
    """
    sources = padded_incidence(senders, num_sources, num_edges, most_out)
    targets = padded_incidence(receivers, num_targets, num_edges, most_in)
    degrees: Any = None
    if whole_degrees is not None:
        counts = (num_sources, num_targets)
        degrees = tuple(filled(*pair, 0) for pair in zip(whole_degrees, counts, strict=True))
    which: Any = None if edge_ids is None else filled(edge_ids, num_edges, -1)
    neighbors = None
    if num_edges > FIXED_EDGES:  # messages of fewer edges take too little memory for chunks
        leaving, entering = filled(senders, num_edges, num_sources), filled(receivers, num_edges, num_targets)
        by_source = edge_order(leaving, entering, num_sources, num_targets)
        by_target = edge_order(entering, leaving, num_targets, num_sources)
        neighbors = host_csr_and_csc(by_source, by_target, have_places=True, is_fixed=True)
    adjacency = Adjacency((sources, targets), neighbors, has_zero_in_degree=has_zero_in_degree)
    return Block(adjacency, degrees, which)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphPart(Block):
    """The rows of nodes that a device owns, and all edges that enter these, within `shard_map` over a mesh axis.

    It is a block whose targets are the device's own rows. Its sources are these, followed by the halo: rows of the
    other devices, with the same number of places for each. Layers take it in place of a graph, with features of the own
    rows, and exchange the rows that they send. `with_halo` does so for `update_all`, `gat_attention` and other
    functions of features of a block's sources. All parts of a graph have the same shapes. `partition` creates them.

    Args:
      is_node: bool [targets], whether a row is a node; the last ones may be padding, which has no edges.
      sent_rows: int32 [parts, most], own rows to send to each device, filled up with the number of targets.
      axis_name: the mesh axis, with a device for each part.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import PartitionSpec
      >>> from jmp_train.graphs import from_edges, partition, unstack
      >>> cut = partition(from_edges([0, 1], [1, 0], 2), 1)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
      ... def sources(parts, features):
      ...     return unstack(parts)[0].with_halo(features)
      >>> sources(cut.parts, cut.take(np.array([3.0, 4.0], np.float32))).tolist()
      [3.0, 4.0]
    """

    is_node: jax.Array
    sent_rows: jax.Array
    axis_name: str = dataclasses.field(metadata={"static": True})

    @property
    def num_parts(self) -> int:
        """Number of parts of the graph."""
        return self.sent_rows.shape[0]

    def with_halo(self, features: ArrayLike) -> jax.Array:
        """Returns the features of the block's sources: those of the own rows, and those from other devices.

        They are sent in the dtype in which they are stored, half under autocast, and so are their
        gradients. Each device then sums its rows' gradients in float32, and rounds once.

        Args:
          features: [targets, ...], features of the device's own rows.

        Returns:
          [sources, ...].

        Raises:
          ValueError: there is another number of rows, or it is called outside a mesh axis of that name with a
            device for each part.
        """
        rows = checked_rows("features", features, self.num_targets, "part's own nodes")
        check_axis(self.axis_name, self.num_parts, "the part belongs to", "use it", "the graph has {} parts")

        def own_and_sent(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = upcast(rows)  # so that gradients are summed in float32
            return rows, rows.at[self.sent_rows].get(mode="fill", fill_value=0)

        own, sent = in_float32(own_and_sent, rows)
        halo = lax.all_to_all(sent, self.axis_name, split_axis=0, concat_axis=0)
        return jnp.concatenate([own, halo.reshape(-1, *rows.shape[1:])])


def check_axis(name: str, count: int, belongs: str, use: str, has: str) -> None:
    """Raises ValueError outside of `shard_map`, or if a mesh axis does not have `count` devices.

    Args:
      name: the mesh axis.
      count: number of parts.
      belongs: what belongs to the axis, for the message.
      use: how to use it.
      has: what has that many parts, and their name.
    """
    try:
        size = lax.axis_size(name)
    except NameError:
        raise ValueError(
            f"{belongs} mesh axis {name!r}: {use} within jax.shard_map over that axis, or in a step of data_parallel"
        ) from None
    if size != count:
        raise ValueError(f"mesh axis {name!r} has {size} devices, but {has.format(count)}: one per device is needed")
