"""Loss scales: factors that keep half-precision gradients from underflow.

`DynamicLossScale` covers the known algorithms by one rule, with `good` non-overflow steps since the last
reset and `left` overflows still tolerated (Micikevicius et al., "Mixed Precision Training", 2018,
https://arxiv.org/abs/1710.03740, as in torch, Apex, Megatron-LM, NeMo and DeepSpeed)::

    non-overflow: good += 1; on reaching the period: scale = min(scale * factor, max), good = 0
    overflow:     good = start; left -= 1; with none left: scale = max(scale * backoff_factor, min)

`left` returns to `hysteresis` when the scale grows or, if consecutive, on every non-overflow step.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies.loss_scaling.emulated_float64 import float64_product
from jmp_train.policies.pytrees import at_least_float32, boolean_scalar, is_inexact, map_overwritten

Tree = TypeVar("Tree")
_Leaves: TypeAlias = tuple[Any, ...]

# Outside these float32 bounds the scale or its inverse is subnormal, and XLA flushes it to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def _scale_leaf(x: object, scale: ArrayLike, *, inverse: bool = False) -> Any:
    """Returns x times the scale or its inverse, in float32 or in x's own higher precision."""
    if not is_inexact(x):
        return x
    x = jnp.asarray(x)
    dtype = at_least_float32(x.dtype)
    real = jnp.finfo(dtype).dtype
    number = scale.astype(real) if isinstance(scale, jax.Array) else np.asarray(scale, real)
    if inverse:
        number = 1 / jnp.asarray(number)
    return x.astype(dtype) * jnp.asarray(number).astype(dtype)


def scale_tree(tree: Tree, number: ArrayLike) -> Tree:
    """Returns a tree times a number, as `LossScale.scale` does.

    Args:
      tree: floating and complex leaves are multiplied, in float32 or their own higher precision;
        others are unchanged.
      number: the scale; scalar.

    Returns:
      A tree of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> scale_tree({"loss": jnp.float16(2.0), "rows": 3}, 2.0**16)
      {'loss': Array(131072., dtype=float32), 'rows': 3}
    """
    return jax.tree_util.tree_map(lambda x: _scale_leaf(x, number), tree)


def unscale_tree(tree: Tree, number: ArrayLike) -> Tree:
    """Returns a tree divided by a number, as `LossScale.unscale` does.

    Args:
      tree: floating and complex leaves are divided, in float32 or their own higher precision;
        others are unchanged, as is flax's collection of fp8 scales, whose gradients are not scaled.
      number: the scale; scalar.

    Returns:
      A tree of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> unscale_tree(jnp.float16(2.0), 2.0**16) == 2.0**-15
      Array(True, dtype=bool)
    """
    return map_overwritten(lambda x: x, lambda x: _scale_leaf(x, number, inverse=True), tree)


