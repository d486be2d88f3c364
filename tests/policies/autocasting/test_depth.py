"""What it takes to trace programs within programs under autocast, counted in calls of Python functions.

Seconds depend on what else the machine does; calls do not, and the one is much like the other.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_train.policies.autocasting.transform import autocast, autocast_as

pytestmark = pytest.mark.quick

Function = Callable[[Any, Any], Any]
Wrap = Callable[[Function], Function]

SIDE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def calls_to_trace(loss: Callable[..., Any], *args: Any) -> int:
    """Returns how many Python functions are called to trace a loss, with nothing known before."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    jax.clear_caches()
    gc.collect()
    sys.setprofile(count)
    try:
        jax.jit(loss).trace(*args)
    finally:
        sys.setprofile(None)
    return calls


def nested(wrap: Wrap, depth: int, fn: Function) -> Function:
    for _ in range(depth):
        fn = wrap(fn)
    return fn


def layers(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def test_jit_within_jit_costs_what_the_plain_function_does() -> None:
    def within_jit(fn: Function) -> Function:
        return jax.jit(lambda params, x: fn(params, x))

    params = [SIDE] * 20
    model = nested(within_jit, 6, layers)
    plain = calls_to_trace(jax.grad(model), params, SIDE)
    assert calls_to_trace(jax.grad(autocast(model)), params, SIDE) <= 2.5 * plain


def block(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) + x @ w


def in_scan(fn: Function) -> Function:
    return lambda x, w: lax.scan(lambda c, _: (fn(c, w), None), x, length=2)[0]


def in_fori(fn: Function) -> Function:
    return lambda x, w: lax.fori_loop(0, x.shape[0] + w[0, 0].astype(int), lambda _, c: fn(c, w), x)


def in_cond(fn: Function) -> Function:
    return lambda x, w: lax.cond(x[0, 0] > 0, fn, lambda x, _: x, x, w)


def in_checkpoint(fn: Function) -> Function:
    return lambda x, w: jax.checkpoint(lambda x: fn(x, w))(x)


def in_custom_jvp(fn: Function) -> Function:
    function = jax.custom_jvp(fn)
    function.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return function


def in_custom_vjp(fn: Function) -> Function:
    function = jax.custom_vjp(fn)
    function.defvjp(lambda *primals: jax.vjp(fn, *primals), lambda pullback, t: pullback(t))
    return autocast_as("lower")(function)


def in_all(fn: Function) -> Function:
    return jax.jit(in_scan(jax.jit(in_checkpoint(fn))))


@pytest.mark.full
@pytest.mark.parametrize(
    "wrap",
    [in_scan, in_fori, in_cond, in_checkpoint, in_custom_jvp, in_custom_vjp, in_all],
    ids=lambda wrap: wrap.__name__,
)
def test_the_cost_does_not_double_with_each_level(wrap: Wrap) -> None:
    def cost(depth: int) -> int:
        def loss(x: Any, w: Any) -> Any:
            deep = autocast(nested(wrap, depth, block))
            return jnp.sum(deep(x @ w, w).astype(jnp.float32))

        return calls_to_trace(loss if wrap is in_fori else jax.grad(loss), SIDE, SIDE)

    two, four, six = cost(2), cost(4), cost(6)
    assert six - four <= 3 * (four - two)  # at least 4 if it did
