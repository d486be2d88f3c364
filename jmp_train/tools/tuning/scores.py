"""Scores of operations: adjoint times local error, forward and backward, computed in one run; and loss scales.

Let x be the value of an operand or result, c its adjoint and d() the rounding error. The score of an operation is the
sum of |d(x) c| + |x d(c)|; an overflow counts as an error of a thousand times the value. Values and scaled adjoints
that overflow or become zero are counted too. The loss scales to choose from are those that training with the rules can
reach.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies import get_loss_scale, set_loss_scale
from jmp_train.policies.autocasting.emulating import Bit, emulated_autocast, rounded
from jmp_train.policies.loss_scaling import DynamicLossScale, NoOpLossScale, StaticLossScale
from jmp_train.policies.optimizers import scaled_states
from jmp_train.steps import TrainState
from jmp_train.tools.tuning.tolerance import Reference
from jmp_train.tools.tuning.tuned_functions import Example, Subject

_OVERFLOW = 1e3
# Score, score if everything were lost, elements, values that overflow or become 0, gradients that do.
_COLUMNS, OVERFLOWING = 7, 3


def scores_of(subject: Subject, numbers: dict[str, int], dtype: Any) -> Callable[[jax.Array, Any, Example], jax.Array]:
    """Returns the function `(slots, loss scale, example)` -> scores [units, columns], where slots are zeros.

    Args:
      subject: the tuned function or step.
      numbers: numbers of the units by address.
      dtype: the half type.

    Reference: |adjoint x local error| ranks variables in CHEF-FP (Vassiliadis and others, SC 2021) and ADAPT (Menon and
    others, SC 2018), forward.
    """
    noted = _noting(dtype)

    def scores(slots: jax.Array, scale: Any, example: Example) -> jax.Array:
        def of_slots(slots: jax.Array) -> jax.Array:
            def run(
                run: Callable[..., Any], arrays: Sequence[Any], active: Bit, addresses: tuple[str, ...], *, wide: bool
            ) -> list[Any]:
                del active, wide
                slot = slots[numbers[addresses[0]]]
                results = run(*(noted(x, slot) if _is_float32(x) else x for x in arrays))
                results = list(results) if isinstance(results, list | tuple) else [results]
                return [noted(x, slot) if _is_float32(x) else x for x in results]

            everything = functools.partial(emulated_autocast, dtype=dtype, flags=lambda *_: True, run=run)
            return subject.objective(everything, *example) * scale

        found = jax.grad(of_slots)(slots)
        return found.at[:, :2].divide(scale)

    return scores


def no_scores(units: int) -> np.ndarray:
    """Returns empty slots [units, columns]."""
    return np.zeros((units, _COLUMNS), np.float32)


@dataclasses.dataclass(frozen=True)
class Lost:
    """Fractions of operands, results and gradients that half precision cannot hold.

    Attributes:
      overflowing: fraction of values that overflow.
      vanishing: fraction of values that become 0.
      overflowing_gradients: fraction of scaled gradients that overflow.
      vanishing_gradients: fraction of scaled gradients that become 0.

    Example:
      >>> print(Lost(0.25, 0.0, 0.0, 0.001))
      25% of its values overflow, 0.1% of its gradients become 0
    """

    overflowing: float
    vanishing: float
    overflowing_gradients: float
    vanishing_gradients: float

    def __str__(self) -> str:
        texts = (
            (self.overflowing, "values overflow"),
            (self.vanishing, "values become 0"),
            (self.overflowing_gradients, "gradients overflow"),
            (self.vanishing_gradients, "gradients become 0"),
        )
        return ", ".join(f"{share:.2g}%" + f" of its {text}" for x, text in texts if (share := 100 * x) > 0)


def lost_of(scores: np.ndarray) -> Lost:
    """Returns the fractions that operations lose.

    Args:
      scores: [units, columns], the scores of these operations.
    """
    elements, *counts = (float(x) for x in scores.sum(0)[2:])
    return Lost(*(count / max(1.0, elements) for count in counts))


def best_scale(scores: dict[float, np.ndarray]) -> float:
    """Returns the loss scale with the smallest losses; the largest of several.

    Args:
      scores: scores by loss scale; see `scores_of`.
    """

    def lost(found: np.ndarray) -> float:
        return float(np.minimum(found[:, 0] / np.maximum(found[:, 1], 1e-30), 1.0).sum())

    least = min(map(lost, scores.values()))
    return max(scale for scale, found in scores.items() if lost(found) <= 1.05 * least)


def _is_float32(x: Any) -> bool:
    return jnp.result_type(x) == jnp.float32


def _noting(dtype: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns an identity function that writes an operation's score to the gradient of its slot."""

    def lost(x: jax.Array) -> jax.Array:
        cast = rounded(x, dtype)
        return jnp.where(jnp.isfinite(cast), jnp.abs(cast - x), _OVERFLOW * jnp.abs(x))

    def counts(x: jax.Array) -> list[jax.Array]:
        cast = rounded(x, dtype)
        overflowing = jnp.isfinite(x) & ~jnp.isfinite(cast)
        return [jnp.sum(y, dtype=jnp.float32) for y in (overflowing, (x != 0) & (cast == 0))]

    @jax.custom_vjp
    def noted(x: jax.Array, slot: jax.Array) -> jax.Array:
        del slot
        return x

    def forward(x: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        del slot
        return x, x

    def backward(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        score = lost(x) * jnp.abs(cotangent) + lost(cotangent) * jnp.abs(x)
        whole = jnp.abs(x * cotangent)
        finite = jnp.isfinite(score) & jnp.isfinite(whole)
        sums = [jnp.sum(jnp.where(finite, y, 0)) for y in (score, whole)]
        return cotangent, jnp.stack([*sums, jnp.float32(x.size), *counts(x), *counts(cotangent)])

    noted.defvjp(forward, backward)
    return noted


_ABOVE_1 = tuple(2.0**exponent for exponent in (15, 12, 9, 6, 3, 0))
_BELOW_1 = tuple(2.0**exponent for exponent in range(-4, -121, -4))
_FURTHER = 2  # scales below that at which the largest gradient fits: those of activations may be larger


def scales_of(examples: Sequence[Example], references: Sequence[Reference], half: Any) -> tuple[float, ...]:
    """Returns the loss scales to choose from, the largest first.

    Scales below 1 are included if gradients exceed the half type's range. If the state of a step has a static loss
    scale, it is the only choice. If it has a dynamic one, its bounds apply.

    Args:
      examples: arguments of the tuned function.
      references: float32 outcomes of all examples.
      half: the half type.
    """
    gradients = [x for reference in references for x in reference.outcome.gradients.values()]
    if half == jnp.bfloat16 or not gradients:
        return (1.0,)
    most = float(jnp.finfo(half).max)
    largest = max(float(jnp.abs(x).max(initial=0)) for x in gradients)
    too_large = sum(largest * scale > most for scale in (1.0, *_BELOW_1))
    scales = (*_ABOVE_1, *_BELOW_1[: too_large + _FURTHER if too_large else 0])
    own = _own_scale(examples[0])
    if isinstance(own, StaticLossScale | NoOpLossScale):
        return (float(own.loss_scale),)
    if isinstance(own, DynamicLossScale):
        low, high = float(own.min_loss_scale), float(own.max_loss_scale)
        return tuple(dict.fromkeys(min(max(scale, low), high) for scale in scales))
    return scales


def with_loss_scale_at(state: TrainState, scale: float) -> TrainState:
    """Returns the state with its dynamic loss scale, if it has one, set to a value.

    Args:
      state: state of a step.
      scale: the loss scale that tuning found.
    """
    old = _own_scale((state,))
    if not isinstance(old, DynamicLossScale):
        return state
    new = dataclasses.replace(old, loss_scale=jnp.full_like(old.loss_scale, scale))
    return dataclasses.replace(state, opt_state=set_loss_scale(state.opt_state, new))


def _own_scale(example: Example) -> Any:
    """Returns the loss scale of a state among a function's arguments; None if there is not exactly one."""
    states: Iterator[TrainState] = (x for x in example if isinstance(x, TrainState))
    found = [state.opt_state for state in states if len(scaled_states(state.opt_state)) == 1]
    return get_loss_scale(found[0]) if found else None
