"""Reports distinct values of a batch that become equal in a half type, and NumPy's 64-bit numbers in 32 bits."""

import dataclasses
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_train.policies.autocasting import warn_user
from jmp_train.policies.dtype_policies.policy import AutocastPolicy, PathPolicy, Policy, named_policy
from jmp_train.policies.pytrees import is_float_array, named_leaves
from jmp_train.policies.types import PyTree

_ROWS, _NUMBERS, _COLUMNS = 4096, 65536, 256  # largest sample of a leaf
_LOST = 0.25  # rounding error as a fraction of a leaf's standard deviation
_ROUNDED = 3  # integers that may be rounded; a mask of -1e9 is one
_EXACT = 2.0**24  # up to which float32 represents all integers
_WHOLE = 2.0**53  # beyond which all float64 numbers are integers
_SHARE = 2.0**-20  # fraction of the largest number: smaller differences may vanish in float32


class CollapsedValuesWarning(UserWarning):
    """Floats of a batch are cast to a smaller type, in which different values become equal.

    A policy casts to half precision, and JAX casts NumPy's float64 to float32, in batches and in features of graphs.

    `array_batches(policy=...)` warns for the first batch. `train_step`, `apply_policy` and
    `scaled_value_and_grad` warn on their first call outside of `jax.jit`, in which values are not
    known. Use `collapse_report` in other loops.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("error", category=jt.policies.CollapsedValuesWarning)
    """


def collapse_report(batch: PyTree, policy: Policy | PathPolicy | str) -> dict[str, str]:
    """Returns the floats of a batch that collapse when a policy casts them; an empty dictionary within `jax.jit`.

    Integers (timesteps, positions, times, ids) collapse if two different ones become equal, or
    if more than three are rounded, because there are others between them. Other numbers
    collapse if rounding moves them by more than a quarter of their standard deviation. Each column of a leaf
    [rows, columns] is checked; large leaves are sampled.

    Args:
      batch: pytree of arrays; those that are traced, not floating or in half precision are skipped.
      policy: the policy, or its name.

    Returns:
      path of a leaf -> description of the loss, for leaves that collapse.

    Example:
      >>> import jax.numpy as jnp
      >>> batch = {"t": jnp.arange(5000.0, 5008.0), "x": jnp.linspace(0, 1, 8)}
      >>> collapse_report(batch, "mixed_bfloat16")
      {'t': '8 distinct numbers from 5000 to 5007 become 1 in bfloat16'}
      >>> collapse_report(batch, "autocast_bfloat16")  # casts nothing before it is used
      {}
    """
    return {loss.path: loss.evidence for loss in check_casts(policy, batch) if loss.is_cast}


@dataclasses.dataclass(frozen=True)
class CastLoss:
    """A leaf of a batch whose different values become equal in half precision.

    Attributes:
      path: path of the leaf.
      dtype: its own dtype.
      is_cast: whether the policy casts it; if not, it collapses only if the model converts it to half floats.
      evidence: description of the loss.

    Example:
      >>> import jax.numpy as jnp
      >>> loss, = check_casts("mixed_float16", {"ids": jnp.arange(2040, 2060)})
      >>> print(loss)
      'ids' (int32): 20 distinct numbers from 2040 to 2059 become 15 in float16, if the model casts it
    """

    path: str
    dtype: str
    is_cast: bool
    evidence: str

    def __str__(self) -> str:
        rest = "" if self.is_cast else ", if the model casts it"
        return f"{self.path!r} ({self.dtype}): {self.evidence}{rest}"


