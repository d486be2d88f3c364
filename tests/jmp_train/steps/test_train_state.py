from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
