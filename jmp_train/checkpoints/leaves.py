"""A state's leaves as named NumPy arrays and back, their metadata in a checkpoint, and comparisons."""

import hashlib
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath, keystr
from jax.typing import ArrayLike

from jmp_train.distributed import as_bytes, is_divided, local_data
from jmp_train.policies import PyTree
from jmp_train.policies.files import printable
from jmp_train.policies.pytrees import is_key, path_name

# The dtypes that a checkpoint holds, by NumPy's names: all of jax's. Random keys are stored as their data.
STORED = frozenset(
    [
        "bool",
        "int1",
        "int2",
        "int4",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint1",
        "uint2",
        "uint4",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
MOST_AXES = 32  # tensorstore's limit
_OF_WRAPPERS = (".inner_state", ".loss_scale")  # parts of paths that wrappers of optimizers add


class Leaf(NamedTuple):
    """The metadata of a leaf in a checkpoint.

    Attributes:
      path: its path in the tree, as `keystr` writes it.
      kind: "array", a random key's dtype such as "key<fry>", or the Python type of a number.
      dtype: NumPy's name of the dtype; for a random key, that of its data.
      shape: the shape, likewise.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Returns dtype and shape, for example "float32[3, 4]"."""
        kind = "" if self.kind == "array" else f"{self.kind} "
        return f"{kind}{self.dtype}{list(self.shape)}"


def leaves_of(state: PyTree) -> list[tuple[Leaf, Any]]:
    """Returns each leaf with its metadata, in tree order.

    Raises:
      TypeError: a leaf is neither an array, nor a shape with a dtype, nor a number.
      ValueError: an int is too large, an array has too many axes, or two leaves have the same path.
    """
    described = [(_describe(path, x), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    paths = [leaf.path for leaf, _ in described]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"two leaves of the state have the same path, {twice}")
    return described


def check_values(state: PyTree) -> None:
    """Raises an error that names the leaf unless all leaves of a state have values that can be saved.

    Raises:
      TypeError: a leaf is a shape without values, an array that is being traced, or an array of another library.
      ValueError: a leaf was deleted, or there are no leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if not leaves:
        raise ValueError("the state has no leaves: there is nothing to save")
    for path, x in leaves:
        name = path_name(path)
        if isinstance(x, Tracer):
            raise TypeError(f"state {name!r} is traced: save outside of transforms such as jax.jit")
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise TypeError(f"state {name!r} must be an array or a number, got {shown(x)}")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(f"state {name!r} was deleted, usually by donation: save the state that the step returned")


def to_host(x: ArrayLike) -> np.ndarray:
    """Returns a leaf as a NumPy array that owns its memory; all processes gather one that is divided between them."""
    if is_divided(x):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    array = local_data(x)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    # On a CPU it would be the device's memory, which the next step may reuse; a NumPy array may be changed by its
    # owner.
    mine = array.flags.owndata and array is not x
    return array if mine else array.copy()


def digest(array: np.ndarray) -> str:
    """Returns the sha256 of an array's bytes."""
    return hashlib.sha256(as_bytes(array).data).hexdigest()


def differences(saved: list[Leaf], wanted: list[Leaf]) -> list[str]:
    """Returns a line for each leaf that differs between two states or is only in one, and a remedy."""
    old, new = {leaf.path: leaf for leaf in saved}, {leaf.path: leaf for leaf in wanted}
    lines = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) == new.get(path):
            continue
        found, asked = (str(leaf) if (leaf := those.get(path)) else "nothing" for those in (old, new))
        lines.append(f"{printable(path)}: the checkpoint has {printable(found)}, the state has {asked}")
    if _wrappers(old) != _wrappers(new):
        lines.append(
            "What is in the state of an optimizer depends on its wrappers (with_loss_scale, with_master_weights, ...) "
            "and on the kind of its loss scale: restore the state of the optimizer that was saved, and then "
            "jmp_train.adopt_opt_state(optimizer.init(params), old_opt_state) makes it one of the other optimizer"
        )
    return lines


def _wrappers(paths: Collection[str]) -> list[int]:
    """Returns the nesting depth of optimizer wrappers, and of loss scales, in a state."""
    return [max((path.count(part) for path in paths), default=0) for part in _OF_WRAPPERS]


def file_name(number: int, path: str) -> str:
    """Returns a name for a leaf's folder that identifies the leaf."""
    return f"{number:04d}" + re.sub(r"[^A-Za-z0-9_]+", ".", path).rstrip(".")[-100:]


def is_count(x: object) -> bool:
    """Returns whether a value from a file is a whole number from 0."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def shown(x: object) -> str:
    """Returns the text of an arbitrary value for error messages, on one line and truncated."""
    text = ascii(x)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _describe(path: KeyPath, x: Any) -> Leaf:
    name = keystr(path)
    if isinstance(x, bool | int | float) or type(x) is complex:
        dtype = np.asarray(x).dtype.name
        if isinstance(x, int) and dtype not in ("bool", "int64"):
            raise ValueError(
                f"state {path_name(path)!r} is an int of {x.bit_length()} bits, which does not fit into int64"
            )
        return Leaf(name, type(x).__name__, dtype, ())
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"state {path_name(path)!r} must be an array or a number, got {shown(x)}")
    if is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        return Leaf(name, str(x.dtype), data.dtype.name, tuple(data.shape))
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"state {path_name(path)!r} is a masked array, whose mask would be lost; save its data and its mask "
            "as two leaves"
        )
    try:
        dtype = np.dtype(x.dtype)
    except TypeError:  # an array of another library
        dtype = x.dtype
    if getattr(dtype, "name", None) not in STORED:
        raise TypeError(f"state {path_name(path)!r} has dtype {dtype}, which checkpoints cannot store")
    if len(x.shape) > MOST_AXES:
        raise ValueError(
            f"state {path_name(path)!r} has {len(x.shape)} axes; checkpoints can store at most {MOST_AXES}"
        )
    return Leaf(name, "array", dtype.name, tuple(x.shape))
