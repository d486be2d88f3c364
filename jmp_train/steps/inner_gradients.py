"""`scaled_grad`: gradients taken within a loss, a penalty or an inner step, with a scale of their own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.policies import autocast_as
from jmp_train.policies.loss_scaling import LossScale, StaticLossScale, loss_and_aux
from jmp_train.policies.pytrees import check_flag, upcast_to_float32
from jmp_train.steps.gradients import check_loss_scale, float32_scalar


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
