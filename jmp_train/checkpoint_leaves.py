"""A state as named numpy arrays, and back: what a checkpoint says of each leaf, and how two are compared."""

import hashlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jmp_train.policies.paths import path_name

_IMPLEMENTATIONS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}


class Leaf(NamedTuple):
    """What a checkpoint says of a leaf.

    Attributes:
      path: where it is in the tree, as `keystr` writes it.
      kind: "array", a random key's dtype such as "key<fry>", or the Python type of a number.
      dtype: numpy's name, of the key's data if it is a key.
      shape: likewise.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Returns for example "float32[3, 4]"."""
        kind = "" if self.kind == "array" else f"{self.kind} "
        return f"{kind}{self.dtype}{list(self.shape)}"


def leaves_of(state: Any) -> list[tuple[Leaf, Any]]:
    """Returns what there is to say of each leaf, and the leaf, in the order of the tree.

    Raises:
      TypeError: a leaf is neither an array nor a number.
    """
    return [(_describe(path, x), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]


def to_host(x: Any) -> np.ndarray:
    """Returns a leaf as a numpy array of its own; one that is divided between processes is gathered by all."""
    if _is_key(x):
        x = jax.random.key_data(x)
    if is_divided(x):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    array = np.asarray(x)
    # On a CPU that is the device's memory, which the next step may be given.
    return array if array.flags.owndata else array.copy()


def is_divided(x: Any) -> bool:
    """Returns whether no process has all of a leaf."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def from_host(like: Any, array: np.ndarray) -> Any:
    """Returns an array as a leaf like another, with the same placement."""
    if not hasattr(like, "dtype"):
        return type(like)(array.item())
    if isinstance(like, np.ndarray | np.generic):
        return array if isinstance(like, np.ndarray) else array[()]
    key = _is_key(like)
    sharding = getattr(like, "sharding", None)
    if sharding is None:
        placed = jnp.array(array)
    else:
        if key:
            sharding = _of_key_data(sharding, array.ndim)
        placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return jax.random.wrap_key_data(placed, impl=_implementation(like)) if key else placed


def digest(array: np.ndarray) -> str:
    """Returns the sha256 of an array's bytes."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.sha256(data.data).hexdigest()


def differences(saved: list[Leaf], wanted: list[Leaf]) -> list[str]:
    """Returns a line for each leaf that is only in one of two states, or is another in them."""
    old, new = {leaf.path: leaf for leaf in saved}, {leaf.path: leaf for leaf in wanted}
    lines = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) == new.get(path):
            continue
        found, asked = (
            str(leaf) if (leaf := those.get(path)) else "nothing" for those in (old, new)
        )
        lines.append(f"{path}: the checkpoint has {found}, the state has {asked}")
    return lines


def file_name(number: int, path: str) -> str:
    """Returns a name for a leaf's folder that says which leaf it is."""
    return f"{number:04d}" + re.sub(r"[^A-Za-z0-9_]+", ".", path).rstrip(".")[-100:]


def _describe(path: Any, x: Any) -> Leaf:
    name = keystr(path)
    if isinstance(x, bool | int | float):
        return Leaf(name, type(x).__name__, np.asarray(x).dtype.name, ())
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"state {path_name(path)!r} must be an array or a number, got {x!r}")
    if _is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        return Leaf(name, str(x.dtype), data.dtype.name, tuple(data.shape))
    return Leaf(name, "array", np.dtype(x.dtype).name, tuple(x.shape))


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _implementation(key: Any) -> str:
    """Returns what `wrap_key_data` calls the implementation of a key, or of what describes one."""
    return _IMPLEMENTATIONS.get(str(key.dtype)) or str(jax.random.key_impl(key))


def _of_key_data(sharding: Any, ndim: int) -> Any:
    """Returns the sharding of a key's data, which has one more axis than the key."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*sharding.spec, *[None] * (ndim - len(sharding.spec)))
        return jax.sharding.NamedSharding(sharding.mesh, spec)
    return sharding
