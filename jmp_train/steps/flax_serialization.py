"""`flax.serialization` of loss scales and train states: `to_bytes`, `from_bytes`, `to_state_dict`.

Values that change from step to step are written by their path; the rules of a scale, such as its period, come from
the target. Importing this module registers the types, which has to be part of `import jmp_train`: an unknown state
is restored by flax without a check.
"""

import dataclasses
from typing import Any

import jax
from flax import serialization

from jmp_train.policies.loss_scaling import (
    DynamicLossScale,
    LossScales,
    NoOpLossScale,
    PerLossScale,
    StaticLossScale,
)
from jmp_train.policies.pytrees import is_key, named_leaves
from jmp_train.steps.train_state import TrainState


def _scale_to_dict(scale: LossScales) -> dict[str, Any]:
    return dict(named_leaves(scale))


def _scale_from_dict(scale: LossScales, state: dict[str, Any]) -> Any:
    names = [name for name, _ in named_leaves(scale)]
    if not isinstance(state, dict) or set(state) != set(names):
        came = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"the loss scale at {serialization.current_path()} is a {type(scale).__name__} with {names}, but the "
            f"state has {came}"
        )
    return jax.tree.unflatten(jax.tree.structure(scale), [state[name] for name in names])


def _state_to_dict(state: TrainState) -> dict[str, Any]:
    plain = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)
    return {
        field.name: serialization.to_state_dict(getattr(plain, field.name)) for field in dataclasses.fields(TrainState)
    }


def _state_from_dict(state: TrainState, given: dict[str, Any]) -> TrainState:
    names = [field.name for field in dataclasses.fields(TrainState)]
    if set(given) != set(names):
        raise ValueError(f"a TrainState has {names}, but the state has {sorted(given)}")
    plain = TrainState(
        **{name: serialization.from_state_dict(getattr(state, name), given[name], name=name) for name in names}
    )
    return jax.tree.map(_like, plain, state)


def _like(x: jax.Array, old: jax.Array) -> Any:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old)) if is_key(old) else x


for _kind in (NoOpLossScale, StaticLossScale, DynamicLossScale, PerLossScale):
    serialization.register_serialization_state(_kind, _scale_to_dict, _scale_from_dict, override=True)
serialization.register_serialization_state(TrainState, _state_to_dict, _state_from_dict, override=True)
