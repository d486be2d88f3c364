"""Products that autocast does not reach are warned of; a custom_vjp that has some is entered."""

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.ode import odeint

import jmp_train as jt
from jmp_train.policies.autocasting import TracedProduct

pytestmark = pytest.mark.quick

X = jnp.asarray(np.random.default_rng(0).normal(0, 0.5, (4, 4)), jnp.float32)


def product(x: Any, w: Any) -> Any:
    return x @ w  # the line


def in_kernel(x: jax.Array, w: jax.Array) -> jax.Array:
    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = product(x[...], w[...])

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)


mapped = jax.custom_batching.custom_vmap(product)
mapped.def_vmap(lambda size, batched, x, w: (x @ w, True))


def on_platform(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, w, cpu=product, default=product)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (in_kernel, "a Pallas kernel, which computes in the dtypes that it was written for"),
        (mapped, "a custom_vmap, which autocast does not enter"),
        (on_platform, "a platform_dependent, which autocast does not enter"),
    ],
)
def test_products_that_are_not_reached_are_named(fn: Callable[..., Any], why: str) -> None:
    line = product.__code__.co_firstlineno + 1
    message = (
        r"(?s)^100% of the flops of products stay in float32 under autocast to bfloat16:\n"
        rf"  \S*test_unreached_products\.py:{line}: dot_general of float32\[4,4\] and float32\[4,4\], in {why}\n.*"
        r'jt\.apply_policy\(fn, "mixed_bfloat16"\) around the function'
    )
    run = jax.jit(jt.autocast(fn, jnp.bfloat16))
    with pytest.warns(jt.policies.Float32ProductsWarning, match=message) as warned:
        run(X, X)
    assert warned[0].filename == __file__
    with pytest.warns(jt.policies.Float32ProductsWarning, match="under autocast to float16"):
        jt.apply_policy(fn, "autocast_float16")(X, X)


