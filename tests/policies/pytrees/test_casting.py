import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.pytrees.casting import cast_leaf, cast_like, copy_like, upcast_to_float32

pytestmark = [pytest.mark.quick, pytest.mark.newest]


def test_casts_are_differentiable_and_traceable() -> None:
    grad = jax.jit(jax.grad(lambda x: cast_leaf(x, jnp.float16).astype(jnp.float32).sum()))
    assert (grad(jnp.ones(2)).dtype, grad(jnp.ones(2)).tolist()) == (jnp.float32, [1, 1])


def test_upcasting_touches_half_floats_only() -> None:
    tree = {"f16": jnp.ones(1, jnp.float16), "f32": jnp.ones(1), "c64": jnp.ones(1, jnp.complex64)}
    upcast = upcast_to_float32(tree)
    assert upcast["f16"].dtype == jnp.float32
    assert upcast["f32"] is tree["f32"] and upcast["c64"] is tree["c64"]
    with jax.enable_x64(True):
        x = jnp.ones(1, jnp.float64)
        assert upcast_to_float32(x) is x


def test_casts_like_another_tree() -> None:
    like = {"mean": jnp.ones(2, jnp.float16), "host": np.ones(2, np.float16), "count": jnp.ones(2, jnp.float16), "n": 0}
    tree = {"mean": jnp.ones(3), "host": np.ones(2, np.float32), "count": jnp.arange(2), "n": 1.5}
    cast = cast_like(tree, like)
    assert cast["mean"].dtype == cast["host"].dtype == jnp.float16
    assert isinstance(cast["host"], np.ndarray)
    assert cast["count"] is tree["count"] and cast["n"] == 1.5
    assert cast_like(tree, like | {"more": 0}) is tree
    weak = jnp.asarray(1.0)
    assert jax.typeof(weak).weak_type
    assert not jax.typeof(cast_like(weak, jnp.float32(0))).weak_type


def test_a_copy_has_the_dtype_and_the_devices_of_the_other() -> None:
    device = jax.devices()[1]
    placed = copy_like(np.float64(2), jax.device_put(jnp.float16(0), device))
    assert placed.dtype == jnp.float16 and placed.devices() == {device} and placed.committed
    assert not copy_like(2, jnp.float16(0)).committed
    copied = jax.jit(lambda like: copy_like(np.arange(2), like))(jnp.zeros(2, jnp.bfloat16))
    assert copied.dtype == jnp.bfloat16 and copied.tolist() == [0, 1]


def test_what_is_copied_may_be_donated() -> None:
    x = jnp.ones(2)
    copy = copy_like(x, jnp.zeros(2))
    x.delete()
    assert copy.tolist() == [1, 1]
