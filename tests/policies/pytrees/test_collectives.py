"""Gradients over eight devices: the right mean in every mode, and no overflow on the way."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt
from jmp_train.policies.pytrees.collectives import mean_over_axes, scatter_gradients

pytestmark = [pytest.mark.quick, pytest.mark.newest]

WAYS = ("vma", "no vma", "pmap", "vmap")
every_way = pytest.mark.parametrize("way", WAYS)
MESH = Mesh(np.array(jax.devices()), ("data",))


def on_eight(fn: Callable[[Any, jax.Array], Any], way: str) -> Any:
    """Returns (w, x [8]) -> fn's result, with w everywhere and one x a device."""
    if way == "pmap":
        mapped: Any = jax.pmap(fn, axis_name="data", in_axes=(None, 0), out_axes=None)
        return mapped
    if way == "vmap":
        batched = jax.vmap(fn, axis_name="data", in_axes=(None, 0))
        return lambda w, x: jax.tree.map(lambda y: y[0], batched(w, x))
    return jax.jit(
        jax.shard_map(
            lambda w, x: fn(w, x[0]), mesh=MESH, in_specs=(P(), P("data")), out_specs=P(),
            check_vma=way == "vma",
        )
    )  # fmt: skip


@pytest.mark.quick_cases(5)
@every_way
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_mean_gradient_of_replicated_parameters(way: str, dtype: Any) -> None:
    """x = 0..7, loss w * x: the mean is 3.5, where a careless psum says 28 and another 0."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return w.astype(dtype) * x.astype(dtype)

        return jt.reduce_gradients(jax.grad(loss)(jt.policies.pvary(w, ("data",))), ("data",))

    assert float(on_eight(step, way)(jnp.float32(2), jnp.arange(8.0))) == 3.5


@pytest.mark.quick_cases(4)
@every_way
@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (30000.0, jnp.float32, 30000.0),
        (30000.0, jnp.float16, 30000.0),
        (6e-8, jnp.float32, 6e-8),
        (6e-8, jnp.float16, 0.0),  # the price of dividing first
    ],
)
def test_reductions_of_half_gradients(way: str, value: float, dtype: Any, expected: float) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jt.reduce_gradients({"g": x.astype(jnp.float16)}, ("data",), dtype)["g"]

    result = on_eight(step, way)(jnp.float32(0), jnp.full(8, value))
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-2)


@pytest.mark.quick_cases(2)
@every_way
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_complex_gradients_are_averaged_whole_and_what_has_no_mean_stays(way: str, dtype: Any) -> None:
    """Of x = 0..7 the gradients x + i x^2 have the mean 3.5 + 17.5i; i 560,000 is beyond float16."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        grads = {"z": jax.lax.complex(x, x**2), "n": np.zeros(3, jax.dtypes.float0), "w": w}
        mean = jt.reduce_gradients(grads, ("data",), dtype)
        assert mean["n"].dtype == jax.dtypes.float0
        return mean["z"], mean["w"]

    mean, w = on_eight(step, way)(jnp.float32(3), jnp.arange(8.0))
    assert (complex(mean), mean.dtype, float(w)) == (3.5 + 17.5j, jnp.complex64, 3)
    large = jnp.sqrt(jnp.full(8, 8.0 * 70_000))
    np.testing.assert_allclose(on_eight(step, way)(jnp.float32(3), large)[0].imag, 560_000, 1e-6)


@every_way
def test_a_float32_reduction_of_half_gradients_is_exact(way: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jt.reduce_gradients(x.astype(jnp.float16), ("data",))

    x = jnp.array([2048.0] + [1.0] * 7)  # in float16 the sum stays 2048
    assert float(on_eight(step, way)(jnp.float32(0), x)) == 2055 / 8


def test_without_axes_gradients_are_upcast_only() -> None:
    grads = {"half": jnp.ones(2, jnp.bfloat16), "int": jnp.arange(2), "none": None}
    result = jt.reduce_gradients(grads, ())
    assert result["half"].dtype == jnp.float32
    assert result["int"] is grads["int"]


def test_a_wrong_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"dtype=<class 'jax.numpy.int32'> must be a floating"):
        jt.reduce_gradients(jnp.ones(2), (), jnp.int32)


@pytest.mark.quick_cases(2)
@every_way
def test_means_keep_dtypes_and_leave_whole_numbers(way: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        count = jnp.int32(7)
        half = x.astype(jnp.float16)
        phase = jax.lax.complex(x, -x)
        tree = {"x": x, "half": half, "count": count, "w": w, "phase": phase}
        return mean_over_axes(tree, ("data",))

    result = on_eight(step, way)(jnp.float32(3), jnp.full(8, 60000.0).at[0].set(0))
    assert float(result["x"]) == 52500
    assert (float(result["half"]), result["half"].dtype) == (52512, jnp.float16)
    assert (int(result["count"]), float(result["w"])) == (7, 3)
    assert complex(result["phase"]) == 52500 - 52500j


def test_two_axes() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        grad = jax.grad(lambda w: (w * x).sum())(jt.policies.pvary(w, ("data", "model")))
        return jt.reduce_gradients(grad, ("data", "model"))

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(("data", "model"))), out_specs=P())
    assert float(run(jnp.float32(1), jnp.arange(8.0))) == 3.5


def test_pvary_twice_or_without_axes_changes_nothing() -> None:
    x = jnp.ones(2)
    assert jt.policies.pvary(x, ()) is x
    assert jt.policies.pvary({"x": x}, ("data",))["x"] is x  # outside of a manual region there is no mark

    def body(x: jax.Array) -> jax.Array:
        once = jt.policies.pvary(x, ("data",))
        return jt.policies.pvary(once, ("data",)) + once

    run = jax.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P("data"))
    np.testing.assert_array_equal(run(x), jnp.full(16, 2.0))


def test_fp8_scales_are_the_largest_of_all_devices() -> None:
    def both(_: Any, x: jax.Array) -> Any:
        grads = {"kernel": x, "_overwrite_with_gradient": {"scale": x}}
        dimensions = jax.tree.map(lambda _: -1, grads)
        return jt.reduce_gradients(grads, ("data",)), scatter_gradients(grads, dimensions, "data")

    for found in on_eight(both, "vmap")(jnp.float32(0), jnp.arange(8.0)):
        assert found == {"kernel": 3.5, "_overwrite_with_gradient": {"scale": 7.0}}
