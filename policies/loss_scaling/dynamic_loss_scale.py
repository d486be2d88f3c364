"""`DynamicLossScale`: a loss scale that decreases on overflow and grows again.

It covers the known algorithms by one rule, with `good` non-overflow steps since the last
reset and `left` overflows still tolerated (Micikevicius et al., "Mixed Precision Training", 2018,
https://arxiv.org/abs/1710.03740, as in torch, Apex, Megatron-LM, NeMo and DeepSpeed)::

    non-overflow: good += 1; on reaching the period: scale = min(scale * factor, max), good = 0
    overflow:     good = start; left -= 1; with none left: scale = max(scale * backoff_factor, min)

`left` returns to `hysteresis` when the scale grows or, if consecutive, on every non-overflow step.

torch multiplies its float32 scale by a double factor and rounds twice, to double and to float32. jax computes in
float32 unless float64 is enabled for the whole program. For decimal factors the two often differ: in one case of ten,
0.7 times a float lies halfway between two floats up to the error of 0.7 itself. So `float64_product` computes the
product in integers.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies.loss_scaling.loss_scale import LARGEST_SCALE, scale_tree, unscale_tree, warn_of_zero_inverse
from jmp_train.policies.pytrees import boolean_scalar, check_count, check_flag, shown

Tree = TypeVar("Tree")
_Leaves: TypeAlias = tuple[Any, ...]

_DIGIT_BITS = 12
_DIGIT = np.uint32(2**_DIGIT_BITS - 1)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that decreases when gradients overflow and grows again after a period without overflow.

    The first five fields are jmp's and as lenient as jmp's: a questionable value causes a warning. The
    presets (`torch_loss_scale` and its relatives) are strict and easier to use. The state
    (`loss_scale`, `counter` and, with hysteresis, `hysteresis_left`) are the leaves of the pytree;
    the rest is its structure.

    Args:
      loss_scale: the initial scale; scalar, stored in float32.
      counter: non-overflow steps since the last change; int32 scalar.
      period: non-overflow steps after which the scale grows.
      factor: growth factor and, without `backoff_factor`, divisor on overflow.
      min_loss_scale: lower bound of the scale.
      backoff_factor: factor on overflow, between 0 and 1; None for `1 / factor`.
      max_loss_scale: upper bound of the scale; at most 2**126, because 1/2**127 is flushed to zero.
      hysteresis: number of overflows that decrease it: 1 for the first.
      consecutive_hysteresis: True if these must be consecutive, False if they may be spread over the
        steps since the last growth.
      counter_start: the counter after an overflow; -1 delays the next growth by a step.
      hysteresis_left: overflows left before it decreases; int32 scalar, None for `hysteresis`.

    Raises:
      ValueError: a field that jmp does not have is invalid, or a structural field is traced.

    Example:
      >>> import jax.numpy as jnp
      >>> loss_scale = DynamicLossScale(2.0**15, period=2)
      >>> loss_scale = loss_scale.adjust(jnp.array(False))
      >>> float(loss_scale.loss_scale)
      16384.0
      >>> float(loss_scale.adjust(jnp.array(True)).adjust(jnp.array(True)).loss_scale)
      32768.0

    Reference: jmp 0.0.4, `jmp.DynamicLossScale`; the module's docstring has the rule.
    """

    loss_scale: Any
    counter: Any = 0
    period: int | float = 2000
    factor: int | float = 2
    min_loss_scale: Any = 1.0
    _: dataclasses.KW_ONLY
    backoff_factor: float | None = None
    max_loss_scale: float = LARGEST_SCALE
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    counter_start: int = 0
    hysteresis_left: Any = None

    _STATE: ClassVar[tuple[str, ...]] = ("loss_scale", "counter", "hysteresis_left")
    _STRUCTURE: ClassVar[tuple[str, ...]] = (
        "period",
        "factor",
        "min_loss_scale",
        "backoff_factor",
        "max_loss_scale",
        "hysteresis",
        "consecutive_hysteresis",
        "counter_start",
    )

    def __post_init__(self) -> None:
        _warn_if_not_floating(self.loss_scale, "loss_scale")
        _warn_if_not_floating(self.min_loss_scale, "min_loss_scale")
        for name in self._STRUCTURE:
            object.__setattr__(self, name, _concrete(getattr(self, name), name))
        _check_own_fields(self)
        _warn_of_questionable_fields(self)
        left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        object.__setattr__(self, "loss_scale", _as_scalar(self.loss_scale, np.float32))
        object.__setattr__(self, "counter", _as_scalar(self.counter, np.int32))
        # Without hysteresis there is nothing to count, so jmp's two leaves remain the only ones.
        left = _as_scalar(left, np.int32) if self.hysteresis > 1 else None
        object.__setattr__(self, "hysteresis_left", left)

    def scale(self, tree: Tree) -> Tree:
        """Returns the tree with floating and complex leaves times the scale, at least float32."""
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Returns the tree with floating and complex leaves divided by the scale, at least float32."""
        return unscale_tree(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Returns the scale for the next step, given whether this step's gradients were finite."""
        finite = boolean_scalar(grads_finite)
        scale, counter = jnp.asarray(self.loss_scale), jnp.asarray(self.counter)
        last = math.ceil(self.period) if self.period < 2**31 else 2**31
        full = counter >= last - 1
        larger, smaller = self._larger_and_smaller(scale)
        larger = jnp.minimum(larger, np.float32(self.max_loss_scale))
        smaller = jnp.maximum(smaller, np.float32(self.min_loss_scale))
        left = self.hysteresis_left
        if left is not None:
            spent = jnp.maximum(left - 1, 0)
            smaller = jnp.where(spent == 0, smaller, scale)
            refill = True if self.consecutive_hysteresis else full
            left = jnp.where(finite, jnp.where(refill, self.hysteresis, left), spent)
        scale = jnp.where(finite, jnp.where(full, larger, scale), smaller)
        counter = jnp.where(finite, jnp.where(full, 0, counter + 1), self.counter_start)
        return _unflatten_dynamic(_flatten_dynamic(self)[1], (scale, counter, left))

    def _larger_and_smaller(self, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.backoff_factor is None:  # as jmp computes it
            return scale * np.float32(self.factor), scale / np.float32(self.factor)
        return float64_product(scale, self.factor), float64_product(scale, self.backoff_factor)


def _flatten_dynamic(scale: DynamicLossScale) -> tuple[_Leaves, _Leaves]:
    state = tuple(getattr(scale, name) for name in DynamicLossScale._STATE)
    return state, tuple(getattr(scale, name) for name in DynamicLossScale._STRUCTURE)


def _unflatten_dynamic(structure: _Leaves, state: Iterable[Any]) -> DynamicLossScale:
    # Bypasses the constructor, because leaves may be anything here (masks, shapes, shardings).
    result = object.__new__(DynamicLossScale)
    for name, value in zip(DynamicLossScale._STATE, state, strict=True):
        object.__setattr__(result, name, value)
    for name, value in zip(DynamicLossScale._STRUCTURE, structure, strict=True):
        object.__setattr__(result, name, value)
    return result


def _flatten_dynamic_with_keys(scale: DynamicLossScale) -> tuple[_Leaves, _Leaves]:
    state, structure = _flatten_dynamic(scale)
    keys = map(GetAttrKey, DynamicLossScale._STATE)
    return tuple(zip(keys, state, strict=True)), structure


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale, _flatten_dynamic_with_keys, _unflatten_dynamic, _flatten_dynamic
)


