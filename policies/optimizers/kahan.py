"""`with_kahan`: parameters in half precision with a compensation in 16 or 8 bits, instead of master weights.

The rounding error of a parameter is stored next to it, itself rounded, and added to the next update. It is at most half
of the distance between the parameter and the next number. So 8 bits need no scale: they count 256ths of that
distance.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

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
from jmp_train.policies.pytrees import is_float_array, named_leaves, only_state, refuse_overwritten, upcast_to_float32
from jmp_train.policies.types import Grads, Params, PyTree


class KahanState(NamedTuple):
    """State of `with_kahan`.

    Attributes:
      compensation: a tree like the parameters, with the term to add for a more exact value: in the parameter's dtype,
        or in int8 as 256ths of its distance from the next number; a zero for float32 parameters.
      inner_state: the wrapped optimizer's state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> with_kahan(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.bfloat16)}).compensation["w"]
      Array([0, 0], dtype=bfloat16)
    """

    compensation: Any
    inner_state: Any


StoringState.register(KahanState)


def with_kahan(
    optimizer: optax.GradientTransformation | optax.MultiSteps, *, compensation_dtype: DTypeLike | None = None
) -> StoringOptimizer:
    """Returns an optimizer that stores half-precision parameters with their rounding errors, also in half precision.

    It goes outermost, in place of `with_master_weights`. The optimizer sees the sum of parameter and compensation
    in float32. The new sum is rounded to the parameter, and the remainder to the compensation. The sum has
    about 17 significant bits in bfloat16, for 4 bytes per parameter instead of 6. In float16 it has about 22 bits;
    parameters below about 1e-3 have fewer, because float16 ends at 6e-8. `optax.apply_updates` and `train_step` return
    bitwise the same parameters; a skipped step changes none.

    A compensation in int8 takes 3 bytes per parameter, for 16 significant bits, or 19 in float16, also for small
    parameters.

    Args:
      optimizer: any optax optimizer, including `with_loss_scale`.
      compensation_dtype: dtype of the compensation: "int8", or None for the parameter's own.

    Returns:
      An optimizer whose state is a `KahanState`, and whose `update` needs the parameters.

    Raises:
      TypeError: `optimizer` is not an optax optimizer; at `init`, parameters have flax's fp8 scales among them.
      ValueError: `compensation_dtype` is unsupported; at `init`, no parameter is in bfloat16 or float16, or the
        optimizer has master weights or rounds stochastically; when called, `update` gets no parameters, or parameters
        in other dtypes than at `init`.

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
    if compensation_dtype is not None and compensation_dtype not in ("int8", jnp.int8):
        raise ValueError(f"compensation_dtype={compensation_dtype!r} must be 'int8', or None for the parameters' own")

    def init(params: Params) -> KahanState:
        refuse_overwritten(params)
        if not any(map(_is_compensated, jax.tree_util.tree_leaves(params))):
            raise ValueError(
                "with_kahan: no parameter is in bfloat16 or float16; cast the parameters before init: "
                "TrainState.create(cast(params), optimizer), without cast_params"
            )
        inner_state = inner.init(upcast_to_float32(params))
        refuse_stored(inner_state)
        none = functools.partial(_no_compensation, dtype=compensation_dtype)
        return KahanState(jax.tree_util.tree_map(none, params), inner_state)

    def step(
        updates: Grads,
        state: KahanState,
        params: Params,
        on_addition: Callable[[Addition], None] | None = None,
        **extra_args: object,
    ) -> tuple[Any, KahanState]:
        sums = _sums(params, state.compensation)
        new_sums, inner_state = next_params(
            inner, upcast_to_float32(updates), state.inner_state, sums, on_addition, **extra_args
        )
        leaves, tree = jax.tree_util.tree_flatten(params)
        trees = (sums, new_sums, state.compensation)
        pairs = [_stored(*each) for each in zip(leaves, *map(tree.flatten_up_to, trees), strict=True)]
        new_params, compensation = (tree.unflatten(part) for part in zip(*pairs, strict=True))
        return new_params, KahanState(compensation, inner_state)

    return storing_optimizer(init, step)


def compensated_params(params: Params, opt_state: PyTree) -> Any:
    """Returns parameters with their compensation added, in float32, to save and export.

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
    state = only_state(opt_state, KahanState, "compensation", "compensations", "with_kahan")
    return _sums(params, state.compensation)


def _is_compensated(x: object) -> bool:
    return is_float_array(x) and x.dtype in (jnp.bfloat16, jnp.float16)


def _no_compensation(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    return jnp.zeros_like(x, dtype) if _is_compensated(x) else jnp.zeros((), jnp.result_type(x))


def _sums(params: Params, compensation: PyTree) -> Any:
    _check_dtypes(params, compensation)
    return jax.tree_util.tree_map(_sum, params, compensation)


def _sum(x: jax.Array, compensation: jax.Array) -> jax.Array:
    if not _is_compensated(x):
        return x
    rest = compensation.astype(jnp.float32)
    return x.astype(jnp.float32) + (rest * _unit(x) if compensation.dtype == jnp.int8 else rest)


def _unit(x: jax.Array) -> jax.Array:
    """Returns the unit of an int8 compensation: a 256th of the distance from a number to the next larger one.

    It is a power of two, so float32 multiplies and divides by it exactly, and represents the sum.
    """
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & jnp.uint32(0x7F800000)
    unit = lax.bitcast_convert_type(magnitude, jnp.float32) * float(jnp.finfo(x.dtype).eps) / 256
    # At least the distance between float16's subnormal numbers, and a number whose inverse float32 represents.
    least = float(jnp.finfo(x.dtype).smallest_subnormal) / 256
    return jnp.maximum(unit, max(least, 2.0**-126))


def _stored(
    old: jax.Array, old_sum: jax.Array, new_sum: jax.Array, compensation: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a parameter and its compensation after a step."""
    if not _is_compensated(old):
        return new_sum, compensation
    # The parameter is the result of apply_updates, whose float32 update can lose bits of small numbers. The
    # compensation contains these bits too.
    update = difference(new_sum.astype(old.dtype), old)
    # Without the barrier a compiler may remove the rounding, and with it the compensation.
    new = lax.optimization_barrier((old.astype(jnp.float32) + update).astype(old.dtype))
    rest = new_sum - new.astype(jnp.float32)
    rest = jnp.where(jnp.isfinite(rest), rest, 0)
    if compensation.dtype == jnp.int8:
        rest = jnp.clip(jnp.round(rest / _unit(new)), -128, 127)
    rest = rest.astype(compensation.dtype)
    same = lax.bitcast_convert_type(new_sum, jnp.uint32) == lax.bitcast_convert_type(old_sum, jnp.uint32)
    return jnp.where(same, old, new), jnp.where(same, compensation, rest)


def _check_dtypes(params: Params, compensation: PyTree) -> None:
    structures = [jax.tree_util.tree_structure(tree) for tree in (params, compensation)]
    if structures[0] != structures[1]:
        raise ValueError(f"params must have the structure of the compensation, {structures[1]}, got {structures[0]}")
    wrong = [
        f"{path!r} is {x.dtype.name}, its compensation {rest.dtype.name}"
        for (path, x), rest in zip(named_leaves(params), jax.tree_util.tree_leaves(compensation), strict=True)
        if rest.dtype not in ((x.dtype, jnp.int8) if _is_compensated(x) else (x.dtype,))
    ]
    if wrong:
        raise ValueError(
            "with_kahan: parameters have other dtypes than at init; cast them before: "
            "TrainState.create(cast(params), optimizer). " + ", ".join(wrong)
        )
