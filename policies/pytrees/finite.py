"""Finiteness of pytrees: overflow check, report of non-finite leaves, selection between two trees."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jmp_train.policies.pytrees.casting import at_least_float32, is_inexact_array, is_key_or_data
from jmp_train.policies.pytrees.collectives import check_axis_names, sum_over_axes
from jmp_train.policies.pytrees.paths import named_leaves, path_name
from jmp_train.policies.types import PyTree

Tree = TypeVar("Tree")


def is_inexact(x: object) -> bool:
    """Returns whether `x` is a floating or complex array or number, Python's own included."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return jnp.issubdtype(x.dtype, jnp.inexact)
    return isinstance(x, float | complex)


def all_finite(tree: PyTree, axis_names: Sequence[str] = ()) -> jax.Array:
    """Returns whether every number in a tree is finite, on every device of the given mesh axes.

    Args:
      tree: any pytree; floating and complex leaves of any shape are checked.
      axis_names: axes of an enclosing `shard_map` or `pmap`. The result is the same on all their
        devices: if one of them has a non-finite number, all get False.

    Returns:
      A boolean scalar array. The host can only read it outside of jit.

    Raises:
      TypeError: `axis_names` is a string.

    Example:
      >>> import jax.numpy as jnp
      >>> bool(all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}))
      False

    Reference: jmp 0.0.4, `jmp.all_finite`; torch's `found_inf`, reduced over the group.
    """
    check_axis_names(axis_names)
    tests = [jnp.all(jnp.isfinite(x)) for x in jax.tree_util.tree_leaves(tree) if is_inexact(x)]
    return on_all_devices(functools.reduce(jnp.logical_and, tests) if tests else jnp.array(True), axis_names)


def stays_finite(new: PyTree, old: PyTree, axis_names: Sequence[str] = ()) -> jax.Array | None:
    """Returns whether every number that was finite still is, on every device of the given mesh axes.

    Args:
      new: pytree after a step.
      old: pytree of the same structure, from before the step. Numbers that are not finite in it may stay so.
      axis_names: see `all_finite`.

    Returns:
      A boolean scalar array, or None if the trees have no floating or complex arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> stays_finite({"mean": jnp.array([1.0, jnp.inf])}, {"mean": jnp.zeros(2)})
      Array(False, dtype=bool)
    """
    pairs = zip(jax.tree_util.tree_leaves(new), jax.tree_util.tree_leaves(old), strict=True)
    tests = [
        jnp.all(jnp.isfinite(x) | ~jnp.isfinite(y))
        for x, y in pairs
        if x is not y and is_inexact_array(x) and is_inexact_array(y) and x.shape == y.shape
    ]
    return on_all_devices(functools.reduce(jnp.logical_and, tests), axis_names) if tests else None


def on_all_devices(finite: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Returns whether a verdict is True on every device of the given mesh axes; without axes, the verdict."""
    return sum_over_axes((~finite).astype(jnp.int32), axis_names) == 0 if axis_names else finite


def boolean_scalar(x: ArrayLike) -> Any:
    """Returns `x` if it is a boolean scalar of Python, NumPy or jax; otherwise raises AssertionError."""
    if isinstance(x, bool):
        return np.bool_(x)
    if np.ndim(x) != 0 or getattr(x, "dtype", None) != np.bool_:
        raise AssertionError(f"expected boolean scalar, got {x!r}")
    return x


def select_tree(pred: ArrayLike, a: Tree, b: Tree) -> Tree:
    """Returns tree `a` if `pred` is true and tree `b` if it is false.

    Args:
      pred: a boolean scalar.
      a: pytree of arrays and numbers of any shape and dtype. Leaves that are neither (functions,
        strings) are taken from here.
      b: pytree of the same structure, shapes and dtypes.

    Returns:
      A tree like `a`.

    Raises:
      AssertionError: `pred` is not a boolean scalar.
      TypeError: two leaves differ in shape or dtype; the message names the leaf.
      ValueError: the structures differ.

    Example:
      >>> import jax.numpy as jnp
      >>> select_tree(jnp.array(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
      {'w': Array([0., 0.], dtype=float32)}

    Reference: jmp 0.0.4, `jmp.select_tree`.
    """
    pred = boolean_scalar(pred)
    return jax.tree_util.tree_map_with_path(lambda path, x, y: select_leaf(path, pred, x, y), a, b)


def select_leaf(path: KeyPath, pred: ArrayLike, x: object, y: object) -> Any:
    """Returns `x` if `pred` is true and `y` if it is false; `x` if it is neither an array nor a number."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return x
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.dtype != y.dtype or x.shape != y.shape:
        raise TypeError(
            f"leaf {path_name(path) or '(root)'!r} is {_describe(x)} in one tree and {_describe(y)} in the other"
        )
    return lax.select(pred, x, y)


def select_state_leaf(path: KeyPath, taken: jax.Array, finite: jax.Array | None, x: object, y: object) -> Any:
    """Returns `x` if the step was taken and its state stays finite, otherwise `y`; random keys follow the step only.

    Args:
      path: the leaf's path, for errors.
      taken: boolean scalar, whether the step was taken.
      finite: the result of `stays_finite` for the whole tree.
      x: the new leaf.
      y: the old leaf.
    """
    return select_leaf(path, taken if finite is None or is_key_or_data(x) else taken & finite, x, y)


def _describe(x: jax.Array) -> str:
    return f"{x.dtype.name}{list(x.shape)}"


class LeafReport(NamedTuple):
    """The counts of `nonfinite_report` in one leaf; scalar arrays.

    Attributes:
      nan: int32, number of NaN elements.
      inf: int32, number of infinite elements. It rises if the loss scale is too high.
      zero: int32, number of zero elements. It rises if the loss scale is too low.
      size: number of elements.
      max_abs: float32 or higher precision, the largest finite magnitude; 0 if there is none.

    Example:
      >>> LeafReport(nan=0, inf=1, zero=0, size=4, max_abs=2.0).inf
      1
    """

    nan: Any
    inf: Any
    zero: Any
    size: int
    max_abs: Any


def nonfinite_report(tree: PyTree) -> dict[str, LeafReport]:
    """Counts NaN, infinite and zero elements of every floating or complex leaf, by its path.

    It works under jit, so it reports every leaf; select the bad ones on the host.

    Args:
      tree: any pytree, usually of unscaled gradients.

    Returns:
      "path/of/leaf" -> `LeafReport`.

    Example:
      >>> import jax.numpy as jnp
      >>> grads = {"dense": {"w": jnp.array([1.0, jnp.inf])}, "bias": jnp.zeros(3)}
      >>> {path: int(leaf.inf) for path, leaf in nonfinite_report(grads).items() if leaf.inf}
      {'dense/w': 1}
    """
    return {path: _report(jnp.asarray(x)) for path, x in named_leaves(tree) if is_inexact(x)}


def _report(x: jax.Array) -> LeafReport:
    x = x.astype(at_least_float32(x.dtype))
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    return LeafReport(
        nan=jnp.isnan(x).sum(dtype=jnp.int32),
        inf=jnp.isinf(x).sum(dtype=jnp.int32),
        zero=(x == 0).sum(dtype=jnp.int32),
        size=x.size,
        max_abs=jnp.max(magnitude, initial=0),
    )
