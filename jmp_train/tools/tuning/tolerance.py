"""Errors of results and gradients compared with float32, and the tolerance for them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NEGLIGIBLE = 1e-3  # smaller fractions of the whole gradient count as this fraction
_NOISE = 0.5  # leaves whose gradients change by so much if parameters are rounded once are ignored
_LARGEST = 0.7  # upper bound of the tolerated error of the gradient, however sensitive it is


class Outcome(NamedTuple):
    """Results and gradients of a function or a step.

    Attributes:
      results: floating-point results; for a loss, only the loss.
      gradients: unscaled float32 gradients by path of the parameter, or an empty dictionary.
    """

    results: list[jax.Array]
    gradients: dict[str, jax.Array]


class Reference(NamedTuple):
    """The float32 outcome that others are compared with.

    Attributes:
      outcome: the outcome in float32.
      slack: divisors of the gradients' errors by path of the parameter; at least 1.
    """

    outcome: Outcome
    slack: dict[str, Any]


class Errors(NamedTuple):
    """Errors of an outcome compared with float32: numbers, or arrays of numbers.

    Attributes:
      finite: True if all results and gradients are finite.
      loss: the largest |result - float32| / |float32| of all results.
      gradient: the same for all gradients together, with norms.
      leaf: the largest such error of one leaf's gradient, divided by its slack. Negligible gradients count as larger.
      cosine: cosine of the angle between the gradients; 1 without gradients.
      accepted: result of the user's own criterion; True without one.
    """

    finite: Any
    loss: Any
    gradient: Any
    leaf: Any
    cosine: Any
    accepted: Any = True

    def __str__(self) -> str:
        if not self.finite:
            return "not finite"
        return f"loss off by {self.loss:.2g}, gradient by {self.gradient:.2g}, worst leaf by {self.leaf:.2g}"


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Upper bounds of errors; results and gradients must also be finite.

    Gradients may be sensitive to any rounding: those of a deep network with normalization can change by a tenth if
    its parameters are rounded once. So errors of up to `sensitivity` times the effect of rounding the parameters are
    tolerated. Gradients of single parameters that this rounding changes by half are ignored.

    Args:
      loss: relative error of each result.
      gradient: relative error of all gradients together.
      leaf: relative error of the gradient of a single parameter.
      cosine: minimum of the cosine between the gradient and float32's.
      sensitivity: see above; 0 to ignore the effect of rounding the parameters.

    Raises:
      ValueError: an error is not positive, or the cosine is not between -1 and 1.

    Example:
      >>> Tolerance(gradient=0.01).passes(Errors(True, 0.001, 0.02, 0.1, 1.0))
      False
    """

    loss: float = 0.01
    gradient: float = 0.05
    leaf: float = 0.25
    cosine: float = 0.8
    sensitivity: float = 3.0

    def __post_init__(self) -> None:
        for name in ("loss", "gradient", "leaf"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name}={value!r} must be a positive number")
        if not isinstance(self.cosine, int | float) or not -1 <= self.cosine <= 1:
            raise ValueError(f"cosine={self.cosine!r} must be a number from -1 to 1")
        if not isinstance(self.sensitivity, int | float) or not 0 <= self.sensitivity < math.inf:
            raise ValueError(f"sensitivity={self.sensitivity!r} must be a number that is not negative")

    def widened(self, rounded: Sequence[Outcome], exact: Sequence[Outcome]) -> "Tolerance":
        """Returns the tolerance, widened by the effect of rounding the parameters once.

        Args:
          rounded: outcome of each example with rounded parameters.
          exact: outcome of each example in float32.
        """
        pairs = list(zip(rounded, exact, strict=True))
        loss = max(_off(x.results, y.results) for x, y in pairs)
        gradient = max(_off(list(x.gradients.values()), list(y.gradients.values())) for x, y in pairs)
        return dataclasses.replace(
            self,
            loss=max(self.loss, min(self.sensitivity * loss, 10 * self.loss)),
            gradient=max(self.gradient, min(self.sensitivity * gradient, _LARGEST)),
        )

    def slack(self, rounded: Outcome, outcome: Outcome) -> dict[str, Any]:
        """Returns the divisor of the error of each leaf's gradient.

        Args:
          rounded: outcome with parameters that were rounded once.
          outcome: outcome in float32.
        """
        found = {}
        for path, x in outcome.gradients.items():
            error = _off([rounded.gradients[path]], [x])
            wider = max(1.0, self.sensitivity * error / self.leaf)
            found[path] = math.inf if self.sensitivity > 0 and error > _NOISE else wider
        return found

    def used(self, errors: Errors) -> float:
        """Returns the fraction of the tolerance that errors use up; above 1, they are not tolerated.

        Args:
          errors: errors of one example, as numbers. Without bounds, as next to a criterion, the default ones count.
        """
        bounds = self if self.loss < math.inf else Tolerance()
        pairs = (errors.loss, bounds.loss), (errors.gradient, bounds.gradient), (errors.leaf, bounds.leaf)
        return max(error / bound for error, bound in pairs)

    def passes(self, errors: Errors) -> bool:
        """Returns True if results are finite and errors within the tolerance.

        Args:
          errors: errors of one example, as numbers.
        """
        small = errors.loss <= self.loss and errors.gradient <= self.gradient and errors.leaf <= self.leaf
        return bool(errors.finite and small and errors.cosine >= self.cosine and errors.accepted)


