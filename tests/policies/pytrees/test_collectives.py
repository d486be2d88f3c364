"""Gradients over eight devices: the right mean in every mode, and no overflow on the way."""

import functools
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
MESH = Mesh(np.array(jax.devices()), ("data",))


def on_eight(fn: Callable[[Any, Any], Any], way: str) -> Any:
    """Returns (w, x [8]) -> fn's result, with w everywhere and one x a device."""
    if way == "pmap":
        mapped: Any = jax.pmap(fn, axis_name="data", in_axes=(None, 0), out_axes=None)
        return mapped
    if way == "vmap":
        batched = jax.jit(jax.vmap(fn, axis_name="data", in_axes=(None, 0)))
        return lambda w, x: jax.tree.map(lambda y: y[0], batched(w, x))
    one = lambda w, x: fn(w, jax.tree.map(lambda y: y[0], x))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(one, mesh=MESH, check_vma=way == "vma", **specs))


@functools.cache
def results_of(way: str) -> dict[str, Any]:
    """Returns all results of one program on eight devices: each has an element of the arrays."""

    def step(w: jax.Array, x: dict[str, jax.Array]) -> dict[str, Any]:
        def gradient(dtype: Any) -> jax.Array:
            loss = lambda w: w.astype(dtype) * x["number"].astype(dtype)
            return jt.reduce_gradients(jax.grad(loss)(jt.policies.pvary(w, ("data",))), ("data",))

        def reduced(grads: Any, dtype: Any = jnp.float32) -> Any:
            return jt.reduce_gradients(grads, ("data",), dtype)

        half = {name: x[name].astype(jnp.float16) for name in ("large", "small", "summed", "most")}
        waved = {"n": np.zeros(3, jax.dtypes.float0), "w": w, "z": jax.lax.complex(x["number"], x["number"] ** 2)}
        results: dict[str, Any] = {"summed": reduced(half["summed"])}
        for dtype in (jnp.float32, jnp.float16):
            complex_mean = reduced(waved, dtype)
            assert complex_mean.pop("n").dtype == jax.dtypes.float0
            imaginary = reduced(jax.lax.complex(x["root"], x["root"] ** 2), dtype).imag
            results[dtype.__name__] = {
                "gradient": gradient(dtype),
                "large": reduced(half["large"], dtype),
                "small": reduced(half["small"], dtype),
                "imaginary": imaginary,
                **complex_mean,
            }
        phase = jax.lax.complex(x["most"], -x["most"])
        kept = {"x": x["most"], "half": half["most"], "count": jnp.int32(7), "w": w, "phase": phase}
        return {**results, "kept": mean_over_axes(kept, ("data",))}

    numbers = {
        "number": jnp.arange(8.0),
        "large": jnp.full(8, 30000.0),
        "small": jnp.full(8, 6e-8),
        "summed": jnp.array([2048.0] + [1.0] * 7),  # in float16 the sum stays 2048
        "root": jnp.sqrt(jnp.full(8, 8.0 * 70_000)),
        "most": jnp.full(8, 60000.0).at[0].set(0),
    }
    return on_eight(step, way)(jnp.float32(3), numbers)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("way", WAYS)
def test_means_of_gradients_in_the_dtype_of_the_reduction(way: str, dtype: str) -> None:
    """x = 0..7, loss w * x: the mean is 3.5, where a careless psum says 28 and another 0."""
    means = results_of(way)[dtype]
    assert float(means["gradient"]) == 3.5
    assert means["large"].dtype == means["small"].dtype == jnp.float32
    np.testing.assert_allclose(means["large"], 30000, rtol=1e-2)
    # Zero is the price of dividing first.
    np.testing.assert_allclose(means["small"], 6e-8 if dtype == "float32" else 0, rtol=1e-2)
    # Of x = 0..7 the gradients x + i x^2 have the mean 3.5 + 17.5i; i 560,000 is beyond float16.
    assert (complex(means["z"]), means["z"].dtype, float(means["w"])) == (3.5 + 17.5j, jnp.complex64, 3)
    np.testing.assert_allclose(means["imaginary"], 560_000, 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_sums_in_float32_are_exact_and_means_keep_dtypes_and_whole_numbers(way: str) -> None:
    assert float(results_of(way)["summed"]) == 2055 / 8
    kept = results_of(way)["kept"]
    assert float(kept["x"]) == 52500
    assert (float(kept["half"]), kept["half"].dtype) == (52512, jnp.float16)
    assert (int(kept["count"]), float(kept["w"])) == (7, 3)
    assert complex(kept["phase"]) == 52500 - 52500j


def test_without_axes_gradients_are_upcast_only() -> None:
    grads = {"half": jnp.ones(2, jnp.bfloat16), "int": jnp.arange(2), "none": None}
    result = jt.reduce_gradients(grads, ())
    assert result["half"].dtype == jnp.float32
    assert result["int"] is grads["int"]


def test_a_wrong_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"dtype=<class 'jax.numpy.int32'> must be a floating"):
        jt.reduce_gradients(jnp.ones(2), (), jnp.int32)


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
