"""`with_kahan`: parameters in half precision, each with the rest of its float32 value in 16 or 8 bits.

A bfloat16 is the upper half of a float32. Its lower half, stored next to it, makes the pair the float32 itself. A
float16 has other exponents, so its rest counts fractions of the distance to the next float16. A rest in 8 bits does so
for both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.optimizers.stochastic_rounding import check_rounding, next_keys
from jmp_train.policies.optimizers.stored_parameters import (
    Addition,
    StoringOptimizer,
    StoringState,
    as_transformation,
    difference,
    next_params,
    refuse_stored,
    storing_optimizer,
)
from jmp_train.policies.pytrees import (
    dtype_name,
    is_float_array,
    named_leaves,
    only_state,
    refuse_overwritten,
    upcast_to_float32,
    with_states,
)
from jmp_train.policies.quantizing import fold_in_each, uniform
from jmp_train.policies.types import Grads, Params, PyTree

EXACT = {"bfloat16": "uint16", "float16": "int16"}  # the default compensations of parameters
_STEPS = {"int8": 2.0**8, "int16": 2.0**15}  # units of a compensation from one half-precision number to the next
_UPPER, _LOWER = np.uint32(0xFFFF0000), np.uint32(0x0000FFFF)
_INFINITY, _MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


def is_compensated(x: object) -> bool:
    """Returns whether a parameter is in half precision."""
    return is_float_array(x) and x.dtype in (jnp.bfloat16, jnp.float16)


def no_compensation(x: jax.Array, dtype: str | None) -> jax.Array:
    """Returns the compensation of a parameter that is its float32 value; `dtype` is None for the exact one."""
    return jnp.zeros_like(x, dtype or EXACT[x.dtype.name]) if is_compensated(x) else jnp.zeros((), jnp.result_type(x))


def fits(x: jax.Array, compensation: jax.Array) -> bool:
    """Returns whether a compensation has a dtype for this parameter."""
    if not is_compensated(x):
        return compensation.dtype == x.dtype
    return compensation.dtype.name in (x.dtype.name, EXACT[x.dtype.name], "int8")


def compensated(x: jax.Array, compensation: jax.Array) -> jax.Array:
    """Returns the float32 value of a parameter and its compensation."""
    if not is_compensated(x):
        return x
    if compensation.dtype == jnp.uint16:
        return _joined(x, compensation)
    rest = compensation.astype(jnp.float32)
    return x.astype(jnp.float32) + (rest * _unit(x, compensation.dtype) if compensation.dtype.name in _STEPS else rest)


def stored(
    old: jax.Array, old_sum: jax.Array, new_sum: jax.Array, compensation: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns a parameter and its compensation after a step.

    Args:
      old: the parameter.
      old_sum: its float32 value.
      new_sum: the next float32 value.
      compensation: the old compensation.
      key: a jax random key to round int8 stochastically; None rounds to the nearest.
    """
    if not is_compensated(old):
        return new_sum, compensation
    if compensation.dtype == jnp.uint16:
        new, rest = _split(new_sum)
    else:
        new, rest = _rounded(old, new_sum, compensation.dtype, key)
    same = lax.bitcast_convert_type(new_sum, jnp.uint32) == lax.bitcast_convert_type(old_sum, jnp.uint32)
    return jnp.where(same, old, new), jnp.where(same, compensation, rest)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the nearest bfloat16 of float32 numbers and their lower halves as uint16, which determine the numbers.

    Ties have the larger magnitude, because ties to even would not be unique. A NaN loses its lower half.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    is_nan = bits & _MAGNITUDE > _INFINITY
    bits = jnp.where(is_nan, (bits | np.uint32(0x00400000)) & _UPPER, bits)
    upper = (bits + np.uint32(0x8000)) >> np.uint32(16)
    return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16), (bits & _LOWER).astype(jnp.uint16)


