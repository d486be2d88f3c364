"""Axes of meshes and shardings, arrays placed on a mesh, and a check that devices agree on integers."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    Sharding,
    get_abstract_mesh,
    use_abstract_mesh,
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


def on_same_devices(sharding: Sharding, wanted: NamedSharding) -> bool:
    """Returns whether a sharding is over the same devices as another, whatever its spec; explicit axes do not count."""
    return (
        isinstance(sharding, NamedSharding)
        and sharding.device_set == wanted.device_set
        and AxisType.Explicit not in sharding.mesh.axis_types
    )


def placed(
    tree: PyTree,
    shardings: PyTree,
    suffices: Callable[[Sharding, NamedSharding], bool] = operator.eq,
) -> Any:
    """Returns a tree with its arrays moved to a mesh, so that one compiled program also takes arrays from elsewhere.

    On a mesh over several processes nothing is moved, because jit takes an array of one process as equal in all of
    them.

    Args:
      tree: jax arrays that are not traced, or NumPy arrays; other leaves stay.
      shardings: a `NamedSharding` for all leaves, or a tree or prefix tree of them.
      suffices: `suffices(sharding, wanted)` returns whether a jax array may stay where it is.
    """
    leaves, structure = jax.tree.flatten(tree)
    where = jax.tree.leaves(jax.tree.broadcast(shardings, tree))
    if any(sharding.mesh.is_multi_process for sharding in where[:1]):
        return tree

    def is_there(x: object, wanted: NamedSharding) -> bool:
        if isinstance(x, jax.Array):
            return suffices(x.sharding, wanted)
        return not isinstance(x, np.ndarray)

    away = [i for i, x in enumerate(leaves) if not is_there(x, where[i])]
    moved = jax.device_put([leaves[i] for i in away], [where[i] for i in away])
    for i, x in zip(away, moved, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def without_axis(axis: str, entry: str | tuple[str, ...] | None) -> Any:
    """Returns an entry of a `PartitionSpec`, or of names like it, without one mesh axis."""
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name != axis) or None
    return None if entry == axis else entry


@contextlib.contextmanager
def over(mesh: Mesh) -> Iterator[None]:
    """A context in which jax shards over this mesh with automatic axes, whatever mesh `jax.set_mesh` has set.

    It has no effect if no mesh is set, nor within a `shard_map`.

    Raises:
      ValueError: `jax.set_mesh` has set a mesh with another number of devices, which jax cannot replace.
    """
    context, wanted = get_abstract_mesh(), automatic(mesh).abstract_mesh
    if context.empty or context.manual_axes or context == wanted:
        yield
        return
    if context.size != wanted.size:
        raise ValueError(
            f"jax.set_mesh has set a mesh of {context.size} devices, but the step's mesh has {wanted.size}; set "
            "the same mesh or none"
        )
    with use_abstract_mesh(wanted):
        yield


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
