"""Loss scales: their interface, those that do not change, one for each of several losses; and checks of arguments.

A loss scale keeps half-precision gradients from underflow. `DynamicLossScale` is in a module of its own.

Bad values raise ValueError whatever their type, so that users catch one class. Errors name the argument, or the missing
parts of a loss scale; warnings point to the user's line.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from jmp_train.policies.autocasting import warn_user
from jmp_train.policies.pytrees import (
    all_finite,
    at_least_float32,
    check_number,
    is_inexact,
    map_overwritten,
    named_leaves,
    plain,
    shown,
)
from jmp_train.policies.types import PyTree

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
      ValueError: the scale is not a number or array. `with_loss_scale` and `scaled_value_and_grad` require one that is
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
        if isinstance(self.loss_scale, jax.Array | np.ndarray) and self.loss_scale.shape:
            raise ValueError(f"loss_scale={shown(self.loss_scale)} must be a number")
        if isinstance(self.loss_scale, np.ndarray | np.generic):  # converted, because the structure must be hashable
            object.__setattr__(self, "loss_scale", self.loss_scale.item())
        object.__setattr__(self, "_is_leaf", isinstance(self.loss_scale, jax.Array))
        is_number = isinstance(self.loss_scale, int | float) and not isinstance(self.loss_scale, bool)
        if not is_number and not self._is_leaf:
            raise ValueError(f"loss_scale={self.loss_scale!r} must be a number")
        warn_of_zero_inverse(self)

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
    lambda s: ([(GetAttrKey("loss_scale"), x) for x in _flatten_static(s)[0]], _flatten_static(s)[1]),
    _unflatten_static,
    _flatten_static,
)


def warn_of_zero_inverse(scale: LossScale) -> None:
    """Warns if a loss scale is so large that its inverse is zero; called by `__post_init__`."""
    start = scale.loss_scale
    known = isinstance(start, int | float | np.ndarray | np.generic)
    if known and np.any(np.asarray(start) > LARGEST_SCALE):
        warnings.warn(
            f"{type(scale).__name__}: loss_scale={start} is above 2**126, so its inverse and all unscaled gradients "
            "are zero",
            stacklevel=5,
        )


_METHODS = ("scale", "unscale", "adjust")


def check_range(name: str, value: float) -> None:
    """Raises unless a value is a scale that has an inverse."""
    check_number(name, value)
    value = plain(value)
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise ValueError(f"{name}={value!r} must be between 2**-126 and 2**126")


def check_scale(name: str, value: Any) -> None:
    """Raises unless a value is a scale that has an inverse; warns if it makes scaling round."""
    check_range(name, value)
    _warn_if_inexact(name, value)


def check_floor(name: str, value: float, start: float) -> None:
    """Raises unless a value is a scale of at most `start`."""
    check_range(name, value)
    if value > start:
        raise ValueError(f"{name}={value!r} must not exceed the initial scale, {start}")


def check_growth(name: str, value: float) -> None:
    """Raises unless a value is a factor above 1; warns if it makes scaling round."""
    check_range(name, value)
    if value <= 1:
        raise ValueError(f"{name}={value!r} must be above 1")
    _warn_if_inexact(name, value)


def check_backoff(name: str, value: float) -> None:
    """Raises unless a value is a factor between 0 and 1; warns if it makes scaling round."""
    check_range(name, value)
    if value >= 1:
        raise ValueError(f"{name}={value!r} must be below 1")
    _warn_if_inexact(name, value)


def _warn_if_inexact(name: str, value: float) -> None:
    if math.frexp(value)[0] != 0.5:
        warn_user(f"{name}={value} is not a power of two: scaling and unscaling will round", UserWarning)


def is_loss_scale(x: object) -> TypeGuard[LossScale]:
    """Returns whether `x` has the names of a `LossScale`, without computing anything, whatever the leaves are.

    Example:
      >>> from jmp_train.policies import NoOpLossScale
      >>> is_loss_scale(NoOpLossScale()), is_loss_scale(NoOpLossScale), is_loss_scale(8.0)
      (True, False, False)
    """
    return not isinstance(x, type) and not _missing(x)


def _missing(x: object) -> list[str]:
    """Returns the names of a loss scale that an object lacks."""
    kind = type(x)  # a property of the instance would be computed, possibly on shapes or shardings
    has_number = hasattr(kind, "loss_scale") or "loss_scale" in getattr(x, "__dict__", ())
    return [*([] if has_number else ["loss_scale"]), *(f"{name}()" for name in _missing_methods(kind))]


def _missing_methods(kind: type) -> list[str]:
    return [name for name in _METHODS if not callable(getattr(kind, name, None))]


def check_loss_scale(scale: object, hint: str) -> None:
    """Raises an error unless an object can scale gradients.

    Args:
      scale: the argument `loss_scale`, or one of a `PerLossScale`.
      hint: source of a loss scale, for the message.

    Raises:
      TypeError: the value lacks a name of a `LossScale`, or is not a pytree of numbers; the message names it.
      ValueError: its scale is a Python number that is not finite and above 0.
    """
    text = repr(scale)
    given = text if len(text) < 200 else f"a {type(scale).__name__}"  # possibly parameters or a model
    what = f"loss_scale must be a LossScale, got {given}"
    if isinstance(scale, type) and not _missing_methods(scale):
        raise TypeError(f"{what}, a class; pass an instance: {scale.__name__}(...)")
    if missing := _missing(scale):
        if len(missing) <= len(_METHODS):  # it was intended as a loss scale
            listed = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            raise TypeError(f"{what}, whose class {type(scale).__name__} has no {listed}")
        raise TypeError(f"{what}; {hint}")
    if jax.tree_util.all_leaves([scale]):
        raise TypeError(
            f"{what}, whose class {type(scale).__name__} is not a pytree; register it, for example with "
            "jax.tree_util.register_dataclass"
        )
    for path, x in named_leaves(scale):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(
                f"{what}, whose leaf {path!r} is not a number or array; mark settings as static with "
                "dataclasses.field(metadata={'static': True})"
            )
    number = scale.loss_scale if is_loss_scale(scale) else None
    if isinstance(number, int | float) and not 0 < number < math.inf:
        raise ValueError(f"loss_scale={number!r} must be a finite number above 0")


def check_adjusted(new: PyTree, old: PyTree) -> None:
    """Raises TypeError if the result of `adjust` cannot replace the old loss scale in a compiled step.

    Args:
      new: the result of `adjust`.
      old: the loss scale before.
    """
    name = f"loss_scale: {type(old).__name__}.adjust"
    structures = [jax.tree_util.tree_structure(tree) for tree in (new, old)]
    if structures[0] != structures[1]:
        raise TypeError(
            f"{name} must return a scale of the same structure, got\n  {structures[0]}\nfrom\n  {structures[1]}"
        )
    for (path, x), (_, y) in zip(named_leaves(new), named_leaves(old), strict=True):
        kinds = [f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in (x, y)]
        if kinds[0] != kinds[1]:
            raise TypeError(f"{name} must keep shapes and dtypes; it changed {path!r} from {kinds[1]} to {kinds[0]}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerLossScale:
    """Independent loss scales, one per loss: an overflow of one loss reduces only its own scale.

    It replaces a `LossScale` in `with_loss_scale`. It takes tuples of losses and of gradients,
    in the same order; `train_step`'s loss function then returns a tuple of losses, and
    `get_loss_scale(opt_state, loss_id=1)` is the second loss's scale.

    Args:
      loss_scales: the loss scales, at least one.

    Raises:
      TypeError: the argument is not a tuple.
      ValueError: there is none.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import StaticLossScale, torch_loss_scale, with_loss_scale
      >>> scales = PerLossScale((StaticLossScale(8.0), torch_loss_scale(4.0)))
      >>> optimizer = with_loss_scale(optax.sgd(1.0), scales)
      >>> params = jnp.ones(())
      >>> state = optimizer.init(params)
      >>> grads = (jnp.array(8.0), jnp.array(4.0))  # of two losses, scaled: 1 and 1
      >>> float(optimizer.update(grads, state, params)[0])
      -2.0

    Reference: `num_losses` and `loss_id` of NVIDIA Apex e13873de, apex/amp/handle.py.
    """

    loss_scales: tuple[LossScale, ...]

    def __post_init__(self) -> None:
        # jax puts other objects here, such as shardings
        if is_loss_scale(self.loss_scales) or isinstance(self.loss_scales, int | float | str):
            raise TypeError(f"loss_scales must be a tuple of loss scales, got {self.loss_scales!r}")
        if isinstance(self.loss_scales, list):
            object.__setattr__(self, "loss_scales", tuple(self.loss_scales))
        if self.loss_scales == ():
            raise ValueError("loss_scales=() must have at least one loss scale")

    @property
    def loss_scale(self) -> jax.Array:
        """The scales, float32 [losses]."""
        return jnp.stack([jnp.asarray(s.loss_scale, jnp.float32) for s in self.loss_scales])

    def scale(self, losses: Sequence[Any]) -> tuple[Any, ...]:
        """Returns each loss times its scale."""
        self._check_count("loss_fn returned", losses)
        return tuple(s.scale(loss) for s, loss in zip(self.loss_scales, losses, strict=True))

    def unscale(self, trees: Sequence[Any]) -> tuple[Any, ...]:
        """Returns each loss's gradients divided by its scale."""
        self._check_count("updates is", trees)
        return tuple(s.unscale(tree) for s, tree in zip(self.loss_scales, trees, strict=True))

    def adjust(self, grads_finite: Sequence[Any]) -> "PerLossScale":
        """Returns the scales for the next step, given for each loss whether its gradients were finite."""
        pairs = zip(self.loss_scales, grads_finite, strict=True)
        return PerLossScale(tuple(s.adjust(finite) for s, finite in pairs))

    def _check_count(self, what: str, given: PyTree) -> None:
        count = len(self.loss_scales)
        if not isinstance(given, tuple) or len(given) != count:
            came = f"{len(given)} losses" if isinstance(given, tuple) else "one"
            raise ValueError(f"{what} {came}, but there are {count} loss scales: a tuple of {count} is needed")


