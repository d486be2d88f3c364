"""A state's leaves as named NumPy arrays and back, their metadata in a checkpoint, and comparisons."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jmp_train.policies import PyTree
from jmp_train.policies.files import MOST_AXES, printable
from jmp_train.policies.pytrees import is_key, path_name

# The dtypes that a checkpoint holds, by NumPy's names: all of jax's. Random keys are stored as their data.
STORED = frozenset(np.dtype(x).name for x in vars(jnp).values() if isinstance(x, type(jnp.int8)))
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
    described = [
        (leaf_of(keystr(path), x, path_name(path)), x) for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]
    if (twice := _repeated_path(leaf for leaf, _ in described)) is not None:
        raise ValueError(f"two leaves of the state have the same path, {twice}")
    return described


def _repeated_path(leaves: Iterable[Leaf]) -> str | None:
    """Returns the first path that two leaves have."""
    counts = Counter(leaf.path for leaf in leaves)
    return next((path for path, count in counts.items() if count > 1), None)


def differences(saved: Sequence[Leaf], wanted: Sequence[Leaf], what: str = "checkpoint") -> list[str]:
    """Returns a line for each leaf that differs between two states or is only in one, and a remedy."""
    old, new = {leaf.path: leaf for leaf in saved}, {leaf.path: leaf for leaf in wanted}
    lines = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) == new.get(path):
            continue
        found, asked = (str(leaf) if (leaf := those.get(path)) else "nothing" for those in (old, new))
        lines.append(f"{printable(path)}: the {what} has {printable(found)}, the state has {asked}")
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


def leaves_in(described: list[dict[str, Any]]) -> list[Leaf]:
    """Returns the leaves that a file describes; raises an error that names the leaf with an impossible entry."""
    leaves = [Leaf(x["path"], x["kind"], x["dtype"], tuple(x["shape"])) for x in described]
    for number, (path, kind, dtype, shape) in enumerate(leaves):
        if not isinstance(path, str) or not isinstance(kind, str):
            raise ValueError(f"it says of leaf {number} path {as_ascii(path)} and kind {as_ascii(kind)}")
        if dtype not in STORED:
            raise ValueError(f"it says of leaf {number} dtype {as_ascii(dtype)}")
        if len(shape) > MOST_AXES or not all(map(is_count, shape)) or math.prod(max(1, n) for n in shape) >= 2**60:
            raise ValueError(f"it says of leaf {number} shape {as_ascii(shape)}, which no array has")
    if (twice := _repeated_path(leaves)) is not None:
        raise ValueError(f"it has two leaves of the same path {printable(twice)}")
    return leaves


def is_count(x: object) -> bool:
    """Returns whether a value from a file is a whole number from 0."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def as_ascii(x: object) -> str:
    """Returns the text of an arbitrary value for error messages, on one line and truncated."""
    text = ascii(x)
    return text if len(text) <= 80 else f"{text[:80]}..."


def leaf_of(path: str, x: Any, name: str | None = None) -> Leaf:
    """Returns the metadata of a leaf.

    Args:
      path: its path.
      x: the leaf.
      name: its name in errors; default: the path.

    Raises:
      TypeError: it is neither an array of one of jax's dtypes, nor a shape with a dtype, nor a number.
      ValueError: it is too large an int, or has too many axes.
    """
    name = path if name is None else name
    if isinstance(x, bool | int | float) or type(x) is complex:
        dtype = np.asarray(x).dtype.name
        if isinstance(x, int) and dtype not in ("bool", "int64"):
            raise ValueError(f"state {name!r} is an int of {x.bit_length()} bits, which does not fit into int64")
        return Leaf(path, type(x).__name__, dtype, ())
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"state {name!r} must be an array or a number, got {as_ascii(x)}")
    if is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        return Leaf(path, str(x.dtype), data.dtype.name, tuple(data.shape))
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"state {name!r} is a masked array, whose mask would be lost; save its data and its mask as two leaves"
        )
    try:
        dtype = np.dtype(x.dtype)
    except TypeError:  # an array of another library
        dtype = x.dtype
    if getattr(dtype, "name", None) not in STORED:
        raise TypeError(f"state {name!r} has dtype {dtype}, which checkpoints cannot store")
    if len(x.shape) > MOST_AXES:
        raise ValueError(f"state {name!r} has {len(x.shape)} axes; checkpoints can store at most {MOST_AXES}")
    return Leaf(path, "array", dtype.name, tuple(x.shape))
