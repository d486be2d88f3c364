"""flax's TrainState for steps with a loss scale: a skipped step leaves it unchanged."""

from typing import Any, Self

import jax
import optax
from flax.training import train_state

from jmp_train.policies import Grads, PyTree, select_step
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.policies.optimizers import check_nesting, has_nested_scale, loss_scale_of, scaled_states
from jmp_train.policies.pytrees import is_key_or_data, trained, trained_gradients, with_overwritten


class FlaxTrainState(train_state.TrainState):
    """flax's `TrainState` whose `apply_gradients` takes scaled gradients and skips non-finite steps as a whole.

    Create and subclass it as flax's, with a `with_loss_scale` as `tx`. In a skipped step, parameters, optimizer
    state and everything else passed to `apply_gradients`, such as batch statistics, stay unchanged. `step` and random
    keys advance.

    Attributes:
      loss_scale: the scale of the next loss, for `scaled_value_and_grad`; a `NoOpLossScale` if `tx` has none.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> class State(jt.FlaxTrainState):
      ...     batch_stats: jax.Array
      >>> tx = jt.with_loss_scale(optax.sgd(1.0), jt.torch_loss_scale(2.0))
      >>> params, stats = {"w": jnp.ones(())}, jnp.zeros(())
      >>> state = State.create(apply_fn=None, params=params, tx=tx, batch_stats=stats)
      >>> state = state.apply_gradients(grads={"w": jnp.inf}, batch_stats=jnp.inf)
      >>> float(state.params["w"]), float(state.batch_stats), float(state.loss_scale.loss_scale)
      (1.0, 0.0, 1.0)

    Reference: `flax.training.train_state.TrainState`; `flax.training.dynamic_scale` for the selection that it replaces.
    """

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Self:
        """Returns a new state, as flax's `create` does.

        Args:
          apply_fn: see flax.
          params: the parameters.
          tx: the optimizer, a `with_loss_scale`.
          **kwargs: the state's other fields.

        Raises:
          ValueError: the optimizer's wrappers are in an order that `train_step` refuses, for example a chain with
            clipping, which is not linear in the scaled gradients, before `with_loss_scale`. The message has the right
            order.
        """
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        if has_nested_scale(state.opt_state):
            like_params = trained(params)
            check_nesting(optax.with_extra_args_support(tx), like_params, state.opt_state, like_params)
        return state

    @property
    def loss_scale(self) -> LossScales:
        """The loss scale of the next forward pass."""
        return loss_scale_of(self.opt_state)

    def apply_gradients(self, *, grads: Grads, **kwargs: object) -> Self:
        """Returns the next state, with the step taken or skipped.

        Args:
          grads: scaled gradients from `scaled_value_and_grad`; on many devices their mean.
          **kwargs: new values of other fields.
        """
        grads = with_overwritten(trained_gradients(grads), grads)  # only fp8's scales may be non-finite
        new = super().apply_gradients(grads=grads, **kwargs)
        if not scaled_states(new.opt_state):
            return new
        made = {name: getattr(new, name) for name in ("params", *kwargs)}
        old = {name: getattr(self, name) for name in made}
        kept = select_step(new.opt_state, made, jax.tree.map(_but_keys, made, old))
        return new.replace(**kept)


def _but_keys(new: PyTree, old: PyTree) -> Any:
    """Returns an array after a skipped step: the new random key, or the old value of another array."""
    return new if is_key_or_data(new) else old
