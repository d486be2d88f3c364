"""Delayed scaling: the scales that an autocast region gets from outside, one set per product, and their state.

A product is identified by its place in the program. If a loop or several devices run a product several times, its
scales have one row per run. The "gradients" of the scales are the largest magnitudes in the product, so each run
returns its own. Gradients of shared scales would be added up. The state holds scales and histories of the largest
magnitudes, next to the model's own state; all functions of it are pure. Magnitudes of gradients are stored
without the loss scale, so they stay valid when it changes.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.policies.autocasting.fp8.casting import scale_of
from jmp_train.policies.autocasting.fp8.recipes import DelayedScaling
from jmp_train.policies.pytrees import Largest

_BODY = ":"  # separates the place of a body from places within it; no scope contains it
_SEPARATORS = re.compile(rf"[/\s{_BODY}]+")


@dataclasses.dataclass(frozen=True)
class DelayedScales:
    """The scales of a region's products in 8 bits.

    Attributes:
      scales: float32 [..., 3] by place of the product, with one axis per loop and `shard_map` around it that autocast
        has not entered yet.
      found: a dictionary to record places and the lengths of the axes that their scales need; None if the places are
        known.
      extents: the lengths of the loops and the numbers of devices around the current program.
    """

    scales: Mapping[str, jax.Array]
    found: dict[str, tuple[int, ...]] | None = None
    extents: tuple[int, ...] = ()

    def of(self, place: str) -> jax.Array | None:
        """Returns the scales of a product; None if its place is only recorded."""
        if self.found is not None:
            self.found[place] = self.extents
            return None
        return self.scales[place]

    def within(self, place: str) -> dict[str, jax.Array]:
        """Returns the scales of the products in the body at a place."""
        return {name: scales for name, scales in self.scales.items() if name.startswith(f"{place}{_BODY}")}

    def rows(self, scales: Mapping[str, jax.Array], extent: int) -> "DelayedScales":
        """Returns the scales for one run of a body, given its rows."""
        return dataclasses.replace(self, scales=scales, extents=(*self.extents, extent))


def place_of(equation: Any, scope: str, outer: str, counts: Counter[str]) -> str:
    """Returns the place of an equation, which is unique in the program.

    Args:
      equation: an equation that multiplies or holds a program.
      scope: its scope, relative to the body around it.
      outer: the place of that body.
      counts: the number of uses of each place in that body so far; the function increments it.
    """
    name = equation.params.get("name") or equation.primitive.name
    own = ".".join(_SEPARATORS.sub(".", part) for part in (scope, str(name)) if part)
    place = f"{outer}{_BODY}{own}" if outer else own
    counts[place] += 1
    return place if counts[place] == 1 else f"{place}~{counts[place]}"


class Fp8Scales(NamedTuple):
    """Scales and histories by place of the product in 8 bits; each in the order lhs, rhs, gradient.

    Attributes:
      scale: float32 [3].
      amax_history: float32 [3, amax_history_len], the largest magnitudes of previous steps, the latest first.
      amax: float32 [3], the largest magnitudes of the micro-batches so far; zeros between steps.

    Example:
      >>> import jax.numpy as jnp
      >>> Fp8Scales({"dot": jnp.ones(3)}, {"dot": jnp.zeros((3, 16))}, {"dot": jnp.zeros(3)}).scale["dot"].shape
      (3,)
    """

    scale: dict[str, jax.Array]
    amax_history: dict[str, jax.Array]
    amax: dict[str, jax.Array]


class Fp8State(NamedTuple):
    """A model state with the state of delayed scaling, as `with_fp8_state` returns it.

    Attributes:
      fp8: the `Fp8Scales`, in `fp8.value`; over several devices, the maximum is taken.
      model_state: the model state that the loss function takes and returns.

    Example:
      >>> fp8_state(["dot"], DelayedScaling(amax_history_len=16), None).fp8.value.amax_history["dot"].shape
      (3, 16)
    """

    fp8: Largest
    model_state: Any


def fp8_state(places: Any, recipe: DelayedScaling, model_state: Any) -> Fp8State:
    """Returns the state before the first step, with scales of 1 and empty histories, as in Transformer Engine.

    Args:
      places: the places of the products in 8 bits.
      recipe: the recipe, with the length of the histories.
      model_state: the model's own.
    """
    histories = {place: jnp.zeros((3, recipe.amax_history_len)) for place in places}
    ones, zeros = ({place: fill(3) for place in histories} for fill in (jnp.ones, jnp.zeros))
    return Fp8State(Largest(Fp8Scales(ones, histories, zeros)), model_state)


def scales_of(state: Fp8State, extents: Mapping[str, tuple[int, ...]], factor: jax.Array) -> dict[str, jax.Array]:
    """Returns the scales for the products of a region.

    Args:
      state: the state.
      extents: by place of each product of the program, the lengths of the loops around it.
      factor: the factor by which the gradients of this program are multiplied, mainly the loss scale.

    Raises:
      ValueError: the state belongs to other products; the message names some.
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
      magnitudes: the "gradients" of the scales that `scales_of` returned.
      factor: the factor passed to `scales_of`.
      model_state: the model's own state after the micro-batch.
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
    """Returns the state after a step: adds the magnitudes to the histories and computes the next scales.

    If the magnitude of an operand is infinite or NaN, its history and scale stay unchanged.

    Args:
      state: the state, with the largest magnitudes of all micro-batches and devices.
      recipe: the recipe that computes scales from histories.
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
