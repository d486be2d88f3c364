"""Arrays and numbers of all dtypes, wherever a program can hold them, under autocast and without it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

Array = Any
Given = tuple[Any, ...]
Place = Callable[[Array, Given], Array]

X = np.array([0.5, 0.75, 1.0, 1.25], np.float32)
MATRIX = np.array([[1, 0.5, 0, 0.25], [0, 1, 0.5, 0], [0.25, 0, 1, 0.5], [0.5, 0, 0.25, 1]])
INTEGERS = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32")
ON_DEVICE = (*INTEGERS, "float16", "bfloat16", "float32", "complex64")
DTYPES = (*ON_DEVICE, "int64", "float64", "complex128")

# Numbers of Python and of NumPy, arrays of NumPy and of jax, random keys of both kinds. The 64-bit
# dtypes are truncated by jax where they enter a plain program, too.
ARRAYS: Given = (
    *(np.array([1, 0, 1]).astype(d) for d in DTYPES),
    *(jax.device_put(np.array([0, 1, 1]).astype(d)) for d in ON_DEVICE),
)
SCALARS: Given = (
    *(True, 3, 0.5, 1e9, 2j),
    *(np.dtype(d).type(1) for d in DTYPES),
    *(np.array(1).astype(d) for d in DTYPES),
    *(jax.device_put(np.ones((), d)) for d in ON_DEVICE),
)
KEYS: Given = (jax.random.key(0), jax.random.PRNGKey(0))
EVERY: Given = (*SCALARS, *ARRAYS, *KEYS)


def number(y: Any) -> Array:
    """Returns a float32 that depends on anything that is given."""
    y = jnp.asarray(y)
    if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) or (y.dtype, y.shape) == (jnp.uint32, (2,)):
        return jax.random.uniform(y)
    y = lax.real(y) + lax.imag(y) if jnp.iscomplexobj(y) else y
    y = y.astype(jnp.float32)
    y = jnp.sum(y) if y.ndim else y
    return lax.select(y > 1e3, y / 1e9, y) / 32


def body(x: Array, given: Given) -> Array:
    """Multiplies a vector by a matrix and by the sum of the numbers."""
    product = x @ jnp.asarray(MATRIX, x.dtype)
    return jnp.tanh(product * sum(map(number, given))) + x


def tangents_of(y: Any) -> Any:
    y = jnp.asarray(y)
    is_float = jnp.issubdtype(y.dtype, jnp.inexact)
    return jnp.zeros_like(y) if is_float else np.zeros(y.shape, jax.dtypes.float0)


def with_jvp(x: Array, given: Given, inside: bool = False) -> Array:
    if inside:
        function = jax.custom_jvp(lambda x: body(x, given))
        function.defjvp(lambda p, t: (function(*p), t[0] * sum(map(number, given))))
        return function(x)
    function = jax.custom_jvp(body)
    function.defjvp(lambda p, t: (function(*p), t[0] * sum(map(number, p[1]))))
    return function(x, given)


def with_vjp(x: Array, given: Given, inside: bool = False) -> Array:
    if inside:
        function = jax.custom_vjp(lambda x: body(x, given))
        function.defvjp(lambda x: (function(x), x), lambda x, t: (body(x * t, given),))
        return function(x)
    function = jax.custom_vjp(body)

    def backward(kept: Any, cotangent: Array) -> Any:
        x, given = kept
        first = jnp.take(given[-3], jnp.argmax(x) % 3)  # rules index arrays, and update them
        given = (*given[:-3], given[-3].at[0].set(first), *given[-2:])
        return body(x * cotangent, given), tuple(map(tangents_of, given))

    function.defvjp(lambda x, given: (function(x, given), (x, given)), backward)
    return function(x, given)


def scan_carry(x: Array, given: Given) -> Array:
    def step(carry: Any, _: None) -> Any:
        return (body(*carry), carry[1]), carry[1][0]

    (x, given), _ = lax.scan(step, (x, given), length=2)
    return body(x, given)


def while_carry(x: Array, given: Given) -> Array:
    def step(carry: Any) -> Any:
        count, x, going, given = carry
        return count + 1, body(x, given), going & (count < 1), given

    return lax.while_loop(lambda carry: carry[2], step, (0, x, True, given))[1]


def while_constants(x: Array, given: Given) -> Array:
    def proceed(carry: Any) -> Array:
        return (carry[0] < 2) & (sum(map(number, given)) > -1)

    return lax.while_loop(proceed, lambda c: (c[0] + 1, body(c[1], given)), (0, x))[1]


def branches(x: Array, given: Given) -> Array:
    def other(x: Array, given: Given) -> tuple[Array, Given]:
        return x, given

    def one(x: Array, given: Given) -> tuple[Array, Given]:
        return body(x, given), tuple(jnp.asarray(y) for y in given)

    x, given = lax.cond(jnp.array(True), one, other, x, given)
    x, _ = lax.cond(jnp.sum(x) > 0, one, other, x, given)
    return lax.switch(jnp.sum(x > 9), [lambda x: body(x, given), lambda x: x], x)


def mapped(x: Array, given: Given) -> Array:
    both = jax.vmap(body, (0, None))(jnp.stack([x, x[::-1]]), given)
    return both[0] + jax.vmap(lambda x: body(x, given), axis_name="rows")(both)[1]


def sharded(x: Array, given: Given) -> Array:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    x = jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P())(x, given)
    closed = jax.shard_map(lambda x: body(x, given), mesh=mesh, in_specs=P(), out_specs=P())
    return closed(x)


def linear_solve(x: Array, given: Given) -> Array:
    scale = 1 + sum(map(number, given))

    def solve(_: Any, b: Array) -> Array:
        return b / (1 + sum(map(number, given)))

    return lax.custom_linear_solve(lambda y: y * scale, body(x, given), solve, solve)


def root(x: Array, given: Given) -> Array:
    total = sum(map(number, given))

    def solve(f: Any, guess: Array) -> Array:
        return guess - f(guess) / (1 + sum(map(number, given)))

    return lax.custom_root(lambda y: y * (1 + total) - x, x, solve, lambda g, y: y / g(jnp.ones_like(y)))


def integrated(x: Array, given: Given) -> Array:
    """The gradient of odeint indexes the times within its rule."""
    del given
    times = jnp.array([0.0, 0.25, 0.5]), np.array([0.0, 0.5], np.float32)
    return sum(odeint(lambda y, _: -y * y, x, t)[-1] for t in times)


def scanned_over(x: Array, given: Given) -> Array:
    arrays = tuple(y for y in given if np.shape(y) == (3,))
    return lax.scan(lambda x, ys: (body(x, ys), ys), x, arrays)[0]


PLACES: dict[str, Place] = {
    "equation": body,
    "jit": lambda x, given: jax.jit(body)(x, given),
    "jit within jit": lambda x, given: jax.jit(lambda x: jax.jit(body)(x, given))(x),
    "scan constants": lambda x, given: lax.scan(lambda c, _: (body(c, given), None), x, length=2)[0],
    "scan carry": scan_carry,
    "scan over": scanned_over,
    "map": lambda x, given: lax.map(lambda row: body(row, given), jnp.stack([x, x]))[1],
    "fori": lambda x, given: lax.fori_loop(0, 2, lambda _, x: body(x, given), x),
    "while carry": while_carry,
    "while constants": while_constants,
    "branches": branches,
    "custom_jvp": with_jvp,
    "inside custom_jvp": lambda x, given: with_jvp(x, given, inside=True),
    "custom_vjp": with_vjp,
    "inside custom_vjp": lambda x, given: with_vjp(x, given, inside=True),
    "remat": lambda x, given: jax.checkpoint(body)(x, given),
    "inside remat": lambda x, given: jax.checkpoint(lambda x: body(x, given))(x),
    "vmap": mapped,
    "shard_map": sharded,
    "custom_linear_solve": linear_solve,
    "custom_root": root,
    "odeint": integrated,
}
FORWARD_ONLY = ("while carry", "while constants")


def with_derivative(place: str, function: Callable[[Array], Array]) -> Any:
    """Returns a function's values and how their sum changes with the vector."""

    def total(x: Array) -> tuple[Array, Array]:
        values = function(x)
        return jnp.sum(values.astype(jnp.float32)), values

    def run(x: Array) -> Any:
        if place not in FORWARD_ONLY:
            return jax.grad(total, has_aux=True)(x)
        _, tangent, values = jax.jvp(total, (x,), (jnp.ones_like(x),), has_aux=True)
        return tangent, values

    return run


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_what_a_program_holds_is_what_it_was(place: str) -> None:
    run = PLACES[place]
    half = autocast(run)

    @jax.jit
    def everything(x: Array) -> Any:
        """As arguments of autocast, closed over by what it is given, and without it."""
        forms = {"plain": lambda x: run(x, EVERY), "closed over": autocast(lambda x: run(x, EVERY))}
        if not place.startswith("inside custom"):  # whose rules outlive the trace, as under jit
            forms["arguments"] = lambda x: half(x, EVERY)
        return {name: with_derivative(place, form)(x) for name, form in forms.items()}

    results = everything(X)
    wanted = results.pop("plain")
    for name, result in results.items():
        for found, expected in zip(result, wanted, strict=True):
            assert np.all(np.isfinite(expected))
            np.testing.assert_allclose(found.astype(np.float32), expected, rtol=4e-3, atol=4e-3, err_msg=name)


