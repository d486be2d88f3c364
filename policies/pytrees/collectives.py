"""Collectives over mesh axes: gradient reductions in a chosen dtype.

Inside `jax.shard_map`, jax itself sums a gradient with respect to replicated parameters over the mesh,
in the compute dtype, where it can overflow. `pvary` marks the parameters as different
per device before they are cast, so that gradients stay local until `reduce_gradients` averages
them in the policy's dtype.

The "gradients" of flax's fp8 scales and histories of maxima are their next values. `flax.linen.fp8_ops` stores them
next to the parameters, in the collection `_overwrite_with_gradient`. No optimizer updates them, no loss scale divides
them, no policy casts them. Over several micro-batches or devices the largest values are taken, as flax itself combines
them.

Reference: `flax.training.train_state.TrainState.apply_gradients`; Micikevicius et al., "FP8 Formats for Deep
Learning", https://arxiv.org/abs/2209.05433.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmp_train.policies.pytrees.argument_checks import shown
from jmp_train.policies.pytrees.casting import (
    float_dtype,
    is_float_array,
    is_half,
    is_inexact_array,
    is_key,
    upcast_to_float32,
)
from jmp_train.policies.pytrees.paths import path_name
from jmp_train.policies.pytrees.tree_nodes import is_nnx_variable
from jmp_train.policies.types import Grads, PyTree

COLLECTION = "_overwrite_with_gradient"


def is_overwritten(path: KeyPath) -> bool:
    """Returns whether a leaf of parameters or gradients is in flax's collection."""
    return COLLECTION in path_name(path).split("/")


