"""`weighted`: losses that are a sum divided by a number of counted tokens, over all micro-batches and devices.

Micro-batches and devices count different numbers of tokens, so the mean of their means is not the mean of all tokens.
Each computes the gradient of its own mean, which is as large as that of any batch in half precision. In float32, it is
multiplied by its weight, summed, and divided by the sum of weights.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.policies.loss_scaling import check_takes_state, is_stateless, loss_and_aux, unpack_loss
from jmp_train.policies.pytrees import check_flag, is_inexact_array, map_overwritten, sum_over_axes
from jmp_train.steps.gradients import float32_scalar


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
