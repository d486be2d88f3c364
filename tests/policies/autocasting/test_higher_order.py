"""Loops, branches, remat and devices under autocast."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting.transform import autocast

pytestmark = [pytest.mark.quick, pytest.mark.newest]

F16, F32 = "float16", "float32"


def test_a_scan_keeps_the_dtype_of_its_carry() -> None:
    def rnn(w: jax.Array, xs: jax.Array) -> Any:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            h = jnp.tanh(h @ w + x)
            return h, h @ w

        return lax.scan(cell, jnp.zeros(3), xs)

    w, xs = jnp.ones((3, 3)) / 3, jnp.ones((5, 3))
    (carry, ys), (expected, outputs) = jax.jit(lambda *args: (autocast(rnn)(*args), rnn(*args)))(w, xs)
    assert (carry.dtype, ys.dtype) == (F32, F16)
    np.testing.assert_allclose(carry, expected, rtol=2e-3)
    np.testing.assert_allclose(ys.astype(jnp.float32), outputs, rtol=2e-3)


def test_a_half_carry_stays_half_only_if_the_body_keeps_it_so() -> None:
    x, w = jnp.ones(3, jnp.float16), jnp.eye(3)

    def loop(body: Any) -> Any:
        return jax.eval_shape(autocast(lambda x: lax.fori_loop(0, 3, lambda _, c: body(c), x)), x)

    assert loop(lambda c: c @ w).dtype == F16
    assert loop(lambda c: jnp.exp(c) * 0.1).dtype == F32
    while_loop = autocast(lambda x: lax.while_loop(lambda c: c.sum() < 0, jnp.exp, x))
    assert jax.eval_shape(while_loop, x).dtype == F32
    total = autocast(lambda x: lax.scan(lambda c, v: (c + v, None), jnp.zeros(()), x)[0])
    assert float(total(jnp.ones(5000, jnp.float16))) == 5000  # stops at 2048 in float16


def test_an_empty_scan() -> None:
    x, w = jnp.ones((0, 3), jnp.float16), jnp.ones((3, 3))
    carry, ys = autocast(lambda x: lax.scan(lambda c, v: (c @ w, v @ w), jnp.ones(3), x))(x)
    assert (carry.dtype, ys.dtype, ys.shape) == (F32, F16, (0, 3))
    of_half = autocast(lambda x: lax.scan(lambda c, v: (c + v, None), jnp.ones((2, 3)) @ w, x)[0])(x)
    assert (of_half.dtype, of_half.tolist()) == (F16, [[3.0] * 3] * 2)


def test_a_scatter_that_computes() -> None:
    out = autocast(lambda x: (x @ x).at[0].apply(jnp.tanh))(jnp.eye(2))
    np.testing.assert_allclose(out, [[np.tanh(1), 0], [0, 1]], rtol=1e-3)


def test_branches_agree() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    def fn(index: Any, x: jax.Array) -> Any:
        branches = [lambda x: x @ w, lambda x: jnp.exp(x @ w), lambda x: x]
        return lax.switch(index, branches, x), lax.cond(index > 0, lambda x: x @ w, lambda x: 2 * (x @ w), x)

    run = jax.jit(autocast(fn))
    for index, wanted in enumerate((3, np.exp(3), 1)):
        mixed, half = run(index, x)
        assert (mixed.dtype, half.dtype) == (F32, F16)
        np.testing.assert_allclose(mixed, np.full((2, 3), wanted), rtol=2e-3)
    grad = jax.jit(jax.grad(lambda x: autocast(fn)(1, x)[0].sum()))(x)
    np.testing.assert_allclose(grad, np.full((2, 3), 3 * np.exp(3)), rtol=5e-3)


def test_remat_keeps_its_policy() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    def loss(w: jax.Array, policy: Any) -> jax.Array:
        body = jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w) @ w), policy=policy)
        return autocast(body)(w).astype(jnp.float32).sum()

    def dots(policy: Any) -> int:
        return str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(w, policy)).count("dot_general")

    assert dots(jax.checkpoint_policies.everything_saveable) < dots(None)


def test_shard_map_and_pmap_inside_and_outside() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x, w = jnp.ones((8, 3)), jnp.ones((3, 4))

    def product(x: jax.Array, w: jax.Array) -> Any:
        y = x @ w
        return y, lax.psum(y.sum(), "data")

    specs = {"mesh": mesh, "in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    for fn in (autocast(jax.shard_map(product, **specs)), jax.shard_map(autocast(product), **specs)):
        y, total = jax.jit(fn)(x, w)
        assert (y.dtype, total.dtype, float(total)) == (F16, F32, 96)
    assert jax.pmap(autocast(lambda x: x @ w))(x[:, None]).dtype == F16
    assert autocast(jax.pmap(lambda x: x @ w))(x[:, None]).dtype == F16


def test_collectives_run_in_float32() -> None:
    fn = jax.vmap(autocast(lambda x: lax.psum(x, "i")), axis_name="i")
    assert fn(jnp.full((4, 1), 30_000, jnp.float16)).tolist() == [[120_000.0]] * 4


def test_the_shardings_of_an_inner_jit_are_kept() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    inner = jax.jit(lambda x, w: x @ w, in_shardings=(rows, whole), out_shardings=whole)
    x, w = jax.device_put(np.ones((8, 3), np.float32), rows), np.ones((3, 4), np.float32)
    equations = jax.make_jaxpr(autocast(inner))(x, w).eqns
    constrained = [e.params["sharding"].spec for e in equations if e.primitive.name == "sharding_constraint"]
    assert constrained == [P("data"), P(), P()]