def _as_scalar(x: object, dtype: DTypeLike) -> Any:
    """Returns a number or array in `dtype`; NumPy for host numbers, so that no device starts."""
    if isinstance(x, jax.Array):
        return x.astype(dtype)
    if isinstance(x, bool | int | float | np.ndarray | np.generic):
        return np.asarray(x, dtype)
    return x


def _concrete(x: object, name: str) -> Any:
    """Returns a structural field as a Python value, which hashes and compares."""
    if isinstance(x, Tracer):
        raise ValueError(f"{name} must be a concrete number, got a traced value {x}")
    if isinstance(x, jax.Array | np.ndarray) and x.shape:
        raise ValueError(f"{name}={shown(x)} must be a scalar")
    return x.item() if isinstance(x, jax.Array | np.ndarray | np.generic) else x


def _warn_if_not_floating(x: object, name: str) -> None:
    if isinstance(x, bool | int | float | jax.Array | np.ndarray | np.generic):
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            # jmp's tests expect its words.
            warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=4)


def _check_own_fields(scale: DynamicLossScale) -> None:
    backoff, largest = scale.backoff_factor, scale.max_loss_scale
    for name in ("period", "factor", "min_loss_scale", "max_loss_scale", "backoff_factor"):
        value = getattr(scale, name)
        is_real = isinstance(value, int | float) and not math.isnan(value)
        if not is_real and not (value is None and name == "backoff_factor"):
            raise ValueError(f"{name}={shown(value)} must be a number")
    check_flag("consecutive_hysteresis", scale.consecutive_hysteresis)
    if backoff is not None and not 0 < backoff < 1:
        raise ValueError(f"backoff_factor={backoff} must be between 0 and 1")
    if not 0 < largest <= LARGEST_SCALE:
        raise ValueError(f"max_loss_scale={largest} must be between 0 and 2**126")
    if largest < scale.min_loss_scale < math.inf:
        raise ValueError(f"min_loss_scale={scale.min_loss_scale} must not exceed max_loss_scale={largest}")
    for name, least in (("hysteresis", 1), ("counter_start", -(2**31))):
        check_count(name, getattr(scale, name), least)


