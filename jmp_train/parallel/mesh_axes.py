"""Axes of meshes and shardings, arrays placed on a mesh, and a check that devices agree on integers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    get_abstract_mesh,
)
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jmp_train.policies import PyTree
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.policies.pytrees import named_leaves
from jmp_train.steps import TrainState, TrainStep, without_sums
from jmp_train.types import Batch, ModelState


def automatic(mesh: Mesh) -> Mesh:
    """Returns the mesh with automatic axes; explicit ones require placed inputs."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):  # a mesh without devices, see `jmp_train.planning`
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)  # pyright: ignore[reportReturnType]
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def surrounding(mesh: Mesh) -> Any:
    """Returns `automatic(mesh)`; in a `shard_map` its mesh, because jax accepts no other there."""
    context = get_abstract_mesh()
    return context if context.manual_axes else automatic(mesh)


def check_axis(axis: object) -> None:
    """Raises TypeError if an axis is not a name, for example if it is shardings that were passed by position."""
    if not isinstance(axis, str):
        raise TypeError(
            f"axis must be the name of a mesh axis, got a {type(axis).__name__}; pass shardings by name: "
            "sharded_step(step, mesh, shardings=shardings)"
        )


def axis_size(mesh: Mesh, axis: str) -> int:
    """Returns the number of devices along a mesh axis; raises TypeError or ValueError if there is no such axis."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    check_axis(axis)
    if axis not in mesh.shape:
        known = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(f"axis={axis!r} is not one of the mesh's: {known}")
    return mesh.shape[axis]


def dimension_over(axis: str, sharding: NamedSharding) -> int:
    """Returns the dimension of an array that is sharded over a mesh axis; -1 if there is none.

    Args:
      axis: the mesh axis.
      sharding: the sharding of the array.
    """
    for dimension, entry in enumerate(sharding.spec):
        if entry == axis or (isinstance(entry, tuple) and axis in entry):
            return dimension
    return -1


def without_axis(axis: str, entry: str | tuple[str, ...] | None) -> Any:
    """Returns an entry of a `PartitionSpec`, or of names like it, without one mesh axis."""
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name != axis) or None
    return None if entry == axis else entry


def on_automatic_axes(tree: PyTree, mesh: Mesh) -> Any:
    """Returns traced arrays of explicitly sharded types as arrays on automatic axes; nothing is moved.

    Args:
      tree: any pytree.
      mesh: the mesh; the arrays are on its devices.
    """
    mesh = automatic(mesh)

    def on_automatic(x: object) -> Any:
        if not isinstance(x, jax.Array):
            return x
        sharding = jax.typeof(x).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return x
        same = jax.shard_map(lambda x: x, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
        return same(x)

    return jax.tree.map(on_automatic, tree)


def has_integers(model_state: ModelState) -> bool:
    """Returns whether a model state has integers or flags other than random keys."""
    return any(_is_whole(x) for x in jax.tree.leaves(model_state))


def check_same_state(parallel: TrainStep, mesh: Mesh, state: TrainState, batch: Batch) -> None:
    """Raises ValueError with the names of integers or flags of the next model state that depend on a device's examples.

    jax determines this in a separate trace. If that trace fails, nothing is raised. Random keys may differ, both
    typed and raw ones (uint32 [..., 2]).

    Args:
      parallel: the step with its axes.
      mesh: the devices.
      state: arrays, traced arrays or shapes.
      batch: the whole batch, with the same requirement.
    """
    if not has_integers(state.model_state):
        return
    (axis,) = parallel.axis_names
    alone, differing = dataclasses.replace(parallel, accumulate_steps=1), []

    def look(state: TrainState, batch: Batch) -> None:
        _, model_state, *_ = alone.local_gradients(
            loss_scale_of(state.opt_state), state.params, state.model_state, batch, state.rng
        )
        for path, x in named_leaves(without_sums(model_state)):
            if _is_whole(x) and axis in jax.typeof(x).manual_axis_type.varying:
                differing.append(f"{path or '(root)'!r} ({x.dtype.name})")

    mapped = jax.shard_map(look, mesh=automatic(mesh), in_specs=(P(), P(axis)), out_specs=P(), axis_names={axis})
    try:
        jax.eval_shape(mapped, state, batch)
    except Exception:  # noqa: BLE001  # of any kind: the step itself is traced without these checks
        return
    if differing:
        raise ValueError(
            f"model_state {', '.join(differing)} depends on a device's own examples and would differ between "
            f"devices, because integers are not averaged. In loss_fn, sum them with lax.psum(x, {axis!r}), or keep "
            "them in a jmp_train.steps.Summed"
        )


def _is_whole(x: ArrayLike) -> bool:
    dtype = getattr(x, "dtype", jnp.float32)
    is_raw_key = dtype == jnp.uint32 and jnp.shape(x)[-1:] == (2,)
    return not is_raw_key and any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.bool_))
