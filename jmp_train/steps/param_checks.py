"""Checks of parameters before a train state is created from them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import (
    is_nnx_object,
    is_nnx_statistic,
    is_nnx_variable,
    named_leaves,
    path_name,
    refuse_overwritten,
    trained,
)

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
