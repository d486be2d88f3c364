"""Draws are those of `jax.random`, bit for bit, whatever the key and the configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pytrees import assert_bitwise_equal

from jmp_train.policies.quantizing import fold_in_each
from jmp_train.policies.quantizing.rounding import bits16, uniform

pytestmark = [pytest.mark.quick, pytest.mark.newest]

KEYS = {
    "typed": lambda: jax.random.key(3),
    "uint32": lambda: jax.random.PRNGKey(3),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("partitionable", [True, False])
def test_draws_are_those_of_jax(key: str, partitionable: bool) -> None:
    with jax.threefry_partitionable(partitionable):
        for shape in ((), (7,), (3, 5, 11)):
            mine, others = jax.jit(
                lambda key, shape=shape: (
                    (uniform(key, shape), bits16(key, shape)),
                    (jax.random.uniform(key, shape), jax.random.bits(key, shape, "uint16")),
                )
            )(KEYS[key]())
            assert_bitwise_equal(mine, others)


@pytest.mark.parametrize("key", KEYS)
def test_keys_are_those_of_fold_in(key: str) -> None:
    numbers = [0, 5, 2**31, 2**32 - 1]
    keys = fold_in_each(KEYS[key](), numbers)
    for row, number in enumerate(numbers):
        assert_bitwise_equal(keys[row], jax.random.fold_in(KEYS[key](), np.uint32(number)))


def test_a_program_of_draws_is_one_kernel_without_loops() -> None:
    program = jax.jit(lambda key: uniform(key, (64, 64))).lower(jax.random.key(0)).as_text()
    assert "while" not in program
    assert "while" in jax.jit(lambda key: jax.random.uniform(key, (64, 64))).lower(jax.random.key(0)).as_text()
    assert jnp.issubdtype(uniform(jax.random.key(0), (2,)).dtype, jnp.float32)
