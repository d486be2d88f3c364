"""Functions of arrays of features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.graphs.structure import root_or_zero

pytestmark = pytest.mark.quick


def test_a_root_of_nothing_is_0_and_so_are_its_derivatives() -> None:
    data = np.array([4.0, 1e-30, 0.0, -1.0, np.nan, np.inf], np.float32)
    found = [jax.vmap(fn)(data) for fn in (root_or_zero, jax.grad(root_or_zero), jax.grad(jax.grad(root_or_zero)))]
    positive = data[:2].astype(np.float64)
    with np.errstate(over="ignore"):  # the second derivative of 1e-30 is -inf in float32
        derivatives = [
            (f(positive)).astype(np.float32) for f in (np.sqrt, lambda x: x**-0.5 / 2, lambda x: -(x**-1.5) / 4)
        ]
    for values, wanted in zip(found, derivatives, strict=True):
        np.testing.assert_allclose(values[:2], wanted, rtol=1e-6)
        np.testing.assert_array_equal(values[2:5], [0, 0, np.nan])
    assert [float(values[5]) for values in found] == [np.inf, 0, 0]


def test_no_comparison_decides_a_root() -> None:
    """XLA may compute an operand twice, rounded differently: the std of equal messages was 1 with two comparisons."""
    program = jax.make_jaxpr(root_or_zero)(jnp.ones(2)).eqns[0].params["call_jaxpr"]
    assert [equation.primitive.name for equation in program.eqns] == ["max", "sqrt"]
