"""`with_state_dtypes`: stores an optimizer's moments in few bits, for any optimizer.

The wrapped optimizer gets its state in float32, and the chosen fields of its next state are rounded and stored.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmp_train.policies.optimizers.state_rules import (
    Owners,
    StateRules,
    is_quantized,
    state_leaves,
    with_blocks,
    with_blocks_as_in,
)
from jmp_train.policies.optimizers.stochastic_rounding import check_rounding, next_keys
from jmp_train.policies.optimizers.stored_parameters import (
    Addition,
    ParamsOptimizer,
    StoringOptimizer,
    add_updates,
    as_transformation,
)
from jmp_train.policies.pytrees import (
    arrays_of_variables,
    change_nodes,
    is_optimizer_variable,
    refuse_overwritten,
    upcast_to_float32,
)
from jmp_train.policies.quantizing import (
    BLOCK_DTYPES,
    BlockQuantized,
    CallArguments,
    code_of,
    dequantize,
    dequantize_rows,
    fold_in_each,
    from_bits,
    is_reproduced,
    map_alike,
    quantize_bits,
    requantize_bits,
    requantize_rows,
    round_to,
    row_groups,
    to_bits,
)
from jmp_train.policies.types import Grads, Params, PyTree


class StateDtypesState(NamedTuple):
    """State of `with_state_dtypes`.

    Attributes:
      key: the jax random key of the next step's rounding; None if it rounds to the nearest.
      inner_state: the wrapped optimizer's state, whose chosen arrays are in other dtypes or `BlockQuantized`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = with_state_dtypes(optax.adam(0.1), {"nu": "bfloat16"}, rounding="nearest")
      >>> optimizer.init(jnp.ones(4096)).inner_state[0].nu.dtype.name
      'bfloat16'
    """

    key: Any
    inner_state: Any


def with_state_dtypes(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    dtypes: Mapping[str, DTypeLike],
    *,
    rounding: str = "stochastic",
    key: jax.Array | None = None,
    block_size: int = 256,
    min_size: int = 4096,
) -> ParamsOptimizer:
    """Returns an optimizer that stores parts of its state in few bits, and still computes in float32.

    It goes inside or outside of `with_loss_scale`, `with_master_weights` and optax's combinators. Inside, a
    skipped step leaves everything unchanged, including the key; also outside, unless `MultiSteps` or `apply_if_finite`
    hides the loss scale.

    Args:
      optimizer: any optax optimizer.
      dtypes: maps names of fields of its states, such as "mu", "nu", "trace" or
        "acc_grads", or regular expressions, searched for in paths such as "0/nu/layers/0/kernel", to the dtypes of
        these arrays. The first match counts. bfloat16 and float16 are stored directly; float16 has only zero
        below 3e-8, where second moments often are. The others take blocks with one float32 scale each: "int8" with the
        dynamic code, "uint8" with its unsigned version, twice as fine, for fields that are never negative, such as
        Adam's "nu"; "float8_e4m3fn", "float8_e5m2".
      rounding: "stochastic", which is right on average, so that updates below the resolution of the dtype still add up;
        or "nearest".
      key: a jax random key for "stochastic", the same on all devices; None for `jax.random.key(0)`.
      block_size: largest number of elements per block; see `quantize` in `jmp_train.policies.quantizing`.
      min_size: arrays of fewer elements stay unchanged, as do those that are not floating.

    Returns:
      An optimizer whose state is a `StateDtypesState`. It passes float32 gradients and parameters to one of optax's.
      `decode_opt_state` returns the state in float32.

    Raises:
      TypeError: `optimizer` is not an optax optimizer, `dtypes` not a mapping, or `key` not a random key; at `init`,
        parameters have flax's fp8 scales among them.
      ValueError: a dtype or `rounding` is unknown; at `init`, a name or expression matches nothing (the message lists
        the fields and paths), or matches an array that is not float32, for example because of optax's `mu_dtype`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer = with_state_dtypes(optax.adamw(1e-3), {"mu": "int8", "nu": "bfloat16"})
      >>> params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
      >>> adam = optimizer.init(params).inner_state[0]
      >>> adam.mu["w"].codes.dtype.name, adam.nu["w"].dtype.name, adam.nu["b"].dtype.name
      ('int8', 'bfloat16', 'float32')

    Reference: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861;
    optax's `mu_dtype`.
    """
    inner = as_transformation(optimizer)
    rules = StateRules.of(dtypes, block_size, min_size)
    check_rounding(rounding, key)
    # These handle dtypes themselves, and know how parameters are stored.
    sees_to_dtypes = isinstance(inner, ParamsOptimizer)

    def init(params: Params) -> StateDtypesState:
        refuse_overwritten(params)
        inner_state = inner.init(params if sees_to_dtypes else upcast_to_float32(params))
        rules.check(inner_state, params)
        # Usually zeros; rounded to the nearest in any case.
        encoded = _encoded(rules, inner_state, None, Owners(params), None)
        if rounding == "nearest":
            return StateDtypesState(None, encoded)
        return StateDtypesState(jax.random.key(0) if key is None else jnp.copy(key), encoded)

    def update(
        updates: Grads,
        state: Any,
        params: Any = None,
        *,
        return_params: bool = False,
        on_addition: Callable[[Addition], None] | None = None,
        **extra_args: object,
    ) -> tuple[Any, Any]:
        if return_params and params is None:
            raise ValueError("params must be given: update(updates, state, params)")
        owners = Owners(updates if params is None else params)
        old_state = with_blocks(state.inner_state)
        decoded = _decoded(rules, old_state, owners)
        if sees_to_dtypes:
            if return_params:
                extra_args |= {"return_params": True, "on_addition": on_addition}
            result, inner_state = inner.update(updates, decoded, params, **extra_args)
        else:
            grads, float32_params = upcast_to_float32((updates, params))
            result, inner_state = inner.update(grads, decoded, float32_params, **extra_args)
            if return_params and params is not None:
                result = add_updates(params, result, on_addition)
        next_key, step_key = next_keys(state.key, inner_state)
        encoded = _encoded(rules, inner_state, old_state, owners, step_key)
        return result, StateDtypesState(next_key, with_blocks_as_in(encoded, state.inner_state))

    return (StoringOptimizer if isinstance(inner, StoringOptimizer) else ParamsOptimizer)(init, update)


def decode_opt_state(opt_state: PyTree) -> Any:
    """Returns an optimizer's state as `with_state_dtypes` passes it to the wrapped optimizer: in float32.

    Use it for functions of an optimizer's own state, such as `optax.contrib.schedule_free_eval_params`, or to inspect
    it. `optax.tree.get(opt_state, "nu")` without it returns the stored arrays.

    Args:
      opt_state: a state in any nesting, also of an `nnx.Optimizer`. A `StateDtypesState` becomes the state in it, with
        arrays in half precision or in blocks as float32.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = with_state_dtypes(optax.adam(0.1), {"nu": "uint8"})
      >>> optax.tree.get(decode_opt_state(optimizer.init(jnp.ones(4096))), "nu").dtype.name
      'float32'
    """

    def decoded(state: StateDtypesState) -> Any:
        inner_state = with_blocks(arrays_of_variables(state.inner_state, is_optimizer_variable))
        return upcast_to_float32(change_nodes(decode_opt_state(inner_state), BlockQuantized, dequantize))

    return change_nodes(opt_state, StateDtypesState, decoded)


def _decoded(rules: StateRules, state: PyTree, owners: Owners) -> Any:
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)
    leaves = [x for _, x in paths_and_leaves]
    stored = [number for number, each in enumerate(paths_and_leaves) if rules.dtype_of(*each, owners) is not None]
    blocks = {number: leaves[number] for number in stored if is_quantized(leaves[number])}
    for group in row_groups(blocks, rules.block_size):
        for number, x in zip(group, dequantize_rows([blocks.pop(number) for number in group]), strict=True):
            leaves[number] = x
    for number in stored:
        x = leaves[number]
        leaves[number] = dequantize(x) if is_quantized(x) else x.astype(jnp.float32)
    return structure.unflatten(leaves)


def _encoded(rules: StateRules, state: PyTree, old: PyTree, owners: Owners, key: jax.Array | None) -> Any:
    """Returns the stored form of a state; `old` is the one before, None at the start; without `key`, to the nearest."""
    before = dict(state_leaves(old))
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)
    leaves = [x for _, x in paths_and_leaves]
    dtypes = {number: rules.dtype_of(*each, owners) for number, each in enumerate(paths_and_leaves)}
    dtypes = {number: dtype for number, dtype in dtypes.items() if dtype is not None}
    blocks = {
        number: before[path]
        for number, (path, _) in enumerate(paths_and_leaves)
        if dtypes.get(number) in BLOCK_DTYPES and is_quantized(before.get(path))
    }
    keys = None if key is None else fold_in_each(key, list(dtypes))
    rows = {number: row for row, number in enumerate(dtypes)}
    for group in row_groups(blocks, rules.block_size) if key is None or is_reproduced(key) else []:
        group_keys = None if keys is None else keys[np.array([rows[number] for number in group])]
        encoded = requantize_rows(
            [leaves[number] for number in group], [blocks[number] for number in group], group_keys
        )
        for number, x in zip(group, encoded, strict=True):
            del dtypes[number]
            leaves[number] = x
    items = []
    for number, dtype in dtypes.items():
        path, x = paths_and_leaves[number]
        kind = _Kind(code_of(dtype), rules.block_size, owners.name_without_numbers(path))
        old_bits = to_bits(blocks[number]) if number in blocks else None
        items.append(CallArguments(kind, (rows[number], dtype == "int8"), x, old_bits))
    for (number, dtype), encoded in zip(dtypes.items(), map_alike(_encode, items, keys), strict=True):
        leaves[number] = from_bits(encoded, dtype) if is_quantized(encoded) else encoded
    return structure.unflatten(leaves)


class _Kind(NamedTuple):
    """The common properties of arrays that are encoded in one loop.

    Attributes:
      code: the stored dtype; "dynamic" for int8 and uint8, which the numbers of each array determine.
      block_size: largest number of elements per block.
      name: name of the parameter without numbers. It is the same in all blocks of a model, and so is the sharding.
        Other arrays of equal shapes may be sharded differently, and a stack would move them between devices.
    """

    code: str
    block_size: int
    name: str


def _encode(kind: _Kind, numbers: tuple[jax.Array, ...], x: jax.Array, old: Any, keys: jax.Array | None) -> Any:
    """Returns the stored form of an array, with codes as bits.

    Args:
      kind: the common properties.
      numbers: the row of its key, and whether it is stored in int8.
      x: the array.
      old: its old value in blocks, with codes as bits; or None.
      keys: random keys, or None to round to the nearest.
    """
    (row, signed), float32 = numbers, x.astype(jnp.float32)
    key = None if keys is None else keys[row]
    if kind.code in ("bfloat16", "float16"):
        return round_to(float32, kind.code, key)
    if old is None:
        return quantize_bits(float32, kind.code, signed, key, kind.block_size)
    return requantize_bits(float32, old, kind.code, signed, key)
