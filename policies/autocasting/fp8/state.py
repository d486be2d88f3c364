"""The state of delayed scaling: scales and histories of the largest magnitudes, beside the model's own state.

All functions are pure. Of gradients, which carry the loss scale, magnitudes are kept without it, so that nothing has to
follow where it moves.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.policies.autocasting.fp8.quantizing import scale_of
from jmp_train.policies.autocasting.fp8.recipes import DelayedScaling
from jmp_train.policies.pytrees import Largest


class Fp8Scales(NamedTuple):
    """Scales and histories by the places of the products in 8 bits; each in the order lhs, rhs, gradient.

    Attributes:
      scale: float32 [3].
      amax_history: float32 [3, amax_history_len], the largest magnitudes of the steps before, the latest first.
      amax: float32 [3], those of the micro-batches so far; zeros between steps.

    Example:
      >>> import jax.numpy as jnp
      >>> Fp8Scales({"dot": jnp.ones(3)}, {"dot": jnp.zeros((3, 16))}, {"dot": jnp.zeros(3)}).scale["dot"].shape
      (3,)
    """

    scale: dict[str, jax.Array]
    amax_history: dict[str, jax.Array]
    amax: dict[str, jax.Array]


class Fp8State(NamedTuple):
    """A model state with the state of delayed scaling beside it, as `with_fp8_state` makes it.

    Attributes:
      fp8: the `Fp8Scales`, in `fp8.value`; of several devices' the largest count.
      model_state: what the loss function takes and returns as its model state.

    Example:
      >>> fp8_state(["dot"], DelayedScaling(amax_history_len=16), None).fp8.value.amax_history["dot"].shape
      (3, 16)
    """

    fp8: Largest
    model_state: Any


def fp8_state(places: Any, recipe: DelayedScaling, model_state: Any) -> Fp8State:
    """Returns the state before the first step, with scales of 1 and empty histories, as Transformer Engine's are.

    Args:
      places: of the products in 8 bits.
      recipe: which says how long the histories are.
      model_state: the model's own.
    """
    histories = {place: jnp.zeros((3, recipe.amax_history_len)) for place in places}
    ones, zeros = ({place: fill(3) for place in histories} for fill in (jnp.ones, jnp.zeros))
    return Fp8State(Largest(Fp8Scales(ones, histories, zeros)), model_state)


def scales_of(state: Fp8State, extents: Mapping[str, tuple[int, ...]], factor: jax.Array) -> dict[str, jax.Array]:
    """Returns what a region's products are given as scales.

    Args:
      state: the state.
      extents: by the place of each product of the program, the lengths of the loops that it is in.
      factor: what the gradients of this program are multiplied by, the loss scale above all.

    Raises:
      ValueError: the state is that of other products; the message names some.
    """
    scale = state.fp8.value.scale
    if scale.keys() != extents.keys():
        missing, unknown = sorted(extents.keys() - scale.keys()), sorted(scale.keys() - extents.keys())
        raise ValueError(
            f"the fp8 state does not fit the model and its rules: {missing[:3]} are missing, {unknown[:3]} are "
            "unknown; make a new one with with_fp8_state"
        )
    one = jnp.ones((), jnp.float32)
    divisor = jnp.stack([one, one, factor])
    return {place: jnp.broadcast_to(scale[place] / divisor, (*lengths, 3)) for place, lengths in extents.items()}


def with_magnitudes(
    state: Fp8State, magnitudes: Mapping[str, jax.Array], factor: jax.Array, model_state: Any
) -> Fp8State:
    """Returns the state after a micro-batch.

    Args:
      state: the state before.
      magnitudes: "gradients" of what `scales_of` returned.
      factor: as `scales_of` got it.
      model_state: the model's own, after that micro-batch.
    """
    one = jnp.ones((), jnp.float32)
    divisor = jnp.stack([one, one, factor])
    scales: Fp8Scales = state.fp8.value

    def largest(place: str, before: jax.Array) -> jax.Array:
        found = magnitudes[place]
        return jnp.maximum(before, found.max(tuple(range(found.ndim - 1)), initial=0.0) / divisor)

    amax = {place: largest(place, before) for place, before in scales.amax.items()}
    return Fp8State(Largest(scales._replace(amax=amax)), model_state)


def after_step(state: Fp8State, recipe: DelayedScaling) -> Fp8State:
    """Returns the state after a step: magnitudes enter the histories, and make the next scales.

    Of an operand whose magnitude is infinite or NaN history and scale stay as they are, in any step.

    Args:
      state: with the largest magnitudes of all micro-batches and devices.
      recipe: how scales are made of histories.
    """
    scales: Fp8Scales = state.fp8.value
    dtypes = recipe.forward_dtype, recipe.forward_dtype, recipe.backward_dtype
    next_scale, histories = {}, {}
    for place, amax in scales.amax.items():
        history, old = scales.amax_history[place], scales.scale[place]
        usable = jnp.isfinite(amax)
        pushed = jnp.concatenate([amax[:, None], history[:, :-1]], axis=1)
        histories[place] = jnp.where(usable[:, None], pushed, history)
        latest = pushed.max(axis=1) if recipe.amax_compute_algo == "max" else amax
        found = [scale_of(latest[i], dtype, recipe.margin, old[i]) for i, dtype in enumerate(dtypes)]
        next_scale[place] = jnp.where(usable, jnp.stack(found), old)
    zeros = jax.tree.map(jnp.zeros_like, scales.amax)
    return Fp8State(Largest(Fp8Scales(next_scale, histories, zeros)), state.model_state)
