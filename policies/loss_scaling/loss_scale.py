"""Loss scales: their interface, and those that do not change.

A loss scale keeps half-precision gradients from underflow. `DynamicLossScale` is in a module of its own.
"""

import dataclasses
import warnings
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from jmp_train.policies.pytrees import at_least_float32, is_inexact, map_overwritten, shown

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
