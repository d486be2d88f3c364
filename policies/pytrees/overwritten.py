"""flax's fp8 scales and histories of maxima, whose "gradients" are their next values.

`flax.linen.fp8_ops` stores them next to the parameters, in the collection `_overwrite_with_gradient`. No
optimizer updates them, no loss scale divides them, no policy casts them. Over several micro-batches or devices
the largest values are taken, as flax itself combines them.

Reference: `flax.training.train_state.TrainState.apply_gradients`; Micikevicius et al., "FP8 Formats for Deep
Learning", https://arxiv.org/abs/2209.05433.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from jmp_train.policies.pytrees.nnx_objects import is_nnx_variable
from jmp_train.policies.pytrees.paths import path_name
from jmp_train.policies.types import Grads, PyTree

COLLECTION = "_overwrite_with_gradient"


def is_overwritten(path: KeyPath) -> bool:
    """Returns whether a leaf of parameters or gradients is in flax's collection."""
    return COLLECTION in path_name(path).split("/")


def refuse_overwritten(params: PyTree) -> None:
    """Raises TypeError with the leaf's name if an optimizer would train a leaf that its gradient should overwrite.

    Args:
      params: parameters passed to an optimizer's `init`. Variables of flax nnx are recognized by their type, because
        nnx keeps a linen layer's collections in one tree.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_nnx_variable):
        if is_overwritten(path) or (is_nnx_variable(x) and type(x).__name__ == COLLECTION):
            raise TypeError(
                f"params {path_name(path)!r} is in flax's collection {COLLECTION!r} of fp8 scales and histories, "
                "which an optimizer must not train: their gradients are their next values. With linen, use "
                "jt.train_step or jt.FlaxTrainState, or pass only the other collections to the optimizer's init and "
                "update. With flax nnx, use autocast's rule 'fp8', which keeps such state itself"
            )


def trained(params: PyTree) -> Any:
    """Returns the parameters, or their gradients, that an optimizer updates.

    Args:
      params: pytree; flax's collection is left out of its mappings, and of tuples and lists of them.
    """
    if not _has_overwritten(params):
        return params
    kind: Any = type(params)
    if isinstance(params, Mapping):
        return kind({name: trained(x) for name, x in params.items() if name != COLLECTION})
    if isinstance(params, tuple | list):
        return kind(map(trained, params))
    raise TypeError(f"params: collection {COLLECTION!r} must be in dicts, tuples and lists, not in a {kind.__name__}")


def trained_gradients(grads: Grads) -> Any:
    """Returns the gradients that an optimizer uses.

    They are NaN if a value in the collection is not finite, so that the optimizer skips the step: an inf in a
    batch, which fp8 clips, only reaches the maxima.
    """
    if not _has_overwritten(grads):
        return grads
    finite = [jnp.isfinite(x).all() for path, x in jax.tree_util.tree_leaves_with_path(grads) if is_overwritten(path)]
    all_finite = functools.reduce(jnp.logical_and, finite)
    return jax.tree.map(lambda g: jnp.where(all_finite, g, jnp.nan), trained(grads))


def with_overwritten(params: Any, source: Any) -> Any:
    """Returns parameters with flax's collection taken from another tree of their structure.

    Args:
      params: all parameters, or the result of `trained`.
      source: parameters or gradients.
    """
    if not _has_overwritten(source):
        return params
    kind: Any = type(source)
    if isinstance(source, Mapping):
        return kind(
            {name: x if name == COLLECTION else with_overwritten(params[name], x) for name, x in source.items()}
        )
    return kind(with_overwritten(x, y) for x, y in zip(params, source, strict=True))


def _has_overwritten(tree: PyTree) -> bool:
    return any(is_overwritten(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def map_overwritten(overwritten: Callable[..., Any], other: Callable[..., Any], *trees: object) -> Any:
    """Maps leaves by two functions: one for leaves that their gradient overwrites, one for the others."""

    def either(path: KeyPath, *leaves: object) -> Any:
        return overwritten(*leaves) if is_overwritten(path) else other(*leaves)

    return jax.tree_util.tree_map_with_path(either, *trees)