@runtime_checkable
class LossScale(Protocol):
    """The interface of a loss scale: four names, on an immutable pytree. Any class that has them is one.

    The leaves of the pytree are the values that change from step to step. The optimizer and its checkpoints store
    them in its state. `scale_tree` and `unscale_tree` do the arithmetic.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> @jax.tree_util.register_dataclass
      ... @dataclasses.dataclass(frozen=True)
      ... class Halving:
      ...     loss_scale: jax.Array
      ...     def scale(self, tree):
      ...         return jt.policies.scale_tree(tree, self.loss_scale)
      ...     def unscale(self, tree):
      ...         return jt.policies.unscale_tree(tree, self.loss_scale)
      ...     def adjust(self, grads_finite):
      ...         return Halving(jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2))
      >>> isinstance(Halving(jnp.float32(8.0)), jt.LossScale)
      True
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), Halving(jnp.float32(8.0)))
      >>> state = optimizer.init(jnp.ones(2))
      >>> _, state = optimizer.update(jnp.array([1.0, jnp.inf]), state, jnp.ones(2))
      >>> float(jt.get_loss_scale(state).loss_scale)
      4.0
    """

    @property
    def loss_scale(self) -> Any:
        """The scale; scalar."""
        ...

    def scale(self, tree: Tree) -> Tree:
        """Returns the tree, usually a loss, times the scale."""
        ...

    def unscale(self, tree: Tree) -> Tree:
        """Returns the tree of gradients divided by the scale."""
        ...

    def adjust(self, grads_finite: ArrayLike) -> "LossScale":
        """Returns the scale of the next step, of the same pytree structure, shapes and dtypes.

        Args:
          grads_finite: bool scalar, True if all unscaled gradients of this step are finite; traced under jit.
        """
        ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """No loss scaling: the null object for float32 and bfloat16 training.

    Example:
      >>> NoOpLossScale().scale(3.0), NoOpLossScale().loss_scale
      (3.0, 1)

    Reference: jmp 0.0.4, `jmp.NoOpLossScale`.
    """

    @property
    def loss_scale(self) -> int:
        """Always 1."""
        return 1

    def scale(self, tree: Tree) -> Tree:
        """Returns the same object."""
        return tree

    def unscale(self, tree: Tree) -> Tree:
        """Returns the same object."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Returns itself."""
        del grads_finite
        return self


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that never changes.

    A Python or NumPy number is part of the tree's structure: it has no leaf, and another number
    causes another trace. A jax array is a leaf, so a schedule can set it without a new trace.

    Args:
      loss_scale: the number; scalar.

    Raises:
      ValueError: it is not a number or array. `with_loss_scale` and `scaled_value_and_grad` require one that is
        finite and above 0, but do not check a jax array.

    Example:
      >>> import jax.numpy as jnp
      >>> loss_scale = StaticLossScale(1024.0)
      >>> loss_scale.unscale(loss_scale.scale(jnp.float16(1.5)))  # in float32, so never inf
      Array(1.5, dtype=float32)

    Reference: jmp 0.0.4, `jmp.StaticLossScale`.
    """

    loss_scale: Any

    _is_leaf: ClassVar[bool] = False  # set on instances, because a leaf may be replaced by any object

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, np.ndarray | np.generic):  # converted, because the structure must be hashable
            object.__setattr__(self, "loss_scale", self.loss_scale.item())
        object.__setattr__(self, "_is_leaf", isinstance(self.loss_scale, jax.Array))
        _check_static_number(self.loss_scale)
        _warn_of_zero_inverse(self)

    def scale(self, tree: Tree) -> Tree:
        """Returns the tree with floating and complex leaves times the scale, at least float32."""
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Returns the tree with floating and complex leaves divided by the scale, at least float32."""
        return unscale_tree(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Returns itself."""
        del grads_finite
        return self


def _flatten_static(scale: StaticLossScale) -> tuple[_Leaves, Any]:
    if scale._is_leaf:
        return (scale.loss_scale,), None
    return (), scale.loss_scale


def _unflatten_static(number: object, leaves: Any) -> StaticLossScale:
    result = object.__new__(StaticLossScale)
    object.__setattr__(result, "loss_scale", leaves[0] if leaves else number)
    object.__setattr__(result, "_is_leaf", bool(leaves))
    return result


jax.tree_util.register_pytree_with_keys(
    StaticLossScale,
    lambda s: (
        [(GetAttrKey("loss_scale"), x) for x in _flatten_static(s)[0]],
        _flatten_static(s)[1],
    ),
    _unflatten_static,
    _flatten_static,
)


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
        return self._with_state(scale, counter, left)

    def _larger_and_smaller(self, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.backoff_factor is None:  # as jmp computes it
            return scale * np.float32(self.factor), scale / np.float32(self.factor)
        return float64_product(scale, self.factor), float64_product(scale, self.backoff_factor)

    def _with_state(self, *state: object) -> "DynamicLossScale":
        return _unflatten_dynamic(_flatten_dynamic(self)[1], state)


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
    return x.item() if isinstance(x, jax.Array | np.ndarray | np.generic) else x


def _warn_if_not_floating(x: object, name: str) -> None:
    if isinstance(x, bool | int | float | jax.Array | np.ndarray | np.generic):
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            # jmp's tests expect its words.
            warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=4)


def _check_static_number(x: object) -> None:
    if not isinstance(x, jax.Array) and (isinstance(x, bool) or not isinstance(x, int | float)):
        raise ValueError(f"loss_scale={x!r} must be a number")


def _check_own_fields(scale: DynamicLossScale) -> None:
    backoff, largest = scale.backoff_factor, scale.max_loss_scale
    if backoff is not None and not 0 < backoff < 1:
        raise ValueError(f"backoff_factor={backoff} must be between 0 and 1")
    if not 0 < largest <= LARGEST_SCALE:
        raise ValueError(f"max_loss_scale={largest} must be between 0 and 2**126")
    if largest < scale.min_loss_scale < math.inf:
        raise ValueError(f"min_loss_scale={scale.min_loss_scale} must not exceed max_loss_scale={largest}")
    for name, least in (("hysteresis", 1), ("counter_start", -(2**31))):
        value = getattr(scale, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be an integer of at least {least}")


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
    _warn_of_zero_inverse(scale)


def _warn_of_zero_inverse(scale: StaticLossScale | DynamicLossScale) -> None:
    start = scale.loss_scale
    known = isinstance(start, int | float | np.ndarray | np.generic)
    if known and np.any(np.asarray(start) > LARGEST_SCALE):
        warnings.warn(
            f"{type(scale).__name__}: loss_scale={start} is above 2**126, so its inverse and all unscaled gradients "
            "are zero",
            stacklevel=5,
        )
