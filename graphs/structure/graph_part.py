"""`GraphPart`: a device's part of a graph partitioned by nodes, and the exchange of rows between devices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jmp_train.graphs.structure.block import Block
from jmp_train.graphs.structure.storage import in_float32, upcast


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
        rows = jnp.asarray(features)
        if rows.ndim == 0 or rows.shape[0] != self.num_targets:
            raise ValueError(
                f"features must have {self.num_targets} rows, one for each of the part's own nodes, got shape "
                f"{rows.shape}"
            )
        self._check_axis()

        def own_and_sent(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = upcast(rows)  # so that gradients are summed in float32
            return rows, rows.at[self.sent_rows].get(mode="fill", fill_value=0)

        own, sent = in_float32(own_and_sent, rows)
        halo = lax.all_to_all(sent, self.axis_name, split_axis=0, concat_axis=0)
        return jnp.concatenate([own, halo.reshape(-1, *rows.shape[1:])])

    def _check_axis(self) -> None:
        try:
            size = lax.axis_size(self.axis_name)
        except NameError:
            raise ValueError(
                f"the part belongs to mesh axis {self.axis_name!r}: use it within jax.shard_map over that axis, "
                "or in a step of data_parallel"
            ) from None
        if size != self.num_parts:
            raise ValueError(
                f"mesh axis {self.axis_name!r} has {size} devices, but the graph has {self.num_parts} parts: one "
                "per device is needed"
            )
