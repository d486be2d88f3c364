"""Features of all nodes sharded over devices, and the exchange of rows that a mini-batch reads."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import as_int32_ids, check_axis
from jmp_train.policies import pvary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedFeatures:
    """Rows of all nodes, sharded over the devices along a mesh axis; create it with `shard_features`.

    Put it into the batch; a step of `data_parallel` or `sharded_step` then passes its own shard to each device, and
    `take` fetches rows from all of them. Row i is on device `i % num_shards`, so that nodes with many edges, or of
    the same time, are spread over devices.

    Args:
      rows: [num_shards * rows of a shard, ...]; within `shard_map`, [rows of a shard, ...].
      num_rows: number of rows, without padding.
      num_shards: number of devices with a shard.
      axis_name: the mesh axis.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import PartitionSpec
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> store = shard_features(np.array([[1.0], [2.0], [3.0]], np.float32), mesh)
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
      ... def fetch(store, ids):  # on each device its own ids
      ...     return store.take(ids)
      >>> fetch(store, np.array([2, -1, 0], np.int32)).tolist()
      [[3.0], [0.0], [1.0]]
    """

    rows: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})
    num_shards: int = dataclasses.field(metadata={"static": True})
    axis_name: str = dataclasses.field(metadata={"static": True})

    @property
    def share(self) -> int:
        """Number of rows per device, padding included."""
        return -(-self.num_rows // self.num_shards)

    def take(self, ids: Ids) -> jax.Array:
        """Returns rows by their ids, different ones on each device, within `shard_map` over the mesh axis.

        Devices send one another the ids that they read, and then these rows, in their stored dtype. One round transfers
        as many rows as a device reads from another one on average, and four standard deviations more. If a
        device needs more, all of them run a further round, so no row is lost, whatever the ids.
        Rows are data: they have no gradient, and requesting one under jit raises an error.

        Args:
          ids: int32 [reads]; -1 for padding, which gets 0. Others that are out of range get NaN, as in `jnp.take`.

        Returns:
          [reads, ...].

        Raises:
          TypeError: ids are not integers.
          ValueError: ids have another rank than 1, or it is called outside a mesh axis of that name with a device for
            each shard, or shards were split further.
        """
        ids = as_int32_ids("ids", ids)
        if ids.ndim != 1:
            raise ValueError(f"ids must be [reads], got shape {ids.shape}")
        self._check_share()
        width = (1,) * (self.rows.ndim - 1)
        # a row of zeros, and for ids out of range the fill value of jax
        is_wrong = (ids >= self.num_rows) | (ids < -1)
        found = jnp.zeros((1, *self.rows.shape[1:]), self.rows.dtype).at[is_wrong.astype(jnp.int32)]
        found = pvary(found.get(mode="fill"), (self.axis_name,))
        if ids.size == 0:
            return found
        room = self._room(ids.size)
        is_read = (ids >= 0) & (ids < self.num_rows)
        owners = jnp.where(is_read, ids % self.num_shards, self.num_shards)
        order = jnp.argsort(owners, stable=True)
        starts = jnp.searchsorted(owners[order], jnp.arange(self.num_shards + 1, dtype=owners.dtype))
        turns = jnp.argsort(order).astype(starts.dtype) - starts[owners]  # among the reads of the same owner
        places = (ids // self.num_shards)[order]
        rounds = lax.pmax(-(-jnp.diff(starts).max() // room), self.axis_name)

        def fetch(turn: jax.Array, found: jax.Array) -> jax.Array:
            asked = starts[:-1, None] + turn * room + jnp.arange(room, dtype=starts.dtype)
            wanted = jnp.where(asked < starts[1:, None], places.at[asked].get(mode="clip"), self.share)
            sent = self.rows.at[self._exchanged(wanted)].get(mode="fill", fill_value=0)
            came = self._exchanged(sent).reshape(-1, *self.rows.shape[1:])
            is_here = is_read & (turns // room == turn)
            rows = came.at[owners * room + turns % room].get(mode="clip")
            return jnp.where(is_here.reshape(-1, *width), rows, found)

        return lax.fori_loop(0, rounds, fetch, found)

    def _exchanged(self, rows: jax.Array) -> jax.Array:
        return lax.all_to_all(rows, self.axis_name, split_axis=0, concat_axis=0)

    def _room(self, count: int) -> int:
        """Returns the largest number of rows that a device reads from another one in a round."""
        mean = count / self.num_shards
        return min(count, self.share, math.ceil(mean + 4 * math.sqrt(mean)))

    def _check_share(self) -> None:
        held = "the features have {} shards"
        check_axis(self.axis_name, self.num_shards, "the features are sharded over", "take rows", held)
        if self.rows.shape[0] != self.share:
            raise ValueError(
                f"a device must have its whole shard of {self.share} rows, got {self.rows.shape[0]}: shard the "
                "features only along the mesh axis"
            )


def shard_features(
    features: ArrayLike, mesh: Mesh, axis: str = "data", *, dtype: DTypeLike | None = None
) -> ShardedFeatures:
    """Returns features sharded over the devices along a mesh axis, row by row in turn, for mini-batches.

    A process only reads the rows of its own devices: from a `numpy.memmap`, or another object that slices like an
    array, the others are not loaded.

    Args:
      features: [nodes, ...], the same in all processes.
      mesh: the devices.
      axis: the mesh axis along which batches are split.
      dtype: dtype in which rows are stored and sent; None for the features' own. A half type halves memory and traffic;
        use the policy's compute dtype, to which a policy casts the batch.

    Returns:
      The sharded features, one array over the devices.

    Raises:
      ValueError: there are no rows, or the mesh has no such axis.
      TypeError: the features do not slice to arrays, or `mesh` is not a mesh.

    Example:
      >>> import jax, numpy as np
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> store = shard_features(np.ones((100, 4), np.float32), mesh, dtype=np.float16)
      >>> store.rows.dtype, store.share == -(-100 // mesh.size)
      (dtype('float16'), True)

    Reference: DGL's DistTensor; the distributed feature store of cuGraph-PyG and WholeGraph.
    """
    array: Any = features if hasattr(features, "shape") and hasattr(features, "dtype") else np.asarray(features)
    if len(array.shape) == 0 or array.shape[0] == 0:
        raise ValueError(f"features must be [nodes, ...] of at least one node, got shape {tuple(array.shape)}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if axis not in mesh.shape:
        raise ValueError(f"axis={axis!r} is not one of the mesh's: {', '.join(map(repr, mesh.shape))}")
    stored = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype))
    num_rows, num_shards = array.shape[0], mesh.shape[axis]
    share, width = -(-num_rows // num_shards), tuple(array.shape[1:])

    def rows_of(index: Any) -> np.ndarray:
        shard = (index[0].start or 0) // share
        own = np.asarray(array[shard::num_shards])
        if own.shape != (len(range(shard, num_rows, num_shards)), *width):
            raise TypeError(f"slices of features must be arrays, got {type(features).__name__}")
        rows = np.zeros((share, *width), stored)
        rows[: len(own)] = own
        return rows

    shape = (share * num_shards, *width)
    rows = jax.make_array_from_callback(shape, NamedSharding(mesh, P(axis)), rows_of)
    return ShardedFeatures(rows, num_rows, num_shards, axis)