def _warn_of_questionable_fields(scale: DynamicLossScale) -> None:
    start: Any = scale.loss_scale
    known = isinstance(start, int | float | np.ndarray | np.generic) and np.ndim(start) == 0
    rules = {
        f"period={scale.period} should be at least 1": scale.period >= 1,
        f"factor={scale.factor} should be finite and above 1": 1 < scale.factor < math.inf,
        f"min_loss_scale={scale.min_loss_scale} should be finite and not negative": (
            0 <= scale.min_loss_scale < math.inf
        ),
        f"loss_scale={start} should be finite and above 0": not known or 0 < float(start) < math.inf,
    }
    for text, holds in rules.items():
        if not holds:
            warnings.warn(f"DynamicLossScale: {text}", stacklevel=4)
    warn_of_zero_inverse(scale)


def float64_product(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times a Python float, rounded to double and then to float32, as in C.

    Args:
      x: float32, zero or normal and positive; any shape.
      factor: a positive double.

    Returns:
      float32 of the shape of `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> float(float64_product(jnp.float32(3.0), 0.7)) == float(np.float32(3.0 * 0.7))
      True
    """
    if float(np.float32(factor)) == factor:
        return x * np.float32(factor)  # exact in double precision, so it is rounded only once
    fraction, factor_exponent = math.frexp(factor)
    factor_integer = int(math.ldexp(fraction, 53))
    fraction, exponent = jnp.frexp(x)
    integer = (fraction * np.float32(2**24)).astype(jnp.uint32)
    # Doubled if needed, so that the product has 77 bits: 53 for the double, and 24 to round off.
    small = integer < np.uint32(math.ceil(2**76 / factor_integer))
    digits = _digits_of_product(jnp.where(small, 2 * integer, integer), factor_integer)
    high, low = _round_to_double(digits)
    high += _rounds_up(low, 29, high)
    scaled = jnp.ldexp(high.astype(jnp.float32) * np.float32(2.0**-24), exponent + factor_exponent)
    return jnp.where(jnp.isfinite(x), jnp.where(small, scaled * np.float32(0.5), scaled), x)


def _digits_of_product(integer: jax.Array, factor: int) -> list[jax.Array]:
    """Returns the 7 digits of 12 bits, lowest first, of a product of 25 and 53 bits."""
    low, high = integer & _DIGIT, integer >> np.uint32(_DIGIT_BITS)
    columns = [jnp.zeros_like(integer) for _ in range(7)]
    for i in range(5):
        digit = np.uint32((factor >> (_DIGIT_BITS * i)) & int(_DIGIT))
        columns[i] += low * digit
        columns[i + 1] += high * digit
    carry = jnp.zeros_like(integer)
    for i, column in enumerate(columns):
        columns[i] = (column + carry) & _DIGIT
        carry = (column + carry) >> np.uint32(_DIGIT_BITS)
    return columns


def _round_to_double(digits: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the double nearest to the product: its first 24 bits, and its last 29."""
    d0, d1, d2, d3, d4, d5, d6 = digits
    low = d2 | d3 << np.uint32(12) | (d4 & np.uint32(31)) << np.uint32(24)
    high = d4 >> np.uint32(5) | d5 << np.uint32(7) | d6 << np.uint32(19)
    low += _rounds_up(d0 | d1 << np.uint32(12), 24, low)
    return high + (low >> np.uint32(29)), low & np.uint32(2**29 - 1)


def _rounds_up(rest: jax.Array, bits: int, kept: jax.Array) -> jax.Array:
    """Returns 1 if `rest`, of `bits` bits, rounds `kept` up: to nearest, ties to even."""
    half = np.uint32(2 ** (bits - 1))
    odd = (kept & np.uint32(1)) == 1
    return ((rest > half) | ((rest == half) & odd)).astype(jnp.uint32)