def refuse_overwritten(params: PyTree) -> None:
    """Raises TypeError with the leaf's name if an optimizer would train a leaf that its gradient should overwrite.

    Args:
      params: parameters passed to an optimizer's `init`. Variables of flax nnx are recognized by their type, because
        nnx keeps a linen layer's collections in one tree.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_nnx_variable):
        if is_overwritten(path) or (is_nnx_variable(x) and type(x).__name__ == COLLECTION):
            raise TypeError(
                f"params {path_name(path)!r} is in flax's collection {COLLECTION!r} of fp8 scales and histories, "
                "which an optimizer must not train: their gradients are their next values. With linen, use "
                "jt.train_step or jt.FlaxTrainState, or pass only the other collections to the optimizer's init and "
                "update. With flax nnx, use autocast's rule 'fp8', which keeps such state itself"
            )


def trained(params: PyTree) -> Any:
    """Returns the parameters, or their gradients, that an optimizer updates.

    Args:
      params: pytree; flax's collection is left out of its mappings, and of tuples and lists of them.
    """
    if not _has_overwritten(params):
        return params
    kind: Any = type(params)
    if isinstance(params, Mapping):
        return kind({name: trained(x) for name, x in params.items() if name != COLLECTION})
    if isinstance(params, tuple | list):
        return kind(map(trained, params))
    raise TypeError(f"params: collection {COLLECTION!r} must be in dicts, tuples and lists, not in a {kind.__name__}")


def trained_gradients(grads: Grads) -> Any:
    """Returns the gradients that an optimizer uses.

    They are NaN if a value in the collection is not finite, so that the optimizer skips the step: an inf in a
    batch, which fp8 clips, only reaches the maxima.
    """
    if not _has_overwritten(grads):
        return grads
    finite = [jnp.isfinite(x).all() for path, x in jax.tree_util.tree_leaves_with_path(grads) if is_overwritten(path)]
    all_finite = functools.reduce(jnp.logical_and, finite)
    return jax.tree.map(lambda g: jnp.where(all_finite, g, jnp.nan), trained(grads))


def with_overwritten(params: Any, source: Any) -> Any:
    """Returns parameters with flax's collection taken from another tree of their structure.

    Args:
      params: all parameters, or the result of `trained`.
      source: parameters or gradients.
    """
    if not _has_overwritten(source):
        return params
    kind: Any = type(source)
    if isinstance(source, Mapping):
        return kind(
            {name: x if name == COLLECTION else with_overwritten(params[name], x) for name, x in source.items()}
        )
    return kind(with_overwritten(x, y) for x, y in zip(params, source, strict=True))


def _has_overwritten(tree: PyTree) -> bool:
    return any(is_overwritten(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def map_overwritten(overwritten: Callable[..., Any], other: Callable[..., Any], *trees: object) -> Any:
    """Maps leaves by two functions: one for leaves that their gradient overwrites, one for the others."""

    def either(path: KeyPath, *leaves: object) -> Any:
        return overwritten(*leaves) if is_overwritten(path) else other(*leaves)

    return jax.tree_util.tree_map_with_path(either, *trees)


Tree = TypeVar("Tree")


def check_axis_names(axis_names: Sequence[str]) -> None:
    """Raises TypeError for a string in place of a tuple of names, because each letter would be a name."""
    if isinstance(axis_names, str):
        raise TypeError(f"axis_names={axis_names!r} must be a tuple of names: ({axis_names!r},)")
    if not isinstance(axis_names, Sequence) or isinstance(axis_names, bytes):
        raise TypeError(f"axis_names={shown(axis_names)} must be a tuple of names")


def pvary(tree: Tree, axis_names: Sequence[str]) -> Tree:
    """Marks every array as varying over mesh axes, so that its gradient is not summed over them.

    Args:
      tree: any pytree of arrays; dtypes and shapes are kept.
      axis_names: names of the axes of an enclosing `shard_map` or `pmap`; none changes nothing.

    Returns:
      The same tree. Arrays that already vary over an axis stay unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> pvary(jnp.ones(2), ()).shape
      (2,)
    """
    check_axis_names(axis_names)
    if not axis_names:
        return tree
    return jax.tree_util.tree_map(lambda x: _pvary_leaf(x, axis_names), tree)


def _pvary_leaf(x: object, axis_names: Sequence[str]) -> Any:
    # Only axes of a shard_map or pmap can be marked; vmap(axis_name=...) needs no mark.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    varying = jax.typeof(x).manual_axis_type.varying
    missing = tuple(name for name in axis_names if name in manual and name not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_like(source: PyTree, tree: Tree) -> Tree:
    """Marks arrays as varying over the mesh axes over which the arrays of another tree vary.

    Args:
      source: arrays, in the structure of `tree`.
      tree: arrays; floating and complex ones and random keys are marked.

    Example:
      >>> import jax.numpy as jnp
      >>> vary_like(jnp.ones(2), jnp.zeros(3)).shape
      (3,)
    """

    def mark(x: Any, y: Any) -> Any:
        return _pvary_leaf(y, jax.typeof(x).manual_axis_type.varying) if is_inexact_array(y) or is_key(y) else y

    return jax.tree_util.tree_map(mark, source, tree)


class Largest(NamedTuple):
    """Float32 arrays that `mean_over_axes` reduces to the largest values of all devices instead of the mean.

    Attributes:
      value: a tree of the arrays.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mean = jax.vmap(lambda x: mean_over_axes((x, Largest(x)), ("data",)), axis_name="data")
      >>> mean(jnp.array([1.0, 3.0]))
      (Array([2., 2.], dtype=float32), Largest(value=Array([3., 3.], dtype=float32)))
    """

    value: Any


def reduce_gradients(grads: Tree, axis_names: Sequence[str], dtype: DTypeLike = jnp.float32) -> Tree:
    """Averages gradients over mesh axes in `dtype` and returns them in float32.

    Args:
      grads: pytree of local gradients, scaled or not, of any floating or complex dtype.
      axis_names: axes to average over; with none, gradients are only upcast to float32.
      dtype: dtype of the all-reduce. Half types halve the traffic; each device's part is divided
        by the number of devices first, so that the sum does not overflow (small values vanish).
        Complex gradients keep their dtype, because there are no half-precision complex numbers.

    Returns:
      The mean gradients; half types are returned as float32, others stay. Leaves that are neither
      floating nor complex (float0, keys) stay unchanged.

    Raises:
      ValueError: `dtype` is not a floating dtype.
      TypeError: `axis_names` is a string.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mean = jax.vmap(lambda g: reduce_gradients(g, ("data",)), axis_name="data")
      >>> mean(jnp.array([1.0, 3.0], jnp.float16))
      Array([2., 2.], dtype=float32)
    """
    reduce_dtype = float_dtype(dtype, "dtype")
    check_axis_names(axis_names)
    grads = upcast_to_float32(grads)
    if not axis_names:
        return grads
    if is_half(reduce_dtype):
        count, add = lax.axis_size(tuple(axis_names)), partial(sum_over_axes, axis_names=axis_names)

        def mean(g: jax.Array) -> Any:
            if not is_inexact_array(g):
                return g
            return _mean(pvary(g, axis_names), count, reduce_dtype, add)

    else:

        def mean(g: jax.Array) -> Any:
            return mean_over_axes(g, axis_names)

    return map_overwritten(lambda g: _max_over_axes(g, axis_names), mean, grads)


def scatter_gradients(grads: Tree, dimensions: PyTree, axis_name: str, dtype: DTypeLike = jnp.float32) -> Tree:
    """Averages gradients over a mesh axis as `reduce_gradients` does; each device gets its own part of them.

    Args:
      grads: pytree of local gradients, of any floating or complex dtype.
      dimensions: pytree of integers like `grads`: the dimension along which a gradient is split into one part per
        device; -1 for gradients that all devices get whole.
      axis_name: the axis to average over.
      dtype: see `reduce_gradients`.

    Returns:
      The mean gradients, in float32 or higher precision; those with a dimension as this device's part.

    Raises:
      ValueError: `dtype` is not a floating dtype.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> local = jnp.array([[1.0, 2.0], [3.0, 4.0]])  # of two devices
      >>> jax.vmap(lambda g: scatter_gradients(g, 0, "data"), axis_name="data")(local)
      Array([[2.],
             [3.]], dtype=float32)

    Reference: Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054.
    """
    reduce_dtype = float_dtype(dtype, "dtype")
    count = lax.axis_size(axis_name)

    def scatter(x: jax.Array, dimension: int) -> Any:
        if dimension < 0 or count == 1:
            return reduce_gradients(x, (axis_name,), reduce_dtype)
        add = partial(lax.psum_scatter, axis_name=axis_name, scatter_dimension=dimension, tiled=True)
        return _mean(upcast_to_float32(pvary(x, (axis_name,))), count, reduce_dtype, add)

    def largest(x: jax.Array, dimension: int) -> Any:
        del dimension
        return _max_over_axes(x, (axis_name,))

    return map_overwritten(largest, scatter, grads, dimensions)


def sum_over_axes(x: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Returns the sum of an array over mesh axes.

    Axes of one device are left out if possible, because XLA refuses to reduce over such an axis in a `shard_map` that
    leaves another axis to jax.
    """
    x = pvary(x, axis_names)
    names = _axes_of_many(x, axis_names)
    return lax.psum(x, names) if names else x


