"""Casts the floating-point arrays of a tree, whose other leaves stay, and copies arrays in the dtype of others."""

from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies.pytrees.dtypes import at_least_float32, half_dtype
from jmp_train.policies.types import PyTree

Tree = TypeVar("Tree")


def is_float_array(x: object) -> TypeGuard[jax.Array]:
    """Returns whether `x` is a jax or NumPy array (tracers included) of a floating dtype."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def is_inexact_array(x: object) -> TypeGuard[jax.Array]:
    """Returns whether `x` is a jax or NumPy array (tracers included) of a floating or complex dtype."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


def cast_leaf(x: object, dtype: DTypeLike) -> Any:
    """Returns `x` cast to `dtype` if it is a floating array, otherwise `x` itself."""
    if not is_float_array(x):
        return x
    return x if isinstance(x, jax.Array) and x.dtype == dtype else x.astype(dtype)


def cast_floating(tree: Tree, dtype: DTypeLike) -> Tree:
    """Returns `tree` with every floating array cast to `dtype`; NumPy arrays stay on the host."""
    return jax.tree_util.tree_map(lambda x: cast_leaf(x, dtype), tree)


def cast_like(tree: Tree, like: PyTree) -> Tree:
    """Returns `tree` with its floating arrays in the dtypes of those of `like`.

    Args:
      tree: any pytree.
      like: pytree of the same structure; for another structure, `tree` is returned unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> cast_like({"mean": jnp.ones(2), "n": 3}, {"mean": jnp.ones(2, jnp.float16), "n": 2})
      {'mean': Array([1., 1.], dtype=float16), 'n': 3}
    """
    if jax.tree_util.tree_structure(tree) != jax.tree_util.tree_structure(like):
        return tree
    # Also for the same dtype, because astype makes a weak type strong, as in stored arrays.
    return jax.tree_util.tree_map(
        lambda x, y: x.astype(y.dtype) if is_float_array(x) and is_float_array(y) else x, tree, like
    )


def upcast_to_float32(tree: Tree) -> Tree:
    """Returns `tree` with every half-precision array cast to float32; arrays of higher precision stay."""
    return jax.tree_util.tree_map(lambda x: cast_leaf(x, at_least_float32(x.dtype)) if is_float_array(x) else x, tree)


def cast_to_full(tree: Tree) -> Tree:
    """Casts the floating arrays of a tree to float32.

    Args:
      tree: any pytree. Floating jax and NumPy arrays of any shape are cast; integers, booleans,
        complex numbers, keys and anything that is not an array stay unchanged.

    Returns:
      A tree of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> tree = cast_to_full({"w": jnp.ones(2, jnp.float16), "n": jnp.arange(2)})
      >>> tree["w"].dtype.name, tree["n"].dtype.name
      ('float32', 'int32')

    Reference: jmp 0.0.4, `jmp.cast_to_full`.
    """
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: Tree) -> Tree:
    """Casts the floating arrays of a tree to `half_dtype()`.

    Args:
      tree: any pytree; the leaves are treated as in `cast_to_full`.

    Returns:
      A tree of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> cast_to_half(jnp.ones(2)).dtype == half_dtype()
      True

    Reference: jmp 0.0.4, `jmp.cast_to_half`.
    """
    return cast_floating(tree, half_dtype())


def copy_like(x: ArrayLike, like: jax.Array) -> jax.Array:
    """Returns a copy of an array in the dtype of another, and on its devices if it is committed.

    Args:
      x: array or number.
      like: array; only the dtype of a traced one is known.

    Example:
      >>> import jax.numpy as jnp
      >>> copy_like(2, jnp.zeros((), jnp.float16))
      Array(2., dtype=float16)
    """
    x = jnp.array(x, like.dtype)
    on_devices = isinstance(like, jax.Array) and not isinstance(like, Tracer)
    return jax.device_put(x, like.sharding) if on_devices and like.committed else x
