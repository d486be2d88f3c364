"""`loss_gradients`: computes the scaled gradients of a loss function under a policy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from jmp_train.policies import Params
from jmp_train.policies.dtype_policies import FirstTrace, PathPolicy, Policy, named_policy
from jmp_train.policies.loss_scaling import LossScales, PerLossScale, refuse_pair, unpack_loss
from jmp_train.policies.pytrees import cast_like, is_float_array, path_name
from jmp_train.steps.batch_parts import check_has_examples, unstacked
from jmp_train.steps.gradient_functions import GradientFunction, LossFn, StepGradients
from jmp_train.steps.gradients import float32_scalar, unwatched_value_and_grad
from jmp_train.types import Batch, ModelState


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

        first_trace.look(
            lambda params, batch, model_state, rng: loss_fn(params, model_state, batch, rng),
            policy,
            (params, batch),
            {},
            uncast=(model_state, rng),
            names=("params", "batch", "model_state", "rng"),
        )
        value_and_grad = unwatched_value_and_grad(loss_of, policy, has_aux=True)
        (loss, (new_state, aux)), grads = value_and_grad(loss_scale, params, batch)
        if policy is not None:
            aux = policy.default.cast_to_output(aux)
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
