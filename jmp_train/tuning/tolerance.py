"""What half precision may cost: errors of results and gradients against float32, and how large they may be."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_NEGLIGIBLE = 1e-3  # gradients of leaves that are smaller than this share of the whole count as if they were so large


class Outcome(NamedTuple):
    """What a function or a step returns.

    Attributes:
      results: floating results; of a loss the loss alone.
      gradients: by path of the parameter, float32, unscaled; empty where there are none.
    """

    results: list[jax.Array]
    gradients: dict[str, jax.Array]


class Errors(NamedTuple):
    """How far an outcome is off, against float32: numbers, or arrays of them.

    Attributes:
      finite: whether all is.
      loss: |result - float32| / |float32|, the largest of all results.
      gradient: the same of all gradients together, as norms.
      leaf: the same of each leaf's gradient, the largest; leaves whose gradient is negligible count as larger ones.
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

    Args:
      loss: relative error of each result.
      gradient: relative error of all gradients together.
      leaf: relative error of the gradient of a single parameter.
      cosine: the least cosine between the gradient and float32's.

    Raises:
      ValueError: an error is not positive, or the cosine is none.

    Example:
      >>> Tolerance(gradient=0.01).passes(Errors(True, 0.001, 0.02, 0.1, 1.0))
      False
    """

    loss: float = 0.01
    gradient: float = 0.05
    leaf: float = 0.25
    cosine: float = 0.99

    def __post_init__(self) -> None:
        for name in ("loss", "gradient", "leaf"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name}={value!r} must be a positive number")
        if not isinstance(self.cosine, int | float) or not -1 <= self.cosine <= 1:
            raise ValueError(f"cosine={self.cosine!r} must be a number from -1 to 1")

    def passes(self, errors: Errors) -> bool:
        """Whether errors are finite and within the tolerance.

        Args:
          errors: of one example, as numbers.
        """
        small = errors.loss <= self.loss and errors.gradient <= self.gradient and errors.leaf <= self.leaf
        return bool(errors.finite and small and errors.cosine >= self.cosine and errors.accepted)


Criterion = Callable[[Outcome, Outcome], Any]


def tolerance_of(tolerance: "Tolerance | float | Criterion | None") -> tuple[Tolerance, Criterion | None]:
    """Returns a tolerance, and a criterion of the user's own or None.

    Args:
      tolerance: see `tune`.

    Raises:
      TypeError: it is something else.
    """
    if tolerance is None:
        return Tolerance(), None
    if isinstance(tolerance, Tolerance):
        return tolerance, None
    if isinstance(tolerance, int | float) and not isinstance(tolerance, bool):
        return Tolerance(tolerance, tolerance, 5 * tolerance, max(-1.0, 1 - tolerance)), None
    if callable(tolerance):
        return Tolerance(math.inf, math.inf, math.inf, -1.0), tolerance
    raise TypeError(f"tolerance must be a Tolerance, a number or a function, got {tolerance!r}")


def errors_of(outcome: Outcome, reference: Outcome, criterion: Criterion | None = None) -> Errors:
    """Returns the errors of an outcome, as scalars; runs within `jax.jit`.

    Args:
      outcome: in half precision.
      reference: in float32.
      criterion: of the user's own, `criterion(outcome, reference)` -> bool scalar.
    """
    pairs = [(outcome.gradients[name], x) for name, x in reference.gradients.items()]
    everything = [*outcome.results, *(x for x, _ in pairs)]
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in everything] or [True]))
    results = zip(outcome.results, reference.results, strict=True)
    losses = [_relative(_norm(x - y), _norm(y)) for x, y in results]
    accepted = True if criterion is None else jnp.all(jnp.asarray(criterion(outcome, reference)))
    return Errors(finite, _largest(losses), *_of_gradients(pairs), accepted)


def _of_gradients(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[Any, Any, Any]:
    if not pairs:
        return jnp.float32(0), jnp.float32(0), jnp.float32(1)
    off = jnp.stack([_norm(x - y) for x, y in pairs])
    norms = jnp.stack([_norm(y) for _, y in pairs])
    whole = jnp.linalg.norm(norms)
    own = jnp.linalg.norm(jnp.stack([_norm(x) for x, _ in pairs]))
    products = sum(jnp.sum(_scaled(x, own) * _scaled(y, whole)) for x, y in pairs)
    counts = jnp.array([y.size for _, y in pairs], jnp.float32)
    least = _NEGLIGIBLE * whole * jnp.sqrt(counts / counts.sum())
    leaves = _relative(off, jnp.maximum(norms, least))
    return _relative(jnp.linalg.norm(off), whole), jnp.max(leaves), products


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