def _joined(x: jax.Array, lower: jax.Array) -> jax.Array:
    """Returns the inverse of `_split`; whatever the lower half is, a number that `_split` rounds to `x`."""
    upper = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    rounded_up = lower >= np.uint16(0x8000)
    bits = (upper | lower.astype(jnp.uint32)) - jnp.where(rounded_up, np.uint32(0x10000), np.uint32(0))
    # Zero is not rounded up, and infinity not down. These pairs come from parameters that others have set.
    magnitude = upper & _MAGNITUDE
    wrong = jnp.where(rounded_up, magnitude == 0, magnitude >= _INFINITY)
    return lax.bitcast_convert_type(jnp.where(wrong, upper, bits), jnp.float32)


def _rounded(
    old: jax.Array, new_sum: jax.Array, dtype: jnp.dtype, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the stored number nearest to a float32 number, and the rest in a dtype."""
    nearest, total = new_sum.astype(old.dtype), new_sum
    if dtype.name in _STEPS:
        unit = _unit(nearest, dtype)
        share = _finite((new_sum - nearest.astype(jnp.float32)) / unit)
        below = jnp.floor(share)
        draw = np.float32(0.5) if key is None else 1 - uniform(key, share.shape)  # above 0
        total = nearest.astype(jnp.float32) + (below + (draw <= share - below).astype(jnp.float32)) * unit
        if dtype == jnp.int8:  # has no 128: the middle between two numbers is that many below the upper one
            nearest = (total + unit / 2).astype(old.dtype)
    if dtype.name != EXACT[old.dtype.name]:
        # The parameter is the result of apply_updates, whose float32 update can lose bits of small numbers. The
        # compensation contains these bits too.
        nearest = (old.astype(jnp.float32) + difference(nearest, old)).astype(old.dtype)
    # Without the barrier a compiler may remove the rounding, and with it the compensation.
    new = lax.optimization_barrier(nearest)
    rest = _finite(total - new.astype(jnp.float32))
    if dtype.name in _STEPS:
        limits = jnp.iinfo(dtype)
        rest = jnp.clip(jnp.round(rest / _unit(new, dtype)), limits.min, limits.max)
    return new, rest.astype(dtype)


def _unit(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the unit of a compensation in integers: a fraction of the distance from a number to the next larger one.

    It is a power of two, so float32 multiplies and divides by it exactly.
    """
    steps = _STEPS[dtype.name]
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7F800000)
    magnitude = lax.bitcast_convert_type(jnp.minimum(magnitude, np.uint32(0x7F000000)), jnp.float32)
    unit = magnitude * (float(jnp.finfo(x.dtype).eps) / steps)
    # At least the distance between float16's subnormal numbers, and a number whose inverse float32 represents.
    least = float(jnp.finfo(x.dtype).smallest_subnormal) / steps
    return jnp.maximum(unit, max(least, 2.0**-126))


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


class KahanState(NamedTuple):
    """State of `with_kahan`.

    Attributes:
      compensation: a tree like the parameters. uint16: the lower half of a float32 whose upper half, rounded, is the
        bfloat16 parameter. int16 or int8: the rest in 2**15ths or 256ths of the parameter's distance from the next
        number. bfloat16 or float16: the rest. A zero for float32 parameters.
      inner_state: the wrapped optimizer's state.
      key: the jax random key of the next step's rounding, of int8 with `rounding="stochastic"`; otherwise None.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> with_kahan(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.bfloat16)}).compensation["w"]
      Array([0, 0], dtype=uint16)
    """

    compensation: Any
    inner_state: Any
    key: Any = None


StoringState.register(KahanState)


