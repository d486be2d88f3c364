"""Stochastic rounding: unbiased, reproducible, and small updates that add up."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick


def test_what_bfloat16_holds_stays_and_the_rest_is_rounded_by_the_key() -> None:
    """How often to which of the two neighbors: `round_to` and its tests."""
    x = jnp.array([0.0, -0.0, 1.0, -1.5, jnp.inf, -jnp.inf, 2.0**-126, 3.3895314e38])
    between = jnp.full(1000, 1 + 2.0**-9)  # a quarter of the way from 1 to 1 + 2**-7
    rounded = jax.jit(lambda key: [jt.policies.stochastic_round(y, key) for y in (x, between, jnp.full(1000, jnp.nan))])
    for seed in range(20):
        held, neighbors, lost = rounded(jax.random.key(seed))
        assert_bitwise_equal(held, x.astype(jnp.bfloat16))
        assert set(np.asarray(neighbors, np.float64)) == {1, 1 + 2.0**-7}
        assert 180 < int((neighbors > 1).sum()) < 320  # five deviations
        assert bool(jnp.isnan(lost).all())
    with pytest.raises(TypeError, match="x must be float32, got float16"):
        jt.policies.stochastic_round(jnp.ones(2, jnp.float16), jax.random.key(0))


def descend(optimizer: Any, params: Any, steps: int, grads: Any) -> Any:
    step = jax.jit(lambda p, s: optimizer.update(grads, s, p, return_params=True))
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


@pytest.mark.full
def test_two_thousand_tiny_updates_move_it() -> None:
    params = jnp.ones(256, jnp.bfloat16)
    tiny = jnp.full(256, 2.0**-13)
    optimizer = jt.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(1))
    moved = descend(optimizer, params, 2000, tiny).astype(jnp.float32)
    # A random walk of 2,000 steps of at most 2**-8 up to 0.76, each with variance below 2**-21.
    assert abs(float(moved.mean()) - (1 - 2000 * 2.0**-13)) < 3 * math.sqrt(2000 * 2.0**-21 / 256)

    plain = jt.with_loss_scale(optax.sgd(1.0), jt.NoOpLossScale())
    step = jax.jit(jt.train_step(jt.stateless(lambda w, x: (w.astype(jnp.float32) * x).sum()), plain))
    state = jt.TrainState.create(params, plain)
    for _ in range(2000):
        state, _ = step(state, tiny)
    assert_bitwise_equal(state.params, params)


def test_a_key_makes_a_run() -> None:
    params = {"w": jnp.linspace(0, 1, 64, dtype=jnp.bfloat16), "norm": jnp.ones(4)}
    grads = {"w": jnp.full(64, 1e-3), "norm": jnp.full(4, 1e-3)}
    first, same, other = (
        descend(jt.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(seed)), params, 5, grads)
        for seed in (0, 0, 1)
    )
    assert_bitwise_equal(first, same)
    assert bool((first["w"] != other["w"]).any())
    assert first["norm"].dtype == jnp.float32
    np.testing.assert_allclose(first["norm"], 0.995, rtol=1e-6)


def test_equal_parameters_get_draws_of_their_own() -> None:
    params = {name: jnp.ones(64, jnp.bfloat16) for name in "ab"}
    grads = jax.tree.map(lambda x: jnp.full(64, 2.0**-9), params)
    optimizer = jt.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    after = descend(optimizer, params, 1, grads)
    assert bool((after["a"] != after["b"]).any())


def test_in_a_train_step_with_a_skip() -> None:
    optimizer = jt.with_stochastic_rounding(
        jt.with_loss_scale(relaxed(optax.adam(1e-2)), jt.NoOpLossScale()), jax.random.key(0)
    )
    loss_fn = jt.stateless(lambda w, x: ((x @ w).astype(jnp.float32) ** 2).mean())
    step = jax.jit(jt.train_step(loss_fn, optimizer), donate_argnums=0)
    state = jt.TrainState.create(jnp.ones((4, 2), jnp.bfloat16), optimizer)
    assert {x.dtype.name for x in jax.tree.leaves(state.opt_state.inner_state.inner_state)} == {"float32", "int32"}
    before = np.asarray(state.params)
    state, metrics = step(state, jnp.full((8, 4), jnp.inf, jnp.bfloat16))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(state.params, before)
    state, first = step(state, jnp.ones((8, 4), jnp.bfloat16))
    for _ in range(50):
        state, metrics = step(state, jnp.ones((8, 4), jnp.bfloat16))
    assert float(metrics["loss"]) < 0.5 * float(first["loss"])
    assert state.params.dtype == jnp.bfloat16


def test_wrong_calls_are_named() -> None:
    optimizer = jt.with_stochastic_rounding(optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(ValueError, match="takes parameters in bfloat16, float32 or float64, got 'w' is float16"):
        optimizer.init({"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2)})
    for key in (0, jnp.zeros(3, jnp.uint32), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match=r"key must be a jax random key, .* got "):
            jt.with_stochastic_rounding(optax.sgd(0.1), key)  # pyright: ignore[reportArgumentType]
    jt.with_stochastic_rounding(optax.sgd(0.1), jax.random.PRNGKey(0))
    nested = jt.with_loss_scale(optax.chain(optimizer), jt.NoOpLossScale())
    with pytest.raises(ValueError, match="with_stochastic_rounding has no effect inside"):
        nested.init(jnp.ones(2, jnp.bfloat16))