LossScales: TypeAlias = LossScale | PerLossScale  # in an optimizer's state


def check_loss_scales(loss_scale: object, hint: str) -> None:
    """Raises an error unless an object can scale gradients; see `check_loss_scale`.

    Args:
      loss_scale: the loss scale; each one of a `PerLossScale` is checked.
      hint: source of a loss scale, for the message.
    """
    for scale in loss_scale.loss_scales if isinstance(loss_scale, PerLossScale) else (loss_scale,):
        if isinstance(scale, PerLossScale):
            raise TypeError(f"each of loss_scales must be the scale of one loss, got {scale!r}")
        check_loss_scale(scale, hint)


def scales_in(loss_scale: LossScales) -> tuple[LossScale, ...]:
    """Returns the scale of each loss, or the single scale."""
    return loss_scale.loss_scales if isinstance(loss_scale, PerLossScale) else (loss_scale,)


class CheckedGradients(NamedTuple):
    """The result of `unscale_and_check`.

    Attributes:
      grads: unscaled gradients; the sum over several losses.
      finite: bool scalar, True if all of them are finite, on all devices of the axes.
      next_loss_scale: the loss scale of the next step.
    """

    grads: Any
    finite: jax.Array
    next_loss_scale: LossScales


def unscale_and_check(loss_scale: LossScales, grads: Any, axis_names: Sequence[str]) -> CheckedGradients:
    """Returns unscaled gradients, whether all are finite, and the loss scale for the next step.

    Args:
      loss_scale: the loss scale of the forward pass.
      grads: scaled gradients, in float32; under a `PerLossScale` a tuple of them, which is summed.
      axis_names: axes over which the devices agree on `finite`.
    """
    if not isinstance(loss_scale, PerLossScale):
        unscaled = loss_scale.unscale(grads)
        finite = all_finite(unscaled, axis_names)
        return CheckedGradients(unscaled, finite, _adjusted(loss_scale, finite))
    parts = loss_scale.unscale(grads)
    tests = [all_finite(part, axis_names) for part in parts]
    total = functools.reduce(lambda a, b: map_overwritten(jnp.maximum, jnp.add, a, b), parts)
    finite = functools.reduce(jnp.logical_and, tests, all_finite(total, axis_names))
    return CheckedGradients(total, finite, _adjusted(loss_scale, tests))


def _adjusted(loss_scale: LossScales, finite: Any) -> LossScales:
    adjusted = loss_scale.adjust(finite)
    check_adjusted(adjusted, loss_scale)
    return adjusted
