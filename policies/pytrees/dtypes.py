"""Floating dtypes: their names in policy strings, and the half type of this machine."""

import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_NAMES: dict[str, Any] = {
    "full": jnp.float32,
    "f32": jnp.float32,
    "float32": jnp.float32,
    "f16": jnp.float16,
    "float16": jnp.float16,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "f64": jnp.float64,
    "float64": jnp.float64,
}
_SHORT_NAMES = {
    np.dtype(jnp.float32): "full",
    np.dtype(jnp.float16): "f16",
    np.dtype(jnp.bfloat16): "bf16",
    np.dtype(jnp.float64): "f64",
}


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
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"{argument}={dtype!r} is not a dtype; pass a floating dtype") from None
    if dtype is None or not _is_float_of_jax(result.name):
        raise ValueError(f"{argument}={dtype!r} must be a floating dtype of jax, such as float16")
    return result


def check_half(dtype: DTypeLike, argument: str) -> np.dtype:
    """Returns float16 or bfloat16 as a NumPy dtype; raises ValueError naming `argument` if it is another one."""
    half = float_dtype(dtype, argument)
    if half not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"{argument}={half.name} must be float16 or bfloat16")
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
    if name in _NAMES:
        return jnp.dtype(_NAMES[name])
    if _is_float_of_jax(name):
        return jnp.dtype(getattr(jnp, name))
    raise ValueError(
        f"Unknown dtype {shortened(name)} must be full, half, {', '.join(list(_NAMES)[1:])} or a float8 name"
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
    return _SHORT_NAMES.get(dtype, dtype.name)


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Returns float32 for an inexact dtype of fewer bits, the dtype itself for others."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def is_half(dtype: DTypeLike) -> bool:
    """Returns whether `dtype` is a floating dtype of fewer bits than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
