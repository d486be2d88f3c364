"""Edges find their segments through blocks, however an incidence is built; those out of range count nowhere.

Gradients of extremes: shared by equal numbers, and never lost.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.graphs.structure import are_largest, extreme_of_two, largest_over
from jmp_train.graphs.structure.edge_order import fixed_incidence, incidence_of, padded_incidence
from jmp_train.graphs.structure.incidence import Incidence

pytestmark = pytest.mark.quick

SEGMENTS = 6
COUNTS = {"few": [3, 0, 32, 1, 0, 2], "blocks": [70, 0, 33, 64, 1, 0], "blocks of blocks": [1200, 5, 0, 1100, 32, 33]}
BUILDERS: dict[str, Callable[[np.ndarray], Incidence]] = {
    "traced": lambda ids: jax.jit(incidence_of, static_argnums=1)(ids, SEGMENTS),
    "fixed": lambda ids: fixed_incidence(ids, SEGMENTS),
    "padded": lambda ids: padded_incidence(ids[(ids >= 0) & (ids < SEGMENTS)], SEGMENTS, len(ids)),
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_edges_have_their_segments_and_those_out_of_range_none(counts: list[int], name: str) -> None:
    outside = 80  # more than two blocks
    ids = np.repeat([*range(SEGMENTS), SEGMENTS, -1], [*counts, outside - 7, 7])
    ids = np.random.default_rng(0).permutation(ids).astype(np.int32)
    made = BUILDERS[name](ids)
    if name == "padded":  # which has the edges in range first
        ids = np.concatenate([ids[(ids >= 0) & (ids < SEGMENTS)], np.full(outside, SEGMENTS)])
    is_counted = (ids >= 0) & (ids < SEGMENTS)

    @jax.jit
    def run(incidence: Incidence) -> list[Any]:
        rows = jnp.arange(SEGMENTS, dtype=jnp.float32) + 1
        return [incidence.ids, incidence.is_counted, incidence.sum(jnp.ones(len(ids))), incidence.read(rows)]

    segments, counted, sums, read = run(made)
    assert made.degrees.tolist() == counts
    np.testing.assert_array_equal(segments, np.where(is_counted, ids, SEGMENTS))
    np.testing.assert_array_equal(counted, is_counted)
    np.testing.assert_array_equal(sums, counts)
    np.testing.assert_array_equal(read, np.where(is_counted, ids + 1, 0))


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
