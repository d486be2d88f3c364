"""Reports distinct values of a batch that become one in a policy's half compute dtype."""

import dataclasses
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_train.policies.dtype_policies.path_policy import PathPolicy, named_policy
from jmp_train.policies.dtype_policies.policy import AutocastPolicy, Policy
from jmp_train.policies.pytrees import is_float_array, named_leaves
from jmp_train.policies.types import PyTree
from jmp_train.policies.user_warnings import warn_user

_ROWS, _NUMBERS, _COLUMNS = 4096, 65536, 256  # of a leaf, that are looked at
_LOST = 0.25  # of a leaf's standard deviation, as rounding error
_ROUNDED = 3  # whole numbers; a mask of -1e9 is one


class CollapsedValuesWarning(UserWarning):
    """Floats of a batch are cast to a smaller type, which cannot tell them apart.

    A policy casts to half precision, and JAX casts NumPy's float64 to float32, in batches and in features of graphs.

    `array_batches(policy=...)` warns of the first batch, and so do `train_step`, `apply_policy` and
    `scaled_value_and_grad` where they are first called outside of `jax.jit`, in which values are not
    known. `collapse_report` is for all other loops.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("error", category=jt.CollapsedValuesWarning)
    """


def collapse_report(batch: PyTree, policy: Policy | PathPolicy | str) -> dict[str, str]:
    """Returns which floats of a batch collapse when a policy casts them; nothing within `jax.jit`.

    Whole numbers (timesteps, positions, times, ids) collapse if two that differ become one; so they
    do if more than three are rounded, for there are others between them. Numbers that are not whole
    do if rounding moves them by more than a quarter of their standard deviation. Of a leaf
    [rows, columns] each column is looked at; of large leaves a part.

    Args:
      batch: pytree of arrays; those that are traced, no floats or half already are passed over.
      policy: the policy, or its name.

    Returns:
      path of a leaf -> what happens to it, for those that collapse.

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
    """A leaf of a batch whose values half precision cannot tell apart.

    Attributes:
      path: of the leaf.
      dtype: its own.
      is_cast: whether the policy casts it; if not, it is lost only where the model makes half floats of it.
      evidence: what happens to its values.

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

    Which values those are is said at `collapse_report`. Floats are cast by a policy whose compute dtype is half;
    under autocast, and for integers, it depends on what the model does with them, which `diagnose` sees.

    Args:
      policy: the policy, or its name.
      batch: pytree of arrays; those that are traced or half already are passed over, and so are the indices of
        graphs, which no model computes with.

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
    """Returns what happens to an array's values if it is cast; None if little does, or its values are not known.

    Args:
      leaf: floats of more than 16 bits, or integers; anything else is passed over.
      dtype: a half type, or float32.
      most_rounded: how many whole numbers may be rounded.
    """
    return _of_leaf(_sample(leaf), dtype, most_rounded) if _is_known(leaf) else None


def warn_of_collapse(batch: PyTree, policy: Policy | PathPolicy) -> None:
    """Warns of what `collapse_report` finds, if it finds something.

    Args:
      batch: see `collapse_report`.
      policy: see `collapse_report`.
    """
    found = collapse_report(batch, policy)
    if found:
        half = np.dtype(policy.default.compute_dtype).name
        lines = [f"{path!r}: {text}" for path, text in found.items()]
        warn_user(
            "floats of the batch are cast by the policy, and their values collapse:\n  "
            + "\n  ".join(lines)
            + f'\nScale them, pass them as integers, or take policy="autocast_{half}", which '
            "casts nothing before it is used.",
            CollapsedValuesWarning,
        )


def _is_index(node: object) -> bool:
    """Returns whether a part of a tree is what a graph finds its edges by, and as one leaf is no array."""
    return getattr(type(node), "is_index", False) is True


def _without_ends(batch: PyTree) -> PyTree:
    """Returns a batch without what each `jraph.GraphsTuple` in it, whose arrays are plain ones, finds its edges by."""

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


def _sample(leaf: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(leaf[:: -(-len(leaf) // _ROWS)], np.float64)


def _of_leaf(values: np.ndarray, dtype: np.dtype, most_rounded: int) -> str | None:
    """Returns what happens to the values of a leaf, or to those of its first column that collapses."""
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
