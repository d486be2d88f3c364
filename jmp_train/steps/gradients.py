"""Scaled gradients: cast, run forward, multiply the loss, differentiate, upcast; and weighted losses.

`scaled_grad` computes gradients within a loss, for a penalty or an inner step, with a scale of their own.

`weighted` losses are sums divided by a number of counted tokens, over all micro-batches and devices.
Micro-batches and devices count different numbers of tokens, so the mean of their means is not the mean of all tokens.
Each computes the gradient of its own mean, which is as large as that of any batch in half precision. In float32, it is
multiplied by its weight, summed, and divided by the sum of weights.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies import Params, PathPolicy, PyTree, autocast_as
from jmp_train.policies.autocasting import DelayedScales, fp8_scales, none_key_explained
from jmp_train.policies.dtype_policies import FirstTrace, Policy, cast_arguments, mixed_dtypes_explained, named_policy
from jmp_train.policies.loss_scaling import (
    LossScale,
    LossScales,
    PerLossScale,
    StaticLossScale,
    check_loss_scales,
    check_takes_state,
    is_stateless,
    loss_and_aux,
    unpack_loss,
)
from jmp_train.policies.pytrees import (
    at_least_float32,
    check_flag,
    find_nodes,
    is_float_array,
    is_inexact,
    is_inexact_array,
    is_nnx_object,
    map_overwritten,
    named_leaves,
    sum_over_axes,
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


def scaled_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    scale: float | LossScale = 2.0**10,
) -> Callable[..., Any]:
    """Returns a function like `jax.grad(fn)` for use within a half-precision loss: float32 gradients, unscaled.

    Use it for gradients inside of `autocast` or a half policy: adversarial examples, gradient penalties, forces,
    meta-learning. The loss scale of the step does not reach these: in float16, small elements would be 0. Here, the
    result of `fn` is multiplied by `scale`, and the gradients are divided by it in float32. It can be differentiated.

    Args:
      fn: a function that returns a floating scalar.
      argnums: see `jax.grad`.
      has_aux: True if `fn` returns `(result, aux)`.
      scale: a number, or a loss scale. If the scaled gradient exceeds 65,504, it is infinite: pass a smaller one. If
        the loss depends on it, the step is skipped.

    Returns:
      A function of the same arguments that returns the gradients, or `(gradients, aux)`. They are float32 even if the
      arguments are float16: cast what must be added to these.

    Raises:
      TypeError: `scale` is neither a number nor a loss scale; when called, `fn` does not return a floating scalar.
      ValueError: the scale is not finite and above 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_train as jt
      >>> fn = lambda x: (x * jnp.float16(1e-4) * jnp.float16(1e-4)).sum()  # its gradient is 1e-8
      >>> x = jnp.ones(1, jnp.float16)
      >>> float(jax.grad(fn)(x)[0]), round(float(jt.scaled_grad(fn)(x)[0]), 10)
      (0.0, 1e-08)
    """
    is_number = isinstance(scale, int | float | np.number | jax.Array)
    loss_scale = StaticLossScale(scale) if is_number else scale
    check_loss_scale(loss_scale)
    check_flag("has_aux", has_aux)

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result, aux = loss_and_aux(fn(*args, **kwargs), has_aux)
        return loss_scale.scale(float32_scalar(result)), aux

    @autocast_as("float32")
    def unscaled(grads: Any) -> Any:
        return loss_scale.unscale(upcast_to_float32(grads))

    @functools.wraps(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        grads, aux = jax.grad(scaled, argnums, has_aux=True)(*args, **kwargs)
        grads = unscaled(grads)
        return (grads, aux) if has_aux else grads

    return gradient


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """The `aux` of a loss from `weighted`, within the step.

    Args:
      aux: the loss function's own aux.
      weight: float32 scalar, the weight of these examples.

    Example:
      >>> import jmp_train as jt
      >>> loss, (_, aux) = jt.weighted(lambda w, x: ((w * x).sum(), x.size))(2.0, None, jnp.ones(4), None)
      >>> float(loss), float(aux.weight)
      (2.0, 4.0)
    """

    aux: Any
    weight: jax.Array


def weighted(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Adapts a loss that is a weighted sum, and its weight, to `train_step`.

    The step minimizes the sum over all micro-batches and devices, divided by the sum of their weights, in float32. Use
    it for a mean over tokens or nodes if batches count different numbers of them. The mean of the micro-batches' means
    would give tokens in sparse ones more weight.

    Args:
      loss_fn: `loss_fn(params, batch) -> (total, weight)`, or `loss_fn(params, model_state, batch, rng) -> ((total,
        weight), (model_state, aux))` for models with state or random numbers. `total` is a floating scalar, the sum of
        the weighted losses. `weight` is a number: compute it in int32 or float32 (a mask that a policy casts to float16
        counts to 2,048). No gradient flows through it. A batch of weight 0 has the loss `total`.
      has_aux: True if `loss_fn(params, batch)` returns `((total, weight), aux)`.

    Returns:
      A loss function for `train_step`, with `Weighted` around its aux, which the step removes. Called directly, it
      returns `total / weight`. A weight that is infinite or NaN makes the loss NaN.

    Raises:
      TypeError: `loss_fn` takes neither two nor four arguments; when called, it does not return `(total, weight)`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> def loss_fn(w, batch):
      ...     losses = (w * batch["x"] - 1.0) ** 2
      ...     return jnp.where(batch["counts"], losses, 0.0).sum(), batch["counts"].sum()
      >>> step = jt.train_step(jt.weighted(loss_fn), optax.sgd(0.1), accumulate_steps=2)
      >>> counts = jnp.array([[True, True, True], [True, False, False]])
      >>> batch = {"x": jnp.array([[1.0, 1.0, 1.0], [3.0, 0.0, 0.0]]), "counts": counts}
      >>> _, metrics = jax.jit(step)(jt.TrainState.create(jnp.zeros(()), optax.sgd(0.1)), batch)
      >>> float(metrics["loss"]), float(metrics["grad_norm"])  # of four tokens, with inputs 1, 1, 1, 3
      (1.0, 3.0)
    """
    check_flag("has_aux", has_aux)
    takes_state = not is_stateless(loss_fn)
    if takes_state:
        check_takes_state(loss_fn)

    def of_batch(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> tuple[Any, tuple[Any, Weighted]]:
        if takes_state:
            pair, (model_state, aux) = unpack_loss(loss_fn(params, model_state, batch, rng))
        else:
            result = loss_fn(params, batch)
            pair, aux = loss_and_aux(result, True) if has_aux else (result, None)
        total, weight = _checked(pair)
        return total / divisor(weight), (model_state, Weighted(aux, weight))

    of_batch.__qualname__ = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)  # for messages
    return of_batch


