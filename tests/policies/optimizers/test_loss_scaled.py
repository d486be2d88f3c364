"""`with_loss_scale` around every optimizer of optax, in any nesting, on one device or eight."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from optax_optimizers import ALIASES
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies.optimizers.stored_parameters import next_params

pytestmark = pytest.mark.quick

PARAMS = {"w": jnp.asarray([[1.0, -2.0], [0.5, -0.0]]), "b": jnp.asarray([0.25, 3.0])}
SCALE = 2.0**7


def gradients(seed: int, dtype: Any = jnp.float32) -> Any:
    """Returns scaled gradients that float16 holds exactly."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.integers(1, 64, p.shape) * rng.choice([-1, 1], p.shape), dtype), PARAMS
    )


def scaled() -> Any:
    return jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(SCALE))


NAMES = [name for name in ALIASES if name not in ("lbfgs", "optimistic_adam", "polyak_sgd")]


@functools.cache
def bare_steps(name: str) -> list[tuple[Any, Any]]:
    """Returns updates and states of three steps without a loss scale; every dtype here holds all values exactly."""
    optimizer: Any = relaxed(ALIASES[name]())
    state, steps = optimizer.init(PARAMS), []
    for seed in range(3):
        unscaled = jax.tree.map(lambda g: g / np.float32(SCALE), gradients(seed, np.float32))
        updates, state = optimizer.update(unscaled, state, PARAMS)
        steps.append((updates, state))
    return steps


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("grad_dtype", "param_dtype"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_sees_unscaled_float32_gradients(name: str, grad_dtype: str, param_dtype: str) -> None:
    """Op by op equal to the bare optimizer on float32 gradients and parameters."""
    wrapped: Any = jt.with_loss_scale(relaxed(ALIASES[name]()), jt.torch_loss_scale(SCALE))
    params = jax.tree.map(lambda p: np.asarray(p, param_dtype), PARAMS)
    state = wrapped.init(params)
    for seed, (expected, bare_state) in enumerate(bare_steps(name)):
        updates, state = wrapped.update(gradients(seed, grad_dtype), state, params)
        assert_bitwise_equal(updates, expected)
        assert_bitwise_equal(*(jax.tree.map(jnp.asarray, s) for s in (state.inner_state, bare_state)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_skips_without_a_trace(name: str) -> None:
    optimizer: Any = jt.with_loss_scale(relaxed(ALIASES[name]()), jt.torch_loss_scale(SCALE))

    @jax.jit
    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = update(gradients(0), optimizer.init(PARAMS), PARAMS)
    params = {**params, "b": jnp.asarray([-0.0, 1.0])}
    bad = gradients(1)
    bad["w"] = bad["w"].at[0, 1].set(jnp.inf)
    after, skipped = update(bad, state, params)
    assert_bitwise_equal(after, params)
    assert_bitwise_equal(skipped.inner_state, state.inner_state)
    assert float(skipped.loss_scale.loss_scale) == SCALE / 2
    assert (bool(state.last_finite), bool(skipped.last_finite)) == (True, False)
    after, state = update(gradients(2), skipped, after)
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), after))
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (1, 0)
    assert update._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, jt.with_master_weights], ids=["alone", "master weights"])
def test_a_skip_keeps_both_signs_of_a_complex_zero(wrap: Any) -> None:
    optimizer = wrap(scaled())
    params = jax.lax.complex(jnp.array([-0.0, 0.0, 1.0]), jnp.array([0.0, -0.0, -0.0]))
    bad = jax.lax.complex(jnp.ones(3), jnp.array([0.0, jnp.inf, 0.0]))
    updates, state = optimizer.update(bad, optimizer.init(params), params)
    assert_bitwise_equal(optax.apply_updates(params, updates), params)
    assert float(jt.get_loss_scale(state).loss_scale) == SCALE / 2


# --- the state --------------------------------------------------------------------------------


def test_counters_and_the_scale_over_a_sequence() -> None:
    optimizer: Any = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(256.0, growth_interval=2))
    state, rows = optimizer.init(jnp.ones(2)), []
    for bad in (1, 0, 0, 1, 1, 0):
        _, state = optimizer.update(jnp.array([1.0, jnp.nan if bad else 1.0]), state, jnp.ones(2))
        counts = int(state.skipped_steps), int(state.consecutive_skips)
        rows.append((float(state.loss_scale.loss_scale), *counts))
    assert rows == [(128, 1, 1), (128, 1, 0), (256, 1, 0), (128, 2, 1), (64, 3, 2), (64, 3, 0)]
    assert state.skipped_steps.dtype == state.consecutive_skips.dtype == jnp.int32


