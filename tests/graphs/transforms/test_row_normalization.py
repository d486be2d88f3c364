from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from jmp_train.graphs import normalize_rows

pytestmark = pytest.mark.quick


def test_rows_of_counts_are_planetoids() -> None:
    """By the product with a diagonal matrix of inverse sums, 0 where a row is empty."""
    counts = np.random.default_rng(0).poisson(0.2, (40, 12)).astype(np.float32)
    counts[3] = 0
    sums = counts.sum(axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(sums == 0, 0, 1 / sums.astype(np.float64))
    wanted: Any = scipy.sparse.diags_array(inverse) @ scipy.sparse.csr_array(counts)
    found = normalize_rows(counts)
    assert (type(found), found.dtype) == (np.ndarray, np.float32)
    np.testing.assert_allclose(found, wanted.toarray(), rtol=1e-7)
    assert not found[3].any()
    np.testing.assert_allclose(found.sum(axis=1), sums > 0, rtol=1e-6)


def test_signs_stay_and_what_cancels_is_not_blown_up() -> None:
    rows = np.array([[1, -1], [-3, -1], [3, -1]], np.float32)
    wanted = [[0.5, -0.5], [-0.75, -0.25], [0.75, -0.25]]
    assert normalize_rows(rows).tolist() == wanted
    assert rows.tolist() == [[1, -1], [-3, -1], [3, -1]]  # the caller's, still as they were


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_half_rows_are_upcast_added_and_stay_half(dtype: str, make: Any) -> None:
    """5,000 ones add up to 5,000, and a sum beyond float16 still divides."""
    ones, large = np.ones((2, 5_000)), np.full((2, 5_000), 60_000.0)
    for rows in (ones, large):
        found = normalize_rows(make(rows.astype(jnp.dtype(dtype))))
        assert isinstance(found, type(make(ones)))
        assert found.dtype == dtype
        exact = np.full((2, 5_000), np.float32(1 / 5_000)).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(found), exact)


def test_sums_beyond_float32_and_infinities() -> None:
    rows = np.array([[3e38, 3e38], [np.inf, 1], [1, 1]], np.float32)
    np.testing.assert_array_equal(normalize_rows(rows), [[0.5, 0.5], [np.nan, 0], [0.5, 0.5]])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing(shape: tuple[int, int]) -> None:
    assert normalize_rows(jnp.ones(shape)).shape == shape


def test_what_has_no_rows_of_floats_is_refused() -> None:
    with pytest.raises(TypeError, match="features must be an array, got list"):
        normalize_rows([[1.0]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="features must be floating, got int64"):
        normalize_rows(np.ones((2, 2), np.int64))
    with pytest.raises(ValueError, match=r"must have shape \[nodes, width\], got shape \(2,\)"):
        normalize_rows(np.ones(2))
    with pytest.raises(TypeError, match="features is traced: call normalize_rows outside of jit"):
        jax.jit(normalize_rows)(jnp.ones((2, 2)))