def test_results_may_be_literals() -> None:
    def f(x: Array) -> Any:
        return jax.jit(lambda x: (x, True, 2, 0.5, 1j, MATRIX, KEYS[0]))(x)

    plain, ours = f(X), autocast(f)(X)
    assert [(y.dtype, y.shape) for y in ours] == [(y.dtype, y.shape) for y in plain]
    assert [y.tolist() for y in ours[:-1]] == [y.tolist() for y in plain[:-1]]


def test_float64_within_float32() -> None:
    def f(x: Array) -> Array:
        with jax.enable_x64(True):
            y = lax.convert_element_type(x, jnp.float64)
            y = lax.cond(jnp.sum(y) > 0, lambda y, a, b: y * a + b, lambda y, *_: y, y, 1e-9, 1)
            return lax.convert_element_type(y, jnp.float32)

    np.testing.assert_array_equal(autocast(f)(X), f(jnp.asarray(X)))


@pytest.mark.full
def test_eager_values() -> None:
    """Without `jax.jit`, every value is an array instead of a tracer."""
    np.testing.assert_allclose(autocast(body)(X, EVERY), body(jnp.asarray(X), EVERY), rtol=4e-3)
    assert float(autocast(number)(np.float64(1))) == 1 / 32


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bounded", "checkpointed"])
def test_loops_of_equinox_have_gradients(kind: str) -> None:
    """They hold bools and counts in their carries, and keep values of half in buffers."""
    matrix = jnp.asarray(MATRIX, jnp.float32) / 4

    def loss(w: Array) -> Array:
        def step(carry: Any) -> Any:
            x, count = carry
            return jnp.tanh(x @ w), count + 1

        start = (jnp.asarray(X) @ w, 0)
        loop: Any = eqx.internal.while_loop
        x, _ = loop(lambda carry: carry[1] < 3, step, start, max_steps=4, kind=kind)
        return jnp.sum(x.astype(jnp.float32))

    plain, ours = jax.jit(lambda w: (jax.grad(loss)(w), jax.grad(autocast(loss))(w)))(matrix)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=4e-3 * float(jnp.max(jnp.abs(plain))))