def with_kahan(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    compensation_dtype: DTypeLike | None = None,
    rounding: str = "stochastic",
    key: jax.Array | None = None,
) -> StoringOptimizer:
    """Returns an optimizer that stores half-precision parameters with the rest of their float32 values.

    It goes outermost, in place of `with_master_weights`. The optimizer sees and updates float32 parameters. The stored
    parameter is the half-precision number nearest to the float32 one, and the compensation holds the rest:

    - None, 4 bytes per parameter: for bfloat16 as uint16, the pair is the float32 number, as with master weights in 6
      bytes. For float16 as int16, it is the float32 number from 2**-16 up, and a multiple of 2**-39 below.
    - "int8", 3 bytes: 16 significant bits for bfloat16, or 19 for float16. Smaller updates, of less than 2**-16 or
      2**-19 of the parameter, are right on average if they are rounded stochastically. To the nearest, they are lost.
    - "bfloat16" or "float16", the dtype of the parameters, 4 bytes, as in torchdistx: updates of less than 2**-17 of a
      bfloat16 parameter are lost, or 2**-23 of a float16 one. It is for runs that began so.

    A skipped step changes no parameter and no state. `optax.apply_updates` returns bitwise the parameters of
    `train_step`. With None, there is one exception: after a step in which a parameter decreases more than 2**13-fold,
    they agree to one part in 2**23 of its old value.

    Args:
      optimizer: any optax optimizer, including `with_loss_scale`.
      compensation_dtype: dtype of the compensation: None, "int8", "bfloat16" or "float16".
      rounding: of "int8": "stochastic", or "nearest".
      key: a jax random key for "int8" with "stochastic", the same on all devices; None for `jax.random.key(0)`.

    Returns:
      An optimizer whose state is a `KahanState`, and whose `update` needs the parameters.

    Raises:
      TypeError: `optimizer` is not an optax optimizer, or `key` not a random key; at `init`, parameters have flax's fp8
        scales among them.
      ValueError: `compensation_dtype` or `rounding` is unsupported; at `init`, no parameter is in bfloat16 or float16,
        or the optimizer has master weights or rounds stochastically; when called, `update` gets no parameters, or
        parameters in other dtypes than at `init`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = with_kahan(optax.sgd(1.0))
      >>> params = jnp.ones((), jnp.bfloat16)
      >>> state = optimizer.init(params)
      >>> for _ in range(64):  # a bfloat16 next to 1 is 2**-8 away, or 2**-7
      ...     params, state = optimizer.update(jnp.float32(2.0**-13), state, params, return_params=True)
      >>> float(1 - params) == 2.0**-7, float(1 - compensated_params(params, state)) == 2.0**-7
      (True, True)

    Reference: Zamirai et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192; torchdistx's
    AnyPrecisionAdamW. In 8 bits: Gonzalez Ortiz et al., "FlashOptim: Optimizers for Memory Efficient Training",
    https://arxiv.org/abs/2602.23349, which counts 254ths; 256ths are added without rounding.
    """
    inner = as_transformation(optimizer)
    dtype = _name_of(compensation_dtype)
    check_rounding(rounding, key)
    if key is not None and dtype != "int8":
        raise ValueError("key is only for compensation_dtype='int8'")

    def init(params: Params) -> KahanState:
        refuse_overwritten(params)
        if not any(map(is_compensated, jax.tree_util.tree_leaves(params))):
            raise ValueError(
                "with_kahan: no parameter is in bfloat16 or float16; cast the parameters before init: "
                "TrainState.create(cast(params), optimizer), without cast_params"
            )
        inner_state = inner.init(upcast_to_float32(params))
        refuse_stored(inner_state)
        compensation = jax.tree_util.tree_map(lambda x: no_compensation(x, dtype), params)
        _check_dtypes(params, compensation)
        if dtype != "int8" or rounding == "nearest":
            return KahanState(compensation, inner_state)
        return KahanState(compensation, inner_state, jax.random.key(0) if key is None else jnp.copy(key))

    def step(
        updates: Grads,
        state: KahanState,
        params: Params,
        on_addition: Callable[[Addition], None] | None = None,
        **extra_args: object,
    ) -> tuple[Any, KahanState]:
        sums = _sums(params, state.compensation)
        additions: list[Addition] = []
        record = None if on_addition is None else additions.append
        new_sums, inner_state = next_params(
            inner, upcast_to_float32(updates), state.inner_state, sums, record, **extra_args
        )
        next_key, step_key = next_keys(state.key, inner_state)
        new_params, compensation = _each_stored(params, sums, new_sums, state.compensation, step_key)
        if on_addition is not None:
            # Nearest rounding loses updates; stochastic rounding keeps them on average.
            kept = new_sums if state.key is not None else _sums(new_params, compensation)
            on_addition(additions[0]._replace(new_params=kept))
        return new_params, KahanState(compensation, inner_state, next_key)

    return storing_optimizer(init, step)


