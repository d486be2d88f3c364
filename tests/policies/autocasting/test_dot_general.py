"""Products that add up in float32 over devices: values and gradients beside float64, within autocast too."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_train as jt

pytestmark = pytest.mark.quick


@pytest.mark.full
@settings(deadline=None, max_examples=12)
@given(data=st.data(), dtype=st.sampled_from([jnp.float16, jnp.bfloat16, jnp.float32]))
def test_values_and_gradients_are_dot_generals(data: Any, dtype: Any) -> None:
    """For any dimensions in any order, beside numpy's einsum in float64."""
    sizes = {letter: data.draw(st.integers(2, 3)) for letter in "abcd"}
    both = data.draw(st.permutations("ab"))
    lhs = data.draw(st.permutations([*both, "c"]))
    rhs = data.draw(st.permutations([*both, "d"]))
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=[sizes[i] for i in letters]), dtype) for letters in (lhs, rhs))
    numbers = (tuple(map(lhs.index, both)), tuple(map(rhs.index, both))), ((), ())
    out, pullback = jax.vjp(lambda x, w: jt.policies.float32_dot_general(x, w, numbers), x, w)
    cotangent = jnp.asarray(random.normal(size=out.shape), dtype)
    grads = pullback(cotangent)
    left, right = "".join(lhs), "".join(rhs)
    in_float64 = [np.asarray(a, np.float64) for a in (x, w, cotangent)]
    wanted = (
        np.einsum(f"{left},{right}->cd", in_float64[0], in_float64[1]),
        np.einsum(f"cd,{right}->{left}", in_float64[2], in_float64[1]),
        np.einsum(f"cd,{left}->{right}", in_float64[2], in_float64[0]),
    )
    for got, right_value in zip((out, *grads), wanted, strict=True):
        assert got.dtype == dtype
        error = np.abs(np.asarray(got, np.float64) - right_value)
        bound = float(jnp.finfo(dtype).eps) * np.abs(right_value) + 1e-5
        assert (error <= bound).all()  # rounded once


def test_shares_of_devices_are_added_up_in_float32() -> None:
    """2048 and seven ones are 2055; 7 x 30000 - 6 x 30000 is 30000, though it is infinite on the way."""
    mesh = Mesh(np.array(jax.devices()), ("model",))
    x = jnp.full((2, 8), 30000, jnp.float16).at[0].set(jnp.asarray([2048] + [1] * 7, jnp.float16))
    w = jnp.ones((8, 2), jnp.float16).at[7, 1].set(-6)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
    w = jax.device_put(w, NamedSharding(mesh, P("model")))
    numbers = ((1,), (0,)), ((), ())
    exact = jax.jit(lambda x, w: jt.policies.float32_dot_general(x, w, numbers))(x, w)
    assert float(exact[0, 0]) == 2056  # 2055, rounded once; in float16 2048
    assert float(exact[1, 1]) == 30000


def test_autocast_lowers_the_operands_and_not_the_sum() -> None:
    numbers = ((1,), (0,)), ((), ())
    x, w = jnp.full((1, 2), 60000.0), jnp.ones((2, 1))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jt.policies.float32_dot_general(x, w, numbers, preferred_element_type=jnp.float32)

    traced = str(jax.make_jaxpr(jt.autocast(run))(x, w))
    assert "preferred_element_type=float32" in traced
    assert "preferred_element_type=float16" not in traced
    assert "f16[1,2]" in traced
    grads = jax.grad(lambda w: jt.autocast(run)(x / 6e4, w).sum())(w)
    np.testing.assert_array_equal(grads, np.ones((2, 1), np.float32))


def test_layers_take_it() -> None:
    layer = nn.DenseGeneral((3, 2), axis=(-2, -1), dot_general=jt.policies.float32_dot_general)
    plain = nn.DenseGeneral((3, 2), axis=(-2, -1))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, 2)), jnp.float32)
    params = plain.init(jax.random.key(0), x)
    outputs: Any = [module.apply(params, x) for module in (layer, plain)]
    np.testing.assert_allclose(*outputs, rtol=1e-6)


def test_what_it_does_not_take() -> None:
    x = jnp.ones((2, 3, 3))
    with pytest.raises(ValueError, match="have batch dimensions"):
        jt.policies.float32_dot_general(x, x, (((2,), (1,)), ((0,), (0,))))
    with pytest.raises(ValueError, match="float32_dot_general has no argument out_sharding"):
        jt.policies.float32_dot_general(x, x, (((2,), (1,)), ((), ())), out_sharding=P())
