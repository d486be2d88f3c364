"""The loss scale and the master weights of an `nnx.Optimizer`, which keeps optax's arrays in variables."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_train as jt

pytestmark = pytest.mark.quick


def make(optimizer: Any) -> tuple[nnx.Module, nnx.Optimizer]:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def scaled_sgd(scale: Any = None) -> Any:
    return jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), scale or jt.torch_loss_scale(init_scale=8.0))


def whole(optimizer: nnx.Optimizer) -> Any:
    return optimizer


def state_of(optimizer: nnx.Optimizer) -> Any:
    return optimizer.opt_state


@pytest.mark.parametrize("part", [whole, state_of])
@pytest.mark.parametrize("jit", [nnx.jit, lambda fn: fn])
def test_a_loss_is_scaled_by_the_scale_that_an_nnx_optimizer_has(
    part: Callable[[nnx.Optimizer], Any], jit: Callable[..., Any]
) -> None:
    _, optimizer = make(optax.chain(scaled_sgd()))

    def scaled(optimizer: nnx.Optimizer, loss: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss_scale = jt.get_loss_scale(part(optimizer))
        return loss_scale.scale(loss), loss_scale.loss_scale

    loss, number = jit(scaled)(optimizer, jnp.float16(3.0))
    assert isinstance(number, jax.Array)
    assert (float(loss), loss.dtype, float(number)) == (24.0, jnp.float32, 8.0)


def test_a_scale_that_is_an_array_and_one_of_several_losses_are_found() -> None:
    for scale, loss_id, expected in (
        (jt.StaticLossScale(jnp.float32(4.0)), None, 4.0),
        (jt.policies.PerLossScale((jt.StaticLossScale(2.0), jt.torch_loss_scale(16.0))), 1, 16.0),
    ):
        _, optimizer = make(scaled_sgd(scale))
        get = nnx.jit(lambda o, loss_id=loss_id: jt.get_loss_scale(o, loss_id=loss_id).loss_scale)
        assert float(get(optimizer)) == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit", [nnx.jit, lambda fn: fn])
def test_a_scale_is_set_in_an_nnx_optimizer_itself(jit: Callable[..., Any]) -> None:
    model, optimizer = make(scaled_sgd())
    trace = optimizer.opt_state.inner_state[0].trace["bias"]

    def quadruple(optimizer: nnx.Optimizer) -> None:
        scale = jt.get_loss_scale(optimizer)
        new = dataclasses.replace(scale, loss_scale=4 * scale.loss_scale)
        assert jt.set_loss_scale(optimizer, new) is optimizer

    jit(quadruple)(optimizer)
    assert float(jt.get_loss_scale(optimizer).loss_scale) == 32.0
    assert optimizer.opt_state.inner_state[0].trace["bias"] is trace
    optimizer.update(model, jax.tree.map(lambda p: 32.0 * jnp.ones_like(p), nnx.state(model)))
    np.testing.assert_allclose(trace[...], [1.0], rtol=1e-6)  # unscaled by the new one


def test_a_scale_is_set_in_a_copy_of_an_nnx_optimizers_state() -> None:
    _, optimizer = make(scaled_sgd())
    state = jt.set_loss_scale(optimizer.opt_state, jt.torch_loss_scale(init_scale=32.0))
    assert float(jt.get_loss_scale(state).loss_scale) == 32.0
    assert float(jt.get_loss_scale(optimizer).loss_scale) == 8.0
    assert isinstance(state.loss_scale.loss_scale, nnx.OptState)
    optimizer.opt_state = state
    assert float(jt.get_loss_scale(optimizer).loss_scale) == 32.0
    with pytest.raises(ValueError, match=r"period=2000, not 7 \(a preset's growth_interval or window\);"):
        jt.set_loss_scale(optimizer, jt.torch_loss_scale(growth_interval=7))


def test_master_weights_and_skips_of_an_nnx_optimizer_are_arrays() -> None:
    model, optimizer = make(jt.with_master_weights(scaled_sgd()))
    master_weights = jt.get_master_weights(optimizer)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(master_weights))
    jt.policies.set_master_weights(optimizer, jax.tree.map(jnp.ones_like, master_weights))
    np.testing.assert_array_equal(jt.get_master_weights(optimizer)["kernel"], np.ones((2, 1)))
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), nnx.state(model))
    optimizer.update(model, grads)
    with pytest.raises(jt.policies.StalledTrainingError, match=r"the loss scale .* is now 4"):
        jt.check_progress(optimizer, stop_after=1)


def test_an_nnx_optimizer_without_a_loss_scale_is_told_apart() -> None:
    _, optimizer = make(optax.sgd(0.1))
    with pytest.raises(ValueError, match="opt_state has no loss scale"):
        jt.get_loss_scale(optimizer)
