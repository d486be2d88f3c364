"""flax's TrainState for steps with a loss scale: a skipped step leaves it unchanged."""

from typing import Any, Self

import jax
import optax
from flax.training import train_state

from jmp_train.policies import Grads, PyTree
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.policies.optimizers import check_nesting, has_nested_scale, loss_scale_of, scaled_states, select_step
from jmp_train.policies.pytrees import is_key_or_data, trained, trained_gradients, with_overwritten


class FlaxTrainState(train_state.TrainState):
    """flax's `TrainState`, whose `apply_gradients` takes scaled gradients and skips as a whole.

    It is created and subclassed as flax's is, with `tx` a `with_loss_scale`. Where that skips the
    step, everything passed to `apply_gradients` beside the gradients, batch statistics above all,
    stays as it was, as parameters and optimizer state do. `step` goes on, and so do random keys.

    Attributes:
      loss_scale: what the next loss is to be multiplied with, for `scaled_value_and_grad`; a
        `NoOpLossScale` where `tx` has none.

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

    Reference: `flax.training.train_state.TrainState`; `flax.training.dynamic_scale` for the
    selection that it replaces.
    """

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Self:
        """Returns a new state, as flax's `create` does; refuses an optimizer whose wrappers are out of order.

        Args:
          apply_fn: see flax.
          params: the parameters.
          tx: the optimizer, a `with_loss_scale`.
          **kwargs: the state's other fields.

        Raises:
          ValueError: what comes before `with_loss_scale` in a chain is not linear in the scaled gradients, as clipping
            is not, or another order that `train_step` refuses; the message has the right one.
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
        """Returns the state after a step that was taken or skipped.

        Args:
          grads: scaled gradients, as `scaled_value_and_grad` gives them; over many devices their mean.
          **kwargs: other fields, as the step has made them.
        """
        grads = with_overwritten(trained_gradients(grads), grads)  # fp8's scales may be bad alone
        new = super().apply_gradients(grads=grads, **kwargs)
        if not scaled_states(new.opt_state):
            return new
        made = {name: getattr(new, name) for name in ("params", *kwargs)}
        old = {name: getattr(self, name) for name in made}
        kept = select_step(new.opt_state, made, jax.tree.map(_but_keys, made, old))
        return new.replace(**kept)


def _but_keys(new: PyTree, old: PyTree) -> Any:
    """Returns what a skipped step leaves of an array: the old one, but of a random key the next."""
    return new if is_key_or_data(new) else old
