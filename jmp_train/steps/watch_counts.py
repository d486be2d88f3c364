"""Counts lost updates, which change nothing, and gradients that underflow in a half type."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmp_train.policies import AutocastPolicy, Grads, Params, PathPolicy
from jmp_train.policies.dtype_policies import Policy
from jmp_train.policies.loss_scaling import AUTOCASTS_BY_AMP
from jmp_train.policies.optimizers import Addition
from jmp_train.policies.pytrees import is_float_array, is_half, is_inexact_array, path_name

_HALF = 16  # bits
_MOST_COUNTED = 2**_HALF - 1


class Count(NamedTuple):
    """The number of lost elements of one array, as whole-number scalars.

    Attributes:
      lost: number of lost elements of `whole`.
      whole: number of nonzero elements.
    """

    lost: jax.Array
    whole: jax.Array


def half_type_of(policy: Policy | PathPolicy | None, loss_fn: object) -> Callable[[str, DTypeLike], np.dtype]:
    """Returns a function that finds the dtype in which the gradient of a parameter was computed.

    Args:
      policy: the policy of the step. Without one, the dtype is that to which an AMP mode autocasts, or the parameter's
        own; casts within a loss function are not seen.
      loss_fn: the loss function of the step.

    Returns:
      A function from a parameter's path and stored dtype to a dtype.

    Example:
      >>> from jmp_train.policies import get_policy
      >>> half_type_of(get_policy("autocast_float16"), None)("w", jnp.float32).name
      'float16'
    """
    default = None if policy is None else policy.default
    if isinstance(default, AutocastPolicy):
        autocast_dtype: DTypeLike | None = default.autocast_dtype
    else:
        autocast_dtype = getattr(loss_fn, AUTOCASTS_BY_AMP, None)

    def dtype_of(path: str, stored: DTypeLike) -> np.dtype:
        if autocast_dtype is not None:
            return jnp.dtype(autocast_dtype)
        return jnp.dtype(stored if policy is None else policy.policy_of(path).compute_dtype)

    return dtype_of


def count_lost_updates(addition: Addition) -> list[Count]:
    """Returns, for each array, the number of nonzero updates that leave the parameter unchanged.

    Args:
      addition: an optimizer's addition to the parameters.

    Example:
      >>> ones = jnp.ones(2, jnp.bfloat16)  # the next lower number is 2**-8 away
      >>> counts = count_lost_updates(Addition(ones, jnp.array([2.0**-13, 0.0]), ones))
      >>> int(counts[0].lost), int(counts[0].whole)
      (1, 1)
    """

    def count(old: jax.Array, update: jax.Array, new: jax.Array) -> Count:
        if not is_inexact_array(old):
            return Count(jnp.uint32(0), jnp.uint32(0))
        changes = _is_nonzero(update)
        return _counted(changes & _is_same(old, new), changes)

    return [count(*leaves) for leaves in zip(*map(jax.tree.leaves, addition), strict=True)]


def count_underflows(
    grads: Grads, params: Params, dtype_of: Callable[[str, DTypeLike], np.dtype], parts: int = 1
) -> list[Count]:
    """Returns, for each array, the number of nonzero gradients that are subnormal in a half type.

    Args:
      grads: scaled, in float32 or higher precision.
      params: arrays in the same tree.
      dtype_of: from `half_type_of`. Gradients in other dtypes are not counted.
      parts: number of micro-batches that the gradients sum; their mean is counted.

    Example:
      >>> w = jnp.ones(3)
      >>> counts = count_underflows(jnp.array([0.0, 2.0**-20, 1.0]), w, lambda path, dtype: jnp.dtype("float16"))
      >>> int(counts[0].lost), int(counts[0].whole)
      (1, 2)
    """

    def count(path: KeyPath, grad: jax.Array, param: jax.Array) -> Count:
        if not is_float_array(grad) or not is_half(half := dtype_of(path_name(path), param.dtype)):
            return Count(jnp.uint32(0), jnp.uint32(0))
        # Compares integers, because a device may flush subnormal floats to zero.
        magnitude = _magnitude_bits(grad)
        bound = np.asarray(float(jnp.finfo(half).smallest_normal) * parts, grad.dtype).view(magnitude.dtype)
        is_some = magnitude != 0
        return _counted(is_some & (magnitude < bound), is_some)

    counts = jax.tree_util.tree_map_with_path(count, grads, params)
    return jax.tree.leaves(counts, is_leaf=lambda x: isinstance(x, Count))


def _counted(lost: jax.Array, whole: jax.Array) -> Count:
    """Returns the number of True elements in each of two arrays.

    Both are counted in one reduction, in the two halves of a number, over as many elements as a half can count. XLA can
    reduce one array in its order in memory. For two arrays it cannot, and transposes a convolution's gradients.
    """
    both = whole.astype(jnp.uint32) | lost.astype(jnp.uint32) << _HALF
    partial = both.sum(_countable_dimensions(both.shape), dtype=jnp.uint32)
    return Count(_total(partial >> _HALF), _total(partial & _MOST_COUNTED))


def _total(x: jax.Array) -> jax.Array:
    return x.sum(dtype=jnp.uint32)


def _countable_dimensions(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns dimensions, the last ones first, with no more elements than half a number can count."""
    size, chosen = 1, []
    for dimension in reversed(range(len(shape))):
        if size * shape[dimension] <= _MOST_COUNTED:
            size *= shape[dimension]
            chosen.append(dimension)
    return tuple(chosen)


def _bits(x: jax.Array) -> jax.Array:
    # Bits, because XLA may compare values before they are rounded to half, and may flush subnormal numbers to zero.
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _magnitude_bits(x: jax.Array) -> jax.Array:
    bits = _bits(x)
    return bits & jnp.iinfo(bits.dtype).max >> 1


def _is_nonzero(x: jax.Array) -> jax.Array:
    return x != 0 if jnp.iscomplexobj(x) else _magnitude_bits(x) != 0


def _is_same(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns which elements are equal; zeros may differ in their signs."""
    if jnp.iscomplexobj(x):
        return x == y
    bits = _bits(x), _bits(y)
    return (bits[0] == bits[1]) | ((bits[0] | bits[1]) << 1 == 0)
