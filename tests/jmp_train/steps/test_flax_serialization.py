from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import train_state
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick

PARAMS = {"dense": {"w": jnp.ones((2, 3))}, "b": jnp.zeros(3)}


def adam() -> Any:
    return relaxed(optax.adam(1e-2))


def stepped(optimizer: Any, state: Any) -> Any:
    update = jax.jit(optimizer.update)
    for value in (1.0, 2.0, np.inf):
        grads = jax.tree.map(lambda x, value=value: np.full_like(x, value), PARAMS)
        _, state = update(grads, state, PARAMS)
    return state


SCALES: dict[str, Any] = {
    "torch": jt.torch_loss_scale(1024.0),
    "megatron": jt.megatron_loss_scale(),
    "static": jt.StaticLossScale(8.0),
    "static array": jt.StaticLossScale(jnp.float32(8.0)),
    "none": jt.NoOpLossScale(),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", SCALES)
def test_an_optimizers_state_goes_to_bytes_and_back(name: str) -> None:
    optimizer = jt.with_master_weights(jt.with_loss_scale(adam(), SCALES[name]))
    fresh = optimizer.init(PARAMS)
    state = stepped(optimizer, fresh)
    back: Any = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert_bitwise_equal(jax.tree.map(jnp.asarray, back), state)
    again = serialization.from_state_dict(fresh, serialization.to_state_dict(state))
    assert_bitwise_equal(again, state)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_train_state_goes_to_bytes_and_back(make_key: Any) -> None:
    scales = jt.policies.PerLossScale((jt.torch_loss_scale(8.0), jt.StaticLossScale(4.0)))
    optimizer = jt.with_stochastic_rounding(jt.with_loss_scale(adam(), scales), jax.random.key(3))
    state = jt.TrainState.create(PARAMS, optimizer, model_state={"mean": jnp.ones(2)}, rng=make_key(7))
    other = jt.TrainState.create(
        jax.tree.map(jnp.zeros_like, PARAMS), optimizer, model_state={"mean": jnp.zeros(2)},
        rng=make_key(0),
    )  # fmt: skip
    back: Any = serialization.from_bytes(other, serialization.to_bytes(state))
    keys: Any = [jax.random.key_data(x.rng) for x in (back, state)]
    np.testing.assert_array_equal(keys[0], keys[1])
    assert_bitwise_equal(jax.tree.map(jnp.asarray, back), state)


def test_flaxs_own_train_state() -> None:
    optimizer = jt.with_loss_scale(adam(), jt.torch_loss_scale(4.0))
    fresh = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=optimizer)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    state = step(step(fresh, PARAMS), jax.tree.map(lambda x: x * jnp.nan, PARAMS))
    back: Any = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert float(jt.get_loss_scale(back.opt_state).loss_scale) == 2
    assert int(back.opt_state.skipped_steps) == 1


def test_another_kind_of_scale_is_named() -> None:
    states = [jt.with_loss_scale(adam(), SCALES[name]).init(PARAMS) for name in ("torch", "none")]
    with pytest.raises(ValueError, match=r"loss scale at \./loss_scale is a DynamicLossScale with"):
        serialization.from_state_dict(states[0], serialization.to_state_dict(states[1]))
    state = jt.TrainState.create(PARAMS, adam())
    with pytest.raises(ValueError, match=r"a TrainState has .*, but the state has \['params'\]"):
        serialization.from_state_dict(state, {"params": PARAMS})
