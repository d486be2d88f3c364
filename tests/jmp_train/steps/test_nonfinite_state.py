"""Model state that overflows although all gradients are finite: the step is taken, and the old state stays."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import relaxed
from pytrees import assert_bitwise_equal, host_copy

import jmp_train as jt

pytestmark = pytest.mark.quick

MESH = Mesh(np.array(jax.devices()), ("data",))
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 2)), jnp.float32)
LARGE = X.at[9, 0].set(300.0)  # its square is infinite in float16; an example of the fifth of eight devices


def optimizer() -> Any:
    return jt.with_loss_scale(relaxed(optax.adam(1e-2)), jt.torch_loss_scale(2.0**4))


def squares_loss(params: Any, state: Any, x: Any, rng: Any) -> Any:
    """A linear loss, whose gradient is finite, with running squares, a count and a key."""
    del rng
    squares = (x**2).mean(0).astype(jnp.float32)
    new = {
        "squares": 0.5 * state["squares"] + 0.5 * jax.lax.stop_gradient(squares),
        "best": jnp.minimum(state["best"], 1 / squares),  # infinite until the first step, and in it if a square is 0
        "count": state["count"] + 1,
        "key": jax.random.split(state["key"])[0],
    }
    return (x @ params["w"]).astype(jnp.float32).mean() * 1e-2, (new, None)


def squares_state(optimizer: Any) -> jt.TrainState:
    model_state = {
        "squares": jnp.ones(2),
        "best": jnp.full(2, jnp.inf),
        "count": jnp.int32(0),
        "key": jax.random.key(0),
    }
    return jt.TrainState.create({"w": jnp.ones((2, 1))}, optimizer, model_state=model_state)


ROUTES: dict[str, Any] = {
    "jit": jax.jit,
    "data_parallel": lambda step: jt.data_parallel(step, MESH),
    "pmap_step": jt.pmap_step,
    "sharded_step": lambda step: jt.sharded_step(step, MESH),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("route", "accumulate_steps"), [*((route, 1) for route in ROUTES), ("jit", 2)])
def test_a_step_is_taken_and_keeps_the_old_state(route: str, accumulate_steps: int) -> None:
    step = jt.train_step(squares_loss, optimizer(), policy="mixed_float16", accumulate_steps=accumulate_steps)
    run = ROUTES[route](step)
    first, metrics = run(squares_state(step.optimizer), X.at[:, 0].set(0.0))
    assert bool(metrics["model_state_finite"])  # what was infinite may stay so
    np.testing.assert_allclose(first.model_state["squares"][0], 0.5**accumulate_steps)
    before = host_copy(first)
    second, metrics = run(first, LARGE)
    assert bool(metrics["grads_finite"])
    assert not bool(metrics["model_state_finite"])
    assert (int(metrics["skipped_steps"]), int(second.opt_state.inner_state[0].count)) == (0, 2)
    assert float(metrics["loss_scale"]) == 2.0**4
    assert not np.array_equal(second.params["w"], before.params["w"])
    for name in ("squares", "best", "count"):
        assert_bitwise_equal(second.model_state[name], before.model_state[name])
    assert second.model_state["key"] != before.model_state["key"]  # or layers would draw the same again
    third, metrics = run(second, X)
    assert bool(metrics["model_state_finite"])
    assert int(third.model_state["count"]) == before.model_state["count"] + accumulate_steps


def test_devices_that_split_the_state_agree() -> None:
    def loss_fn(w: Any, state: Any, x: Any, rng: Any) -> Any:
        del rng
        return w * 1.0, (state + jnp.where(jax.lax.axis_index("model") == 1, x, 1.0), None)

    step = jt.train_step(loss_fn, optimizer()).with_axes(model=("model",))
    state = jt.TrainState.create(jnp.ones(()), step.optimizer, model_state=jnp.zeros(4))
    specs = jt.TrainState(P(), P(), P("model"), P(), P())
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=(specs, P()), check_vma=False))
    after, metrics = run(state, jnp.float32(jnp.inf))
    assert not bool(metrics["model_state_finite"])
    np.testing.assert_array_equal(after.model_state, np.zeros(4))
    after, metrics = run(after, jnp.float32(2.0))
    np.testing.assert_array_equal(after.model_state, [1.0, 1.0, 2.0, 2.0])


def test_a_state_without_floats_costs_nothing_and_has_no_metric() -> None:
    def loss_fn(w: Any, count: Any, x: Any, rng: Any) -> Any:
        del rng
        return (w * x).sum(), (count + 1, None)

    step = jt.train_step(loss_fn, optimizer())
    state = jt.TrainState.create(jnp.ones(2), step.optimizer, model_state=jnp.int32(0))
    assert "model_state_finite" not in jax.eval_shape(step, state, jnp.ones(2))[1]
    plain = jt.train_step(squares_loss, optax.sgd(0.1))
    assert "model_state_finite" not in jax.eval_shape(plain, squares_state(plain.optimizer), X)[1]


class Tracked(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        squares = self.variable("batch_stats", "squares", jnp.ones, 2)
        squares.value = 0.5 * squares.value + 0.5 * (x.astype(jnp.float16) ** 2).mean(0).astype(jnp.float32)
        return nn.Dense(1)(x)


def tracked_loss(params: Any, stats: Any, x: Any) -> Any:
    y, new = Tracked().apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
    return y.mean(), new["batch_stats"]


def test_own_steps_keep_batch_statistics() -> None:
    """By `FlaxTrainState` and by `select_step`, which agree."""

    class State(jt.FlaxTrainState):
        batch_stats: Any

    @jax.jit
    def flax_step(state: State, x: Any) -> tuple[State, Any, Any]:
        value_and_grad = jt.scaled_value_and_grad(tracked_loss, has_aux=True)
        (_, stats), grads = value_and_grad(state.loss_scale, state.params, state.batch_stats, x)
        new = state.apply_gradients(grads=grads, batch_stats=stats)
        finite = jt.policies.stays_finite(stats, state.batch_stats)
        return new, jt.select_step(new.opt_state, (stats, 1), (state.batch_stats, 0)), finite

    state: Any = State.create(apply_fn=None, tx=optimizer(), **Tracked().init(jax.random.key(0), X))
    for x, stored in ((X, True), (LARGE, False)):
        new, (stats, number), finite = flax_step(state, x)
        assert bool(new.opt_state.last_taken)
        assert not np.array_equal(new.params["Dense_0"]["bias"], state.params["Dense_0"]["bias"])
        assert (bool(finite), int(number)) == (stored, stored)
        assert_bitwise_equal(new.batch_stats, stats)
        assert np.isfinite(stats["squares"]).all()
        assert np.array_equal(stats["squares"], state.batch_stats["squares"]) != stored
        state = new


def test_select_step_agrees_over_devices() -> None:
    state = optimizer().init(jnp.ones(2))

    def of_device(x: jax.Array) -> Any:
        return jt.select_step(state, x, jnp.zeros(()), axis_names=("data",))

    found = jax.vmap(of_device, axis_name="data")(jnp.array([1.0, jnp.inf]))
    np.testing.assert_array_equal(found, [0.0, 0.0])


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.ones((2, 1)))
        self.squares = nnx.BatchStat(jnp.ones(2))
        self.count = nnx.Variable(jnp.int32(0))
        self.dropout: Any = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        squares = (x.astype(jnp.float16) ** 2).mean(0).astype(jnp.float32)
        self.squares[...] = 0.5 * self.squares[...] + 0.5 * squares
        self.count[...] = self.count[...] + 1
        return self.dropout(x) @ self.w[...].astype(x.dtype)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("scale", [jt.torch_loss_scale(2.0**4), jt.NoOpLossScale()])
@pytest.mark.parametrize("value", [300.0, np.inf])
def test_nnx_modules_keep_theirs(scale: Any, value: float) -> None:
    """With and without a scale, whether the step is taken (300) or skipped (infinity)."""
    model = NnxNet(nnx.Rngs(0))
    tx = nnx.Optimizer(model, jt.with_loss_scale(relaxed(optax.adam(1e-2)), scale), wrt=nnx.Param)

    @nnx.jit
    def step(model: NnxNet, tx: nnx.Optimizer, x: Any) -> None:
        value_and_grad = jt.nnx_value_and_grad(lambda model, x: model(x).astype(jnp.float32).mean())
        _, grads = value_and_grad(jt.get_loss_scale(tx), model, x)
        tx.update(model, grads)

    with jax.numpy_dtype_promotion("standard"):
        step(model, tx, X)
        squares, w, draws = (np.array(x[...]) for x in (model.squares, model.w, model.dropout.rngs.count))
        step(model, tx, X.at[:, 0].set(value))
    np.testing.assert_array_equal(model.squares[...], squares)
    assert (int(model.count[...]), int(model.dropout.rngs.count[...])) == (1, draws + 1)
    assert np.array_equal(model.w[...], w) == (value == np.inf)
