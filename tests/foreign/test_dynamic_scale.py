"""A step by `flax.training.dynamic_scale`, and what becomes of it: the same scales, the same parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax import lax

import jmp_train as jt

pytestmark = pytest.mark.quick

PARAMS = {"w": np.array([1.0, -2.0, 3.0], np.float32)}
INTERVAL = 5


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return ((params["w"].astype(jnp.float16) * x.astype(jnp.float16)) ** 2).mean()


class DynamicState(TrainState):
    dynamic_scale: DynamicScale | None = struct.field(default=None)


def flax_step(state: Any, x: jax.Array) -> Any:
    grad_fn = state.dynamic_scale.value_and_grad(loss_fn)
    dynamic_scale, is_finite, _, grads = grad_fn(state.params, x)
    new = state.apply_gradients(grads=grads)
    select = lambda a, b: jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), a, b)
    new = new.replace(
        opt_state=select(new.opt_state, state.opt_state),
        params=select(new.params, state.params),
        dynamic_scale=dynamic_scale,
    )
    return new, dynamic_scale.scale


def our_step(state: Any, x: jax.Array) -> Any:
    _, grads = jt.scaled_value_and_grad(loss_fn)(state.loss_scale, state.params, x)
    state = state.apply_gradients(grads=grads)
    return state, state.loss_scale.loss_scale


@functools.cache
def first_states() -> tuple[DynamicState, jt.FlaxTrainState]:
    flax_scale = DynamicScale(growth_interval=INTERVAL)
    # flax counts the non-overflow steps before the one that grows: an interval of n is a period of n + 1.
    our_scale = jt.DynamicLossScale(65536.0, period=INTERVAL + 1, min_loss_scale=2.0**-126)
    tx = optax.adam(1e-2)
    model: Any = {"apply_fn": None, "params": PARAMS}
    flax_state = DynamicState.create(**model, tx=tx, dynamic_scale=flax_scale)
    return flax_state, jt.FlaxTrainState.create(**model, tx=jt.with_loss_scale(tx, our_scale))


@jax.jit
def run_both(states: tuple[Any, Any], x: jax.Array) -> list[Any]:
    """Returns the last state and the scales of flax's step and of ours."""
    results = []
    for step, state in zip((flax_step, our_step), states, strict=True):
        fixed, _ = step(state.replace(step=jnp.int32(0)), jnp.ones(3))  # arrays of fixed types
        results.append(lax.scan(step, fixed, x))
    return results


@pytest.mark.parametrize("overflows", [0.0, 0.1, 0.5])
def test_scales_and_parameters_are_flaxs(overflows: float) -> None:
    bad = np.random.default_rng(0).random(200) < overflows
    x = np.where(bad[:, None], np.inf, np.linspace(0.1, 1, 3)).astype(np.float32)
    (expected, expected_scales), (state, scales) = run_both(first_states(), x)
    np.testing.assert_array_equal(scales, expected_scales)
    assert len(set(np.asarray(scales).tolist())) >= 3
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-6)
    assert int(state.step) == int(expected.step) == 201
    assert int(state.opt_state.skipped_steps) >= bad.sum()
