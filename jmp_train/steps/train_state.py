"""The train states: `TrainState`, and flax's for steps with a loss scale. A skipped step leaves both unchanged."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState as _TrainStateOfFlax

from jmp_train.policies import Grads, PyTree, select_step
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.policies.optimizers import (
    Addition,
    as_transformation,
    check_nesting,
    has_nested_scale,
    kept_if_skipped,
    loss_scale_of,
    scaled_states,
)
from jmp_train.policies.pytrees import (
    is_key_or_data,
    is_nnx_object,
    is_nnx_statistic,
    is_nnx_variable,
    named_leaves,
    path_name,
    refuse_overwritten,
    select_tree,
    trained,
    trained_gradients,
    with_overwritten,
)
from jmp_train.types import ModelState

_STATE_OF_FLAX = frozenset(("batch_stats", "cache", "intermediates", "perturbations"))  # collections of flax's layers


def check_params(params: PyTree) -> None:
    """Raises TypeError if a tree has leaves without gradients, and ValueError if it has no leaves.

    Args:
      params: for `TrainState.create`.
    """
    if is_nnx_object(params):
        raise TypeError(
            f"params is the nnx module {type(params).__name__}, whose statistics and random keys are not "
            "parameters. Use graph, params, rest = nnx.split(model, nnx.Param, ...), TrainState.create(params, "
            "optimizer, model_state=rest), and nnx.merge(graph, params, model_state) in loss_fn"
        )
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_nnx_variable)
    for path, variable in nodes:
        if is_nnx_statistic(variable):
            raise TypeError(
                f"params {path_name(path)!r} is an nnx.{type(variable).__name__}, not a parameter; separate them "
                "with nnx.split(model, nnx.Param, ...) and pass the rest as model_state"
            )
    _refuse_collections(params)
    refuse_overwritten(trained(params))
    leaves = named_leaves(params)
    if not leaves:
        raise ValueError(f"params={params!r} has no arrays: there is nothing to train")
    for name, x in leaves:
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"params {name!r} must be an array, got {x!r}; partition the model")
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"params {name!r} is {x.dtype}{list(x.shape)}, which has no gradient; keep it in model_state or "
                "outside of the step"
            )


def _refuse_collections(params: PyTree, path: str = "") -> None:
    """Raises TypeError if a tree of dictionaries has flax collections that are not parameters."""
    if not isinstance(params, Mapping):
        return
    for name, value in params.items():
        below = f"{path}/{name}" if path else str(name)
        if name in _STATE_OF_FLAX and jax.tree.leaves(value) and (name == "batch_stats" or "params" in params):
            raise TypeError(
                f"params {below!r} is a collection of flax variables that are not trained. Use variables = "
                f'model.init(...), TrainState.create(variables["params"], optimizer, model_state={{"{name}": '
                f'variables["{name}"]}}), and model.apply({{"params": params, **model_state}}, ..., '
                f'mutable=["{name}"]) in loss_fn'
            )
        _refuse_collections(value, below)


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


class FlaxTrainState(_TrainStateOfFlax):
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
            clipping before `with_loss_scale`. The message has the right order.
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
        made, old = ({name: getattr(state, name) for name in kwargs} for state in (new, self))
        kept = select_step(new.opt_state, made, jax.tree.map(_but_keys, made, old))
        taken = scaled_states(new.opt_state)[0][1].last_taken
        params, opt_state = select_tree(taken, new.params, self.params), kept_if_skipped(new.opt_state, self.opt_state)
        return new.replace(params=params, opt_state=opt_state, **kept)


def _but_keys(new: PyTree, old: PyTree) -> Any:
    """Returns an array after a skipped step: the new random key, or the old value of another array."""
    return new if is_key_or_data(new) else old


class Update(NamedTuple):
    """The result of `apply_gradients`.

    Attributes:
      state: the next train state.
      grads: unscaled gradients; the sum over several losses.
      finite: bool scalar, True if all gradients are finite, on all devices.
      taken: bool scalar, True if the optimizer took the step.
      additions: one `Addition` of the optimizer to the parameters, if requested; otherwise empty.
      model_state_finite: bool scalar, False if the model state overflowed, so that the old one was kept; None without
        a loss scale, and for a model state without floating arrays.
    """

    state: TrainState
    grads: Any
    finite: jax.Array
    taken: jax.Array
    additions: tuple[Addition, ...]
    model_state_finite: jax.Array | None = None