def test_products_that_are_few_or_wanted_in_float32_are_not() -> None:
    def small(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(9):
            x = product(x, w)
        return mapped(x, w)

    def exact(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, w, default=lambda x, w: jnp.dot(x, w, precision="highest"))

    def outside(x: jax.Array, w: jax.Array) -> jax.Array:
        return jt.autocast(mapped, enabled=False)(x, w) + jt.autocast_as("float32")(mapped)(x, w)

    def solved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(lambda v: w @ v, x, lambda _, b: jnp.linalg.solve(w, b), symmetric=True)

    for fn in (small, exact, outside, solved):
        jax.eval_shape(jt.autocast(fn), X, X)
    by_rule = jt.TORCH_CUDA.replace(primitives={"dot_general": "float32"})
    jax.eval_shape(jt.autocast(product, rules=by_rule), X, X)


def checkpointed(x: jax.Array, w: jax.Array) -> jax.Array:
    """Equinox's loop, of which diffrax's default adjoint is made."""

    def body(carry: Any) -> Any:
        return carry[0] + 1, jnp.tanh(carry[1] @ w)

    return eqxi.while_loop(lambda c: c[0] < 4, body, (0, x), kind="checkpointed", checkpoints=2, max_steps=8)[1]


def solved(x: jax.Array, w: jax.Array) -> jax.Array:
    return odeint(lambda y, _, w: jnp.tanh(y @ w), x, jnp.linspace(0.0, 1.0, 3), w, rtol=1e-3, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("fn", [checkpointed, solved])
def test_a_custom_vjp_with_products_is_entered(fn: Callable[..., Any]) -> None:
    def loss(x: jax.Array, w: jax.Array, transform: Any) -> jax.Array:
        return (transform(fn)(x, w).astype(jnp.float32) ** 2).sum()

    both = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    half, exact = both(X, X, jt.autocast), both(X, X, lambda fn: fn)
    for found, wanted in zip(jax.tree.leaves(half), jax.tree.leaves(exact), strict=True):
        assert found.dtype == jnp.float32
        assert 1e-6 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 5e-3
    rows = jt.explain_autocast(fn, X, X).operations
    products = [row for row in rows if row.operation == "dot_general" and row.reason != "precision=HIGHEST"]
    assert products
    assert all(row.in_half for row in products)
    assert "custom_vjp_call" not in {row.operation for row in rows}


def test_both_halves_get_integers_and_only_the_gradients_that_are_asked_for() -> None:
    asked = []

    @jax.custom_vjp
    def rows_of(x: jax.Array, rows: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ w
        return y[rows], jnp.argmax(y, 1)

    def forward(x: Any, rows: Any, w: Any) -> Any:
        asked.append((x.perturbed, w.perturbed))
        y = x.value @ w.value
        return (y[rows.value], jnp.argmax(y, 1)), (x.value, rows.value, w.value)

    def backward(saved: Any, cotangents: Any) -> Any:
        x, rows, w = saved
        assert {x.dtype, w.dtype, cotangents[0].dtype} == {jnp.dtype(jnp.float32)}
        g = jnp.zeros((4, 4)).at[rows].add(7 * cotangents[0])
        return g @ w.T, None, 5 * x.T @ g

    rows_of.defvjp(forward, backward, symbolic_zeros=True)
    rows = jnp.array([2, 0])

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        picked, largest = jt.autocast(rows_of)(x, rows, w)
        assert (picked.dtype, largest.dtype) == (jnp.float16, jnp.int32)
        return picked.astype(jnp.float32).sum()

    g = np.zeros((4, 4), np.float64)
    g[[2, 0]] = 7
    wanted = g @ np.asarray(X, np.float64).T, 5 * np.asarray(X, np.float64).T @ g
    np.testing.assert_allclose(jax.jit(jax.grad(loss, 0))(X, X), wanted[0], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(jax.jit(jax.grad(loss, 1))(X, X), wanted[1], rtol=2e-3, atol=2e-2)
    assert asked == [(True, False), (False, True)]
    batched = jax.jit(jax.vmap(jax.grad(loss), (0, None)))(jnp.stack([X, 2 * X]), X)
    np.testing.assert_allclose(batched[1], wanted[0], rtol=2e-3, atol=2e-3)


def test_a_custom_vjp_is_as_traced_where_rules_leave_no_product_in_half() -> None:
    @jax.custom_vjp
    def far(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    far.defvjp(lambda x, w: (x @ w, w), lambda w, g: ((1e6 * g) @ (1e6 * w.T), jnp.zeros_like(w)))
    by_path: Any = {"paths": {"far": "float32"}}
    by_operation: Any = {"operations": {"far:dot_general@": "float32"}}

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("far"):
            return far(x, w).sum()

    assert not np.isfinite(jax.grad(jt.autocast(loss))(X, X)).all()
    for entries, reason in ((by_path, "path 'far'"), (by_operation, "operation 'far:dot_general@'")):
        exact = jt.autocast(loss, rules=jt.TORCH_CUDA.replace(**entries))
        np.testing.assert_array_equal(jax.grad(exact)(X, X), jax.grad(loss)(X, X))
        row, _ = jt.explain_autocast(exact, X, X).operations
        assert (row.rule, row.reason, row.dtypes_out) == ("float32", reason, ("float32",))


@pytest.mark.full
def test_tune_chooses_the_precision_of_a_custom_vjp_with_products() -> None:
    @jax.custom_vjp
    def cubed(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ w) ** 3

    def backward(saved: Any, g: jax.Array) -> Any:
        w, x = saved
        d = 3 * (x @ w) ** 2 * g
        return x.T @ d, d @ w.T

    cubed.defvjp(lambda w, x: (cubed(w, x), (w, x)), backward)
    tuned = jt.tune(lambda w, x: cubed(w, x).mean(), [(jnp.full((8, 8), 10.0), jnp.ones((4, 8)))])
    assert tuned.verification.passed
    assert "integer_pow" in {name for entry in tuned.entries for name in entry.primitives}


def test_a_product_is_described_by_its_two_factors() -> None:
    (equation,) = jax.make_jaxpr(lambda x, n: lax.ragged_dot(x, x[None], n))(X, jnp.array([4])).eqns[-1:]
    text = f"{equation.primitive.name} of float32[4,4] and float32[1,4,4] in Net/dense"
    assert text in str(TracedProduct((equation,), "Net/dense", 0, ()))
