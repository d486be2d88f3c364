"""Custom derivatives under autocast: planted gradients survive, products of a rule run in half precision."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train.policies.autocasting.transform import autocast, autocast_as

pytestmark = [pytest.mark.quick, pytest.mark.newest]

F16, F32 = "float16", "float32"


@jax.custom_vjp
def seven_vjp(x: jax.Array) -> jax.Array:
    """Twice its argument, with a planted gradient of 7."""
    return 2 * x


seven_vjp.defvjp(lambda x: (2 * x, None), lambda _, g: (7 * g,))


@jax.custom_jvp
def seven_jvp(x: jax.Array) -> jax.Array:
    """Twice its argument, with a planted tangent of 7."""
    return 2 * x


seven_jvp.defjvp(lambda primals, tangents: (2 * primals[0], 7 * tangents[0]))


def through_scan(seven: Any) -> Any:
    def fn(w: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda c, x: (c, seven(c)))
        return lax.scan(body, w, jnp.arange(3))[1][1]

    return fn


WRAPS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "plain": lambda seven: seven,
    "jit": jax.jit,
    "scan of remat": through_scan,
    "lower": autocast_as("lower"),
    "float32": autocast_as("float32"),
    "cond": lambda seven: lambda w: lax.cond(w.sum() > -1, seven, lambda x: x, w),
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_planted_gradient_survives(wrap: str) -> None:
    def gradient(seven: Any, w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(autocast(WRAPS[wrap](seven))(w).astype(jnp.float32)))(w)

    def gradients(w: jax.Array) -> list[jax.Array]:
        return [gradient(seven, w) for seven in (seven_vjp, seven_jvp)]

    for dtype in (F32, F16):
        w = jnp.ones((2, 2), dtype)
        for out in (*gradients(w), *jax.jit(gradients)(w)):
            assert (out.dtype, out.tolist()) == (dtype, [[7.0, 7.0], [7.0, 7.0]])


@pytest.mark.parametrize("wrap", [lambda fn: fn, autocast_as("lower")], ids=["entered", "lower"])
def test_a_custom_rule_with_products_is_run_in_half(wrap: Any) -> None:
    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        return 3 * g @ w.T, 5 * x.T @ g

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    function = autocast(wrap(product))
    assert function(x, w).dtype == F16

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return function(x, w).astype(jnp.float32).sum()

    gx, gw = jax.grad(loss, (0, 1))(x, w)
    assert (gx.dtype, gw.dtype) == (F32, F32)
    assert (float(gx[0, 0]), float(gw[0, 0])) == (12, 10)
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    assert "f32[2,3] = dot_general" not in text


def test_a_custom_rule_of_half_inputs_becomes_float32_where_a_rule_says_so() -> None:
    @jax.custom_vjp
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x * x)

    total.defvjp(lambda x: (jnp.sum(x * x), x), lambda x, g: (7 * g * x,))

    def fn(x: jax.Array) -> jax.Array:
        return autocast_as("float32")(total)(x.astype(jnp.float16))

    x = jnp.full((2, 3), 300.0)
    assert autocast(lambda x: total(x.astype(jnp.float16)))(x).dtype == F16
    out = autocast(fn)(x)
    assert (out.dtype, float(out)) == (F32, 6 * 300.0**2)
    assert jax.grad(autocast(fn))(x).tolist() == [[2100.0] * 3] * 2


def tanh_of_product() -> tuple[Any, jax.Array]:
    """Returns a function with a rule, which closes over an array, and that array."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
    function = jax.custom_jvp(lambda x: jnp.tanh(x @ w))
    function.defjvp(lambda p, t: (function(*p), (1 - function(*p) ** 2) * (t[0] @ w)))
    return function, w


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "grad",
    [
        lambda loss: jax.grad(jax.jit(loss)),
        lambda loss: jax.jit(jax.grad(jax.jit(loss))),
        lambda loss: jax.jacfwd(jax.jit(loss)),
        lambda loss: jax.grad(jax.checkpoint(jax.jit(loss))),
        lambda loss: jax.grad(lambda x: lax.scan(lambda c, _: (c, loss(x)), 0, None, 1)[1].sum()),
    ],
    ids=["grad of jit", "jit of both", "jacfwd", "remat", "scan"],
)
def test_a_rule_may_run_after_its_trace_has_ended(grad: Any) -> None:
    function, w = tanh_of_product()

    def loss(x: jax.Array, transform: Any = autocast) -> jax.Array:
        return transform(lambda x: function(x @ w))(x).astype(jnp.float32).mean()

    expected = grad(functools.partial(loss, transform=lambda f: f))(w)
    np.testing.assert_allclose(grad(loss)(w), expected, atol=1e-3)


def test_rules_with_integers() -> None:
    order, w = jnp.array([1, 0]), jnp.ones((2, 2))

    @jax.custom_jvp
    def largest(x: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (x @ w)[rows], jnp.argmax(x)

    @largest.defjvp
    def times_seven(primals: Any, tangents: Any) -> Any:
        out = largest(*primals)
        return out, (7 * (tangents[0] @ w)[primals[1]], np.zeros((), jax.dtypes.float0))

    out, index = autocast(largest)(jnp.eye(2), order)
    assert (out.dtype, index.dtype) == (F16, jnp.int32)
    grads = jax.grad(lambda x: autocast(largest)(x, order)[0].astype(jnp.float32).sum())(jnp.eye(2))
    assert grads.tolist() == [[14.0, 14.0], [14.0, 14.0]]


def test_a_lowered_rule_may_close_over_arrays_and_call_itself() -> None:
    w = jnp.full((2, 2), 0.5)

    @jax.custom_vjp
    def product(x: jax.Array) -> jax.Array:
        return x @ w

    product.defvjp(lambda x: (product(x), None), lambda _, g: (7 * g @ w.T,))
    loss = lambda x: autocast(autocast_as("lower")(product))(x).astype(jnp.float32).sum()
    text = str(jax.make_jaxpr(jax.grad(jax.jit(loss)))(w))
    assert "f32[2,2] = dot_general" not in text
    assert jax.grad(jax.jit(loss))(w).tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_symbolic_zeros_stay_symbolic() -> None:
    function = jax.custom_jvp(lambda x, y: x * y)

    def tangents(primals: Any, tangents: Any) -> Any:
        (x, y), (dx, dy) = primals, tangents
        assert isinstance(dy, jax.custom_derivatives.SymbolicZero)
        return x * y, 7 * dx * y

    function.defjvp(tangents, symbolic_zeros=True)
    assert float(jax.grad(lambda x: autocast(function)(x, jnp.float32(2)))(jnp.float32(3))) == 14


def test_a_derivative_rule_holds_no_tracer() -> None:
    def loss(x: jax.Array) -> jax.Array:
        h = x @ x
        return (jax.nn.softplus(h) - h * x).sum()

    with jax.checking_leaks():
        gradient = jax.jit(jax.grad(autocast(loss)))(jnp.eye(2))
    np.testing.assert_allclose(gradient, jax.grad(loss)(jnp.eye(2)), rtol=1e-2)
