"""Delayed scaling in train steps: histories beside a reference, and what may and may not enter them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from promotion import relaxed
from pytrees import assert_bitwise_equal, assert_close

import jmp_train as jt

pytestmark = pytest.mark.quick

RULES = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8"})
RECIPE = jt.DelayedScaling(amax_history_len=4)
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {"up": jax.random.normal(KEYS[0], (16, 32)) / 4, "down": jax.random.normal(KEYS[1], (32, 16)) / 5}
BATCH = jax.random.normal(KEYS[2], (16, 16))


def policy_of(recipe: Any = RECIPE, rules: Any = RULES) -> Any:
    return dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=recipe)


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    with jax.named_scope("mlp"):
        hidden = jnp.tanh(batch @ params["up"])
        return ((hidden @ params["down"]).astype(jnp.float32) ** 2).mean()


def made(loss: Any = loss_fn, scale: Any = None, params: Any = PARAMS, recipe: Any = RECIPE, **kwargs: Any) -> Any:
    """Returns a step and the state before the first."""
    optimizer = jt.with_loss_scale(relaxed(optax.adam(1e-2)), scale or jt.StaticLossScale(2.0**10))
    step = jt.train_step(jt.stateless(loss), optimizer, policy=policy_of(recipe), **kwargs)
    return step, jt.steps.with_fp8_state(step, jt.TrainState.create(params, optimizer), BATCH)


def ran(step: Any, state: Any, steps: int = 3, batch: Any = BATCH) -> Any:
    run = jax.jit(step)
    for _ in range(steps):
        state, _ = run(state, batch)
    assert run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
    return state


def scales_of(state: Any) -> Any:
    return state.model_state.fp8.value


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_histories_and_scales_are_those_of_the_magnitudes(algorithm: Any) -> None:
    """Of a product whose operands are the parameter and the batch, for four steps."""
    recipe = jt.DelayedScaling(margin=1, amax_history_len=2, amax_compute_algo=algorithm)
    step, state = made(lambda w, x: ((x @ w).astype(jnp.float32) * 3).mean(), params=PARAMS["up"], recipe=recipe)
    run, history = jax.jit(step), np.zeros((3, 2))
    for number in range(4):
        batch = BATCH * 2.0**-number
        amax = [np.abs(batch).max(), np.abs(state.params).max(), 3 / (16 * 32)]
        state, _ = run(state, batch)
        history = np.stack([amax, history[:, 0]], 1)
        chosen = history.max(1) if algorithm == "max" else history[:, 0]
        (found,), (scale,) = (list(x.values()) for x in scales_of(state)[1::-1])
        np.testing.assert_allclose(found[:2], history[:2], rtol=1e-6)
        np.testing.assert_allclose(found[2], history[2], rtol=5e-3)  # which is bfloat16
        np.testing.assert_allclose(scale, np.array([448, 448, 57344]) / chosen / 2, rtol=5e-3)


def test_what_is_quantized_is_scaled_by_the_steps_before() -> None:
    """After some steps of the same batch the scales are those of the tensors, and so is the loss that of the recipe."""
    step, state = made()
    state = ran(step, state, 2)
    current = dataclasses.replace(step, policy=policy_of(jt.policies.Float8CurrentScaling()))
    metrics = [jax.jit(one)(state, BATCH)[1] for one in (step, current)]
    np.testing.assert_allclose(metrics[0]["loss"], metrics[1]["loss"], rtol=1e-2)
    np.testing.assert_allclose(metrics[0]["grad_norm"], metrics[1]["grad_norm"], rtol=3e-2)


def assert_same(one: Any, other: Any) -> None:
    assert_close(scales_of(one), scales_of(other), rtol=2e-3, atol=1e-6)
    assert_close(one.params, other.params, rtol=1e-3, atol=2e-3)


@pytest.mark.full
def test_micro_batches_are_one_batch() -> None:
    whole, parts = (ran(*made(accumulate_steps=count)) for count in (1, 4))
    assert_same(parts, whole)


@pytest.mark.full
def test_eight_devices_are_one() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    step, state = made(accumulate_steps=2)
    whole = ran(*made())
    placed = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    for parallel in (jt.data_parallel(step, mesh), jt.sharded_step(step, mesh)):
        assert_same(ran(parallel, placed), whole)
    pmapped = jt.pmap_step(step)
    for _ in range(3):
        state, _ = pmapped(state, BATCH)
    assert_same(state, whole)


def test_a_skipped_step_leaves_them() -> None:
    step, state = made(scale=jt.torch_loss_scale(2.0**10))
    state = ran(step, state, 2)
    for bad in (jnp.inf, jnp.nan):
        after, metrics = jax.jit(step)(state, BATCH.at[0, 0].set(bad))
        assert not bool(metrics["grads_finite"])
        assert_bitwise_equal(after.model_state, state.model_state)


def test_a_step_that_overflows_float16_leaves_them() -> None:
    step, state = made(scale=jt.torch_loss_scale(2.0**10))
    half = dataclasses.replace(jt.get_policy("autocast_float16"), rules=RULES, fp8=RECIPE)
    run = jax.jit(dataclasses.replace(step, policy=half))
    state, metrics = run(state, BATCH)
    assert bool(metrics["grads_finite"])
    large = dataclasses.replace(state.opt_state.loss_scale, loss_scale=jnp.float32(2.0**40))
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=large))
    after, metrics = run(state, BATCH)  # whose values are finite, unlike the scaled gradients
    assert not bool(metrics["grads_finite"])
    assert jnp.isfinite(metrics["loss"])
    assert_bitwise_equal(after.model_state, state.model_state)


@pytest.mark.full
def test_nothing_that_is_not_finite_enters_without_a_loss_scale_either() -> None:
    optimizer = optax.sgd(1e-3)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy_of())
    state = jt.steps.with_fp8_state(step, jt.TrainState.create(PARAMS, optimizer), BATCH)
    after, _ = jax.jit(step)(state, BATCH.at[0, 0].set(jnp.inf))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(scales_of(after)))


@pytest.mark.full
def test_a_thousand_steps_with_a_moving_loss_scale() -> None:
    """The history of gradients is the same as with a scale that stays, but for rounding, and always finite."""
    scale = jt.torch_loss_scale(2.0**4, growth_interval=7)
    steps = [made(scale=one, recipe=jt.DelayedScaling(amax_history_len=16)) for one in (scale, jt.NoOpLossScale())]

    def many(step: Any, state: Any) -> Any:
        def once(state: Any, number: jax.Array) -> Any:
            bad = jnp.where(number % 50 == 49, jnp.inf, 1.0)
            frozen = dataclasses.replace(state, params=PARAMS)
            new, metrics = step(frozen, BATCH * (1 + number / 1000) * bad)
            history = jax.tree.map(lambda x: x[2], scales_of(new).amax_history)
            finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new.model_state)]).all()
            return new, (finite, metrics["loss_scale"], metrics["grads_finite"], history)

        return jax.jit(lambda state: lax.scan(once, state, jnp.arange(1000)))(state)[1]

    (finite, scales, taken, moved), (_, _, _, stayed) = (many(*one) for one in steps)
    assert bool(finite.all())
    assert len(np.unique(scales)) > 5
    assert int((~taken).sum()) == 20
    for place in moved:
        np.testing.assert_allclose(moved[place][100:], stayed[place][100:], rtol=2e-2)


def scanned(params: Any, batch: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    return (lax.scan(lambda x, w: (layer(x, w), None), batch, params)[0].astype(jnp.float32) ** 2).mean()


def unrolled(params: Any, batch: jax.Array) -> jax.Array:
    for w in params:
        batch = jnp.tanh(batch @ w)
    return (batch.astype(jnp.float32) ** 2).mean()


@pytest.mark.full
def test_the_largest_of_a_loop_counts() -> None:
    layers = jnp.stack([PARAMS["up"][:, :16] * size for size in (1.0, 3.0, 0.5)])
    loop, layer_by_layer = (ran(*made(loss, params=layers), steps=1) for loss in (scanned, unrolled))
    (one,) = (x[:, 0] for x in scales_of(loop).amax_history.values())
    each = np.stack([x[:, 0] for x in scales_of(layer_by_layer).amax_history.values()])
    assert len(each) == 3
    np.testing.assert_allclose(one, each.max(0), rtol=2e-2)


def test_a_scope_that_is_called_as_a_loop_is_not_taken_for_one() -> None:
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        with jax.named_scope("scan"):
            return scanned(params, batch @ params[0])

    step, state = made(loss, params=PARAMS["up"][None, :, :16])
    assert len(scales_of(state).scale) == 2
    jax.eval_shape(step, state, BATCH)


@pytest.mark.full
def test_branches_have_histories_of_their_own() -> None:
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        y = lax.cond(batch[0, 0] > 100, lambda x: x @ params["up"], lambda x: x @ params["down"].T, batch)
        return (y.astype(jnp.float32) ** 2).mean()

    state = ran(*made(loss), steps=1)
    latest = {place: float(x[0, 0]) for place, x in scales_of(state).amax_history.items()}
    assert latest == {"cond:0:dot_general": pytest.approx(float(jnp.abs(BATCH).max())), "cond:1:dot_general": 0.0}


@pytest.mark.full
def test_the_largest_of_a_pipelines_stages_counts() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("pipe",))
    run = jt.pipeline(lambda w, x, rng: jnp.tanh(x @ w), mesh, micro_batches=2)
    layers = jnp.stack([PARAMS["up"][:, :16] * size for size in (1.0, 3.0, 0.5, 2.0)])

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return (run(params, batch).astype(jnp.float32) ** 2).mean()

    piped, whole = (ran(*made(fn, params=layers), steps=1) for fn in (loss, unrolled))
    (one,) = (x[:, 0] for x in scales_of(piped).amax_history.values())
    each = np.stack([x[:, 0] for x in scales_of(whole).amax_history.values()])
    np.testing.assert_allclose(one[1], each.max(0)[1], rtol=1e-6)  # the largest weight of all stages
    np.testing.assert_allclose(one[::2], each.max(0)[::2], rtol=2e-2)


@pytest.mark.full
def test_the_models_own_state_goes_on() -> None:
    def loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        return loss_fn(params, batch), (model_state + 1, None)

    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.train_step(loss, optimizer, policy=policy_of(), accumulate_steps=2)
    state = jt.TrainState.create(PARAMS, optimizer, model_state=jnp.zeros(()))
    state = ran(step, jt.steps.with_fp8_state(step, state, BATCH), steps=2)
    assert float(state.model_state.model_state) == 4
    # Another policy leaves the state alone, and evaluation needs none.
    other = dataclasses.replace(step, policy=jt.get_policy("autocast_bfloat16"))
    after, _ = jax.jit(other)(state, BATCH)
    assert_bitwise_equal(scales_of(after), scales_of(state))
    assert bool(jnp.isfinite(jt.apply_policy(loss_fn, policy_of())(state.params, BATCH)))


def test_what_is_missing_is_said() -> None:
    optimizer = optax.sgd(0.1)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy_of())
    state = jt.TrainState.create(PARAMS, optimizer)
    with pytest.raises(ValueError, match=r"2 products, which the state does not have; call state ="):
        step(state, BATCH)
    with pytest.raises(ValueError, match=r"must be an AutocastPolicy with fp8=DelayedScaling\(\), got None"):
        jt.steps.with_fp8_state(jt.train_step(jt.stateless(loss_fn), optimizer), state, BATCH)
    with pytest.raises(TypeError, match="step must be a result of train_step, not jitted, got"):
        jt.steps.with_fp8_state(jax.jit(step), state, BATCH)  # type: ignore[arg-type]
    none = dataclasses.replace(step, policy=policy_of(rules=jt.TORCH_CUDA))
    with pytest.raises(ValueError, match="no product of the loss is in 8 bits by the rules"):
        jt.steps.with_fp8_state(none, state, BATCH)
    foreign = jt.steps.with_fp8_state(step, state, BATCH)
    with pytest.raises(
        ValueError, match=r"the fp8 state does not fit the model and its rules: \['dot_general'\] are missing, \['mlp"
    ):
        dataclasses.replace(step, loss_fn=jt.stateless(lambda p, x: (x @ p["up"]).mean()))(foreign, BATCH)
    for field, bad in (("amax_history_len", 0), ("amax_compute_algo", "mean"), ("margin", 0.5)):
        with pytest.raises(ValueError, match=f"{field}={bad!r} must be"):
            jt.DelayedScaling(**{field: bad})  # type: ignore[arg-type]
