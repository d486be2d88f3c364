"""Regions within regions, values that autocast leaves alone, and its rules and errors."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pytrees import assert_bitwise_equal

from jmp_train.policies.autocasting.region import BannedOperationError
from jmp_train.policies.autocasting.rules import TORCH_CUDA, AutocastRules
from jmp_train.policies.autocasting.transform import autocast, autocast_as

pytestmark = [pytest.mark.quick, pytest.mark.newest]

F16, F32, BF16 = "float16", "float32", "bfloat16"
X, Y = np.random.default_rng(0).normal(size=(2, 4, 6))


def test_the_innermost_region_decides() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    plain = autocast(lambda y: y @ w, enabled=False)
    half = autocast(lambda y: y @ w)
    brain = autocast(lambda y: y @ w, jnp.bfloat16)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint, jax.vmap, through_identity_scan):
        assert dtype_of(autocast(lambda x, wrap=wrap: wrap(plain)(x @ w)), x) == F32
        assert dtype_of(autocast(lambda x, wrap=wrap: wrap(half)(x @ w), enabled=False), x) == F16
        assert dtype_of(autocast(lambda x, wrap=wrap: wrap(brain)(x @ w)), x) == BF16
    assert dtype_of(autocast(half, jnp.bfloat16), x) == F16
    assert dtype_of(autocast(autocast(half, enabled=False), enabled=False), x) == F16


def dtype_of(fn: Any, x: Any) -> str:
    return jax.eval_shape(fn, x).dtype.name


def through_identity_scan(fn: Any) -> Any:
    return lambda x: lax.scan(lambda c, _: (c, fn(c)), x, None, length=1)[1][0]


def test_a_region_within_a_differentiated_region() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    inner = autocast(lambda w: x @ w, enabled=False)
    text = str(jax.make_jaxpr(jax.grad(lambda w: autocast(lambda w: inner(w).sum())(w)))(w))
    assert "f16" not in text


def test_disabled_is_the_plain_function_to_the_bit() -> None:
    def fn(x: jax.Array) -> Any:
        return jax.nn.softmax(x @ x.T), jnp.sum(x)

    for dtype in (F32, F16):
        x = jnp.asarray(X, dtype)
        assert_bitwise_equal(autocast(fn, enabled=False)(x), fn(x))


@pytest.mark.full
def test_a_decorator_around_a_region_is_not_a_region() -> None:
    def squared(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapped(x: jax.Array) -> jax.Array:
            return jnp.square(fn(x))

        return wrapped

    half = autocast(lambda x: x @ x.T)
    x = jnp.full((2, 2), 300.0)
    assert squared(half)(x).dtype == F16
    around = autocast(squared(half))(x)
    assert (around.dtype, float(around[0, 0])) == (F32, float(np.inf))
    assert autocast(squared(autocast(lambda x: x, enabled=False)))(x).tolist() == [[9e4] * 2] * 2


def test_other_values_are_left_alone() -> None:
    def fn(key: Any, number: Any, flag: Any, z: Any) -> Any:
        return jax.random.split(key), number + 1, flag & True, z * z, jax.random.uniform(key)

    args = (jax.random.key(0), jnp.arange(3), jnp.array([True]), jnp.array([1 + 2j]))
    plain, ours = fn(*args), autocast(fn)(*args)
    assert [x.dtype for x in ours] == [x.dtype for x in plain]
    assert_bitwise_equal(ours[1:], plain[1:])


def test_float64_is_left_alone() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        assert x.dtype == jnp.float64
        out = autocast(lambda x: jnp.exp(x @ x.T))(x)
        assert_bitwise_equal(out, jnp.exp(x @ x.T))


def test_arguments_that_are_not_arrays_are_passed_on() -> None:
    def fn(x: jax.Array, power: int, *, name: str, options: Any = None) -> Any:
        return {"y": x @ x.T, "name": name, "none": options, "n": power}

    out = autocast(fn)(jnp.asarray(X), 2, name="n")
    assert out["y"].dtype == F16
    assert (out["name"], out["none"], out["n"]) == ("n", None, 2)


@pytest.mark.full
def test_nothing_leaks_out_of_the_trace() -> None:
    def fn(x: jax.Array) -> Any:
        y = lax.scan(lambda c, _: (jax.nn.relu(c @ x), None), x, None, length=2)[0]
        return {"loss": y.sum(), "name": "n"}

    with jax.checking_leaks():
        out = autocast(fn)(jnp.ones((2, 2)))
        grads = jax.jit(jax.grad(lambda x: autocast(fn)(x)["loss"]))(jnp.ones((2, 2)))
    assert (float(out["loss"]), out["name"]) == (16.0, "n")
    assert grads.tolist() == [[12.0, 12.0], [12.0, 12.0]]


def test_numpy_arrays_and_closures() -> None:
    w = Y.T.astype(np.float32)
    assert autocast(lambda x: x @ w)(X.astype(np.float32)).dtype == F16
    grad = jax.grad(lambda w: autocast(lambda x: (x @ w).sum())(jnp.asarray(X, F32)))
    assert grad(w).dtype == F32
    np.testing.assert_allclose(grad(w), np.repeat(X.sum(0)[:, None], 4, 1), atol=1e-2)


def test_opaque_calls_get_their_traced_dtypes() -> None:
    def host(a: Any) -> Any:
        assert a.dtype == np.float32
        return np.asarray(a) * 2

    def fn(x: jax.Array) -> jax.Array:
        y = x @ x.T
        return jax.pure_callback(host, jax.ShapeDtypeStruct(y.shape, jnp.float32), y)

    np.testing.assert_allclose(autocast(fn)(jnp.asarray(X, F32)), 2 * X @ X.T, rtol=1e-2, atol=1e-2)


def test_rules_by_primitive_function_and_path() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    @jax.jit
    def attend(x: jax.Array) -> jax.Array:
        return x @ w

    def fn(x: jax.Array) -> Any:
        with jax.named_scope("decoder"), jax.named_scope("attention"):
            inside = jax.checkpoint(lambda x: x @ w)(x)
        return inside, attend(x), jnp.exp(x @ w), x @ w

    def dtypes(rules: AutocastRules) -> list[str]:
        return [y.dtype.name for y in jax.eval_shape(autocast(fn, rules=rules), x)]

    assert dtypes(TORCH_CUDA) == [F16, F16, F32, F16]
    assert dtypes(TORCH_CUDA.replace(paths={"decoder/attention": "float32"})) == [F32, F16, F32, F16]
    assert dtypes(TORCH_CUDA.replace(functions={"attend": "float32"})) == [F16, F32, F32, F16]
    assert dtypes(TORCH_CUDA.replace(primitives={"exp": "promote"})) == [F16, F16, F16, F16]
    assert dtypes(TORCH_CUDA.replace(primitives={"dot_general": "float32"})) == [F32] * 4
    assert dtypes(AutocastRules()) == [F32] * 4


def test_a_later_path_rule_replaces_the_same_expression() -> None:
    first = TORCH_CUDA.replace(paths={"a": "float32"})
    assert first.replace(paths={"a": "lower"}).paths == (("a", "lower"),)
    assert first.replace(paths={"b": "lower"}).paths == (("b", "lower"), ("a", "float32"))


def test_autocast_as_fixes_a_function() -> None:
    x = jnp.ones((2, 3))
    exact = autocast_as("float32")(lambda x: x @ x.T)
    low = autocast_as("lower")(lambda x: jnp.exp(jnp.sum(x)))
    assert dtype_of(autocast(lambda x: exact(x) + 0 * exact(x @ x.T)), x) == F32
    assert dtype_of(autocast(low), x) == dtype_of(autocast(jax.jit(low)), x) == F16
    assert dtype_of(exact, x) == dtype_of(autocast(lambda x: jax.vmap(exact)(x[None])), x) == F32


def test_banned_operations_say_what_to_do() -> None:
    @jax.jit
    def binary_cross_entropy(p: jax.Array) -> jax.Array:
        return -jnp.log(p)

    advice = "autocast bans binary_cross_entropy: use optax.sigmoid_binary_cross_entropy on the"
    with pytest.raises(BannedOperationError, match=advice):
        autocast(binary_cross_entropy)(jnp.ones(2))
    rules = TORCH_CUDA.replace(banned={"erf": "use tanh"})
    with pytest.raises(BannedOperationError, match="bans erf: use tanh"):
        autocast(lax.erf, rules=rules)(jnp.ones(2))


NO_PATTERN: Any = (("(", "lower"),)
NO_RULE: Any = (("exp", "half"),)
O1: Any = "O1"
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype": (lambda: autocast(jnp.sum, F32), ValueError, "dtype=float32 must be float16 or bfloat16"),
    "rules": (lambda: autocast(jnp.sum, rules=O1), TypeError, "rules must be an AutocastRules, got 'O1'"),
    "rule": (lambda: AutocastRules(NO_RULE), ValueError, "primitives: the rule of 'exp' must be one of lower"),
    "operation's rule": (
        lambda: AutocastRules(operations=NO_RULE),
        ValueError,
        "operations: the rule of 'exp' must",
    ),
    "fp8": (
        lambda: TORCH_CUDA.replace(primitives={"scan": "fp8"}),
        ValueError,
        "'scan' cannot be 'fp8'.*only dot_general",
    ),
    "path": (lambda: AutocastRules(paths=NO_PATTERN), ValueError, r"paths: '\(' is not a regular expression"),
    "operation": (lambda: AutocastRules(operations=NO_PATTERN), ValueError, r"operations: '\(' is not a regular expr"),
    "autocast_as": (
        lambda: autocast_as("promote"),
        ValueError,
        "rule='promote' must be 'lower', 'keep', or one of bf16_x3, bf16_x6",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_wrong_arguments_are_named(wrong: str) -> None:
    call, error, message = REFUSED[wrong]
    with pytest.raises(error, match=message):
        call()


def test_a_second_call_does_not_trace_again() -> None:
    traces = []

    @jax.jit
    @autocast
    def fn(x: jax.Array) -> jax.Array:
        traces.append(x)
        return x @ x.T

    fn(jnp.asarray(X, F32))
    fn(jnp.asarray(Y, F32))
    assert len(traces) == 1


@pytest.mark.full
def test_donation_goes_through() -> None:
    step = jax.jit(autocast(lambda w, x: w - 0.1 * (x.T @ x).astype(w.dtype)), donate_argnums=0)
    w = jnp.ones((6, 6))
    out = step(w, jnp.asarray(X, F32))
    assert w.is_deleted()
    assert out.shape == (6, 6)


def test_operations_keep_the_lines_that_they_are_from() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ x)
        y = jax.checkpoint(lambda y: jnp.tanh(y @ y))(y)
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ y), None), y, None, length=2)
        return jnp.sum(y)

    first = f.__code__.co_firstlineno
    lowered = jax.jit(jax.grad(autocast(f, jnp.float16))).lower(jnp.ones((4, 4)))
    lines = {int(line) for line in re.findall(r'test_transform\.py":(\d+)', lowered.as_text(debug_info=True))}
    assert {first + 1, first + 2, first + 3} <= lines, "without them, all operations are from where autocast ran them"
