"""Checks that integers and flags of the model state are the same on all devices, because they have no mean."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jmp_train.parallel.mesh_axes import automatic
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.policies.pytrees import named_leaves
from jmp_train.steps import TrainState, TrainStep
from jmp_train.types import Batch, ModelState


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
      batch: the whole batch, likewise.
    """
    if not has_integers(state.model_state):
        return
    (axis,) = parallel.axis_names
    alone, differing = dataclasses.replace(parallel, accumulate_steps=1), []

    def look(state: TrainState, batch: Batch) -> None:
        _, model_state, *_ = alone.local_gradients(
            loss_scale_of(state.opt_state), state.params, state.model_state, batch, state.rng
        )
        for path, x in named_leaves(model_state):
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
            f"devices, because integers are not averaged. In loss_fn, sum them with lax.psum(x, {axis!r}), or "
            "count in float32"
        )


def _is_whole(x: ArrayLike) -> bool:
    dtype = getattr(x, "dtype", jnp.float32)
    is_raw_key = dtype == jnp.uint32 and jnp.shape(x)[-1:] == (2,)
    return not is_raw_key and any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.bool_))