def test_it_unscales_with_the_scale_of_the_forward_pass() -> None:
    """mpx divides by the next one, which is twice as large here."""
    optimizer: Any = jt.with_loss_scale(optax.sgd(1.0), jt.torch_loss_scale(8.0, growth_interval=1))
    updates, state = optimizer.update(jnp.array(16.0), optimizer.init(jnp.array(0.0)))
    assert (float(updates), float(state.loss_scale.loss_scale)) == (-2.0, 16.0)


@pytest.mark.parametrize(
    ("scale", "grads", "dtype"),
    [
        # torch tests before unscaling, and applies the infinite result
        pytest.param(jt.StaticLossScale(2.0**-100), [1.0, 1e30, 0.0], jnp.float32, id="infinite by unscaling"),
        pytest.param(jt.NoOpLossScale(), [1.0, 2.0, jnp.nan], jnp.bfloat16, id="no scale"),
    ],
)
def test_gradients_are_tested_as_the_optimizer_sees_them(scale: Any, grads: list[float], dtype: Any) -> None:
    optimizer: Any = jt.with_loss_scale(optax.sgd(1.0), scale)
    updates, state = optimizer.update(jnp.array(grads, dtype), optimizer.init(jnp.ones(3)))
    np.testing.assert_array_equal(updates, [0, 0, 0])
    assert updates.dtype == jnp.float32
    assert (bool(state.last_finite), int(state.skipped_steps)) == (False, 1)


def test_clipping_inside_sees_unscaled_finite_gradients() -> None:
    optimizer: Any = jt.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), jt.StaticLossScale(64.0)
    )
    state = optimizer.init(jnp.zeros(2))
    updates, state = optimizer.update(jnp.array([3.0, 4.0], jnp.float16) * 64, state)
    np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)
    hidden, state = optimizer.update(jnp.array([jnp.inf, 1.0]), state)
    np.testing.assert_array_equal(hidden, [0, 0])
    assert int(state.skipped_steps) == 1


def test_a_schedule_does_not_count_skips() -> None:
    seen = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda count: 1.0 / (1 + count))
    optimizer: Any = jt.with_loss_scale(relaxed(seen), jt.StaticLossScale(1.0))
    state = optimizer.init(jnp.array(0.0))
    for grad in (1.0, jnp.inf, jnp.inf, 1.0):
        updates, state = optimizer.update(jnp.asarray(grad), state)
    assert float(updates) == -0.5  # the second step taken, not the fourth
    assert int(state.inner_state.count) == 2


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_return_params_gives_the_state_of_update_and_parameters_that_are_not_selected(dtype: str) -> None:
    optimizer: Any = jt.with_loss_scale(optax.sgd(1.0, momentum=0.9), jt.torch_loss_scale(4.0))
    params = jnp.array([1.0, -0.0, np.inf], dtype)
    for grads in (jnp.array([4.0, 8.0, 0.0]), jnp.array([4.0, jnp.inf, 0.0])):
        state = optimizer.init(params)
        updates, after = optimizer.update(grads, state, params)
        new_params, other = optimizer.update(grads, state, params, return_params=True)
        assert_bitwise_equal(after, other)
        assert_bitwise_equal(new_params, (params - grads.astype(dtype) / 4).astype(dtype))
        taken, same = next_params(optimizer, grads, state, params)
        assert_bitwise_equal(after, same)
        with jax.numpy_dtype_promotion("standard"):
            assert_bitwise_equal(taken, optax.apply_updates(params, updates))
        assert_bitwise_equal(taken, new_params if after.last_finite else params)


