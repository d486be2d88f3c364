"""Loss functions of train steps: `stateless` adapts plain ones, `loss_gradients` computes scaled gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from jmp_train.policies import Params, PathPolicy
from jmp_train.policies.autocasting import missing_key_explained, rounding_key
from jmp_train.policies.dtype_policies import FirstTrace, Policy, named_policy
from jmp_train.policies.loss_scaling import (
    LossScales,
    PerLossScale,
    check_is_stateless,
    loss_and_aux,
    only_losses,
    refuse_pair,
    unpack_loss,
)
from jmp_train.policies.pytrees import cast_like, check_flag, is_float_array, named_leaves, path_name
from jmp_train.steps.batch_parts import unstacked
from jmp_train.steps.gradient_functions import GradientFunction, LossFn, StepGradients
from jmp_train.steps.gradients import Weighted, float32_scalar, own_aux, unwatched_value_and_grad
from jmp_train.types import Batch, ModelState

_STATELESS = (
    "stateless is for a loss_fn that draws nothing; train_step gives a key to loss_fn(params, model_state, batch, rng)"
)


def stateless(loss_fn: Callable[..., Any], has_aux: bool | None = None) -> LossFn:
    """Adapts a plain loss function to `train_step`.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, or `-> (loss, aux)`. `loss` may be a tuple of losses.
      has_aux: True if `loss_fn` returns `(loss, aux)`. Required if it returns two scalars and the optimizer has no
        `PerLossScale`: False if both are losses.

    Returns:
      `fn(params, model_state, batch, rng) -> (loss, (model_state, aux))`, which returns the model state unchanged
      and draws nothing.

    Raises:
      TypeError: `loss_fn` cannot take two arguments; when called, a part of its result is not a loss, and `has_aux` is
        not set.

    Example:
      >>> import jax.numpy as jnp
      >>> fn = stateless(lambda params, batch: (params * batch).sum())
      >>> loss, (model_state, aux) = fn(jnp.ones(2), None, jnp.ones(2), None)
      >>> float(loss), aux
      (2.0, None)
    """
    check_is_stateless(loss_fn)
    if has_aux is not None:
        check_flag("has_aux", has_aux)

    def with_state(
        params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        del rng
        with missing_key_explained(lambda: _STATELESS, is_last_word=True):
            result = loss_fn(params, batch)
        loss, aux = loss_and_aux(result, True) if has_aux else (only_losses(result, has_aux), None)
        return loss, (model_state, aux)

    with_state.__qualname__ = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)  # for messages
    return with_state


def loss_gradients(
    loss_fn: LossFn, policy: Policy | PathPolicy | str | None = None, *, first_trace: FirstTrace | None = None
) -> GradientFunction:
    """Returns a function that computes the scaled gradients of a loss under a policy.

    Args:
      loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux))`; see `stateless`. `loss` is a
        scalar or a tuple of scalars. Their sum is differentiated, or each of them if the loss scale is a
        `PerLossScale`.
      policy: the dtypes, or the name of a policy; None casts nothing. Parameters and batch are cast, the model state
        is not.
      first_trace: warns on the first trace; None creates a new one.

    Returns:
      `gradients(loss_scale, params, model_state, batch, rng) -> StepGradients`. The batch may hold a
      `jmp_train.graphs.stack` of one graph.

    Raises:
      TypeError: when called, the loss is not a floating scalar, or the model state changes its structure, shapes or
        dtypes. Floating arrays are cast back.
      ValueError: when called, the batch has no examples.

    Example:
      >>> import jmp_train as jt
      >>> loss_fn = jt.stateless(lambda w, x: (w * x).astype(jnp.float32).sum())
      >>> gradients = loss_gradients(loss_fn, "mixed_float16")
      >>> gradients(jt.StaticLossScale(8.0), jnp.ones(2), None, jnp.array([1.0, 2.0]), None).grads
      Array([ 8., 16.], dtype=float32)

    Reference: Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740.
    """
    policy = None if policy is None else named_policy(policy)
    first_trace = FirstTrace() if first_trace is None else first_trace

    def gradients(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        check_has_examples(batch)
        batch = unstacked(batch, 1)

        def loss_of(params: Params, batch: Batch) -> tuple[Any, Any]:
            # Rebuilt here, because nnx lets variables change only in the trace that made them.
            state = jax.tree.map(lambda x: x, model_state)
            loss, extra = unpack_loss(loss_fn(params, state, batch, rng))
            return (loss if isinstance(loss_scale, PerLossScale) else _total(loss)), extra

        look = first_trace.look(
            lambda params, batch, model_state, rng: loss_fn(params, model_state, batch, rng),
            policy,
            (params, batch),
            {},
            uncast=(model_state, rng),
            names=("params", "batch", "model_state", "rng"),
        )
        value_and_grad = unwatched_value_and_grad(loss_of, policy, has_aux=True)
        with look, rounding_key(rng):
            (loss, (new_state, aux)), grads = value_and_grad(loss_scale, params, batch)
        if policy is not None:
            own = policy.default.cast_to_output(own_aux(aux))
            aux = Weighted(own, aux.weight) if isinstance(aux, Weighted) else own  # weights stay float32
        _check_alike(new_state, model_state)
        return StepGradients(_total(loss), cast_like(new_state, model_state), aux, grads)

    return gradients


def _total(loss: Any) -> jax.Array:
    """Returns the sum of one or several losses, in float32 or higher precision."""
    if not isinstance(loss, tuple | list):
        return float32_scalar(loss)
    refuse_pair(loss)
    return functools.reduce(jnp.add, map(float32_scalar, loss))


def _check_alike(new: ModelState, old: ModelState) -> None:
    """Raises TypeError if a new model state differs from the old one in more than floating dtypes."""
    old_tree, new_tree = jax.tree.structure(old), jax.tree.structure(new)
    if old_tree != new_tree:
        raise TypeError(
            f"loss_fn must return a model_state of the state's structure, got:\n  {new_tree}\nand the state "
            f"has:\n  {old_tree}\nPass the initial one to TrainState.create(model_state=...)"
        )

    def check(path: KeyPath, x: jax.Array, y: jax.Array) -> None:
        both_float = is_float_array(x) and is_float_array(y)
        if jnp.shape(x) != jnp.shape(y) or not (both_float or x.dtype == y.dtype):
            raise TypeError(
                f"loss_fn returned model_state {path_name(path)!r} as {y.dtype}{list(y.shape)}, but the state "
                f"has {x.dtype}{list(x.shape)}"
            )

    jax.tree_util.tree_map_with_path(check, old, new)


NO_KEY = (
    "The state has no random key, so that loss_fn got rng=None: TrainState.create(params, optimizer, "
    "rng=jax.random.key(0)) gives it one, and loss_fn a fresh key in each step"
)


def check_has_examples(batch: Batch) -> None:
    """Raises ValueError for a batch without examples, because its loss would be NaN and its gradients finite zeros.

    Args:
      batch: arrays [examples, ...] and scalars. One of several arrays may be empty, such as the edges of a graph.
    """
    shapes = [(path, jnp.shape(x)) for path, x in named_leaves(batch) if jnp.ndim(x) > 0]
    if shapes and all(shape[0] == 0 for _, shape in shapes):
        path, shape = shapes[0]
        raise ValueError(f"the batch has no examples: {path or '(root)'!r} has shape {shape}")
