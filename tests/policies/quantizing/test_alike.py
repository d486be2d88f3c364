"""Calls on arrays that are alike share a loop, and give what they give alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.quantizing import CallArguments, map_alike

pytestmark = [pytest.mark.quick, pytest.mark.newest]


def scaled(kind: str, numbers: Any, arrays: Any, old: Any, shared: Any) -> Any:
    y = arrays[1].sum(0) if kind == "sum" else None
    return {"x": numbers[0] * arrays[0].astype(jnp.int32) + shared, "y": y, "old": None if old is None else old - 1}


def items_of(count: int, shape: tuple[int, ...], kind: str = "sum") -> list[CallArguments]:
    """Returns items, of which those of kind "none" have nothing old."""
    random = np.random.default_rng(count)

    def old(number: int) -> jax.Array | None:
        return None if kind == "none" else jnp.full(4, number)

    return [
        CallArguments(
            kind, (n,), (jnp.asarray(random.integers(9, size=shape)), jnp.full((2, 3), n, jnp.float32)), old(n)
        )
        for n in range(count)
    ]


def test_each_gets_its_own_result() -> None:
    items = [*items_of(4, (4, 5)), *items_of(2, (5, 4)), *items_of(3, (4, 5), "none"), *items_of(1, ())]
    items = [items[place] for place in (4, 0, 6, 1, 9, 7, 2, 8, 5, 3)]
    found = map_alike(scaled, items, jnp.int32(100))
    for item, result in zip(items, found, strict=True):
        np.testing.assert_array_equal(result["x"], item.numbers[0] * np.asarray(item.arrays[0]) + 100)
        assert (result["y"] is None) == (item.kind == "none")
        if item.kind == "sum":
            np.testing.assert_array_equal(result["y"], np.full(3, 2.0 * item.numbers[0]))
            np.testing.assert_array_equal(result["old"], np.full(4, item.numbers[0] - 1))


@pytest.mark.parametrize(
    ("count", "elements", "calls"), [(3, 10, 1), (60, 10, 1), (4, 2**23 - 6, 2), (3, 2**23 - 6, 2), (3, 2**24, 3)]
)
def test_a_stack_holds_so_many_elements_or_the_largest_array(count: int, elements: int, calls: int) -> None:
    struct = (jax.ShapeDtypeStruct((elements,), jnp.int32), jax.ShapeDtypeStruct((2, 3), jnp.float32))
    program = jax.make_jaxpr(
        lambda all_arrays: map_alike(scaled, [CallArguments("", (1,), x) for x in all_arrays], jnp.int32(0))
    )
    equations = program([struct] * count).eqns
    assert [x.params["name"] for x in equations if "name" in x.params].count("_mapped") == calls
