"""`Summed`: parts of a model state that devices add instead of averaging, such as counts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jmp_train.policies.pytrees import is_inexact_array, sum_over_axes, upcast_to_float32
from jmp_train.types import ModelState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summed:
    """A part of the model state that counts examples: devices add what each of them has added to it.

    Floating parts of a model state are averaged over devices. That is right for means, but a count, or a sum, of the
    whole batch is the sum of those of the devices. On one device it is only a container. A step must add to the value:
    one that starts it again needs `decay=0`.

    Args:
      value: pytree of arrays.
      decay: the factor of the old value in the new one; below 1 for moving averages. Integers need 1.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> def loss_fn(w, seen, batch, rng):
      ...     seen = jt.steps.Summed(0.5 * seen.value + 0.5 * batch.size, decay=0.5)
      ...     return (w * batch).mean(), (seen, None)
      >>> optimizer, mesh = optax.sgd(0.1), jax.sharding.Mesh(jax.devices(), ("data",))
      >>> step = jt.data_parallel(jt.train_step(loss_fn, optimizer), mesh)
      >>> state = jt.TrainState.create(jnp.ones(()), optimizer, model_state=jt.steps.Summed(jnp.zeros(()), decay=0.5))
      >>> state, _ = step(state, jnp.ones(2 * mesh.size))
      >>> float(state.model_state.value) == mesh.size
      True
    """

    value: Any
    decay: float = dataclasses.field(default=1.0, metadata={"static": True})


def with_device_sums(new: ModelState, old: ModelState, axis_names: Sequence[str], micro_batches: int) -> Any:
    """Returns the model state of a device with all devices' additions to its `Summed` parts.

    Args:
      new: the state after the device's examples.
      old: the state before, the same on all devices.
      axis_names: mesh axes over which the batch is split.
      micro_batches: the number of times that the device has updated the state.
    """

    def add(new: Any, old: Any) -> Any:
        if not isinstance(new, Summed):
            return new
        factor = new.decay**micro_batches

        def total(x: jax.Array, y: jax.Array) -> Any:
            wide, kept = upcast_to_float32(x), upcast_to_float32(y)
            kept = kept * factor if is_inexact_array(y) else kept
            return (kept + sum_over_axes(wide - kept, axis_names)).astype(x.dtype)

        return Summed(jax.tree.map(total, new.value, old.value), new.decay)

    return jax.tree.map(add, new, old, is_leaf=_is_summed)


def without_sums(model_state: ModelState) -> Any:
    """Returns a model state with None in place of its `Summed` parts."""
    return jax.tree.map(lambda x: None if _is_summed(x) else x, model_state, is_leaf=_is_summed)


def _is_summed(x: object) -> bool:
    return isinstance(x, Summed)
