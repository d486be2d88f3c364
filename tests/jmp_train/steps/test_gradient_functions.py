"""Gradient functions compose: a step of our parts is `train_step`, and a user's transform plugs in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.steps import GradientFunction, StepGradients, accumulated, apply_gradients, loss_gradients, over_axes

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
PARAMS = {"in": jnp.asarray(RANDOM.normal(size=(6, 8)), jnp.float32), "out": jnp.ones((8, 1))}
BATCH = {"x": jnp.asarray(RANDOM.normal(size=(16, 6)), jnp.float32), "y": jnp.ones(16)}
MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
OPTIMIZER = jt.with_loss_scale(relaxed(optax.adam(1e-2)), jt.torch_loss_scale())


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["in"])
    kept = jax.random.bernoulli(rng, 0.8, hidden.shape)
    y = jnp.where(kept, hidden, jnp.zeros_like(hidden)) @ params["out"]
    loss = ((y.astype(jnp.float32)[:, 0] - batch["y"].astype(jnp.float32)) ** 2).mean()
    mean = jax.lax.stop_gradient(hidden).astype(jnp.float32).mean()
    return loss, ({"mean": 0.9 * model_state["mean"] + 0.1 * mean}, {"first": y[0]})


def new_state() -> jt.TrainState:
    return jt.TrainState.create(PARAMS, OPTIMIZER, model_state={"mean": jnp.zeros(())}, rng=jax.random.key(0))


def own_step(gradients: GradientFunction, axis_names: tuple[str, ...] = ()) -> Any:
    def step(state: jt.TrainState, batch: Any) -> Any:
        assert state.rng is not None
        next_rng, rng = jax.random.split(state.rng)
        result = gradients(loss_scale_of(state.opt_state), state.params, state.model_state, batch, rng)
        return apply_gradients(OPTIMIZER, state, result, next_rng, axis_names=axis_names).state

    return step


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("axis_names", [(), ("data",)])
def test_a_step_of_four_parts_is_train_step(count: int, axis_names: tuple[str, ...]) -> None:
    gradients = accumulated(loss_gradients(loss_fn, "mixed_float16"), count)
    own = own_step(over_axes(gradients, axis_names), axis_names)
    step = jt.train_step(loss_fn, OPTIMIZER, policy="mixed_float16", accumulate_steps=count)
    if axis_names:
        specs: Any = {"mesh": MESH, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
        own = jax.shard_map(own, **specs)
        expected, _ = jt.data_parallel(step, MESH)(new_state(), BATCH)
    else:
        expected, _ = jax.jit(step)(new_state(), BATCH)
    assert_bitwise_equal(jax.jit(own)(new_state(), BATCH), expected)


def with_noise(gradients: GradientFunction) -> GradientFunction:
    """Returns a gradient function with Gaussian noise of standard deviation 0.01, as in differential privacy."""

    def run(loss_scale: Any, params: Any, model_state: Any, batch: Any, rng: Any) -> StepGradients:
        result = gradients(loss_scale, params, model_state, batch, rng)
        keys = jax.tree.unflatten(jax.tree.structure(params), list(jax.random.split(rng, len(jax.tree.leaves(params)))))
        noise = jax.tree.map(lambda key, p: 0.01 * jax.random.normal(key, p.shape), keys, params)
        return result._replace(grads=jax.tree.map(jnp.add, result.grads, loss_scale.scale(noise)))

    return run


def with_penalty(gradients: GradientFunction) -> GradientFunction:
    """Returns a gradient function with the gradient of half the squared norm of the parameters."""

    def run(loss_scale: Any, params: Any, model_state: Any, batch: Any, rng: Any) -> StepGradients:
        result = gradients(loss_scale, params, model_state, batch, rng)
        return result._replace(grads=jax.tree.map(jnp.add, result.grads, loss_scale.scale(params)))

    return run


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_penalty_plugs_in(accumulate_steps: int) -> None:
    optimizer = jt.with_loss_scale(optax.sgd(1.0), jt.StaticLossScale(8.0))
    plain = jt.train_step(loss_fn, optimizer, accumulate_steps=accumulate_steps)
    state = jt.TrainState.create(PARAMS, optimizer, model_state={"mean": jnp.zeros(())}, rng=jax.random.key(0))
    before, _ = jax.jit(plain)(state, BATCH)
    after, _ = jax.jit(plain.with_transforms(with_penalty))(state, BATCH)
    for name, x in PARAMS.items():
        np.testing.assert_allclose(before.params[name] - after.params[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_noise_plugs_in_and_differs_between_devices() -> None:
    optimizer = optax.sgd(1.0)
    step = jt.train_step(jt.stateless(lambda params, x: 0 * (params * x).sum()), optimizer).with_transforms(with_noise)
    state = jt.TrainState.create(jnp.zeros(10_000), optimizer, rng=jax.random.key(0))
    alone, _ = jax.jit(step)(state, jnp.ones((4, 1)))
    together, _ = jt.data_parallel(step, MESH)(state, jnp.ones((4, 1)))
    assert float(alone.params.std()) == pytest.approx(0.01, rel=0.05)
    assert float(together.params.std()) == pytest.approx(0.01 / 2, rel=0.05)  # the mean of four devices


def test_micro_batches_average_gradients_of_any_gradient_function() -> None:
    def gradients(loss_scale: Any, params: Any, model_state: Any, batch: Any, rng: Any) -> StepGradients:
        loss = loss_scale.scale(batch.mean())
        return StepGradients(batch.mean(), model_state, None, loss * jnp.ones_like(params))

    run = accumulated(gradients, 4)
    result = run(jt.StaticLossScale(16.0), jnp.ones(2), None, jnp.arange(8.0), None)
    assert float(result.loss) == 3.5
    np.testing.assert_array_equal(result.grads, np.full(2, 3.5 * 16))


def test_loss_gradients_warns_on_its_first_trace() -> None:
    loss_fn = jt.stateless(lambda w, x: (w.astype(jnp.float32) @ jnp.ones((8, 8))).mean())
    gradients = loss_gradients(loss_fn, "mixed_float16")
    with pytest.warns(jt.policies.Float32ProductsWarning):
        gradients(jt.NoOpLossScale(), jnp.ones((8, 8)), None, jnp.ones(1), None)