def compensated_params(params: Params, opt_state: PyTree) -> Any:
    """Returns the float32 parameters that the optimizer sees, to save and export.

    Args:
      params: the stored parameters.
      opt_state: a state with one `KahanState` in it, in any nesting of optax's combinators.

    Returns:
      A tree like the parameters, in float32.

    Raises:
      ValueError: there is no `KahanState`, there are several, or it belongs to other parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> compensated_params(params, with_kahan(optax.sgd(0.1)).init(params))["w"]
      Array([1., 1.], dtype=float32)
    """
    return _sums(params, _only_state(opt_state).compensation)


def set_compensated_params(params: Params, opt_state: PyTree, weights: Params) -> tuple[Any, Any]:
    """Returns stored parameters and an optimizer state for float32 parameters, the inverse of `compensated_params`.

    Args:
      params: the stored parameters; only their dtypes count.
      opt_state: a state with one `KahanState` in it, in any nesting of optax's combinators.
      weights: a tree like the parameters, in any floating dtypes, such as float32 parameters or master weights.

    Raises:
      ValueError: there is no `KahanState`, there are several, or it belongs to other parameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer, weights = with_kahan(optax.adam(1e-3)), {"w": jnp.array([0.1, 0.2])}
      >>> params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
      >>> params, state = set_compensated_params(params, optimizer.init(params), weights)
      >>> compensated_params(params, state)["w"]
      Array([0.1, 0.2], dtype=float32)
    """
    old = _only_state(opt_state).compensation
    sums = _sums(params, old)
    new_sums = jax.tree_util.tree_map(lambda like, x: jnp.array(x, like.dtype), sums, weights)
    new_params, compensation = _each_stored(params, sums, new_sums, old, None)
    return new_params, with_states(opt_state, KahanState, lambda state: state._replace(compensation=compensation))


def _name_of(dtype: DTypeLike | None) -> str | None:
    name = dtype_name(dtype)
    if dtype is not None and name not in ("int8", "bfloat16", "float16"):
        raise ValueError(
            f"compensation_dtype={dtype!r} must be 'int8', 'bfloat16' or 'float16', or None for the whole float32 value"
        )
    return name


def _only_state(opt_state: PyTree) -> KahanState:
    return only_state(opt_state, KahanState, "compensation", "compensations", "with_kahan")


def _sums(params: Params, compensation: PyTree) -> Any:
    _check_dtypes(params, compensation)
    return jax.tree_util.tree_map(compensated, params, compensation)


def _each_stored(
    params: Params, sums: Params, new_sums: Params, compensation: PyTree, key: jax.Array | None
) -> tuple[Any, Any]:
    leaves, tree = jax.tree_util.tree_flatten(params)
    keys = [None] * len(leaves) if key is None else list(fold_in_each(key, range(len(leaves))))
    trees = map(tree.flatten_up_to, (sums, new_sums, compensation))
    pairs = [stored(*each) for each in zip(leaves, *trees, keys, strict=True)]
    new_params, new_compensation = (tree.unflatten(part) for part in zip(*pairs, strict=True))
    return new_params, new_compensation


def _check_dtypes(params: Params, compensation: PyTree) -> None:
    structures = [jax.tree_util.tree_structure(tree) for tree in (params, compensation)]
    if structures[0] != structures[1]:
        raise ValueError(f"params must have the structure of the compensation, {structures[1]}, got {structures[0]}")
    wrong = [
        f"{path!r} is {x.dtype.name}, its compensation {rest.dtype.name}"
        for (path, x), rest in zip(named_leaves(params), jax.tree_util.tree_leaves(compensation), strict=True)
        if not fits(x, rest)
    ]
    if wrong:
        raise ValueError(
            "with_kahan: parameters have other dtypes than at init; cast them before: "
            "TrainState.create(cast(params), optimizer). " + ", ".join(wrong)
        )
