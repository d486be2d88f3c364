"""Scores of operations: adjoint times local error, forward and backward, computed in one run.

Let x be the value of an operand or result, c its adjoint and d() the rounding error. The score of an operation is the
sum of |d(x) c| + |x d(c)|; an overflow counts as an error of a thousand times the value. Values and scaled adjoints
that overflow or become zero are counted too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import AutocastRules
from jmp_train.policies.autocasting.emulating import Bit, rounded
from jmp_train.tuning.subjects import Example, Subject
from jmp_train.tuning.units import flagged

_OVERFLOW = 1e3
# Score, score if everything were lost, elements, values that overflow or become 0, gradients that do.
_COLUMNS, OVERFLOWING = 7, 3


def scores_of(
    subject: Subject, numbers: dict[str, int], dtype: Any, rules: AutocastRules
) -> Callable[[jax.Array, Any, Example], jax.Array]:
    """Returns the function `(slots, loss scale, example)` -> scores [units, columns], where slots are zeros.

    Args:
      subject: the tuned function or step.
      numbers: numbers of the units by address.
      dtype: the half type.
      rules: rules that put every possible operation in half precision.

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

            everything = flagged(lambda *_: True, dtype, rules, run)
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
