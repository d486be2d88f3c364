"""Moves arrays between devices and the host, and finds the placement of leaves and a process's part of them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from jax.typing import ArrayLike

from jmp_train.policies.pytrees import is_key

_IMPLEMENTATIONS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}


def is_divided(x: object) -> bool:
    """Returns whether a leaf is divided between processes, so that none has all of it."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def local_data(x: ArrayLike) -> np.ndarray:
    """Returns an undivided leaf as a NumPy array; for a random key, its data."""
    if is_key(x):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return np.asarray(x)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, uint8 [bytes]."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def placement(like: object) -> Sharding | None:
    """Returns the sharding of a leaf; None if it is on no particular device."""
    fixed = isinstance(like, jax.ShapeDtypeStruct) or getattr(like, "committed", False)
    sharding = getattr(like, "sharding", None) if fixed else None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None  # eval_shape under jax.set_mesh gives meshes without devices
    return sharding


def key_implementation(key: Any) -> str:
    """Returns jax's name for the implementation of a key, or of the shape of a key."""
    return _IMPLEMENTATIONS.get(str(key.dtype)) or str(jax.random.key_impl(key))


def to_leaf(array: np.ndarray, like: Any, sharding: Sharding | None) -> Any:
    """Returns an array converted to the kind of another leaf: a jax array, a key, a NumPy array or a number.

    Args:
      array: the array; for a key, its data.
      like: the other leaf.
      sharding: sharding of the result, or of the key; None for no particular device.
    """
    if not hasattr(like, "dtype"):
        return type(like)(array.item())
    if isinstance(like, np.ndarray | np.generic):
        array = array.astype(like.dtype, copy=False)  # in its byte order
        return array if isinstance(like, np.ndarray) else array[()]
    if is_key(like):
        return jax.random.wrap_key_data(_placed(array, sharding), impl=key_implementation(like))
    return _placed(array, sharding)


def _placed(array: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
