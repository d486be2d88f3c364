"""Checks NumPy's 64-bit numbers before JAX silently converts them to 32 bits."""

import jax
import numpy as np

from jmp_train.policies.dtype_policies.collapsed_values import CollapsedValuesWarning, lost_in_cast
from jmp_train.policies.pytrees import named_leaves
from jmp_train.policies.types import PyTree
from jmp_train.policies.user_warnings import warn_user

_EXACT = 2.0**24  # up to which float32 represents all integers
_WHOLE = 2.0**53  # beyond which all float64 numbers are integers
_SHARE = 2.0**-20  # fraction of the largest number: smaller differences may vanish in float32


def check_narrowed(tree: PyTree, what: str, *, floats: bool = True) -> None:
    """Refuses 64-bit integers that do not fit into 32 bits, and warns of float64 values that collapse in float32.

    Without `jax_enable_x64`, JAX drops the upper bits of integers: 2**40 becomes 0. This function reads all integers
    and a sample of floats. Arrays of JAX are already 32-bit and are not checked.

    Args:
      tree: pytree of arrays; only NumPy arrays with 64-bit numbers are checked.
      what: description of the tree, for messages.
      floats: True to check floats.

    Raises:
      ValueError: an integer does not fit; the message names the leaves.

    Warns:
      CollapsedValuesWarning: different values of a float64 leaf become equal in float32, or several integers are
        rounded.

    Example:
      >>> check_narrowed({"time": np.array([1, 2**40])}, "the batch")
      Traceback (most recent call last):
      ValueError: the batch has 64-bit integers that do not fit into JAX's 32 bits:
        'time': from 1 to 1099511627776, where int32 ends at 2147483647
      Subtract an offset, number the distinct values, or set jax_enable_x64.
    """
    wide = [(path, x) for path, x in named_leaves(tree) if isinstance(x, np.ndarray) and x.size and _is_narrowed(x)]
    wrong = [f"{path or '(root)'!r}: {text}" for path, x in wide if (text := _beyond_32_bits(x))]
    if wrong:
        raise ValueError(
            f"{what} has 64-bit integers that do not fit into JAX's 32 bits:\n  "
            + "\n  ".join(wrong)
            + "\nSubtract an offset, number the distinct values, or set jax_enable_x64."
        )
    lost = [f"{path or '(root)'!r}: {text}" for path, x in wide if floats and (text := _lost_in_float32(x))]
    if lost:
        warn_user(
            f"{what} has float64 values, which JAX casts to float32, and they collapse:\n  "
            + "\n  ".join(lost)
            + "\nSubtract an offset, or set jax_enable_x64.",
            CollapsedValuesWarning,
        )


def _is_narrowed(array: np.ndarray) -> bool:
    """Returns whether JAX stores an array's numbers in fewer bits."""
    return array.dtype.kind in "iuf" and jax.dtypes.canonicalize_dtype(array.dtype).itemsize < array.dtype.itemsize


def _beyond_32_bits(array: np.ndarray) -> str | None:
    if array.dtype.kind == "f":
        return None
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
    least, most = int(array.min()), int(array.max())
    if limits.min <= least and most <= limits.max:
        return None
    beyond = f"begins at {limits.min}" if most <= limits.max else f"ends at {limits.max}"
    return f"from {least} to {most}, where {limits.dtype} {beyond}"


def _lost_in_float32(array: np.ndarray) -> str | None:
    if array.dtype.kind != "f" or not array.ndim:
        return None
    some = array[:: -(-len(array) // 4096)]  # as many rows as in the sample below
    with np.errstate(invalid="ignore", over="ignore"):
        some = some[np.isfinite(some)]
        most, spread = np.abs(some).max(initial=0), some.std() if some.size else 0.0
    may_be_whole, is_finite = _EXACT < most <= _WHOLE, most <= np.finfo(np.float32).max
    if is_finite and not may_be_whole and spread >= _SHARE * most:
        return None  # the usual case, which takes less time than sorting the numbers
    return lost_in_cast(array, np.dtype(np.float32), most_rounded=1)
