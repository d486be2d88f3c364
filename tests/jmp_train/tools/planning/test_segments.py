"""Functions in segments: what they compute, their gradients, and how much less the backward pass keeps."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed

import jmp_train as jt
from jmp_train.tools.planning.search import in_segments

pytestmark = pytest.mark.quick

WIDTH, DEPTH, ROWS = 8, 12, 32
PARAMS = [jnp.asarray(w, jnp.float32) / 3 for w in np.random.default_rng(0).normal(size=(DEPTH, WIDTH, WIDTH))]
X = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


@jax.custom_vjp
def doubled_gradient(x: jax.Array) -> jax.Array:
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def deep(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w) + x
    return (x**2).mean()


def with_dropout(params: list[jax.Array], x: jax.Array) -> jax.Array:
    key = jax.random.key(3)
    for i, w in enumerate(params):
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape), jnp.tanh(x @ w), 0.0)
    return (x**2).sum()


def with_a_scan(params: list[jax.Array], x: jax.Array) -> jax.Array:
    x, means = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), x.mean()), jnp.cos(x), jnp.stack(params))
    return (jnp.exp(-x) * means.sum()).mean()


def with_a_custom_gradient(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = doubled_gradient(jax.nn.relu(x @ w)) - x  # relu has a custom gradient too
    return (x**2).mean()


def with_branches(params: list[jax.Array], x: jax.Array) -> jax.Array:
    x = jax.lax.cond(x.sum() > 0, lambda: x @ params[0], lambda: -x)
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x).sum() + jax.jit(lambda x: x.prod())(x[:1, :2])


def reference(fn: Callable[..., Any]) -> tuple[Any, Any]:
    """Returns value and gradients in float64."""
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda v: jnp.asarray(np.asarray(v, np.float64)), (PARAMS, X))
        return jax.device_get(jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(params, x))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("segments", [1, 3, 50])
@pytest.mark.parametrize("fn", [deep, with_a_scan, with_a_custom_gradient, with_branches])
def test_values_and_gradients_are_those_of_the_function(fn: Callable[..., Any], segments: int) -> None:
    value, gradients = jax.jit(jax.value_and_grad(in_segments(fn, segments), argnums=(0, 1)))(PARAMS, X)
    expected_value, expected = reference(fn)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.full
def test_random_numbers_are_drawn_alike() -> None:
    plain = jax.jit(jax.value_and_grad(with_dropout))(PARAMS, X)
    found = jax.jit(jax.value_and_grad(in_segments(with_dropout, 5)))(PARAMS, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_structures_and_what_is_beside_the_loss_stay() -> None:
    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        return y.mean(), {"y": y, "labels": batch["labels"], "one": 1, "x": (batch["x"], None)}

    params, batch = {"w": PARAMS[0]}, {"x": X, "labels": jnp.arange(ROWS)}
    (value, aux), gradients = jax.value_and_grad(in_segments(loss, 4), has_aux=True)(params, batch)
    (wanted, wanted_aux), wanted_gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
    found = (value, aux, gradients)
    assert jax.tree.structure(found) == jax.tree.structure((wanted, wanted_aux, wanted_gradients))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((wanted, wanted_aux, wanted_gradients)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert aux["labels"].dtype == jnp.int32


def kept_bytes(fn: Callable[..., Any]) -> int:
    """Returns the bytes that the forward pass hands to the backward pass, parameters and inputs aside."""
    _, backward = jax.vjp(fn, PARAMS, X)
    given = {id(x) for x in jax.tree.leaves((PARAMS, X))}
    kept = [x for x in jax.tree.leaves(backward) if id(x) not in given and x.shape[:1] == (ROWS,)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)


def test_the_backward_pass_keeps_less() -> None:
    plain = kept_bytes(deep)
    assert plain >= 2 * DEPTH * X.nbytes  # of each layer its input and its tanh
    assert kept_bytes(in_segments(deep, 1)) == plain, "the last segment is not computed again"
    assert kept_bytes(in_segments(deep, 4)) <= 0.6 * plain
    # One array of each of three borders, and what the last quarter keeps.
    assert kept_bytes(in_segments(deep, 4)) < kept_bytes(in_segments(deep, 2))


def test_cuts_are_where_the_least_is_handed_on() -> None:
    def widened(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.sin(jnp.tile(x, (1, 16))).reshape(ROWS, 16, WIDTH).sum(1) @ w
        return (x**2).mean()

    last_quarter = kept_bytes(widened) / 4
    assert kept_bytes(in_segments(widened, 4)) <= last_quarter + 3 * X.nbytes


def test_the_parts_are_computed_again() -> None:
    def products(fn: Callable[..., Any]) -> int:
        return str(jax.make_jaxpr(jax.grad(fn))(PARAMS, X)).count("dot_general[")

    # Forward, backward to the weights and, but for the first layer, to the inputs; most forward ones come twice.
    assert products(deep) == 3 * DEPTH - 1
    assert 3 * DEPTH - 1 + DEPTH // 2 <= products(in_segments(deep, 4)) < 4 * DEPTH


def test_a_step_in_segments_is_the_step() -> None:
    optimizer = relaxed(optax.adam(1e-2))

    def loss(params: Any, batch: Any) -> Any:
        return deep(params, batch)

    state = jt.TrainState.create(PARAMS, optimizer)
    plain = jt.stateless(loss)
    steps = [jt.train_step(fn, optimizer, accumulate_steps=2) for fn in (plain, in_segments(plain, 4))]
    results = [jax.jit(step)(state, X) for step in steps]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