def _off(arrays: Sequence[Any], exact: Sequence[Any]) -> float:
    """Returns the relative error of arrays together; 0 if it is not finite."""
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(arrays, exact, strict=True)]
    norm = math.hypot(*(float(np.linalg.norm(y)) for _, y in pairs))
    error = math.hypot(*(float(np.linalg.norm(x - y)) for x, y in pairs))
    return error / norm if norm and math.isfinite(error) and math.isfinite(norm) else 0.0


Criterion = Callable[[Outcome, Outcome], Any]


def tolerance_of(tolerance: "Tolerance | float | Criterion | None") -> tuple[Tolerance, Criterion | None]:
    """Returns the tolerance, and the user's own criterion or None.

    Args:
      tolerance: see `tune`.

    Raises:
      TypeError: `tolerance` has a wrong type.
      ValueError: `tolerance` is a number that is not positive.
    """
    if tolerance is None:
        return Tolerance(), None
    if isinstance(tolerance, Tolerance):
        return tolerance, None
    if isinstance(tolerance, int | float) and not isinstance(tolerance, bool):
        if not tolerance > 0:
            raise ValueError(f"tolerance={tolerance!r} must be a positive number, such as 0.05")
        return Tolerance(tolerance, tolerance, 5 * tolerance, max(-1.0, 1 - tolerance), sensitivity=0), None
    if callable(tolerance):
        return Tolerance(math.inf, math.inf, math.inf, -1.0), tolerance
    raise TypeError(f"tolerance must be a Tolerance, a number or a function, got {tolerance!r}")


def curve_error(losses: Sequence[float], exact: Sequence[float]) -> float:
    """Returns how far a curve of losses is above another one, in the worst tenth of the steps.

    Args:
      losses: losses of training steps.
      exact: losses of the same steps to compare with, whose mean magnitude is 1 in the result.
    """
    parts = min(10, len(exact))
    pairs = zip(np.array_split(np.array(losses), parts), np.array_split(np.array(exact), parts), strict=True)
    above = float(np.max([np.mean(x) - np.mean(y) for x, y in pairs]))  # NaN if one is
    return max(0.0, above / (float(np.mean(np.abs(exact))) or 1.0)) if math.isfinite(above) else math.inf


def errors_of(outcome: Outcome, reference: Reference, criterion: Criterion | None = None) -> Errors:
    """Returns the errors of an outcome as scalars; runs within `jax.jit`.

    Args:
      outcome: outcome in half precision.
      reference: the float32 outcome.
      criterion: the user's own, `criterion(outcome, float32 outcome)` -> bool scalar.
    """
    exact, slack = reference
    pairs = [(outcome.gradients[name], x, slack[name]) for name, x in exact.gradients.items()]
    everything = [*outcome.results, *outcome.gradients.values()]
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in everything] or [True]))
    results = zip(outcome.results, exact.results, strict=True)
    losses = [_relative(_norm(x - y), _norm(y)) for x, y in results]
    accepted = True if criterion is None else jnp.all(jnp.asarray(criterion(outcome, exact)))
    gradient, leaf, cosine = _of_gradients(pairs)
    loss, gradient, leaf = (jnp.where(finite, x, jnp.inf) for x in (_largest(losses), gradient, leaf))
    return Errors(finite, loss, gradient, leaf, jnp.where(finite, cosine, -1.0), accepted)


def as_numbers(errors: Errors) -> Errors:
    """Returns errors as Python numbers."""
    found = jax.device_get(errors)
    return Errors(*(bool(x) if np.asarray(x).dtype == bool else float(x) for x in found))


def _of_gradients(triples: Sequence[tuple[jax.Array, jax.Array, Any]]) -> tuple[Any, Any, Any]:
    """Returns the errors of gradients, given as triples of gradient, float32 gradient and slack."""
    if not triples:
        return jnp.float32(0), jnp.float32(0), jnp.float32(1)
    off = jnp.stack([_norm(x - y) for x, y, _ in triples])
    norms = jnp.stack([_norm(y) for _, y, _ in triples])
    whole = jnp.linalg.norm(norms)
    own = jnp.linalg.norm(jnp.stack([_norm(x) for x, _, _ in triples]))
    cosine = sum(jnp.sum(_scaled(x, own) * _scaled(y, whole)) for x, y, _ in triples)
    counts = jnp.array([y.size for _, y, _ in triples], jnp.float32)
    least = _NEGLIGIBLE * whole * jnp.sqrt(counts / counts.sum())
    leaves = _relative(off, jnp.maximum(norms, least)) / jnp.stack([jnp.float32(z) for _, _, z in triples])
    return _relative(jnp.linalg.norm(off), whole), jnp.max(leaves), jnp.where(whole > 0, cosine, 1.0)


def _norm(x: jax.Array) -> jax.Array:
    """Returns the norm of an array, computed without overflow of its squares."""
    x = jnp.asarray(x, jnp.float32)
    largest = jnp.max(jnp.abs(x), initial=0.0)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    return unit * jnp.sqrt(jnp.sum(jnp.square(x / unit)))


def _scaled(x: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.asarray(x, jnp.float32) / jnp.where(norm > 0, norm, 1.0)


def _relative(error: jax.Array, whole: jax.Array) -> jax.Array:
    return jnp.where(error == 0, 0.0, error / whole)


def _largest(values: Sequence[jax.Array]) -> jax.Array:
    return jnp.max(jnp.stack(values)) if values else jnp.float32(0)
