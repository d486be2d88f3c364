"""Gradients within a float16 region or policy: they are named at their line, and `scaled_grad` is right."""

import functools
import warnings
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

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(64, 16)), jnp.float32)
W = jnp.asarray(RANDOM.normal(size=(16, 8)), jnp.float32)
ROUTES: dict[str, Callable[[Any, Any], Any]] = {
    "autocast": lambda fn, dtype: jt.autocast(fn, dtype),
    "policy": lambda fn, dtype: jt.apply_policy(fn, f"mixed_{jnp.dtype(dtype)}"),
    "step": lambda fn, dtype: functools.partial(
        jt.scaled_value_and_grad(lambda w, x: fn(w, x).astype(jnp.float32).sum(), f"autocast_{jnp.dtype(dtype)}"),
        jt.NoOpLossScale(),
    ),
    "mixed step": lambda fn, dtype: functools.partial(
        jt.scaled_value_and_grad(lambda w, x: fn(w, x).astype(jnp.float32).sum(), f"mixed_{jnp.dtype(dtype)}"),
        jt.NoOpLossScale(),
    ),
}


def small_loss(w: Any, x: Any) -> Any:
    """Its gradients with respect to `x` are of about 1e-7, below float16's smallest normal number of 6e-5."""
    return 1e-5 * jnp.tanh(x @ w @ jnp.eye(8, dtype=x.dtype)).astype(jnp.float32).mean()


def by_grad(w: Any, x: Any) -> Any:
    return jax.grad(small_loss, 1)(w, x)


def by_value_and_grad_in_jit(w: Any, x: Any) -> Any:
    return jax.jit(lambda w, x: jax.value_and_grad(jax.jit(small_loss), 1)(w, x)[1])(w, x)


def by_vjp_in_a_loop(w: Any, x: Any) -> Any:
    def body(x: Any, _: None) -> Any:
        value, pull = jax.vjp(functools.partial(small_loss, w), x)
        return pull(jnp.ones_like(value))[0].astype(x.dtype), None

    return jax.lax.scan(body, x, None, 2)[0]


def by_nnx(w: Any, x: Any) -> Any:
    return nnx.grad(small_loss, argnums=1)(w, x)


def by_vmap_of_grad(w: Any, x: Any) -> Any:
    return jax.vmap(jax.grad(small_loss, 1), (None, 0))(w, x)


WAYS = (by_grad, by_value_and_grad_in_jit, by_vjp_in_a_loop, by_nnx, by_vmap_of_grad)


def said(fn: Any, *args: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as found, jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("always")
        jax.eval_shape(fn, *args)
        jax.eval_shape(fn, *args)  # once, not at each trace
    return [warning for warning in found if warning.category is jt.policies.InnerGradientWarning]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("way", WAYS)
def test_an_inner_gradient_is_named_once_at_its_line(way: Any, route: str) -> None:
    (warning,) = said(ROUTES[route](way, jnp.float16), W, X)
    first = way.__code__.co_firstlineno
    assert warning.filename == __file__
    assert first < warning.lineno <= first + 3
    assert f"{__file__}:{warning.lineno} runs in float16" in str(warning.message)
    assert "jt.scaled_grad" in str(warning.message)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("route", ROUTES)
def test_other_gradients_are_not(route: str) -> None:
    assert not said(ROUTES[route](by_grad, jnp.bfloat16), W, X)
    assert not said(ROUTES[route](lambda w, x: jt.scaled_grad(small_loss, 1)(w, x), jnp.float16), W, X)
    assert not said(ROUTES[route](small_loss, jnp.float16), W, X)
    assert not said(jax.grad(ROUTES["autocast"](small_loss, jnp.float16)), W, X)
    tangent = lambda w, x: jax.jvp(functools.partial(small_loss, w), (x,), (x,))[1]
    assert not said(ROUTES[route](tangent, jnp.float16), W, X)
    exact = lambda w, x: jax.grad(jt.autocast_as("float32")(small_loss), 1)(w, x)
    if "mixed" not in route and route != "policy":
        assert not said(ROUTES[route](exact, jnp.float16), W, X)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("route", ["autocast", "policy"])
def test_a_scaled_gradient_is_unscaled_and_right(route: str) -> None:
    wanted = np.asarray(jax.grad(small_loss, 1)(W, X))
    # Tenths of a percent are float16's rounding of the operands.
    fn = ROUTES[route](lambda w, x: jt.scaled_grad(small_loss, 1, scale=2.0**14)(w, x), jnp.float16)
    found = jax.jit(fn)(W, X)
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - wanted) < 3e-3 * np.linalg.norm(wanted)
    assert np.abs(wanted[np.asarray(found) == 0]).max(initial=0) < 1e-10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jt.policies.InnerGradientWarning)
        plain = np.float32(jax.jit(ROUTES[route](by_grad, jnp.float16))(W, X))
    assert np.linalg.norm(plain - wanted) > 0.05 * np.linalg.norm(wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", ["autocast_float16", "mixed_float16"])
def test_a_step_with_an_input_gradient_learns_as_in_float32(policy: str) -> None:
    """Adversarial examples: the sign of each gradient, and the gradient through a penalty of it."""

    def loss_fn(w: Any, x: Any) -> Any:
        slope = jt.scaled_grad(small_loss, 1, scale=2.0**14)(w, x)
        near = x + 0.1 * jnp.sign(slope).astype(x.dtype)
        return (1e5 * small_loss(w, near) + 1e10 * (slope**2).sum()).astype(jnp.float32)

    def grads_of(policy: str) -> Any:
        scale = jt.StaticLossScale(2.0**4)
        return scale.unscale(jax.jit(jt.scaled_value_and_grad(loss_fn, policy))(scale, W, X)[1])

    found, wanted = grads_of(policy), grads_of("float32")
    # A few percent: rounding flips the signs of slopes near 0.
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_arguments_are_those_of_grad() -> None:
    fn = lambda w, x, power: ((w * x) ** power).sum()
    for argnums in (0, (0, 1)):
        found = jt.scaled_grad(fn, argnums)(jnp.ones(2), jnp.ones(2), power=3)
        assert jax.tree.structure(found) == jax.tree.structure(jax.grad(fn, argnums)(jnp.ones(2), jnp.ones(2), power=3))
        np.testing.assert_array_equal(jax.tree.leaves(found)[0], [3.0, 3.0])
    scale = jt.torch_loss_scale(8.0)
    grads, aux = jt.scaled_grad(lambda w: (w * 2.0, "aux"), has_aux=True, scale=scale)(jnp.ones(()))
    assert (float(grads), aux) == (2.0, "aux")
    overflow = jt.scaled_grad(lambda w: w * jnp.float16(100), scale=2.0**10)(jnp.ones((), jnp.float16))
    assert np.isinf(overflow)
    with pytest.raises(TypeError, match="floating scalar"):
        jt.scaled_grad(lambda w: w)(jnp.ones(2))
    with pytest.raises(ValueError, match="finite"):
        jt.scaled_grad(lambda w: w.sum(), scale=0.0)


def test_a_penalty_takes_a_step_that_overflows_with_it() -> None:
    """An inner overflow reaches the loss, so the step is skipped."""

    def loss_fn(w: Any, x: Any) -> Any:
        return (jt.scaled_grad(lambda x: (x @ w).sum(), scale=2.0**15)(x) ** 2).sum()

    tx = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(loss_fn), tx, policy="mixed_float16")
    _, metrics = jax.jit(step)(jt.TrainState.create(W, tx), X)
    assert not bool(metrics["grads_finite"])
