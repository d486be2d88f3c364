"""What half precision may cost: errors of results and gradients against float32, and how large they may be."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NEGLIGIBLE = 1e-3  # gradients of leaves that are smaller than this share of the whole count as if they were so large
_NOISE = 0.5  # leaves whose gradients change by so much if parameters are rounded once say nothing
_LARGEST = 0.7  # error of the gradient that is tolerated, however sensitive it is


class Outcome(NamedTuple):
    """What a function or a step returns.

    Attributes:
      results: floating results; of a loss the loss alone.
      gradients: by path of the parameter, float32, unscaled; empty where there are none.
    """

    results: list[jax.Array]
    gradients: dict[str, jax.Array]


class Reference(NamedTuple):
    """What outcomes are compared with.

    Attributes:
      outcome: in float32.
      slack: by path of the parameter, by what the error of its gradient is divided; at least 1.
    """

    outcome: Outcome
    slack: dict[str, Any]


class Errors(NamedTuple):
    """How far an outcome is off, against float32: numbers, or arrays of them.

    Attributes:
      finite: whether all is.
      loss: |result - float32| / |float32|, the largest of all results.
      gradient: the same of all gradients together, as norms.
      leaf: the same of each leaf's gradient, divided by its slack, the largest; negligible gradients count as larger.
      cosine: of the angle between the gradients; 1 where there are none.
      accepted: what a criterion of the user's own says; True where there is none.
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
    """How large errors may be; all results and gradients have to be finite.

    Gradients may be sensitive by themselves: those of a deep network with normalization can change by a tenth if its
    parameters are rounded once. Errors up to `sensitivity` times what rounding the parameters does are tolerated, and
    gradients of single parameters that this changes by half are left out.

    Args:
      loss: relative error of each result.
      gradient: relative error of all gradients together.
      leaf: relative error of the gradient of a single parameter.
      cosine: the least cosine between the gradient and float32's.
      sensitivity: see above; 0 for errors as they are.

    Raises:
      ValueError: an error is not positive, or the cosine is none.

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
        """Returns the tolerance of a function that is as sensitive as this.

        Args:
          rounded: if the parameters are rounded once, of each example.
          exact: in float32.
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
        """Returns by what the error of each leaf's gradient is divided.

        Args:
          rounded: if the parameters are rounded once.
          outcome: in float32.
        """
        found = {}
        for path, x in outcome.gradients.items():
            error = _off([rounded.gradients[path]], [x])
            wider = max(1.0, self.sensitivity * error / self.leaf)
            found[path] = math.inf if self.sensitivity > 0 and error > _NOISE else wider
        return found

    def passes(self, errors: Errors) -> bool:
        """Whether errors are finite and within the tolerance.

        Args:
          errors: of one example, as numbers.
        """
        small = errors.loss <= self.loss and errors.gradient <= self.gradient and errors.leaf <= self.leaf
        return bool(errors.finite and small and errors.cosine >= self.cosine and errors.accepted)


def _off(arrays: Sequence[Any], exact: Sequence[Any]) -> float:
    """Returns the relative error of some arrays together; 0 where that is no number."""
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(arrays, exact, strict=True)]
    norm = math.hypot(*(float(np.linalg.norm(y)) for _, y in pairs))
    error = math.hypot(*(float(np.linalg.norm(x - y)) for x, y in pairs))
    return error / norm if norm and math.isfinite(error) and math.isfinite(norm) else 0.0


Criterion = Callable[[Outcome, Outcome], Any]


def tolerance_of(tolerance: "Tolerance | float | Criterion | None") -> tuple[Tolerance, Criterion | None]:
    """Returns a tolerance, and a criterion of the user's own or None.

    Args:
      tolerance: see `tune`.

    Raises:
      TypeError: it is something else.
      ValueError: it is a number that is not positive.
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


def errors_of(outcome: Outcome, reference: Reference, criterion: Criterion | None = None) -> Errors:
    """Returns the errors of an outcome, as scalars; runs within `jax.jit`.

    Args:
      outcome: in half precision.
      reference: see there.
      criterion: of the user's own, `criterion(outcome, float32 outcome)` -> bool scalar.
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
    """Returns errors that are arrays as Python's numbers."""
    found = jax.device_get(errors)
    return Errors(*(bool(x) if np.asarray(x).dtype == bool else float(x) for x in found))


def _of_gradients(triples: Sequence[tuple[jax.Array, jax.Array, Any]]) -> tuple[Any, Any, Any]:
    """Returns the errors of gradients, of which each is given with float32's and its slack."""
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
    """Returns the norm of an array, whose squares do not leave float32's range."""
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
