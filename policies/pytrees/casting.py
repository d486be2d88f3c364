"""Dtypes of arrays and their names in policy strings; casts of the floating-point arrays of a tree."""

import reprlib
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies.types import PyTree

Tree = TypeVar("Tree")

_SHORT_NAMES = {"float32": "full", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
_LONG_NAMES = {short: name for name, short in _SHORT_NAMES.items()} | {"f32": "float32"}


def half_dtype() -> DTypeLike:
    """Returns the half-precision dtype of the default device: bfloat16 on TPU, float16 elsewhere.

    It starts jax's backend. Name the dtype instead if that must not happen.

    Example:
      >>> import numpy as np
      >>> np.dtype(half_dtype()).itemsize
      2

    Reference: jmp 0.0.4, `jmp.half_dtype`.
    """
    if jax.local_devices()[0].platform == "tpu":
        return jnp.bfloat16
    return jnp.float16


def float_dtype(dtype: DTypeLike, argument: str) -> np.dtype:
    """Returns `dtype` as a NumPy dtype; raises ValueError naming `argument` if it is not a floating dtype."""
    name = dtype_name(dtype)
    if name is None:
        raise ValueError(f"{argument}={dtype!r} is not a dtype; pass a floating dtype")
    if not _is_float_of_jax(name):
        raise ValueError(f"{argument}={dtype!r} must be a floating dtype of jax, such as float16")
    return jnp.dtype(name)


def dtype_name(dtype: Any) -> str | None:
    """Returns the name of a dtype, scalar type or name; None for all else, such as arrays, which NumPy takes too."""
    if dtype is None or isinstance(dtype, jax.Array | np.ndarray | np.generic):
        return None
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return None


def check_half(dtype: DTypeLike, argument: str, *others: str) -> np.dtype:
    """Returns float16 or bfloat16 as a NumPy dtype; raises ValueError naming `argument` if it is another one.

    Args:
      dtype: the dtype.
      argument: the name of the argument.
      *others: further names that the argument may have.
    """
    half = float_dtype(dtype, argument)
    if half not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"{argument}={half.name} must be {', '.join([*others, 'float16'])} or bfloat16")
    return half


def _is_float_of_jax(name: str) -> bool:
    scalar_type: Any = getattr(jnp, name, None)
    if not isinstance(scalar_type, type(jnp.float32)):  # aliases and abstract types are not accepted
        return False
    return jnp.issubdtype(scalar_type, jnp.floating) and jnp.dtype(scalar_type).name == name


def parse_dtype(name: str) -> np.dtype:
    """Returns the dtype of `name` in a policy string ("half" asks the device)."""
    if name == "half":
        return jnp.dtype(half_dtype())
    long = _LONG_NAMES.get(name, name)
    if _is_float_of_jax(long):
        return jnp.dtype(getattr(jnp, long))
    raise ValueError(
        f"Unknown dtype {shortened(name)} must be full, half, f32, float32, f16, float16, bf16, bfloat16, f64, float64 "
        "or a float8 name"
    )


def shortened(text: str) -> str:
    """Returns a user's value for error messages: its `repr`, without the middle if it is long.

    Args:
      text: the value.

    Example:
      >>> shortened("float33"), len(shortened(5_000 * "x"))
      ("'float33'", 80)
    """
    quoting = reprlib.Repr()
    quoting.maxstring = 80
    return quoting.repr(text)


def short_name(dtype: np.dtype) -> str:
    """Returns the shortest name that `parse_dtype` understands."""
    return _SHORT_NAMES.get(dtype.name, dtype.name)


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Returns float32 for an inexact dtype of fewer bits, the dtype itself for others."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def is_half(dtype: DTypeLike) -> bool:
    """Returns whether `dtype` is a floating dtype of fewer bits than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def is_key(x: object) -> TypeGuard[jax.Array]:
    """Returns whether `x` is an array of typed random keys, or describes one.

    Example:
      >>> import jax
      >>> is_key(jax.random.key(0)), is_key(jax.random.PRNGKey(0)), is_key(0)
      (True, False, False)
    """
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # pyright: ignore


def is_key_or_data(x: object) -> TypeGuard[jax.Array]:
    """Returns whether `x` is an array of random keys, typed or as uint32 data.

    Example:
      >>> import jax
      >>> is_key_or_data(jax.random.key(0)), is_key_or_data(jax.random.PRNGKey(0)), is_key_or_data(0)
      (True, True, False)
    """
    return is_key(x) or getattr(x, "dtype", None) == jnp.uint32


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