def _checked(pair: Any) -> tuple[jax.Array, jax.Array]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise TypeError(
            "loss_fn of weighted must return (total, weight), two scalars; pass has_aux=True if it returns "
            "((total, weight), aux)"
        )
    return float32_scalar(pair[0]), lax.stop_gradient(jnp.asarray(pair[1], jnp.float32))


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) or (hasattr(x, "dtype") and jnp.shape(x) == ())  # pyright: ignore


def divisor(weight: jax.Array) -> jax.Array:
    """Returns the number by which a sum of this weight is divided: 1 for 0, and NaN for infinity, not a loss of 0."""
    return jnp.where(weight == 0, 1.0, jnp.where(jnp.isfinite(weight), weight, jnp.nan))


def times(factor: jax.Array, tree: Any) -> Any:
    """Returns a loss, or gradients, times a number; arrays that a step overwrites stay."""
    multiply = lambda x: x * factor.astype(x.dtype) if is_inexact_array(x) else x
    return map_overwritten(lambda x: x, multiply, tree)


def weighed(loss: Any, aux: Any, grads: Any, axis_names: Sequence[str]) -> tuple[Any, Any, Any]:
    """Returns a device's loss, aux and gradients, so that the mean over devices is that of all weights together."""
    if not isinstance(aux, Weighted):
        return loss, aux, grads
    total = sum_over_axes(aux.weight, axis_names)
    factor = divisor(aux.weight) * (lax.axis_size(tuple(axis_names)) / divisor(total))
    return times(factor, loss), Weighted(aux.aux, total), times(factor, grads)


def own_aux(aux: Any) -> Any:
    """Returns the loss function's own aux."""
    return aux.aux if isinstance(aux, Weighted) else aux
