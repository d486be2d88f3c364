"""`adopt_opt_state`: moves the state of an optimizer to the same optimizer with other wrappers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.optimizers.kahan import KahanState
from jmp_train.policies.optimizers.loss_scaled import ZeroGradientsState
from jmp_train.policies.optimizers.loss_scaled_state import LossScaledState, SkipRuleState
from jmp_train.policies.optimizers.master_weights import MasterWeightsState
from jmp_train.policies.optimizers.state_dtypes import StateDtypesState
from jmp_train.policies.optimizers.state_rules import is_quantized, state_leaves, with_blocks
from jmp_train.policies.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_train.policies.pytrees import copy_like, find_nodes, named_leaves, path_name
from jmp_train.policies.quantizing import dequantize, requantize
from jmp_train.policies.types import PyTree

_WRAPPERS = (
    LossScaledState,
    SkipRuleState,
    MasterWeightsState,
    StochasticRoundingState,
    KahanState,
    StateDtypesState,
    ZeroGradientsState,
)


def adopt_opt_state(new: PyTree, old: PyTree) -> Any:
    """Returns an optimizer's fresh state with the moments, counts and hyperparameters of an old one.

    Use it for a run that began without a loss scale, master weights or `with_state_dtypes`, and continues with them:
    the old state has the same optimizer's arrays, but lacks the wrappers around them, or has others. The state of
    common wrappers, such as an adapted loss scale, is copied too; wrappers only in `new` keep their fresh state.

    Args:
      new: `optimizer.init(params)` of the new optimizer, with the parameters to continue from, which are the first
        master weights.
      old: the other optimizer's state, with arrays of any library, or as the nested dicts and lists in which
        flax and orbax read a checkpoint without a target.

    Returns:
      A state like `new`, with its structure, dtypes and placement. Arrays that are quantized in other codes or blocks,
      or in only one of them, are decoded, or rounded to the nearest.

    Raises:
      ValueError: `old` has arrays without a place in `new`, lacks some, or has them in another shape
        or kind of dtype, or the compensation of `with_kahan` in another dtype; the message lists all paths.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> sgd, params = optax.sgd(optax.constant_schedule(0.1)), {"w": jnp.ones(2)}
      >>> _, old = sgd.update(params, sgd.init(params), params)
      >>> optimizer = jt.with_master_weights(jt.with_loss_scale(sgd, jt.torch_loss_scale()))
      >>> state = jt.adopt_opt_state(optimizer.init(params), old)
      >>> int(optax.tree.get(state, "count")), float(jt.get_loss_scale(state).loss_scale)
      (1, 65536.0)
    """
    old = with_blocks(old)
    leaves, structure = jax.tree_util.tree_flatten(new, is_leaf=is_quantized)
    indices = structure.unflatten(range(len(leaves)))
    places, given = (
        {path_name(path): x for path, x in state_leaves(_without_wrappers(tree))} for tree in (indices, old)
    )
    wrong = [f"{name!r} is in old only" for name in given if name not in places]
    wrong += [f"{name!r} is in new only" for name in places if name not in given]
    pairs = [(name, places[name], given[name]) for name in places if name in given]
    pairs += _of_common_wrappers(indices, old)
    misfits = [(name, place, x) for name, place, x in pairs if not _fits(x, leaves[place])]
    wrong += [f"{name!r} is {_kind(x)} in old and {_kind(leaves[place])} in new" for name, place, x in misfits]
    if wrong:
        has_codes = any(name.partition("/")[0] == "compensation" for name, _, _ in misfits)
        hint = "\nset_compensated_params changes the dtype of with_kahan's compensation." if has_codes else ""
        raise ValueError("old is not a state of new's optimizer:\n  " + "\n  ".join(wrong) + hint)
    for _, place, x in pairs:
        leaves[place] = _adopted(x, leaves[place])
    return structure.unflatten(leaves)


def _without_wrappers(opt_state: PyTree) -> Any:
    return jax.tree_util.tree_map(
        lambda node: _without_wrappers(node.inner_state) if isinstance(node, _WRAPPERS) else node,
        opt_state,
        is_leaf=lambda node: isinstance(node, _WRAPPERS),
    )


def _of_common_wrappers(indices: object, old: PyTree) -> list[tuple[str, int, Any]]:
    """Returns name, place and value of the wrappers' own entries that both states have exactly once."""
    pairs = []
    for kind in _WRAPPERS:
        mine, others = find_nodes(indices, kind), find_nodes(old, kind)
        if len(mine) != 1 or len(others) != 1:
            continue
        for field in set(kind._fields) - {"inner_state"}:
            target, source = (getattr(found[0][1], field) for found in (mine, others))
            structures = [jax.tree_util.tree_structure(tree) for tree in (target, source)]
            if structures[0] == structures[1]:  # a loss scale with another rule keeps its fresh state
                values = jax.tree_util.tree_leaves(source)
                pairs += [
                    (f"{field}/{name}".rstrip("/"), place, x)
                    for (name, place), x in zip(named_leaves(target), values, strict=True)
                ]
    return pairs


def _adopted(x: Any, like: Any) -> Any:
    """Returns an array converted to the storage of another one: quantized or not, in its dtype and placement."""
    if _layout(x) == _layout(like):
        return jax.tree_util.tree_map(copy_like, x, like)
    whole = jnp.asarray(dequantize(x) if is_quantized(x) else x)
    if not is_quantized(like):
        return copy_like(whole, like)
    return jax.tree_util.tree_map(copy_like, requantize(whole.astype(jnp.float32), like), like)


def _layout(x: Any) -> Any:
    """Returns what two arrays must share to be copied as they are; what a code means depends on its dtype."""
    return (x.codes.dtype, x.codes.shape, x.scales.shape) if is_quantized(x) else None


def _kind(x: Any) -> str:
    if is_quantized(x):
        return f"{x.codes.dtype} in blocks, {list(x.codes.shape)}"
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def _fits(x: Any, like: Any) -> bool:
    x, like = (jax.eval_shape(dequantize, y) if is_quantized(y) else y for y in (x, like))
    kinds = [_kind_of_dtype(jnp.result_type(y)) for y in (x, like)]
    return jnp.shape(x) == jnp.shape(like) and kinds[0] == kinds[1]


def _kind_of_dtype(dtype: np.dtype) -> Any:
    """Returns the kind within which dtypes convert; integers of fewer than 32 bits are codes, as a compensation is."""
    is_code = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4
    kinds = () if is_code else (jnp.bool_, jnp.integer, jnp.floating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), dtype)