def check_casts(policy: Policy | PathPolicy | str, batch: PyTree) -> tuple[CastLoss, ...]:
    """Returns the leaves of a batch whose values collapse in a policy's half type: positions, timesteps, ids, targets.

    `collapse_report` defines these values. A policy with a half compute dtype casts floats;
    under autocast, and for integers, the effect depends on the model, and `diagnose` finds it.

    Args:
      policy: the policy, or its name.
      batch: pytree of arrays; those that are traced or in half precision are skipped, and so are the indices of
        graphs, with which no model computes.

    Returns:
      The losses; none if the policy has no half type.

    Example:
      >>> import jax.numpy as jnp
      >>> batch = {"t": jnp.arange(5000.0, 5008.0), "x": jnp.linspace(0, 1, 8), "label": jnp.arange(8)}
      >>> for loss in check_casts("mixed_bfloat16", batch):
      ...     print(loss)
      't' (float32): 8 distinct numbers from 5000 to 5007 become 1 in bfloat16
    """
    default = named_policy(policy).default
    is_half = np.dtype(default.compute_dtype).itemsize == 2
    if not is_half and not isinstance(default, AutocastPolicy):
        return ()
    dtype = np.dtype(default.compute_dtype if is_half else default.autocast_dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(
        CastLoss(path, str(leaf.dtype), is_half and is_float_array(leaf), text)
        for path, leaf in named_leaves(_without_ends(batch), is_leaf=_is_index)
        if (text := lost_in_cast(leaf, dtype))
    )


def lost_in_cast(leaf: object, dtype: np.dtype, most_rounded: int = _ROUNDED) -> str | None:
    """Returns a description of the loss when an array is cast; None if it is small, or the values are not known.

    Args:
      leaf: floats of more than 16 bits, or integers; others are skipped.
      dtype: a half type, or float32.
      most_rounded: number of integers that may be rounded.
    """
    if not _is_known(leaf):
        return None
    with jax.ensure_compile_time_eval():  # the values are known, also while a function that holds them is traced
        rows = leaf[:: -(-len(leaf) // _ROWS)]
    return _of_leaf(np.asarray(rows, np.float64), dtype, most_rounded)


def warn_of_collapse(batch: PyTree, policy: Policy | PathPolicy) -> None:
    """Warns of the leaves in `collapse_report`, if there are any.

    Args:
      batch: see `collapse_report`.
      policy: see `collapse_report`.
    """
    found = collapse_report(batch, policy)
    if found:
        half = np.dtype(policy.default.compute_dtype).name
        lines = [f"{path!r}: {text}" for path, text in found.items()]
        warn_user(
            "the policy casts floats of the batch, and different values become equal:\n  "
            + "\n  ".join(lines)
            + f'\nScale them, pass them as integers, or use policy="autocast_{half}", which casts values only where '
            "operations use them.",
            CollapsedValuesWarning,
        )


def _is_index(node: object) -> bool:
    """Returns whether a node of a tree is a graph's edge index; a leaf of this kind is not an array."""
    return getattr(type(node), "is_index", False) is True


def _without_ends(batch: PyTree) -> PyTree:
    """Returns a batch without the edge indices of each `jraph.GraphsTuple` in it, which are plain arrays."""

    def is_graph(node: object) -> bool:
        return {"senders", "receivers", "n_node"} <= {*getattr(node, "_fields", ())}

    def without(node: Any) -> Any:
        return node._replace(senders=None, receivers=None) if is_graph(node) else node

    return jax.tree.map(without, batch, is_leaf=is_graph)


def _is_known(leaf: object) -> TypeGuard[jax.Array | np.ndarray]:
    if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, Tracer) or leaf.size < 2 or not leaf.ndim:
        return False
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return False
    is_wide = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits > 16
    return is_wide or jnp.issubdtype(leaf.dtype, jnp.integer)


def _of_leaf(values: np.ndarray, dtype: np.dtype, most_rounded: int) -> str | None:
    """Returns a description of the loss in a leaf, or in its first column that collapses."""
    if values.ndim == 2 and 1 < values.shape[1] <= _COLUMNS:
        texts = ((i, _of_numbers(column, dtype, most_rounded)) for i, column in enumerate(values.T))
        return next((f"column {i}: {text}" for i, text in texts if text), None)
    return _of_numbers(values.ravel()[:_NUMBERS], dtype, most_rounded)


def _of_numbers(values: np.ndarray, dtype: np.dtype, most_rounded: int) -> str | None:
    distinct = np.unique(values[np.isfinite(values)])
    with np.errstate(over="ignore"):
        rounded = distinct.astype(dtype).astype(np.float64)
    kept, moved = len(np.unique(rounded)), int((rounded != distinct).sum())
    is_whole = bool((distinct == np.rint(distinct)).all())
    if kept == len(distinct) and not (is_whole and moved > most_rounded):
        return None
    error = np.sqrt(np.mean((rounded - distinct) ** 2))
    if not is_whole and error <= _LOST * distinct.std():
        return None
    range_text = f"{len(distinct)} distinct numbers from {distinct[0]:.9g} to {distinct[-1]:.9g}"
    if infinite := int(np.isinf(rounded).sum()):
        some = "" if infinite == len(distinct) else f", of which {infinite}"
        return f"{range_text}{some} become infinite in {dtype.name}"
    if kept < len(distinct):
        return f"{range_text} become {kept} in {dtype.name}"
    return f"{range_text}, of which {dtype.name} rounds {moved}"


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
            f"{what} has float64 values, which JAX casts to float32, and different values become equal:\n  "
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
    some = array[:: -(-len(array) // _ROWS)]
    with np.errstate(invalid="ignore", over="ignore"):
        some = some[np.isfinite(some)]
        most, spread = np.abs(some).max(initial=0), some.std() if some.size else 0.0
    may_be_whole, is_finite = _EXACT < most <= _WHOLE, most <= np.finfo(np.float32).max
    if is_finite and not may_be_whole and spread >= _SHARE * most:
        return None  # the usual case, which takes less time than sorting the numbers
    return lost_in_cast(array, np.dtype(np.float32), most_rounded=1)
