"""The train state: everything that a training run carries from step to step, as one pytree."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.policies import PyTree
from jmp_train.policies.optimizers import as_transformation
from jmp_train.policies.pytrees import is_key_or_data, trained, with_overwritten
from jmp_train.steps.param_checks import check_params
from jmp_train.types import ModelState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, model state, random key and step count; a frozen pytree.

    Args:
      params: pytree of parameters, usually float32.
      opt_state: the optimizer state, with the loss scale in it.
      model_state: pytree of values that the model itself updates, such as batch statistics; None if there are none.
      rng: a jax random key, or None for a loss without random numbers.
      step: int32 scalar, the number of steps so far, including skipped ones.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = TrainState.create({"w": jnp.ones(2)}, optax.sgd(0.1))
      >>> int(state.step), state.rng
      (0, None)
    """

    params: Any
    opt_state: Any
    model_state: Any
    rng: Any
    step: Any

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        *,
        model_state: ModelState = None,
        rng: jax.Array | None = None,
        cast_params: Callable[[Any], Any] | None = None,
    ) -> "TrainState":
        """Returns the state before the first step.

        Args:
          params: pytree of parameters, in the dtypes in which they are stored. The optimizer does not get
            flax's collection `_overwrite_with_gradient` of fp8 scales; `train_step` sets these to their gradients.
          optimizer: the optimizer of the train step; `init` is called on `params`.
          model_state: pytree of the model's own state, or None.
          rng: a jax random key, typed or of uint32, or None.
          cast_params: casts the parameters to their storage dtypes after the optimizer has seen them, so that its
            float32 master weights lose nothing. None casts nothing.

        Returns:
          A state whose arrays keep their dtypes through all steps, so that jit traces once.

        Raises:
          TypeError: `params` has a leaf that is not a floating or complex array, is an nnx module or has its
            statistics, or has flax's `batch_stats`; `optimizer` is not an optimizer, or `rng` is not a key.
          ValueError: `params` has no leaves.

        Example:
          >>> import jax, jax.numpy as jnp, optax
          >>> optimizer = optax.adam(1e-3)
          >>> state = TrainState.create({"w": jnp.ones(2)}, optimizer, rng=jax.random.key(0))
          >>> state.opt_state[0].mu["w"].dtype.name
          'float32'
        """
        if rng is not None and not (isinstance(rng, jax.Array) and is_key_or_data(rng)):
            raise TypeError(f"rng must be a jax random key, such as jax.random.key(0), got {rng!r}")
        check_params(params)
        optimizer = as_transformation(optimizer)
        params, model_state = _settle((params, model_state))
        opt_state = _settle(optimizer.init(trained(params)))
        if cast_params is not None:
            params = with_overwritten(_settle(cast_params(params)), params)
        params, opt_state, model_state = _own_buffers((params, opt_state, model_state))
        return cls(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            rng=None if rng is None else jnp.copy(rng),  # so that the caller's key survives donation
            step=jnp.zeros((), jnp.int32),
        )


def _settle(tree: PyTree) -> Any:
    """Returns arrays as jax arrays with strong dtypes, as a step returns them, so that no step retraces."""

    def settle(x: object) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            return jnp.asarray(x)
        if isinstance(x, jax.Array) and jax.typeof(x).weak_type:
            return jax.lax.convert_element_type(x, x.dtype)
        return x

    return jax.tree_util.tree_map(settle, tree)


def _own_buffers(tree: PyTree) -> Any:
    """Copies arrays that appear twice, because donation refuses them and an optimizer may keep the parameters."""
    seen = set()

    def own(x: object) -> Any:
        if isinstance(x, jax.Array) and id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree_util.tree_map(own, tree)
