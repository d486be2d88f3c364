"""Gradients of extremes: shared by equal numbers, and never lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.graphs.structure import are_largest, extreme_of_two, largest_over

pytestmark = pytest.mark.quick


def test_the_largest_share_a_gradient() -> None:
    rows = jnp.array([[1.0, 3.0, 3.0], [jnp.nan, 3.0, jnp.nan], [-jnp.inf] * 3])
    np.testing.assert_array_equal(are_largest(rows, 1), [[0, 1, 1], [1, 0, 1], [1, 1, 1]])
    value, pullback = jax.vjp(lambda x: largest_over(x, 1), rows)
    np.testing.assert_array_equal(value, [3, np.nan, -np.inf])
    (gradient,) = pullback(jnp.array([4.0, 6.0, jnp.inf]))
    np.testing.assert_array_equal(gradient, [[0, 2, 2], [3, 0, 3], [np.inf] * 3])


@pytest.mark.parametrize(("is_max", "wanted"), [(True, [0, 1, 0.5]), (False, [1, 0, 0.5])])
def test_the_extreme_of_two_has_the_gradient_of_jnp(is_max: bool, wanted: list[float]) -> None:
    left, right = jnp.array([1.0, 3.0, 2.0]), jnp.array([2.0, 2.0, 2.0])
    value, tangent = jax.jvp(lambda x, y: extreme_of_two(is_max, x, y), (left, right), (jnp.ones(3), jnp.zeros(3)))
    np.testing.assert_array_equal(value, (jnp.maximum if is_max else jnp.minimum)(left, right))
    np.testing.assert_array_equal(tangent, wanted)


def test_a_gradient_needs_no_equal_number() -> None:
    """XLA may round the number that is compared unlike the one that was reduced."""

    def gradient(reduce: Any) -> str:
        return str(jax.make_jaxpr(jax.grad(lambda x: reduce(x).sum()))(jnp.ones((2, 3))))

    assert "argmax" in gradient(lambda x: largest_over(x, 1))
    assert " eq " not in gradient(lambda x: extreme_of_two(True, x[0], x[1]))
