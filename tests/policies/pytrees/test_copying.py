import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.pytrees import copy_like

pytestmark = pytest.mark.quick


def test_a_copy_has_the_dtype_and_the_devices_of_the_other() -> None:
    device = jax.devices()[1]
    placed = copy_like(np.float64(2), jax.device_put(jnp.float16(0), device))
    assert placed.dtype == jnp.float16 and placed.devices() == {device} and placed.committed
    assert not copy_like(2, jnp.float16(0)).committed


def test_what_is_copied_may_be_donated() -> None:
    x = jnp.ones(2)
    copy = copy_like(x, jnp.zeros(2))
    x.delete()
    assert copy.tolist() == [1, 1]


def test_of_a_traced_array_the_dtype_is_known() -> None:
    copied = jax.jit(lambda like: copy_like(np.arange(2), like))(jnp.zeros(2, jnp.bfloat16))
    assert copied.dtype == jnp.bfloat16 and copied.tolist() == [0, 1]
