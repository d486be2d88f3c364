"""Slices of TPUs: names, shapes, rates, links; the compiler has a test of its own."""

import re
from typing import Any

import pytest

from jmp_train.tools.aot import TPUS, tpu_slice

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "devices"),
    [("v5e:1x1", 1), ("v5e:16x16", 256), ("v6e:2x4", 8), ("v3:2x2", 8), ("v4:2x2x1", 4), ("v5p:8x8x16", 1024),
     ("tpu7x:4x4x4", 128)],
)  # fmt: skip
def test_slices_have_devices(name: str, devices: int) -> None:
    found = tpu_slice(name)
    assert (found.name, found.devices) == (name, devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:3x3", "is no slice of TPUs: v5e has no slice of 3x3 chips; the nearest are v5e:2x4 and v5e:4x4"),
        ("v6e:32x32", "v6e has no slice of 32x32 chips; the nearest is v6e:16x16"),
        ("v5p:4x4", "v5p has no slice of 4x4 chips; the nearest is v5p:2x2x4"),
        ("v5p:8x4x4", "v5p has no slice of 8x4x4 chips; the nearest is v5p:4x4x8"),
        ("v5e", "'v5e' is no slice of TPUs: give the chips along each axis, as in 'v5e:2x2'"),
        ("v5e:2*2", "give the chips along each axis"),
        ("v5litepod:2x2", "the generations are v3, v4, v5e, v5p, v6e, tpu7x, as in "),
        ("", "the generations are v3, v4"),
    ],
)  # fmt: skip
def test_what_is_no_slice_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tpu_slice(name)


@pytest.mark.parametrize("generation", list(TPUS))
def test_the_table_is_consistent(generation: str) -> None:
    """A program fits into the memory that libtpu leaves, which is most of it; two devices of a chip have halves."""
    tpu = TPUS[generation]
    assert 0.9 * tpu.memory_bytes < tpu.program_bytes < tpu.memory_bytes
    assert tpu.devices == tpu.devices_per_chip
    assert 1e11 < tpu.bandwidth < 1e13
    assert all(1e13 < rate < 1e16 for rate in tpu.rates.values())
    assert tpu.rates["bfloat16"] <= min(tpu.rates.values())
    assert tpu.source


def test_float32_takes_one_three_or_six_passes_in_bfloat16() -> None:
    tpu = TPUS["v6e"]
    half = tpu.rates["bfloat16"]
    assert tpu.matrix_rate("bfloat16") == tpu.matrix_rate("float32") == tpu.matrix_rate("float16") == half
    assert tpu.matrix_rate("float32", precision="high") == half / 3
    assert tpu.matrix_rate("float32", precision="highest") == tpu.matrix_rate("float64") == half / 6
    assert tpu.matrix_rate("bfloat16", precision="highest") == half
    assert tpu.matrix_rate("int8") == tpu.matrix_rate("uint8") == 2 * half
    assert tpu.matrix_rate("float8_e4m3fn") == half
    assert TPUS["v5e"].matrix_rate("float8_e5m2") == TPUS["v5e"].rates["bfloat16"], "it has no units for float8"


@pytest.mark.parametrize(
    ("name", "extents", "links"),
    [
        ("v5e:4x4", (4, 4), 2),  # no axis wraps: one link along each
        ("v5e:4x4", (4, 1), 1),
        ("v5e:8x16", (8, 16), 3),  # the longer axis is that of a whole pod
        ("v5e:16x16", (16, 16), 4),
        ("v5e:16x16", (8, 16), 3),  # half of an axis is no ring
        ("v5p:2x2x2", (2, 2, 2), 3),
        ("v5p:4x4x8", (4, 4, 8), 6),
    ],
)
def test_links_of_a_block_of_chips(name: str, extents: Any, links: int) -> None:
    tpu = tpu_slice(name)
    assert tpu.bandwidth_over(extents) == links * tpu.chip_link_bandwidth


def test_devices_of_one_chip_share_its_links_and_its_memory() -> None:
    tpu = tpu_slice("tpu7x:2x2x1")
    assert tpu.bandwidth_over((2, 2, 1)) == 2 * tpu.chip_link_bandwidth / 2
    assert tpu.bandwidth_over((1, 1, 1)) == tpu.bandwidth
