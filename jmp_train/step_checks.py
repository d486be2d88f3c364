"""What a train step can tell, while it is traced, about arguments that do not fit together."""

from typing import Any

import jax
import optax

from jmp_train.policies.loss_scaled_optimizer import LossScaledState
from jmp_train.policies.master_weights import MasterWeightsState
from jmp_train.policies.nodes import find_nodes
from jmp_train.policies.paths import path_name
from jmp_train.policies.per_loss_scale import LossScales
from jmp_train.policies.stored_parameters import StochasticRoundingState

_WRAPPERS = {
    "a loss scale": LossScaledState,
    "master weights": MasterWeightsState,
    "stochastic rounding": StochasticRoundingState,
}


def check_same_optimizer(
    optimizer: optax.GradientTransformation, opt_state: Any, params: Any
) -> None:
    """Raises ValueError if an optimizer's state is another optimizer's, and says what differs.

    Args:
      optimizer: of the step.
      opt_state: of the state that it is given. Its loss scale may be of another kind: it says the rule.
      params: as they are stored, arrays or tracers.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> adam, params = optax.adam(1e-3), jnp.ones(2)
      >>> check_same_optimizer(adam, adam.init(params), params)
    """
    try:
        wanted = jax.eval_shape(optimizer.init, params)
    except jax.errors.JAXTypeError:  # looks at numbers, and so cannot be asked
        return
    for text, kind in _WRAPPERS.items():
        has, wants = bool(find_nodes(opt_state, kind)), bool(find_nodes(wanted, kind))
        if has != wants:
            sides = ("state.opt_state", "the step's optimizer")
            first, second = sides if has else reversed(sides)
            raise ValueError(
                f"{first} has {text}, {second} has none: train_step and TrainState.create must be given the same "
                "optimizer"
            )
    names, wanted_names = _leaf_names(opt_state), _leaf_names(wanted)
    if names != wanted_names:
        extra = [name for name in names if name not in set(wanted_names)]
        missing = [name for name in wanted_names if name not in set(names)]
        raise ValueError(
            "state.opt_state is another optimizer's: it has "
            f"{_first(extra)} that the step's optimizer has not, and lacks {_first(missing)}; train_step and "
            "TrainState.create must be given the same optimizer"
        )


def _leaf_names(opt_state: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, LossScales)
    )
    return [path_name(path) for path, _ in leaves]


def _first(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