# --- nesting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nest",
    [
        scaled,
        lambda: optax.chain(optax.identity(), scaled()),
        lambda: optax.chain(optax.chain(scaled()), optax.scale(2.0)),
        lambda: optax.multi_transform({"a": scaled(), "b": optax.sgd(1.0)}, {"w": "a", "b": "b"}),
        lambda: optax.masked(scaled(), {"w": True, "b": False}),
        lambda: optax.MultiSteps(scaled(), 3).gradient_transformation(),
        lambda: optax.inject_hyperparams(
            lambda learning_rate: jt.with_loss_scale(optax.sgd(learning_rate), jt.torch_loss_scale(SCALE))
        )(learning_rate=0.1),
        lambda: optax.apply_if_finite(scaled(), 3),
    ],
)
def test_the_scale_is_found_in_any_nesting(nest: Any) -> None:
    state = relaxed(nest()).init(PARAMS)
    assert float(jt.get_loss_scale(state).loss_scale) == SCALE
    assert float(jt.get_loss_scale(state).scale(jnp.float16(2))) == 2 * SCALE


def test_none_and_several_are_errors() -> None:
    with pytest.raises(ValueError, match="opt_state has no loss scale; wrap the optimizer"):
        jt.get_loss_scale(optax.adam(0.1).init(PARAMS))
    both = optax.multi_transform({"a": scaled(), "b": scaled()}, {"w": "a", "b": "b"})
    with pytest.raises(ValueError, match=r"has 2 loss scales, at 'inner_states/a.*inner_states/b"):
        jt.get_loss_scale(both.init(PARAMS))


def test_two_optimizers_have_a_scale_each() -> None:
    """As two SGDs under one GradScaler: one steps, the other skips; here each adapts its own."""
    first, second = scaled(), scaled()
    states = [first.init(jnp.ones(1)), second.init(jnp.ones(1))]
    _, states[0] = first.update(jnp.ones(1), states[0])
    _, states[1] = second.update(jnp.full(1, jnp.inf), states[1])
    assert [float(jt.get_loss_scale(s).loss_scale) for s in states] == [SCALE, SCALE / 2]


def test_wrong_arguments_are_named() -> None:
    twice = jt.with_loss_scale(optax.chain(scaled()), jt.NoOpLossScale())
    with pytest.raises(ValueError, match="optimizer already has a loss scale; call with_loss_scale once"):
        twice.init(PARAMS)
    with pytest.raises(TypeError, match=r"loss_scale must be a LossScale, got 65536\.0; for a num"):
        jt.with_loss_scale(optax.sgd(0.1), 65536.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be an optax\.GradientTransformation, got 3"):
        jt.with_loss_scale(3, jt.NoOpLossScale())  # type: ignore[arg-type]


# --- transformations and devices --------------------------------------------------------------


@pytest.mark.full
def test_vmap_scan_and_donation() -> None:
    optimizer = scaled()
    grads = jnp.array([[128.0, 128.0], [jnp.inf, 1.0]])
    states = jax.vmap(optimizer.init)(jnp.ones((2, 2)))
    updates, states = jax.vmap(optimizer.update)(grads, states)
    np.testing.assert_allclose(updates, [[-0.1, -0.1], [0, 0]], rtol=1e-6)
    assert states.skipped_steps.tolist() == [0, 1]

    def step(state: Any, grad: Any) -> Any:
        updates, state = optimizer.update(grad, state)
        return state, updates

    state, _ = jax.lax.scan(step, optimizer.init(jnp.ones(2)), grads)
    assert int(state.skipped_steps) == 1
    donated = jax.jit(step, donate_argnums=0)
    state, _ = donated(optimizer.init(jnp.ones(2)), grads[1])
    state, _ = donated(state, grads[1])
    assert int(state.consecutive_skips) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("way", ["vma", "no vma", "pmap"])
def test_all_devices_skip_when_one_overflows(way: str) -> None:
    optimizer = scaled()
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def update(grads: jax.Array) -> Any:
        state = optimizer.init(jnp.ones(1))
        if way != "pmap":
            state = jt.policies.pvary(state, ("data",))
        updates, state = optimizer.update(grads, state, axis_names=("data",))
        return updates, state.skipped_steps[None]

    if way == "pmap":
        run = jax.pmap(update, axis_name="data")
    else:
        run = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=way == "vma"))
    shape = (8, 1) if way == "pmap" else (8,)
    for bad, skipped in ((5, 1), (None, 0)):
        grads = jnp.ones(8) if bad is None else jnp.ones(8).at[bad].set(jnp.nan)
        updates, counts = run(grads.reshape(shape))
        assert np.asarray(counts).ravel().tolist() == [skipped] * 8
        assert bool((np.asarray(updates) == 0).all()) == bool(skipped)
