"""Scaled gradients: cast, run forward, multiply the loss, differentiate, upcast."""

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.policies import Params, PathPolicy, PyTree
from jmp_train.policies.autocasting import DelayedScales, fp8_scales, none_key_explained
from jmp_train.policies.dtype_policies import FirstTrace, Policy, cast_arguments, mixed_dtypes_explained, named_policy
from jmp_train.policies.loss_scaling import (
    LossScales,
    PerLossScale,
    check_loss_scales,
    loss_and_aux,
)
from jmp_train.policies.pytrees import (
    at_least_float32,
    check_flag,
    find_nodes,
    is_float_array,
    is_inexact,
    is_inexact_array,
    is_nnx_object,
    named_leaves,
    upcast_to_float32,
)


def scaled_value_and_grad(
    loss_fn: Callable[..., Any], policy: Policy | PathPolicy | str | None = None, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function like `jax.value_and_grad(loss_fn)` that runs in mixed precision.

    The new function takes the loss scale first: `fn(loss_scale, params, *args, **kwargs)`. It casts
    the parameters and the other arguments to the compute dtype, multiplies the loss by the scale in
    float32 and differentiates. The gradients are float32 and still scaled: pass them to `with_loss_scale`, or
    compute `loss_scale.unscale(grads)`, also before you log their norm. Use it for steps with two optimizers or
    several losses. `train_step` is built on it.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs) -> loss`, a floating scalar, or `(loss, aux)`.
      policy: the dtypes, or the name of a policy; None casts nothing. All arguments are cast, even regression
        targets; pass arrays that must stay float32 by closure.
      has_aux: True if `loss_fn` returns `(loss, aux)`. Floating arrays in `aux` of lower precision than the
        policy's output dtype are cast to it; others, such as batch statistics, keep their dtypes.

    Returns:
      A function that returns `(loss, grads)` or `((loss, aux), grads)`; the loss is unscaled, in
      float32 or higher precision. Under a `PerLossScale`, loss and gradients are tuples. In an equinox module or
      another tree with leaves that are not arrays, the floating and complex arrays are differentiated; as in
      `eqx.filter_grad`, the gradients of the others are None.

    Raises:
      TypeError: when called, the first argument is not a loss scale, the loss is not a floating scalar, or a
        tree of arrays has one without a gradient; the message names it.
      ValueError: when called, a static loss scale is not finite and above 0.

    Warns:
      Float32ProductsWarning: on the first call or trace.
      InnerGradientWarning: `loss_fn` takes a gradient, which runs in float16; `scaled_grad` scales it.
      CpuConvolutionWarning: the loss has bfloat16 convolutions that this jaxlib gets wrong on CPUs.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_train as jt
      >>> loss_fn = lambda w, x: (w * x).sum()
      >>> fn = jt.scaled_value_and_grad(loss_fn, "mixed_float16")
      >>> loss, grads = fn(jt.StaticLossScale(8.0), jnp.ones(2), jnp.array([1.0, 2.0]))
      >>> loss, grads
      (Array(3., dtype=float32), Array([ 8., 16.], dtype=float32))

    Reference: Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}")
    check_flag("has_aux", has_aux)
    policy = None if policy is None else named_policy(policy)
    value_and_grad = unwatched_value_and_grad(loss_fn, policy, has_aux)
    first_trace = FirstTrace()

    @functools.wraps(value_and_grad)
    def watched(loss_scale: LossScales, *args: object, **kwargs: object) -> Any:
        with none_key_explained(loss_fn, args, kwargs), first_trace.look(loss_fn, policy, args, kwargs):
            return value_and_grad(loss_scale, *args, **kwargs)

    return watched


class ScaledProducts(NamedTuple):
    """Parameters together with the scales of fp8 products; both are differentiated.

    Attributes:
      params: the parameters.
      scales: by the place of each product; their "gradients" are the largest magnitudes in the products.
    """

    params: Any
    scales: dict[str, jax.Array]


def unwatched_value_and_grad(
    loss_fn: Callable[..., Any], policy: Policy | PathPolicy | None, has_aux: bool
) -> Callable[..., Any]:
    """Returns the function of `scaled_value_and_grad`, without the warnings of the first trace.

    Its `params` may be `ScaledProducts`; the gradients are then `ScaledProducts` too.
    """
    run = loss_fn if policy is None else policy.default.transform(loss_fn)

    def value_and_grad(loss_scale: LossScales, params: Params, *args: object, **kwargs: object) -> Any:
        check_loss_scale(loss_scale)
        scaled = params if isinstance(params, ScaledProducts) else None
        differentiated, rest = _partition(params if scaled is None else scaled.params)

        def scaled_loss(inputs: Any) -> tuple[Any, tuple[Any, Any]]:
            differentiated, scales = (inputs, None) if scaled is None else inputs
            call = (_combine(differentiated, rest), *args), kwargs
            cast = contextlib.nullcontext(call) if policy is None else cast_arguments(policy, *call)
            given = contextlib.nullcontext() if scales is None else fp8_scales(DelayedScales(scales))
            with given, mixed_dtypes_explained(policy), cast as (call_args, call_kwargs):
                result = run(*call_args, **call_kwargs)
            loss, aux = loss_and_aux(result, has_aux)
            if policy is not None:
                aux = at_least(policy.default.output_dtype, aux)
            loss = float32_loss(loss_scale, loss)
            return loss_scale.scale(loss), (loss, aux)

        inputs = differentiated if scaled is None else ScaledProducts(differentiated, scaled.scales)
        with mixed_dtypes_explained(policy):  # the backward pass may have branches and loops of its own
            if isinstance(loss_scale, PerLossScale):
                grads, (loss, aux) = _grads_of_each(scaled_loss, inputs, len(loss_scale.loss_scales))
            else:
                grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(inputs)
        return ((loss, aux) if has_aux else loss), upcast_to_float32(grads)

    return value_and_grad


def check_loss_scale(loss_scale: object) -> None:
    """Raises TypeError or ValueError if an object is no usable loss scale."""
    check_loss_scales(loss_scale, "get_loss_scale(opt_state) finds an optimizer's")


def _partition(params: Params) -> tuple[Any, Any]:
    """Splits a tree into two of the same structure, the arrays to differentiate and the rest, with None for gaps."""
    modules = filter(is_nnx_object, jax.tree.leaves(params, is_leaf=is_nnx_object))
    if (module := next(modules, None)) is not None:
        raise TypeError(
            f"params contains the nnx module {type(module).__name__}, whose statistics and random keys are not "
            "parameters; use nnx_value_and_grad, or separate them with nnx.split(model, nnx.Param, ...)"
        )
    leaves = named_leaves(params)
    if not _has_equinox_module(params) and all(
        hasattr(x, "dtype") or isinstance(x, int | float | complex) for _, x in leaves
    ):
        for path, x in leaves:
            if not is_inexact(x):
                raise TypeError(
                    f"params {path!r} is {jnp.result_type(x)}{list(jnp.shape(x))}, which has no gradient; "
                    "pass it as another argument"
                )
        return params, None
    return tuple(
        jax.tree.map(lambda x, keep=keep: x if is_inexact_array(x) == keep else None, params) for keep in (True, False)
    )


def _has_equinox_module(params: Params) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and bool(find_nodes(params, equinox.Module))


def _combine(differentiated: PyTree, rest: object) -> Any:
    if rest is None:
        return differentiated
    return jax.tree.map(lambda x, y: y if x is None else x, differentiated, rest, is_leaf=lambda x: x is None)


def at_least(dtype: DTypeLike, tree: PyTree) -> Any:
    """Returns a tree whose floating arrays have the given dtype, or keep their own higher precision."""

    def upcast(x: object) -> Any:
        if is_float_array(x) and jnp.finfo(x.dtype).bits < jnp.finfo(dtype).bits:
            return x.astype(dtype)
        return x

    return jax.tree.map(upcast, tree)


def _grads_of_each(losses_fn: Callable[..., Any], params: Params, count: int) -> tuple[Any, Any]:
    """Returns the gradients of each of several losses, and the other results of the function.

    Each loss has its own backward pass, because zero times another, non-finite loss is NaN.
    """

    def only(chosen: int) -> Callable[[Any], Any]:
        def loss_fn(params: Params) -> Any:
            losses, aux = losses_fn(params)
            return losses[chosen], aux

        return loss_fn

    pairs = [jax.grad(only(chosen), has_aux=True)(params) for chosen in range(count)]
    return tuple(grads for grads, _ in pairs), pairs[0][1]


def float32_loss(loss_scale: LossScales, loss: object) -> Any:
    """Returns a loss in float32 or higher precision; under a `PerLossScale` a tuple of losses."""
    if not isinstance(loss_scale, PerLossScale):
        return float32_scalar(loss)
    return tuple(map(float32_scalar, loss)) if isinstance(loss, tuple | list) else loss


def float32_scalar(loss: Any) -> jax.Array:
    """Returns a loss in float32 or higher precision; raises TypeError if it is not a floating scalar."""
    if isinstance(loss, tuple | list):
        raise TypeError(f"loss_fn returned {len(loss)} losses, which need an optimizer with a PerLossScale")
    if isinstance(loss, Mapping):
        raise TypeError(
            f"loss_fn returned a dict of losses, {sorted(map(str, loss))}: return their sum, or a tuple of them"
        )
    if loss is None:
        raise TypeError("loss_fn returned None as loss; it must be a floating scalar")
    dtype, shape = jnp.result_type(loss), jnp.shape(loss)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"loss_fn must return a floating scalar as loss, got {dtype}{list(shape)}")
    return jnp.asarray(loss, at_least_float32(dtype))
