"""Train states: ours, whose leaves can be donated, and `FlaxTrainState`, which takes the steps of flax's."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from promotion import promoting, relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick


def test_arrays_settle_to_strong_jax_arrays() -> None:
    params = {"weak": jnp.asarray(0.5), "numpy": np.ones(2, np.float32)}
    state = jt.TrainState.create(params, optax.sgd(0.1), model_state={"mean": np.zeros(2)})
    for leaf in jax.tree.leaves((state.params, state.model_state, state.step)):
        assert isinstance(leaf, jax.Array)
        assert not jax.typeof(leaf).weak_type
    assert state.step.dtype == jnp.int32


def test_no_two_leaves_share_a_buffer() -> None:
    optimizer = jt.with_loss_scale(optax.adam(0.1), jt.torch_loss_scale())
    state = jt.TrainState.create({"w": jnp.ones(2)}, optimizer, rng=jax.random.key(0))
    donate = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
    assert float(donate(donate(state)).opt_state.loss_scale.loss_scale) == 2**16


def test_parameters_that_appear_twice_can_be_donated() -> None:
    shared = jnp.ones(2)
    optimizer = optax.GradientTransformation(
        lambda params: {"slow": params}, lambda updates, state, params=None: (updates, state)
    )
    state = jt.TrainState.create({"a": shared, "tied": shared}, optimizer, model_state=shared)
    assert len({id(x) for x in jax.tree.leaves(state)}) == len(jax.tree.leaves(state))
    jax.jit(lambda s: jax.tree.map(jnp.copy, s), donate_argnums=0)(state)


def test_a_second_state_does_not_lose_its_scale_to_donation() -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.DynamicLossScale(jnp.float32(8)))
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + x, s), donate_argnums=0)
    step(jt.TrainState.create({"w": jnp.ones(2)}, optimizer))
    second = jt.TrainState.create({"w": jnp.ones(2)}, optimizer)
    assert float(jt.get_loss_scale(second.opt_state).loss_scale) == 8


def test_it_is_a_pytree_with_named_paths() -> None:
    state = jt.TrainState.create({"w": jnp.ones(2)}, optax.sgd(0.1), rng=jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths == [".params['w']", ".rng", ".step"]
    with pytest.raises(AttributeError):
        state.step = 3  # type: ignore[misc]


def test_bad_leaves_and_keys_are_named() -> None:
    with pytest.raises(TypeError, match="params 'act' must be an array"):
        jt.TrainState.create({"act": jax.nn.relu}, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"rng must be a jax random key.*got 0"):
        jt.TrainState.create({"w": jnp.ones(2)}, optax.sgd(0.1), rng=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rng must be a jax random key"):
        jt.TrainState.create({"w": jnp.ones(2)}, optax.sgd(0.1), rng=jnp.ones(2))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_both_kinds_of_keys_are_taken_and_survive_donation(make: Any) -> None:
    rng = make(0)
    state = jt.TrainState.create({"w": jnp.ones(2)}, optax.sgd(0.1), rng=rng)
    jax.jit(lambda s: jax.tree.map(jnp.copy, s), donate_argnums=0)(state)
    assert jax.random.bits(rng) == jax.random.bits(make(0))


# --- FlaxTrainState: the steps of flax's TrainState, and all that they change is skipped --------------

X = jax.random.normal(jax.random.key(1), (4, 3))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(2)(x))
        return nn.Dense(1)(x)


class State(jt.FlaxTrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


def created(state_class: Any, tx: Any, key: Any = None) -> Any:
    variables = promoting(Normed().init)(jax.random.key(0), X)
    key = jax.random.key(2) if key is None else key
    return state_class.create(apply_fn=Normed().apply, tx=tx, ema=variables["params"], key=key, **variables)


def step(state: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, updated = state.apply_fn(variables, x, mutable=["batch_stats"])
        return (y**2).mean(), updated["batch_stats"]

    value_and_grad = jt.scaled_value_and_grad(loss_fn, has_aux=True)
    scale = state.loss_scale if isinstance(state, State) else jt.NoOpLossScale()
    (_, batch_stats), grads = value_and_grad(scale, state.params)
    ema = jax.tree.map(lambda average, g: average + g, state.ema, grads)
    key = jax.random.fold_in(state.key, 1)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats, ema=ema, key=key)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("key", [jax.random.key(2), jax.random.PRNGKey(2)], ids=["typed", "raw"])
def test_an_overflow_changes_the_step_and_the_key_alone(key: jax.Array) -> None:
    compiled = jax.jit(promoting(step))
    tx = relaxed(optax.adam(0.1))
    state = compiled(created(State, jt.with_loss_scale(tx, jt.torch_loss_scale(8.0)), key), X)
    skipped = compiled(state, X.at[0, 0].set(jnp.inf))
    for name in ("params", "batch_stats", "ema"):
        assert_bitwise_equal(getattr(skipped, name), getattr(state, name))
    assert_bitwise_equal(skipped.opt_state.inner_state, state.opt_state.inner_state)
    assert_bitwise_equal(skipped.key, jax.random.fold_in(state.key, 1))
    assert int(skipped.step) == 2
    assert [float(s.loss_scale.loss_scale) for s in (state, skipped)] == [8.0, 4.0]
    again = compiled(skipped, X)  # the statistics are not poisoned
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(again.batch_stats))


class FlaxState(TrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


@pytest.mark.full
def test_steps_that_are_taken_are_flaxs_to_the_bit() -> None:
    tx = relaxed(optax.sgd(0.1, momentum=0.9))
    expected = jax.jit(promoting(step))(created(FlaxState, tx), X)
    plain = jax.jit(promoting(step))(created(State, tx), X)  # without a loss scale
    scaled_tx = jt.with_loss_scale(tx, jt.torch_loss_scale(1024.0))
    scaled = jax.jit(promoting(step))(created(State, scaled_tx), X)
    assert plain.loss_scale.loss_scale == 1
    for name in ("params", "batch_stats", "step"):
        for state in (plain, scaled):
            assert_bitwise_equal(getattr(state, name), getattr(expected, name))
    assert_bitwise_equal(scaled.opt_state.inner_state, expected.opt_state)


def test_clipping_of_scaled_gradients_is_refused() -> None:
    scaled = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="optimizer: a transformation before with_loss_scale changes"):
        jt.FlaxTrainState.create(apply_fn=None, params=params, tx=optax.chain(optax.clip_by_global_norm(1.0), scaled))
    in_order = optax.chain(scaled, optax.scale(0.5))
    assert jt.FlaxTrainState.create(apply_fn=None, params=params, tx=in_order).loss_scale.loss_scale == 2.0**16