def _axes_of_many(x: jax.Array, axis_names: Sequence[str]) -> tuple[str, ...]:
    varying = jax.typeof(x).manual_axis_type.varying
    return tuple(name for name in axis_names if lax.axis_size(name) > 1 or name in varying)


def mean_over_axes(tree: Tree, axis_names: Sequence[str]) -> Tree:
    """Averages floating and complex arrays over mesh axes, in float32 or higher precision; other leaves stay.

    The dtypes are kept. Without axes this changes nothing. For arrays in a `Largest`, it takes the largest values.
    """
    if not axis_names:
        return tree

    def mean(x: Any) -> Any:
        if isinstance(x, Largest):
            return jax.tree_util.tree_map(lambda y: _max_over_axes(y, axis_names), x)
        if not is_inexact_array(x):
            return x
        upcast = upcast_to_float32(pvary(x, axis_names))
        return (sum_over_axes(upcast, axis_names) / lax.axis_size(tuple(axis_names))).astype(x.dtype)

    return jax.tree_util.tree_map(mean, tree, is_leaf=lambda x: isinstance(x, Largest))


def _max_over_axes(x: jax.Array, axis_names: Sequence[str]) -> Any:
    x = upcast_to_float32(pvary(x, axis_names))
    names = _axes_of_many(x, axis_names)
    return lax.pmax(x, names) if names else x


def _mean(x: jax.Array, count: int, dtype: DTypeLike, add: Callable[[Any], Any]) -> Any:
    """Returns the mean over `count` devices, which `add` sums; half-precision values are divided before the sum."""
    if is_half(dtype) and is_float_array(x):
        return add((x / count).astype(dtype)).astype(x.dtype)
    return add(x) / count
