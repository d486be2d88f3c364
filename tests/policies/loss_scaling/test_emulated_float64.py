import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmp_train.policies.loss_scaling.dynamic_loss_scale import float64_product

pytestmark = pytest.mark.quick

X = np.random.default_rng(0).uniform(1, 2, 100_000).astype(np.float32) * np.float32(2.0) ** (
    np.random.default_rng(1).integers(-60, 60, 100_000)
)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("factor", [0.7, 0.1, 0.9, 0.999, 1.001, 1.7, 1 / 3, 0.123456789, 1e10 + 0.1, 1.5, 2.0, np.pi])
@pytest.mark.parametrize("compiled", [True, False])
def test_it_is_the_product_of_double_precision(factor: float, compiled: bool) -> None:
    fn = lambda x: float64_product(x, factor)
    result = (jax.jit(fn) if compiled else fn)(jnp.asarray(X))
    np.testing.assert_array_equal(result, (X.astype(np.float64) * factor).astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(2.0**-60, 2.0**60, width=32))
def test_any_factor(factor: float, x: float) -> None:
    expected = np.float32(np.float64(np.float32(x)) * factor)
    assert np.asarray(float64_product(jnp.float32(x), factor)) == expected


def test_zero_infinity_and_overflow() -> None:
    x = jnp.array([0.0, np.inf, 3e38], jnp.float32)
    np.testing.assert_array_equal(float64_product(x, 1.7), [0, np.inf, np.inf])
