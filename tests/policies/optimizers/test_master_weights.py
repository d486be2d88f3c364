"""Half parameters with float32 master weights: the bits of float32 training, and nothing lost to a skip."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies.optimizers.stored_parameters import StoringOptimizer

pytestmark = [pytest.mark.quick, pytest.mark.newest]

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
HALVES = ["float16", "bfloat16"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch @ params["w"] + params["b"]).astype(jnp.float32)
    return ((hidden - 0.5) ** 2).mean()


def make_params() -> dict[str, jax.Array]:
    return {"w": jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.zeros(3)}


def in_half(dtype: str) -> Callable[[Any], Any]:
    return lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 50)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "accumulating": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_master_weights_are_float32_training_to_the_last_bit(optimizer: str, dtype: str) -> None:
    inner = OPTIMIZERS[optimizer]()
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    scaled = jt.with_loss_scale(relaxed(inner), jt.torch_loss_scale(2.0**8, growth_interval=5))
    wrapped = jt.with_master_weights(scaled)
    float32_step = jax.jit(jt.train_step(jt.stateless(loss_fn), scaled, policy=f"p=f32,c={dtype},o=f32"))
    half_step = jax.jit(jt.train_step(jt.stateless(loss_fn), wrapped, policy=f"p={dtype},c={dtype},o=f32"))
    float32_state = jt.TrainState.create(make_params(), scaled)
    half = jt.TrainState.create(make_params(), wrapped, cast_params=in_half(dtype))
    metrics: Any = {}
    for number in range(30):
        batch = jnp.asarray(X) * (np.float32(np.inf) if number in (3, 4, 17) else 1)
        float32_state, wanted = float32_step(float32_state, batch)
        half, metrics = half_step(half, batch)
        assert_bitwise_equal(metrics, wanted)
        master_weights = jt.get_master_weights(half.opt_state)
        assert_bitwise_equal(master_weights, float32_state.params)
        assert_bitwise_equal(half.params, in_half(dtype)(master_weights))
    assert int(metrics["skipped_steps"]) == 3
    assert {x.dtype.name for x in jax.tree.leaves(half.params)} == {dtype}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_skipped_step_changes_no_bit(dtype: str) -> None:
    optimizer: Any = jt.with_master_weights(jt.with_loss_scale(relaxed(optax.adam(0.1)), jt.torch_loss_scale()))
    params = {"w": jnp.array([1.0, -0.0, 0.0, np.inf], dtype), "n": jnp.ones(2)}
    state = optimizer.init(params)
    bad = {"w": jnp.array([1.0, 2.0, 3.0, np.nan], dtype), "n": jnp.ones(2)}
    updates, after = jax.jit(optimizer.update)(bad, state, params)
    with jax.numpy_dtype_promotion("standard"):
        assert_bitwise_equal(optax.apply_updates(params, updates), params)
    stepped = jax.jit(functools.partial(optimizer.update, return_params=True))
    assert_bitwise_equal(stepped(bad, state, params)[0], params)
    assert_bitwise_equal(jt.get_master_weights(after), jt.get_master_weights(state))
    assert int(jt.get_loss_scale(after).loss_scale) == 2**15


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_lead_where_steps_lead(dtype: str) -> None:
    optimizer: Any = jt.with_master_weights(relaxed(optax.adam(3e-3)))
    stepped = added = in_half(dtype)(make_params())
    state = other = optimizer.init(stepped)
    for number in range(20):
        grads = jax.tree.map(lambda p, n=number: jnp.cos(p * n), stepped)
        stepped, state = optimizer.update(grads, state, stepped, return_params=True)
        updates, other = optimizer.update(grads, other, added)
        with jax.numpy_dtype_promotion("standard"):
            added = optax.apply_updates(added, updates)
        assert_bitwise_equal(added, stepped)


def test_half_parameters_alone_stay_where_master_weights_move() -> None:
    plain = jt.with_loss_scale(optax.sgd(1.0), jt.NoOpLossScale())
    loss = jt.stateless(lambda w, x: (w * x).astype(jnp.float32))
    for optimizer, end in ((plain, 1.0), (jt.with_master_weights(plain), 1 - 100 * 2.0**-13)):
        step = jax.jit(jt.train_step(loss, optimizer))
        state = jt.TrainState.create(jnp.ones((), jnp.float16), optimizer)
        for _ in range(100):
            state, _ = step(state, jnp.float16(2.0**-13))
        assert float(state.params) == end


def test_master_weights_of_float32_parameters_lose_nothing() -> None:
    optimizer = jt.with_master_weights(optax.sgd(0.1))
    params = jnp.float32(1 + 2.0**-20)
    state = jt.TrainState.create(params, optimizer, cast_params=in_half("float16"))
    assert state.params.dtype.name == "float16"
    assert float(jt.get_master_weights(state.opt_state)) == 1 + 2.0**-20


def test_they_are_found_in_any_nesting_and_only_where_they_are() -> None:
    state = optax.chain(optax.clip(1.0), jt.with_master_weights(optax.sgd(0.1))).init(jnp.ones(2, jnp.float16))
    assert jt.get_master_weights(state).dtype.name == "float32"
    with pytest.raises(ValueError, match="no master weights; wrap the optimizer in with_master"):
        jt.get_master_weights(optax.sgd(0.1).init(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"2 sets of master weights, at '0/1', '1/1'"):
        jt.get_master_weights((state, state))


def test_a_skip_holds_for_what_comes_after_the_loss_scale_too() -> None:
    scaled = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    optimizer = jt.with_master_weights(optax.chain(scaled, optax.add_decayed_weights(-0.1)))
    loss = jt.stateless(lambda w, x: (w * x).astype(jnp.float32).sum())
    step = jax.jit(jt.train_step(loss, optimizer))
    state = jt.TrainState.create(jnp.full(2, 0.1), optimizer, cast_params=in_half("float16"))
    before = state
    state, metrics = step(state, jnp.float16(np.nan))
    assert int(metrics["skipped_steps"]) == 1
    assert_bitwise_equal(state.params, before.params)
    assert_bitwise_equal(jt.get_master_weights(state.opt_state), jt.get_master_weights(before.opt_state))


def test_parameters_from_elsewhere_come_with_their_master_weights() -> None:
    optimizer = jt.with_master_weights(optax.sgd(0.0))
    params = {"w": jnp.ones((2, 3), jnp.float16)}
    state = optax.chain(optimizer).init(params)
    other = jt.policies.set_master_weights(state, {"w": jnp.full((2, 3), 0.25, jnp.float16)})
    master_weights = jt.get_master_weights(other)
    assert_bitwise_equal(master_weights, {"w": jnp.full((2, 3), 0.25)})
    with pytest.raises(ValueError, match=r"params 'w' has shape \(3,\), but its master weight has shape \(2, 3\)"):
        jt.policies.set_master_weights(state, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="params must have the structure of the master weights"):
        jt.policies.set_master_weights(state, {"v": jnp.ones(3)})


def test_float32_parameters_and_their_master_weights_can_be_donated_together() -> None:
    optimizer: Any = jt.with_master_weights(optax.sgd(0.1))
    params = {"norm": jnp.ones(2), "w": jnp.ones(2, jnp.float16)}
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: optimizer.update(p, s, p, return_params=True), donate_argnums=(0, 1))
    params, state = optimizer.update(params, state, params, return_params=True)  # not jitted
    for _ in range(2):
        params, state = step(params, state)
    np.testing.assert_allclose(params["norm"], 0.9**3, rtol=1e-6)


def test_wrong_calls_are_named() -> None:
    optimizer = jt.with_master_weights(optax.sgd(0.1))
    assert isinstance(optimizer, StoringOptimizer)
    params = jnp.ones(2, jnp.float16)
    with pytest.raises(ValueError, match="params must be given"):
        optimizer.update(params, optimizer.init(params))
    with pytest.raises(TypeError, match=r"must be an optax\.GradientTransformation, got 3"):
        jt.with_master_weights(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"with_master_weights\(with_loss_scale\(optimizer"):
        jt.with_loss_scale(optimizer, jt.torch_loss_scale())
