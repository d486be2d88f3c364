"""A state as named numpy arrays, and back: what a checkpoint says of each leaf, and how two are compared."""

import hashlib
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from jmp_train.host_arrays import as_bytes, is_divided, is_key, local_data
from jmp_train.policies.paths import path_name


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
    if is_divided(x):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    array = local_data(x)
    # On a CPU that is the device's memory, which the next step may be given; numpy's own its owner may change.
    mine = array.flags.owndata and array is not x
    return array if mine else array.copy()


def digest(array: np.ndarray) -> str:
    """Returns the sha256 of an array's bytes."""
    return hashlib.sha256(as_bytes(array).data).hexdigest()


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
    if is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        return Leaf(name, str(x.dtype), data.dtype.name, tuple(data.shape))
    return Leaf(name, "array", np.dtype(x.dtype).name, tuple(x.shape))
