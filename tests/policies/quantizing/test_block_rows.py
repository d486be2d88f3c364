"""Blocks in rows: bit for bit what each array alone gets, and only where no array can be shared by devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from pytrees import assert_bitwise_equal

from jmp_train.policies.quantizing import (
    BlockQuantized,
    dequantize,
    dequantize_rows,
    quantize,
    requantize,
    requantize_rows,
    row_groups,
)

pytestmark = [pytest.mark.quick, pytest.mark.newest]

# Whole blocks, blocks of other lengths, a last block that is not full, blocks across axes, no axis.
SHAPES = [(4, 512), (3, 700), (5, 67), (7, 3, 11), ()]


def arrays(dtype: str) -> list[np.ndarray]:
    """Returns an array of each shape, with numbers of many magnitudes and a block of NaN and one of inf."""
    random = np.random.default_rng(0)
    xs = [(random.normal(size=shape) * 10.0 ** random.integers(-9, 9, shape)).astype(np.float32) for shape in SHAPES]
    xs[0][0, 5], xs[1][2, 699] = np.nan, np.inf
    return [np.abs(x) for x in xs] if dtype == "uint8" else xs


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtypes", [("int8", "uint8"), ("float8_e4m3fn",), ("float8_e5m2",)])
@pytest.mark.parametrize("stochastic", [True, False])
def test_every_array_gets_what_it_gets_alone(dtypes: tuple[str, ...], stochastic: bool) -> None:
    xs = [x for dtype in dtypes for x in arrays(dtype)]
    names = [dtype for dtype in dtypes for _ in SHAPES]
    keys = jax.random.split(jax.random.key(3), len(xs)) if stochastic else None

    @jax.jit
    def run(xs: list[jax.Array]) -> tuple[list[BlockQuantized], ...]:
        old = [quantize(x, name, block_size=100) for x, name in zip(xs, names, strict=True)]
        # Some blocks change, others do not.
        new = [
            jnp.where(jnp.arange(x.size).reshape(x.shape) % 450 < 200, x, dequantize(y))
            for x, y in zip(xs, old, strict=True)
        ]
        each = [
            requantize(x, y, None if keys is None else keys[n]) for n, (x, y) in enumerate(zip(new, old, strict=True))
        ]
        return old, each, requantize_rows(new, old, keys)

    old, alone, together = run([jnp.asarray(x) for x in xs])
    for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):  # float8 has several NaNs
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))
    assert_bitwise_equal(*jax.jit(lambda x, y: (dequantize_rows(x), [dequantize(z) for z in y]))(together, alone))
    unchanged = [np.asarray(x.scales == y.scales).all() for x, y in zip(old, alone, strict=True)]
    assert not all(unchanged)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2"])
def test_an_unchanged_block_that_is_not_full_keeps_its_bits(dtype: str) -> None:
    first = jax.jit(lambda x: quantize(x, dtype, block_size=30))(arrays("int8")[2])
    assert first.codes.size % first.scales.size != 0
    again = jax.jit(lambda x: requantize(dequantize(x), x, jax.random.key(8)))(first)
    assert_bitwise_equal(again, first)


def test_only_small_arrays_on_one_device_are_in_rows() -> None:
    kinds = {0: (4, 512), 2: (4, 384), 3: (8, 512), 5: (1024, 1024), 7: (8, 384), 9: (4, 512)}
    structs = {
        number: jax.eval_shape(lambda x, n=number: quantize(x, "int8" if n < 9 else "float8_e5m2"), jnp.ones(shape))
        for number, shape in kinds.items()
    }
    groups = []

    def traced(x: jax.Array) -> jax.Array:
        groups.append(row_groups(structs, 256))
        return x

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    jax.eval_shape(jax.shard_map(traced, mesh=mesh, in_specs=P(), out_specs=P()), jnp.ones(8))
    assert groups == [[[0, 2, 3, 7]]]
    for devices in (1, 2):
        with jax.sharding.use_abstract_mesh(AbstractMesh((devices,), ("data",))):
            assert row_groups(structs, 256) == (groups[0] if devices == 1 else [])
    assert row_groups(structs, 256) == (groups[0] if jax.device_count() == 1 else [])
